-- The replay buffer's index: an in-memory database of the shards' metadata, which can be rebuilt at any time.
-- Random numbers are computed from `key`: the first half of the id's md5, the same on every machine and in every version of
-- DuckDB (hash() is not). `prompt` joins the tables; no random number may depend on it.

-- One row for each prompt ever taken in.
CREATE TABLE prompts (
    prompt INTEGER,
    prompt_id VARCHAR,
    key UBIGINT,
    newest_ages_from BIGINT, -- the largest ages_from of its stored trajectories
    newest_sync BIGINT, -- the newest sync that brought one of them; NULL: all were dropped
    newest_sync_ages_from BIGINT, -- the largest ages_from of the trajectories of that sync
    -- The largest `oldest` at which the stored trajectories with ages_from >= oldest still have two different rewards.
    -- NULL: all rewards are equal.
    rewards_differ_from BIGINT,
    newest_sync_rewards_differ_from BIGINT -- the same among the trajectories of that sync
);

-- One row for each stored trajectory; its tokens and log-probabilities are in a record of the word file.
CREATE TABLE trajectories (
    prompt INTEGER,
    sync BIGINT,
    policy_step BIGINT,
    ages_from BIGINT, -- the policy step that its staleness counts from
    trajectory_id VARCHAR,
    key UBIGINT,
    response_digest BIGINT,
    reward FLOAT,
    num_copies INTEGER, -- copies of this response to this prompt that its sync brought
    record BIGINT
);
