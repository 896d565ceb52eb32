-- The training steps that count.
CREATE VIEW training_steps AS
SELECT *
FROM stored_training_steps
WHERE counts(stored_training_steps.attempt, stored_training_steps.step)
    AND started_at BETWEEN TIMESTAMPTZ '1900-01-01' AND TIMESTAMPTZ '9999-01-01'
    AND ended_at BETWEEN TIMESTAMPTZ '1900-01-01' AND TIMESTAMPTZ '9999-01-01'; -- not of another program's file

COMMENT ON VIEW training_steps IS 'One row for each training step, without steps that a resume undid.';
COMMENT ON COLUMN training_steps.attempt IS 'Attempt of the Trainer that trained the step.';
COMMENT ON COLUMN training_steps.step IS 'Number of the training step, from 1.';
COMMENT ON COLUMN training_steps.started_at IS 'When the batch was drawn and training began, UTC.';
COMMENT ON COLUMN training_steps.ended_at IS 'When the step ended, UTC.';
COMMENT ON COLUMN training_steps.wait_s IS 'Seconds that training waited for a batch before the step.';
COMMENT ON COLUMN training_steps.step_s IS 'Seconds of forward, backward and optimizer.';
COMMENT ON COLUMN training_steps.publish_stall_s IS 'Seconds that training stood still, before the step and in it, to hand over a policy or a checkpoint; NULL in runs of an older version.';
COMMENT ON COLUMN training_steps.loss IS 'Loss of the objective; Trajectory Balance''s is scaled by beta / 2.';
COMMENT ON COLUMN training_steps.reward_mean IS 'Mean reward of the batch.';
COMMENT ON COLUMN training_steps.fresh_reward_mean IS 'Mean reward of all trajectories that the newest sync took in, repeated responses included; with rewards of 0 and 1, the accuracy of sampling. NULL before the first sync of a resumed Trainer.';
COMMENT ON COLUMN training_steps.fresh_kl IS 'Mean of log p_behavior - log p_ref over the responses of the newest sync, in nats a response: an estimate of the sampling policies'' KL divergence from the reference. NULL in runs of an older version, as are fresh_entropy, fresh_cut_share and fresh_staleness.';
COMMENT ON COLUMN training_steps.fresh_entropy IS 'Mean of -log p_behavior over the tokens of the newest sync''s responses, in nats a token.';
COMMENT ON COLUMN training_steps.fresh_cut_share IS 'Share of the newest sync''s responses that were cut at the length limit.';
COMMENT ON COLUMN training_steps.fresh_staleness IS 'Mean number of policy steps between the weights that sampled the newest sync''s responses and those trained.';
COMMENT ON COLUMN training_steps.reward_recent_mean IS 'Mean reward of the batch''s recent slots; NULL if it has none.';
COMMENT ON COLUMN training_steps.log_z_mean IS 'Mean of log Z over the prompts.';
COMMENT ON COLUMN training_steps.residual_abs_mean IS 'Mean absolute residual, in nats.';
COMMENT ON COLUMN training_steps.logprob_gap_mean IS 'Mean of log p_theta - log p_ref over the batch''s responses, in nats a response.';
COMMENT ON COLUMN training_steps.effective_sample_size IS 'Effective sample size of the ratios p_theta / p_behavior of the batch''s responses, as a share of the batch. NULL in runs of an older version, as are tapered_share and logprob_mismatch.';
COMMENT ON COLUMN training_steps.tapered_share IS 'Share of the batch''s responses whose residual has a weight below 1; NULL with baselines.';
COMMENT ON COLUMN training_steps.logprob_mismatch IS 'Mean over responses of the absolute difference between log p_theta and log p_behavior of a response, divided by its tokens, in nats; on the batch''s rows of its newest policy; NULL if there are none.';
COMMENT ON COLUMN training_steps.gradient_norm IS 'Norm of the gradient before clipping.';
COMMENT ON COLUMN training_steps.learning_rate IS 'Learning rate of the step.';
COMMENT ON COLUMN training_steps.beta IS 'KL coefficient of the step.';
COMMENT ON COLUMN training_steps.staleness_mean IS 'Mean staleness of the batch, in policy steps.';
COMMENT ON COLUMN training_steps.staleness_max IS 'Largest staleness of the batch, in policy steps.';
COMMENT ON COLUMN training_steps.num_trajectories IS 'Trajectories in the buffer.';
COMMENT ON COLUMN training_steps.num_prompts IS 'Prompts in the buffer.';
COMMENT ON COLUMN training_steps.num_inserted IS 'Trajectories ever taken in, repeats included; min_size is compared with it.';
COMMENT ON COLUMN training_steps.samples_per_insert IS 'Mean number of draws of each trajectory ever taken in.';
COMMENT ON COLUMN training_steps.num_too_old IS 'Stored trajectories that max_age excludes from the draw.';
COMMENT ON COLUMN training_steps.searchers_silent_s IS 'Seconds from the last sync that took in trajectories to the newest look for some.';
COMMENT ON COLUMN training_steps.num_response_tokens IS 'Response tokens of the batch''s distinct responses.';
COMMENT ON COLUMN training_steps.num_unique IS 'Distinct trajectories in the batch, of B * K slots.';
COMMENT ON COLUMN training_steps.skipped IS 'Whether the step was skipped: the gradient was not finite, and the weights did not change.';
