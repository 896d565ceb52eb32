-- The rows of a folder of the ledger that count, each once. Upkeep writes many entries as one file, and deletes them later
-- (storage/ledger_upkeep.py). counting_parts of storage/ledger_files.py is the same rule in Python.
CREATE VIEW stored_{table} AS
WITH
-- compacted files, with their groups and numbers
compacted AS (
    SELECT filename, parts.part_group, parts.first_number, parts.last_number
    FROM (
        SELECT file AS filename, regexp_extract(
            parse_filename(file), '^(.+)-(\d{{8}})-(\d{{8}})\.parquet$', ['part_group', 'first_number', 'last_number']
        ) AS parts
        FROM glob('{pattern}/{folder}/compacted/*.parquet')
    )
    WHERE parts.first_number != '' AND {condition}
),
-- of those inside one another, the widest
counting AS (
    FROM compacted
    WHERE NOT EXISTS (
        SELECT 1
        FROM compacted AS wider
        WHERE wider.part_group = compacted.part_group
            AND (wider.first_number, wider.last_number) != (compacted.first_number, compacted.last_number)
            AND wider.first_number <= compacted.first_number
            AND wider.last_number >= compacted.last_number
    )
),
compacted_rows AS (
    FROM stored_files_{table}
    WHERE regexp_matches(filename, '/compacted/[^/]+$') AND filename IN (SELECT filename FROM counting)
),
held AS (
    SELECT DISTINCT {group} AS held_group, {number} AS held_number FROM compacted_rows
)
SELECT {columns} FROM compacted_rows
UNION ALL
SELECT {columns}
FROM stored_files_{table}
WHERE NOT regexp_matches(filename, '/compacted/[^/]+$')
    AND NOT EXISTS (SELECT 1 FROM held WHERE held_group = {group} AND held_number = {number});
