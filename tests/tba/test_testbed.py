"""The testbed: a small policy that is far from its ceiling, samples of an enforced age, the Trainer's own objectives.

- Of the first policy's answers to held-out sums two fifths are right; the same policy can answer nearly all of them.
- Sampled and scored log-probabilities are the same numbers; a response ends with its first newline.
- The sparse reward is for nine numbers, which the first policy seldom gives.
- A run depends on its seed alone. Its lag is what was asked: with lag n the first n + 1 steps see the first policy.
- A learned log Z follows the estimate, and the policy learns with it.
- On samples sixteen steps old the tapered loss keeps the right answers that the policy had and adds to them; the plain
  loss, and a taper of what is to become likelier, lose them.

python -m pytest tests/tba/test_testbed.py
"""

import itertools
import statistics

import pytest
import torch

from tba import testbed, testbed_task
from tba.config import TrainSettings

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module", autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)  # tensors are small: more threads only wait for each other
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def first():
    """A study's has twice the steps."""
    return testbed.pretraining(testbed.ANSWER_SHARES, 0, steps=1200)


def test_the_first_policy_has_far_to_rise(first):
    assert 0.25 < testbed.accuracy(first) < 0.4
    samples = testbed.sample_sums(first, 1000, 16, torch.Generator().manual_seed(0))
    assert 0.33 < samples.reward.mean() < 0.45
    right_answers = testbed.pretraining((1.0, *12 * (0.0,)), 0, steps=800)
    assert testbed.accuracy(right_answers) >= 0.95


def test_it_is_read_from_its_file_when_it_is_there(first, tmp_path, monkeypatch):
    testbed.save_file(first.state_dict(), testbed.first_policy_file(tmp_path, 1))
    again = testbed.first_policy(tmp_path, 1)
    assert all((a == b).all() for a, b in zip(first.parameters(), again.parameters(), strict=True))
    monkeypatch.setattr(testbed, "PRETRAINING_STEPS", 10)
    other = testbed.first_policy(tmp_path, 1)
    assert (other.head.weight != first.head.weight).any(), "a policy of another pretraining was read"


def test_each_seed_has_a_pretraining_of_its_own():
    one, same, other = (testbed.pretraining(testbed.ANSWER_SHARES, seed, 10).head.weight for seed in (1, 1, 2))
    assert (one == same).all() and (one != other).any()


def test_sampled_and_scored_logprobs_agree(first):
    prompts = testbed_task.sums().prompts[:5]
    responses, logprobs = testbed.sample(first, prompts, 3, torch.Generator().manual_seed(0))
    scored = testbed.score(first, prompts.repeat_interleave(3, 0), responses)
    torch.testing.assert_close(scored, logprobs, rtol=0, atol=1e-5)


def test_rewards_and_ends():
    digits = [testbed_task.CHARACTERS.index(c) for c in "21\n"]  # 12, last digit first
    numbers = torch.tensor([705] * 4)  # 7 + 5
    responses = torch.tensor(
        [[*digits, 3], [*digits, testbed_task.END], [2, 1, 3, testbed_task.END], [1, 2, *digits[2:], 0]]
    )
    assert testbed_task.rewards(responses, numbers).tolist() == [1.0, 1.0, 0.0, 0.0]
    assert testbed_task.is_token(responses)[0].tolist() == [True, True, True, False]


def test_the_sparse_reward_is_for_nine_numbers_above_the_sum(first):
    numbers = torch.tensor([705] * 6)  # 12
    responses = testbed_task.tokens_of(["31\n\n", "12\n\n", "21\n\n", "22\n\n", "13\n\n", "13+\n"])
    assert testbed_task.sparse_rewards(responses, numbers).tolist() == [1.0, 1.0, 0.0, 0.0, 0.0, 0.0]  # 13 and 21 alone
    assert testbed_task.sparse_rewards(testbed_task.tokens_of(["702\n"]), torch.tensor([9999])).tolist() == [
        1.0
    ]  # 198 + 9
    samples = testbed.sample_sums(first, 1000, 16, torch.Generator().manual_seed(0), "sparse")
    assert 0.0005 < samples.reward.mean() < 0.01


