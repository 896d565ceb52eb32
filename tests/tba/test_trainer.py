"""The Trainer.

- The step does not depend on how the batch is split into micro-batches.
- A group larger than a micro-batch is split; its gradient is the whole group's, to 1e-10 in float64.
- After a reset the policy is the reference, whatever the trajectories were stored with; a resumed run has it, too.
- Adapters begin as the seed says, and disturb no other random number.
- Adapters leave the weights alone, are published merged, and resume to the bit.
- A trajectory drawn twice counts twice though it is computed once.
- A Trainer that loads what another saved goes on exactly as that one would have.
- What reads the state beside a step reads the state before that step, however long it takes.
- A batch with a NaN leaves the weights alone; ten running stop the training.
- Published weights hold tied ones once, and load with from_pretrained.
- A mixture of experts is published under the names of its checkpoints.

python -m pytest tests/tba/test_trainer.py
"""

import math
import threading
import weakref
from concurrent.futures import ThreadPoolExecutor, TimeoutError
from dataclasses import replace

import pytest
import torch
from transformers import AutoModelForCausalLM, GPT2Config, Qwen3MoeConfig

from tba.config import TrainSettings
from tba.logprobs import Group, load_policy, sequence_logprobs
from tba.precision import to_bfloat16
from tba.saved_state import SavedState
from tba.trainer import MAX_SKIPPED_IN_A_ROW, Trainer
from tba.weights import fingerprint, read_weights, write_weights
from tests.tba.small_trainer import DRAWS, make_draw, make_trainer


def weights_of(trainer: Trainer) -> dict[str, torch.Tensor]:
    return {name: parameter.detach().clone() for name, parameter in trainer._policy.named_parameters()}


def assert_same_weights(one: Trainer, other: Trainer, **tolerance) -> None:
    expected = weights_of(other)
    for name, parameter in weights_of(one).items():
        torch.testing.assert_close(
            parameter, expected[name], **tolerance, msg=lambda text, name=name: f"{name}: {text}"
        )


def test_the_step_does_not_depend_on_the_micro_batches(model_folder):
    whole, split = make_trainer(model_folder), make_trainer(model_folder, micro_batch_tokens=1)
    in_one, in_three = whole.train_step(DRAWS), split.train_step(DRAWS)
    assert in_one["loss"] == pytest.approx(in_three["loss"], rel=1e-2)  # bfloat16
    # Adam's first step has the size of the learning rate in each weight: equal within a part of it.
    assert in_one["gradient_norm"] == pytest.approx(in_three["gradient_norm"], rel=1e-2)


def gradients_in_float64(model_folder, draws, **settings) -> dict[str, torch.Tensor]:
    trainer = make_trainer(model_folder, **settings)
    trainer._policy.double()
    trainer._gradient(draws, len(draws), beta=0.3)
    return {name: parameter.grad for name, parameter in trainer._policy.named_parameters()}


@pytest.mark.parametrize("max_tokens", [1, 3, 4, 9])
def test_a_split_group_has_the_whole_groups_gradient(model_folder, rms_norms_in_float64, max_tokens):
    whole = gradients_in_float64(model_folder, DRAWS)
    for name, gradient in gradients_in_float64(model_folder, DRAWS, micro_batch_tokens=max_tokens).items():
        torch.testing.assert_close(
            gradient, whole[name], rtol=1e-10, atol=1e-10, msg=lambda text, name=name: f"{name}: {text}"
        )


def test_a_group_is_split_into_parts_that_fit():
    group = Group([1, 2], [[3, 4, 5], [6], [7, 8], [9, 9, 9, 9, 9, 9]])  # 2 + 2, 0, 1, 5 tokens
    assert [part.responses for part in group.split(5)] == [[[3, 4, 5], [6], [7, 8]], [[9, 9, 9, 9, 9, 9]]]
    assert group.split(100) == [group]


def test_copies_that_were_taken_do_not_stay_in_memory(model_folder):
    """While the Trainer waits for data it may publish a lost policy again and again."""
    trainer = make_trainer(model_folder)
    copy = weakref.ref(trainer.start_copy(lambda: torch.zeros(1)).result())
    trainer.start_copy(lambda: None).result()
    assert copy() is None


