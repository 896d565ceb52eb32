"""A Searcher's share of its machine (flows/searcher/start.py). `start_searcher` itself is tested by whole runs.

- A Searcher does not start if its model, or one that scores responses, has other weights than the run's, or if its
  problems are others.
- Its engine and its reference policy have the run's settings, and each start a seed of its own.
- The next rounds are sampled ahead, unless engine and scoring share a core, or the run is synchronous.
- Where it samples ahead on a CPU, the reference policy has a process of its own.
- A run's processes on a machine take its GPUs in order, the Trainer the first. Searchers share the GPUs after the
  Trainer's, or the Trainer's if none is left. Each has a share of a shared GPU's memory, and engines there start in
  turn. Searchers on other machines take nothing away.

python -m pytest tests/flows/searcher/test_start.py
"""

import contextlib
import os
import string
from dataclasses import replace

import pytest
import torch

from flows.config import RunConfig
from flows.searcher import start
from flows.searcher.start import place_on_machine, samples_ahead, searcher_threads
from infra import gpus, machine, places
from storage import attempts
from storage.errors import RunConfigMismatch
from storage.process_identity import Identity
from storage.run_inputs import check_model
from storage.store import RunStore
from tba import engines, precision
from tba.engine import WholeBatches
from tba.reference_policy import ReferencePolicy
from tba.reference_process import ReferenceProcess
from tests.character_model import save_character_model


@pytest.fixture(autouse=True)
def own_places(tmp_path, monkeypatch):
    """No other process of this machine is of these runs."""
    monkeypatch.setattr(places.tempfile, "gettempdir", lambda: str(tmp_path))
    monkeypatch.setattr(places, "_places", {})


@pytest.fixture
def store(tmp_path):
    return RunStore(tmp_path.as_uri(), "run")


@pytest.fixture
def be(monkeypatch):
    """be(place, of) makes this process the Searcher at a place of a machine that has so many."""

    def be(place: int, of: int) -> None:
        monkeypatch.setattr(start, "take_place", lambda group: place)
        monkeypatch.setattr(start, "num_places", lambda group: of)

    return be


@pytest.mark.parametrize(
    "searchers, cores, device, ahead",
    [
        (1, 2, "cpu", False),  # one core each for the Searcher and the Trainer
        (1, 4, "cpu", True),
        (3, 4, "cpu", False),
        (1, 2, "cuda", True),  # the engine needs no core
    ],
)
def test_the_next_round_is_sampled_ahead_unless_engine_and_scoring_share_a_core(
    store, monkeypatch, searchers, cores, device, ahead
):
    monkeypatch.setattr(machine.os, "sched_getaffinity", lambda process: range(cores))
    monkeypatch.setattr(precision, "default_device", lambda: device)
    attempts.start_attempt(store, 0, Identity.current())
    assert samples_ahead(RunConfig(run=store.run, store=store.url, searchers=searchers)) is ahead


@pytest.mark.slow
@pytest.mark.parametrize(("cores", "reference"), [(2, ReferencePolicy), (4, ReferenceProcess)])
def test_the_reference_policy_has_a_process_where_rounds_are_sampled_ahead(
    store, tmp_path, monkeypatch, cores, reference
):
    monkeypatch.setattr(machine.os, "sched_getaffinity", lambda process: range(cores))
    monkeypatch.setattr(precision, "default_device", lambda: "cpu")
    monkeypatch.setattr(engines, "make_engine", lambda *_, **__: WholeBatches())
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    model = save_character_model(tmp_path / "model", string.printable)
    attempts.start_attempt(store, 0, Identity.current())
    config = RunConfig(run=store.run, store=store.url, model=str(model), searchers=1)
    assert type(start.start_searcher(config, "s0", 0)._reference) is ReferencePolicy
    searcher = start.start_searcher(config, "s0", 0, begins_ahead=True)
    assert type(searcher._reference) is reference
    assert searcher.vocabulary_size >= len(string.printable)


