-- Every stored row of the prompts in `arrivals`: what the next queries need of it, so that they need not read the others.
SELECT record, prompt, response_digest, sync, policy_step, ages_from, key, reward
FROM trajectories
WHERE prompt IN (SELECT prompt FROM prompts JOIN arrivals USING (prompt_id));
