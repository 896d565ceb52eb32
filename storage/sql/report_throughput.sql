-- Response tokens a second over the run's wall time, in $num_bins bins: those sampled and those trained on.
WITH
-- tokens, at the time they were done
done AS (
    SELECT ended_at AS done_at, num_response_tokens AS sampled, 0 AS trained FROM report_rounds
    UNION ALL
    SELECT ended_at, 0, num_response_tokens FROM report_steps
),
span AS (
    SELECT min(done_at) AS began, greatest(epoch(max(done_at) - min(done_at)), 1e-3) AS seconds FROM done
)
SELECT
    (bin + 0.5) * any_value(seconds) / $num_bins AS at_s,
    sum(sampled) / any_value(seconds) * $num_bins AS sampled_per_s,
    sum(trained) / any_value(seconds) * $num_bins AS trained_per_s
FROM (
    SELECT *, least($num_bins - 1, floor(epoch(done_at - began) / seconds * $num_bins)) AS bin FROM done, span
)
GROUP BY bin
ORDER BY bin;
