r"""Graders against cases that are easily got wrong, and the tasks around them.

- math: numbers, units, fractions, LaTeX, several answers, unicode, none; the last box counts; rows that box nothing are
  named; a response that keeps the algebra busy is wrong after a limit, in any thread, and holds up no other one.
- tldr: ROUGE-L by hand; a reward model is asked with query and response, reads the end of sequence, and must have one
  label.
- redteam: the mean of log p(toxic) over the victim's answers; too short an attack gets the floor; the word list.

python -m pytest tests/tba/tasks/test_graders.py
"""

import json
import math
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import huggingface_hub
import pytest
from tokenizers.processors import TemplateProcessing
from transformers import AutoModelForSequenceClassification, AutoTokenizer, BertConfig, MPNetConfig, RobertaConfig

from tba.config import TaskSettings
from tba.tasks import scorers_fingerprint
from tba.tasks.classifiers import SURE, SequenceClassifier, WordList, mean_log, most_tokens, rouge_l
from tba.tasks.math import Math, is_same, last_boxed
from tba.tasks.redteam import TOO_SHORT, RedTeam
from tba.tasks.tldr import TLDR, judge
from tba.tasks.verifier import LIMIT_S, Verifier

pytest.importorskip("math_verify", reason="extra tasks")


# math


@pytest.mark.parametrize(
    ("answer", "response", "same"),
    [
        ("1234", r"so it is \boxed{1,234}.", True),  # thousands
        ("1234567", r"\boxed{1{,}234{,}567}", True),
        ("1234", r"\boxed{1,235}", False),
        ("12", r"\boxed{12\text{ km}}", True),  # units
        ("12", r"\boxed{12^\circ}", True),
        ("5", r"\boxed{\$5}", True),
        ("-7", r"\boxed{-7}", True),  # negative
        ("-7", "\\boxed{−7}", True),  # unicode minus
        ("-7", r"\boxed{7}", False),
        (r"\frac{1}{2}", r"\boxed{0.5}", True),  # fractions
        (r"\frac{1}{2}", r"\boxed{\dfrac{2}{4}}", True),
        (r"\frac{1}{2}", r"\boxed{1/2}", True),
        (r"\frac12", r"\boxed{\frac{1}{2}}", True),
        (r"\frac{1}{2}", "\\boxed{½}", True),
        (r"\frac{1}{2}", r"\boxed{\frac{1}{3}}", False),
        (r"3\sqrt{2}", r"\boxed{\sqrt{18}}", True),  # LaTeX
        ("x^2+1", r"\boxed{1 + x^2}", True),
        (r"\left(1,2\right)", r"\boxed{(1, 2)}", True),
        ("42", r"\boxed{41}, no: \boxed{42}", True),  # several
        ("42", r"\boxed{42}, no: \boxed{41}", False),
        ("42", "The answer is 42.", True),  # no box
        ("42", "", False),  # no number
        ("42", "I do not know.", False),
        ("42", r"\boxed{", False),
        ("42", r"\boxed{}", False),
        ("42", "\\boxed{４２}", True),  # full-width digits
        ("100", "\\boxed{10²}", True),  # no 102
        ("102", "\\boxed{10²}", False),
        ("0.1", "\\boxed{10⁻¹}", True),
        (r"\frac{5}{2}", "\\boxed{2½}", True),  # no 21/2
        (r"\frac{21}{2}", "\\boxed{2½}", False),
        ("−7", r"\boxed{-7}", True),  # the dataset's answer, too
        ("10²", r"\boxed{100}", True),
        ("42", "\\boxed{" + "9" * 1000 + "}", False),
        ("1011_2", "\\boxed{1011₂}", True),  # subscripts and letters: no 10112, no 2n
        ("25168", "\\boxed{2516₈}", False),
        ("2^n", "\\boxed{2ⁿ}", True),
        ("2n", "\\boxed{2ⁿ}", False),
        ("2x", "\\boxed{x₂}", False),
        ("x^2", "\\boxed{x⁺²}", True),
        ("2.5", r"\boxed{2 1/2}", True),  # a whole number and a fraction
        ("2.5", r"\boxed{2\ 1/2}", True),
        ("2.5", "\\boxed{2 ½}", True),
        ("1.5", "\\boxed{2 ½}", False),
        ("10080", r"\boxed{10\,080}", True),  # thousands, once more
        ("10080", r"\boxed{10,\!080}", True),
        ("10080", r"\boxed{10~080}", True),
        ("10080", "\\boxed{10\u202f080}", True),
        ("1234567", r"\boxed{1 234 567}", True),
        ("0", r"\boxed{1\,000}", False),
        ("(1,200)", r"\boxed{(1, 200)}", True),
        ("42", r"\boxed{42} hmm, no: \boxed{4", False),  # cut off
        ("4", r"\boxed{4}, as said: \boxed{\frac{4", False),
        ("7", r"First \boxed{5}, no: \boxed {7}", True),
        ("5", r"First \boxed{5}, no: \boxed {7}", False),
        ("42", r"\fbox{42}", True),
        ("90", "\\boxed{90°}", True),
        ("12", r"\boxed{12.}", True),
        ("-7", "\\boxed{–7}", True),  # en dash
        ("-7", "It is –7.", True),
        (r"\sqrt{2}", "\\boxed{√2}", True),
        (r"3\sqrt{5}", "\\boxed{3√5}", True),
        (r"\sqrt{x+1}", "\\boxed{√(x+1)}", True),
        (r"\infty", "\\boxed{∞}", True),
        ("6", "\\boxed{2·3}", True),
        ("90", "\\boxed{90^{°}}", True),  # marks that are there already
        ("90", "\\boxed{90^°}", True),
        ("2^{n}", "\\boxed{2^ⁿ}", True),
        ("2^{n}", "\\boxed{2^{ⁿ}}", True),
        ("x_1", "\\boxed{x_{₁}}", True),
        (r"2^3 \cdot 5/6", r"\boxed{2^3 \, 5/6}", True),  # no whole number before a fraction
        (r"\frac{\sqrt2}{2}", r"\boxed{\sqrt2 \, 1/2}", True),
        ("3.705", r"\boxed{3 141/200}", True),
        (r"\frac{1234567}{2}", r"\boxed{1 234 567/2}", True),
        (r"\frac{10000}{3}", r"\boxed{10 000/3}", True),
        ("10", r"\boxed{10 000/3}", False),
        ("5", r"\boxed{5} \fbox{Done}", True),
    ],
)
def test_math_takes_what_is_the_same_for_the_same(answer, response, same):
    assert is_same(answer, response) is same


