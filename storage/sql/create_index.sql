-- The replay buffer's index: an in-memory database over the shards, metadata only. Thrown away and rebuilt at will.
-- A `key` is what random numbers are computed from: the first half of the id's md5, the same everywhere and always
-- (hash() is not the same in every version of DuckDB). `prompt` joins the tables; no random number may depend on it.

-- One row a prompt ever taken in.
CREATE TABLE prompts (
    prompt INTEGER,
    prompt_id VARCHAR,
    key UBIGINT,
    newest_ages_from BIGINT, -- the largest ages_from of its stored trajectories
    newest_sync BIGINT, -- that brought one of them
    newest_sync_ages_from BIGINT, -- the largest of those that sync brought
    rewards_differ BOOLEAN, -- among its stored trajectories
    newest_sync_rewards_differ BOOLEAN -- among those that sync brought
);

-- One row a stored trajectory; its tokens and log-probabilities are a record of the word file.
CREATE TABLE trajectories (
    prompt INTEGER,
    sync BIGINT,
    policy_step BIGINT,
    ages_from BIGINT, -- the policy step that its staleness counts from
    trajectory_id VARCHAR,
    key UBIGINT,
    response_digest BIGINT,
    reward FLOAT,
    times_sampled INTEGER, -- how often its sync brought this very response to this prompt
    record BIGINT
);
