-- One row: counts and means over the whole run, and its first and last times.
SELECT
    (SELECT count(*) FROM report_trajectories) AS num_trajectories,
    (SELECT count(DISTINCT prompt_id) FROM report_trajectories) AS num_prompts,
    (SELECT sum(num_response_tokens)::BIGINT FROM report_rounds) AS num_sampled_tokens, -- without a warm start's copies
    (SELECT avg(reward) FROM report_trajectories) AS reward_mean,
    (SELECT max(step) FROM report_steps) AS num_steps,
    (SELECT count(*) FROM report_steps WHERE skipped) AS num_skipped,
    (SELECT max(attempt) FROM report_steps) AS num_attempts,
    (SELECT count(*) FROM report_batches) AS num_drawn,
    (SELECT avg(staleness) FROM report_batches) AS staleness_mean,
    (SELECT max(staleness) FROM report_batches) AS staleness_max,
    (SELECT min(started_at) FROM report_rounds) AS first_round_at,
    (SELECT max(ended_at) FROM report_rounds) AS last_round_at,
    (SELECT min(started_at) FROM report_steps) AS first_step_at,
    (SELECT max(ended_at) FROM report_steps) AS last_step_at;
