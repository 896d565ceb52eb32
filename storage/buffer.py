"""The replay buffer: shards in, batches out.

    shards in the store ──sync──► index (DuckDB: metadata) + word file (tokens, log-probabilities) ──draw──► batch

The shards are the truth. Index and word file are one process's cache of them, gone with it and rebuilt at will.

    sync     produces: a sync record, rows to draw   consumes: shards committed since the last sync
    draw     produces: a batch                       consumes: nothing, rows stay
             waits for nothing: raises NotEnoughExperience where flow control says that the Trainer is too early:
             fewer than `min_size` taken in, more than `samples_per_insert` drawn of each, none within `max_age`
    rebuild  produces: the buffer as it was at some step, from shards and sync records alone

A draw depends on nothing but (seed, step) and the rows stored, and those only on the syncs so far: "what would step 420
have drawn?" is `rebuild(420)`, `draw(420)`, on any machine, any day. What may be drawn is SQL (list_prompts.sql,
list_candidates.sql), how likely, storage/mop.py.

B prompts a batch, K responses a prompt.
"""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import duckdb
import numpy as np
import pyarrow as pa
from pydantic import BaseModel, ConfigDict, Field, model_validator

from storage import ledger, mop
from storage.fresh import Fresh
from storage.shards import by_block, expired_through, new_shards, read_shards
from storage.sql import sql
from storage.store import RunStore
from storage.word_file import WordFile

# Rounds of whole syncs that a rebuild indexes before it throws out repeats: few statements, and few rows in excess.
ROUNDS_PER_SETTLE = 64


class NotEnoughExperience(RuntimeError):
    """Flow control: a batch now would be too early. The message names the setting, and what would let it go on."""