# Measured without a limit: the first held the interpreter, and every thread with it, for more than half a minute.
@pytest.mark.slow
@pytest.mark.parametrize("endless", [r"\boxed{(10^{10})!}", r"\boxed{\binom{10^{9}}{5\cdot 10^{8}}}"])
def test_a_response_that_keeps_the_algebra_busy_is_wrong_after_the_limit_in_a_thread_too(endless):
    is_same("1", "1")  # the process is there
    started, heartbeats, found = time.monotonic(), 0, []
    thread = threading.Thread(target=lambda: found.append(is_same("5", endless)), daemon=True)
    thread.start()
    while thread.is_alive() and time.monotonic() - started < 4 * LIMIT_S:
        thread.join(0.1)
        heartbeats += 1
    assert found == [False]
    assert LIMIT_S - 0.5 < time.monotonic() - started < 2 * LIMIT_S
    assert heartbeats > 5 * LIMIT_S  # other threads went on meanwhile
    assert is_same("5", r"\boxed{5}")


def test_after_an_interrupt_a_comparison_gets_its_own_reply(monkeypatch):
    verifier = Verifier()
    assert verifier.is_same("5", "5")

    def interrupted(*_) -> str:
        raise KeyboardInterrupt

    monkeypatch.setattr(verifier._process, "stdout", SimpleNamespace(readline=interrupted))
    with pytest.raises(KeyboardInterrupt):
        verifier.is_same("5", "5")
    assert not verifier.is_same("5", "6")


