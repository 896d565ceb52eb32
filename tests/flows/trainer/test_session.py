"""What the Trainer's process adds to trainer and store (flows/trainer/session.py, flows/trainer/heartbeat.py).

Claims
- a run that starts no Searcher says so while it waits for one
- flow control is in every step's metrics; while a draw is too early its reason is what the heartbeat says
- Searchers that have stopped are an alarm: in the log once, in the metrics, in the heartbeat, gone when a shard comes
- what the newest sync took in is in every step's metrics
- an alarm over the steps is in the log once and in the heartbeat; a resumed Trainer knows the steps before it
- a resumed run's first batch waits for a shard that is new, also where it had no checkpoint yet
- a checkpoint follows the ledger: what was trained before it is on record; and so does the final policy
- an error of its writers stops the Trainer, also where it waits
- a model whose weights are not those that the run began with is refused before it is loaded

Run: pytest tests/flows/trainer/test_session.py
"""

import contextlib
import json
import logging
import os
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import pyarrow as pa
import pytest

from flows.config import RunConfig
from flows.trainer import session
from flows.trainer.__main__ import learn, main
from flows.trainer.alarms import RunAlarms
from flows.trainer.experience import StoredExperience, make_draws
from storage import attempts, checkpoints, intake, ledger, policies, requests
from storage.errors import RunConfigMismatch
from storage.rules import Limits
from storage.run_inputs import check_model
from storage.schema import TRAINING_STEP
from storage.shards import commit_shard, shard_path
from storage.store import RunStore
from tba.batch import Batch, Draw
from tba.logprobs import Group
from tba.training_loop import TooEarly
from tests.character_model import save_character_model
from tests.futures import done
from tests.storage.buffer_runs import commit, distinct, new_buffer
from tests.storage.helpers import make_batch, make_shard, make_training_step


@pytest.fixture(autouse=True)
def whole_syncs(monkeypatch):
    """However busy this machine is, each sync ends before the next draw."""
    monkeypatch.setattr("flows.trainer.experience.MAX_STALL_S", 60.0)


@pytest.fixture
def experience(store, alarms):
    buffer = new_buffer(store, prompts_per_batch=2, responses_per_prompt=4, samples_per_insert=2, max_age=4)
    return StoredExperience(store, buffer, attempt=1, alarms=alarms)


def test_flow_control_is_in_the_metrics_and_its_reason_in_words(store, experience):
    experience.sync(1)
    with pytest.raises(
        TooEarly, match=r"^0 of the first 1 trajectories \(sampling\.min_size\).*; the Searchers load their engines"
    ):
        experience.draw(1)
    commit(store, "s0", 0, distinct("ab", 4))
    experience.sync(1)
    facts = experience.draw(2).facts
    assert (facts["num_inserted"], facts["samples_per_insert"], facts["num_too_old"]) == (8, 2.0, 0)
    assert 0 <= facts["searchers_silent_s"] < 60
    assert facts.keys() <= set(TRAINING_STEP.names)
    with pytest.raises(TooEarly, match=r"^waiting for more trajectories: after step 3 each of 8"):
        experience.draw(3)


def test_a_run_without_searchers_says_what_it_waits_for(store, alarms):
    buffer = new_buffer(store, prompts_per_batch=2, responses_per_prompt=4)
    experience = StoredExperience(store, buffer, 1, alarms, has_searchers=False)
    experience.sync(1)
    with pytest.raises(
        TooEarly, match=r"starts no Searcher \(searchers is 0\); `tba searchers run \+1 --store file://.*` adds one"
    ):
        experience.draw(1)
    commit(store, "byhand", 0, distinct("ab", 4))
    experience.sync(1)
    assert experience.draw(1).draws


def test_a_resumed_run_waits_for_its_searchers(store, alarms):
    buffer = new_buffer(store, prompts_per_batch=2, responses_per_prompt=4)
    experience = StoredExperience(store, buffer, 2, alarms, awaits_shard=True)
    commit(store, "s0", 0, distinct("ab", 4))
    for _ in range(2):
        experience.sync(5)
        with pytest.raises(
            TooEarly, match=r"^resumed: waiting for the first new shard; the Searchers load their engines"
        ):
            experience.draw(5)
    commit(store, "s0", 1, distinct("ab", 4))
    experience.sync(5)
    assert experience.draw(5).draws and experience.draw(6).draws


