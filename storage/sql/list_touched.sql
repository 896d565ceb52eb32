-- All stored rows of the prompts in `arrivals`, with the columns that the next queries need. These queries then do not read
-- other prompts' rows.
SELECT record, prompt, response_digest, sync, policy_step, ages_from, key, reward
FROM trajectories
WHERE prompt IN (SELECT prompt FROM prompts JOIN arrivals USING (prompt_id));