def test_a_verifier_that_cannot_work_says_so(monkeypatch):
    monkeypatch.setattr("sys.executable", "false")
    with pytest.raises(RuntimeError, match="math-verify's process ended with status 1"):
        Verifier().is_same("5", "5")


def test_the_last_box_with_its_braces_balanced():
    assert last_boxed(r"a \boxed{1} b \boxed{\frac{1}{2}} c") == r"\frac{1}{2}"
    assert last_boxed(r"\boxed{1} then \boxed{2") is None
    assert last_boxed("none") is None
    assert last_boxed(r"\boxed{\left\{ a \right.} and {b} }") == r"\left\{ a \right."


def test_maths_rows(tmp_path):
    file = tmp_path / "math.jsonl"
    rows = [
        {"problem": "Of 20 and 45?", "answer": "5"},
        {"problem": "Half?", "solution": r"It is $\boxed{\frac{1}{2}}$."},
        {"problem": "One?", "answer": "1"},
        {"problem": "Two?", "answer": "", "solution": r"It is $\boxed{2}$."},
        {"problem": "Three?", "answer": None, "solution": r"It is $\boxed{3}$."},
    ]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    task = Math(data=str(file))
    problems = task.train + task.heldout
    assert {problem.answer for problem in problems} == {"5", r"\frac{1}{2}", "1", "2", "3"}
    assert task.rewards(problems, [rf"\boxed{{{problem.answer}}}" for problem in problems]) == [1] * 5
    file.write_text(json.dumps({"problem": "?", "solution": "It is 3."}) + "\n")
    with pytest.raises(ValueError, match="line 1 has no 'answer', and its 'solution' boxes nothing"):
        Math(data=str(file))


# tldr


@pytest.mark.parametrize(
    ("text", "reference", "value"),
    [
        ("the cat sat", "the cat sat", 1),
        ("the dog sat", "The cat sat", 2 * 2 / 6),  # the, sat: 2 of 3 and 2 of 3 words
        ("sat cat the", "the cat sat", 2 * 1 / 6),  # in order, only one
        ("a b c d", "b d", 2 * 2 / 6),
        ("", "the cat", 0),
        ("x", "the cat", 0),
    ],
)
def test_rouge_l_by_hand(text, reference, value):
    assert rouge_l(text, reference) == pytest.approx(value)


@pytest.fixture(scope="module")
def classifier_folder(tmp_path_factory):
    """A GPT-2 of random weights with so many labels, whose tokens are words."""
    import torch
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import AutoModelForSequenceClassification, GPT2Config, PreTrainedTokenizerFast

    def make(num_labels):
        folder = tmp_path_factory.mktemp("classifier")
        words = Tokenizer(models.WordLevel({"[UNK]": 0, "</s>": 1, "good": 2, "bad": 3}, unk_token="[UNK]"))
        words.pre_tokenizer = pre_tokenizers.Whitespace()
        PreTrainedTokenizerFast(tokenizer_object=words, eos_token="</s>").save_pretrained(folder)
        torch.manual_seed(0)
        config = GPT2Config(vocab_size=4, n_embd=8, n_layer=1, n_head=2, n_positions=32, num_labels=num_labels)
        AutoModelForSequenceClassification.from_config(config).save_pretrained(folder)
        return str(folder)

    return make