def test_searchers_that_have_stopped_are_an_alarm(store, experience, outbox, heart, caplog, monkeypatch):
    commit(store, "s0", 0, distinct("ab", 4))
    experience.sync(1)
    monkeypatch.setattr("tba.alarms.SEARCHERS_SILENT_S", 1.0)  # a busy machine takes part of it for the last draw
    time.sleep(1.0)
    with caplog.at_level(logging.WARNING, logger="tba.trainer"):
        for _ in range(3):
            experience.sync(2)
    assert [record.message[:15] for record in caplog.records] == ["no new shard fo"]
    with pytest.raises(TooEarly, match=r"^no new shard for"):  # rather than samples_per_insert, which follows from it
        experience.draw(3)
    facts = experience.draw(1).facts
    assert facts["searchers_silent_s"] >= 1.0
    outbox.status("training", 1, facts)
    heart.write()
    beat = json.loads(store.get(attempts.HEARTBEAT))
    assert beat["alarms"]["searchers_silent"].startswith("no new shard for") and beat["message"] == ""

    commit(store, "s0", 1, distinct("ab", 4))
    experience.sync(2)
    outbox.status("training", 2, experience.draw(2).facts)
    heart.write()
    assert json.loads(store.get(attempts.HEARTBEAT))["alarms"] == {}


def test_shards_that_came_between_two_looks_are_no_silence(store, experience):
    commit(store, "s0", 0, distinct("ab", 4))
    experience.sync(1)
    time.sleep(0.5)
    commit(store, "s0", 1, distinct("ab", 4))
    assert experience.draw(1).facts["searchers_silent_s"] < 0.25  # nobody looked since


def test_a_run_without_searchers_waits_for_none(store, alarms, monkeypatch):
    monkeypatch.setattr("tba.alarms.SEARCHERS_SILENT_S", 0.1)
    experience = StoredExperience(store, new_buffer(store), 1, alarms, has_searchers=False)
    commit(store, "warm0", 0, distinct("ab", 4))
    experience.sync(1)
    time.sleep(0.2)
    experience.sync(2)
    assert not alarms.on and experience.draw(2).facts["searchers_silent_s"] == 0
    commit(store, "s0", 0, distinct("ab", 4))  # it was added by `tba searchers`
    experience.sync(3)
    time.sleep(0.2)
    experience.sync(4)
    assert alarms.on.keys() == {"searchers_silent"}


def test_responses_of_a_policy_that_a_resume_undid_are_not_the_newest_policys():
    rows = make_batch([40, 25])
    rows = rows.set_column(rows.schema.get_field_index("ages_from"), "ages_from", pa.array([10, 25]))
    (draw,) = make_draws(rows)
    assert draw.is_of_newest_policy == [False, True]
    copies = rows.set_column(
        rows.schema.get_field_index("trajectory_id"),
        "trajectory_id",
        pa.array([f"warm0-00000000-0000{n}" for n in (0, 1)]),
    )
    (draw,) = make_draws(copies)
    assert draw.is_of_newest_policy == [False, False], "another run's policy sampled them"


def test_a_draw_has_each_column_where_the_loss_reads_it():
    one = {"trajectory_id": "a", "response_tokens": [4], "reward": 0.0,
           "behavior_logprobs": [-1.0], "reference_logprobs": [-2.0]}  # fmt: skip
    two = {"trajectory_id": "b", "response_tokens": [5, 6], "reward": 1.0,
           "behavior_logprobs": [-3.0, -4.0], "reference_logprobs": [-5.0, -6.0]}  # fmt: skip
    rows = [row | of for row, of in zip(make_batch([3, 1, 3, 2]).to_pylist(), (one, two, one, two), strict=True)]
    rows[3] |= {"prompt_index": 1, "prompt_tokens": [9]}
    first, second = make_draws(pa.Table.from_pylist(rows))
    assert first == Draw(
        Group([1, 2, 3], [[4], [5, 6]]), [0, 1, 0], [0.0, 1.0, 0.0],
        [[-1.0], [-3.0, -4.0]], [[-2.0], [-5.0, -6.0]], [True, False],
    )  # fmt: skip
    assert (second.group, second.slot, second.reward) == (Group([9], [[5, 6]]), [0], [1.0])


@pytest.fixture
def without_model(monkeypatch) -> None:
    """A session whose model has ten tokens and no weights."""
    monkeypatch.setattr(session, "model_folder", lambda model: Path("unused"))
    monkeypatch.setattr(session, "base_fingerprint", lambda folder: "a1")
    monkeypatch.setattr(
        session, "trainer_of", lambda *_: contextlib.nullcontext(SimpleNamespace(step=0, vocabulary_size=10))
    )


