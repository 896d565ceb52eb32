-- How often each sync brought the very same response to a prompt of `arrivals`, written to every copy; the newest of them
-- is the one that stays. Comes when the syncs that are new are there in full: no older one has two copies any more.
UPDATE trajectories
SET times_sampled = copies.times_sampled
FROM (
    SELECT prompt, response_digest, sync, count(*)::INTEGER AS times_sampled
    FROM trajectories
    WHERE prompt IN (SELECT prompt FROM prompts JOIN arrivals USING (prompt_id))
    GROUP BY ALL
    HAVING count(*) > 1
) AS copies
WHERE trajectories.prompt = copies.prompt
    AND trajectories.response_digest = copies.response_digest
    AND trajectories.sync = copies.sync;
