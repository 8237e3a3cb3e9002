"""The benchmarks' results are computed right, and the page shows those that miss their goal."""

import dataclasses
import json
from pathlib import Path

import pytest
import run
from results import Result, table

ROOT = Path(__file__).resolve().parent.parent


def test_a_ratio_of_samples_has_the_spread_of_the_runs_furthest_apart():
    result = Result.of_samples("x", [4, 5, 6], [2, 1, 2], 2)
    assert (result.ratio, result.low, result.high, result.runs) == (2.5, 2.0, 6.0, 3)
    assert result.met


def test_a_ratio_of_pairs_compares_each_run_with_the_one_beside_it():
    result = Result.of_pairs("x", [(1, 2), (30, 10), (1, 1)], 1.03, at_most=True)
    assert (result.ratio, result.low, result.high, result.runs) == (1.0, 0.5, 3.0, 3)
    assert result.met
    assert not dataclasses.replace(result, ratio=1.04).met


@pytest.mark.parametrize(
    ("ratio", "at_most", "word"),
    [(2.0, False, "yes"), (1.99, False, "no"), (2.0, True, "yes"), (2.01, True, "no")],
)
def test_the_page_says_whether_a_goal_was_met(ratio, at_most, word):
    result = Result("x <y>", ratio, 1, 3, 5, 2.0, at_most)
    group = {"machine": {"date": "today"}, "results": [dataclasses.asdict(result)]}
    row = table(group).splitlines()[2]
    assert row.startswith("| x &lt;y&gt; |")
    assert row.endswith(f"| {word} |")


def test_the_stored_results_name_their_machine_and_have_a_spread():
    groups = json.loads((ROOT / "benchmarks" / "results.json").read_text())
    assert list(groups) == list(run.GROUPS)
    for group in groups.values():
        assert {"date", "CPU", "GPUs", "PyTorch"} <= group["machine"].keys()
        for row in group["results"]:
            assert row["low"] <= row["ratio"] <= row["high"], row["what"]
            assert row["runs"] >= 3


def test_the_tables_on_the_page_are_those_of_the_stored_results(monkeypatch, tmp_path):
    monkeypatch.setattr(run, "TABLES", tmp_path)
    run.write_tables()
    stored = {path.name: path.read_text() for path in (ROOT / "benchmarks/tables").iterdir()}
    assert stored == {path.name: path.read_text() for path in tmp_path.iterdir()}
    page = (ROOT / "book/benchmarks.md").read_text()
    assert [name for name in stored if f"tables/{name}" not in page] == []
