-- One row: seconds that the Trainer spent on each activity, from the first step of each attempt to its last. The time
-- between attempts counts for none.
WITH
-- each attempt by itself
attempts AS (
    SELECT epoch(max(ended_at) - min(started_at)) AS present_s FROM report_steps GROUP BY attempt
)
SELECT
    (SELECT sum(present_s) FROM attempts) AS present_s,
    coalesce(sum(step_s), 0) AS step_s,
    -- without the wait before an attempt's first step, which is before its presence
    coalesce(
        sum(wait_s)
            FILTER (step > (SELECT min(step) FROM report_steps AS same WHERE same.attempt = report_steps.attempt)),
        0
    ) AS wait_s
FROM report_steps;
