-- The prompts that a training step may draw from by MOP (TBA, arXiv 2503.18929, section 4), in random order, two lists:
-- `recent_pool` of those that got trajectories in the newest sync, `whole_pool` of all; none whose trajectories are all
-- too old. Each is as long as a batch can need: prompts of the first list are passed over in the second where others are.
SELECT
    min_by(
        prompt,
        CASE WHEN newest_sync = $newest_sync AND newest_sync_policy_step >= $oldest_policy_step
            THEN uniform_number($seed, $step, 'recent prompt', prompt_id)
        END,
        $prompts_per_batch
    ) AS recent_pool,
    min_by(
        prompt,
        CASE WHEN newest_policy_step >= $oldest_policy_step THEN uniform_number($seed, $step, 'prompt', prompt_id) END,
        2 * $prompts_per_batch
    ) AS whole_pool
FROM prompts;
