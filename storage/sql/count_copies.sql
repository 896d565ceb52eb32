-- Writes to every copy of a response to a prompt of `touched` how many copies its sync brought; the newest copy stays. Run
-- it when all rounds of the new syncs are indexed. Older syncs have one copy of each response left, so they do not change.
UPDATE trajectories
SET num_copies = copies.num_copies
FROM (
    SELECT prompt, response_digest, sync, count(*)::INTEGER AS num_copies
    FROM touched
    GROUP BY ALL
    HAVING count(*) > 1
) AS copies
WHERE trajectories.prompt = copies.prompt
    AND trajectories.response_digest = copies.response_digest
    AND trajectories.sync = copies.sync;
