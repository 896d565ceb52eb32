"""A user's dataset: TRL's prompt-only form, from a JSONL or Parquet file or a Python function.

- A folder with a training file and a test file has its own held-out problems.
- Text and chats; other columns reach the reward; the same rows give the same problems from each source.
- A chat is rendered by the tokenizer's template, and encoded without further special tokens.
- A row without a usable prompt is named.
- Prompts above the limit are left out and counted; a limit that leaves none is refused.

python -m pytest tests/tba/tasks/test_dataset.py
"""

import json

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from jinja2 import TemplateError

from tba.config import TaskSettings
from tba.tasks import load_task
from tba.tasks.base import Problem, encode_prompt, render_chat
from tba.tasks.dataset import Dataset
from tba.tasks.rows import split

ROWS = [
    {"prompt": [{"role": "user", "content": f"Capital of {country}?"}], "capital": capital, "size": size}
    for country, capital, size in [("France", "Paris", 2), ("Japan", "Tokyo", 14), ("Peru", "Lima", 10)]
]


class Template:
    """A tokenizer's side of it."""

    chat_template, bos_token, eos_token_id, name_or_path = "there is one", None, 1, ""

    def apply_chat_template(self, messages, tokenize, add_generation_prompt, strftime_now):
        assert not tokenize and add_generation_prompt
        return "".join(f"<{message['role']}>{message['content']}" for message in messages) + "<assistant>"

    def encode(self, text, add_special_tokens=True):
        return [1] * add_special_tokens + [2] * len(text)


def length(completions, size, **columns):
    return [float(len(text[0]["content"]) - most) for text, most in zip(completions, size, strict=True)]


def rows() -> list[dict]:
    return ROWS


def test_the_same_rows_from_each_source(tmp_path):
    jsonl, parquet = tmp_path / "rows.jsonl", tmp_path / "rows.parquet"
    jsonl.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    pq.write_table(pa.Table.from_pylist(ROWS), parquet)
    tasks = [Dataset(data=data) for data in (str(jsonl), str(parquet), f"{__name__}:rows")]
    for task in tasks:
        assert task.train == tasks[0].train and task.heldout == tasks[0].heldout
    assert len(tasks[0].train) == 2 and len(tasks[0].heldout) == 1
    assert {problem.columns["capital"] for problem in tasks[0].train + tasks[0].heldout} == {"Paris", "Tokyo", "Lima"}


def test_a_prompt_that_has_a_beginning_of_sequence_token_gets_no_second_one():
    from tokenizers import Tokenizer, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    words = Tokenizer(models.WordLevel({"[UNK]": 0, "<s>": 1, "good": 2}, unk_token="[UNK]"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    words.post_processor = processors.TemplateProcessing("<s> $0", special_tokens=[("<s>", 1)])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, bos_token="<s>")
    assert [encode_prompt(tokenizer, text) for text in ("good", "<s> good")] == [[1, 2], [1, 2]]
    assert encode_prompt(tokenizer, "good", is_rendered=True) == [2]


def test_a_folder_with_a_test_file_holds_that_one_out(tmp_path, monkeypatch):
    pytest.importorskip("datasets")
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")
    for name, part in {"train": ROWS[:2], "test": ROWS[2:]}.items():
        (tmp_path / "data").mkdir(exist_ok=True)
        (tmp_path / "data" / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in part))
    task = Dataset(data=str(tmp_path / "data"))
    assert [problem.columns["capital"] for problem in task.train] == ["Paris", "Tokyo"]
    assert [problem.columns["capital"] for problem in task.heldout] == ["Lima"]


def test_the_order_of_a_test_file_does_not_choose_the_problems_that_are_evaluated():
    """Evaluation takes the first ones, and the file may be sorted by subject."""
    problems = {f"p{n}": Problem(f"p{n}", f"say {n}", None) for n in range(4)}
    train, test = {"p0": problems["p0"]}, {name: problems[name] for name in ("p3", "p1", "p2")}
    assert split(train | test, test, "a file") == ([problems["p0"]], [problems[name] for name in ("p1", "p2", "p3")])


def test_a_template_that_writes_the_date_writes_the_same_one_each_day():
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    tokenizer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.WordLevel({"a": 0}, unk_token="a")))
    tokenizer.chat_template = "{{ strftime_now('%d %b %Y') }} {{ messages[0].content }}"
    assert render_chat(tokenizer, ROWS[0]["prompt"]) == "01 Jan 2026 Capital of France?"


def test_a_chat_is_rendered_and_rewarded_with_its_columns():
    settings = TaskSettings(name="dataset", data=rows, rewards=[length])
    tokenizer = Template()
    task = load_task(settings, seed=0, tokenizer=tokenizer)
    (france,) = (problem for problem in task.train + task.heldout if problem.columns["capital"] == "Paris")
    assert france.prompt == "<user>Capital of France?<assistant>"
    assert france.encode(tokenizer) == [2] * len(france.prompt)
    assert task.score([france], ["Paris"], [[7]], ["stop"]).components == [{"length": 3.0}]
    task.check(tokenizer)


