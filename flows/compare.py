"""tba compare: named configurations by seeds, one table and one plot.

Runs are one after the other in this process, without Prefect or vLLM. Each is a run like any other (store, shards,
ledger, tba.trainer's loop), but for two things, so that nothing but the objective and the lag differs between them:

- the lag is enforced: round r is sampled by the policy of step max(0, r - lag), and step t trains on round t - 1. So
  the staleness of step t is min(t - 1, lag), and the ledger's `batches` say so;
- a batch is a whole round, without replay: all see the same number of samples, in the same order of prompts.
"""

import json
import math
import os
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

import pyarrow as pa

from flows.config import RunConfig
from flows.machine import code_version
from flows.training import make_draw
from storage import ledger, shards
from storage.inspect import query
from storage.schema import SCHEMA_VERSION, TRAJECTORY, to_table
from storage.store import RunStore
from tba.trainer import Batch, Trainer, train
from tba.weights import write_weights

# Student's t, two-sided 95 %, of 2 runs, 3 and so on to 30: the normal distribution's 1.96 would promise too much. More
# runs get the last one, which promises a little too little.
T_95 = (
    12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160, 2.145, 2.131,
    2.120, 2.110, 2.101, 2.093, 2.086, 2.080, 2.074, 2.069, 2.064, 2.060, 2.056, 2.052, 2.048, 2.045,
)  # fmt: skip


@dataclass(frozen=True)
class Arm:
    """One configuration of a comparison."""

    name: str
    lag: int
    settings: dict  # of RunConfig.train


@dataclass
class Outcome:
    """What one run came to."""

    arm: str
    seed: int
    accuracy_before: float
    accuracy_after: float
    staleness_mean: float  # of the second half of the steps, as the ledger has it
    staleness_max: int
    num_trajectories: int
    seconds: float
    curve: list[float] = field(default_factory=list)  # mean reward of each step's batch


def run_arm(arm: Arm, base: RunConfig, model: Path, seed: int, num_heldout: int) -> Outcome:
    """One run, unless its store has it already: then what it came to.

    Raises: ValueError: what the store has is a run with other settings, which are named.
    """
    train_settings = base.train.model_copy(update=arm.settings)
    config = base.model_copy(update={"run": f"{arm.name}-seed{seed}", "seed": seed, "train": train_settings})
    config = RunConfig.model_validate(config.model_dump())
    store = RunStore(config.store, config.run)
    store.create_run(config.recorded())
    if store.exists("outcome.json"):
        return Outcome(**json.loads(store.get("outcome.json")))
    started = time.monotonic()
    for folder in ("trajectories", "trainer", "batches", "metrics"):  # of a run that was interrupted
        store.delete_folder(folder, first="none")
    import torch

    torch.manual_seed(seed)
    searcher = _searcher(config, model)
    attempt = ledger.start_attempt(store, 0, ledger.this_process())
    rounds = Rounds(store, searcher, arm.lag, config.train.steps)
    trainer = Trainer(model, config.train, seed=seed)
    train(trainer, rounds, Recorder(store, searcher, attempt, num_heldout, config.train.steps))
    outcome = _outcome(arm, seed, store, time.monotonic() - started)
    store.put("outcome.json", json.dumps(asdict(outcome)).encode())
    return outcome


def _searcher(config: RunConfig, model: Path):
    from transformers import AutoTokenizer

    from tba.engine import TransformersEngine
    from tba.searcher import Searcher
    from tba.tasks import load_task

    tokenizer = AutoTokenizer.from_pretrained(model)
    task = load_task(config.task, seed=0, tokenizer=tokenizer)  # the same sums are held out, whatever the run's seed
    limit = config.task.max_response_tokens or task.max_response_tokens
    search = config.search
    engine = TransformersEngine(
        model, max_tokens=0, max_sequences=search.prompts_per_round * search.samples_per_prompt, seed=config.seed,
        threads=int(os.environ.get("OMP_NUM_THREADS", 1)),
    )  # fmt: skip
    return Searcher(
        "s0", task, tokenizer, engine, model, search, max_response_tokens=limit,
        temperature=config.train.temperature, seed=config.seed, code_version=code_version(),
    )  # fmt: skip


class Rounds:
    """tba.trainer's Experience: searches when it is synced, and hands each round over as a batch, `lag` steps later."""

    def __init__(self, store: RunStore, searcher, lag: int, num_rounds: int) -> None:
        self._store, self._searcher, self._lag, self._num_rounds = store, searcher, lag, num_rounds

    def sync(self, step: int) -> None:
        """The rounds of policy `step - 1`: `lag` more of the first one, so that later ones are that much older."""
        first = 0 if step == 1 else step - 1 + self._lag
        for number in range(first, min(step + self._lag, self._num_rounds)):
            found = self._searcher.round(number)
            rows = [row | {"schema_version": SCHEMA_VERSION} for row in found.trajectories]
            shards.commit_shard(self._store, to_table(rows, TRAJECTORY))
            ledger.record_search_round(self._store, found.metrics)

    def draw(self, step: int) -> Batch:
        rows = shards.read_shards(self._store, "s0", [step - 1])
        by_prompt: dict[str, list[dict]] = {}
        for row in rows.to_pylist():
            by_prompt.setdefault(row["prompt_id"], []).append(row)
        place = {prompt_id: index for index, prompt_id in enumerate(by_prompt)}
        indices = [place[prompt_id] for prompt_id in rows["prompt_id"].to_pylist()]
        num_slots = len(next(iter(by_prompt.values())))
        drawn = {
            "prompt_index": indices,
            "slot": [slot for of_prompt in by_prompt.values() for slot in range(len(of_prompt))],
            "sync": [step] * len(indices),
            "recent": [True] * len(indices),
            "draw_probability": [1 / num_slots] * len(indices),
            "ages_from": rows["policy_step"].to_pylist(),
        }
        record = rows
        for name, values in drawn.items():
            record = record.append_column(name, pa.array(values))
        staleness = ledger.staleness(record, step).to_pylist()
        rewards = rows["reward"].to_pylist()
        facts = {
            "staleness_mean": statistics.fmean(staleness),
            "staleness_max": max(staleness),
            "reward_recent_mean": statistics.fmean(rewards),
            "fresh_reward_mean": statistics.fmean(rewards),
            "num_trajectories": step * len(rewards),
            "num_prompts": len(by_prompt),
            "num_inserted": step * len(rewards),
            "samples_per_insert": 1.0,
            "num_too_old": 0,
            "searchers_silent_s": 0.0,
        }
        return Batch([make_draw(of_prompt) for of_prompt in by_prompt.values()], facts, record)