def settings(**changed) -> TrainSettings:
    return TrainSettings(**{"steps": 60, "learning_rate": 3e-3, "adam_beta1": 0.9} | changed)


def test_a_run_depends_on_its_seed_alone(first):
    one, same, other = (testbed.train(first, settings(steps=4), 1, seed) for seed in (3, 3, 4))
    assert one == same and one.curve != other.curve


def test_the_lag_is_what_was_asked(first, monkeypatch):
    """A policy is recognised by its output bias, which the objective of this test raises by the step size each step."""
    seen = []
    sample = testbed.sample

    def watched(policy, *arguments):
        seen.append(round(policy.head.bias[0].item() - first.head.bias[0].item(), 3))
        return sample(policy, *arguments)

    monkeypatch.setattr(testbed, "sample", watched)
    monkeypatch.setattr(testbed, "_loss", lambda terms, *_: 0.0 * terms.policy.sum())
    step = torch.optim.AdamW.step

    def raised(optimizer):
        step(optimizer)
        with torch.no_grad():
            optimizer.param_groups[0]["params"][-1][0] += 1.0

    monkeypatch.setattr(torch.optim.AdamW, "step", raised)
    testbed.train(first, settings(steps=6, learning_rate=1e-9), 2, 0)
    assert seen[:6] == [0, 0, 0, 1, 2, 3]  # steps 1 to 6: the policies of steps 0, 0, 0, 1, 2, 3


def test_a_learned_log_z_follows_the_estimate_and_the_policy_learns_with_it(first, monkeypatch):
    errors = []  # of log Z in each step, mean over prompts
    learned_loss = testbed._learned_loss

    def watched(policy, behavior, rest, *arguments):
        errors.append((policy + rest).detach().mean().item())  # the residuals' mean is log Z less its estimate
        return learned_loss(policy, behavior, rest, *arguments)

    monkeypatch.setattr(testbed, "_learned_loss", watched)
    log_partition = testbed.LogPartition
    monkeypatch.setattr(testbed, "LogPartition", lambda first_guess: log_partition(first_guess - 16.0))  # nats
    gentle, before = settings(learning_rate=1e-3, steps=160), testbed.accuracy(first)
    learned = testbed.train(first, gentle, 4, 0, variant=testbed.Variant(log_z_rate=100.0))
    assert learned.accuracy > before + 0.1
    assert errors[0] < -14.0
    assert abs(statistics.fmean(errors[-20:])) < 6.0


def turned_taper(error, policy_logprob, behavior_logprob):
    ratio = (policy_logprob - behavior_logprob).detach().clamp(max=0).exp()
    return torch.where(error.detach() < 0, ratio, 1.0)


def test_old_samples_teach_with_the_taper_and_unteach_without(monkeypatch):
    first = testbed.pretraining((0.3, 0.17, 0.17, 0.36, *9 * (0.0,)), 0, steps=1200)  # has right answers to lose
    before = testbed.accuracy(first)

    def runs(**changed) -> list[testbed.Trained]:
        return [testbed.train(first, settings(**changed), 16, seed) for seed in (0, 1, 2)]

    tapered, plain = runs(), runs(residual_weight="plain")
    monkeypatch.setattr(testbed, "taper", turned_taper)
    turned = runs()
    # of the plain loss the mean: by the rounding of some processors one seed keeps what it had
    lost = statistics.fmean(run.accuracy for run in plain)
    assert min(run.accuracy for run in tapered) > before > max(lost, *(run.accuracy for run in turned))
    assert all(t.accuracy - p.accuracy > 0.1 for t, p in itertools.product(tapered, plain + turned))
