-- Choose the B x K trajectories of one training step by MOP (TBA, arXiv 2503.18929, section 4).
-- Every random number is uniform_number($seed, $step, purpose, id), so the same stored rows give the same batch.
WITH
-- a list of B prompts, in random order, of those that got trajectories in the newest sync that are not too old
recent_pool AS (
    SELECT
        min_by(prompts, uniform_number($seed, $step, 'recent prompt', prompt_id), $prompts_per_batch) AS pool
    FROM prompts
    WHERE prompt IN (
        SELECT prompt FROM trajectories WHERE sync = $newest_sync AND policy_step >= $oldest_policy_step
    )
),
-- the B places of the batch: recent with probability m; `turn` counts within the pool the place draws from
places AS (
    SELECT prompt_index, recent, row_number() OVER (PARTITION BY recent ORDER BY prompt_index) - 1 AS turn
    FROM (
        SELECT
            prompt_index,
            pool IS NOT NULL
            AND uniform_number($seed, $step, 'recent', prompt_index) < $recent_probability AS recent
        FROM range($prompts_per_batch) AS places(prompt_index), recent_pool
    )
),
-- prompts of the recent places; fewer prompts than places: each in turn
recent_prompts AS (
    SELECT prompt_index, recent, pool[1 + turn % len(pool)] AS chosen
    FROM places, recent_pool
    WHERE recent
),
-- a list of B prompts, in random order, of all with a trajectory that is not too old; those already in the batch come
-- last, to repeat only where they must
whole_pool AS (
    SELECT
        min_by(
            prompts,
            (prompt IN (SELECT chosen.prompt FROM recent_prompts))::INTEGER
            + uniform_number($seed, $step, 'prompt', prompt_id),
            $prompts_per_batch
        ) AS pool
    FROM prompts
    WHERE newest_policy_step >= $oldest_policy_step
),
-- the prompt of each place
batch_prompts AS (
    SELECT prompt_index, recent, chosen.prompt, chosen.prompt_id FROM recent_prompts
    UNION ALL
    SELECT prompt_index, recent, pool[1 + turn % len(pool)].prompt, pool[1 + turn % len(pool)].prompt_id
    FROM places, whole_pool
    WHERE NOT recent
),
-- what each place may draw: a recent place its prompt's trajectories of the newest sync, another all of its prompt's.
-- The best reward weighs 1, so that exp() cannot overflow; no temperature means equal weights
candidates AS (
    SELECT
        *,
        CASE
            WHEN recent OR $reward_temperature IS NULL THEN 1.0
            ELSE exp((reward - max(reward) OVER (PARTITION BY prompt_index)) / $reward_temperature)
        END AS weight
    FROM batch_prompts
    JOIN trajectories USING (prompt)
    WHERE (NOT recent OR sync = $newest_sync) AND policy_step >= $oldest_policy_step
),
-- probability to be the first of the K drawn for its place; summed in the order of ids, so the same to the last bit
weighted AS (
    SELECT
        *,
        count(*) OVER place AS num_candidates,
        (1 - $uniform_fraction) * weight / sum(weight) OVER place + $uniform_fraction / count(*) OVER place
            AS draw_probability
    FROM candidates
    WINDOW place AS (
        PARTITION BY prompt_index ORDER BY trajectory_id ROWS BETWEEN UNBOUNDED PRECEDING AND UNBOUNDED FOLLOWING
    )
),
-- drawing without replacement is an exponential race, -ln(u) / p, first come first drawn (the Gumbel-top-k trick);
-- where p underflows to 0 the better reward goes first
drawn AS (
    SELECT
        *,
        row_number() OVER (
            PARTITION BY prompt_index
            ORDER BY
                -ln(uniform_number($seed, $step, 'trajectory', prompt_index || '/' || trajectory_id))
                / draw_probability,
                reward DESC,
                trajectory_id
        ) - 1 AS finish
    FROM weighted
),
-- fewer candidates than K: the slots go by how often each was sampled, as they would if the buffer kept every copy.
-- `copies_before` and `copies_up_to` are its share of the samples, from - to
shared AS (
    SELECT
        *,
        (sum(times_sampled) OVER place)::BIGINT AS num_copies,
        (sum(times_sampled) OVER (place ORDER BY finish))::BIGINT AS copies_up_to,
        copies_up_to - times_sampled AS copies_before
    FROM drawn
    WHERE finish < $responses_per_prompt
    WINDOW place AS (PARTITION BY prompt_index)
),
-- the K slots: one each where there are enough, else the shares, rounded to the nearest; a rare one may go without
slots AS (
    SELECT
        *,
        unnest(range(CASE
            WHEN num_candidates >= $responses_per_prompt THEN 1
            ELSE
                (2 * copies_up_to * $responses_per_prompt + num_copies - 1) // (2 * num_copies)
                - (2 * copies_before * $responses_per_prompt + num_copies - 1) // (2 * num_copies)
        END)) AS turn
    FROM shared
)
SELECT
    prompt_index::INTEGER AS prompt_index,
    (row_number() OVER (PARTITION BY prompt_index ORDER BY turn, finish) - 1)::INTEGER AS slot,
    trajectory_id,
    prompt_id,
    recent,
    draw_probability,
    reward,
    policy_step,
    $newest_sync::BIGINT AS sync,
    word_offset,
    num_prompt_tokens,
    num_response_tokens
FROM slots
ORDER BY prompt_index, slot;
