-- Indexes the prompts of `arrivals` that are not indexed yet. Their numbers follow the last one.
INSERT INTO prompts
SELECT
    (SELECT count(*) FROM prompts) + row_number() OVER (ORDER BY prompt_id) - 1,
    prompt_id,
    md5_number_upper(prompt_id),
    NULL,
    NULL,
    NULL,
    NULL,
    NULL
FROM (SELECT DISTINCT prompt_id FROM arrivals) AS arrived_prompts
ANTI JOIN prompts USING (prompt_id)
RETURNING prompt, prompt_id;
