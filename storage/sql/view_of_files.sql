-- One table of a run, as whatever Parquet files there are when it is asked; none are no rows. A file of an older version
-- has NULL in the columns that it lacks. A condition on constants and `filename` keeps DuckDB from opening a file.
-- {{…}} is filled in by storage/export.py: a view takes no parameters.
CREATE VIEW stored_{table} AS
WITH
-- the columns, though there be no file to read them from
columns AS (
    SELECT {typed_nulls}, NULL::VARCHAR AS filename WHERE false
),
-- where there is no file, read_parquet has no column `filename`, and the condition looks at this one
none AS (
    SELECT NULL::VARCHAR AS filename
)
SELECT {columns}
FROM (
    FROM columns
    UNION ALL BY NAME
    SELECT files.*
    FROM
        none,
        LATERAL (
            FROM read_parquet(
                '{files}',
                schema = MAP {{{schema}}},
                allow_empty = true,
                hive_partitioning = false,
                filename = true
            )
            WHERE {condition}
        ) AS files
);
