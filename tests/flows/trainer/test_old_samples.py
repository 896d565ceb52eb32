"""Training on samples 32 and 64 policy steps old: the real Trainer, buffer, store and Searcher, with a small policy.

Claims
- With the taper the policy keeps the right answers that it had and adds to them; the alarm `reward_fell` stays off.
- Without the taper the same run loses right answers, and `reward_fell` goes on.

The policy is a Llama of 20,000 parameters that adds two numbers, the last digit first. Supervised training on wrong
and right answers brings it to three fifths right (tba/testbed_task.py has the sums).

Run: pytest tests/flows/trainer/test_old_samples.py
"""

import contextlib
import os
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from flows.compare.lagged import LaggedOutbox
from flows.config import RunConfig
from flows.trainer.alarms import RunAlarms
from flows.trainer.experience import StoredExperience
from flows.trainer.heartbeat import Heartbeat
from storage.buffer import ReplayBuffer
from storage.policies import fetch_policy, latest_policy
from storage.queries import query
from tba import testbed_task
from tba.alarms import spans
from tba.reference_policy import ReferencePolicy
from tba.rewards import RewardedTask
from tba.searcher import Models, Searcher, SearcherIdentity
from tba.tasks.base import Problem
from tba.trainer import Trainer
from tba.training_loop import train
from tba.transformers_engine import TransformersEngine
from tests.character_model import save_character_model
from tests.storage.buffer_runs import new_store

SHAPE = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
SYNC_INTERVAL = 4
PRETRAINING_STEPS = 1200
SHARES = (0.3, 0.17, 0.17, 0.36)  # of right answers, and of those that forget a carry
ENOUGH = 0.6  # greedy accuracy at which the first policy stops learning: there is much to lose and to gain


class Sums:
    """The testbed's sums as a task: 70+05= is answered 57 and a newline."""

    name, version, stop, max_response_tokens = "sums", "sums-1", ("\n",), testbed_task.T

    def __init__(self) -> None:
        self.train, self.heldout = (
            [Problem(str(number), _text(sums.prompts[number]), _answer(0, number)) for number in numbers.tolist()]
            for numbers in (sums.train, sums.heldout)
        )

    def rewards(self, problems: list[Problem], responses: list[str]) -> list[float]:
        # the tokenizer of characters writes a space between any two
        texts = [text.replace(" ", "") for text in responses]
        return [float(text == problem.answer) for problem, text in zip(problems, texts, strict=True)]


sums = testbed_task.sums()


def _text(tokens: torch.Tensor) -> str:
    return "".join(testbed_task.CHARACTERS[token] for token in tokens)


def _answer(kind: int, number: int) -> str:
    return _text(sums.answers[kind, number]).rstrip("\n") + "\n"


@pytest.fixture(scope="module", autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)  # tensors are small: more threads only wait for each other
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def first_policy(tmp_path_factory) -> Path:
    """Folder of a policy that answers some three fifths of the sums."""
    folder = save_character_model(
        tmp_path_factory.mktemp("model"), testbed_task.CHARACTERS, num_key_value_heads=4, **SHAPE
    )
    tokenizer, model = AutoTokenizer.from_pretrained(folder), AutoModelForCausalLM.from_pretrained(folder)
    generator = torch.Generator().manual_seed(0)
    optimizer = torch.optim.AdamW(model.parameters(), weight_decay=0.0, fused=True)
    for step in range(PRETRAINING_STEPS):
        numbers = sums.train[torch.randint(testbed_task.NUM_TRAIN, (128,), generator=generator)].tolist()
        kinds = torch.tensor(SHARES).multinomial(128, replacement=True, generator=generator).tolist()
        texts = [
            _text(sums.prompts[n]) + _answer(kind, n).ljust(4, "\n") for kind, n in zip(kinds, numbers, strict=True)
        ]
        tokens = torch.tensor(tokenizer(texts)["input_ids"])  # [128, P + T]
        labels = tokens.index_fill(1, torch.arange(testbed_task.P), -100)
        optimizer.param_groups[0]["lr"] = 5e-3 * (1 - step / PRETRAINING_STEPS)
        model(tokens, labels=labels).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if step % 20 == 19 and _greedy_accuracy(model, tokenizer) >= ENOUGH:
            break
    model.save_pretrained(folder)
    return folder


