"""tba report: what the page shows, and that nothing in it can do harm.

Claims
- one file without scripts, with nothing to load, with every section and chart
- a response that is HTML is shown as text, and long ones are cut
- the numbers are those of the store: staleness, shares, log-probability gaps, where time went
- time that is in two sets of intervals is found, however they lie
- a run without data, and one without training steps, have a report; skipped steps leave their neighbours' curves be
- faults of the store are on the page
- alarms are on the page, as the rows of the training ledger raise them, with the steps; a run of an older version has a
  page without what it did not measure
- the command writes into the store, or where it is told to
- in a browser: no sideways scrolling, no label cut off, colours follow the system, on a laptop and on a phone; hostile
  text makes no element and runs nothing (slow)

Run: pytest tests/flows/report/test_render.py
"""

import json
import math
import re
from random import Random
from types import SimpleNamespace

import pytest
from typer.testing import CliRunner

from flows.cli.app import app
from flows.report import svg
from flows.report.figures import charts
from flows.report.render import _provenance, _tiles, render
from flows.report.text import MAX_TEXT, duration, number
from storage.ledger import record_batch, record_training_step
from storage.report_tables import report_tables
from storage.shards import commit_shard
from storage.store import RunStore
from storage.summary import intersection, union
from tests.benchmarks.generated_run import generate_run
from tests.browser import CLIPPED_LABELS, LAPTOP, PHONE, browser
from tests.storage.helpers import make_batch, make_shard, make_training_step

HOSTILE = (
    '</pre><script>document.title = "owned"</script><img src=x onerror="document.title=\'owned\'">&amp;{{ 7 * 6 }}'
)


@pytest.fixture(scope="module")
def run_store(tmp_path_factory) -> RunStore:
    store = RunStore(tmp_path_factory.mktemp("store").as_uri(), "generated")
    generate_run(store, 1024, rows_per_shard=64, num_steps=24, num_response_tokens=8)
    commit_shard(store, make_shard("s2", 0, 2, response=HOSTILE, prompt=HOSTILE, reward=9.0))
    commit_shard(store, make_shard("s2", 1, 2, response="z" * (MAX_TEXT + 1234), prompt_id="long", reward=8.0))
    return store


@pytest.fixture(scope="module")
def page(run_store) -> str:
    return render(run_store)


def test_an_accuracy_is_called_that_before_training_for_the_first_policy_alone(tmp_path):
    store = RunStore(tmp_path.as_uri(), "warm")
    generate_run(store, 256, rows_per_shard=64, num_steps=8, num_response_tokens=8)
    assert "before training" in render(store)
    store.delete("metrics/evaluations/step=00000000.parquet")
    page = render(store)
    assert "before training" not in page and "policy step 8" in page


def test_a_reward_that_is_no_share_is_written_as_it_is(tmp_path):
    store = RunStore(tmp_path.as_uri(), "redteam")
    generate_run(store, 256, rows_per_shard=64, num_steps=8, num_response_tokens=8)
    tables = rows_of(store)
    tables["evaluations"] = [row | {"accuracy": row["accuracy"] - 25} for row in tables["evaluations"]]
    (tile, *_) = _tiles(tables, tables["totals"][0], None, None)
    assert tile["label"] == "held-out reward" and "%" not in tile["value"] + tile["remark"]


def test_the_page_is_one_file_with_everything(page):
    assert len(page) < 1_000_000
    assert "<script" not in page and "default-src 'none'" in page
    assert not re.findall(r"""(?:src|href)=["'](?!#)""", page) and "url(" not in page and "@import" not in page
    sections = re.findall(r'<h2 id="([a-z]+)"', page)
    assert sections == [
        "learning", "alarms", "data", "diversity", "trajectories", "time", "configuration", "provenance", "faults",
    ]  # fmt: skip
    assert "from 25 % before training; best policy 80 %" in page
    assert "accuracy 0.800 on 256 held-out problems, folder policies/step=00000024" in page
    assert page.count("<svg") >= 17 and "nothing yet" not in page


def test_hostile_text_is_only_text(page):
    assert HOSTILE not in page and "&lt;script&gt;document.title" in page
    assert "{{ 7 * 6 }}" in page and "<img" not in page
    assert f"{'z' * MAX_TEXT}… (1,234 more characters)" in page


