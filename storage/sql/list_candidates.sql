-- The trajectories of $prompts that a training step may draw, those that came in the newest sync as `recent`.
SELECT
    prompt,
    trajectory_id,
    key,
    sync = $newest_sync AS recent,
    policy_step,
    reward,
    times_sampled,
    word_offset,
    num_words
FROM trajectories
WHERE prompt IN (SELECT unnest($prompts)) AND policy_step >= $oldest_policy_step;