class Sampling(BaseModel):
    """How batches are drawn: MOP, mixing recent and older trajectories (TBA, arXiv 2503.18929, section 4)."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    prompts_per_batch: int = Field(8, ge=1, description="B, prompts in a batch")
    responses_per_prompt: int = Field(16, ge=2, description="K, responses drawn of each prompt; the loss compares them")
    recent_probability: float = Field(0.75, ge=0, le=1, description="m, share of prompts drawn from the newest sync")
    reward_temperature: float | None = Field(
        None, gt=0, allow_inf_nan=False, description="tau: other draws weigh softmax(reward / tau); None: all the same"
    )
    uniform_fraction: float = Field(0.0, ge=0, le=1, description="share of the uniform distribution in that softmax")
    capacity_per_prompt: int = Field(100, ge=2, description="distinct responses kept of each prompt, the newest")
    min_size: int = Field(192, ge=1, description="trajectories taken in before the first batch, repeats included")
    samples_per_insert: float | None = Field(
        None, gt=0, allow_inf_nan=False, description="draws of each trajectory taken in, at most, on average; None: any"
    )
    max_age: int | None = Field(
        None, ge=0, description="policy steps; trajectories of older policies are not drawn; None: all are"
    )

    @model_validator(mode="after")
    def _capacity_holds_a_draw(self) -> "Sampling":
        if self.capacity_per_prompt < self.responses_per_prompt:
            raise ValueError(
                f"capacity_per_prompt={self.capacity_per_prompt} must be at least "
                f"responses_per_prompt={self.responses_per_prompt}, or no prompt ever has enough; raise it"
            )
        return self


@dataclass(frozen=True)
class Sync:
    """What one sync took in."""

    number: int  # counts from 1
    step: int  # the first training step that could draw it
    attempt: int
    rounds: dict[str, list[int]]  # by searcher, in order
    fresh: Fresh  # all that was taken in

    @property
    def num_trajectories(self) -> int:
        return self.fresh.num_trajectories


def ages_from(policy_step: np.ndarray, sync_step: np.ndarray) -> np.ndarray:
    """The policy step that a trajectory's staleness counts from, given the first training step that could draw it.

    That is its policy's step, unless a resume undid that policy: then its step is sync_step or later, which no policy
    of the run had when the trajectory came in. Both lines have policy sync_step - 1 in common, and n steps after it are
    as far from it as n steps before it. Not told apart is a trajectory of an undone policy that comes in after training
    has passed that policy's step again, as of a round that is on its way while the Trainer resumes.
    """
    return np.minimum(policy_step, 2 * (sync_step - 1) - policy_step)


class ReplayBuffer:
    """All trajectories of a run, without repeats and bounded by prompt, sampled by recency and reward.

    Of identical responses to one prompt the newest stays, and weighs by how often its sync brought them; of each prompt
    the newest `capacity_per_prompt` responses stay. Age is (sync, policy_step, md5 of trajectory_id), so the order of
    reading does not matter.
    """

    def __init__(self, store: RunStore, sampling: Sampling, seed: int):
        self._store = store
        self._sampling = sampling
        self._seed = seed
        self._clear()

    def sync(self, step: int, attempt: int) -> Sync | None:
        """Take in every shard committed since the last sync, before `step` is drawn; what they hold becomes "recent".

        Without new shards nothing changes (recent stays what the last sync took in) and the result is None. The sync
        is in the ledger before its rows can be drawn, so every batch ever drawn can be drawn again. On an error nothing
        is taken in: TornShard, or AlreadyExists where another Trainer records syncs of the same attempt.
        """
        rounds = new_shards(self._store, self._seen)
        if not rounds:
            return None
        number = self.newest_sync + 1
        with self._transaction():
            sync = Sync(number, step, attempt, rounds, self._take_in({number: rounds}, {number: step}))
            ledger.record_sync(self._store, sync)
        self._advance(number, rounds, sync.num_trajectories)
        return sync

    def rebuild(self, step: int) -> None:
        """Become the buffer `step` was drawn from: the shards of the recorded syncs that count, up to that step's.

        What has expired since is left out. The next sync() takes in the rest. Raises NotFound or TornShard where a
        recorded shard is gone or unreadable.
        """
        self._clear()
        records, expired = ledger.effective_syncs(self._store, step), expired_through(self._store)
        syncs: dict[int, dict[str, list[int]]] = defaultdict(lambda: defaultdict(list))
        for record in records:
            first = max(record["first_round"], expired.get(record["searcher"], -1) + 1)
            syncs[record["sync"]][record["searcher"]] += range(first, record["last_round"] + 1)
        with self._transaction():
            found = self._take_in(syncs, {record["sync"]: record["step"] for record in records})
        # What has expired since was drawn, so it counts as taken in. Older versions did not record how many.
        recorded = {record["sync"]: record.get("num_trajectories") for record in records}.values()
        num_taken_in = found.num_trajectories if None in recorded else sum(recorded)
        newest_sync = max((record["sync"] for record in records), default=0)
        self._advance(newest_sync, {record["searcher"]: [record["last_round"]] for record in records}, num_taken_in)

    def draw(self, step: int) -> pa.Table:
        """The batch of a training step: B * K rows, ordered by prompt_index (0 to B-1) and slot (0 to K-1).

        Columns: prompt_index, slot, trajectory_id, prompt_id, recent, draw_probability (of being the first of the K
        drawn, given its prompt and `recent`), reward, policy_step, ages_from, sync (the newest when drawn),
        prompt_tokens, response_tokens, behavior_logprobs, reference_logprobs.

        Raises NotEnoughExperience where it is too early.
        """
        self._check_rate(step)
        sampling, oldest = self._sampling, self._oldest(step)
        prompts = self._execute("list_prompts", {"newest_sync": self.newest_sync, "oldest": oldest}).fetchnumpy()
        if not len(prompts["prompt"]):
            raise NotEnoughExperience(
                f"max_age={sampling.max_age}, but all {self.num_trajectories} trajectories stored are older, of "
                f"policies before step {oldest}: sync again when Searchers have committed newer ones, or raise max_age"
            )
        chosen, recent = mop.choose_prompts(
            prompts["key"], prompts["recent"], sampling.prompts_per_batch, sampling.recent_probability, self._seed, step
        )
        prompt_of_place = prompts["prompt"][chosen]
        rows, probabilities = self._draw_responses(step, prompt_of_place, recent, oldest)
        num_places, num_slots = sampling.prompts_per_batch, sampling.responses_per_prompt
        columns = {
            "prompt_index": np.repeat(np.arange(num_places, dtype=np.int32), num_slots),
            "slot": np.tile(np.arange(num_slots, dtype=np.int32), num_places),
            "trajectory_id": rows["trajectory_id"],
            "prompt_id": np.repeat([self._prompt_ids[prompt] for prompt in prompt_of_place.tolist()], num_slots),
            "recent": np.repeat(recent, num_slots),
            "draw_probability": probabilities,
            "reward": rows["reward"],
            "policy_step": rows["policy_step"],
            "ages_from": rows["ages_from"],
            "sync": np.full(num_places * num_slots, self.newest_sync),
        }
        return pa.table(columns | self._words.read(rows["record"]))

    def _draw_responses(
        self, step: int, prompt_of_place: np.ndarray, recent: np.ndarray, oldest: int
    ) -> tuple[dict[str, np.ndarray], np.ndarray]:
        """The candidates' columns at the slots of all places, and each one's probability of being drawn first [B * K].

        prompt_of_place, recent: [B]. oldest: the smallest `ages_from` that may be drawn.
        """
        sampling = self._sampling
        candidates = self._execute("list_candidates", {"prompts": prompt_of_place.tolist()}).fetchnumpy()
        may_be_drawn, is_new = candidates["ages_from"] >= oldest, candidates["sync"] == self.newest_sync
        slots, probabilities = [], []  # of each place, [K]
        for place, (prompt, is_recent) in enumerate(zip(prompt_of_place, recent, strict=True)):
            of_place = np.flatnonzero((candidates["prompt"] == prompt) & may_be_drawn & (is_new | ~is_recent))
            by_reward = sampling.reward_temperature is not None and not is_recent
            reward = candidates["reward"][of_place].astype(np.float64)
            of_slots, probability = mop.draw_responses(
                mop.Candidates(
                    candidates["key"][of_place],
                    reward / sampling.reward_temperature if by_reward else np.zeros(len(of_place)),
                    candidates["times_sampled"][of_place],
                ),
                sampling.responses_per_prompt,
                sampling.uniform_fraction,
                self._seed,
                step,
                place,
            )
            slots.append(of_place[of_slots])
            probabilities.append(probability)
        drawn = np.concatenate(slots)
        return {name: values[drawn] for name, values in candidates.items()}, np.concatenate(probabilities)

    def _check_rate(self, step: int) -> None:
        """NotEnoughExperience while too little was taken in for that many steps. Depends on step and syncs alone."""
        taken_in, limit = self.num_taken_in, self._sampling.samples_per_insert
        if taken_in < self._sampling.min_size:
            raise NotEnoughExperience(
                f"{taken_in} of the first {self._sampling.min_size} trajectories (min_size) have come in"
            )
        if limit is not None and self.samples_per_insert(step) > limit:
            raise NotEnoughExperience(
                f"step {step} would draw each of {taken_in} trajectories {self.samples_per_insert(step):.2f} times on "
                f"average, and samples_per_insert is {limit:g}: it waits for more"
            )

    def _oldest(self, step: int) -> int:
        """The smallest `ages_from` that may be drawn. A trajectory of policy step - 1 is on-policy: its age is 0."""
        max_age = self._sampling.max_age
        return np.iinfo(np.int64).min if max_age is None else step - 1 - max_age

    def samples_per_insert(self, step: int) -> float:
        """How often a trajectory taken in so far is drawn on average, once that step is drawn: each draws B * K."""
        drawn = step * self._sampling.prompts_per_batch * self._sampling.responses_per_prompt
        return drawn / self.num_taken_in

    def num_too_old(self, step: int) -> int:
        """Trajectories stored that `max_age` keeps from that step."""
        query = "SELECT count(*) FROM trajectories WHERE ages_from < ?"
        return self._index.execute(query, [self._oldest(step)]).fetchone()[0]

    @property
    def num_trajectories(self) -> int:
        """Trajectories stored: what was taken in, less repeated responses and what capacity pushed out."""
        return self._index.execute("SELECT count(*) FROM trajectories").fetchone()[0]

    @property
    def num_prompts(self) -> int:
        return self._index.execute("SELECT count(*) FROM prompts").fetchone()[0]

    def _clear(self) -> None:
        # One thread: queries of milliseconds gain nothing from more, and the policy wants the cores.
        self._index = duckdb.connect(config={"threads": 1})
        self._index.execute(sql("create_index"))
        self._statements: dict[str, duckdb.Statement] = {}
        self._prompt_ids: dict[int, str] = {}  # as in the index, where a join would cost a draw a millisecond
        self._words = WordFile()
        self._seen: dict[str, int] = {}  # last round taken in, by searcher
        self.num_taken_in = 0  # repeats, and what capacity pushed out since, included
        self.newest_sync = 0

    def _execute(self, query: str, parameters: dict | None = None) -> duckdb.DuckDBPyConnection:
        """Run a file of storage/sql. Parsed once only: parsing alone would be a tenth of a draw."""
        if query not in self._statements:
            (self._statements[query],) = self._index.extract_statements(sql(query))
        return self._index.execute(self._statements[query], parameters)

    @contextmanager
    def _transaction(self) -> Iterator[None]:
        self._index.begin()
        try:
            yield
        except BaseException:
            self._index.rollback()
            raise
        self._index.commit()

    def _take_in(self, syncs: Mapping[int, Mapping[str, Sequence[int]]], steps: Mapping[int, int]) -> Fresh:
        """Index rounds, by sync and searcher, syncs in order; `steps`: of the syncs. Returns what they sum up to."""
        found, waiting = Fresh(), defaultdict(dict)  # by searcher the sync of each round
        last = max(syncs, default=0)
        for number, rounds in syncs.items():
            for searcher, of_searcher in rounds.items():
                waiting[searcher] |= dict.fromkeys(of_searcher, number)
            # Only once a sync is there in full: how often it brought a response counts copies that capacity throws out.
            if number == last or sum(map(len, waiting.values())) >= ROUNDS_PER_SETTLE:
                found += self._index_rounds(waiting, steps)
                waiting.clear()
        return found

    def _index_rounds(self, sync_of_round: Mapping[str, Mapping[int, int]], steps: Mapping[int, int]) -> Fresh:
        """Index rounds of whole syncs, by searcher; throw out repeats and what exceeds capacity. Returns their sums."""
        found, prompt_ids = Fresh(), []
        for searcher, syncs in sync_of_round.items():
            for rounds in by_block(syncs):
                shards = read_shards(self._store, searcher, rounds)
                arrivals = shards.select(["trajectory_id", "prompt_id", "policy_step", "reward"])
                sync = [syncs[round_] for round_ in shards["round"].to_pylist()]
                from_step = ages_from(shards["policy_step"].to_numpy(), np.array([steps[number] for number in sync]))
                columns = {"sync": sync, "ages_from": from_step} | self._words.append(shards)
                for name, column in columns.items():
                    arrivals = arrivals.append_column(name, [column])
                self._index.register("arrivals", arrivals)
                self._prompt_ids |= self._execute("insert_prompts").fetchall()
                self._execute("insert_trajectories")
                found += Fresh.of(shards)
                prompt_ids += shards["prompt_id"].chunks
        self._index.register("arrivals", pa.table({"prompt_id": pa.chunked_array(prompt_ids, pa.string()).unique()}))
        self._execute("count_copies")
        self._execute("delete_superseded", {"capacity_per_prompt": self._sampling.capacity_per_prompt})
        self._execute("update_prompts")
        self._index.unregister("arrivals")
        return found

    def _advance(self, newest_sync: int, rounds: dict[str, Iterable[int]], num_trajectories: int) -> None:
        self.newest_sync = newest_sync
        self._seen |= {searcher: max(rounds[searcher]) for searcher in rounds}
        self.num_taken_in += num_trajectories
