-- The drawn slots of every batch that counts.
CREATE VIEW batches AS
SELECT *
FROM stored_batches
WHERE counts(stored_batches.attempt, stored_batches.step);

COMMENT ON VIEW batches IS 'One row for each drawn slot of every batch, without steps that a resume undid.';
COMMENT ON COLUMN batches.attempt IS 'Attempt of the Trainer that drew it.';
COMMENT ON COLUMN batches.step IS 'The training step.';
COMMENT ON COLUMN batches.sync IS 'The newest sync when the batch was drawn.';
COMMENT ON COLUMN batches.prompt_index IS 'Place of the prompt in the batch, from 0.';
COMMENT ON COLUMN batches.slot IS 'Place of the response among those drawn for the prompt, from 0.';
COMMENT ON COLUMN batches.trajectory_id IS 'The trajectory in this slot.';
COMMENT ON COLUMN batches.prompt_id IS 'Prompt of the trajectory.';
COMMENT ON COLUMN batches.recent IS 'Whether it was drawn from the trajectories of the newest sync.';
COMMENT ON COLUMN batches.draw_probability IS 'Probability of being the first response drawn for its prompt.';
COMMENT ON COLUMN batches.reward IS 'Reward that the draw used.';
COMMENT ON COLUMN batches.policy_step IS 'Step of the policy that sampled it.';
COMMENT ON COLUMN batches.staleness IS 'Policy steps between the weights that sampled it and those trained, undone ones included.';
