-- The prompts that a training step may draw by MOP (TBA, arXiv 2503.18929, section 4). `recent`: the newest sync brought
-- trajectories to it that are young enough. Prompts whose trajectories are all too old are left out.
-- `rewards_differ`: those that are young enough do; `newest_sync_rewards_differ`: those of the newest sync do.
SELECT
    prompt,
    key,
    newest_sync = $newest_sync AND newest_sync_ages_from >= $oldest AS recent,
    coalesce(rewards_differ_from >= $oldest, FALSE) AS rewards_differ,
    coalesce(newest_sync_rewards_differ_from >= $oldest, FALSE) AS newest_sync_rewards_differ
FROM prompts
WHERE newest_ages_from >= $oldest;
