-- Response tokens a second over the run's wall time, in $num_bins bins: those sampled and those trained on. The tokens of a
-- round are spread over its sampling, those of a step over the step.
WITH
work AS (
    SELECT sampling_started_at AS began, sampling_ended_at AS ended, num_response_tokens AS sampled, 0 AS trained
    FROM report_rounds
    UNION ALL
    SELECT started_at, ended_at, 0, num_response_tokens FROM report_steps
),
span AS (
    SELECT min(began) AS first, greatest(epoch(max(ended) - min(began)), 1e-3) AS seconds
    FROM work
    HAVING count(*) > 0
),
-- in seconds since the first one's begin; a millisecond at least
placed AS (
    SELECT
        epoch(began - first) AS from_s,
        greatest(epoch(ended - first), epoch(began - first) + 1e-3) AS to_s,
        sampled,
        trained
    FROM work, span
),
bins AS (
    SELECT seconds * number / $num_bins AS from_s, seconds * (number + 1) / $num_bins AS to_s
    FROM range($num_bins) AS numbers(number), span
),
parts AS (
    SELECT
        bins.from_s,
        bins.to_s,
        greatest(least(bins.to_s, placed.to_s) - greatest(bins.from_s, placed.from_s), 0)
            / (placed.to_s - placed.from_s) AS share,
        sampled,
        trained
    FROM bins LEFT JOIN placed ON placed.from_s < bins.to_s AND placed.to_s > bins.from_s
)
SELECT
    (from_s + to_s) / 2 AS at_s,
    coalesce(sum(sampled * share), 0) / (to_s - from_s) AS sampled_per_s,
    coalesce(sum(trained * share), 0) / (to_s - from_s) AS trained_per_s
FROM parts
GROUP BY from_s, to_s
ORDER BY at_s;
