-- The best, worst and most trained trajectories, $num_examples of each kind, at most one for each prompt. Of equal rewards
-- the best come by the lowest log-probability under the reference policy (the policy has learned them), the worst by the
-- highest log-probability when they were sampled (the policy was sure, and wrong).
WITH
-- number of draws of each trajectory
draws AS (
    SELECT trajectory_id, count(*) AS num_draws FROM report_batches GROUP BY trajectory_id
),
counted AS (
    SELECT report_trajectories.*, coalesce(num_draws, 0) AS num_draws
    FROM report_trajectories LEFT JOIN draws USING (trajectory_id)
),
-- for each kind one trajectory of each prompt
candidates AS (
    (SELECT DISTINCT ON (prompt_id) 'best' AS kind, * FROM counted ORDER BY reward DESC, reference_logprob, trajectory_id)
    UNION ALL
    (SELECT DISTINCT ON (prompt_id) 'worst' AS kind, * FROM counted ORDER BY reward, behavior_logprob DESC, trajectory_id)
    UNION ALL
    (SELECT DISTINCT ON (prompt_id) 'most trained' AS kind, * FROM counted WHERE num_draws > 0
     ORDER BY num_draws DESC, trajectory_id)
),
-- in their order, the first of each kind
chosen AS (
    SELECT
        *,
        row_number() OVER (
            PARTITION BY kind
            ORDER BY
                CASE kind WHEN 'best' THEN -reward WHEN 'worst' THEN reward ELSE -num_draws END,
                CASE kind WHEN 'best' THEN reference_logprob WHEN 'worst' THEN -behavior_logprob ELSE 0 END,
                trajectory_id
        ) AS place
    FROM candidates
    QUALIFY place <= $num_examples
)
SELECT chosen.*, prompt, response
FROM chosen JOIN trajectories USING (trajectory_id)
ORDER BY kind, place;
