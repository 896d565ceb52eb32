-- For each prompt in `touched`, all rows but each distinct response once (its newest copy), and of these the newest
-- $capacity_per_prompt. Rows are ordered from old to new by (sync, policy_step, key): a total order, the same on every
-- rebuilt index. So the result does not depend on the order of the calls, nor on how arrivals were split over them.
WITH
-- copy 1 is the newest of identical responses
copies AS (
    SELECT *, row_number() OVER (
        PARTITION BY prompt, response_digest ORDER BY sync DESC, policy_step DESC, key DESC
    ) AS copy
    FROM touched
),
-- age rank among the distinct responses of a prompt: older copies rank behind every newest one
ranks AS (
    SELECT record, copy, row_number() OVER (
        PARTITION BY prompt ORDER BY copy > 1, sync DESC, policy_step DESC, key DESC
    ) AS age_rank
    FROM copies
)
SELECT record FROM ranks WHERE copy > 1 OR age_rank > $capacity_per_prompt;
