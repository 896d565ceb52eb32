-- The prompts that a training step may draw from by MOP (TBA, arXiv 2503.18929, section 4), those that got trajectories in
-- the newest sync as `recent`; none whose trajectories are all too old.
SELECT
    prompt,
    key,
    newest_sync = $newest_sync AND newest_sync_ages_from >= $oldest AS recent,
    rewards_differ,
    newest_sync_rewards_differ
FROM prompts
WHERE newest_ages_from >= $oldest;
