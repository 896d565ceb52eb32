"""The replay buffer: shards in, batches out.

Before: storage/shards.py reads new shards; after: flows/trainer/experience.py makes draws of a batch's rows.

    shards in the store ──sync──► index (DuckDB: metadata) + word file (tokens, log-probabilities) ──draw──► batch

The shards are the only lasting data. Index and word file are a cache of them in one process and can be rebuilt.

    sync     produces: a sync record, rows to draw
             consumes: shards committed since the last sync; a shard that cannot be read or breaks a rule is refused
             (storage/intake.py)
    draw     produces: a batch
             consumes: nothing, rows stay. Raises NotEnoughExperience if flow control allows no batch yet: fewer than
             `min_size` trajectories taken in, more than `samples_per_insert` draws of each, or none within `max_age`
    rebuild  produces: the buffer as it was at some step, from shards and sync records alone

A draw depends only on (seed, step) and the stored rows, and these only on the syncs so far. So `rebuild(420)`,
`draw(420)` repeat the draw of step 420 on any machine. The candidates of a draw are chosen in SQL (list_prompts.sql,
list_candidates.sql), their probabilities computed in storage/mop.py.

B prompts a batch, K responses a prompt.
"""

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import duckdb
import numpy as np
import pyarrow as pa
from pydantic import BaseModel, ConfigDict, Field, model_validator

from storage import intake, ledger, mop
from storage.attempts import check_not_superseded
from storage.fresh import Fresh
from storage.rules import Limits
from storage.shards import by_block, expired_through, new_shards, refused_rounds
from storage.sql import sql
from storage.store import RunStore
from storage.word_file import WordFile

# Rounds, in whole syncs, that a rebuild indexes before it deletes repeats: a balance of statements and rows in excess.
ROUNDS_PER_SETTLE = 64


class NotEnoughExperience(RuntimeError):
    """Flow control: it is too early for a batch. The message names the setting that requires more trajectories."""