def test_time_in_both_is_what_lies_in_each():
    random = Random(0)
    for _ in range(200):
        these, those = ([(a, a + random.randint(1, 9)) for a in random.sample(range(60), 6)] for _ in range(2))
        seconds = [{s for a, b in intervals for s in range(a, b)} for intervals in (these, those)]
        found = intersection(union(these), union(those))
        assert {s for a, b in found for s in range(a, b)} == seconds[0] & seconds[1]
        assert sum(b - a for a, b in found) == len(seconds[0] & seconds[1])


def test_the_numbers_are_those_of_the_store(run_store):
    tables = {name: table.to_pylist() for name, table in report_tables(run_store).items()}
    totals = tables["totals"][0]
    assert totals["num_trajectories"] == 1024 + 4 and totals["num_steps"] == 24
    assert sum(bar["num_slots"] for bar in tables["staleness"]) == totals["num_drawn"] == 24 * 128
    assert all(0 <= row["recent_share"] <= 1 for row in tables["draws"]) and len(tables["draws"]) == 24
    for row in tables["draws"]:  # trained = sampled by + difference
        difference = row["policy_reference_gap"] - row["behavior_reference_gap"]
        assert row["policy_behavior_gap"] == pytest.approx(difference)
    shares: dict[int, float] = {}
    for cell in tables["rewards"]:
        shares[cell["bin"]] = shares.get(cell["bin"], 0) + cell["share"]
    assert list(shares.values()) == pytest.approx([1] * len(shares))
    assert tables["searchers"][0]["sampling_s"] == pytest.approx(8 * 8.0)  # from each turn to its last response
    assert tables["trainer"][0] == {"present_s": pytest.approx(90 + 2), "step_s": 48.0, "wait_s": pytest.approx(9.2)}
    age = tables["buffer_age"]
    assert age[0]["age_median"] == 0 and age[-1]["age_low"] <= age[-1]["age_median"] <= age[-1]["age_high"] <= 23


def test_after_a_reset_of_the_reference_no_distance_is_drawn(run_store, monkeypatch):
    """The Trainer's gap is to the new reference, the stored one to the first."""
    drawn = {}
    monkeypatch.setattr("flows.report.figures.charts", lambda tables: drawn.update(tables) or charts(tables))
    config = json.loads(run_store.get("run.json")) | {"train": {"reference_reset_interval": 10}}
    monkeypatch.setattr("flows.report.render.load_run", lambda store: SimpleNamespace(recorded=lambda: config))
    render(run_store)
    found = [row["step"] for row in drawn["draws"] if row["policy_behavior_gap"] is not None]
    assert found == list(range(1, 11))
    assert found == [row["step"] for row in drawn["draws"] if row["policy_reference_gap"] is not None]


def test_where_drawn_trajectories_have_expired_no_distance_is_drawn(tmp_path):
    store = RunStore(tmp_path.as_uri(), "expired")
    generate_run(store, 256, rows_per_shard=64, num_steps=8, num_response_tokens=8)
    before = report_tables(store)["draws"].to_pylist()
    store.put("expired/searcher=s0/through=00000000.json", b"{}")
    after = report_tables(store)["draws"].to_pylist()
    assert all(row["policy_behavior_gap"] is not None for row in before)
    assert any(row["policy_behavior_gap"] is None and row["behavior_reference_gap"] is not None for row in after)


def test_a_run_without_evaluation_or_new_samples_says_so(tmp_path):
    store = RunStore(tmp_path.as_uri(), "warm")
    store.create_run({"run": "warm", "train": {"steps": 2}})
    commit_shard(store, make_shard())
    for step in (1, 2):
        record_training_step(store, make_training_step(1, step) | {"fresh_reward_mean": None})
    tiles = {tile["label"]: tile for tile in _tiles(rows_of(store), rows_of(store)["totals"][0], None, None)}
    assert tiles["held-out accuracy"]["remark"] == "not evaluated"
    assert tiles["newest sampled reward"]["value"] == "–"
    assert tiles["wall time"]["remark"] == ""


