-- What was drawn, in at most $num_bins points over the steps: age, share and reward of the recent and the replayed,
-- and how much likelier the drawn responses were than under the reference, in nats a response: to the policies that
-- sampled them, to the policy that trained on them, and the difference of the two, which is how far off-policy it trained.
WITH
span AS (
    SELECT min(step) AS first, max(step) AS last FROM report_batches
),
-- by step, because the Trainer's own gap is one number a step
steps AS (
    SELECT step, avg(behavior_logprob - reference_logprob) AS behavior_gap
    FROM report_batches LEFT JOIN report_trajectories USING (trajectory_id)
    GROUP BY step
),
gaps AS (
    SELECT
        (step - first) * $num_bins // (last - first + 1) AS bin,
        avg(behavior_gap) AS behavior_reference_gap,
        avg(logprob_gap_mean) AS policy_reference_gap,
        avg(logprob_gap_mean - behavior_gap) AS policy_behavior_gap
    FROM steps LEFT JOIN report_steps USING (step), span
    GROUP BY bin
),
-- of the slots
draws AS (
    SELECT
        (step - first) * $num_bins // (last - first + 1) AS bin,
        max(step) AS step,
        avg(recent::INTEGER) AS recent_share,
        avg(reward) FILTER (recent) AS recent_reward,
        avg(reward) FILTER (NOT recent) AS replayed_reward,
        quantile_cont(staleness, 0.1) AS staleness_low,
        quantile_cont(staleness, 0.5) AS staleness_median,
        quantile_cont(staleness, 0.9) AS staleness_high
    FROM report_batches, span
    GROUP BY bin
)
SELECT * EXCLUDE (bin)
FROM draws JOIN gaps USING (bin)
ORDER BY step;
