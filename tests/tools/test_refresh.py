"""``tools/refresh.py`` runs a notebook and writes it back as the tests and the site want it."""

import machine_facts
import nbformat
import pytest
import refresh
from nbclient.exceptions import CellExecutionError

pytestmark = pytest.mark.slow


def write(path, *sources, tags=()):
    cells = [nbformat.v4.new_code_cell(source) for source in sources]
    cells[-1].metadata["tags"] = list(tags)
    nbformat.write(nbformat.v4.new_notebook(cells=cells), path)


def test_refreshing_twice_gives_the_same_bytes(tmp_path):
    path = tmp_path / "a.ipynb"
    write(path, "print('a')\nprint('b')", "1 + 1   ")
    refresh.refresh(path)
    once = path.read_bytes()
    refresh.refresh(path)
    assert path.read_bytes() == once
    notebook = nbformat.read(path, as_version=4)
    assert [cell.id for cell in notebook.cells] == ["cell-00", "cell-01"]
    assert notebook.cells[0].outputs[0].text == "a\nb\n"
    assert notebook.cells[1].outputs[0].data["text/plain"] == "2"
    assert notebook.metadata.language_info.name == "python"


def test_a_cell_that_fails_unexpectedly_leaves_the_file_as_it_was(tmp_path):
    path = tmp_path / "a.ipynb"
    write(path, "1 / 0")
    before = path.read_bytes()
    with pytest.raises(CellExecutionError, match="ZeroDivisionError"):
        refresh.refresh(path)
    assert path.read_bytes() == before
    assert [file.name for file in tmp_path.iterdir()] == ["a.ipynb"]


def test_a_traceback_keeps_the_pages_frames_and_the_whole_message(tmp_path):
    path = tmp_path / "a.ipynb"
    source = "import json\n\ndef read(text):\n    return json.loads(text)\n\nread('{')"
    write(path, "pass", source, tags=["raises-exception"])
    refresh.refresh(path)
    (output,) = nbformat.read(path, as_version=4).cells[1].outputs
    text = "\n".join(output.traceback)
    assert output.ename == "JSONDecodeError"
    assert "Expecting property name enclosed in double quotes" in output.traceback[-1]
    assert "decoder.py" not in text
    assert text.count("Cell") == 2


def test_a_message_of_several_paragraphs_is_kept_whole(tmp_path):
    path = tmp_path / "a.ipynb"
    write(path, "raise ValueError('one\\n\\ntwo\\n\\nthree')", tags=["raises-exception"])
    refresh.refresh(path)
    (output,) = nbformat.read(path, as_version=4).cells[0].outputs
    assert "\n".join(output.traceback).endswith("one\n\ntwo\n\nthree")


def test_a_notebook_says_what_machine_its_outputs_come_from(tmp_path):
    path = tmp_path / "a.ipynb"
    write(path, "1 + 1")
    refresh.refresh(path)
    run = nbformat.read(path, as_version=4).metadata["run"]
    assert run == machine_facts.machine_facts()