def rows_of(store: RunStore) -> dict[str, list[dict]]:
    return {name: table.to_pylist() for name, table in report_tables(store).items()}


def test_best_worst_and_most_trained_are(run_store):
    rows = report_tables(run_store)["examples"].to_pylist()
    kinds = {kind: [row for row in rows if row["kind"] == kind] for kind in ("best", "worst", "most trained")}
    assert [row["reward"] for row in kinds["best"]][:2] == [9, 9]  # two prompts
    assert {row["reward"] for row in kinds["worst"]} == {0}
    draws = [row["num_draws"] for row in kinds["most trained"]]
    assert draws == sorted(draws, reverse=True) and draws[0] > 1
    assert all(len({row["prompt_id"] for row in of_kind}) == len(of_kind) == 6 for of_kind in kinds.values())


def test_a_run_that_has_just_begun_has_a_report(tmp_path):
    store = RunStore(tmp_path.as_uri(), "new")
    store.create_run({"run": "new", "train": {"steps": 80}})
    assert "nothing yet" in render(store)
    commit_shard(store, make_shard())
    page = render(store)
    assert "step 0 of 80" in page and "broken pointer" in page  # it samples, but no policy is published


def test_a_skipped_step_is_no_point_of_a_curve(tmp_path):
    """Its loss and gradient are stored as they were: not finite."""
    store = RunStore(tmp_path.as_uri(), "skipped")
    store.create_run({"run": "skipped", "train": {"steps": 3}})
    commit_shard(store, make_shard())
    nothing = {"loss": math.nan, "gradient_norm": math.inf, "logprob_gap_mean": -math.inf, "skipped": True}
    for step in (1, 2, 3):
        record_batch(store, 1, step, make_batch([0]))
        record_training_step(store, make_training_step(1, step) | (nothing if step == 2 else {}))
    page = render(store)
    assert "nan" not in "".join(re.findall("<svg.*?</svg>", page, re.DOTALL))
    rows = report_tables(store)["training"].to_pylist()
    curves = [(row["step"], row["loss"], row["gradient_norm"], row["policy_reference_gap"]) for row in rows]
    assert curves == [(1, 0.5, 1.0, 0.0), (2, None, None, None), (3, 0.5, 1.0, 0.0)]


def test_faults_are_on_the_page(tmp_path):
    store = RunStore(tmp_path.as_uri(), "torn")
    generate_run(store, 128, rows_per_shard=32, num_steps=4, num_response_tokens=4)
    assert "no faults</a>" in render(store)
    store.delete("trajectories/searcher=s0/round=00000000.parquet")
    page = render(store)
    assert "missing round" in page and "sync without shards" in page and "no faults" not in page


def stepped(folder, name: str, change: dict) -> RunStore:
    """A run of a dozen training steps whose rows are changed."""
    store = RunStore(folder.as_uri(), name)
    store.create_run({"run": name, "train": {"steps": 12}})
    commit_shard(store, make_shard())
    for step in range(1, 13):
        record_batch(store, 1, step, make_batch([0]))
        record_training_step(store, make_training_step(1, step) | {"num_inserted": 4 * step} | change)
    return store


def test_alarms_are_on_the_page(tmp_path):
    page = render(stepped(tmp_path, "well", {}))
    assert 'href="#alarms">no alarms</a>' in page and "No alarm was on." in page
    page = render(stepped(tmp_path, "peaked", {"fresh_entropy": 0.001, "logprob_mismatch": 0.9}))
    assert 'href="#alarms">2 alarms</a>' in page
    shown = dict(re.findall(r"<tr><td>([a-z ]+)</td><td>([0-9–]+)</td>", page))
    assert shown == {"entropy low": "4–12", "logprobs disagree": "5–12"}
    assert "Raise search.temperature" in page and "train.sync_interval" in page


def test_a_run_of_an_older_version_has_a_page_without_what_it_did_not_measure(tmp_path):
    assert 'id="kl"' in render(stepped(tmp_path, "new", {}))
    later = ("fresh_kl", "fresh_entropy", "fresh_cut_share", "fresh_staleness", "effective_sample_size",
             "tapered_share", "logprob_mismatch")  # fmt: skip
    page = render(stepped(tmp_path, "old", dict.fromkeys(later)))
    assert not {f'id="{name}"' for name in ("kl", "entropy", "weights", "mismatch", "cut")} & set(page.split())
    assert "No alarm was on." in page


