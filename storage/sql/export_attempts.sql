-- Attempts of the Trainer, read from the trainer/attempt=….json files that exist when the view is queried.
CREATE VIEW stored_attempts AS
WITH
-- the columns, for a run without such files
columns AS (
    SELECT
        NULL::BIGINT AS attempt,
        NULL::BIGINT AS resumed_from,
        NULL::STRUCT(host VARCHAR, pid BIGINT) AS owner,
        NULL::TIMESTAMPTZ AS created_at
    WHERE false
),
-- one row a file
records AS (
    FROM columns
    UNION ALL BY NAME
    FROM read_json(
        '{folder}/attempt={digits}.json',
        allow_empty = true,
        columns = {{
            attempt: 'BIGINT',
            resumed_from: 'BIGINT',
            owner: 'STRUCT(host VARCHAR, pid BIGINT)',
            created_at: 'TIMESTAMPTZ'
        }}
    )
)
SELECT attempt, resumed_from, owner.host AS host, owner.pid AS pid, created_at
FROM records
WHERE attempt <= 1_000 + (SELECT count(*) FROM records); -- first_stray of storage/paths.py