def test_a_step_does_not_change_what_is_still_read(model_folder, tmp_path):
    trainer, unread = make_trainer(model_folder), threading.Event()
    before = weights_of(trainer)
    copied = trainer.start_copy(lambda: (unread.wait(), weights_of(trainer))[1])
    saved = trainer.start_copy(lambda: trainer.save(tmp_path))
    with ThreadPoolExecutor(1) as other_thread:
        step = other_thread.submit(trainer.train_step, DRAWS)
        with pytest.raises(TimeoutError):
            step.result(1.0)  # the gradient takes milliseconds
        unread.set()
        metrics = step.result()
    assert metrics["copy_wait_s"] > 0.5 and metrics["step_s"] < metrics["copy_wait_s"], "counted once"
    assert saved.result() is None
    resumed = make_trainer(model_folder)
    resumed.load(tmp_path)
    for name, weight in copied.result().items():
        assert torch.equal(weight, before[name]) and torch.equal(weights_of(resumed)[name], weight), name
    assert resumed.step == 0 and any((now != before[name]).any() for name, now in weights_of(trainer).items())
    assert trainer.train_step(DRAWS)["copy_wait_s"] == 0.0


def test_after_a_reset_the_policy_is_the_reference(model_folder, tmp_path):
    trainer = make_trainer(model_folder, reference_reset_interval=2)
    for _ in range(2):
        trainer.train_step(DRAWS)
    before = trainer.step
    trainer.save(tmp_path)
    resumed = make_trainer(model_folder, reference_reset_interval=2)
    resumed.load(tmp_path)
    assert trainer.train_step(DRAWS)["logprob_gap_mean"] == 0.0  # policy and reference are one
    assert before == 2 and trainer.train_step(DRAWS)["logprob_gap_mean"] != 0.0
    for _ in range(2):
        resumed.train_step(DRAWS)
    assert_same_weights(resumed, trainer, rtol=0, atol=0)


@pytest.mark.parametrize("settings", [{}, {"reference_reset_interval": 1}], ids=["usual", "after a reset"])
def test_a_checkpoint_has_the_size_that_is_told(model_folder, tmp_path, settings):
    trainer = make_trainer(model_folder, **settings)
    trainer.train_step(DRAWS)
    trainer.save(tmp_path)
    found = sum(tensor.nbytes for name, tensor in SavedState(tmp_path).items() if not name.startswith("step."))
    assert trainer.checkpoint_bytes == found


def test_a_reset_reference_is_kept_through_a_later_checkpoint(model_folder, tmp_path):
    through, resumed = (make_trainer(model_folder, reference_reset_interval=2) for _ in range(2))
    for _ in range(3):
        through.train_step(DRAWS)
    through.save(tmp_path)
    resumed.load(tmp_path)
    one, other = through.train_step(DRAWS), resumed.train_step(DRAWS)
    assert one["logprob_gap_mean"] == other["logprob_gap_mean"] != 0.0


def test_the_reset_reference_of_a_split_group_is_the_whole_groups(model_folder):
    whole, split = (
        make_trainer(model_folder, reference_reset_interval=2, micro_batch_tokens=tokens) for tokens in (1000, 4)
    )
    for trainer in (whole, split):
        for _ in range(2):
            trainer.train_step(DRAWS)
    split._policy.load_state_dict(whole._policy.state_dict())
    before = split._reference
    split._reset_reference()
    assert split._reference is before, "two references at once may not fit"
    assert whole.train_step(DRAWS)["loss"] == pytest.approx(split.train_step(DRAWS)["loss"], rel=1e-2)


def test_adapters_begin_as_the_seed_says_and_disturb_no_other_random_number(model_folder):
    pytest.importorskip("peft")
    settings = TrainSettings(lora_rank=2)
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    begun = {seed: Trainer(model_folder, settings, seed=seed) for seed in (1, 2)}
    torch.testing.assert_close(torch.rand(3), expected, rtol=0, atol=0)
    assert_same_weights(Trainer(model_folder, settings, seed=1), begun[1], rtol=0, atol=0)  # another state by now
    first, other = weights_of(begun[1]), weights_of(begun[2])
    different = {name for name in first if not torch.equal(first[name], other[name])}
    assert different == {name for name in first if ".lora_A." in name}


