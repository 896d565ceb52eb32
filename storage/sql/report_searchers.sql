-- Seconds that each Searcher spent on each activity, from its first round to its last.
SELECT
    searcher,
    count(*) AS num_rounds,
    sum(num_trajectories)::BIGINT AS num_trajectories,
    sum(num_response_tokens)::BIGINT AS num_response_tokens,
    epoch(max(ended_at) - min(started_at)) AS present_s,
    sum(greatest(epoch(sampling_ended_at - started_at), 0)) AS sampling_s, -- 0: sampled while the round before was scored
    sum(epoch(ended_at - greatest(sampling_ended_at, started_at))) AS scoring_s -- its engine samples the next round
FROM report_rounds
GROUP BY searcher
ORDER BY searcher;
