-- A sample of responses from every group of a run. Groups: each span of policies, each Searcher, the whole run. Copies of a
-- warm start are other policies' responses: only the groups of their own copied "Searchers" have them, unless the run has
-- no other responses.
-- Each group gives the same number of prompts that have at least $responses_per_prompt responses in the group, and that
-- many responses to each prompt; about $num_responses in all. A group with fewer prompts than that gives a multiple of the
-- responses to each. A hash with $seed chooses them, so the same stored rows give
-- the same sample.
WITH
-- the columns that the choice depends on
stored AS MATERIALIZED (
    SELECT trajectory_id, prompt_id, policy_step, searcher FROM trajectories
),
own AS MATERIALIZED (
    SELECT * FROM stored
    WHERE NOT regexp_full_match(searcher, 'warm[0-9]+')
        OR NOT EXISTS (FROM stored WHERE NOT regexp_full_match(searcher, 'warm[0-9]+'))
),
span AS (
    SELECT min(policy_step) AS first, max(policy_step) AS last FROM own
),
-- each trajectory in each group that it is in
members AS (
    SELECT
        'policy' AS grouping,
        lpad(((policy_step - first) * $num_bins // (last - first + 1))::VARCHAR, 4, '0') AS part,
        trajectory_id,
        prompt_id,
        policy_step
    FROM own, span
    UNION ALL
    SELECT 'searcher', searcher, trajectory_id, prompt_id, policy_step FROM stored
    UNION ALL
    SELECT 'run', '', trajectory_id, prompt_id, policy_step FROM own
),
-- prompts with enough responses, in random order
prompts AS (
    SELECT
        grouping,
        part,
        prompt_id,
        count(*) AS num_responses,
        row_number() OVER (PARTITION BY grouping, part ORDER BY hash(prompt_id, part, $seed), prompt_id) AS place
    FROM members
    GROUP BY grouping, part, prompt_id
    HAVING count(*) >= $responses_per_prompt
),
-- prompts and trajectories of each group, and the number of prompts to take
groups AS (
    SELECT
        grouping,
        part,
        count(*) AS num_prompts,
        sum(num_responses)::BIGINT AS num_trajectories,
        greatest(2, $num_responses // ($responses_per_prompt * count(*) OVER ())) AS num_chosen,
        greatest(1, $num_responses // ($responses_per_prompt * count(*) OVER () * count(*))) AS num_draws
    FROM prompts
    GROUP BY grouping, part
),
-- first and last policy of each group
policies AS (
    SELECT grouping, part, min(policy_step) AS first_policy_step, max(policy_step) AS last_policy_step
    FROM members
    GROUP BY grouping, part
),
-- responses of the chosen prompts, in random order, as many as are wanted of each
chosen AS (
    SELECT grouping, part, prompt_id, place, trajectory_id, groups.num_prompts, groups.num_trajectories
    FROM members
    JOIN prompts USING (grouping, part, prompt_id)
    JOIN groups USING (grouping, part)
    WHERE place <= num_chosen
    QUALIFY row_number() OVER (
        PARTITION BY grouping, part, prompt_id ORDER BY hash(trajectory_id, $seed), trajectory_id
    ) <= $responses_per_prompt * least(num_draws, num_responses // $responses_per_prompt)
)
SELECT
    chosen.*,
    policies.first_policy_step,
    policies.last_policy_step,
    response,
    reward,
    list_sum(behavior_logprobs) AS behavior_logprob
FROM chosen
JOIN policies USING (grouping, part)
JOIN trajectories USING (trajectory_id)
ORDER BY grouping, part, place, hash(trajectory_id, $seed), trajectory_id;
