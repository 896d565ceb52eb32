"""The objectives to compare with are the field's.

- dr_grpo and prox_rloo equal TRL's own `_compute_loss` in value and gradient; online_dpo and rloo a plain loop.
- On fresh samples rloo and prox_rloo have one gradient, and it is that of Trajectory Balance up to constants; so is
  dr_grpo's where nothing is paid for KL.
- A trainer steps with each of them, the same whether a group is split or not; slots drawn twice count twice.
- A draw's log-probabilities and rewards reach the loss as what they are, at the run's temperature.
- Settings that would make a ratio wrong are refused.

python -m pytest tests/tba/test_baselines.py
"""

from collections import defaultdict
from types import SimpleNamespace

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig

from tba import baselines
from tba.baselines import LOSSES, Terms, terms_of
from tba.batch import Draw
from tba.config import TrainSettings
from tba.logprobs import Group, load_policy, response_logprobs
from tba.objective import trajectory_balance_loss
from tba.trainer import Trainer

B, K, T = 3, 4, 5
LENGTHS = torch.tensor([[1, 5, 2, 3], [5, 5, 4, 1], [2, 3, 3, 2]])


def make_terms(seed: int = 0, on_policy: bool = False) -> Terms:
    generator = torch.Generator().manual_seed(seed)
    is_token = torch.arange(T) < LENGTHS.unsqueeze(-1)

    def logprobs():
        return -torch.rand(B, K, T, generator=generator, dtype=torch.float64) * is_token

    policy = logprobs()
    behavior = policy.clone() if on_policy else logprobs()
    reward = torch.rand(B, K, generator=generator, dtype=torch.float64)
    return Terms(policy.requires_grad_(), behavior, logprobs(), is_token, reward)


def gradient(loss, terms: Terms) -> torch.Tensor:
    (found,) = torch.autograd.grad(loss, terms.policy)
    return found * terms.is_token  # behind a response's end nothing is learnt: zeros are padded there


def trl_trainer(policy, **attributes):
    """What TRL's `_compute_loss` reads of its trainer."""
    gather = SimpleNamespace(gather=lambda x: x, gather_for_metrics=lambda x: x, reduce=lambda x, reduction: x)
    entropies = torch.zeros_like(policy)
    lists = {mode: defaultdict(list) for mode in ("train", "eval")}
    return SimpleNamespace(
        _get_per_token_logps_and_entropies=lambda *a, **k: (policy, entropies, None),
        aux_loss_enabled=False, accelerator=gather, _metrics=lists, model=SimpleNamespace(training=True),
        epsilon_low=baselines.CLIP, epsilon_high=baselines.CLIP, **attributes,
    )  # fmt: skip


def trl_inputs(terms: Terms, **further):
    flat = {name: getattr(terms, name).reshape(B * K, T) for name in ("behavior", "reference", "is_token")}
    ids = torch.ones(B * K, T, dtype=torch.long)
    return {
        "prompt_ids": ids[:, :1], "prompt_mask": ids[:, :1], "completion_ids": ids,
        "completion_mask": flat["is_token"].long(), "old_per_token_logps": flat["behavior"],
        "ref_per_token_logps": flat["reference"], **further,
    }  # fmt: skip


@pytest.mark.parametrize("beta", [0.0, 0.1])
def test_dr_grpo_is_trls(beta):
    grpo = pytest.importorskip("trl.trainer.grpo_trainer", reason="trl is not installed: extra dev")
    terms = make_terms()
    length_limit = 7
    trainer = trl_trainer(
        terms.policy.reshape(B * K, T), args=SimpleNamespace(delta=None, use_bias_correction_kl=False), beta=beta,
        top_entropy_quantile=1.0, off_policy_mask_threshold=None, importance_sampling_level="token",
        loss_type="dr_grpo", use_vllm=False, max_completion_length=length_limit, _entropy_bonus_enabled=False,
        current_gradient_accumulation_steps=1,
    )  # fmt: skip
    advantages = (terms.reward - terms.reward.mean(1, keepdim=True)).reshape(-1)  # scale_rewards=False, as Dr. GRPO
    trls = grpo.GRPOTrainer._compute_loss(trainer, None, trl_inputs(terms, advantages=advantages)) * length_limit
    ours = baselines.dr_grpo_loss(terms, beta)
    torch.testing.assert_close(ours, trls)
    torch.testing.assert_close(gradient(ours, terms), gradient(trls, terms))