def test_a_session_refuses_tokens_and_policies_that_its_model_and_run_do_not_have(
    store, heart, without_model, monkeypatch
):
    monkeypatch.setattr(session, "train", lambda trainer, experience, outbox: experience.sync(1))
    commit_shard(store, make_shard("s0", 0))
    commit_shard(store, make_shard("s0", 1, response_tokens=[10, 2]))
    commit_shard(store, make_shard("s0", 2, policy_step=9))
    session.train_run(store, RunConfig(train={"steps": 8}), 1, heart, None)
    assert [refusal.round for refusal in intake.refusals(store)] == [1, 2]


def test_what_the_newest_sync_took_in_is_in_the_metrics(store, alarms):
    experience = StoredExperience(store, new_buffer(store), attempt=1, alarms=alarms)
    commit(store, "s0", 0, [("a", [8, 16], 1.0), ("a", [4], 0.0)], policy_step=0)
    commit(store, "s1", 0, [("b", [2, 2, 2, 2, 2], 0.5), ("b", [2, 2, 2, 2, 2], 0.5)], policy_step=3)
    experience.sync(4)
    facts = experience.draw(6).facts
    # of a token t: behavior -t/8, reference -t/4. Tokens sum up to 24, 4, 10 and 10, of 2, 1, 5 and 5 each
    expected = {
        "fresh_reward_mean": (1.0 + 0.0 + 0.5 + 0.5) / 4,
        "fresh_kl": (24 + 4 + 10 + 10) / 8 / 4,
        "fresh_entropy": (24 + 4 + 10 + 10) / 8 / 13,
        "fresh_cut_share": 0.0,
        "fresh_staleness": (5 + 5 + 2 + 2) / 4,
    }
    assert {name: facts[name] for name in expected} == pytest.approx(expected)


def mismatched(step: int) -> dict:
    return make_training_step(1, step) | {"logprob_mismatch": 0.9}


def test_an_alarm_is_in_the_log_once_and_in_the_heartbeat(store, outbox, heart, caplog):
    with caplog.at_level(logging.WARNING, logger="tba.trainer"):
        for step in range(1, 8):
            outbox.status("training", step, {"logprob_mismatch": 0.9})
    (record,) = caplog.records
    assert record.message.startswith("log-probabilities disagree")
    heart.write()
    assert json.loads(store.get(attempts.HEARTBEAT))["alarms"].keys() == {"logprobs_disagree"}
    outbox.status("waiting", 7, {"message": "too early"})
    heart.write()
    assert json.loads(store.get(attempts.HEARTBEAT))["alarms"].keys() == {"logprobs_disagree"}, (
        "it is on until it is off"
    )
    outbox.status("training", 8, {"logprob_mismatch": 0.01})
    heart.write()
    assert json.loads(store.get(attempts.HEARTBEAT))["alarms"] == {}


def of_rows(checkpoint: Path, before: RunAlarms) -> None:
    """An older version's checkpoint."""


def of_the_checkpoint(checkpoint: Path, before: RunAlarms) -> None:
    before.saving()(checkpoint)


def of_a_torn_checkpoint(checkpoint: Path, before: RunAlarms) -> None:
    before.saving()(checkpoint)
    torn = checkpoint / "alarms.json"
    torn.write_text(torn.read_text()[:-9])


def of_odd_values(checkpoint: Path, before: RunAlarms) -> None:
    (checkpoint / "alarms.json").write_text(json.dumps(before._alarms.state() | {"_rewards": ["high"]}))


@pytest.mark.parametrize("kept", [of_rows, of_the_checkpoint, of_a_torn_checkpoint, of_odd_values])
def test_a_resumed_trainer_knows_the_steps_before_it(store, tmp_path, kept):
    before, resumed, anew = (RunAlarms() for _ in range(3))
    for step in range(1, 5):
        before.see(mismatched(step))
        if kept is not of_the_checkpoint:
            ledger.record_training_step(store, mismatched(step))
    kept(tmp_path, before)
    resumed.load(tmp_path, store)
    for alarms in (resumed, anew):
        assert alarms.on == {}
        alarms.see(mismatched(5))
    assert (resumed.on.keys(), anew.on.keys()) == ({"logprobs_disagree"}, set())


