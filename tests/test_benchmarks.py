"""The benchmarks' results are computed right, and the page shows those that miss their goal."""

import dataclasses
import json
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import run
from results import Result, median_range, table

ROOT = Path(__file__).resolve().parent.parent


def test_a_ratio_of_few_samples_has_the_range_of_the_runs_furthest_apart():
    result = Result.of_samples("x", [4, 5, 6], [2, 1, 2], 2)
    assert (result.ratio, result.low, result.high, result.runs) == (2.5, 2.0, 6.0, 3)
    assert result.met == "yes"
    assert not result.of_median


def test_of_six_runs_or_more_the_range_is_that_of_the_median():
    assert [median_range(range(1, n + 1)) for n in (5, 6, 9, 31)] == [
        (1, 5),
        (1, 6),
        (2, 8),
        (10, 22),
    ]
    row = table([dataclasses.asdict(Result.of_runs("x", range(1, 32), 9))]).splitlines()[2]
    assert row == "| x |  | 16 | 10 to 22 | 31 | ≥ 9 | yes |"


def test_a_ratio_of_pairs_compares_each_run_with_the_one_beside_it():
    result = Result.of_pairs("x", [(1, 2), (30, 10), (1, 1)], 1.03, at_most=True)
    assert (result.ratio, result.low, result.high, result.runs) == (1.0, 0.5, 3.0, 3)


@pytest.mark.parametrize(
    ("low", "high", "at_most", "word"),
    [
        (2.0, 2.4, False, "yes"),
        (1.6, 2.0, False, "no"),
        (1.6, 2.0, True, "yes"),
        (2.0, 2.4, True, "no"),
        (1.9, 2.1, False, "cannot tell"),
        (1.9, 2.1, True, "cannot tell"),
    ],
)
def test_the_page_says_that_a_goal_is_met_only_where_all_runs_agree(low, high, at_most, word):
    result = Result("x <y>", (low + high) / 2, low, high, 5, 2.0, at_most)
    row = table([dataclasses.asdict(result)]).splitlines()[2]
    assert row.startswith("| x &lt;y&gt; |")
    assert row.endswith(f"| {word} |")


def test_what_explains_a_result_has_no_goal_to_meet():
    row = table([dataclasses.asdict(Result("x", 0.5, 0.4, 0.6, 3, None))]).splitlines()[2]
    assert row == "| x |  | 0.50 | 0.40 to 0.60 (single runs) | 3 |  |  |"


def test_only_a_full_run_is_stored(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(run, "RESULTS", tmp_path / "results.json")
    monkeypatch.setattr(run, "TABLES", tmp_path / "tables")
    module = SimpleNamespace(
        measure=lambda full: [Result("x", 2 if full else 3, 1, 3, 5, 2.5, at_most=True)],
    )
    monkeypatch.setitem(sys.modules, "launching", module)
    run.main(["launching"], full=True)
    stored = run.RESULTS.read_text()
    assert "| 2.0 |" in (run.TABLES / "launching.md").read_text()
    run.main(["launching"], full=False)
    assert run.RESULTS.read_text() == stored
    said = capsys.readouterr().out
    assert "x: 3.00 (1.00 to 3.00, n=5), goal <= 2.5, met: cannot tell, stored 2.00" in said


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
