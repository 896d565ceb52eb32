-- The syncs that count.
CREATE VIEW syncs AS
SELECT *
FROM stored_syncs
WHERE counts(stored_syncs.attempt, stored_syncs.step);

COMMENT ON VIEW syncs IS 'One row a searcher in a sync: the rounds that the buffer took in; more rows where a round is missing between them.';
COMMENT ON COLUMN syncs.attempt IS 'Which life of the Trainer took them in.';
COMMENT ON COLUMN syncs.sync IS 'Number of the sync, from 1.';
COMMENT ON COLUMN syncs.step IS 'The first training step that could draw it.';
COMMENT ON COLUMN syncs.searcher IS 'Whose rounds.';
COMMENT ON COLUMN syncs.first_round IS 'First round taken in.';
COMMENT ON COLUMN syncs.last_round IS 'Last round taken in; those between were too.';
COMMENT ON COLUMN syncs.num_trajectories IS 'Trajectories that the whole sync took in, the same in each of its rows; NULL in runs of an older version.';