class Recorder:
    """tba.trainer's Outbox: the ledger, and the policy handed to the Searcher at once."""

    def __init__(self, store: RunStore, searcher, attempt: int, num_heldout: int, steps: int) -> None:
        self._store, self._searcher, self._attempt = store, searcher, attempt
        self._num_heldout, self._steps = num_heldout, steps

    def status(self, state: str, step: int, metrics: dict | None = None) -> None: ...

    def checkpoint(self, step: int, trainer: Trainer) -> None: ...

    def record(self, step: int, batch: Batch, metrics: dict) -> None:
        ledger.record_batch(self._store, self._attempt, step, batch.record)
        ledger.record_training_step(self._store, {"attempt": self._attempt, "step": step} | metrics)

    def publish(self, step: int, weights: dict, final: bool) -> None:
        import tempfile

        with tempfile.TemporaryDirectory(prefix="tba-policy-") as folder:
            write_weights(weights, folder)
            self._searcher.load(Path(folder), step)
        if step == 0 or final:
            result = self._searcher.evaluate(self._num_heldout) | {"attempt": self._attempt}
            ledger.record_evaluation(self._store, result)


def _outcome(arm: Arm, seed: int, store: RunStore, seconds: float) -> Outcome:
    accuracy = query(store, "SELECT accuracy FROM evaluations ORDER BY policy_step").column(0).to_pylist()
    curve = query(store, "SELECT reward_mean FROM training_steps ORDER BY step").column(0).to_pylist()
    late = (
        "SELECT avg(staleness), max(staleness), count(*) FROM batches WHERE step > (SELECT max(step) / 2 FROM batches)"
    )
    mean, largest, _ = (column[0].as_py() for column in query(store, late).columns)
    (num_trajectories,) = query(store, "SELECT count(*) FROM trajectories").column(0).to_pylist()
    return Outcome(arm.name, seed, accuracy[0], accuracy[-1], mean, largest, num_trajectories, seconds, curve)


@dataclass(frozen=True)
class Summary:
    """An arm over its seeds."""

    arm: str
    num_seeds: int
    accuracy_mean: float
    half_width: float  # of the 95 % confidence interval by Student's t; nan for one seed
    accuracies: list[float]
    staleness_mean: float
    staleness_max: int


def summarise_arms(outcomes: list[Outcome]) -> list[Summary]:
    """In the order in which the arms first appear."""
    by_arm: dict[str, list[Outcome]] = {}
    for outcome in outcomes:
        by_arm.setdefault(outcome.arm, []).append(outcome)
    return [_summary(arm, of_arm) for arm, of_arm in by_arm.items()]


def _summary(arm: str, outcomes: list[Outcome]) -> Summary:
    accuracies = [outcome.accuracy_after for outcome in outcomes]
    mean, half_width = confidence_interval(accuracies)
    staleness = statistics.fmean(outcome.staleness_mean for outcome in outcomes)
    largest = max(outcome.staleness_max for outcome in outcomes)
    return Summary(arm, len(outcomes), mean, half_width, accuracies, staleness, largest)


def confidence_interval(values: list[float]) -> tuple[float, float]:
    """Mean and half the width of its 95 % confidence interval, by Student's t. nan for one value."""
    if len(values) < 2:
        return values[0], math.nan
    quantile = T_95[min(len(values) - 2, len(T_95) - 1)]
    return statistics.fmean(values), quantile * statistics.stdev(values) / math.sqrt(len(values))


def tune(
    arms: list[Arm], rates: list[float], base: RunConfig, model: Path, num_heldout: int, say: Callable[[str], None]
) -> list[Arm]:
    """Each arm with the learning rate that came to the best accuracy, by one run each of a seed used nowhere else."""
    tuned = []
    for arm in arms:
        found = {}
        for rate in rates:
            trial = Arm(f"tune-{arm.name}-{rate:g}", arm.lag, arm.settings | {"learning_rate": rate})
            outcome = run_arm(trial, base, model, seed=1000, num_heldout=num_heldout)
            found[rate] = outcome.accuracy_after
            say(f"{trial.name}: {outcome.accuracy_before:.3f} -> {outcome.accuracy_after:.3f}, {outcome.seconds:.0f} s")
        tuned.append(replace(arm, settings=arm.settings | {"learning_rate": max(rates, key=found.get)}))
    return tuned
