"""The Trainer's experience: makes its batches from the rows that the replay buffer draws.

Before: storage/buffer.py draws a batch's rows; after: tba/trainer.py trains on them.
"""

import time

import pyarrow as pa
import pyarrow.compute as pc

from flows.trainer.alarms import RunAlarms
from flows.trainer.background_sync import MAX_STALL_S, BackgroundSync
from storage import ledger
from storage.buffer import NotEnoughExperience, ReplayBuffer
from storage.fresh import FRESH_COLUMNS, Fresh
from storage.ledger import Sync
from storage.shards import is_warm_start_name
from storage.store import RunStore
from tba.batch import Batch, Draw, Metrics
from tba.shared_prefix import Group
from tba.training_loop import TooEarly

# Measured on two cores: one minute, or two if vLLM compiles its kernels.
LOADING = (
    "the Searchers load their engines (1 to 2 minutes), the first one evaluates task.num_heldout problems, then each "
    "samples a round"
)


class StoredExperience:
    """tba.training_loop's Experience over storage's replay buffer."""

    def __init__(
        self,
        store: RunStore,
        buffer: ReplayBuffer,
        attempt: int,
        alarms: RunAlarms,
        *,
        has_searchers: bool = True,
        awaits_shard: bool = False,
    ) -> None:
        """`has_searchers`: the run starts Searchers, so their silence is an alarm from the beginning.

        `awaits_shard`: the first batch waits for a shard that is committed after the first sync.

        A resumed Trainer is ready a minute or two before the engines sample. Without the wait it would train on old
        trajectories only until then.
        """
        self.buffer, self._alarms, self._store = buffer, alarms, store
        self._has_searchers = has_searchers
        self._awaits_shard, self._caught_up = awaits_shard, False
        self._arrived_at = self._looked_at = time.monotonic()  # when a sync last inserted trajectories, and last looked
        self._fresh: Fresh | None = None
        self._is_training = False
        self._background = BackgroundSync(store, buffer, attempt, self._take_note)

    def sync(self, step: int) -> None:
        """A Trainer that trains is stalled for MAX_STALL_S at most: the sync then ends beside its next steps."""
        self._background.request(step, MAX_STALL_S if self._is_training else None)
        self._alarms.see_silence(self._silent_s())

    def close(self) -> None:
        self._background.close()

    def _take_note(self, sync: Sync | None) -> None:
        """Called in the thread of the syncs."""
        self._looked_at = time.monotonic()
        if sync is not None:
            self._fresh = sync.fresh
            self._has_searchers |= not all(map(is_warm_start_name, sync.rounds))
            self._arrived_at = self._looked_at
            self._awaits_shard = self._awaits_shard and not self._caught_up
        self._caught_up = True

    def draw(self, step: int) -> Batch:
        self._is_training = False
        if self._awaits_shard:
            raise TooEarly(self._why_silent() or f"resumed: waiting for the first new shard; {LOADING}")
        try:
            with self._background.drawing(step):
                rows = self.buffer.draw(step)
                facts = self._facts(rows, step)
        except NotEnoughExperience as reason:
            raise TooEarly(self._why_silent() or f"{reason}{self._next_shard()}") from reason
        self._is_training = True
        return Batch(make_draws(rows), facts, rows)

    def _next_shard(self) -> str:
        if not self._has_searchers:
            more = self._store.command(f"searchers {self._store.run} +1")
            return f"; the run starts no Searcher (searchers is 0); `{more}` adds one"
        return "" if self.buffer.num_inserted else f"; {LOADING}"

    def _silent_s(self) -> float:
        """Up to the last look: between two, which are `sync_interval` steps apart, shards may lie ready."""
        return self._looked_at - self._arrived_at if self._has_searchers else 0.0

    def _why_silent(self) -> str | None:
        self._alarms.see_silence(self._silent_s())
        return self._alarms.on.get("searchers_silent")

    def _facts(self, rows: pa.Table, step: int) -> Metrics:
        staleness = ledger.staleness(rows, step).to_pylist()
        recent = rows["reward"].filter(rows["recent"]).to_pylist()
        fresh = self._fresh.facts(step) if self._fresh else dict.fromkeys(FRESH_COLUMNS)
        return fresh | {
            "staleness_mean": sum(staleness) / len(staleness),
            "staleness_max": max(staleness),
            "reward_recent_mean": sum(recent) / len(recent) if recent else None,
            "num_trajectories": self.buffer.num_trajectories,
            "num_prompts": self.buffer.num_prompts,
            "num_inserted": self.buffer.num_inserted,
            "samples_per_insert": self.buffer.samples_per_insert(step),
            "num_too_old": self.buffer.num_too_old(step),
            "searchers_silent_s": self._silent_s(),
        }


def make_draws(rows: pa.Table) -> list[Draw]:
    """A draw for each prompt of the batch, from its rows. A trajectory that fills several slots is in its draw once."""
    by_prompt: dict[int, list[dict]] = {}
    for row in rows.to_pylist():
        by_prompt.setdefault(row["prompt_index"], []).append(row)
    newest = pc.max(rows["ages_from"]).as_py()  # not policy_step: a resume may have undone later policies
    return [_make_draw(of_prompt, newest) for of_prompt in by_prompt.values()]


def _make_draw(rows: list[dict], newest_policy: int) -> Draw:
    distinct = list({row["trajectory_id"]: row for row in rows}.values())
    place = {row["trajectory_id"]: number for number, row in enumerate(distinct)}
    return Draw(
        group=Group(rows[0]["prompt_tokens"], [row["response_tokens"] for row in distinct]),
        slot=[place[row["trajectory_id"]] for row in rows],
        reward=[row["reward"] for row in rows],
        behavior_logprobs=[row["behavior_logprobs"] for row in distinct],
        reference_logprobs=[row["reference_logprobs"] for row in distinct],
        is_of_newest_policy=[row["ages_from"] == newest_policy and not _is_copy(row) for row in distinct],
    )


def _is_copy(row: dict) -> bool:
    """Whether the row is a warm start's: it counts as the first policy's, and another run's policy sampled it."""
    return is_warm_start_name(row["trajectory_id"].rsplit("-", 2)[0])
