-- What is newest about each prompt of `arrivals`, of the trajectories that stayed: it tells without a search through them
-- whether a prompt has any that is recent, or young enough, to draw.
UPDATE prompts
SET
    newest_ages_from = newest.ages_from,
    newest_sync = newest.of_sync.sync,
    newest_sync_ages_from = newest.of_sync.ages_from
FROM (
    SELECT prompt, max(ages_from) AS ages_from, max({sync: sync, ages_from: ages_from}) AS of_sync
    FROM trajectories
    WHERE prompt IN (SELECT prompt FROM prompts JOIN arrivals USING (prompt_id))
    GROUP BY prompt
) AS newest
WHERE prompts.prompt = newest.prompt;
