"""The only definition of the columns of every Parquet file.

A trajectory is one prompt with one sampled response and its reward. The other schemas are the ledger: one row for each
round, draw, step and measurement. Times are UTC, durations seconds (`_s`), log-probabilities natural logs.
"""

import pyarrow as pa
import pyarrow.compute as pc

# Version of TRAJECTORY, kept in each row. Raise it when a column is added, removed or changed. A shard of an older
# version is read with ADDED's values in missing columns. A shard of a newer version is refused: its columns may mean
# other things.
SCHEMA_VERSION = 3
# Of each added column, in TRAJECTORY's order: its first version, and the column whose values it has in older shards;
# None: it is empty text.
ADDED = {
    "last_policy_step": (3, "policy_step"),
    "last_policy_fingerprint": (3, "policy_fingerprint"),
    "system_prompt": (2, None),
}

_TIME = pa.timestamp("us", tz="UTC")

TRAJECTORY = pa.schema(
    {
        "trajectory_id": pa.string(),  # searcher-round-index: the same for a retried round, so nothing counts twice
        "prompt_id": pa.string(),
        "prompt": pa.string(),
        "response": pa.string(),
        "prompt_tokens": pa.list_(pa.int32()),
        "response_tokens": pa.list_(pa.int32()),  # the stop token included
        "behavior_logprobs": pa.list_(pa.float32()),  # one a response token, as sampled
        "reference_logprobs": pa.list_(pa.float32()),  # one a response token, by the reference policy
        "reward": pa.float32(),
        "rewards": pa.map_(pa.string(), pa.float32()),  # components of the reward
        "finish_reason": pa.string(),  # stop, or length (cut at the task's limit)
        "policy_step": pa.int64(),  # of the weights that sampled its first token
        "policy_fingerprint": pa.string(),  # checksum of the weights actually served
        "last_policy_step": pa.int64(),  # of the weights that sampled its last token: a new policy may come in between
        "last_policy_fingerprint": pa.string(),
        "searcher": pa.string(),
        "round": pa.int64(),
        "temperature": pa.float32(),
        "top_p": pa.float32(),
        "system_prompt": pa.string(),  # before the prompt in sampling, not in training; "": none
        "reward_version": pa.string(),
        "code_version": pa.string(),
        "schema_version": pa.int32(),
        "created_at": _TIME,
    }
)

# A stored trajectory's reward by another reward function.
REWARD = pa.schema(
    {
        "trajectory_id": pa.string(),
        "reward_version": pa.string(),
        "reward": pa.float32(),
        "created_at": _TIME,
    }
)

# One drawn slot of a training batch.
BATCH = pa.schema(
    {
        "attempt": pa.int64(),
        "step": pa.int64(),
        "sync": pa.int64(),  # the newest sync when the batch was drawn
        "prompt_index": pa.int32(),  # 0..B-1
        "slot": pa.int32(),  # 0..K-1
        "trajectory_id": pa.string(),
        "prompt_id": pa.string(),
        "recent": pa.bool_(),  # drawn from the trajectories of the newest sync
        "draw_probability": pa.float64(),  # of being the first of the K drawn for its prompt
        "reward": pa.float32(),
        "policy_step": pa.int64(),
        # Policy steps between the weights that sampled it and those trained: step - 1 - policy_step. If a resume undid
        # that policy: its steps after the checkpoint plus those trained since (ages_from in storage/buffer.py).
        "staleness": pa.int64(),
    }
)

TRAINING_STEP = pa.schema(
    {
        "attempt": pa.int64(),
        "step": pa.int64(),
        "started_at": _TIME,
        "ended_at": _TIME,
        "wait_s": pa.float64(),  # without a batch, before this step
        "step_s": pa.float64(),
        "publish_stall_s": pa.float64(),  # training stood still to hand over a policy or a checkpoint
        "loss": pa.float64(),
        "reward_mean": pa.float64(),
        # of all trajectories of the newest sync; null before this attempt's first sync
        "fresh_reward_mean": pa.float64(),
        "fresh_kl": pa.float64(),  # behavior - reference log-probability, nats a response
        "fresh_entropy": pa.float64(),  # - behavior log-probability, nats a token
        "fresh_cut_share": pa.float64(),  # of the responses, cut at the length limit
        "fresh_staleness": pa.float64(),  # policy steps between the weights that sampled and those trained
        "reward_recent_mean": pa.float64(),  # null if the batch has no recent trajectory
        "log_z_mean": pa.float64(),
        "residual_abs_mean": pa.float64(),
        "logprob_gap_mean": pa.float64(),
        "effective_sample_size": pa.float64(),  # share of the batch, by the ratios policy / behavior of its responses
        "tapered_share": pa.float64(),  # of the batch's responses: their residual weighs less than 1
        "logprob_mismatch": pa.float64(),  # of Trainer's and engine's, on the newest policy's responses
        "gradient_norm": pa.float64(),
        "learning_rate": pa.float64(),
        "beta": pa.float64(),
        "staleness_mean": pa.float64(),
        "staleness_max": pa.int64(),
        "num_trajectories": pa.int64(),  # in the buffer
        "num_prompts": pa.int64(),  # in the buffer
        "num_inserted": pa.int64(),  # trajectories ever taken in: what min_size counts
        "samples_per_insert": pa.float64(),  # mean draws of each trajectory taken in, this step's included
        "num_too_old": pa.int64(),  # in the buffer, but excluded from the draw by max_age
        "searchers_silent_s": pa.float64(),  # since the last sync that took in trajectories
        "num_response_tokens": pa.int64(),  # in the batch
        "num_unique": pa.int64(),  # distinct trajectories in the batch
        "skipped": pa.bool_(),  # the weights were not changed
    }
)

