-- The drawn slots of every batch, of steps that a resumed Trainer undid too.
CREATE VIEW all_batches AS
SELECT * FROM stored_batches WHERE step IS NOT NULL; -- not of a file of another program

COMMENT ON VIEW all_batches IS 'One row a drawn slot of every batch ever drawn, undone steps included.';
COMMENT ON COLUMN all_batches.attempt IS 'Which life of the Trainer drew it.';
COMMENT ON COLUMN all_batches.step IS 'The training step.';
COMMENT ON COLUMN all_batches.sync IS 'Newest sync when it was drawn.';
COMMENT ON COLUMN all_batches.prompt_index IS 'Place of the prompt in the batch, from 0.';
COMMENT ON COLUMN all_batches.slot IS 'Place of the response among those drawn for the prompt, from 0.';
COMMENT ON COLUMN all_batches.trajectory_id IS 'The trajectory in this slot.';
COMMENT ON COLUMN all_batches.prompt_id IS 'Its prompt.';
COMMENT ON COLUMN all_batches.recent IS 'Whether it was drawn among what the newest sync took in.';
COMMENT ON COLUMN all_batches.draw_probability IS 'Probability to be the first drawn for its prompt.';
COMMENT ON COLUMN all_batches.reward IS 'Its reward.';
COMMENT ON COLUMN all_batches.policy_step IS 'Step of the policy that sampled it.';
COMMENT ON COLUMN all_batches.staleness IS 'Policy steps between the weights that sampled it and those trained, undone ones included.';
