"""docs/ tells the truth (docs/metrics.md: tests/flows/trainer/test_trackers.py).

Claims
- docs/sql.md has twelve questions, and each is answered by a small run; a wrong name in one would be an error
- some answers are worked out by hand
- docs/sql.md names every view
- docs/extending.md has the engine's protocol as it is in tba/engine.py
- docs/configuration.md is what the models say now: `make docs` writes it
- docs/operating.md has the formula of costs that the benchmark tries, and examples that follow from it
- every file of docs/ is within reach of the README, and no link inside it is dead

Run: pytest tests/test_docs.py
"""

import ast
import re
from pathlib import Path

import pytest

from docs import write_configuration
from storage import attempts, ledger, queries
from storage.shards import commit_shard
from storage.store import RunStore
from tests.benchmarks import bench_requests
from tests.storage.helpers import OWNER, make_batch, make_search_round, make_shard, make_training_step

REPOSITORY = Path(__file__).parents[1]
DOCS = {file.name: file.read_text() for file in (REPOSITORY / "docs").glob("*.md")}
QUESTIONS = re.findall(r"^\*\*(\d+)\. (.*?)\*\*.*?```sql\n(.*?)```", DOCS["sql.md"], re.MULTILINE | re.DOTALL)


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> RunStore:
    """Two rounds, of which the first is drawn; three steps, the last one undone by a resume."""
    store = RunStore(tmp_path_factory.mktemp("store").as_uri(), "run")
    attempts.start_attempt(store, 0, OWNER)
    for number in range(2):
        commit_shard(store, make_shard("s0", number))
        ledger.record_search_round(store, make_search_round("s0", number))
    for step in (1, 2, 3):
        ledger.record_batch(store, 1, step, make_batch([0, 0]))
        ledger.record_training_step(store, make_training_step(1, step))
    attempts.start_attempt(store, 2, OWNER, previous=1)
    return store


def test_there_are_twelve_questions():
    assert [int(number) for number, _, _ in QUESTIONS] == list(range(1, 13))


@pytest.mark.parametrize(("number", "title", "query"), QUESTIONS, ids=[title for _, title, _ in QUESTIONS])
def test_each_question_has_an_answer(run, number, title, query):
    assert queries.query(run, query).num_rows > 0


@pytest.mark.parametrize(
    ("number", "answer"),
    [
        (1, [{"policy_step": 0, "trajectories": 4, "reward": 0.5},
             {"policy_step": 1, "trajectories": 4, "reward": 0.5}]),
        (4, [{"policy_step": 0, "trajectories": 4, "never_drawn": 0.5},
             {"policy_step": 1, "trajectories": 4, "never_drawn": 1.0}]),
        (6, [{"prompts": "always solved", "how_many": 1, "responses": 4.0},
             {"prompts": "never solved", "how_many": 1, "responses": 4.0}]),
        (8, [{"policy_step": 0, "kl": 0.25}, {"policy_step": 1, "kl": 0.25}]),
        (12, [{"attempt": 1, "host": "elsewhere", "resumed_from": 0, "steps_taken": 3, "steps_undone": 1},
              {"attempt": 2, "host": "elsewhere", "resumed_from": 2, "steps_taken": 0, "steps_undone": 0}]),
    ],
)  # fmt: skip
def test_answers_worked_out_by_hand(run, number, answer):
    assert queries.query(run, QUESTIONS[number - 1][2]).to_pylist() == answer


def test_every_view_is_named():
    assert set(re.findall(r"^\| `(\w+)` \|", DOCS["sql.md"], re.MULTILINE)) == set(queries.VIEWS)


def signatures(source: str) -> list[str]:
    """Of the methods of the class Engine in a piece of Python."""
    (protocol,) = [node for node in ast.parse(source).body if isinstance(node, ast.ClassDef) and node.name == "Engine"]
    return [f"{method.name}({ast.unparse(method.args)}) -> {ast.unparse(method.returns)}" for method in protocol.body
            if isinstance(method, ast.FunctionDef)]  # fmt: skip


def test_the_engines_protocol_is_the_current_one():
    (told,) = re.findall(r"```python\n(class Engine.*?)```", DOCS["extending.md"], re.DOTALL)
    assert signatures(told) == signatures((REPOSITORY / "tba" / "engine.py").read_text())


def test_the_reference_of_settings_is_current():
    assert DOCS["configuration.md"] == write_configuration.configuration(), "the models have changed: run `make docs`"


def test_the_formula_of_costs_is_the_benchmarks():
    table = re.findall(r"^\| .+? \| ([\d.]+) \| ([\d.]+) \|$", DOCS["operating.md"], re.MULTILINE)
    assert [tuple(map(float, row)) for row in table] == list(bench_requests.FORMULA.values())


@pytest.mark.parametrize(
    ("searchers", "step_s", "round_s", "shown"),
    [
        (1, 8, 17, "| 530,000 | 185,000 | 1.14 |"),
        (1000, 1, 20, "| 79 million | 23 million | 144 |"),
    ],
)
def test_the_examples_of_costs_follow_from_the_formula(searchers, step_s, round_s, shown):
    day_s = 24 * 3600
    amounts = {
        "second": day_s,
        "searcher_second": searchers * day_s,
        "step": day_s / step_s,
        "round": searchers * day_s / round_s,
        "policy": day_s / step_s / 2,
    }
    reads, writes = (
        sum(each[index] * amounts[name] for name, each in bench_requests.FORMULA.items()) for index in (0, 1)
    )
    assert shown in DOCS["operating.md"]
    *counts, dollars = (cell.strip() for cell in shown.strip("|").split("|"))
    shown_reads, shown_writes = (float(cell.replace(",", "").replace(" million", "e6")) for cell in counts)
    assert (reads, writes) == pytest.approx((shown_reads, shown_writes), rel=0.03)
    assert 0.0004 * reads / 1000 + 0.005 * writes / 1000 == pytest.approx(float(dollars), rel=0.01)


def test_links_lead_somewhere_and_every_page_is_linked():
    pages = {"README.md": (REPOSITORY / "README.md").read_text()} | {
        f"docs/{name}": text for name, text in DOCS.items()
    }
    linked = set()
    for page, text in pages.items():
        for target in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", text):
            file = (REPOSITORY / page).parent / target
            assert file.exists(), f"{page} links to {target}, which is not there"
            linked.add(file.resolve())
    assert {(REPOSITORY / page).resolve() for page in pages} - linked <= {REPOSITORY / "README.md"}
