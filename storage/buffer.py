"""The replay buffer: shards in, batches out.

Before: storage/intake.py checks new shards; after: flows/trainer/experience.py makes draws of a batch's rows.

    shards in the store ──sync──► index (DuckDB: metadata) + word file (tokens, log-probabilities) ──draw──► batch

The shards are the only lasting data. Index and word file are a cache of them in one process and can be rebuilt.

    sync     produces: a sync record, rows to draw
             consumes: shards committed since the last sync; a shard that cannot be read or breaks a rule is refused
             (storage/intake.py)
    draw     produces: a batch
             consumes: nothing, rows stay. Flow control allows no batch yet with fewer than `min_size` trajectories
             taken in, more than `samples_per_insert` draws of each, or none within `max_age`
    rebuild  produces: the buffer as it was at some step, from shards and sync records alone

A draw depends only on (seed, step) and the stored rows, and these only on the syncs so far. So `rebuild(420)`,
`draw(420)` repeat the draw of step 420 on any machine. The candidates of a draw are chosen in SQL (list_prompts.sql,
list_candidates.sql), their probabilities computed in storage/mop.py. B prompts a batch, K responses a prompt.
"""

from collections import defaultdict
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

import numpy as np
import pyarrow as pa

from storage import intake, ledger, mop
from storage.attempts import check_not_superseded
from storage.errors import NotFound
from storage.fresh import Fresh
from storage.index import Index
from storage.ledger import Sync
from storage.mop import SamplingSettings
from storage.new_shards import NewShards
from storage.rules import Limits
from storage.shard_files import origin_of
from storage.shards import expired_through, refused_rounds
from storage.store import RunStore

# Rounds, in whole syncs, that a rebuild indexes before it deletes repeats: a balance of statements and rows in excess.
ROUNDS_PER_SETTLE = 64


@dataclass(frozen=True)
class Arrivals:
    """The new shards of a sync. `find` indexes them in a transaction that `admit` ends."""

    rounds: dict[str, list[int]]  # by searcher, in order
    step: int  # the first that may draw them
    fresh: Fresh
    refused: list[intake.Refusal]
    sync: Sync | None = None  # as recorded; None: not recorded, or all shards were refused

    @property
    def accepted(self) -> dict[str, list[int]]:
        """The rounds that are not refused."""
        refused = {(refusal.searcher, refusal.round) for refusal in self.refused}
        left = {name: [each for each in rounds if (name, each) not in refused] for name, rounds in self.rounds.items()}
        return {name: rounds for name, rounds in left.items() if rounds}


