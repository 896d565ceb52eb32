"""Generation beside its caller (tba/generator.py): a Searcher scores a round while the engine samples the next one.

- Rounds are in the engine before they are asked for, and come in order.
- A response that outlasts the next rounds does not leave the engine idle.
- While a round is scored, a whole one waits in the engine, so that it does not run empty.
- While scoring is slower than sampling, no further rounds are begun.
- While a round is scored, the engine samples on.
- A policy is loaded between two steps; a row names the policies of its first and its last token.
- A load that fails ends the batches in flight, and their rounds are sampled again, by the next policy alone.
- An engine's error reaches who waits for a batch; later batches are sampled.
- However often batches are dropped, one step follows another: a load waits for one step at most.
- An evaluation goes before the prompts that wait.

python -m pytest tests/tba/test_generator.py
"""

import threading
from concurrent.futures import CancelledError, Future

import pytest

from tba.config import SearchSettings
from tba.engine import Response, Sampling, ServedPolicy
from tba.generator import Generator
from tba.rewards import RewardedTask
from tba.searcher import Models, Searcher, SearcherIdentity
from tba.tasks.base import Problem

ANY = Sampling(2, 1.0, 1.0, 4, [1])
WAIT_S = 20


class StepByStep:
    """An engine that samples a token of each batch a step, when the test says so; a response is four tokens long."""

    places = 2  # of batches that are sampled at once

    def __init__(self) -> None:
        self.may_step, self.stepped = threading.Semaphore(0), threading.Semaphore(0)
        self.batches, self.started, self.fails_with = {}, [], None
        self.longer, self.busy = {}, []  # number of tokens of other batches; batches sampled in each step
        self.num_begun = 0  # of the two prompts of the first batch that waits

    def load(self, folder, policy_step):
        if self.fails_with:
            raise self.fails_with
        self.served = ServedPolicy(policy_step, f"{policy_step:032d}")
        return self.served

    def start(self, prompts, sampling, *, first):
        number = len(self.started)
        self.started.append((prompts, first))
        self.batches[number] = (sampling, [])
        return number

    def step(self):
        if not self.may_step.acquire(timeout=0.002):
            return {}
        if self.fails_with:
            raise self.fails_with
        busy = list(self.batches)[: self.places]
        for number in busy:
            self.batches[number][1].append(self.served)
        self.busy.append(len(busy))
        whole = [number for number in busy if len(self.batches[number][1]) == self.longer.get(number, 4)]
        self.stepped.release()
        return {number: self._responses(*self.batches.pop(number)) for number in whole}

    def _responses(self, sampling, policies):
        starts = [(n, at) for n, at in enumerate(policies) if n == 0 or at != policies[n - 1]]
        response = Response([5, 6, 7, 1], [-0.5] * 4, "stop", starts)
        return [[response] * of_prompt.num_samples for of_prompt in sampling]

    def num_waiting(self):
        return max(0, 2 * (len(self.batches) - self.places) - self.num_begun)

    def abort(self):
        self.batches.clear()

    def steps(self, number: int) -> None:
        self.may_step.release(number)
        for _ in range(number):
            assert self.stepped.acquire(timeout=WAIT_S)


class Task:
    name, version, stop, max_response_tokens = "task", "1", (), 4
    train = tuple(Problem(f"p{n}", f"prompt {n}", "") for n in range(8))
    heldout = train

    def rewards(self, problems, responses):
        return [1.0] * len(problems)


class Tokenizer:
    """The token of a prompt is its number."""

    eos_token_id, bos_token, chat_template, name_or_path = 1, None, None, ""

    def encode(self, text, **_):
        return [int(text.split()[-1])]

    def decode(self, tokens, **_):
        return str(tokens)


class Reference:
    vocabulary_size = 8

    def logprobs(self, prompts, responses, temperature):
        return [[-1.0] * len(response) for response in responses]


@pytest.fixture
def engine():
    return StepByStep()


@pytest.fixture
def searcher(engine, tmp_path):
    searcher = Searcher(
        SearcherIdentity("s0", seed=1, code_version="test"), RewardedTask(Task()),
        Models(Tokenizer(), engine, Reference()),
        SearchSettings(samples_per_prompt=2, prompts_per_round=2), max_response_tokens=4, temperature=1.0,
    )  # fmt: skip
    searcher.load(tmp_path, 0)
    yield searcher
    searcher.drop_rounds()


def policy_steps(rows: list[dict]) -> set[tuple[int, int]]:
    return {(row["policy_step"], row["last_policy_step"]) for row in rows}


def wait_until(condition) -> None:
    for _ in range(100 * WAIT_S):
        if condition():
            return
        threading.Event().wait(0.01)
    raise AssertionError("waited in vain")


def in_thread(results: list, work, *arguments, **options) -> threading.Thread:
    thread = threading.Thread(target=lambda: results.append(work(*arguments, **options)))
    thread.start()
    return thread


def test_the_next_round_is_in_the_engine_while_one_is_scored(searcher, engine):
    sampled = []
    waiting = in_thread(sampled, searcher.sample, 0, ahead=True)
    wait_until(lambda: len(engine.started) == 3)  # 0 and 1 are sampled, 2 waits
    engine.steps(4)
    waiting.join(WAIT_S)
    engine.steps(4)  # while round 0 is scored
    assert searcher.score(sampled[0]).metrics["round"] == 0
    second = searcher.sample(1, ahead=True)  # needs no step
    assert second.number == 1 and second.times["sampling_ended_at"] < second.times["started_at"]
    asked = [prompts for prompts, _ in engine.started]
    assert [[prompt.prompt_tokens for prompt in of.prompts] for of in (sampled[0], second)] == asked[:2]


