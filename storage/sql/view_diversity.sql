-- The newest measurement of how different the responses are.
CREATE VIEW diversity AS
SELECT *
FROM stored_diversity
WHERE measured_at = (SELECT max(measured_at) FROM stored_diversity);

COMMENT ON VIEW diversity IS 'One row a measure of a group of trajectories, of the newest measurement (tba diversity).';
COMMENT ON COLUMN diversity.measured_at IS 'When it was measured, UTC.';
COMMENT ON COLUMN diversity.grouping IS 'policy: by spans of policy steps; searcher: by Searcher; run: all of it.';
COMMENT ON COLUMN diversity.searcher IS 'The Searcher where it is by Searcher, else NULL.';
COMMENT ON COLUMN diversity.first_policy_step IS 'First policy whose responses are in the group.';
COMMENT ON COLUMN diversity.last_policy_step IS 'Last policy whose responses are in the group.';
COMMENT ON COLUMN diversity.metric IS 'Measure, as tba/diversity.py defines it.';
COMMENT ON COLUMN diversity.value IS 'Mean over prompts.';
COMMENT ON COLUMN diversity.standard_error IS 'Of that mean; 0 where everything was measured, NULL where from one prompt.';
COMMENT ON COLUMN diversity.low IS 'Lower end of the 95 % interval.';
COMMENT ON COLUMN diversity.high IS 'Upper end of the 95 % interval.';
COMMENT ON COLUMN diversity.responses_per_prompt IS 'Responses to a prompt that each value was computed from.';
COMMENT ON COLUMN diversity.num_measured_prompts IS 'Prompts that were measured.';
COMMENT ON COLUMN diversity.num_prompts IS 'Prompts in the group with so many responses.';
COMMENT ON COLUMN diversity.num_trajectories IS 'Their trajectories.';
