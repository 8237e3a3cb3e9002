"""The line under a traceback: of ``%load_ext torchclinic``, and in the notes of errors."""

from unittest import mock

import nbformat
import pytest
from nbclient import NotebookClient
from running import ROOT, text_of

from torchclinic import errors
from torchclinic.errors import note, tracebacks
from torchclinic.errors.tracebacks import LINE

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
LOADED = [LOAD, CHAINED, GROUP, NOTED, RUN, LAUNCH, LOAD]
UNRELATED = ["1 / 0", "{}['rank']", "def f(:", "print('well')", "%no_such_magic"]


@pytest.mark.slow
def test_in_a_kernel_each_known_error_is_followed_by_one_line_and_no_other_by_any(tmp_path):
    begin = ["from torch import nn\nfrom torchladder.launching import launch", LOAD]
    begin += ["%load_ext torchclinic\n%load_ext torchclinic\n%reload_ext torchclinic"]
    sources = [*begin, *LOADED, *UNRELATED]
    book = nbformat.v4.new_notebook(cells=list(map(nbformat.v4.new_code_cell, sources)))
    where = {"metadata": {"path": str(tmp_path)}}
    NotebookClient(book, allow_errors=True, resources=where).execute()
    answers = [(cell.source, [*map(text_of, cell.outputs)]) for cell in book.cells]
    assert not any(LINE in text for _, outputs in answers[:3] for text in outputs)
    for source, outputs in answers[3:]:
        known = source in LOADED
        assert "".join(outputs).count(LINE) == known, source
        assert not known or outputs[-1] == THE_LINE, source


def test_the_link_is_there_only_where_the_notebook_of_the_entry_is(tmp_path):
    shown = []
    with mock.patch("IPython.display.display", lambda data, raw: shown.append(data)):
        for folder in (tmp_path, ROOT / "notebooks"):
            tracebacks._show(errors.catalogue()["module-prefix"], folder)
    assert [data["text/plain"] for data in shown] == [THE_LINE] * 2
    link = "errors_states.ipynb#module-prefix"
    assert [link in data["text/markdown"] for data in shown] == [False, True]


# --- notes --------------------------------------------------------------------------------------


def notes_of(error):
    note(error)
    return getattr(error, "__notes__", [])


def test_a_known_error_gets_a_note_and_keeps_its_message():
    error = RuntimeError(TEXT)
    assert notes_of(error) == [THE_LINE]
    assert str(error) == TEXT
    assert notes_of(KeyError("rank")) == []
    with mock.patch("torchclinic.errors.tracebacks.find", side_effect=OSError):
        assert notes_of(RuntimeError(TEXT)) == []


def test_the_source_in_a_traceback_is_not_read():
    with pytest.raises(KeyError) as caught:
        raise KeyError("first")  # Unexpected key(s) in state_dict: "module.weight".
    assert notes_of(caught.value) == []
