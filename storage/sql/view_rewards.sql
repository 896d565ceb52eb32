-- Rewards of stored trajectories by other reward functions. Files of rounds that expired or were refused stay, and do not
-- count.
CREATE VIEW rewards AS
SELECT * FROM stored_rewards
SEMI JOIN stored_trajectories USING (trajectory_id);

COMMENT ON VIEW rewards IS 'One row for each trajectory and reward version that it was scored by again (tba rescore).';
COMMENT ON COLUMN rewards.trajectory_id IS 'The trajectory.';
COMMENT ON COLUMN rewards.reward_version IS 'Name of the reward version.';
COMMENT ON COLUMN rewards.reward IS 'Reward in this version; trajectories.reward is the reward that the Searcher gave.';
COMMENT ON COLUMN rewards.created_at IS 'Time of scoring, UTC.';