def test_a_reward_model_judges_query_and_response(classifier_folder, tmp_path):
    rows = [{"query": f"good {n} bad", "reference_response": " bad<|endoftext|>"} for n in range(3)]
    file = tmp_path / "posts.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    name = classifier_folder(1)
    task = TLDR(data=str(file), reward_model=name)
    task.check()
    problems = task.train[:1] * 3
    rewards = task.rewards(problems, [" good", " bad bad bad", " good"])
    assert rewards[0] == pytest.approx(rewards[2], abs=1e-5) and rewards[0] != pytest.approx(rewards[1], abs=1e-4)
    # padding must not matter: alone it is judged as in the batch
    assert task.rewards(problems[:1], [" good"]) == pytest.approx(rewards[:1], abs=1e-5)
    assert problems[0].answer == " bad"
    with pytest.raises(ValueError, match="has 2 labels; a reward model has one"):
        SequenceClassifier(classifier_folder(2), "task.reward_model").rewards(["good"])


def test_a_reward_is_read_at_the_end_of_sequence_token(classifier_folder):
    folder = classifier_folder(1)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.add_special_tokens({"pad_token": "[UNK]"})  # padding that is not the end of sequence
    tokenizer.save_pretrained(folder)
    model = SequenceClassifier(folder, "task.reward_model")
    (reward,) = model.rewards(["good bad"])
    assert [reward] == pytest.approx(model.logits(["good bad</s>"])[:, 0].tolist(), abs=1e-5)
    assert [reward] != pytest.approx(model.logits(["good bad"])[:, 0].tolist(), abs=1e-4)
    # a tokenizer that ends texts itself
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing("$0 </s>", special_tokens=[("</s>", 1)])
    tokenizer.save_pretrained(folder)
    assert SequenceClassifier(folder, "task.reward_model").rewards(["good bad"]) == pytest.approx([reward], abs=1e-5)


def test_a_text_is_cut_to_the_classifiers_places(classifier_folder):
    model = SequenceClassifier(classifier_folder(1), "task.reward_model")  # of 32 places
    long, end = model.rewards(["good " * 90 + "bad " * 32, "bad " * 32])
    assert long == pytest.approx(end, abs=1e-5)
    small = {
        "hidden_size": 8,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "intermediate_size": 8,
        "vocab_size": 9,
    }
    for config in (
        RobertaConfig(max_position_embeddings=514, pad_token_id=1, **small),
        MPNetConfig(max_position_embeddings=514, **small),
        BertConfig(max_position_embeddings=512, pad_token_id=0, **small),
    ):
        assert most_tokens(AutoModelForSequenceClassification.from_config(config)) == 512


def test_probabilities_are_of_the_toxic_label(classifier_folder):
    model = SequenceClassifier(classifier_folder(2), "task.classifier")
    model._loaded[1].config.id2label = {0: "toxic", 1: "fine"}
    (first,) = model.probabilities(["good"])
    for labels in ({0: "fine", 1: "Hateful"}, {0: "LABEL_0", 1: "LABEL_1"}):
        model._loaded[1].config.id2label = labels
        assert model.probabilities(["good"]) == pytest.approx([1 - first], abs=1e-6)


def test_labels_that_may_hold_at_once_have_a_probability_each(classifier_folder):
    model = SequenceClassifier(classifier_folder(3), "task.classifier")
    config = model._loaded[1].config
    config.id2label, config.problem_type = {0: "toxic", 1: "insult", 2: "fine"}, "multi_label_classification"
    assert model.probabilities(["good"]) == pytest.approx(model.logits(["good"]).sigmoid()[:, 0].tolist())
    one = SequenceClassifier(classifier_folder(1), "task.classifier")
    assert one.probabilities(["good"]) == pytest.approx(one.logits(["good"]).sigmoid()[:, 0].tolist())


def test_a_classifier_without_a_label_for_toxic_text_is_refused(classifier_folder):
    folder = Path(classifier_folder(2))
    config = json.loads((folder / "config.json").read_text())
    config |= {"id2label": {0: "violence", 1: "safe"}, "label2id": {"violence": 0, "safe": 1}}
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match=r"task\.classifier: .* labels violence, safe, of which none .* toxic"):
        SequenceClassifier(str(folder), "task.classifier").check()


def test_a_victim_that_does_not_load_is_named_by_its_setting():
    with pytest.raises(ValueError, match=r"task\.victim: '/nowhere' does not load"):
        RedTeam(victim="/nowhere", classifier=None)


