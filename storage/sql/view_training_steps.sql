-- The training steps that count.
CREATE VIEW training_steps AS
SELECT *
FROM stored_training_steps
WHERE counts(stored_training_steps.attempt, stored_training_steps.step);

COMMENT ON VIEW training_steps IS 'One row a training step; without steps that a resumed Trainer undid.';
COMMENT ON COLUMN training_steps.attempt IS 'Which life of the Trainer took it.';
COMMENT ON COLUMN training_steps.step IS 'The training step, counted from 1.';
COMMENT ON COLUMN training_steps.started_at IS 'When the batch was there, UTC.';
COMMENT ON COLUMN training_steps.ended_at IS 'When the step was done, UTC.';
COMMENT ON COLUMN training_steps.wait_s IS 'Seconds without a batch before it.';
COMMENT ON COLUMN training_steps.step_s IS 'Seconds of forward, backward and optimizer.';
COMMENT ON COLUMN training_steps.publish_stall_s IS 'Seconds that training stood still before it while a policy was copied to be published; NULL in runs of an older version.';
COMMENT ON COLUMN training_steps.loss IS 'Trajectory Balance loss, scaled by beta^2 / 2.';
COMMENT ON COLUMN training_steps.reward_mean IS 'Mean reward of the batch.';
COMMENT ON COLUMN training_steps.fresh_reward_mean IS 'Mean reward of all that the newest sync took in, repeated responses too: the accuracy of sampling where a reward is 0 or 1. NULL before the first sync of a resumed Trainer.';
COMMENT ON COLUMN training_steps.fresh_kl IS 'Mean of log p_behavior - log p_ref over those responses, in nats a response: estimates the KL divergence of the policies that sampled them from the reference. NULL in runs of an older version, as the next three.';
COMMENT ON COLUMN training_steps.fresh_entropy IS 'Mean of -log p_behavior over their tokens, in nats a token.';
COMMENT ON COLUMN training_steps.fresh_cut_share IS 'Share of them that was cut at the length limit.';
COMMENT ON COLUMN training_steps.fresh_staleness IS 'Mean policy steps between the weights that sampled them and those trained.';
COMMENT ON COLUMN training_steps.reward_recent_mean IS 'Mean reward of its recent slots; NULL where there are none.';
COMMENT ON COLUMN training_steps.log_z_mean IS 'Mean of log Z over the prompts.';
COMMENT ON COLUMN training_steps.residual_abs_mean IS 'Mean absolute residual.';
COMMENT ON COLUMN training_steps.logprob_gap_mean IS 'Mean of log p_theta - log p_ref over the responses.';
COMMENT ON COLUMN training_steps.effective_sample_size IS 'Of the ratios p_theta / p_behavior of the responses, as a share of the batch. NULL where the objective measures none, and in runs of an older version, as the next two.';
COMMENT ON COLUMN training_steps.tapered_share IS 'Share of the responses whose residual is weighted below 1.';
COMMENT ON COLUMN training_steps.logprob_mismatch IS 'Mean absolute difference between log p_theta and log p_behavior on the rows of the newest policy, in nats a token.';
COMMENT ON COLUMN training_steps.gradient_norm IS 'Norm of the gradient before clipping.';
COMMENT ON COLUMN training_steps.learning_rate IS 'Learning rate of the step.';
COMMENT ON COLUMN training_steps.beta IS 'KL coefficient of the step.';
COMMENT ON COLUMN training_steps.staleness_mean IS 'Mean staleness of the batch, in policy steps.';
COMMENT ON COLUMN training_steps.staleness_max IS 'Largest staleness of the batch, in policy steps.';
COMMENT ON COLUMN training_steps.num_trajectories IS 'Trajectories in the buffer.';
COMMENT ON COLUMN training_steps.num_prompts IS 'Prompts in the buffer.';
COMMENT ON COLUMN training_steps.num_inserted IS 'Trajectories ever taken in: what min_size counts.';
COMMENT ON COLUMN training_steps.samples_per_insert IS 'Draws of each of those so far, on average.';
COMMENT ON COLUMN training_steps.num_too_old IS 'Trajectories in the buffer that max_age keeps from the batch.';
COMMENT ON COLUMN training_steps.searchers_silent_s IS 'Seconds since a sync last took something in.';
COMMENT ON COLUMN training_steps.num_response_tokens IS 'Response tokens that were computed.';
COMMENT ON COLUMN training_steps.num_unique IS 'Distinct trajectories in the batch.';
COMMENT ON COLUMN training_steps.skipped IS 'Whether the weights stayed as they were, the gradient not being finite.';
