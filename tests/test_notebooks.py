"""Every notebook is committed as it ran, and nbval compares enough of it.

``make notebooks`` runs nbval itself; these tests look at what it will be given, and prove on a
spoilt copy that it notices every change.
"""

import ast
import copy
import os
import re
import subprocess
import sys
from pathlib import Path

import nbformat
import pytest

from torchclinic import errors

ROOT = Path(__file__).parent.parent
PATHS = sorted((ROOT / "notebooks").glob("*.ipynb"))
NOTEBOOKS = {path.stem: nbformat.read(path, as_version=4) for path in PATHS}
TAGS = {
    "nbval-ignore-output",
    "hide-output",
    "raises-exception",
    "hide-cell",
    "hide-input",
    "remove-cell",
}

CHAPTERS = [name for name in NOTEBOOKS if not name.startswith("errors_")]
CLINIC = [name for name in NOTEBOOKS if name not in CHAPTERS]

every_notebook = pytest.mark.parametrize("name", NOTEBOOKS)
every_chapter = pytest.mark.parametrize("name", CHAPTERS)


def code_cells(name):
    return [cell for cell in NOTEBOOKS[name].cells if cell.cell_type == "code"]


def tags(cell):
    return set(cell.metadata.get("tags", []))


def compared(name):
    """The cells whose stored outputs nbval compares."""
    return [c for c in code_cells(name) if c.outputs and "nbval-ignore-output" not in tags(c)]


def text_of(output):
    if output.output_type == "stream":
        return output.text
    if output.output_type == "error":
        return "\n".join(output.traceback)
    return str(output.data.get("text/plain", ""))


def test_there_are_chapters_and_the_error_clinic_and_nothing_else_in_notebooks():
    assert len(CHAPTERS) >= 6
    assert sorted((ROOT / "notebooks").glob("[!.]*")) == PATHS
    assert [int(name[:2]) for name in CHAPTERS] == list(range(1, len(CHAPTERS) + 1))
    assert sorted(CLINIC) == sorted(f"errors_{part}" for part in errors.parts())


@every_notebook
def test_a_notebook_is_valid_and_was_run_from_top_to_bottom(name):
    nbformat.validate(NOTEBOOKS[name])
    counts = [cell.execution_count for cell in code_cells(name)]
    assert counts == list(range(1, len(counts) + 1)), "run make refresh"
    assert sum(bool(cell.outputs) for cell in code_cells(name)) >= 10


@every_notebook
def test_a_notebook_is_normalised_so_that_diffs_are_quiet(name):
    notebook = NOTEBOOKS[name]
    assert [c.id for c in notebook.cells] == [f"cell-{i:02d}" for i in range(len(notebook.cells))]
    assert set(notebook.metadata) == {"kernelspec", "language_info"}
    assert "version" not in notebook.metadata.language_info
    keys = {key for cell in notebook.cells for key in cell.metadata}
    assert keys <= {"tags", "mystnb"}


@every_notebook
def test_only_known_tags_are_used(name):
    assert set().union(*map(tags, NOTEBOOKS[name].cells)) <= TAGS


@every_notebook
def test_cells_fail_when_and_only_when_they_say_so(name):
    for cell in code_cells(name):
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
def test_cells_hold_one_idea(name):
    for number, cell in enumerate(code_cells(name)):
        limit = 30 if "hide-cell" in tags(cell) or "hide-input" in tags(cell) else 20
        set_up = number == 0 and name in CLINIC  # what the entries need, once for all of them
        if cell.source.startswith("%%writefile") or set_up:  # a whole program is one idea
            limit = 51
        assert len(cell.source.splitlines()) <= limit, cell.source


@every_chapter
def test_three_exercises_or_more_have_a_hidden_solution_that_checks_itself(name):
    exercises = {}
    for cell in NOTEBOOKS[name].cells:
        headings = re.findall(r"^#+ .*", cell.source, re.M) if cell.cell_type == "markdown" else []
        if headings:
            title = headings[-1] if headings[-1].startswith("### Exercise") else None
        elif cell.cell_type == "code" and title and "hide-cell" in tags(cell):
            exercises[title] = cell.source  # the last one counts
    titles = re.findall(
        r"^### Exercise.*", "\n".join(c.source for c in NOTEBOOKS[name].cells), re.M
    )
    assert list(exercises) == titles
    assert len(titles) >= 3
    for title, source in exercises.items():
        assert isinstance(ast.parse(source).body[-1], ast.Assert), title


