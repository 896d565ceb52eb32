-- How often each sync brought the very same response to a prompt of `arrivals`, written to every copy; the newest of them
-- is the one that stays. Counts add up, however arrivals are split over calls.
UPDATE trajectories
SET times_sampled = copies.times_sampled
FROM (
    SELECT prompt, response_digest, sync, sum(times_sampled)::INTEGER AS times_sampled
    FROM trajectories
    WHERE prompt IN (SELECT prompt FROM prompts JOIN arrivals USING (prompt_id))
    GROUP BY ALL
    HAVING count(*) > 1
) AS copies
WHERE trajectories.prompt = copies.prompt
    AND trajectories.response_digest = copies.response_digest
    AND trajectories.sync = copies.sync;