def test_under_adapters_a_bfloat16_model_keeps_its_type_and_learns_the_same(model_folder, tmp_path):
    pytest.importorskip("peft")
    half, whole = tmp_path / "half", tmp_path / "whole"
    for folder, dtype in ((half, torch.bfloat16), (whole, torch.float32)):  # the same numbers
        load_policy(model_folder).to(torch.bfloat16).to(dtype).save_pretrained(folder)
    trainers = [Trainer(folder, TrainSettings(lora_rank=2, learning_rate=1e-2), "cpu") for folder in (half, whole)]
    sizes = [
        sum(p.nbytes for name, p in trainer._policy.named_parameters() if ".base_layer.weight" in name)
        for trainer in trainers
    ]
    assert sizes[0] * 2 == sizes[1] > 0
    others = [p.dtype for name, p in trainers[0]._policy.named_parameters() if ".base_layer.weight" not in name]
    assert set(others) == {torch.float32}
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: kept.append(tensor) or tensor, lambda tensor: tensor):
        sequence_logprobs(trainers[0]._policy, [draw.group for draw in DRAWS], 1.0)
    matrices = {p.shape for name, p in trainers[0]._policy.named_parameters() if ".base_layer.weight" in name}
    assert not [tensor for tensor in kept if tensor.dtype == torch.float32 and tensor.shape in matrices]
    trainers[0].save(tmp_path)
    trainers[1].load(tmp_path)  # the same adapters: peft rounds new ones to the matrix' type
    for trainer in trainers:
        for _ in range(3):
            trainer.train_step(DRAWS)
    first, other = (trainer.weights() for trainer in trainers)
    assert first.keys() == other.keys() and trainers[0].step == 3
    for name, tensor in first.items():
        torch.testing.assert_close(tensor, other[name], rtol=0, atol=0)


def test_adapters_under_gpt2_train_and_under_experts_are_refused(tmp_path):
    pytest.importorskip("peft")
    gpt2 = GPT2Config(n_embd=32, n_layer=1, n_head=2, vocab_size=90, bos_token_id=0, eos_token_id=0)
    AutoModelForCausalLM.from_config(gpt2, dtype=torch.bfloat16).save_pretrained(tmp_path / "gpt2")
    trainer = Trainer(tmp_path / "gpt2", TrainSettings(lora_rank=2, learning_rate=1e-2), "cpu")
    before = trainer.weights()
    for _ in range(2):
        trainer.train_step(DRAWS)
    assert any(not torch.equal(before[name], after) for name, after in trainer.weights().items())

    experts = Qwen3MoeConfig(
        hidden_size=32, intermediate_size=32, moe_intermediate_size=32, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=2, num_experts=2, num_experts_per_tok=1, vocab_size=90,
    )  # fmt: skip
    AutoModelForCausalLM.from_config(experts).save_pretrained(tmp_path / "experts")
    with pytest.raises(ValueError, match=r"train\.lora_rank: a mixture of experts"):
        Trainer(tmp_path / "experts", TrainSettings(lora_rank=2), "cpu")


def test_adapters_are_published_merged_and_resume_to_the_bit(model_folder, tmp_path):
    pytest.importorskip("peft")
    trainer, resumed = (make_trainer(model_folder, lora_rank=2, warmup_steps=8) for _ in range(2))
    loaded = dict(read_weights(model_folder))
    assert {name: w.float() for name, w in trainer.weights().items()}.keys() == loaded.keys()
    for name, tensor in trainer.weights().items():  # adapters begin as no change
        torch.testing.assert_close(tensor, to_bfloat16(loaded[name]), rtol=0, atol=0)
    assert all(".lora_" in name for name in trainer._trained)
    for _ in range(3):
        trainer.train_step(DRAWS)
    trainer.save(tmp_path)
    resumed.load(tmp_path)
    for each in (trainer, resumed):
        each.train_step(DRAWS)
    assert_same_weights(resumed, trainer, rtol=0, atol=0)

    trainer._policy.config.save_pretrained(tmp_path)
    (tmp_path / "trainer-00000.safetensors").unlink()
    write_weights(trainer.weights(), tmp_path)
    groups = [draw.group for draw in DRAWS]
    merged, trained, before = (
        torch.cat(sequence_logprobs(model, groups, 1.0))
        for model in (load_policy(tmp_path), trainer._policy, load_policy(model_folder))
    )
    # What is published is rounded to bfloat16; what was learned is far more than that.
    assert (merged - trained).abs().max() < 0.1 * (before - trained).abs().max()


