"""The benchmarks' results are computed right, and the page shows those that miss their goal."""

import dataclasses
import json
import re
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import run
from curves import Curve
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
    row = table([dataclasses.asdict(result)]).splitlines()[2]
    assert row.startswith("| x &lt;y&gt; |")
    assert row.endswith(f"| {word} |")


def test_what_explains_a_result_has_no_goal_to_meet():
    row = table([dataclasses.asdict(Result("x", 0.5, 0.4, 0.6, 3, None))]).splitlines()[2]
    assert row == "| x |  | 0.50 | 0.40 to 0.60 | 3 |  |  |"


@pytest.mark.parametrize(
    ("seconds", "expected"),
    [
        (lambda n: 2 + 3 * n, 2 + 3 * 1000),  # a start and so much for each
        (lambda n: n**2, 1000**2),
        (lambda n: 5, 5),
    ],
)
def test_a_hundred_times_more_is_the_worse_of_a_line_and_a_power(seconds, expected):
    points = [(n, [seconds(n)] * 3) for n in (1, 5, 10)]
    assert Curve("x", "items", {"one": points}).beyond("one") == pytest.approx(expected)


def test_only_a_full_run_is_stored(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(run, "RESULTS", tmp_path / "results.json")
    monkeypatch.setattr(run, "TABLES", tmp_path / "tables")
    curve = Curve("Longer", "items", {"one": [(1, [1, 1, 1]), (2, [2, 2, 2])]})
    module = SimpleNamespace(
        measure=lambda full: [Result("x", 2 if full else 3, 1, 3, 5, 2.5, at_most=True)],
        growth=lambda full: [curve],
    )
    monkeypatch.setitem(sys.modules, "launching", module)
    run.main(["launching", "launching_growth"], full=True)
    stored = run.RESULTS.read_text()
    assert "| 2.00 |" in (run.TABLES / "launching.md").read_text()
    assert "<svg" in (run.TABLES / "launching_growth.md").read_text()
    run.main(["launching"], full=False)
    assert run.RESULTS.read_text() == stored
    said = capsys.readouterr().out
    assert "x: 3.00 (1.00 to 3.00, n=5), goal <= 2.5  MISSED, stored 2.00" in said


def test_a_drawn_curve_says_its_values_in_words_and_fits_into_markdown():
    points = [(10, [0.2, 0.1, 0.3]), (1000, [50, 70, 60])]
    curve = Curve("Larger files", "megabytes", {"fix": points})
    drawn = curve.drawn()
    assert 'aria-label="Larger files. Time by number of megabytes: fix 0.2' in drawn
    assert "60\N{NO-BREAK SPACE}s at 1,000" in drawn
    assert "\n" not in drawn
    assert curve.extrapolated().startswith("A hundred times more, 100,000 megabytes, ")


def test_the_stored_results_name_their_machine_and_have_a_spread():
    groups = json.loads((ROOT / "benchmarks" / "results.json").read_text())
    assert list(groups) == list(run.GROUPS)
    for group in groups.values():
        assert {"date", "CPU", "GPUs", "PyTorch"} <= group["machine"].keys()
        for row in group.get("results", []):
            assert row["low"] <= row["ratio"] <= row["high"], row["what"]
            assert row["runs"] >= 3
        for line in [line for curve in group.get("curves", []) for line in curve["lines"].values()]:
            assert all(len(seconds) >= 3 for _, seconds in line)


def words_of(path):
    """Without the drawings, which another matplotlib draws otherwise; their values are in words."""
    return re.sub(r"<svg.*?</svg>", "", path.read_text(), flags=re.DOTALL)


def test_the_tables_on_the_page_are_those_of_the_stored_results(monkeypatch, tmp_path):
    monkeypatch.setattr(run, "TABLES", tmp_path)
    run.write_tables()
    stored = {path.name: words_of(path) for path in (ROOT / "benchmarks/tables").iterdir()}
    assert stored == {path.name: words_of(path) for path in tmp_path.iterdir()}
    page = (ROOT / "book/benchmarks.md").read_text()
    assert [name for name in stored if f"tables/{name}" not in page] == []
