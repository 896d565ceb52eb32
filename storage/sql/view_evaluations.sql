-- One row an evaluated policy.
CREATE VIEW evaluations AS
SELECT * FROM stored_evaluations;

COMMENT ON VIEW evaluations IS 'One row an evaluated policy.';
COMMENT ON COLUMN evaluations.policy_step IS 'Step of the policy.';
COMMENT ON COLUMN evaluations.split IS 'Problems it was asked: heldout ones are never trained on.';
COMMENT ON COLUMN evaluations.num_problems IS 'How many problems.';
COMMENT ON COLUMN evaluations.accuracy IS 'Share answered right, decoding greedily.';
COMMENT ON COLUMN evaluations.mean_response_tokens IS 'Mean length of the responses.';
COMMENT ON COLUMN evaluations.created_at IS 'When it was measured, UTC.';
