-- The trajectories of $prompts that a training step may draw, those that came in the newest sync as `recent`.
SELECT
    prompt,
    prompt_id,
    trajectory_id,
    trajectories.key,
    sync = $newest_sync AS recent,
    policy_step,
    reward,
    times_sampled,
    word_offset,
    num_prompt_tokens,
    num_response_tokens
FROM (SELECT prompt, prompt_id FROM prompts WHERE prompt IN (SELECT unnest($prompts))) AS prompts
JOIN trajectories USING (prompt)
WHERE policy_step >= $oldest_policy_step;
