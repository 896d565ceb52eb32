-- Every committed trajectory: one prompt with one sampled response and its reward.
CREATE VIEW trajectories AS
SELECT * REPLACE (coalesce(system_prompt, '') AS system_prompt) -- shards of schema version 1 have none
FROM stored_trajectories;

COMMENT ON VIEW trajectories IS 'Every committed trajectory: one prompt with one sampled response and its reward.';
COMMENT ON COLUMN trajectories.trajectory_id IS 'searcher-round-index: unique in the run.';
COMMENT ON COLUMN trajectories.prompt_id IS 'The problem asked; the same on every machine.';
COMMENT ON COLUMN trajectories.prompt IS 'The prompt''s text.';
COMMENT ON COLUMN trajectories.response IS 'The response''s text.';
COMMENT ON COLUMN trajectories.prompt_tokens IS 'Token ids of the prompt.';
COMMENT ON COLUMN trajectories.response_tokens IS 'Token ids of the response, the stop token included.';
COMMENT ON COLUMN trajectories.behavior_logprobs IS 'Log-probability of each response token when it was sampled.';
COMMENT ON COLUMN trajectories.reference_logprobs IS 'Log-probability of each response token by the reference policy.';
COMMENT ON COLUMN trajectories.reward IS 'The reward that is trained on.';
COMMENT ON COLUMN trajectories.rewards IS 'Components of the reward, by name.';
COMMENT ON COLUMN trajectories.finish_reason IS 'stop, or length where the response was cut.';
COMMENT ON COLUMN trajectories.policy_step IS 'Step of the policy that sampled it.';
COMMENT ON COLUMN trajectories.policy_fingerprint IS 'Checksum of the weights that were served.';
COMMENT ON COLUMN trajectories.searcher IS 'Who sampled it.';
COMMENT ON COLUMN trajectories.round IS 'The searcher''s round: one round is one shard.';
COMMENT ON COLUMN trajectories.temperature IS 'Sampling temperature.';
COMMENT ON COLUMN trajectories.top_p IS 'Sampling nucleus.';
COMMENT ON COLUMN trajectories.system_prompt IS 'What it was sampled behind and is not trained behind; empty for nothing.';
COMMENT ON COLUMN trajectories.reward_version IS 'Version of the reward function.';
COMMENT ON COLUMN trajectories.code_version IS 'Git commit of the code that sampled it.';
COMMENT ON COLUMN trajectories.schema_version IS 'Version of these columns.';
COMMENT ON COLUMN trajectories.created_at IS 'When it was committed, UTC.';
