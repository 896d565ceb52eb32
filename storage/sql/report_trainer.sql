-- One row: where the Trainer's time went, from its first step to its last. What a resumed run stood still is nobody's.
WITH
-- each life apart
attempts AS (
    SELECT epoch(max(ended_at) - min(started_at)) AS present_s FROM report_steps GROUP BY attempt
)
SELECT
    (SELECT sum(present_s) FROM attempts) AS present_s,
    coalesce(sum(step_s), 0) AS step_s,
    -- the wait before a life's first step is before its presence
    coalesce(
        sum(wait_s)
            FILTER (step > (SELECT min(step) FROM report_steps AS same WHERE same.attempt = report_steps.attempt)),
        0
    ) AS wait_s
FROM report_steps;
