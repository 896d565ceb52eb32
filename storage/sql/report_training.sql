-- The training curves, in at most $num_bins points over the steps. Each point is the mean of a span of steps.
SELECT
    max(step) AS step,
    avg(reward_mean) AS batch_reward,
    avg(fresh_reward_mean) AS sampled_reward,
    avg(fresh_kl) AS fresh_kl,
    avg(fresh_entropy) AS fresh_entropy,
    avg(fresh_cut_share) AS fresh_cut_share,
    avg(effective_sample_size) AS effective_sample_size,
    avg(tapered_share) AS tapered_share,
    avg(logprob_mismatch) AS logprob_mismatch,
    avg(loss) AS loss,
    avg(gradient_norm) AS gradient_norm,
    avg(logprob_gap_mean) AS policy_reference_gap,
    avg(num_trajectories) AS num_trajectories
FROM report_steps, (SELECT min(step) AS first, max(step) AS last FROM report_steps) AS span
GROUP BY (step - first) * $num_bins // (last - first + 1)
ORDER BY 1;
