"""The line under a traceback: of ``%load_ext torchclinic``, and in the notes of errors."""

import subprocess
import sys
from unittest import mock

import nbformat
import pytest
from nbclient import NotebookClient
from torch import nn

from torchclinic import cli, errors
from torchclinic.errors import LINE, note, text_of
from torchladder.launching import LaunchError, launch

THE_LINE = f"{LINE} module-prefix"
TEXT = 'Unexpected key(s) in state_dict: "module.weight".'
LOAD = "nn.Linear(4, 2).load_state_dict(nn.DataParallel(nn.Linear(4, 2)).state_dict())"
CHAINED = f"""
try:
    {LOAD}
except RuntimeError as error:
    raise ValueError("cannot start") from error
"""
GROUP = (
    f"raise ExceptionGroup('two', [KeyError('a'), ExceptionGroup('in', [RuntimeError({TEXT!r})])])"
)
NOTED = f"error = ValueError('no')\nerror.add_note({TEXT!r})\nraise error"
RUN = f"with open('it.py', 'w') as file: file.write('from torch import nn; {LOAD}')\n%run it.py"
LAUNCH = f"""
def train():
    {LOAD}

launch(train, world_size=1)
"""
LOADED = [LOAD, CHAINED, GROUP, NOTED, RUN, LAUNCH]
UNRELATED = ["1 / 0", "{}['rank']", "def f(:", "print('well')", "%no_such_magic"]


def run_cells(folder, *sources):
    """For each cell the texts of its outputs; of an error, the traceback."""
    book = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(source) for source in sources])
    NotebookClient(book, allow_errors=True, resources={"metadata": {"path": str(folder)}}).execute()
    return [[text(output) for output in cell.outputs] for cell in book.cells]


def text(output):
    if output.output_type == "error":
        return "\n".join(output.traceback)
    return output.get("text") or output.data["text/plain"]


@pytest.mark.slow
def test_in_a_kernel_each_known_error_is_followed_by_one_line_and_no_other_by_any(tmp_path):
    begin = ["from torch import nn\nfrom torchladder.launching import launch"]
    begin += ["%load_ext torchclinic", "%load_ext torchclinic\n%reload_ext torchladder"]
    after = ["%unload_ext torchladder", LOAD, LAUNCH]
    cells = run_cells(tmp_path, *begin, *LOADED, *UNRELATED, *after)[len(begin) :]
    known, unrelated, cells = cells[: len(LOADED)], cells[len(LOADED) : -3], cells[-3:]
    for source, outputs in zip(LOADED, known, strict=True):
        assert outputs[-1] == THE_LINE, source
        assert "".join(outputs).count(LINE) == 1, source
    assert not any(LINE in output for outputs in unrelated for output in outputs)
    _, plain, launched = cells
    assert not any(LINE in output for output in plain)
    assert "".join(launched).count(LINE) == 1  # the note of the error itself


@pytest.mark.slow
def test_an_error_inside_the_extension_is_said_once_and_the_shell_goes_on(tmp_path):
    spoil = "%load_ext torchclinic\nimport torchclinic.errors\ntorchladder.errors.find = None"
    _, first, second, third = run_cells(tmp_path, spoil, "1 / 0", "1 / 0", "2 + 2")
    assert "ZeroDivisionError" in first[0]
    assert first[1].startswith("torchladder cannot name entries here: TypeError")
    assert len(second) == 1
    assert third == ["4"]


@pytest.mark.slow
def test_in_plain_ipython_the_line_is_printed_too(tmp_path):
    lines = ["%load_ext torchclinic", "from torch import nn", LOAD, "1 / 0"]
    done = subprocess.run(
        [sys.executable, "-m", "IPython", "--simple-prompt", "--no-banner", "--colors=NoColor"],
        input="\n".join(lines), capture_output=True, text=True, timeout=120, cwd=tmp_path,
    )  # fmt: skip
    assert done.stdout.count(LINE) == 1
    assert done.stdout.index("RuntimeError: Error(s)") < done.stdout.index(THE_LINE)


def test_the_link_is_there_only_where_the_notebook_of_the_entry_is(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    shown = []
    with mock.patch("IPython.display.display", lambda data, raw: shown.append(data)):
        errors._Watch().show(errors.catalogue()["module-prefix"])
        (tmp_path / "errors_files.ipynb").touch()
        errors._Watch().show(errors.catalogue()["module-prefix"])
    assert [data["text/plain"] for data in shown] == [THE_LINE] * 2
    assert ["errors_files.ipynb#module-prefix" in data["text/markdown"] for data in shown] == (
        [False, True]
    )


# --- notes --------------------------------------------------------------------------------------


def notes_of(error):
    note(error)
    return getattr(error, "__notes__", [])


def test_a_known_error_gets_a_note_and_keeps_its_message():
    error = RuntimeError(TEXT)
    assert notes_of(error) == [THE_LINE]
    assert str(error) == TEXT
    assert notes_of(KeyError("rank")) == []


def test_trouble_with_the_catalogue_does_not_hide_the_error():
    with mock.patch("torchclinic.errors.find", side_effect=OSError):
        assert notes_of(RuntimeError(TEXT)) == []


def test_the_text_of_an_error_holds_its_causes_parts_and_notes_but_no_source():
    try:
        try:
            raise KeyError("first")  # source
        except KeyError as error:
            inner = ValueError("inner")
            inner.add_note("a note")
            raise ExceptionGroup("group", [inner]) from error
    except ExceptionGroup as error:
        shown = text_of(error)
    assert [word in shown for word in ("first", "group", "inner", "a note", "# source")] == (
        [True, True, True, True, False]
    )
    assert shown.index("first") < shown.index("group")


def load_from_a_wrapper():
    nn.Linear(4, 2).load_state_dict(nn.DataParallel(nn.Linear(4, 2)).state_dict())


@pytest.mark.slow
def test_an_error_of_launch_names_the_entry_of_the_ranks_own_error():
    with pytest.raises(LaunchError) as caught:
        launch(load_from_a_wrapper, world_size=1)
    assert caught.value.__notes__ == [THE_LINE]
    assert LINE not in str(caught.value)


def test_a_command_that_pytorch_ends_names_the_entry_after_the_traceback(monkeypatch):
    monkeypatch.setattr(cli, "_doctor", lambda options: load_from_a_wrapper())
    with pytest.raises(RuntimeError) as caught:
        cli.main(["doctor"])
    assert caught.value.__notes__ == [THE_LINE]
