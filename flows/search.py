"""search/searcher: one Searcher. Start more at any time, on any machine that sees the store: they join by run name.

Before: tba/searcher.py samples and scores a round; after: storage/shards.py stores it.
"""

import contextlib
import logging
import time
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Literal

import pyarrow as pa
from prefect import flow, get_run_logger, task
from prefect.assets import Asset, AssetProperties, materialize
from prefect.context import TaskRunContext
from prefect.utilities.annotations import opaque

from flows.config import StoreUrl, load_run
from flows.run.prefect_page_lineage import asset_key
from flows.run.trainer_watch import TrainerWatch
from flows.searcher.held_name import HeldName, held_name
from flows.searcher.policy_feed import PolicyFeed
from flows.searcher.round_reports import RoundReports
from flows.searcher.start import samples_ahead, start_searcher_task
from infra.machine import policy_cache
from storage import kept_policies, ledger, policies, requests, shards
from storage.errors import AlreadyExists, NotFound, TornShard
from storage.new_shards import restore_head
from storage.rules import Limits, validate_shard
from storage.shard_files import read_shards
from storage.store import RunStore
from tba.rewards import NoneJudged

if TYPE_CHECKING:  # importing it takes torch's seconds
    from tba.searcher import SampledRound, Searcher

# After this many invalid rounds in a row, the fault of the reward or engine is not transient.
MAX_SPOILED_ROUNDS = 3
# After so many draws of a round's prompts, to none of whose responses a reward applied, it hardly applies to any.
MAX_UNJUDGED_ROUNDS = 20
UNJUDGED = (
    f"task.rewards: none applied to any response of round {{number}}, for {MAX_UNJUDGED_ROUNDS} draws of its prompts; "
    "leave out data that no reward judges, or raise search.prompts_per_round"
)


@flow(name="search")
def search(store: StoreUrl, run: str, name: str = "s0", evaluates: bool = False) -> int:
    """Searches until the final policy is published, the Searcher is asked to leave, or the Trainer is silent for long
    (flows/searcher/policy_feed.py). Returns the number of rounds.

    `name`: of the Searcher and of its log of shards. Two living Searchers never have the same name. `evaluates`: also
    evaluates policies on held-out problems: the first, the final one, and others as `evaluate_share` allows.
    Raises: NameTaken, Superseded: another process has the name.
    """
    run_store = RunStore(store, run)
    config = load_run(run_store)

    unjudged = 0  # draws of this round's prompts to none of whose responses a reward applied

    def is_refused() -> bool:
        return unjudged > 0 or (number > first and run_store.exists(shards.refusal_path(name, number - 1)))

    with held_name(run_store, name) as held, contextlib.closing(TrainerWatch(run_store, config, get_run_logger())):
        first = number = restore_head(run_store, name)
        searcher = start_searcher_task(config, name, first, begins_ahead=True)
        feed = PolicyFeed(run_store, searcher, is_synchronous=config.synchronous, is_refused=is_refused)
        budget, reports = EvaluationBudget(config.evaluate_share), RoundReports(run_store, config.searchers)
        ahead = samples_ahead(config)
        while policy := feed.next():
            is_leaving = requests.is_to_leave(run_store, name)
            if is_leaving and not searcher.has_sampled(number):
                get_run_logger().info("this Searcher was asked to leave and ends; its sampled rounds are committed")
                break
            if policy.final:
                searcher.drop_rounds()  # nobody trains on them
            if feed.is_new and evaluates and (policy.step == 0 or policy.final or budget.allows()):
                budget.spend(evaluate_task(run_store, searcher, held, config.task.num_heldout, policy))
            if policy.final:
                break
            sample = partial(searcher.sample, number, ahead=ahead and not is_leaving, while_waiting=feed.poll)
            if search_round(run_store, searcher, feed, held, sample, reports):
                number, unjudged = number + 1, 0
            elif (unjudged := unjudged + 1) == MAX_UNJUDGED_ROUNDS:
                raise RuntimeError(UNJUDGED.format(number=number))
        searcher.drop_rounds()
        return number - first


def search_round(
    store: RunStore,
    searcher: "Searcher",
    feed: PolicyFeed,
    held: HeldName,
    sample: Callable[[], "SampledRound"],
    reports: RoundReports,
) -> bool:
    """Samples, scores, validates and commits one shard. The round is a Prefect task if a report is due, or if it fails.

    Returns False: no reward applies to any of its responses, so nothing was committed.
    Raises: Superseded: another process has the Searcher's name; nothing was committed. RuntimeError: no shard passed
    validation in `MAX_SPOILED_ROUNDS` tries.
    """
    for _ in range(MAX_SPOILED_ROUNDS):
        sampled = sample()
        held.check()
        is_task = reports.is_due()
        if not is_task:
            try:
                outcome = finish_round(store, searcher, sampled)
            except Exception as error:  # the task fails in the same way, and Prefect shows it
                get_run_logger().warning("round %d is tried again, as a task: %r", sampled.number, error)
                is_task = True
        if is_task:
            finish_task = as_asset(store, held.name, sampled.number, feed.paths(sampled.policies))(finish_round)
            outcome = finish_task(store, searcher, opaque(sampled))  # Prefect would look at each of its tokens
        if outcome != "spoiled":
            return outcome == "committed"
    raise RuntimeError(
        f"searcher: round {sampled.number} failed validation {MAX_SPOILED_ROUNDS} times; see quarantine/"
    )


