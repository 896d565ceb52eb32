-- Rows are deleted by `record`, which is unique, and not by rowid: after some hundred deletions of most of a table, DuckDB
-- 2.0 crashes if a join filters by rowid.
DELETE FROM trajectories
WHERE record IN (SELECT record FROM superseded);