def test_layers_that_are_computed_again_give_the_same_step(model_folder):
    kept, again = make_trainer(model_folder), make_trainer(model_folder, gradient_checkpointing="layers")
    for _ in range(2):
        one, other = kept.train_step(DRAWS), again.train_step(DRAWS)
        assert one["gradient_norm"] == pytest.approx(other["gradient_norm"], rel=1e-5)
    assert again._policy.is_gradient_checkpointing


def test_a_trajectory_drawn_twice_counts_twice(model_folder):
    once_each = make_draw([5, 6], [[1, 2], [3]], [0, 1, 0], [-3.0, -2.0], [1.0, 0.0, 1.0])
    written_out = make_draw([5, 6], [[1, 2], [3], [1, 2]], [0, 1, 2], [-3.0, -2.0, -3.0], [1.0, 0.0, 1.0])
    one, other = make_trainer(model_folder), make_trainer(model_folder)
    left, right = one.train_step([once_each]), other.train_step([written_out])
    assert left["loss"] == pytest.approx(right["loss"], rel=1e-2)
    assert left["gradient_norm"] == pytest.approx(right["gradient_norm"], rel=1e-2)
    assert left["num_unique"] == 2 and right["num_unique"] == 3


@pytest.mark.parametrize("max_tokens", [1, 4096])
def test_a_step_says_how_far_its_batch_is_from_the_policy(model_folder, max_tokens):
    trainer = make_trainer(model_folder, micro_batch_tokens=max_tokens)
    fresh = [True, False]  # of each prompt's responses; the third of the second prompt is not
    draws = [replace(draw, is_of_newest_policy=[*fresh, False][: len(draw.group.responses)]) for draw in DRAWS]
    ratios, away, weighs_less = [], [], []
    for draw, logprobs in zip(draws, sequence_logprobs(trainer._policy, [d.group for d in draws], 1.0), strict=True):
        log_p, behavior = logprobs.tolist(), [sum(tokens) for tokens in draw.behavior_logprobs]
        reference = [sum(tokens) for tokens in draw.reference_logprobs]
        ratio = [math.exp(log_p[u] - behavior[u]) for u in draw.slot]
        gap = [reference[u] + r / 0.05 - log_p[u] for u, r in zip(draw.slot, draw.reward, strict=True)]
        residuals = [sum(gap) / len(gap) - value for value in gap]
        weighs_less += [e > 0 and value < 1 for e, value in zip(residuals, ratio, strict=True)]
        lengths = [len(response) for response in draw.group.responses]
        away += [abs(log_p[u] - behavior[u]) / lengths[u] for u in draw.slot if draw.is_of_newest_policy[u]]
        ratios += ratio
    found = trainer.train_step(draws)
    expected = sum(ratios) ** 2 / (len(ratios) * sum(value**2 for value in ratios))
    assert found["effective_sample_size"] == pytest.approx(expected, rel=0.05)
    assert found["logprob_mismatch"] == pytest.approx(sum(away) / len(away), rel=0.05)
    assert found["tapered_share"] == pytest.approx(sum(weighs_less) / len(weighs_less))
    assert make_trainer(model_folder, residual_weight="plain").train_step(draws)["tapered_share"] == 0


def test_a_loaded_trainer_goes_on_as_the_saved_one_would_have(model_folder, tmp_path):
    through, resumed = make_trainer(model_folder, warmup_steps=8), make_trainer(model_folder, warmup_steps=8)
    for _ in range(3):
        through.train_step(DRAWS)
    through.save(tmp_path)
    resumed.load(tmp_path)
    assert resumed.step == 3
    for trainer in (through, resumed):
        trainer.train_step(DRAWS[:2])
    assert_same_weights(resumed, through, rtol=0, atol=0)


def test_a_nan_leaves_the_weights_alone_and_ten_running_stop_the_run_also_across_a_resume(model_folder, tmp_path):
    trainer, untouched = make_trainer(model_folder), make_trainer(model_folder)
    poisoned = [replace(draw, reward=[float("nan")] * 4) for draw in DRAWS]
    for _ in range(MAX_SKIPPED_IN_A_ROW - 1):
        assert trainer.train_step(poisoned)["skipped"]
    assert_same_weights(trainer, untouched, rtol=0, atol=0)
    trainer.save(tmp_path)
    resumed = make_trainer(model_folder)
    resumed.load(tmp_path)
    for each in (trainer, resumed):
        with pytest.raises(RuntimeError, match="not finite in 10 steps in a row"):
            each.train_step(poisoned)