@pytest.mark.slow
def test_a_searcher_starts_with_the_runs_settings_and_compares_its_problems(store, tmp_path, monkeypatch):
    started, system = [], "x" * 200
    monkeypatch.setattr(engines, "make_engine", lambda *_, **given: started.append(given) or WholeBatches())
    monkeypatch.setattr(precision, "default_device", lambda: "cpu")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    attempts.start_attempt(store, 0, Identity.current())
    search = {"temperature": 0.7, "prompts_per_round": 3, "samples_per_prompt": 8, "system_prompts": [system],
              "exploration_probability": 0.5, "engine": {"gpu_memory_utilization": 0.3}}  # fmt: skip
    model = save_character_model(tmp_path / "model", string.printable)
    small = {"prompts_per_batch": 2, "min_size": 8}
    config = RunConfig(run=store.run, store=store.url, model=str(model), searchers=1, search=search, sampling=small,
                       train={"temperature": 2.0})  # fmt: skip
    searcher, *_ = [start.start_searcher(config, *at) for at in (("s0", 0), ("s0", 4), ("s1", 0))]
    assert searcher._temperature == 2.0, "the objective's, by which the reference is scored"
    longest = max(len(problem.encode(searcher._tokenizer, system)) for problem in searcher.task.train)
    assert started[0]["max_tokens"] == longest + searcher._max_response_tokens
    assert started[0]["max_sequences"] == 3 * 8
    assert started[0]["arguments"] == {"gpu_memory_utilization": 0.3}
    assert len({given["seed"] for given in started}) == 3
    store.put_json("data.json", {"fingerprint": "of other data"})
    with pytest.raises(RunConfigMismatch, match=r"task\.data"):
        start.start_searcher(config, "s0", 0)


@pytest.mark.slow
def test_another_model_than_the_trainers_samples_nothing(store, tmp_path, monkeypatch):
    monkeypatch.setattr(engines, "make_engine", lambda *_, **__: pytest.fail("an engine was started"))
    check_model(store, "model", "the Trainer's")
    model = save_character_model(tmp_path / "model", string.printable)
    with pytest.raises(RunConfigMismatch, match="began with the Trainer's"):
        start.start_searcher(RunConfig(run=store.run, store=store.url, model=str(model)), "s0", 0)


@pytest.mark.slow
def test_another_victim_than_the_first_searchers_answers_nothing(store, tmp_path, monkeypatch):
    monkeypatch.setattr(engines, "make_engine", lambda *_, **__: WholeBatches())
    model, victim = (str(save_character_model(tmp_path / name, string.printable)) for name in ("model", "victim"))
    config = RunConfig(run=store.run, store=store.url, model=model, task={"name": "redteam", "victim": victim})
    for _ in range(2):
        start.start_searcher(config, "s0", 0)
    save_character_model(tmp_path / "victim", string.printable, hidden_size=32)
    with pytest.raises(RunConfigMismatch, match=r"score responses .* victim [0-9a-f]{32}, but .* began with victim"):
        start.start_searcher(config, "s1", 0)


@pytest.mark.slow
@pytest.mark.parametrize(("num_gpus", "in_turn"), [(1, True), (2, False)])
def test_engines_that_share_a_gpu_start_in_turn(store, tmp_path, monkeypatch, num_gpus, in_turn):
    inside, seen = [], []

    @contextlib.contextmanager
    def alone_here(what):
        inside.append(what)
        yield
        inside.clear()

    monkeypatch.setattr(torch.cuda, "device_count", lambda: num_gpus)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda gpu: (80, 80))
    monkeypatch.setattr(precision, "default_device", lambda: "cpu")
    monkeypatch.setattr(start, "alone_here", alone_here)
    monkeypatch.setattr(engines, "make_engine", lambda *_, **__: seen.append(bool(inside)) or WholeBatches())
    loaded = lambda folder: seen.append(bool(inside)) or ReferencePolicy(folder)  # noqa: E731
    monkeypatch.setattr("tba.reference_policy.ReferencePolicy", loaded)
    for name in ("OMP_NUM_THREADS", "CUDA_VISIBLE_DEVICES"):
        monkeypatch.setenv(name, "")
    model = save_character_model(tmp_path / "model", string.printable)
    attempts.start_attempt(store, 0, Identity.current())
    config = RunConfig(run=store.run, store=store.url, model=str(model), searchers=1)
    start.start_searcher(config, "s0", 0)
    assert seen == [in_turn, in_turn]  # engine and reference policy


