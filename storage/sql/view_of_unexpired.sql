-- The trajectories that count: an expired shard's file stays a while (storage/expiry.py).
CREATE VIEW stored_trajectories AS
WITH
-- per searcher the rounds up to which its shards have expired
expired AS (
    SELECT
        regexp_extract(file, 'searcher=([^/]+)', 1) AS searcher,
        regexp_extract(file, 'through=(\d+)', 1)::BIGINT AS last_round
    FROM glob('{folder}/*/through=*.json')
)
FROM stored_committed
ANTI JOIN expired ON expired.searcher = stored_committed.searcher AND stored_committed.round <= expired.last_round;
