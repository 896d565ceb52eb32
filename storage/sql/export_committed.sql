-- The trajectories that count, each once. Shards that expired or were compacted keep their files for a while
-- (storage/upkeep.py), refused shards for ever (storage/intake.py). committed_files of storage/shards.py is the same rule in
-- Python. Patterns match only the part of a path after the run's folder, because the folder's own path may have any text.
CREATE VIEW stored_trajectories AS
WITH
-- the rounds that a compacted file holds
blocks AS (
    SELECT parts.searcher, parts.first_round::BIGINT AS first_round, parts.last_round::BIGINT AS last_round
    FROM (
        SELECT regexp_extract(
            parse_filename(filename), '^(.+)-(\d{{8}})-(\d{{8}})\.parquet$', ['searcher', 'first_round', 'last_round']
        ) AS parts
        FROM glob('{pattern}/trajectories/compacted/*.parquet') AS files (filename)
        WHERE {condition} -- of a torn one the shards count
    )
    -- files with other names are not read
    WHERE parts.first_round != '' AND parts.first_round::BIGINT % {block} = 0
        AND parts.last_round::BIGINT = parts.first_round::BIGINT + {block} - 1
),
-- per searcher the last round that was marked as expired
marks AS (
    SELECT parts.searcher, max(parts.last_round::BIGINT) AS last_round
    FROM (
        SELECT regexp_extract(file, '/searcher=([^/]+)/through=(\d{{8}})\.json$', ['searcher', 'last_round']) AS parts
        FROM glob('{pattern}/expired/*/through=*.json')
    )
    WHERE parts.last_round != ''
    GROUP BY parts.searcher
),
-- the rounds that the Trainer's intake refused; names of rounds that the quality gate refused have a suffix
refused AS (
    SELECT parts.searcher, parts.round::BIGINT AS round
    FROM (
        SELECT regexp_extract(file, '/searcher=([^/]+)/round=(\d{{8}})\.json$', ['searcher', 'round']) AS parts
        FROM glob('{pattern}/quarantine/*/round=*.json')
    )
    WHERE parts.round != ''
),
-- the last expired rounds, lowered so that no compacted file is cut
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
    AND NOT EXISTS (SELECT 1 FROM refused WHERE refused.searcher = files.searcher AND refused.round = files.round)
    AND (
        starts_with(files.filename, '{run}/trajectories/compacted/')
        OR NOT EXISTS (
            SELECT 1
            FROM blocks
            WHERE blocks.searcher = files.searcher AND files.round BETWEEN blocks.first_round AND blocks.last_round
        )
    );