class NotEnoughExperience(RuntimeError):
    """Flow control: it is too early for a batch. The message names the setting that requires more trajectories."""


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
    each prompt the newest `capacity_per_prompt` responses stay. Rows are ordered from old to new by (sync, policy_step,
    md5 of trajectory_id), so the order of reading does not matter. A sync drops earlier ones whose trajectories
    are all older than `max_age`.
    """

    def __init__(self, store: RunStore, sampling: SamplingSettings, seed: int, limits: Limits | None = None):
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
        found = self.find(step)
        if found is None:
            return None
        arrivals = self.record(found, step, attempt)
        self.admit(arrivals)
        self._index.free_moved_words()
        return arrivals.sync

    def find(self, step: int) -> Arrivals | None:
        """The first part of a sync: reads and indexes the new shards, which no draw sees before `admit`.

        step: the first that may draw them, by what is known now. Returns None if there is nothing to record. All parts
        may run in one other thread than `draw`. Raises: StoreUnreachable, NotFound.
        """
        rounds = self._new_shards.find(self._seen)
        try:
            return self._index_new(rounds, step)
        except NotFound:  # a head was wrong, or the shard has expired since
            return self._index_new(self._new_shards.scan(self._seen), step)

    def _index_new(self, rounds: dict[str, list[int]], step: int) -> Arrivals | None:
        """Indexes rounds as the next sync's, in a transaction that stays open."""
        if not rounds and not self._damaged:
            return None
        number = self.newest_sync + 1
        self._index.begin()
        with self._rolled_back_on_error():
            fresh, refused = self._take_in({number: rounds}, {number: step}, self._new_shards.compacted)
            self._index.drop(self._last_too_old(step))
        return Arrivals(rounds, step, fresh, [*self._damaged, *refused])

    def record(self, found: Arrivals, step: int, attempt: int) -> Arrivals:
        """The second part of a sync: stores what `find` found, as what `step` and later steps may draw.

        Returns it with the sync. Raises as `sync`.
        """
        number = self.newest_sync + 1
        if step != found.step and self._index.newest_policy(number) >= found.step:  # `ages_from` depends on the step
            self._index.rollback()
            found = self._index_new(found.rounds, step)
        with self._rolled_back_on_error():
            if found.refused:
                check_not_superseded(self._store, attempt)  # a refusal counts for every reader
                intake.refuse(self._store, found.refused, f"the Trainer, attempt {attempt}, before step {step}")
            if not found.accepted:
                return found
            sync = Sync(number, step, attempt, found.accepted, found.fresh)
            ledger.record_sync(self._store, sync)
        return replace(found, sync=sync)

    def admit(self, arrivals: Arrivals) -> None:
        """The third part of a sync: lets draws see what was recorded. No draw may be in progress."""
        self._index.commit()
        self._damaged = []
        self._seen |= {searcher: of_searcher[-1] for searcher, of_searcher in arrivals.rounds.items()}
        if (sync := arrivals.sync) is not None:
            self.newest_sync, self.num_inserted = sync.number, self.num_inserted + sync.num_trajectories
            self._first_steps[sync.number] = sync.step
        if through := self._last_too_old(arrivals.step):
            self._first_steps = {sync: step for sync, step in self._first_steps.items() if sync > through}

    def move_words(self) -> None:
        self._index.move_words()

    def free_words(self) -> None:
        """Frees the disk space of trajectories that are not stored any more. No draw may run meanwhile."""
        self._index.free_words()

    def rebuild(self, step: int) -> None:
        """Restores the buffer that `step` was drawn from: the shards of the recorded syncs that count, up to that step.

        Rounds that have expired since are left out. So are shards that were damaged since: the next sync() refuses
        them. Later shards are taken in by the next sync(), too. Syncs with nothing but too old ones are not read.
        Raises: NotFound: a recorded shard is missing.
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
        # Rounds that have expired since were taken in, so they count. Older versions did not record how many.
        recorded = {record["sync"]: record.get("num_trajectories") for record in records}.values()
        self._first_steps = steps
        if None not in recorded and (through := self._last_too_old(step)):
            syncs = {number: rounds for number, rounds in syncs.items() if number > through}
        found, self._damaged = self._take_in(syncs, steps, after_settling=self._index.free_moved_words)
        num_inserted = found.num_trajectories if None in recorded else sum(recorded)
        self.newest_sync = max((record["sync"] for record in records), default=0)
        self._seen = {record["searcher"]: record["last_round"] for record in records}  # in the order of syncs
        self.num_inserted = num_inserted

    def draw(self, step: int) -> pa.Table:
        """The batch of a training step: B * K rows, ordered by prompt_index (0 to B-1) and slot (0 to K-1).

        Columns: prompt_index, slot, trajectory_id, prompt_id, recent, draw_probability (of being drawn first of the K,
        given prompt and `recent`), reward, policy_step, ages_from, sync (the newest when drawn), prompt_tokens,
        response_tokens, behavior_logprobs, reference_logprobs.

        Raises: NotEnoughExperience: flow control allows no batch yet.
        """
        sampling, oldest, prompts = self._sampling, self._oldest(step), self._list_prompts(step)
        differ, recent_differ = prompts["rewards_differ"], prompts["newest_sync_rewards_differ"]
        if not sampling.differing_rewards_first:
            differ = recent_differ = np.zeros(len(differ), bool)
        chosen, recent = mop.choose_prompts(
            mop.Prompts(prompts["key"], prompts["recent"], preferred=differ, recent_preferred=recent_differ),
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
            "prompt_id": np.repeat([self._index.prompt_ids[prompt] for prompt in prompt_of_place.tolist()], num_slots),
            "recent": np.repeat(recent, num_slots),
            "draw_probability": probabilities,
            "reward": rows["reward"],
            "policy_step": rows["policy_step"],
            "ages_from": rows["ages_from"],
            "sync": np.full(num_places * num_slots, self.newest_sync),
        }
        return pa.table(columns | self._index.words.read(rows["record"]))

    def _draw_responses(
        self, step: int, prompt_of_place: np.ndarray, recent: np.ndarray, oldest: int
    ) -> tuple[dict[str, np.ndarray], np.ndarray]:
        """The candidates' columns at the slots of all places, and each one's probability of being drawn first [B * K].

        prompt_of_place, recent: [B]. oldest: the smallest `ages_from` that may be drawn.
        """
        sampling = self._sampling
        candidates = self._index.read("list_candidates", {"prompts": prompt_of_place.tolist()})
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
                    candidates["num_copies"][of_place],
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

    def can_draw(self, step: int) -> bool:
        """Whether flow control allows a batch, with what is admitted now."""
        try:
            self._list_prompts(step)
        except NotEnoughExperience:
            return False
        return True

    def _list_prompts(self, step: int) -> dict[str, np.ndarray]:
        """The columns of the prompts that may be drawn. Raises: NotEnoughExperience."""
        self._check_rate(step)
        oldest = self._oldest(step)
        prompts = self._index.read("list_prompts", {"newest_sync": self.newest_sync, "oldest": oldest})
        if not len(prompts["prompt"]):
            raise NotEnoughExperience(
                f"sampling.max_age is {self._sampling.max_age}, but all {self.num_trajectories} stored trajectories "
                f"are older: their policies are before step {oldest}. Wait for newer ones"
            )
        return prompts

    def _check_rate(self, step: int) -> None:
        """Raises: NotEnoughExperience: too few trajectories taken in for this step. Depends on step and syncs only."""
        taken_in, limit = self.num_inserted, self._sampling.samples_per_insert
        if taken_in < self._sampling.min_size:
            raise NotEnoughExperience(
                f"{taken_in} of the first {self._sampling.min_size} trajectories (sampling.min_size) have come in"
            )
        if limit is not None and self.samples_per_insert(step) > limit:
            raise NotEnoughExperience(
                f"waiting for more trajectories: after step {step} each of {taken_in} would have been drawn "
                f"{self.samples_per_insert(step):.2f} times on average, and sampling.samples_per_insert is {limit:g}"
            )

    def _oldest(self, step: int) -> int:
        """The smallest `ages_from` that may be drawn. A trajectory of policy step - 1 is on-policy: its age is 0."""
        max_age = self._sampling.max_age
        return np.iinfo(np.int64).min if max_age is None else step - 1 - max_age

    def _last_too_old(self, step: int) -> int:
        """The last sync of which `step` and later steps draw nothing, nor of any sync before it. 0: there is none.

        The newest policy of a sync is that of the step before its first one (`ages_from`). Trajectories of later syncs
        count as newer. So which of them are stored does not depend on the dropped ones.
        """
        if self._sampling.max_age is None:
            return 0
        oldest = self._oldest(step)
        return max((sync for sync, first in self._first_steps.items() if first - 1 < oldest), default=0)

    def samples_per_insert(self, step: int) -> float:
        """Mean number of draws of a trajectory taken in so far, this step's B * K draws included."""
        drawn = step * self._sampling.prompts_per_batch * self._sampling.responses_per_prompt
        return drawn / self.num_inserted

    def num_too_old(self, step: int) -> int:
        """Number of stored trajectories that `max_age` excludes from that step."""
        return self._index.num_from_before(self._oldest(step))

    @property
    def num_trajectories(self) -> int:
        """Number of stored trajectories: all that were taken in, less repeats and those beyond the capacity."""
        return self._index.num_trajectories

    @property
    def num_prompts(self) -> int:
        return self._index.num_prompts

    def _clear(self) -> None:
        self._index = Index(self._sampling.capacity_per_prompt)
        self._new_shards = NewShards(self._store)
        self._first_steps: dict[int, int] = {}  # that could draw, by sync
        self._seen: dict[str, int] = {}  # last round taken in or refused, by searcher
        self._damaged: list[intake.Refusal] = []  # found by rebuild, until the next sync records them
        self.num_inserted = 0  # repeats and later evictions included
        self.newest_sync = 0

    @contextmanager
    def _rolled_back_on_error(self) -> Iterator[None]:
        try:
            yield
        except BaseException:
            self._index.rollback()
            raise

    def _take_in(
        self,
        syncs: Mapping[int, Mapping[str, Sequence[int]]],
        steps: Mapping[int, int],
        compacted: Mapping[str, Container[int]] | None = None,
        after_settling: Callable[[], object] = lambda: None,
    ) -> tuple[Fresh, list[intake.Refusal]]:
        """Indexes rounds, given by sync and searcher, in the order of syncs. steps: the step of each sync.

        compacted: as for storage/shard_files.py.
        Returns the sums over the shards that were taken in, and the refusals of the others.
        """
        found, refused, waiting = Fresh(), [], defaultdict(dict)  # by searcher the sync of each round
        last = max(syncs, default=0)
        for number, rounds in syncs.items():
            for searcher, of_searcher in rounds.items():
                waiting[searcher] |= dict.fromkeys(of_searcher, number)
            # In whole syncs, because copies of a response beyond the capacity count as copies, too.
            if number == last or sum(map(len, waiting.values())) >= ROUNDS_PER_SETTLE:
                sums, not_taken_in = self._index_rounds(waiting, steps, compacted)
                found, refused = found + sums, refused + not_taken_in
                waiting.clear()
                after_settling()
        return found, refused

    def _index_rounds(
        self,
        sync_of_round: Mapping[str, Mapping[int, int]],
        steps: Mapping[int, int],
        compacted: Mapping[str, Container[int]] | None,
    ) -> tuple[Fresh, list[intake.Refusal]]:
        """Indexes rounds of whole syncs, by searcher; deletes repeats and excess rows. Returns as _take_in."""
        found, refused, prompt_ids = Fresh(), [], []
        for accepted, not_accepted in intake.accept(self._store, sync_of_round, self._limits, compacted):
            refused += not_accepted
            if not accepted:
                continue
            shards = pa.concat_tables(accepted)
            syncs = [sync_of_round[searcher][number] for searcher, number in map(origin_of, accepted)]
            lengths = [shard.num_rows for shard in accepted]
            first_steps = np.repeat([steps[number] for number in syncs], lengths)
            ages = ages_from(shards["policy_step"].to_numpy(), first_steps)
            self._index.insert(shards, np.repeat(syncs, lengths), ages)
            found += Fresh.of(shards, ages)
            prompt_ids += shards["prompt_id"].chunks
        self._index.settle(pa.chunked_array(prompt_ids, pa.string()).unique())
        return found, refused
