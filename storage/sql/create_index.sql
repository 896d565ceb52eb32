-- The replay buffer's index: an in-memory database over the shards, metadata only. Thrown away and rebuilt at will.

-- One row a prompt ever taken in. `prompt` is a join key of this index alone: no random number may depend on it.
CREATE TABLE prompts (
    prompt INTEGER,
    prompt_id VARCHAR,
    newest_policy_step BIGINT, -- of its stored trajectories
    newest_sync BIGINT, -- that brought one of them
    newest_sync_policy_step BIGINT -- the newest of those that sync brought
);

-- One row a stored trajectory; its tokens and log-probabilities lie in the word file, from `word_offset` on.
CREATE TABLE trajectories (
    prompt INTEGER,
    sync BIGINT,
    policy_step BIGINT,
    trajectory_id VARCHAR,
    response_digest BIGINT,
    reward FLOAT,
    times_sampled INTEGER, -- how often its sync brought this very response to this prompt
    word_offset BIGINT,
    num_prompt_tokens INTEGER,
    num_response_tokens INTEGER
);

-- A uniform number in (0, 1) that anyone can compute again: the high 52 bits of the md5 of "seed/step/purpose/id", read
-- as a little-endian integer. (hash() is faster, but not the same in every version of DuckDB.)
CREATE MACRO uniform_number(seed, step, purpose, id) AS
    ((md5_number(seed || '/' || step || '/' || purpose || '/' || id) >> 76)::DOUBLE + 0.5) / 4503599627370496;
