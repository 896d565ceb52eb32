-- Age of all trajectories that the buffer has taken in, in policy steps, at $num_bins steps of training. Trajectories that
-- were evicted count, too. Those that have expired since do not.
WITH
-- counted first: each row meets all syncs of its Searcher
stored AS (
    SELECT searcher, round, policy_step, count(*) AS num
    FROM report_trajectories
    GROUP BY ALL
),
-- trajectories by the policy step that their age counts from (buffer.ages_from) and the first step that could draw them
arrivals AS (
    SELECT least(policy_step, 2 * (syncs.step - 1) - policy_step) AS ages_from, syncs.step AS arrived, sum(num) AS num
    FROM stored
    JOIN syncs ON syncs.searcher = stored.searcher AND round BETWEEN first_round AND last_round
    GROUP BY ALL
),
-- the steps at which ages are measured
moments AS (
    SELECT DISTINCT first + (last - first) * number // greatest($num_bins - 1, 1) AS step
    FROM range($num_bins) AS numbers(number), (SELECT min(step) AS first, max(step) AS last FROM report_steps)
),
-- ages at each of these steps, the youngest first, with the number of trajectories of that age or younger
ages AS (
    SELECT
        moments.step,
        moments.step - 1 - ages_from AS age,
        sum(sum(num)) OVER (PARTITION BY moments.step ORDER BY moments.step - 1 - ages_from) AS num_younger,
        sum(sum(num)) OVER (PARTITION BY moments.step) AS num_all
    FROM moments JOIN arrivals ON arrived <= moments.step
    GROUP BY moments.step, ages_from
)
SELECT
    step,
    min(age) FILTER (num_younger >= 0.1 * num_all) AS age_low,
    min(age) FILTER (num_younger >= 0.5 * num_all) AS age_median,
    min(age) FILTER (num_younger >= 0.9 * num_all) AS age_high
FROM ages
GROUP BY step
ORDER BY step;