def long_rows() -> list[dict]:
    return [{"prompt": "x" * number} for number in range(1, 41)]


def test_long_prompts_are_left_out_and_counted():
    settings = TaskSettings(name="dataset", data=long_rows, rewards=[length], max_prompt_tokens=31)
    task = load_task(settings, seed=0, tokenizer=Template())  # which adds a token to each
    assert {len(problem.prompt) for problem in task.train + task.heldout} == set(range(1, 31))
    assert task.num_left_out == 10
    assert task.fingerprint == load_task(settings.model_copy(update={"max_prompt_tokens": None}), seed=0).fingerprint
    with pytest.raises(ValueError, match=r"prompts are longer; the shortest has \d tokens"):
        load_task(settings.model_copy(update={"max_prompt_tokens": 1}), seed=0, tokenizer=Template())


def test_without_a_chat_template_a_chat_is_refused():
    tokenizer = Template()
    tokenizer.chat_template = None
    with pytest.raises(ValueError, match="the model's tokenizer has no chat template"):
        load_task(TaskSettings(name="dataset", data=rows, rewards=[length]), seed=0, tokenizer=tokenizer)


def test_a_prompt_that_the_template_refuses_is_shown():
    class Refusing(Template):
        def apply_chat_template(self, messages, **_):
            raise TemplateError("System role not supported")

    with pytest.raises(ValueError, match=r"chat template refuses a prompt \(TemplateError: System role .*Capital of"):
        load_task(TaskSettings(name="dataset", data=rows, rewards=[length]), seed=0, tokenizer=Refusing())


def test_a_key_that_parquet_adds_to_a_message_is_absent(tmp_path):
    """Every message of a column has all keys there."""
    named = {"role": "user", "content": "Hi.", "name": "Ann"}
    file = tmp_path / "rows.parquet"
    pq.write_table(pa.Table.from_pylist([{"prompt": [named]}, *ROWS]), file)
    task = Dataset(data=str(file))
    assert {frozenset(problem.messages[0]) for problem in task.train + task.heldout} == {
        frozenset({"role", "content", "name"}), frozenset({"role", "content"}),
    }  # fmt: skip


def chats_of_pandas() -> list:
    return [{"prompt": np.array([{"role": "user", "content": f"Hi {n}."}], dtype=object)} for n in range(20)]


def test_a_chat_may_be_an_array_as_pandas_has_it():
    task = Dataset(data=f"{__name__}:chats_of_pandas")
    assert {problem.messages[0]["role"] for problem in task.train} == {"user"}


def column_names() -> list:
    return ["prompt", "answer"]


def test_rows_that_are_no_mappings_are_named():
    with pytest.raises(ValueError, match=r"row 0 is 'prompt' \(str\); each is a mapping .*to_dict\(\"records\"\)"):
        Dataset(data=f"{__name__}:column_names")


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"question": "?"}, "line 1 has no column 'prompt', only question"),
        ({"prompt": ""}, "line 1: the prompt is empty"),
        ({"prompt": 3}, "line 1: prompt is '3'; it must be text, or a list of messages"),
        ({"prompt": []}, "it must be text, or a list of messages"),
        ({"prompt": ["What is 2+2?"]}, "line 1: prompt is .*it must be text, or a list of messages"),
        ({"prompt": [{"role": "user"}]}, "it must be text, or a list of messages"),
        ({"prompt": [{"role": "god", "content": "Be."}]}, r"with role \(system, user, assistant, tool\)"),
        ({"prompt": [{"role": "assistant", "content": "Hi."}]}, "the last is not the assistant's"),
    ],
)
def test_a_row_without_a_prompt_is_named(tmp_path, row, message):
    file = tmp_path / "rows.jsonl"
    file.write_text(json.dumps(row) + "\n")
    with pytest.raises(ValueError, match=message):
        Dataset(data=str(file))


def test_no_data_is_refused():
    with pytest.raises(ValueError, match="the task dataset has no data of its own"):
        Dataset(data=None)


def failing() -> list:
    raise TypeError("it fails")


def test_a_function_that_fails_is_named():
    with pytest.raises(ValueError, match=r"task\.data: .*:failing failed \(TypeError: it fails"):
        Dataset(data=f"{__name__}:failing")


def test_a_packages_function_that_returns_no_rows_is_not_called():
    """It would delete the user's token."""
    with pytest.raises(ValueError, match="only one that is annotated to return a list, an Iterable or a Dataset"):
        Dataset(data="huggingface_hub:logout")


def test_a_line_that_is_nested_without_end_is_named(tmp_path):
    (tmp_path / "rows.jsonl").write_text('{"prompt": ' + "[" * 100_000)
    with pytest.raises(ValueError, match=r"rows\.jsonl, line 1 is not JSON"):
        Dataset(data=str(tmp_path / "rows.jsonl"))
