-- The prompts that a training step may draw by MOP (TBA, arXiv 2503.18929, section 4). `recent`: the newest sync brought
-- trajectories to it that are young enough. Prompts whose trajectories are all too old are left out.
SELECT
    prompt,
    key,
    newest_sync = $newest_sync AND newest_sync_ages_from >= $oldest AS recent,
    rewards_differ,
    newest_sync_rewards_differ
FROM prompts
WHERE newest_ages_from >= $oldest;
