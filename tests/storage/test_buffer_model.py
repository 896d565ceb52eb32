"""The replay buffer against a plain model of it in memory, under random interleavings (Hypothesis).

Whatever order shards are committed, retried, compacted, deleted, taken in, drawn and rebuilt in:
- the buffer stores what the model stores: distinct responses, the newest of each prompt. It may have dropped what
  `max_age` keeps from all later steps
- a draw is the slow reference's draw of the model's rows, or is refused for the model's reason (flow control)
- a committed round is never replaced, and each trajectory is taken in once; SQL shows each once
- a buffer rebuilt as of any step draws that step's batch again; a resumed one goes on as if nothing had been undone

Run: pytest tests/storage/test_buffer_model.py
"""

import tempfile
from collections import Counter, defaultdict
from datetime import timedelta

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from storage import attempts, ledger, queries, shards, upkeep
from storage.buffer import NotEnoughExperience, ReplayBuffer
from storage.errors import AlreadyExists
from storage.mop import SamplingSettings
from storage.shards import next_round, shard_path, trajectory_id
from tests.storage.buffer_runs import SEED, commit, new_store
from tests.storage.helpers import OWNER
from tests.storage.reference_draw import key_of, reference_draw

pytestmark = pytest.mark.slow

# few prompts and responses, so that repeats, eviction and groups smaller than K are common
RESPONSES = st.lists(
    st.tuples(
        st.sampled_from("abcd"), st.integers(0, 5).map(lambda token: [token, 1]), st.sampled_from([0.0, 0.5, 1.0])
    ),
    min_size=1,
    max_size=8,
)
SEARCHERS = st.sampled_from(["s0", "s1", "s2"])
SAMPLINGS = st.builds(
    SamplingSettings,
    prompts_per_batch=st.integers(1, 4),
    responses_per_prompt=st.integers(2, 3),
    recent_probability=st.sampled_from([0.0, 0.5, 1.0]),
    reward_temperature=st.sampled_from([None, 0.5]),
    uniform_fraction=st.sampled_from([0.0, 0.25]),
    capacity_per_prompt=st.integers(3, 5),
    min_size=st.sampled_from([1, 6]),
    samples_per_insert=st.sampled_from([None, 2.0]),
    max_age=st.sampled_from([None, 1, 2]),
)


class Model:
    """What the buffer promises to store, in the plainest way. A row is a dictionary."""

    def __init__(self, sampling: SamplingSettings) -> None:
        self.sampling = sampling
        self.committed: dict[str, list[list[dict]]] = defaultdict(list)  # by searcher, a list of rows a round
        self.syncs: list[tuple[int, dict[str, int]]] = []  # (step, rounds taken in of each searcher, in all)

    def taken_in(self) -> list[dict]:
        """Every row of the syncs that count, each with its sync."""
        rows, before = [], defaultdict(int)
        for number, (step, rounds) in enumerate(self.syncs, start=1):
            for searcher, until in rounds.items():
                for shard in self.committed[searcher][before[searcher] : until]:
                    rows += [row | {"sync": number, "ages_from": self.ages_from(row, step)} for row in shard]
                before[searcher] = until
        return rows

    @staticmethod
    def ages_from(row: dict, sync_step: int) -> int:
        """A policy that a resume undid is as far from the line's newest as one so many steps before."""
        newest = sync_step - 1
        return newest - abs(newest - row["policy_step"])

    def stored(self) -> list[dict]:
        def age(row: dict) -> tuple:
            return row["sync"], row["policy_step"], key_of(row["trajectory_id"])

        rows = self.taken_in()
        times = Counter((row["sync"], row["prompt_id"], tuple(row["tokens"])) for row in rows)
        newest: dict[tuple, dict] = {}  # of identical responses to a prompt
        for row in sorted(rows, key=age):
            response = row["prompt_id"], tuple(row["tokens"])
            newest[response] = row | {"num_copies": times[row["sync"], *response]}
        by_prompt = defaultdict(list)
        for row in sorted(newest.values(), key=age, reverse=True):
            by_prompt[row["prompt_id"]].append(row)
        return [row for rows in by_prompt.values() for row in rows[: self.sampling.capacity_per_prompt]]

    def drawable(self, step: int) -> list[dict] | None:
        """What a step may draw; None where it must wait."""
        sampling, num_inserted = self.sampling, len(self.taken_in())
        drawn = step * sampling.prompts_per_batch * sampling.responses_per_prompt
        if num_inserted < sampling.min_size:
            return None
        if sampling.samples_per_insert is not None and drawn > sampling.samples_per_insert * num_inserted:
            return None
        return [row for row in self.stored() if self.is_young(row, step)] or None

    def is_young(self, row: dict, step: int) -> bool:
        max_age = self.sampling.max_age
        return max_age is None or step - 1 - row["ages_from"] <= max_age


