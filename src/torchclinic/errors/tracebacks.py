"""Under a traceback: the line that names its entry of the catalogue."""

import sys
import traceback
from contextlib import suppress
from pathlib import Path

from torchclinic.errors.entries import Error, published
from torchclinic.errors.finding import find

LINE = "Why, and what to do: torchclinic explain"


def note(error: BaseException) -> None:
    """Let the traceback of `error` end by naming its entry, unless a shell does so (`watch`)."""
    with suppress(Exception):  # whatever happens here, `error` is what the user must see
        shell = "IPython" in sys.modules and sys.modules["IPython"].get_ipython()
        if not hasattr(shell, "torchclinic_watch") and (found := find(_text_of(error))):
            error.add_note(f"{LINE} {found[0].error.id}")


def _text_of(error: BaseException) -> str:
    """What a traceback says, without its frames: of causes, of a group's parts, and in notes."""
    return "".join(traceback.format_exception(error, limit=0))


def watch(shell) -> None:
    """Name the entry under each traceback of an IPython shell."""
    folder = Path.cwd()  # of the notebook, until a cell changes it
    # Not the error itself, which would keep all that its frames hold.
    last = id(getattr(sys, "last_value", None))

    def name_entry(result: object) -> None:
        nonlocal last
        error = getattr(sys, "last_value", None)  # also of %run and the like, whose cell succeeds
        new, last = id(error) != last, id(error)
        if new and error is not None and (found := find(_text_of(error))):
            _show(found[0].error, folder)

    if not hasattr(shell, "torchclinic_watch"):  # a module that is reloaded is there already
        shell.torchclinic_watch = name_entry
        shell.events.register("post_run_cell", name_entry)


def _show(error: Error, folder: Path) -> None:
    from IPython.display import display

    command, name = f"`torchclinic explain {error.id}`", f"{error.page}.ipynb"
    here = (folder / name).exists()  # a notebook of this book
    if link := f"{name}#{error.id}" if here else published(f"{error.page}#{error.id}"):
        command = f"[{error.id}]({link}), or {command}"
    rich = f"Why, and what to do: {command}"
    display({"text/plain": f"{LINE} {error.id}", "text/markdown": rich}, raw=True)
