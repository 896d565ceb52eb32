-- The committed search rounds. Rows of another program's file have no times and are left out.
CREATE VIEW search_rounds AS
SELECT * REPLACE (
    coalesce(sampling_started_at, started_at) AS sampling_started_at,
    coalesce(sampling_ended_at, ended_at) AS sampling_ended_at
)
FROM stored_search_rounds
WHERE searcher IS NOT NULL AND started_at BETWEEN TIMESTAMPTZ '1900-01-01' AND TIMESTAMPTZ '9999-01-01'
    AND ended_at BETWEEN TIMESTAMPTZ '1900-01-01' AND TIMESTAMPTZ '9999-01-01';

COMMENT ON VIEW search_rounds IS 'One row for each committed search round.';
COMMENT ON COLUMN search_rounds.searcher IS 'Name of the Searcher.';
COMMENT ON COLUMN search_rounds.round IS 'Number of the Searcher''s round, from 0.';
COMMENT ON COLUMN search_rounds.policy_step IS 'Step of the policy that the engine served when the Searcher turned to the round.';
COMMENT ON COLUMN search_rounds.started_at IS 'When the Searcher turned to the round, UTC.';
COMMENT ON COLUMN search_rounds.sampling_started_at IS 'When the engine had sampled the round before, UTC: perhaps before started_at, while that one was scored.';
COMMENT ON COLUMN search_rounds.sampling_ended_at IS 'When sampling ended, UTC.';
COMMENT ON COLUMN search_rounds.ended_at IS 'When scoring ended and the round could be committed, UTC.';
COMMENT ON COLUMN search_rounds.num_trajectories IS 'Trajectories in the round.';
COMMENT ON COLUMN search_rounds.num_response_tokens IS 'Response tokens that were sampled in the round, also those of near duplicates that were not stored.';
COMMENT ON COLUMN search_rounds.reward_mean IS 'Mean reward of the responses that were sampled in the round.';
