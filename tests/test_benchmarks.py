"""The benchmarks' results are computed right, and the page shows the stored ones."""

import dataclasses
import json

from running import ROOT

from benchmarks import run
from benchmarks.results import Result, median_range, table


def test_a_ratio_has_its_runs_range_of_six_or_more_that_of_the_median_and_a_count_has_none():
    few = Result.of_pairs("x", [(1, 2), (30, 10), (1, 1)])
    assert row(few) == "| x |  | 1.0 | 0.5 to 3.0 (single runs) | 3 |"
    ranges = {5: (1, 5), 6: (1, 6), 9: (2, 8), 31: (10, 22)}
    assert {n: median_range(range(1, n + 1)) for n in ranges} == ranges
    assert row(Result.of_runs("x", range(1, 32))) == "| x |  | 16 | 10 to 22 | 31 |"
    assert row(Result("kills", 0, 0, 0, 200)) == "| kills |  | 0 |  | 200 |"


def row(result):
    return table([dataclasses.asdict(result)]).splitlines()[2]


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


def test_the_page_opens_with_the_results_of_its_tables():
    groups = json.loads((ROOT / "benchmarks/results.json").read_text())
    ratios = {name: [row["ratio"] for row in g["results"]] for name, g in groups.items()}
    (loop, *_), ranks, (seconds, _, fixing, *_) = (ratios[name] for name in run.GROUPS[:3])
    wanted = [
        f"takes {100 * loop - 100:.0f} % longer",
        f"{seconds:.1f} s,",
        f"in {fixing:.0f} times",
    ]
    wanted += [f"{100 * share:.0f} %" for share in ranks]
    assert ratios["kills"] == [0]
    opening = " ".join((ROOT / "book/benchmarks.md").read_text().split("\n\n")[1].split())
    assert [part for part in [*wanted, "no checkpoint was lost"] if part not in opening] == []
