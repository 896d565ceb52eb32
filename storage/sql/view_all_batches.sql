-- The drawn slots of every batch, including steps that a resume undid.
CREATE VIEW all_batches AS
SELECT * FROM stored_batches WHERE step IS NOT NULL; -- not of a file of another program

COMMENT ON VIEW all_batches IS 'One row for each drawn slot of every batch, including steps that a resume undid.';
COMMENT ON COLUMN all_batches.attempt IS 'Attempt of the Trainer that drew it.';
COMMENT ON COLUMN all_batches.step IS 'The training step.';
COMMENT ON COLUMN all_batches.sync IS 'The newest sync when the batch was drawn.';
COMMENT ON COLUMN all_batches.prompt_index IS 'Place of the prompt in the batch, from 0.';
COMMENT ON COLUMN all_batches.slot IS 'Place of the response among those drawn for the prompt, from 0.';
COMMENT ON COLUMN all_batches.trajectory_id IS 'The trajectory in this slot.';
COMMENT ON COLUMN all_batches.prompt_id IS 'Prompt of the trajectory.';
COMMENT ON COLUMN all_batches.recent IS 'Whether it was drawn from the trajectories of the newest sync.';
COMMENT ON COLUMN all_batches.draw_probability IS 'Probability of being the first response drawn for its prompt.';
COMMENT ON COLUMN all_batches.reward IS 'Reward that the draw used.';
COMMENT ON COLUMN all_batches.policy_step IS 'Step of the policy that sampled it.';
COMMENT ON COLUMN all_batches.staleness IS 'Policy steps between the weights that sampled it and those trained, undone ones included.';