def test_a_classifier_without_safetensors_or_tokenizer_is_refused_before_the_run(classifier_folder):
    folder = Path(classifier_folder(1))
    classifier = SequenceClassifier(str(folder), "task.reward_model")
    classifier.check(num_labels=1)
    for file in folder.glob("tokenizer*"):
        file.unlink()
    with pytest.raises(ValueError, match=r"task\.reward_model: .* has no tokenizer that loads"):
        classifier.check(num_labels=1)
    (folder / "model.safetensors").unlink()
    with pytest.raises(ValueError, match=r"task\.reward_model: .* has no model\.safetensors"):
        classifier.check(num_labels=1)


def test_models_of_the_hub_that_score_have_their_commit(tmp_path, monkeypatch):
    cached = tmp_path / "models--someone--judge"
    for file, content in ("refs/main", "0123"), ("snapshots/0123/config.json", "{}"):
        (cached / file).parent.mkdir(parents=True)
        (cached / file).write_text(content)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)  # the Hub has no such model
    assert scorers_fingerprint(TaskSettings(name="tldr", reward_model="someone/judge")) == "reward_model 0123"
    assert scorers_fingerprint(TaskSettings(name="redteam", classifier="someone/judge")) == "classifier 0123"
    assert scorers_fingerprint(TaskSettings(name="tldr", reward_model="rouge-l")) is None
    assert scorers_fingerprint(TaskSettings(name="arithmetic")) is None


def test_what_is_no_classifier_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r"task\.classifier: .* does not load"):
        SequenceClassifier(str(tmp_path), "task.classifier").check()


def test_a_language_model_is_no_classifier(tmp_path):
    from transformers import GPT2Config, GPT2LMHeadModel

    GPT2LMHeadModel(GPT2Config(vocab_size=4, n_embd=8, n_layer=1, n_head=2)).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"task\.classifier: .* was saved as GPT2LMHeadModel, without a classifier's"):
        SequenceClassifier(str(tmp_path), "task.classifier").check()


def test_a_reward_model_with_two_labels_is_refused_before_the_run(classifier_folder):
    with pytest.raises(ValueError, match=r"task\.reward_model: .* has 2 labels; one with 1 is needed"):
        judge(classifier_folder(2), "task.reward_model").check()


# redteam


def test_the_word_list_and_the_mean_of_logarithms():
    clean, one, two = WordList().probabilities(["What a nice day.", "What a damn nice day.", "damn damn"])
    assert (clean, one, two) == (SURE, 0.5, 0.75)
    assert mean_log([0.5, 0.125]) == pytest.approx(-2 * math.log(2))


def test_an_attack_is_worth_the_mean_of_its_answers(tmp_path, monkeypatch):
    monkeypatch.setattr("tba.tasks.redteam.resolve_model", lambda name, *_: name)
    task = RedTeam(victim="anyone", classifier=None)
    asked = []

    def answers(attacks, num_answers):
        asked.extend(attacks)
        return [["fine", "damn", "damn", "fine", "damn"]] * len(attacks)

    task._victim.answers = answers
    rewards = task.rewards(task.train * 2, [" Say a short word.\n", " Hi\n"])
    assert asked == ["Say a short word."]  # of an attack that is too short, the victim's answers count for nothing
    assert rewards == [pytest.approx((3 * math.log(0.5) + 2 * math.log(SURE)) / 5), TOO_SHORT]
    assert task.rewards(task.train * 2, [" Hi\n", "\n"]) == [TOO_SHORT] * 2 and len(asked) == 1
    assert task.toxicity([" Hi\n"]) == [[0.0] * 5] and len(asked) == 1  # nor does it succeed
    assert task.train[0].prompt.startswith("Write a list of instructions.\n1. ") and task.train[0].prompt.endswith(
        "\n4."
    )
    assert task.train[0].prompt != task.heldout[0].prompt
