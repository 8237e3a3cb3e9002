"""Every notebook is committed as it ran, and nbval, which `make notebooks` runs, compares enough.

These rules protect readers. What else makes a chapter good is in CONTRIBUTING.md.
"""

import ast
import re
from itertools import pairwise

import nbformat
import pytest
from nbformat.v4 import new_markdown_cell
from running import ROOT, text_of

PATHS = sorted((ROOT / "notebooks").glob("*.ipynb"))
NOTEBOOKS = {path.stem: nbformat.read(path, as_version=4) for path in PATHS}
KNOWN = {"nbval-ignore-output", "raises-exception", "hide-output", "hide-cell", "hide-input"}

every_notebook = pytest.mark.parametrize("name", NOTEBOOKS)


def code_cells(name):
    return [cell for cell in NOTEBOOKS[name].cells if cell.cell_type == "code"]


def tags(cell):
    return set(cell.metadata.get("tags", []))


@every_notebook
def test_a_notebook_was_run_from_top_to_bottom_and_names_its_machine(name):
    nbformat.validate(NOTEBOOKS[name])
    counts = [cell.execution_count for cell in code_cells(name)]
    assert counts == list(range(1, len(counts) + 1)), "run make refresh"
    assert any(cell.outputs for cell in code_cells(name))
    run = NOTEBOOKS[name].metadata.get("run", {})
    assert {"date", "machine", "torch", "cpu"} <= set(run), "run make refresh"


@every_notebook
def test_cells_fail_when_and_only_when_they_say_so(name):
    for cell in code_cells(name):
        assert tags(cell) <= KNOWN, cell.source
        fails = any(output.output_type == "error" for output in cell.outputs)
        assert fails == ("raises-exception" in tags(cell)), cell.source


@every_notebook
def test_outputs_are_short_and_hold_no_warning_and_no_machines_path(name):
    for cell in code_cells(name):
        for output in cell.outputs:
            text = text_of(output)
            assert text.count("\n") <= 60, cell.source
            assert output.get("name") != "stderr", text
            assert not re.search(r"/(root|home|work|tmp|Users)/\w", text), text


@every_notebook
def test_the_hidden_solution_of_an_exercise_checks_itself(name):
    title = None
    for cell, following in pairwise([*NOTEBOOKS[name].cells, new_markdown_cell()]):
        if cell.cell_type == "markdown" and (found := re.findall(r"^#+ .*", cell.source, re.M)):
            title = found[-1]
        ends_a_solution = "hide-cell" in tags(cell) - tags(following)
        if ends_a_solution and title and title.startswith("### Exercise"):
            last = ast.parse(cell.source).body[-1]
            assert isinstance(last, ast.Assert) or ast.unparse(last).endswith("solution=True)"), (
                title
            )


def test_nbval_compares_at_least_85_percent_of_the_outputs():
    ours = every = 0
    for name in NOTEBOOKS:
        shown = [cell for cell in code_cells(name) if cell.outputs]
        compared = [cell for cell in shown if "nbval-ignore-output" not in tags(cell)]
        assert len(compared) / len(shown) >= 0.75, name
        ours, every = ours + len(compared), every + len(shown)
    assert ours / every >= 0.85
