-- The scalars of every trajectory and every drawn slot that a report needs, in memory. Texts and lists stay in the files.
-- Log-probabilities of a response are summed over its tokens.
CREATE TEMP TABLE report_trajectories AS
SELECT
    trajectory_id,
    prompt_id,
    reward,
    policy_step,
    searcher,
    round,
    finish_reason,
    len(response_tokens) AS num_response_tokens,
    list_sum(behavior_logprobs) AS behavior_logprob,
    list_sum(reference_logprobs) AS reference_logprob
FROM trajectories;

CREATE TEMP TABLE report_batches AS
SELECT step, trajectory_id, recent, staleness, reward
FROM batches;

-- Loss and gradient of a skipped step are not finite. NULL leaves them out of means and charts.
CREATE TEMP TABLE report_steps AS
SELECT
    attempt,
    step,
    started_at,
    ended_at,
    wait_s,
    step_s,
    if(isfinite(loss), loss, NULL) AS loss,
    reward_mean,
    fresh_reward_mean,
    fresh_kl,
    fresh_entropy,
    fresh_cut_share,
    if(isfinite(effective_sample_size), effective_sample_size, NULL) AS effective_sample_size,
    if(isfinite(tapered_share), tapered_share, NULL) AS tapered_share,
    if(isfinite(logprob_mismatch), logprob_mismatch, NULL) AS logprob_mismatch,
    if(isfinite(logprob_gap_mean), logprob_gap_mean, NULL) AS logprob_gap_mean,
    if(isfinite(gradient_norm), gradient_norm, NULL) AS gradient_norm,
    num_trajectories,
    num_response_tokens,
    skipped
FROM training_steps;

CREATE TEMP TABLE report_rounds AS
SELECT * FROM search_rounds;