def test_a_long_response_does_not_leave_the_engine_idle(searcher, engine, monkeypatch):
    monkeypatch.setattr("tba.searcher.POLL_S", 0.01)
    engine.longer, sampled = {0: 28}, []  # as long as seven of the next rounds
    waiting = in_thread(sampled, searcher.sample, 0, ahead=True)
    for _ in range(28):
        wait_until(lambda: len(engine.batches) >= 2)
        engine.steps(1)
    waiting.join(WAIT_S)
    assert sampled[0].number == 0 and engine.busy == [2] * 28


def test_a_whole_round_waits_while_one_is_scored(searcher, engine):
    engine.num_begun, sampled = 1, []
    waiting = in_thread(sampled, searcher.sample, 0, ahead=True)
    wait_until(lambda: len(engine.started) == 4)  # 0 and 1 are sampled, a half of 2 waits, and 3
    engine.steps(4)
    waiting.join(WAIT_S)


def test_rounds_that_nobody_scores_are_not_sampled(searcher, engine, monkeypatch):
    monkeypatch.setattr("tba.searcher.POLL_S", 0.01)
    engine.may_step.release(100)
    for number in range(4):
        assert searcher.sample(number, ahead=True).number == number
        wait_until(lambda: not engine.batches)  # scoring takes longer than sampling what was begun
    assert len(engine.started) <= 4 + 4  # a round takes half of this engine


def test_a_policy_comes_in_between_two_tokens(searcher, engine, tmp_path):
    sampled = []
    waiting = threading.Thread(target=lambda: sampled.append(searcher.sample(0, ahead=True)))
    waiting.start()
    engine.steps(3)
    searcher.load(tmp_path, 2)
    engine.may_step.release(1)
    waiting.join(WAIT_S)
    assert {policy.step for policy in sampled[0].policies} == {0, 2}
    rows = searcher.score(sampled[0]).trajectories
    assert policy_steps(rows) == {(0, 2)}
    assert {(row["policy_fingerprint"], row["last_policy_fingerprint"]) for row in rows} == {(f"{0:032d}", f"{2:032d}")}
    engine.may_step.release(4)
    assert policy_steps(searcher.score(searcher.sample(1, ahead=True)).trajectories) <= {(0, 2), (2, 2)}


def test_a_load_that_fails_ends_what_is_in_flight(searcher, engine, tmp_path):
    sampled, loads = [], [FileNotFoundError("pruned"), None]

    def load() -> None:
        """As a feed does: at each poll one policy is tried."""
        if loads:
            engine.fails_with = loads.pop(0)
            try:
                searcher.load(tmp_path, 3)
            except FileNotFoundError:
                pass
            else:
                engine.may_step.release(8)

    waiting = threading.Thread(target=lambda: sampled.append(searcher.sample(0, ahead=True, while_waiting=load)))
    waiting.start()
    engine.steps(2)
    waiting.join(WAIT_S)
    assert policy_steps(searcher.score(sampled[0]).trajectories) == {(3, 3)}, "no token of the broken weights"


def test_an_engines_error_reaches_who_waits(engine):
    generator = Generator(engine)
    generator.load(None, 0)
    engine.fails_with = RuntimeError("out of memory")
    engine.may_step.release(1)
    with pytest.raises(RuntimeError, match="out of memory"):
        generator.sample([[2]], [ANY])
    engine.fails_with = None
    engine.may_step.release(4)
    assert len(generator.sample([[2], [3]], [ANY] * 2)) == 2


def test_an_engine_that_cannot_even_drop_its_batches_leaves_nobody_waiting(engine):
    def fail() -> None:
        raise ConnectionError("the engine's process is gone")

    generator = Generator(engine)
    generator.load(None, 0)
    engine.abort, engine.fails_with = fail, RuntimeError("out of memory")
    engine.may_step.release(1)
    batch = generator.start([[2]], [ANY])
    with pytest.raises(RuntimeError, match="out of memory"):
        batch.result(WAIT_S)
    batch = generator.start([[2]], [ANY])
    with pytest.raises(ConnectionError):
        generator.cancel()
    assert batch.cancelled()


def test_dropped_batches_are_cancelled(engine):
    generator = Generator(engine)
    generator.load(None, 0)
    batch = generator.start([[2]], [ANY])
    engine.may_step.release(1)
    generator.cancel()
    with pytest.raises(CancelledError):
        batch.result(WAIT_S)
    assert not engine.batches


def test_a_load_waits_for_one_step_at_most(engine):
    generator = Generator(engine)

    def drop_and_start_again() -> int:
        """In the engine's thread, so before a step that is due. Returns the number of steps that are due then."""
        for _ in range(5):
            generator._start(Future(), [[2]], [ANY], False)
            generator._cancel()
        return generator._thread._work_queue.qsize()

    assert generator._thread.submit(drop_and_start_again).result(WAIT_S) == 1


def test_an_evaluation_goes_first(searcher, engine):
    found = []
    waiting = in_thread(found, searcher.sample, 0, ahead=True)
    wait_until(lambda: len(engine.started) == 3)
    evaluating = in_thread(found, searcher.evaluate, 2)
    wait_until(lambda: len(engine.started) == 4)
    assert [first for _, first in engine.started] == [False, False, False, True]
    engine.may_step.release(16)
    waiting.join(WAIT_S)
    evaluating.join(WAIT_S)
    assert len(found) == 2