def as_asset(store: RunStore, name: str, number: int, sampled_by: list[str]):
    """A decorator: makes a function the Prefect task of a round, whose shard is an asset that depends on policies.

    sampled_by: paths of the policies that sampled the round.
    """
    shard = Asset(
        key=asset_key(store, shards.shard_path(name, number)),
        properties=AssetProperties(name=f"{store.run}/{name}, round {number}"),
    )
    return materialize(
        shard,
        asset_deps=[asset_key(store, path) for path in sampled_by],
        task_run_name=f"round {number}",
        persist_result=False,
        retries=2,
        retry_delay_seconds=5,
    )


def finish_round(
    store: RunStore, searcher: "Searcher", sampled: "SampledRound"
) -> Literal["committed", "unjudged", "spoiled"]:
    """Scores, validates and commits one shard. A retry commits the same responses; its shard's name is the same.

    "unjudged": no reward applies to any of its responses. "spoiled": it failed validation and is in quarantine.
    """
    try:
        found = searcher.score(sampled)
    except NoneJudged as error:
        get_run_logger().warning("round %d gets other prompts: %s", sampled.number, error)
        return "unjudged"
    table = shards.shard_of(found.trajectories)
    reasons = validate_shard(table, Limits(searcher.vocabulary_size))
    if reasons:
        kept = shards.quarantine_shard(store, table, reasons)
        get_run_logger().error(
            "round %d failed validation and is repeated; it is kept in %s: %s",
            sampled.number, kept, "; ".join(reasons),
        )  # fmt: skip
        return "spoiled"
    commit(store, table, found.metrics)
    return "committed"


def evaluate(
    store: RunStore, searcher: "Searcher", held: HeldName, num_problems: int, policy: policies.PolicyRef
) -> float:
    """Measures greedy accuracy on held-out problems, unless the ledger has this policy step; keeps the best policy.

    best.json is written before the ledger's entry, so every recorded evaluation has been compared, also after a kill.
    Returns the duration in seconds; 0.0 if the ledger has the step.
    """
    if policy.step in ledger.evaluations(store):
        return 0.0
    held.check()  # a round came between: another process of the name may hold another policy
    is_held = kept_policies.hold_policy(store, policy, held.name)
    measured = searcher.evaluate(num_problems)
    held.check()  # evaluation takes minutes
    result = measured | {"attempt": policy.attempt, "policy_step": policy.step}
    accuracy, num_problems = result["accuracy"], result["num_problems"]
    cache = policy_cache(store.run)
    is_best = is_held and kept_policies.keep_if_best(store, policy, accuracy, num_problems, cache, held.check)
    with contextlib.suppress(AlreadyExists):
        ledger.record_evaluation(store, result)
    held.check()
    kept_policies.release_policy(store, held.name)
    get_run_logger().info(
        "policy step %d: accuracy %.3f on %d held-out problems%s",
        policy.step, accuracy, num_problems, ", the best so far" if is_best else "",
    )  # fmt: skip
    return result["seconds"]


evaluate_task = task(
    task_run_name="evaluate policy step {policy.step}",
    persist_result=False,
    retries=2,
    retry_delay_seconds=5,
)(evaluate)


def commit(store: RunStore, table: pa.Table, metrics: dict) -> None:
    """Commits a shard and records its round, unless the round has another process's shard already."""
    try:
        shards.commit_shard(store, table)
    except AlreadyExists:
        if not is_committed(store, metrics["searcher"], metrics["round"], table):
            get_run_logger().warning("round %d was committed before; this repeat is dropped", metrics["round"])
            return
        shards.advance_head(store, metrics["searcher"], metrics["round"])
    with contextlib.suppress(AlreadyExists):  # the first try was interrupted after it
        ledger.record_search_round(store, metrics)
    get_run_logger().log(
        logging.INFO if TaskRunContext.get() else logging.DEBUG,  # only a reported round is worth the server's time
        "round %d: %d trajectories, policy step %d, mean reward %.3f",
        metrics["round"], metrics["num_trajectories"], metrics["policy_step"], metrics["reward_mean"],
    )  # fmt: skip


def is_committed(store: RunStore, searcher: str, number: int, table: pa.Table) -> bool:
    """Whether the round's shard has the responses of this table: an earlier try was interrupted after its commit."""
    with contextlib.suppress(NotFound, TornShard):
        stored = read_shards(store, searcher, [number])
        return stored["response_tokens"].to_pylist() == table["response_tokens"].to_pylist()
    return False


class EvaluationBudget:
    """Keeps a Searcher's evaluations within a share of its time since its engine was ready.

    Evaluations of the first and the final policy count, too, but are never refused. A Searcher that joins a run later
    evaluates the first policy that it loads.
    """

    def __init__(self, share: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._share, self._clock, self._began = share, clock, clock()
        self._spent_s = self._last_s = 0.0

    def allows(self) -> bool:
        """Whether the share would still hold after one more evaluation, if that takes as long as the last one."""
        present_s = self._clock() - self._began
        return self._share > 0 and self._spent_s + self._last_s <= self._share * (present_s + self._last_s)

    def spend(self, seconds: float) -> None:
        """Adds an evaluation's duration in seconds; 0: no evaluation took place."""
        self._spent_s += seconds
        self._last_s = seconds or self._last_s
