-- One table of a run, read from the Parquet files that exist when the view is queried; without files it has no rows. A file
-- of an older version has NULL in the columns that it lacks. DuckDB does not open a file that a condition on `filename` and
-- constants excludes.
-- {{…}} is filled in by storage/export.py: a view takes no parameters.
CREATE VIEW stored_{table} AS
WITH
-- the columns, for a run without such files
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
