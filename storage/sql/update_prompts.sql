-- What is newest about each prompt of `arrivals`, of the trajectories that stayed: it tells without a search through them
-- whether a prompt has any that is recent, or young enough, to draw.
UPDATE prompts
SET
    newest_policy_step = newest.policy_step,
    newest_sync = newest.of_sync.sync,
    newest_sync_policy_step = newest.of_sync.policy_step
FROM (
    SELECT prompt, max(policy_step) AS policy_step, max({sync: sync, policy_step: policy_step}) AS of_sync
    FROM trajectories
    WHERE prompt IN (SELECT prompt FROM prompts JOIN arrivals USING (prompt_id))
    GROUP BY prompt
) AS newest
WHERE prompts.prompt = newest.prompt;
