-- The drawn slots, in at most $num_bins points over the steps: staleness, share of recent slots, rewards of recent and of
-- replayed slots; and log-probability gaps of the drawn responses, in nats a response: behavior - reference, policy -
-- reference, and policy - behavior, the distance of the trained policy from the policies that sampled.
WITH
span AS (
    SELECT min(step) AS first, max(step) AS last FROM report_batches
),
-- by step, because the ledger has one gap of the policy for each step
steps AS (
    SELECT
        step,
        avg(behavior_logprob - reference_logprob) AS behavior_gap,
        count(*) = count(behavior_logprob) AS is_whole -- the ledger's gap is of all slots, expired ones included
    FROM report_batches LEFT JOIN report_trajectories USING (trajectory_id)
    GROUP BY step
),
gaps AS (
    SELECT
        (step - first) * $num_bins // (last - first + 1) AS bin,
        avg(behavior_gap) AS behavior_reference_gap,
        avg(logprob_gap_mean) AS policy_reference_gap,
        avg(logprob_gap_mean - behavior_gap) FILTER (is_whole) AS policy_behavior_gap
    FROM steps LEFT JOIN report_steps USING (step), span
    GROUP BY bin
),
-- staleness, share and reward of the slots
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
