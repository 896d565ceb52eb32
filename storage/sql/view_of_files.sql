-- One table of a run, as whatever Parquet files there are when it is asked; none are no rows. {{…}} is filled in by
-- storage/export.py: a view takes no parameters.
CREATE VIEW stored_{table} AS
WITH
-- the columns, though there be no file to read them from
columns AS (
    SELECT {typed_nulls}, NULL::VARCHAR AS filename WHERE false
)
SELECT {columns}
FROM (
    FROM columns
    UNION ALL BY NAME
    FROM read_parquet('{folder}/**/*.parquet', allow_empty = true, hive_partitioning = false, filename = true)
);
