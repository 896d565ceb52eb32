-- Origins of the trajectories: their number and policies by code version, reward version, schema, temperature and top_p.
SELECT
    code_version,
    reward_version,
    schema_version,
    temperature,
    top_p,
    count(*) AS num_trajectories,
    count(DISTINCT policy_fingerprint) AS num_policies,
    min(policy_step) AS first_policy_step,
    max(policy_step) AS last_policy_step,
    min(created_at) AS first_at,
    max(created_at) AS last_at
FROM trajectories
GROUP BY code_version, reward_version, schema_version, temperature, top_p
ORDER BY num_trajectories DESC
LIMIT 20;
