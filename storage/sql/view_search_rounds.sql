-- One row a committed search round. A row of a file of another program has no times.
CREATE VIEW search_rounds AS
SELECT *
FROM stored_search_rounds
WHERE searcher IS NOT NULL AND started_at IS NOT NULL AND ended_at IS NOT NULL;

COMMENT ON VIEW search_rounds IS 'One row a committed search round.';
COMMENT ON COLUMN search_rounds.searcher IS 'Who searched.';
COMMENT ON COLUMN search_rounds.round IS 'Its round, counted from 0.';
COMMENT ON COLUMN search_rounds.policy_step IS 'Step of the policy that was served.';
COMMENT ON COLUMN search_rounds.started_at IS 'When the round began, UTC.';
COMMENT ON COLUMN search_rounds.sampling_started_at IS 'When sampling began, UTC.';
COMMENT ON COLUMN search_rounds.sampling_ended_at IS 'When sampling ended, UTC.';
COMMENT ON COLUMN search_rounds.ended_at IS 'When the round was ready to commit, UTC.';
COMMENT ON COLUMN search_rounds.num_trajectories IS 'Trajectories in the round.';
COMMENT ON COLUMN search_rounds.num_response_tokens IS 'Response tokens in the round.';
COMMENT ON COLUMN search_rounds.reward_mean IS 'Mean reward of the round.';
