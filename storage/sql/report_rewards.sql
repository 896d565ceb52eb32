-- Sampled rewards by policy, as a grid: at most $num_bins columns of policy steps by at most $num_levels rows of reward.
-- If there are at most $num_levels distinct rewards, each is a row; otherwise the rows divide the range equally.
WITH
-- the range, and whether each reward has its own row
span AS (
    SELECT
        min(policy_step) AS first,
        max(policy_step) AS last,
        min(reward)::DOUBLE AS lowest,
        max(reward)::DOUBLE AS highest,
        count(DISTINCT reward) <= $num_levels AS few
    FROM report_trajectories
),
-- column and row of each trajectory; row is the reward at its lower edge
cells AS (
    SELECT
        policy_step,
        (policy_step - first) * $num_bins // (last - first + 1) AS bin,
        CASE
            WHEN few THEN reward::DOUBLE
            ELSE lowest + (highest - lowest) / $num_levels
                * least($num_levels - 1, floor((reward - lowest) / (highest - lowest) * $num_levels))
        END AS level
    FROM report_trajectories, span
)
SELECT
    bin,
    min(min(policy_step)) OVER columns AS first_step,
    max(max(policy_step)) OVER columns AS last_step,
    level,
    count(*) AS num_trajectories,
    count(*) / sum(count(*)) OVER columns AS share
FROM cells
GROUP BY bin, level
WINDOW columns AS (PARTITION BY bin)
ORDER BY bin, level;
