-- The batch that trained a step: one row for each prompt and distinct trajectory, with the slots that it fills.
-- $step: the training step.
WITH
-- the drawn slots; `times` is the number of slots that a trajectory fills
slots AS (
    SELECT
        prompt_index,
        trajectory_id,
        min(slot) AS first_slot,
        count(*) AS times,
        count(*) / sum(count(*)) OVER (PARTITION BY prompt_index) AS weight,
        any_value(prompt_id) AS prompt_id,
        any_value(recent) AS recent,
        any_value(draw_probability) AS draw_probability,
        any_value(reward) AS reward,
        any_value(policy_step) AS policy_step,
        any_value(staleness) AS staleness
    FROM batches
    WHERE step = $step
    GROUP BY prompt_index, trajectory_id
)
-- texts of a trajectory that has expired since are NULL
SELECT
    slots.prompt_index,
    slots.prompt_id,
    trajectories.prompt,
    slots.trajectory_id,
    trajectories.response,
    slots.reward,
    slots.times,
    slots.weight,
    slots.draw_probability,
    slots.recent,
    slots.staleness,
    slots.policy_step,
    trajectories.policy_fingerprint,
    trajectories.searcher,
    trajectories.round,
    trajectories.finish_reason,
    trajectories.created_at
FROM slots LEFT JOIN trajectories USING (trajectory_id)
ORDER BY slots.prompt_index, slots.reward DESC, slots.first_slot;