def test_prox_rloo_is_trls():
    rloo = pytest.importorskip("trl.trainer.rloo_trainer", reason="trl is not installed: extra dev")
    terms, beta = make_terms(), 0.1
    # TRL's advantages, by its code's steps: KL-penalised reward, baseline = (sum - own) / (K - 1)
    kl = (terms.behavior - terms.reference).sum(-1)
    penalised = terms.reward - beta * kl
    baseline = (penalised.sum(1, keepdim=True) - penalised) / (K - 1)
    inputs = trl_inputs(terms, advantages=(penalised - baseline).reshape(-1))
    inputs["old_logps"] = terms.behavior.sum(-1).reshape(-1)
    trainer = trl_trainer(terms.policy.reshape(B * K, T), beta=beta)
    trls = rloo.RLOOTrainer._compute_loss(trainer, None, inputs)
    ours = baselines.prox_rloo_loss(terms, beta)
    torch.testing.assert_close(ours, trls)
    torch.testing.assert_close(gradient(ours, terms), gradient(trls, terms))


def test_rloo_is_a_plain_loop():
    terms, beta = make_terms(), 0.1
    total = 0.0
    for b in range(B):
        rewards = [terms.reward[b, k] - beta * (terms.behavior[b, k] - terms.reference[b, k]).sum() for k in range(K)]
        for k in range(K):
            others = sum(rewards[:k] + rewards[k + 1 :]) / (K - 1)
            total = total - (rewards[k] - others) * terms.policy[b, k, : LENGTHS[b, k]].sum() / (B * K)
    ours = baselines.rloo_loss(terms, beta)
    torch.testing.assert_close(ours, total)
    torch.testing.assert_close(gradient(ours, terms), gradient(total, terms))


def test_online_dpo_is_a_plain_loop():
    terms, beta = make_terms(), 0.5
    terms.reward[1] = 0.5  # nothing to prefer
    total = 0.0
    for b in (0, 2):
        w, l = terms.reward[b].argmax(), terms.reward[b].argmin()  # noqa: E741 - DPO's letters
        margins = [(terms.policy[b, k] - terms.reference[b, k]).sum() for k in (w, l)]
        total = total - torch.log(1 / (1 + torch.exp(-beta * (margins[0] - margins[1])))) / B
    ours = baselines.online_dpo_loss(terms, beta)
    torch.testing.assert_close(ours, total)
    torch.testing.assert_close(gradient(ours, terms), gradient(total, terms))


@pytest.mark.parametrize("name", sorted(LOSSES))
def test_a_response_that_has_become_far_more_probable_leaves_the_gradient_finite(name):
    terms = make_terms()
    policy = terms.policy.detach().float().requires_grad_()
    behavior, reference = (terms.behavior - 40).float(), (terms.reference + 100).float()  # beyond float32's exp
    far = Terms(policy, behavior, reference, terms.is_token, terms.reward.float())
    assert gradient(LOSSES[name](far, 0.1), far).isfinite().all()


def test_the_inputs_of_a_loss_are_the_draws_own():
    behavior, reference = [[-1.0, -2.0], [-3.0]], [[-4.0, -5.0], [-6.0]]
    draw = Draw(Group([5], [[1, 2], [3]]), [1, 0, 1], [0.0, 1.0, 0.5], behavior, reference, [True] * 2)
    terms = terms_of([draw], [torch.tensor([-7.0, -8.0, -9.0])])
    assert terms.policy.tolist() == [[[-9, 0], [-7, -8], [-9, 0]]]
    assert terms.behavior.tolist() == [[[-3, 0], [-1, -2], [-3, 0]]]
    assert terms.reference.tolist() == [[[-6, 0], [-4, -5], [-6, 0]]]
    assert terms.is_token.tolist() == [[[True, False], [True, True], [True, False]]]
    assert terms.reward.tolist() == [[0.0, 1.0, 0.5]]


