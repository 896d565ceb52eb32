-- Seconds that each Searcher spent on each activity, from its first round to its last.
SELECT
    searcher,
    count(*) AS num_rounds,
    sum(num_trajectories)::BIGINT AS num_trajectories,
    sum(num_response_tokens)::BIGINT AS num_response_tokens,
    epoch(max(ended_at) - min(started_at)) AS present_s,
    sum(epoch(sampling_ended_at - sampling_started_at)) AS sampling_s,
    sum(epoch(ended_at - sampling_ended_at)) AS scoring_s,
    sum(epoch(sampling_started_at - started_at)) AS preparing_s
FROM report_rounds
GROUP BY searcher
ORDER BY searcher;