def test_the_command_writes_where_it_is_told_to(run_store, tmp_path):
    done = CliRunner().invoke(app, ["report", "generated", "--store", run_store.url])
    assert done.exit_code == 0 and done.stdout.strip() == f"{run_store.url}/generated/report.html"
    assert run_store.get("report.html").startswith(b"<!doctype html>")
    done = CliRunner().invoke(app, ["report", "generated", "--store", run_store.url, "--output", f"{tmp_path}/a.html"])
    assert done.exit_code == 0 and (tmp_path / "a.html").exists()
    done = CliRunner().invoke(app, ["report", "absent", "--store", run_store.url])
    assert done.exit_code == 2 and "no run 'absent'" in done.output


def test_ticks_are_round_numbers_in_the_range():
    assert svg.ticks(0, 1, 4) == [0, 0.2, 0.4, 0.6, 0.8, 1]
    assert svg.ticks(3, 97, 4) == [20, 40, 60, 80]
    assert svg.ticks(5, 5, 4) == [5]


def test_numbers_are_short():
    values = (0, 0.25, 1234, 9_996, 56_789, 3_400_000, 999.6, 999_600, 999_600_000, -999_600)
    shown = ["0", "0.25", "1,234", "9,996", "56.8k", "3.4M", "1,000", "1M", "1G", "-1M"]
    assert [number(value) for value in values] == shown
    assert [duration(seconds) for seconds in (90, -70, math.nan)] == ["1m 30s", "0s", "–"]


def test_a_line_that_is_flat_but_for_rounding_is_drawn():
    nearly = [svg.Series("a", [(1, 0.19999999999999996), (2, 0.19999999999999998)])]
    assert "<path" in svg.line_chart(nearly, svg.Axes("x", "y", from_zero=False))


def test_the_newest_policy_is_of_the_newest_attempt(run_store, monkeypatch):
    """Attempt 2 resumed from step 50 after attempt 1 had published step 60."""
    published = {
        attempt: SimpleNamespace(step=step, attempt=attempt, fingerprint=f"of {attempt}", pruned=False)
        for attempt, step in ((1, 60), (2, 52))
    }
    monkeypatch.setattr("flows.report.render.published_policies", lambda store: published)
    tables = {"provenance": [], "attempts": []}
    assert dict(_provenance(run_store, tables, {}, None)["facts"])["newest policy"] == "step 52, weights of 2"


def test_charts_escape_names_and_leave_out_what_is_not_there():
    line = svg.Series("<b>", [(1, None), (2, 3.0)])
    chart = svg.line_chart([line], svg.Axes("<x>", "y"))
    assert "<b>" not in chart and "&lt;b&gt;" in chart and "<x>" not in chart
    assert "nothing yet" in svg.line_chart([svg.Series("a", [(1, None)])], svg.Axes("x", "y"))


@pytest.mark.slow
def test_the_page_pleases_on_laptop_and_phone_in_light_and_dark(run_store, page, tmp_path):
    """The pictures are left in pytest's folder, to be looked at."""
    file = tmp_path / "report.html"
    file.write_text(page)
    backgrounds = {}
    with browser(tmp_path / "profile") as tab:
        for width in (LAPTOP, PHONE):
            for dark in (False, True):
                tab.open(file.as_uri(), width=width, dark=dark)
                assert tab.evaluate("document.documentElement.scrollWidth") == width
                assert tab.evaluate(CLIPPED_LABELS) == []
                backgrounds[dark] = tab.evaluate("getComputedStyle(document.body).backgroundColor")
                tab.screenshot(tmp_path / f"report-{width}-{'dark' if dark else 'light'}.png")
        assert backgrounds[False] != backgrounds[True]
        assert tab.evaluate("document.title") == "generated · tba report"
        assert tab.evaluate("document.querySelectorAll('script, img, iframe').length") == 0
        shown = tab.evaluate("[...document.querySelectorAll('pre')].map(pre => pre.textContent)")
        assert HOSTILE in shown
        assert tab.evaluate("document.body.innerText").count("Staleness") >= 1
