"""Claims about `tba plan` (flows/plan, flows/cli/plan.py). Run: pytest tests/flows/plan/test_plan.py

- a simulated run ends when a simulation by small steps of time ends, with as many trajectories of the same age
- a Trainer that may draw each trajectory once waits for Searchers, half as long for twice as many
- times are those of the ledger, without waits and evaluations; what is missing is named
- the command prints the measured run beside simulated ones
"""

import json
from dataclasses import replace
from datetime import timedelta

import pytest
from typer.testing import CliRunner

from flows.cli.app import app
from flows.config import RunConfig
from flows.plan.simulator import Loop, simulate, synchronous_seconds
from flows.plan.times import Times, TooFewTimes, measured_outcome, measured_times
from storage import ledger
from storage.schema import TRAINING_STEP
from storage.store import RunStore
from tests.storage.helpers import NOON

LOOP = Loop(searchers=1, steps=60, sync_interval=2, round_size=8, batch_size=8, min_size=8, samples_per_insert=None)
TICK_S = 0.01


def constant(steps: float, rounds: float, pauses: float, loads: float, publish: float) -> Times:
    return Times([steps], [rounds], [pauses], [loads], [], publish)


def by_ticks(times: Times, loop: Loop) -> tuple[float, int, float]:
    """Seconds, trajectories and staleness: every part looks at the clock at every tick. For constant times."""
    policies, committed, taken_in, newest, ages = [(0.0, 0)], [], 0, [], []
    searchers = [{"doing": "sampling", "until": times.rounds[0], "policy": 0} for _ in range(loop.searchers)]
    step, trains_until, tick = 0, None, 0
    while True:
        now = tick * TICK_S
        for searcher in searchers:
            while searcher["until"] <= now + 1e-9:
                if searcher["doing"] == "sampling":
                    committed.append(searcher["policy"])
                    searcher |= {"doing": "pausing", "until": searcher["until"] + times.pauses[0]}
                elif searcher["doing"] == "pausing":
                    found = max(number for at, number in policies if at <= now + 1e-9)
                    load_s = times.loads[0] if found > searcher["policy"] else 0.0
                    searcher |= {"doing": "loading", "until": searcher["until"] + load_s, "policy": found}
                else:
                    searcher |= {"doing": "sampling", "until": searcher["until"] + times.rounds[0]}
        syncs = trains_until is None
        if trains_until is not None and trains_until <= now + 1e-9:
            step, trains_until = step + 1, None
            if step == loop.steps:
                return now, taken_in * loop.round_size, sum(ages) / len(ages)
            if step % loop.sync_interval == 0:
                policies.append((now + times.publish, step))
                syncs = True
        if syncs and committed:
            newest, taken_in, committed = committed, taken_in + len(committed), []
        size, limit = taken_in * loop.round_size, loop.samples_per_insert or float("inf")
        if trains_until is None and size >= loop.min_size and (step + 1) * loop.batch_size <= limit * size:
            ages.append(step - sum(newest) / len(newest))
            trains_until = now + times.steps[0]
        tick += 1


@pytest.mark.parametrize(
    ("times", "loop"),
    [
        (constant(1.0, 3.1, 0.07, 0.53, 0.2), LOOP),
        (constant(0.5, 3.1, 0.07, 0.53, 0.9), Loop(3, 60, 4, 8, 16, 24, None)),
        (constant(0.5, 2.3, 0.07, 0.53, 0.1), Loop(2, 60, 2, 8, 8, 8, 1.5)),
    ],
)
def test_it_agrees_with_a_simulation_by_ticks(times, loop):
    found, (seconds, num_trajectories, staleness) = simulate(times, loop), by_ticks(times, loop)
    assert found.seconds == pytest.approx(seconds, rel=0.03)
    assert found.num_trajectories == pytest.approx(num_trajectories, abs=2 * loop.round_size)
    assert found.fresh_staleness == pytest.approx(staleness, abs=0.35)


def test_twice_as_many_searchers_halve_the_wait_of_a_trainer_that_draws_each_trajectory_once():
    times = constant(0.01, 4.0, 0.01, 0.01, 0.0)
    one, two = (simulate(times, Loop(number, 50, 2, 8, 8, 8, 1.0)) for number in (1, 2))
    assert one.seconds == pytest.approx(50 * 4, rel=0.05) and one.trainer_wait_share > 0.95
    assert two.seconds == pytest.approx(one.seconds / 2, rel=0.05)


def test_the_first_searcher_spends_the_share_that_evaluations_may_have():
    times = replace(constant(0.01, 4.0, 0.01, 0.01, 0.0), evaluations=[3.0])
    shares = (0.0, 0.1, 0.2)
    of_one, of_four = (
        [simulate(times, Loop(number, 400, 2, 8, 8, 8, 1.0, share)).seconds for share in shares] for number in (1, 4)
    )
    assert [seconds / of_one[0] for seconds in of_one] == pytest.approx([1 / (1 - share) for share in shares], rel=0.02)
    assert of_four[2] / of_four[0] == pytest.approx(4 / 3.8, rel=0.02)


def test_the_first_policys_evaluation_is_spent_before_the_first_round():
    times = replace(constant(0.01, 4.0, 0.01, 0.01, 0.0), evaluations=[3.0])
    without, short = (simulate(times, Loop(1, 10, 2, 8, 8, 8, 1.0, share)).seconds for share in (0.0, 0.1))
    assert short == without  # 3 s of 43 s were spent: another 3 s would make 6 of 46, 0.13


