-- Stored trajectories as other reward functions see them.
CREATE VIEW rewards AS
SELECT * FROM stored_rewards;

COMMENT ON VIEW rewards IS 'One row a trajectory and version of the reward that it was scored again with (tba rescore).';
COMMENT ON COLUMN rewards.trajectory_id IS 'The trajectory.';
COMMENT ON COLUMN rewards.reward_version IS 'Name of the version.';
COMMENT ON COLUMN rewards.reward IS 'Its reward in that version; trajectories.reward is the one it was sampled with.';
COMMENT ON COLUMN rewards.created_at IS 'When it was scored, UTC.';