def greedy_accuracy(folder: Path) -> float:
    return _greedy_accuracy(AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder))


@torch.no_grad()
def _greedy_accuracy(model, tokenizer, num_sums: int = 512) -> float:
    """Greedy sampling writes an answer if each of its tokens is the likeliest behind those before."""
    numbers = sums.heldout[:num_sums].tolist()
    tokens = torch.tensor(
        tokenizer([_text(sums.prompts[n]) + _answer(0, n).ljust(4, "\n") for n in numbers])["input_ids"]
    )
    found = model(tokens).logits[:, testbed_task.P - 1 : -1].argmax(-1)  # [n, T]
    ends = torch.tensor([len(_answer(0, n)) for n in numbers]).unsqueeze(1)
    counts = torch.arange(testbed_task.T).unsqueeze(0) < ends
    return ((found == tokens[:, testbed_task.P :]) | ~counts).all(1).float().mean().item()


@dataclass(frozen=True)
class Trained:
    accuracy: float  # greedy, held-out, of the last policy
    rewards: list[float]  # mean of each search round
    alarms: set[str]  # that were on at some step
    staleness: float  # mean of the last half of the steps


def trained(first_policy: Path, folder: Path, lag: int, residual_weight: str) -> Trained:
    config = RunConfig.model_validate(
        {
            "sampling": {"prompts_per_batch": 16, "responses_per_prompt": 8, "min_size": 1},
            "search": {"prompts_per_round": 16 * SYNC_INTERVAL, "samples_per_prompt": 8},
            "train": {
                "steps": 64 + 2 * lag,
                "sync_interval": SYNC_INTERVAL,
                "checkpoint_interval": 1000,
                "learning_rate": 1.5e-3,
                "adam_beta1": 0.9,  # as the plain loss is published
                "residual_weight": residual_weight,
            },
            "trackers": [],
        }
    )
    store, tokenizer = new_store(folder), AutoTokenizer.from_pretrained(first_policy)
    engine = TransformersEngine(first_policy, max_tokens=16, max_sequences=1024, seed=0, threads=1)
    searcher = Searcher(
        SearcherIdentity("s0", seed=0, code_version="test"),
        RewardedTask(Sums()),
        Models(tokenizer, engine, ReferencePolicy(first_policy)),
        config.search,
        max_response_tokens=testbed_task.T,
        temperature=1.0,
    )
    heart, alarms = Heartbeat(store, config, 1, os.getppid()), RunAlarms()
    of_search = {"searcher": searcher, "num_rounds": 1, "lag": lag, "folder": folder / "policies"}
    lagged = LaggedOutbox(store, config, 1, first_policy, heart, alarms, **of_search)
    experience = StoredExperience(store, ReplayBuffer(store, config.sampling, 0), 1, alarms)
    with contextlib.closing(lagged) as outbox:
        train(Trainer(first_policy, config.train), experience, outbox, poll_s=0.01)
    heart.end("finished")
    steps = query(store, "SELECT * FROM training_steps ORDER BY step").to_pylist()
    return Trained(
        greedy_accuracy(fetch_policy(store, latest_policy(store), folder / "last")),
        lagged.rewards,
        {span.name for span in spans(steps)},
        fmean(step["staleness_mean"] for step in steps[len(steps) // 2 :]),
    )


@pytest.mark.slow
@pytest.mark.parametrize("lag", [32, pytest.param(64, marks=pytest.mark.apart)])
def test_old_samples_teach_with_the_taper_and_unteach_without(first_policy, tmp_path, lag):
    tapered = trained(first_policy, tmp_path / "tapered", lag, "tapered")
    assert tapered.staleness >= lag
    assert tapered.accuracy > greedy_accuracy(first_policy) + 0.1
    assert "reward_fell" not in tapered.alarms

    plain = trained(first_policy, tmp_path / "plain", lag, "plain")
    assert plain.staleness >= lag
    assert fmean(plain.rewards[-3:]) < 0.8 * fmean(plain.rewards[:3])
    assert min(plain.rewards) < 0.5 * min(tapered.rewards)
    assert "reward_fell" in plain.alarms
