-- Drawn slots by staleness, in at most $num_bins bars of whole steps: first and last staleness of each bar.
WITH
-- how many steps of staleness one bar holds
width AS (
    SELECT greatest(1, ceil((max(staleness) + 1) / $num_bins)::BIGINT) AS width FROM report_batches
)
SELECT staleness // width * width AS first, staleness // width * width + width - 1 AS last, count(*) AS num_slots
FROM report_batches, width
GROUP BY ALL
ORDER BY 1;