def test_on_fresh_samples_they_agree_with_trajectory_balance():
    terms, beta = make_terms(on_policy=True), 0.1
    found = {name: gradient(LOSSES[name](terms, beta), terms) for name in ("rloo", "prox_rloo")}
    found["dr_grpo"] = gradient(LOSSES["dr_grpo"](terms, 0.0), terms)
    sums = [getattr(terms, name).sum(-1) for name in ("policy", "reference")]
    balance = gradient(trajectory_balance_loss(*sums, terms.reward, beta), terms)
    torch.testing.assert_close(found["rloo"], found["prox_rloo"])
    torch.testing.assert_close(found["rloo"] * (K - 1) / K, balance)
    plain = gradient(LOSSES["rloo"](terms, 0.0), terms)
    torch.testing.assert_close(plain * (K - 1) / K, found["dr_grpo"])


# In the Trainer


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=31, hidden_size=16, intermediate_size=24, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=1, bos_token_id=None, eos_token_id=None, pad_token_id=None,
    )  # fmt: skip
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    return folder


def make_draw(prompt, responses, slot, rewards) -> Draw:
    behavior = [[-3.0 + 0.1 * place for place, _ in enumerate(response)] for response in responses]
    reference = [[value - 0.7 for value in of_response] for of_response in behavior]
    fresh = [True] * len(responses)
    return Draw(Group(prompt, responses), slot, [rewards[s] for s in slot], behavior, reference, fresh)


DRAWS = [
    make_draw([5, 6, 7], [[1, 2, 3], [4, 9]], [0, 1, 0, 1], [1.0, 0.0]),
    make_draw([8, 2], [[3], [6, 6, 1], [2]], [0, 1, 2, 0], [0.0, 1.0, 0.5]),
]


@pytest.mark.parametrize("objective", sorted(LOSSES))
def test_a_split_group_has_the_whole_groups_gradient(model_folder, rms_norms_in_float64, objective):
    def gradients(draws, **settings):
        trainer = Trainer(model_folder, TrainSettings(objective=objective, **settings))
        trainer._policy.double()
        trainer._gradient(draws, len(draws), beta=0.1)
        return {name: parameter.grad for name, parameter in trainer._policy.named_parameters()}

    whole, split = gradients(DRAWS), gradients(DRAWS, micro_batch_tokens=1)
    once = gradients([DRAWS[0], make_draw([8, 2], [[3], [6, 6, 1], [2], [3]], [0, 1, 2, 3], [0.0, 1.0, 0.5, 0.0])])
    assert any(gradient.abs().max() > 0 for gradient in whole.values())
    for name in whole:
        torch.testing.assert_close(split[name], whole[name], rtol=1e-8, atol=1e-10)
        torch.testing.assert_close(once[name], whole[name], rtol=1e-8, atol=1e-10)


def test_a_policy_is_scored_at_the_runs_temperature(model_folder):
    trainer = Trainer(model_folder, TrainSettings(objective="rloo", temperature=2.0))
    groups = [draw.group for draw in DRAWS]
    expected = response_logprobs(load_policy(model_folder), groups, 2.0)
    for found, of_group in zip(trainer._score(groups), expected, strict=True):
        torch.testing.assert_close(found, torch.cat(of_group))


@pytest.mark.parametrize("objective", sorted(LOSSES))
def test_a_step_moves_the_policy_and_tells(model_folder, objective):
    trainer = Trainer(model_folder, TrainSettings(objective=objective, learning_rate=1e-2, warmup_steps=0))
    before = trainer.weights()
    metrics = trainer.train_step(DRAWS)
    assert metrics["log_z_mean"] is None and metrics["reward_mean"] == pytest.approx((0.5 + 0.375) / 2)
    assert not metrics["skipped"] and any((before[name] != now).any() for name, now in trainer.weights().items())


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"objective": "tb", "beta": 0}, "train.beta is 0.*tb.*greater than 0"),
        ({"objective": "online_dpo", "beta": 0}, "greater than 0"),
        ({"objective": "rloo", "reference_reset_interval": 5}, "only tb and tba_prime"),
        ({"objective": "tba_prime"}, "tba_prime resets its reference"),
        ({"objective": "rloo", "processes": 2}, "rloo trains on one device"),
        ({"objective": "ppo"}, "Input should be 'tb', "),
    ],
)
def test_settings_that_do_not_go_together_are_refused(settings, message):
    with pytest.raises(ValueError, match=message):
        TrainSettings(**settings)
