-- What the newest policy is that answered each prompt of `arrivals`, of the trajectories that stayed: it tells without a
-- search through them whether a prompt has any that is young enough to draw.
UPDATE prompts
SET newest_policy_step = newest.policy_step
FROM (
    SELECT prompt, max(policy_step) AS policy_step
    FROM trajectories
    WHERE prompt IN (SELECT prompt FROM prompts JOIN arrivals USING (prompt_id))
    GROUP BY prompt
) AS newest
WHERE prompts.prompt = newest.prompt;