SEARCH_ROUND = pa.schema(
    {
        "searcher": pa.string(),
        "round": pa.int64(),
        "policy_step": pa.int64(),
        "started_at": _TIME,
        "sampling_started_at": _TIME,
        "sampling_ended_at": _TIME,
        "ended_at": _TIME,
        "num_trajectories": pa.int64(),
        "num_response_tokens": pa.int64(),
        "reward_mean": pa.float64(),
    }
)

# The rounds of one Searcher that one sync took in.
SYNC = pa.schema(
    {
        "attempt": pa.int64(),
        "sync": pa.int64(),
        "step": pa.int64(),
        "searcher": pa.string(),
        "first_round": pa.int64(),
        "last_round": pa.int64(),
        "num_trajectories": pa.int64(),  # of the whole sync; the same in each of its rows
    }
)

# One attempt of the Trainer: from its start to its end.
ATTEMPT = pa.schema(
    {
        "attempt": pa.int64(),
        "resumed_from": pa.int64(),  # the checkpoint's step, 0 from scratch
        "host": pa.string(),
        "pid": pa.int64(),
        "created_at": _TIME,
    }
)

EVALUATION = pa.schema(
    {
        "attempt": pa.int64(),  # attempt of the Trainer that published the policy
        "policy_step": pa.int64(),
        "split": pa.string(),
        "num_problems": pa.int64(),
        "accuracy": pa.float64(),
        "mean_response_tokens": pa.float64(),
        "seconds": pa.float64(),  # that the Searcher spent on it
        "created_at": _TIME,
    }
)

# One measure of how different the responses of a group of trajectories are.
DIVERSITY = pa.schema(
    {
        "measured_at": _TIME,
        "grouping": pa.string(),  # policy, searcher or run
        "searcher": pa.string(),  # null unless by searcher
        "first_policy_step": pa.int64(),
        "last_policy_step": pa.int64(),
        "metric": pa.string(),
        "value": pa.float64(),  # mean over prompts, of each the mean over its draws
        "standard_error": pa.float64(),  # 0: all responses to all prompts were measured; null: one draw was
        "low": pa.float64(),  # of the 95 % interval
        "high": pa.float64(),
        "responses_per_prompt": pa.int64(),
        "num_measured_prompts": pa.int64(),
        "num_prompts": pa.int64(),
        "num_trajectories": pa.int64(),
    }
)


def as_trajectories(table: pa.Table) -> pa.Table:
    """A shard of this or an older version, in TRAJECTORY's columns. Raises: ValueError: any other table."""
    version = _version_of(table)
    if version > SCHEMA_VERSION:
        raise ValueError(
            f"has schema version {version}, and this version of tba reads versions up to {SCHEMA_VERSION}: upgrade "
            "tba on this machine"
        )
    if table.schema.equals(TRAJECTORY):
        return table
    for name, (since, same_as) in ADDED.items():
        names = table.column_names
        if version < since and name not in names and (same_as is None or same_as in names):
            column = pa.repeat("", table.num_rows) if same_as is None else table[same_as]
            table = table.add_column(TRAJECTORY.get_field_index(name), TRAJECTORY.field(name), column)
    if not table.schema.equals(TRAJECTORY):
        raise ValueError(f"has other columns than a shard of schema version {version}: {_differences(table.schema)}")
    return table


def _differences(schema: pa.Schema) -> str:
    ours, theirs = (list(zip(of.names, of.types, strict=True)) for of in (TRAJECTORY, schema))
    missing = [f"no {name}: {type_}" for name, type_ in ours if (name, type_) not in theirs]
    unknown = [f"{name}: {type_} in excess" for name, type_ in theirs if (name, type_) not in ours]
    return "; ".join([*missing, *unknown]) or "another order"


def _version_of(table: pa.Table) -> int:
    """The newest version that the rows name; this version if they name none."""
    place = table.schema.get_field_index("schema_version")  # -1: not there, or there twice
    if place < 0 or not pa.types.is_integer(table.schema.field(place).type):
        return SCHEMA_VERSION
    newest = pc.max(table[place]).as_py()
    return SCHEMA_VERSION if newest is None else newest


def to_table(rows: list[dict], schema: pa.Schema) -> pa.Table:
    """Rows as a table of `schema`. Raises: ValueError: missing or unknown columns, which pyarrow would fill or drop."""
    names = set(schema.names)
    for index, row in enumerate(rows):
        if row.keys() != names:
            missing, unknown = sorted(names - row.keys()), sorted(row.keys() - names)
            raise ValueError(f"row {index} does not fit the schema: missing {missing}, unknown {unknown}")
    return pa.Table.from_pylist(rows, schema)