class BufferAgainstModel(RuleBasedStateMachine):
    """`step` is the last one trained; a training step is what moves it."""

    @initialize(sampling=SAMPLINGS)
    def begin(self, sampling: SamplingSettings) -> None:
        self.patch = pytest.MonkeyPatch()
        self.patch.setattr(shards, "ROUNDS_PER_BLOCK", 2)
        self.folder = tempfile.TemporaryDirectory(prefix="tba-model-")
        self.store = new_store(self.folder.name)
        self.model = Model(sampling)
        self.attempt, self.step = 1, 0
        self.buffer = ReplayBuffer(self.store, sampling, SEED)
        self.batches: dict[int, list[dict]] = {}  # of the steps that count

    def teardown(self) -> None:
        if hasattr(self, "folder"):
            self.folder.cleanup()
            self.patch.undo()

    @rule(searcher=SEARCHERS, responses=RESPONSES, lag=st.integers(0, 3))
    def commit(self, searcher: str, responses: list, lag: int) -> None:
        number, policy_step = len(self.model.committed[searcher]), max(0, self.step - lag)
        assert next_round(self.store, searcher) == number
        commit(self.store, searcher, number, responses, policy_step)
        self.model.committed[searcher].append(
            [
                {
                    "trajectory_id": trajectory_id(searcher, number, index),
                    "prompt_id": prompt_id,
                    "tokens": tokens,
                    "reward": reward,
                    "policy_step": policy_step,
                }
                for index, (prompt_id, tokens, reward) in enumerate(responses)
            ]
        )

    @precondition(lambda self: any(self.model.committed.values()))
    @rule(responses=RESPONSES, data=st.data())
    def retry(self, responses: list, data: st.DataObject) -> None:
        searcher = data.draw(st.sampled_from(sorted(name for name, log in self.model.committed.items() if log)))
        number = data.draw(st.integers(0, len(self.model.committed[searcher]) - 1))
        if self.store.exists(shard_path(searcher, number)):
            with pytest.raises(AlreadyExists):
                commit(self.store, searcher, number, responses)
        else:  # compacted, its shard deleted: this one counts for nothing
            commit(self.store, searcher, number, responses)

    @rule(deletes=st.booleans())
    def compact(self, deletes: bool) -> None:
        upkeep.compact(self.store)
        if deletes:
            upkeep.delete_superseded(self.store, timedelta(0))
        rows = queries.query(self.store, "SELECT trajectory_id FROM trajectories").column(0).to_pylist()
        logs = self.model.committed.values()
        assert sorted(rows) == sorted(row["trajectory_id"] for log in logs for shard in log for row in shard)

    @rule()
    def sync(self) -> None:
        rounds = {searcher: len(log) for searcher, log in self.model.committed.items() if log}
        taken_in = self.buffer.sync(self.step + 1, self.attempt)
        is_new = rounds != (self.model.syncs[-1][1] if self.model.syncs else {})
        assert (taken_in is not None) == is_new
        if is_new:
            self.model.syncs.append((self.step + 1, rounds))

    @rule()
    def train(self) -> None:
        """One training step, if flow control lets it go on."""
        step, drawable = self.step + 1, self.model.drawable(self.step + 1)
        if drawable is None:
            with pytest.raises(NotEnoughExperience):
                self.buffer.draw(step)
            return
        batch = self.buffer.draw(step)
        rows = batch.select(["prompt_index", "slot", "trajectory_id", "recent", "draw_probability"]).to_pylist()
        assert [tuple(row.values()) for row in rows] == reference_draw(
            drawable, self.buffer.newest_sync, self.model.sampling, step
        )
        ledger.record_batch(self.store, self.attempt, step, batch)
        self.batches[step], self.step = batch.to_pylist(), step

    @precondition(lambda self: self.batches)
    @rule(data=st.data())
    def draw_again(self, data: st.DataObject) -> None:
        """What did that step draw? Another buffer finds out from the store alone."""
        step = data.draw(st.sampled_from(sorted(self.batches)))
        other = ReplayBuffer(self.store, self.model.sampling, SEED)
        other.rebuild(step)
        assert other.draw(step).to_pylist() == self.batches[step]

    @rule(data=st.data())
    def resume(self, data: st.DataObject) -> None:
        """The Trainer dies, and its successor goes on from a checkpoint."""
        self.step = data.draw(st.integers(0, self.step))
        self.attempt = attempts.start_attempt(self.store, self.step, OWNER)
        self.buffer = ReplayBuffer(self.store, self.model.sampling, SEED)
        self.buffer.rebuild(self.step)
        self.batches = {step: batch for step, batch in self.batches.items() if step <= self.step}
        self.model.syncs = [(step, rounds) for step, rounds in self.model.syncs if step <= self.step]

    @invariant()
    def the_buffer_stores_what_the_model_stores(self) -> None:
        if not hasattr(self, "model"):
            return
        stored = self.model.stored()
        index = self.buffer._index._reader.execute(
            "SELECT trajectory_id, sync, num_copies FROM trajectories"
        ).fetchall()
        ids = {name for name, *_ in index}
        kept = [row for row in stored if row["trajectory_id"] in ids]
        assert sorted(index) == sorted((row["trajectory_id"], row["sync"], row["num_copies"]) for row in kept)
        assert not any(self.model.is_young(row, self.step + 1) for row in stored if row not in kept)
        assert self.buffer.num_prompts == len({row["prompt_id"] for row in kept})
        assert self.buffer.num_inserted == len(self.model.taken_in())
        assert self.buffer.newest_sync == len(self.model.syncs)


TestBufferAgainstModel = BufferAgainstModel.TestCase
TestBufferAgainstModel.settings = settings(
    max_examples=25, stateful_step_count=25, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
