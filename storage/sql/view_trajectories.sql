-- Every committed trajectory: one prompt with one sampled response and its reward.
CREATE VIEW trajectories AS
SELECT * REPLACE ( -- older shards lack these columns
    coalesce(system_prompt, '') AS system_prompt,
    coalesce(last_policy_step, policy_step) AS last_policy_step,
    coalesce(last_policy_fingerprint, policy_fingerprint) AS last_policy_fingerprint
)
FROM stored_trajectories;

COMMENT ON VIEW trajectories IS 'Every committed trajectory: one prompt with one sampled response and its reward.';
COMMENT ON COLUMN trajectories.trajectory_id IS 'searcher-round-index: unique in the run.';
COMMENT ON COLUMN trajectories.prompt_id IS 'Id of the prompt; the same on every machine.';
COMMENT ON COLUMN trajectories.prompt IS 'The prompt''s text.';
COMMENT ON COLUMN trajectories.response IS 'The response''s text.';
COMMENT ON COLUMN trajectories.prompt_tokens IS 'Token ids of the prompt.';
COMMENT ON COLUMN trajectories.response_tokens IS 'Token ids of the response, the stop token included.';
COMMENT ON COLUMN trajectories.behavior_logprobs IS 'Log-probability of each response token under the distribution that it was sampled from.';
COMMENT ON COLUMN trajectories.reference_logprobs IS 'Log-probability of each response token under the reference policy.';
COMMENT ON COLUMN trajectories.reward IS 'The reward that is trained on.';
COMMENT ON COLUMN trajectories.rewards IS 'Components of the reward, by name.';
COMMENT ON COLUMN trajectories.finish_reason IS 'stop, or length: the response was cut at the length limit.';
COMMENT ON COLUMN trajectories.policy_step IS 'Step of the policy that sampled the response''s first token.';
COMMENT ON COLUMN trajectories.policy_fingerprint IS 'Checksum of the weights that the engine served for it.';
COMMENT ON COLUMN trajectories.last_policy_step IS 'Step of the policy that sampled its last token: the engine takes in policies while it samples.';
COMMENT ON COLUMN trajectories.last_policy_fingerprint IS 'Checksum of the weights that the engine served for the last token.';
COMMENT ON COLUMN trajectories.searcher IS 'Name of the Searcher.';
COMMENT ON COLUMN trajectories.round IS 'Number of the Searcher''s round; one round is one shard.';
COMMENT ON COLUMN trajectories.temperature IS 'Sampling temperature.';
COMMENT ON COLUMN trajectories.top_p IS 'Probability mass of the nucleus that tokens were sampled from; 1: all tokens.';
COMMENT ON COLUMN trajectories.system_prompt IS 'System prompt before the prompt in sampling, not in training; empty: none.';
COMMENT ON COLUMN trajectories.reward_version IS 'Version of the reward function.';
COMMENT ON COLUMN trajectories.code_version IS 'Git commit of the Searcher''s code; version of an installed wheel.';
COMMENT ON COLUMN trajectories.schema_version IS 'Version of the columns of the row''s shard.';
COMMENT ON COLUMN trajectories.created_at IS 'When the response had been scored, before the commit, UTC.';
