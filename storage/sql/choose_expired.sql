-- Per searcher the last round to expire: all rounds up to it are too old or beyond the count to keep, and no resume needs
-- them. Ages are by the store's clock, from `written` (searcher, round, committed_at).
WITH
shards AS (
    SELECT searcher, round, count(*) AS num_trajectories, any_value(committed_at) AS committed_at
    FROM trajectories
    JOIN written USING (searcher, round)
    GROUP BY searcher, round
),
-- per shard the number of trajectories in younger shards
ages AS (
    SELECT
        *,
        sum(num_trajectories) OVER (ORDER BY committed_at DESC, searcher, round DESC) - num_trajectories AS num_younger
    FROM shards
),
-- the newest sync of the buffer that a resume from the oldest checkpoint begins with; its rows are "recent" then
resumed AS (
    SELECT max(sync) AS sync FROM syncs WHERE step <= $checkpoint
),
-- per searcher the last round that was taken in before that
outlived AS (
    SELECT searcher, max(last_round) AS last_round
    FROM syncs
    WHERE sync < (SELECT sync FROM resumed)
    GROUP BY searcher
),
-- rounds that stay: young ones within the count to keep; the newest $min_size trajectories; in an unfinished run the rounds
-- that a resume needs; each searcher's last round, from which its next round is numbered
kept AS (
    SELECT searcher, min(round) AS first_round
    FROM ages
    LEFT JOIN outlived USING (searcher)
    WHERE
        NOT (coalesce(committed_at < $before::TIMESTAMPTZ, false) OR coalesce(num_younger >= $keep, false))
        OR num_younger < $min_size
        OR (NOT $finished AND round > coalesce(last_round, -1))
        OR round = (SELECT max(round) FROM shards WHERE shards.searcher = ages.searcher)
    GROUP BY searcher
)
SELECT searcher, first_round - 1 AS last_expired
FROM kept
WHERE first_round > (SELECT min(round) FROM shards WHERE shards.searcher = kept.searcher)
ORDER BY searcher;
