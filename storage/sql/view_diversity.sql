-- The newest measurement of the responses' diversity.
CREATE VIEW diversity AS
SELECT *
FROM stored_diversity
WHERE measured_at = (SELECT max(measured_at) FROM stored_diversity);

COMMENT ON VIEW diversity IS 'One row for each measure of a group of trajectories, from the newest measurement (tba diversity).';
COMMENT ON COLUMN diversity.measured_at IS 'Time of the measurement, UTC.';
COMMENT ON COLUMN diversity.grouping IS 'Kind of group: policy: a span of policy steps; searcher: a Searcher; run: the whole run.';
COMMENT ON COLUMN diversity.searcher IS 'The Searcher, if grouping is searcher; else NULL.';
COMMENT ON COLUMN diversity.first_policy_step IS 'First policy whose responses are in the group.';
COMMENT ON COLUMN diversity.last_policy_step IS 'Last policy whose responses are in the group.';
COMMENT ON COLUMN diversity.metric IS 'Measure, as tba/diversity.py defines it.';
COMMENT ON COLUMN diversity.value IS 'Mean over prompts; of each prompt the mean over its draws.';
COMMENT ON COLUMN diversity.standard_error IS 'Standard error of the value, over prompts, or over the draws of a single prompt; 0: all responses to all prompts were measured; NULL: there was one draw.';
COMMENT ON COLUMN diversity.low IS 'Lower end of the 95 % interval.';
COMMENT ON COLUMN diversity.high IS 'Upper end of the 95 % interval.';
COMMENT ON COLUMN diversity.responses_per_prompt IS 'Responses to a prompt that each value was computed from.';
COMMENT ON COLUMN diversity.num_measured_prompts IS 'Prompts that were measured.';
COMMENT ON COLUMN diversity.num_prompts IS 'Prompts in the group with at least responses_per_prompt responses.';
COMMENT ON COLUMN diversity.num_trajectories IS 'Trajectories of these prompts.';
