-- Updates each prompt of `touched` from its stored trajectories. With these columns list_prompts.sql need not read the
-- trajectories to find prompts with recent or young enough ones, and prompts whose rewards differ. For the latter: each
-- reward has a youngest trajectory, and from the second youngest of these on there are two rewards.
UPDATE prompts
SET
    newest_ages_from = of_prompts.youngest[1],
    newest_sync = of_syncs.newest.sync,
    newest_sync_ages_from = of_syncs.newest.youngest[1],
    rewards_differ_from = of_prompts.youngest[2],
    newest_sync_rewards_differ_from = of_syncs.newest.youngest[2]
FROM (
    SELECT prompt, max(ages_from, 2) AS youngest
    FROM (
        SELECT prompt, reward, max(ages_from) AS ages_from
        FROM touched
        ANTI JOIN superseded USING (record)
        GROUP BY prompt, reward
    ) AS of_rewards
    GROUP BY prompt
) AS of_prompts
JOIN (
    SELECT prompt, max({sync: sync, youngest: youngest}) AS newest
    FROM (
        SELECT prompt, sync, max(ages_from, 2) AS youngest
        FROM (
            SELECT prompt, sync, reward, max(ages_from) AS ages_from
            FROM touched
            ANTI JOIN superseded USING (record)
            GROUP BY prompt, sync, reward
        ) AS of_rewards_and_syncs
        GROUP BY prompt, sync
    ) AS of_syncs_and_prompts
    GROUP BY prompt
) AS of_syncs USING (prompt)
WHERE prompts.prompt = of_prompts.prompt;
