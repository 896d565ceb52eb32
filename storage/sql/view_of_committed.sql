-- The trajectories that count, each once: what has expired or was compacted stays in its old file for a while
-- (storage/upkeep.py; committed_paths of storage/shards.py is the same in Python).
CREATE VIEW stored_trajectories AS
WITH
-- the rounds that a compacted file holds
blocks AS (
    SELECT parts.searcher, parts.first_round::BIGINT AS first_round, parts.last_round::BIGINT AS last_round
    FROM (
        SELECT regexp_extract(
            file, 'compacted/(.+)-(\d+)-(\d+)\.parquet', ['searcher', 'first_round', 'last_round']
        ) AS parts
        FROM glob('{run}/trajectories/compacted/*.parquet')
    )
),
-- per searcher the last round that was marked as expired
marks AS (
    SELECT parts.searcher, max(parts.last_round::BIGINT) AS last_round
    FROM (
        SELECT regexp_extract(file, 'searcher=([^/]+)/through=(\d+)', ['searcher', 'last_round']) AS parts
        FROM glob('{run}/expired/*/through=*.json')
    )
    GROUP BY parts.searcher
),
-- lowered to where no compacted file is cut
expired AS (
    SELECT marks.searcher, coalesce(blocks.first_round - 1, marks.last_round) AS last_round
    FROM marks
    LEFT JOIN blocks
        ON blocks.searcher = marks.searcher
        AND marks.last_round + 1 BETWEEN blocks.first_round AND blocks.last_round
)
SELECT {columns}
FROM stored_files AS files
WHERE
    NOT EXISTS (
        SELECT 1 FROM expired WHERE expired.searcher = files.searcher AND files.round <= expired.last_round
    )
    AND (
        files.filename LIKE '%/trajectories/compacted/%'
        OR NOT EXISTS (
            SELECT 1
            FROM blocks
            WHERE blocks.searcher = files.searcher AND files.round BETWEEN blocks.first_round AND blocks.last_round
        )
    );