def compared_counts():
    """For each notebook, how many of its cells with output nbval compares, of how many."""
    return {
        name: (len(compared(name)), sum(bool(cell.outputs) for cell in code_cells(name)))
        for name in NOTEBOOKS
    }


def test_nbval_compares_at_least_85_percent_of_the_outputs():
    counts = compared_counts()  # conftest.py prints them
    ours, every = (sum(column) for column in zip(*counts.values(), strict=True))
    assert ours / every >= 0.85
    assert min(ours / every for ours, every in counts.values()) >= 0.75


def prose(text):
    """Without code blocks and the card at the top."""
    return re.sub(r"^(```|~~~|:::).*?^\1$", "", text, flags=re.DOTALL | re.MULTILINE)


@every_chapter
def test_a_chapter_opens_with_its_question_and_shows_a_picture_early(name):
    cells = NOTEBOOKS[name].cells
    kinds = [cell.cell_type for cell in cells]
    opening = "\n".join(cell.source for cell in cells[: kinds.index("code")])
    assert len(prose(opening).split()) >= 30, opening
    eighth = [number for number, kind in enumerate(kinds) if kind == "code"][7]
    assert any("](../book/figures/" in cell.source for cell in cells[:eighth])


@every_chapter
def test_a_chapter_is_read_in_one_sitting(name):
    texts = [cell.source for cell in NOTEBOOKS[name].cells if cell.cell_type == "markdown"]
    assert len(prose("\n".join(texts)).split()) <= 3300


@every_notebook
def test_code_that_only_draws_is_folded_and_no_directive_shows_raw_in_jupyter(name):
    for cell in NOTEBOOKS[name].cells:
        if cell.cell_type == "code" and "plotting.show(" in cell.source:
            assert tags(cell) & {"hide-input", "hide-cell"}, cell.source
        assert "{literalinclude}" not in cell.source


def spoilt(outputs):
    """The same outputs, changed as little as a slip of the hand would."""
    outputs = copy.deepcopy(outputs)
    output = outputs[-1]
    if output.output_type == "stream":
        output.text = output.text.rstrip("\n") + "!\n"
    elif output.output_type == "error":
        output.evalue += "!"
    elif "<svg" in output.data.get("text/html", ""):
        output.data["text/plain"] += "!"
    else:
        for key in output.data:
            output.data[key] += "!"
    return outputs


def replay(outputs):
    """Code that gives these outputs at once, whatever work they first took; an error comes last."""
    lines = []
    for output in sorted(outputs, key=lambda output: output.output_type == "error"):
        if output.output_type == "stream":
            lines.append(f"import sys; _ = sys.{output.name}.write({output.text!r})")
        elif output.output_type == "error":
            lines.append(f"raise type({output.ename!r}, (Exception,), {{}})({output.evalue!r})")
        else:
            lines.append(f"get_ipython().display_pub.publish({dict(output.data)!r})")
    return "\n".join(lines)


@pytest.mark.slow
def test_nbval_notices_every_compared_output_that_was_changed(tmp_path):
    """Each cell of every notebook stands there twice: as it is, and with a spoilt stored output."""
    notebook, expected = nbformat.v4.new_notebook(), set()
    for name in NOTEBOOKS:
        for cell in compared(name):
            for stored in (cell.outputs, spoilt(cell.outputs)):
                if stored != cell.outputs:
                    expected.add(len(notebook.cells))
                played = nbformat.v4.new_code_cell(
                    replay(cell.outputs), outputs=stored, execution_count=1
                )
                played.metadata["tags"] = sorted(tags(cell))
                notebook.cells.append(played)
    nbformat.write(notebook, tmp_path / "replayed.ipynb")
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "--nbval", "--nbval-current-env", "-q", "-rf", "--tb=no",
         "--nbval-cell-timeout=120", f"--nbval-sanitize-with={ROOT / 'tests/nbval_sanitize.cfg'}",
         "-p", "no:cacheprovider", "--rootdir", str(tmp_path), "replayed.ipynb"],
        cwd=tmp_path, env=os.environ | {"NO_COLOR": "1"},
        capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    found = re.findall(
        r"^FAILED replayed\.ipynb::(?:ipynb::)?Cell (\d+)", done.stdout, re.MULTILINE
    )
    assert {int(number) for number in found} == expected, done.stdout[-3000:]
    assert len(expected) == len(notebook.cells) / 2
