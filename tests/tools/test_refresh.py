"""``tools/refresh.py`` runs a notebook and writes it back as the tests and the site want it."""

from unittest import mock

import nbformat
import pytest
from nbclient.exceptions import CellExecutionError
from nbformat.v4 import new_code_cell, new_notebook

from tools import refresh
from torchladder.measuring import RECORDING

SOURCES = ["print('a')\nprint('b')", "1 + 1   "]
FAILING = [
    "import json\n\ndef read(text):\n    return json.loads(text)\n\nread('{')",
    "raise ValueError('one\\n\\ntwo\\n\\nthree')",
]
pytestmark = pytest.mark.slow


def test_refreshing_twice_gives_the_same_bytes_and_messages_are_whole(tmp_path, monkeypatch):
    today = {"date.today.return_value.isoformat.return_value": "2026-01-02"}  # it may be midnight
    monkeypatch.setattr(refresh, "datetime", mock.Mock(**today))
    path = tmp_path / "a.ipynb"
    expected = {"tags": ["raises-exception"]}
    cells = [new_code_cell(source) for source in SOURCES]
    cells += [new_code_cell(source, metadata=expected) for source in FAILING]
    nbformat.write(new_notebook(cells=cells), path)
    refresh.refresh(path)
    once = path.read_bytes()
    refresh.refresh(path)
    assert path.read_bytes() == once
    notebook = nbformat.read(path, 4)
    assert notebook.metadata.run.outputs == refresh.digest(notebook)
    notebook.cells[0].outputs[0].text = "edited by hand"
    assert notebook.metadata.run.outputs != refresh.digest(notebook)
    *_, json_error, own_error = (cell.outputs[0] for cell in nbformat.read(path, 4).cells)
    # Of the frames, those of the page.
    assert "Expecting property name enclosed in double quotes" in json_error.traceback[-1]
    assert "decoder.py" not in "\n".join(json_error.traceback)
    assert "\n".join(json_error.traceback).count("Cell") == 2
    assert "\n".join(own_error.traceback).endswith("one\n\ntwo\n\nthree")


def test_a_cell_that_fails_or_does_not_unexpectedly_leaves_the_file_as_it_was(tmp_path):
    path, on_purpose = tmp_path / "a.ipynb", {"tags": ["raises-exception"]}
    for source, metadata, error, said in [
        ("1 / 0", {}, CellExecutionError, "ZeroDivisionError"),
        ("1 / 1", on_purpose, ValueError, "a.ipynb: cell cell-00 .* raised nothing"),
    ]:
        nbformat.write(new_notebook(cells=[new_code_cell(source, metadata=metadata)]), path)
        before = path.read_bytes()
        with pytest.raises(error, match=said):
            refresh.refresh(path)
        assert path.read_bytes() == before
        assert [file.name for file in tmp_path.iterdir()] == ["a.ipynb"]


SPOILED = """
from pathlib import Path

from torchladder.measuring import when_recorded

tries = Path("tries").stat().st_size if Path("tries").exists() else 0
Path("tries").write_text("x" * (tries + 1))
assert when_recorded(tries >= {needed})
print(tries)
"""


def test_a_cell_whose_measured_claim_failed_runs_again_where_it_is_recorded(
    tmp_path, monkeypatch, capsys
):
    path = tmp_path / "a.ipynb"

    def last_try(needed):
        (tmp_path / "tries").unlink(missing_ok=True)
        cells = [new_code_cell(SPOILED.format(needed=needed)), new_code_cell("'after'")]
        nbformat.write(new_notebook(cells=cells), path)
        refresh.refresh(path)
        first, second = nbformat.read(path, 4).cells
        assert (first.execution_count, second.execution_count) == (1, 2)
        return first.outputs[0].text

    assert last_try(needed=5) == "0\n"  # nothing is recorded
    monkeypatch.setenv(RECORDING, "1")
    assert last_try(needed=2) == "2\n"
    said = "cell-00 again: what it measured is not what the page says\n"
    assert capsys.readouterr().out == 2 * said
    with pytest.raises(CellExecutionError, match="AssertionError"):
        last_try(needed=3)
