-- Seconds that each Searcher spent on each activity, from its first round of each attempt to its last. The time between
-- attempts counts for none.
WITH
rounds AS (
    SELECT report_rounds.*, attempts.attempt
    FROM report_rounds ASOF LEFT JOIN attempts ON report_rounds.started_at >= attempts.created_at
),
presences AS (
    SELECT searcher, epoch(max(ended_at) - min(started_at)) AS present_s FROM rounds GROUP BY searcher, attempt
),
totals AS (
    SELECT searcher, sum(present_s) AS present_s FROM presences GROUP BY searcher
)
SELECT
    searcher,
    count(*) AS num_rounds,
    sum(num_trajectories)::BIGINT AS num_trajectories,
    sum(num_response_tokens)::BIGINT AS num_response_tokens,
    any_value(present_s) AS present_s,
    sum(greatest(epoch(sampling_ended_at - started_at), 0)) AS sampling_s, -- 0: sampled while the round before was scored
    sum(epoch(ended_at - greatest(sampling_ended_at, started_at))) AS scoring_s -- its engine samples the next round
FROM rounds JOIN totals USING (searcher)
GROUP BY searcher
ORDER BY searcher;
