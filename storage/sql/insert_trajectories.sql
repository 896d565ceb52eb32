-- Indexes the trajectories of `arrivals` (an Arrow table with the columns below, and prompt_id in place of prompt).
INSERT INTO trajectories BY NAME
SELECT
    prompt,
    sync,
    policy_step,
    ages_from,
    trajectory_id,
    md5_number_upper(trajectory_id) AS key,
    response_digest,
    reward,
    1 AS num_copies,
    record
FROM arrivals
JOIN prompts USING (prompt_id);
