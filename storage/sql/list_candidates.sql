-- All stored trajectories of $prompts. ReplayBuffer.draw chooses among them.
SELECT
    prompt,
    trajectory_id,
    key,
    sync,
    policy_step,
    ages_from,
    reward,
    num_copies,
    record
FROM trajectories
WHERE prompt IN (SELECT unnest($prompts));
