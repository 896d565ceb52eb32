-- The evaluations that count. Rows of another program's file may have no date and are left out.
CREATE VIEW evaluations AS
SELECT *
FROM stored_evaluations
WHERE counts(coalesce(stored_evaluations.attempt, 1), stored_evaluations.policy_step)
    AND created_at BETWEEN TIMESTAMPTZ '1900-01-01' AND TIMESTAMPTZ '9999-01-01';

COMMENT ON VIEW evaluations IS 'One row for each evaluated policy, without policies that a resume undid.';
COMMENT ON COLUMN evaluations.attempt IS 'Attempt of the Trainer that published the policy; NULL in runs of an older version.';
COMMENT ON COLUMN evaluations.policy_step IS 'Step of the policy.';
COMMENT ON COLUMN evaluations.split IS 'Set of problems: heldout, which are never trained on.';
COMMENT ON COLUMN evaluations.num_problems IS 'Number of problems.';
COMMENT ON COLUMN evaluations.accuracy IS 'Mean reward of the greedy responses: with rewards of 0 and 1, the share of right answers.';
COMMENT ON COLUMN evaluations.mean_response_tokens IS 'Mean length of the responses, in tokens.';
COMMENT ON COLUMN evaluations.seconds IS 'Seconds that the Searcher spent on the evaluation; NULL in runs of an older version.';
COMMENT ON COLUMN evaluations.created_at IS 'Time at which the evaluation ended, UTC.';