def test_a_synchronous_run_samples_no_round_ahead(monkeypatch):
    monkeypatch.setattr(machine.os, "sched_getaffinity", lambda process: range(64))
    assert not samples_ahead(RunConfig(synchronous=True, searchers=1))


@pytest.mark.parametrize(
    ("num_gpus", "given", "took", "shares"),
    [
        (4, "", ["1", "2", "3"], [1, 1, 1]),
        (2, "", ["1", "1", "1"], [1 / 3] * 3),  # not the Trainer's
        (1, "", ["0", "0", "0"], [0.25] * 3),
        (3, "5,6,7", ["6", "7", "6"], [0.5, 1, 0.5]),
        (0, "", [""] * 3, [1, 1, 1]),
    ],
)
def test_searchers_beside_their_trainer_take_the_gpus_after_it(store, be, monkeypatch, num_gpus, given, took, shares):
    """What torch says of the machine is made up: this one may have no GPU."""
    monkeypatch.setattr(torch.cuda, "device_count", lambda: num_gpus)
    config = RunConfig(run=store.run, store=store.url, searchers=3)
    attempts.start_attempt(store, 0, Identity.current())
    found = []
    for place in range(3):
        be(place, of=place + 1)  # the others have not started yet
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", given)
        found.append((gpus.take_gpus(*place_on_machine(config)), os.environ["CUDA_VISIBLE_DEVICES"]))
    assert found == list(zip(shares, took, strict=True))


def test_searchers_of_two_gpus_each_take_the_gpus_after_their_trainer(store, be, monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 8)
    engine = {"tensor_parallel_size": 2}
    config = RunConfig(run=store.run, store=store.url, searchers=2, search={"engine": engine})
    attempts.start_attempt(store, 0, Identity.current(), processes=4)  # run.json does not have it
    found = []
    for place in range(2):
        be(place, of=2)
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
        share = gpus.take_gpus(*place_on_machine(config), config.search.num_devices)
        found.append((share, os.environ["CUDA_VISIBLE_DEVICES"]))
    assert found == [(1, "4,5"), (1, "6,7")]
    with pytest.raises(ValueError, match=r"needs 9 GPUs .*, and this machine has 8"):
        gpus.take_gpus(0, 1, 0, gpus_per_searcher=9)


def test_a_searcher_that_joins_takes_what_is_free(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda gpu: ((12, 80), (60, 80))[gpu])
    assert gpus.free_share(0.5) == 12 / 80 and gpus.free_share(0.1) == 0.1


@pytest.mark.parametrize(
    ("num_gpus", "num_searchers", "num_trainers", "shares"),
    [(0, 1, 1, False), (1, 1, 1, True), (2, 3, 1, False), (2, 1, 2, True), (4, 0, 4, False)],
)
def test_a_trainer_loads_in_turn_with_searchers_on_its_gpus(monkeypatch, num_gpus, num_searchers, num_trainers, shares):
    monkeypatch.setattr(gpus, "num_gpus", lambda: num_gpus)
    assert gpus.shares_a_gpu(num_searchers, num_trainers) is shares


def test_eight_machines_with_one_gpu_each_give_all_of_it(store, monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(machine.os, "sched_getaffinity", lambda process: range(16))
    config = RunConfig(run=store.run, store=store.url, searchers=8)
    attempts.start_attempt(store, 0, replace(Identity.current(), boot_id="of another machine"))
    for _ in range(8):
        places._places.clear()  # the next machine
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
        assert gpus.take_gpus(*place_on_machine(config)) == 1
        assert os.environ["CUDA_VISIBLE_DEVICES"] == "0"
        assert searcher_threads(config) == 16


def test_searchers_on_another_machine_than_their_trainer_share_it_among_themselves(store, be):
    config = RunConfig(run=store.run, store=store.url, searchers=3)
    attempts.start_attempt(store, 0, replace(Identity.current(), host="elsewhere"))
    found = []
    for place in range(2):
        be(place, of=2)
        found.append(place_on_machine(config))
    assert found == [(0, 2, 0), (1, 2, 0)]