def test_a_checkpoint_follows_the_ledger(store, outbox, monkeypatch):
    written, go_on = [], threading.Event()
    record = ledger.record_training_step
    monkeypatch.setattr(ledger, "record_training_step", lambda *of: (go_on.wait(30), record(*of)))
    monkeypatch.setattr(checkpoints, "save_checkpoint", lambda *_: written.extend(store.list("metrics/training")))
    metrics = {k: v for k, v in make_training_step(1, 1).items() if k not in ("attempt", "step")}
    outbox.record(1, Batch([], {}, make_batch([0])), metrics)
    save = lambda folder: (folder / "state.json").touch()  # noqa: E731
    trainer = SimpleNamespace(save=save, start_copy=lambda read: done(read()), checkpoint_bytes=1000)
    outbox.checkpoint(1, trainer)  # returns: training goes on
    time.sleep(0.3)
    assert written == []
    go_on.set()
    outbox.checkpoint(2, trainer)  # not before the first is in the store
    assert written == ["metrics/training/attempt=00000001/step=00000001.parquet"]


def test_the_final_policy_is_not_published_before_all_that_was_trained_is_on_record(store, outbox, monkeypatch):
    """A run that has it trains no more, so what is missing by then would stay missing."""

    def full_disk(*_):
        raise OSError("no space left")

    monkeypatch.setattr(ledger, "record_training_step", full_disk)
    outbox.record(7, Batch([], {}, make_batch([0])), {})
    with pytest.raises(OSError, match="no space left"):
        outbox.publish(7, done({}), final=True)
    assert policies.latest_policy(store) is None


def test_a_run_that_has_its_final_policy_is_not_trained_again(tmp_path):
    """It was killed before that policy was evaluated, and its Searchers, which would feed it, have ended."""
    store = RunStore((tmp_path / "store").as_uri(), "ended")
    store.create_run(RunConfig(run="ended").recorded())
    (tmp_path / "policy").mkdir()
    policies.publish_policy(store, tmp_path / "policy", policies.policy_ref(7, "a fingerprint", attempt=1, final=True))
    before = list(store.list(""))
    learn(store.url, "ended", os.getppid())
    assert list(store.list("")) == before


@pytest.mark.parametrize(("devices", "tokens"), [([], 512), (['{"micro_batch_tokens": 64}'], 64)])
def test_a_trainer_uses_memory_as_it_is_told(store, monkeypatch, devices, tokens):
    store.create_run(RunConfig(run=store.run, train={"micro_batch_tokens": 512}).recorded())
    used = []

    def train_run(_, config, *others) -> str:
        used.append(config.train.micro_batch_tokens)
        return "stopped"

    monkeypatch.setattr(session, "train_run", train_run)
    assert main(store.url, store.run, str(os.getppid()), *devices) == 0
    assert used == [tokens]


def test_a_life_without_a_checkpoint_waits_for_its_searchers_too(store, heart, without_model, monkeypatch):
    """A run that was killed before its first checkpoint begins anew with its buffer, before its engines start."""
    monkeypatch.setattr(session, "train", lambda trainer, experience, outbox: experience.draw(1))
    with pytest.raises(TooEarly, match=r"^resumed"):
        session.train_run(store, RunConfig(), 2, heart, None)
    alone = RunConfig(searchers=0)
    with pytest.raises(TooEarly, match=r"^0 of the first 192 trajectories .* starts no Searcher"):
        session.train_run(store, alone, 2, heart, None)
    requests.want_searchers(store, 1)  # by `tba searchers RUN +1`
    with pytest.raises(TooEarly, match=r"^resumed"):
        session.train_run(store, alone, 2, heart, None)


def test_another_model_than_the_runs_is_not_trained(store, heart, tmp_path):
    check_model(store, "model", "the first machine's")
    config = RunConfig(model=str(save_character_model(tmp_path / "model")))
    with pytest.raises(RunConfigMismatch, match="began with the first machine's"):
        session.train_run(store, config, 2, heart, None)


def test_a_resume_without_a_shard_that_was_taken_in_names_the_remedy(store):
    for number in range(2):
        commit(store, "s0", number, distinct("ab", 4))
    new_buffer(store).sync(step=1, attempt=1)
    store.delete(shard_path("s0", 0))
    with pytest.raises(RuntimeError, match=r"round=00000000\.parquet .*cannot resume without it.*--warm-start run"):
        session._resumed_buffer(store, RunConfig(), Limits(), 1)


def test_a_writer_that_failed_stops_a_trainer_that_waits(outbox, monkeypatch):
    """Searchers would wait for its policy, and it for their shards."""

    def full_disk(*_):
        raise OSError("no space left")

    monkeypatch.setattr(outbox, "_write_newest_policy", full_disk)
    outbox.publish(7, done({}), final=False)
    with pytest.raises(OSError, match="no space left"):
        for _ in range(100):
            outbox.status("waiting", 7, {"message": "too early"})
            time.sleep(0.05)
