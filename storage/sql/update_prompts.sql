-- Updates each prompt of `arrivals` from its stored trajectories. With these columns list_prompts.sql need not read the
-- trajectories to find prompts with recent or young enough ones, and prompts whose rewards differ.
UPDATE prompts
SET
    newest_ages_from = newest.ages_from,
    newest_sync = newest.of_sync.sync,
    newest_sync_ages_from = newest.of_sync.ages_from,
    rewards_differ = newest.differ,
    newest_sync_rewards_differ = newest.of_sync.differ
FROM (
    SELECT
        prompt,
        max(ages_from) AS ages_from,
        min(lowest) < max(highest) AS differ,
        max({sync: sync, ages_from: ages_from, differ: lowest < highest}) AS of_sync
    FROM (
        SELECT prompt, sync, max(ages_from) AS ages_from, min(reward) AS lowest, max(reward) AS highest
        FROM trajectories
        WHERE prompt IN (SELECT prompt FROM prompts JOIN arrivals USING (prompt_id))
        GROUP BY prompt, sync
    ) AS of_syncs
    GROUP BY prompt
) AS newest
WHERE prompts.prompt = newest.prompt;