def test_a_nan_in_one_gradient_leaves_the_weights_alone(model_folder):
    trainer, untouched = make_trainer(model_folder), make_trainer(model_folder)
    embedding, parameter, *_ = trainer._trained.values()  # the embedding's gradient is not autograd's
    assert embedding is trainer._policy.get_input_embeddings().weight
    poison = parameter.register_hook(lambda gradient: gradient.index_fill(0, torch.tensor([3]), float("nan")))
    assert trainer.train_step(DRAWS)["skipped"]
    assert_same_weights(trainer, untouched, rtol=0, atol=0)
    poison.remove()
    assert not trainer.train_step(DRAWS)["skipped"]


def test_a_stopped_run_resumes_from_its_checkpoint(model_folder, tmp_path):
    trainer, resumed = make_trainer(model_folder), make_trainer(model_folder)
    trainer.train_step(DRAWS)
    trainer.save(tmp_path)
    poisoned = [replace(DRAWS[0], reward=[1.0, float("nan"), 1.0, 0.0])]
    with pytest.raises(RuntimeError, match="not finite"):
        for _ in range(MAX_SKIPPED_IN_A_ROW):
            trainer.train_step([*poisoned, *DRAWS[1:]])
    resumed.load(tmp_path)
    assert_same_weights(resumed, trainer, rtol=0, atol=0)
    assert resumed.step == 1 and not resumed.train_step(DRAWS)["skipped"]


def test_a_trainer_saved_before_its_first_good_step_loads(model_folder, tmp_path):
    trainer = make_trainer(model_folder)
    trainer.save(tmp_path)
    make_trainer(model_folder).load(tmp_path)


def test_a_good_batch_between_bad_ones_starts_the_count_anew(model_folder):
    trainer = make_trainer(model_folder)
    poisoned = [replace(draw, reward=[float("nan")] * 4) for draw in DRAWS]
    for batch in [poisoned] * 9 + [DRAWS] + [poisoned] * 9:
        trainer.train_step(batch)


@pytest.mark.parametrize(("shard_bytes", "num_files"), [(5_000_000_000, 1), (2_000, None)])
def test_published_weights_load_with_from_pretrained(model_folder, tmp_path, monkeypatch, shard_bytes, num_files):
    monkeypatch.setattr("tba.weights.SHARD_BYTES", shard_bytes)
    trainer = make_trainer(model_folder)
    trainer.train_step(DRAWS)
    weights = trainer.weights()
    assert {tensor.dtype for tensor in weights.values()} == {torch.bfloat16}
    assert "lm_head.weight" not in weights  # tied to the embedding
    trainer._policy.config.save_pretrained(tmp_path)
    write_weights(weights, tmp_path)
    files = len(list(tmp_path.glob("*.safetensors")))
    assert files == num_files if num_files else files > 3
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    expected = weights_of(trainer)
    for name, parameter in loaded.named_parameters():
        torch.testing.assert_close(parameter.float(), expected[name], rtol=2**-7, atol=0)  # the next one up or down
    assert fingerprint(read_weights(tmp_path)) == fingerprint(weights.items())


def test_one_changed_bit_changes_the_fingerprint(model_folder):
    weights = dict(read_weights(model_folder))
    before = fingerprint(weights.items())
    weights["model.norm.weight"].view(torch.int32)[3] ^= 1
    assert fingerprint(weights.items()) != before


def test_a_mixture_of_experts_is_published_under_the_names_of_its_checkpoints(tmp_path):
    first, published = tmp_path / "first", tmp_path / "published"
    config = Qwen3MoeConfig(
        vocab_size=31, hidden_size=16, moe_intermediate_size=8, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, head_dim=8, num_experts=4, num_experts_per_tok=2,
    )  # fmt: skip
    AutoModelForCausalLM.from_config(config).save_pretrained(first)
    trainer = make_trainer(first)
    trainer.train_step(DRAWS)
    config.save_pretrained(published)
    write_weights(trainer.weights(), published)
    assert dict(read_weights(published)).keys() == dict(read_weights(first)).keys()
    loaded = load_policy(published).state_dict()
    for name, tensor in trainer._policy.state_dict().items():
        torch.testing.assert_close(loaded[name], to_bfloat16(tensor).float(), rtol=0, atol=0)