def test_turns_take_the_sum_of_their_parts():
    assert synchronous_seconds(constant(1.0, 3.0, 9.0, 0.5, 0.25), LOOP) == pytest.approx(60 * 4.75)
    assert synchronous_seconds(constant(1.0, 3.0, 9.0, 0.5, 0.25), Loop(2, 60, 2, 8, 32, 8, None)) == pytest.approx(
        60 * (2 * 3.0 + 1.75)
    )


def at(seconds: float):
    return NOON + timedelta(seconds=seconds)


@pytest.fixture
def store(tmp_path) -> RunStore:
    """Rounds of 3 s; a pause of 1 s, and with a new policy 2 s, beside an evaluation of 4 s."""
    store = RunStore(tmp_path.as_uri(), "planned")
    store.create_run(RunConfig(run="planned", store=store.url).recorded())
    for number, policy, begin in [(0, 0, 0), (1, 0, 4), (2, 2, 13)]:
        times = {"started_at": at(begin), "ended_at": at(begin + 3)}
        sampling = {"sampling_started_at": at(begin), "sampling_ended_at": at(begin + 2)}
        row = {"searcher": "s0", "round": number, "policy_step": policy, "num_trajectories": 192}
        row |= {"num_response_tokens": 960, "reward_mean": 0.5}
        ledger.record_search_round(store, row | times | sampling)
    evaluation = {"attempt": 1, "policy_step": 2, "split": "heldout", "num_problems": 4, "accuracy": 0.5}
    ledger.record_evaluation(store, evaluation | {"seconds": 4.0, "mean_response_tokens": 3.0, "created_at": at(12)})
    record_steps(store, [(1, 3.5, 3.5, 4.5), (2, 5.0, 0.125, 6.0), (3, 9.0, 2.5, 10.0)])
    return store


def record_steps(store: RunStore, steps: list[tuple[int, float, float, float]], attempt: int = 1) -> None:
    """Steps of a Trainer: number, start, seconds of the wait before, end."""
    for step, begin, wait_s, end in steps:
        row = {"attempt": attempt, "step": step, "started_at": at(begin), "ended_at": at(end), "wait_s": wait_s}
        row |= {"num_inserted": 192 * step, "fresh_staleness": step - 1.0}
        ledger.record_training_step(store, dict.fromkeys(TRAINING_STEP.names) | row)


def test_times_are_those_of_the_ledger(store):
    times = measured_times(store)
    # 1.5 less 0.125, 4.0 less 2.5; and a draw, which takes 0.125
    assert times.steps == pytest.approx([1.5, 1.625])
    assert times.evaluations == [4.0]
    assert times.rounds == pytest.approx([3, 3, 3])
    assert times.pauses == pytest.approx([1]) and times.loads == pytest.approx([1])
    assert times.publish == pytest.approx(2)  # policy 2 at 6 s, found at 8 s, then loaded for 1 s, evaluated for 4 s
    outcome = measured_outcome(store)
    assert (outcome.searchers, outcome.seconds, outcome.num_trajectories) == (1, pytest.approx(10), 576)
    assert outcome.trainer_wait_share == pytest.approx((3.5 + 0.125 + 2.5) / 10)
    assert outcome.fresh_staleness == pytest.approx(1)


def test_a_policy_of_an_earlier_attempt_was_not_found_before_its_step(store):
    record_steps(store, [(2, 19.0, 0.125, 20.0)], attempt=2)  # the step after which policy 2 was found at 8 s, again
    row = {"searcher": "s0", "round": 3, "policy_step": 3, "num_trajectories": 192, "num_response_tokens": 960}
    times = {"started_at": at(18), "ended_at": at(21), "sampling_started_at": at(18), "sampling_ended_at": at(20)}
    ledger.record_search_round(store, row | times | {"reward_mean": 0.5})
    assert measured_times(store).publish == pytest.approx(7)  # policy 3 at 10 s; at 17 s the round's policy was found


def test_a_draw_takes_the_median_of_the_waits_without_a_poll(store):
    record_steps(store, [(4, 10.5, 0.15, 11.0), (5, 12.0, 0.19, 13.0)])
    assert measured_times(store).steps == pytest.approx([1.375 + 0.15, 1.5 + 0.15, 1.35 + 0.15, 1.31 + 0.15])


def test_a_run_without_times_is_refused(tmp_path):
    store = RunStore(tmp_path.as_uri(), "new")
    store.create_run(RunConfig(run="new", store=store.url).recorded())
    with pytest.raises(TooFewTimes, match="0 training steps and 0 search rounds"):
        measured_times(store)
    result = CliRunner().invoke(app, ["plan", "new", "--store", store.url])
    assert result.exit_code == 2


def test_a_run_that_waits_by_another_rule_is_refused(tmp_path):
    store = RunStore(tmp_path.as_uri(), "old")
    store.create_run(RunConfig.model_validate({"run": "old", "sampling": {"max_age": 4}}).recorded())
    result = CliRunner().invoke(app, ["plan", "old", "--store", store.url])
    assert result.exit_code == 2 and "does not simulate sampling.max_age, which run old has" in result.output


def test_the_command_prints_the_measured_run_beside_simulated_ones(store):
    command = ["plan", "planned", "--store", store.url, "--searchers", "2", "--searchers", "4"]
    result = CliRunner().invoke(app, [*command, "--json"])
    rows = json.loads(result.stdout)
    assert [(row["searchers"], row["kind"]) for row in rows] == [
        (1, "measured"), (1, "simulated"), (2, "simulated"), (4, "simulated"),
    ]  # fmt: skip
    assert rows[3]["num_trajectories"] > 1.5 * rows[2]["num_trajectories"] > 2 * rows[1]["num_trajectories"]
    table = CliRunner().invoke(app, command)
    assert table.exit_code == 0 and "simulated" in table.stdout and "turns" in table.stdout