class Sampling(BaseModel):
    """How batches are drawn: MOP, mixing recent and older trajectories (TBA, arXiv 2503.18929, section 4)."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    prompts_per_batch: int = Field(16, ge=1, description="B: prompts in a batch.")
    responses_per_prompt: int = Field(8, ge=2, description="K: responses drawn for a prompt; the loss compares them.")
    recent_probability: float = Field(
        0.75, ge=0, le=1, description="m: probability that a prompt of a batch is drawn from the newest sync."
    )
    differing_rewards_first: bool = Field(
        True,
        description="Whether prompts whose stored responses differ in reward are drawn before the others.",
    )
    reward_temperature: float | None = Field(
        None,
        gt=0,
        allow_inf_nan=False,
        description="tau: responses of other draws have weights softmax(reward / tau); None: equal weights.",
    )
    uniform_fraction: float = Field(
        0.0, ge=0, le=1, description="Share of the uniform distribution in the weights by reward_temperature."
    )
    capacity_per_prompt: int = Field(
        100, ge=2, description="Distinct responses kept for a prompt; older ones are dropped."
    )
    min_size: int = Field(192, ge=1, description="Trajectories to take in before the first batch, repeats included.")
    samples_per_insert: float | None = Field(
        None, gt=0, allow_inf_nan=False, description="Largest mean number of draws of a trajectory; None: unlimited."
    )
    max_age: int | None = Field(
        None, ge=0, description="Largest age of a drawn trajectory, in policy steps; None: unlimited."
    )

    @model_validator(mode="after")
    def _capacity_holds_a_draw(self) -> "Sampling":
        if self.capacity_per_prompt < self.responses_per_prompt:
            raise ValueError(
                f"capacity_per_prompt={self.capacity_per_prompt} must be at least "
                f"responses_per_prompt={self.responses_per_prompt}: otherwise no prompt has enough responses; raise it"
            )
        return self


@dataclass(frozen=True)
class Sync:
    """The trajectories that one sync took in."""

    number: int  # counts from 1
    step: int  # the first training step that could draw it
    attempt: int
    rounds: dict[str, list[int]]  # by searcher, in order
    fresh: Fresh  # sums over the trajectories

    @property
    def num_trajectories(self) -> int:
        return self.fresh.num_trajectories


def ages_from(policy_step: np.ndarray, sync_step: np.ndarray) -> np.ndarray:
    """The policy step that a trajectory's staleness counts from, given the first training step that could draw it.

    This is its policy's step, unless a resume undid that policy. An undone policy has a step of sync_step or later,
    which no policy of the run had when the trajectory came in. The undone and the current policies have policy
    sync_step - 1 in common, and n steps after it are as far from it as n steps before it. One case is not detected: a
    trajectory of an undone policy that comes in after training has passed that policy's step again, such as a round
    that was in progress while the Trainer resumed.
    """
    return np.minimum(policy_step, 2 * (sync_step - 1) - policy_step)


class ReplayBuffer:
    """All trajectories of a run, without repeats and with a limit for each prompt, sampled by recency and reward.

    Of identical responses to one prompt the newest stays; its weight is the number of copies that its sync brought. Of
    each prompt the newest `capacity_per_prompt` responses stay. Age is (sync, policy_step, md5 of trajectory_id), so
    the order of reading does not matter.
    """

    def __init__(self, store: RunStore, sampling: Sampling, seed: int, limits: Limits | None = None):
        """limits: the run's, for the rules that a shard must keep; None: limits that hold for any run."""
        self._store = store
        self._limits = limits or Limits()
        self._sampling = sampling
        self._seed = seed
        self._clear()

    def sync(self, step: int, attempt: int) -> Sync | None:
        """Takes in every shard committed since the last sync, before `step` is drawn. The new rows become "recent".

        Without new shards nothing changes: the last sync's trajectories stay recent, and the result is None. The sync
        and the refusals are recorded before the rows can be drawn, so every draw can be repeated. On an error nothing
        is taken in. Raises: StoreUnreachable, NotFound. Superseded: a later attempt has begun, before a refusal was
        recorded. AlreadyExists: another Trainer records syncs of the same attempt.
        """
        rounds, number = new_shards(self._store, self._seen), self.newest_sync + 1
        if not rounds and not self._damaged:
            return None
        with self._transaction():
            fresh, refused = self._take_in({number: rounds}, {number: step})
            if refused := [*self._damaged, *refused]:
                check_not_superseded(self._store, attempt)  # a refusal counts for every reader
                intake.refuse(self._store, refused, f"the Trainer, attempt {attempt}, before step {step}")
            accepted = _without(rounds, refused)
            if accepted:
                ledger.record_sync(self._store, sync := Sync(number, step, attempt, accepted, fresh))
        self._damaged = []
        self._seen |= {searcher: of_searcher[-1] for searcher, of_searcher in rounds.items()}
        if not accepted:
            return None
        self.newest_sync, self.num_taken_in = number, self.num_taken_in + sync.num_trajectories
        self._free_words()
        return sync

    def rebuild(self, step: int) -> None:
        """Restores the buffer that `step` was drawn from: the shards of the recorded syncs that count, up to that step.

        Rounds that have expired since are left out. So are shards that were damaged since: the next sync() refuses
        them. Later shards are taken in by the next sync(), too. Raises: NotFound: a recorded shard is missing.
        """
        self._clear()
        records, expired = ledger.effective_syncs(self._store, step), expired_through(self._store)
        refused = refused_rounds(self._store)
        syncs: dict[int, dict[str, list[int]]] = defaultdict(lambda: defaultdict(list))
        for record in records:
            first = max(record["first_round"], expired.get(record["searcher"], -1) + 1)
            kept = set(range(first, record["last_round"] + 1)) - refused.get(record["searcher"], set())
            syncs[record["sync"]][record["searcher"]] += sorted(kept)
        steps = {record["sync"]: record["step"] for record in records}
        found, self._damaged = self._take_in(syncs, steps, after_settling=self._free_words)
        # Rounds that have expired since were taken in, so they count. Older versions did not record how many.
        recorded = {record["sync"]: record.get("num_trajectories") for record in records}.values()
        num_taken_in = found.num_trajectories if None in recorded else sum(recorded)
        self.newest_sync = max((record["sync"] for record in records), default=0)
        self._seen = {record["searcher"]: record["last_round"] for record in records}  # in the order of syncs
        self.num_taken_in = num_taken_in

    def draw(self, step: int) -> pa.Table:
        """The batch of a training step: B * K rows, ordered by prompt_index (0 to B-1) and slot (0 to K-1).

        Columns: prompt_index, slot, trajectory_id, prompt_id, recent, draw_probability (of being drawn first of the K,
        given prompt and `recent`), reward, policy_step, ages_from, sync (the newest when drawn), prompt_tokens,
        response_tokens, behavior_logprobs, reference_logprobs.

        Raises: NotEnoughExperience: flow control allows no batch yet.
        """
        self._check_rate(step)
        sampling, oldest = self._sampling, self._oldest(step)
        prompts = self._execute("list_prompts", {"newest_sync": self.newest_sync, "oldest": oldest}).fetchnumpy()
        if not len(prompts["prompt"]):
            raise NotEnoughExperience(
                f"max_age is {sampling.max_age}, but all {self.num_trajectories} stored trajectories are older: their "
                f"policies are before step {oldest}. Wait for newer ones, or raise max_age"
            )
        differ, recent_differ = prompts["rewards_differ"], prompts["newest_sync_rewards_differ"]
        if not sampling.differing_rewards_first:
            differ = recent_differ = np.zeros(len(differ), bool)
        chosen, recent = mop.choose_prompts(
            mop.Prompts(prompts["key"], prompts["recent"], differ, recent_differ),
            sampling.prompts_per_batch,
            sampling.recent_probability,
            self._seed,
            step,
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
        """Raises: NotEnoughExperience: too few trajectories taken in for this step. Depends on step and syncs only."""
        taken_in, limit = self.num_taken_in, self._sampling.samples_per_insert
        if taken_in < self._sampling.min_size:
            raise NotEnoughExperience(
                f"{taken_in} of the first {self._sampling.min_size} trajectories (min_size) have come in"
            )
        if limit is not None and self.samples_per_insert(step) > limit:
            raise NotEnoughExperience(
                f"waiting for more trajectories: after step {step} each of {taken_in} would have been drawn "
                f"{self.samples_per_insert(step):.2f} times on average, and samples_per_insert is {limit:g}"
            )

    def _oldest(self, step: int) -> int:
        """The smallest `ages_from` that may be drawn. A trajectory of policy step - 1 is on-policy: its age is 0."""
        max_age = self._sampling.max_age
        return np.iinfo(np.int64).min if max_age is None else step - 1 - max_age

    def samples_per_insert(self, step: int) -> float:
        """Mean number of draws of a trajectory taken in so far, this step's B * K draws included."""
        drawn = step * self._sampling.prompts_per_batch * self._sampling.responses_per_prompt
        return drawn / self.num_taken_in

    def num_too_old(self, step: int) -> int:
        """Number of stored trajectories that `max_age` excludes from that step."""
        query = "SELECT count(*) FROM trajectories WHERE ages_from < ?"
        return self._index.execute(query, [self._oldest(step)]).fetchone()[0]

    @property
    def num_trajectories(self) -> int:
        """Number of stored trajectories: all that were taken in, less repeats and those beyond the capacity."""
        return self._index.execute("SELECT count(*) FROM trajectories").fetchone()[0]

    @property
    def num_prompts(self) -> int:
        return self._index.execute("SELECT count(*) FROM prompts").fetchone()[0]

    def _clear(self) -> None:
        # One thread: queries of milliseconds gain nothing from more, and training needs the cores.
        self._index = duckdb.connect(config={"threads": 1})
        self._index.execute(sql("create_index"))
        self._statements: dict[str, duckdb.Statement] = {}
        self._prompt_ids: dict[int, str] = {}  # as in the index; a join would cost a millisecond a draw
        self._words, self._num_filled = WordFile(), 0
        self._seen: dict[str, int] = {}  # last round taken in or refused, by searcher
        self._damaged: list[intake.Refusal] = []  # found by rebuild, until the next sync records them
        self.num_taken_in = 0  # repeats and later evictions included
        self.newest_sync = 0

    def _execute(self, query: str, parameters: dict | None = None) -> duckdb.DuckDBPyConnection:
        """Runs a query of storage/sql, which is parsed once: parsing takes a tenth of the time of a draw."""
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

    def _free_words(self) -> None:
        """Frees segments of the word file of which little is still stored, after that was copied."""
        if self._words.num_filled == self._num_filled:
            return
        self._num_filled = self._words.num_filled
        stored = np.sort(self._index.execute("SELECT record FROM trajectories").fetchnumpy()["record"])
        for first, records in self._words.sparse(stored):
            with self._transaction():
                self._index.register("moved", pa.table({"record": records, "copy": self._words.copy(records)}))
                self._execute("move_records")
                self._index.unregister("moved")
            self._words.free(first)

    def _take_in(
        self,
        syncs: Mapping[int, Mapping[str, Sequence[int]]],
        steps: Mapping[int, int],
        after_settling: Callable[[], object] = lambda: None,
    ) -> tuple[Fresh, list[intake.Refusal]]:
        """Indexes rounds, given by sync and searcher, in the order of syncs. steps: the step of each sync.

        Returns the sums over the shards that were taken in, and the refusals of the others.
        """
        found, refused, waiting = Fresh(), [], defaultdict(dict)  # by searcher the sync of each round
        last = max(syncs, default=0)
        for number, rounds in syncs.items():
            for searcher, of_searcher in rounds.items():
                waiting[searcher] |= dict.fromkeys(of_searcher, number)
            # In whole syncs, because copies of a response beyond the capacity count as copies, too.
            if number == last or sum(map(len, waiting.values())) >= ROUNDS_PER_SETTLE:
                sums, not_taken_in = self._index_rounds(waiting, steps)
                found, refused = found + sums, refused + not_taken_in
                waiting.clear()
                after_settling()
        return found, refused

    def _index_rounds(
        self, sync_of_round: Mapping[str, Mapping[int, int]], steps: Mapping[int, int]
    ) -> tuple[Fresh, list[intake.Refusal]]:
        """Indexes rounds of whole syncs, by searcher; deletes repeats and excess rows. Returns as _take_in."""
        found, refused, prompt_ids = Fresh(), [], []
        for searcher, syncs in sync_of_round.items():
            for rounds in by_block(syncs):
                accepted, not_accepted = intake.accept(self._store, searcher, rounds, self._limits)
                refused += not_accepted
                if not accepted:
                    continue
                shards = pa.concat_tables(accepted)
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
        return found, refused


def _without(rounds: Mapping[str, Sequence[int]], refused: Sequence[intake.Refusal]) -> dict[str, list[int]]:
    """Rounds by searcher, less the refused ones and searchers with no others."""
    places = {(refusal.searcher, refusal.round) for refusal in refused}
    left = {name: [number for number in of_name if (name, number) not in places] for name, of_name in rounds.items()}
    return {searcher: of_searcher for searcher, of_searcher in left.items() if of_searcher}
