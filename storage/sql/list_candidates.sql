-- All stored trajectories of $prompts: what a training step may draw of them is chosen among these.
SELECT
    prompt,
    trajectory_id,
    key,
    sync,
    policy_step,
    ages_from,
    reward,
    times_sampled,
    record
FROM trajectories
WHERE prompt IN (SELECT unnest($prompts));
