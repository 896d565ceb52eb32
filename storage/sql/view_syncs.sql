-- The syncs that count.
CREATE VIEW syncs AS
SELECT *
FROM stored_syncs
WHERE counts(stored_syncs.attempt, stored_syncs.step);

COMMENT ON VIEW syncs IS 'One row for each Searcher in a sync: the rounds that the buffer took in. A gap between rounds begins another row.';
COMMENT ON COLUMN syncs.attempt IS 'Attempt of the Trainer that took the rounds in.';
COMMENT ON COLUMN syncs.sync IS 'Number of the sync, from 1.';
COMMENT ON COLUMN syncs.step IS 'The first training step that could draw from these rounds.';
COMMENT ON COLUMN syncs.searcher IS 'Searcher of the rounds.';
COMMENT ON COLUMN syncs.first_round IS 'First round that was taken in.';
COMMENT ON COLUMN syncs.last_round IS 'Last round that was taken in; all rounds between were, too.';
COMMENT ON COLUMN syncs.num_trajectories IS 'Trajectories that the whole sync took in, repeated in each of its rows; NULL in runs of an older version.';
