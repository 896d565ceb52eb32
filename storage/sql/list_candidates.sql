-- What each of a batch's places may draw, and how likely: a recent place its prompt's trajectories of the newest sync,
-- all the same; another place all of its prompt's, by softmax(reward / temperature), no temperature: all the same.
-- Places are numbered as in $places (their prompts) and $recent.
SELECT
    prompt_index,
    trajectory_id,
    prompt_id,
    recent,
    coalesce(CASE WHEN NOT recent THEN reward::DOUBLE / $reward_temperature END, 0) AS log_weight,
    uniform_number($seed, $step, 'trajectory', prompt_index || '/' || trajectory_id) AS uniform_number,
    reward,
    policy_step,
    times_sampled,
    word_offset,
    num_prompt_tokens,
    num_response_tokens
FROM (
    SELECT unnest(range(len($places))) AS prompt_index, unnest($places) AS prompt, unnest($recent) AS recent
) AS places
JOIN prompts USING (prompt)
JOIN trajectories USING (prompt)
WHERE (NOT recent OR sync = $newest_sync) AND policy_step >= $oldest_policy_step
ORDER BY prompt_index, trajectory_id;
