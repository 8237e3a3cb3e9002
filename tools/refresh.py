"""Run the chapters in order, each in a clean kernel, and write them back normalised.

``make refresh`` calls this. A diff then shows only what changed: cell ids depend on a cell's place
(in the error clinic, on its entry), metadata says nothing but where and when the outputs were made,
neighbouring stream outputs are merged, and the traceback of a cell that fails on purpose keeps the
frames of the page and the whole message.
"""

import datetime
import hashlib
import json
import os
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import nbformat
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError

from tools.clinic_notebooks import clinic_notebook, with_new_tables
from tools.machine_facts import machine_facts
from torchclinic.writing import atomic_file

NOTEBOOKS = Path(__file__).resolve().parent.parent / "notebooks"
METADATA = {
    "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
    # Without language_info the site leaves cells uncoloured; without its version, a diff is quiet.
    "language_info": {"file_extension": ".py", "name": "python", "pygments_lexer": "ipython3"},
}


def refresh(path: Path) -> None:
    """Execute the notebook at `path` and replace it by its normalised self.

    Raises
    ------
    nbclient.exceptions.CellExecutionError
        If a cell fails that is not tagged ``raises-exception``; the file is then left as it was.
    ValueError
        If a cell that has this tag raises nothing; likewise.
    """
    if path.stem.startswith("errors_"):
        notebook = clinic_notebook(path.stem.removeprefix("errors_"))
    else:
        chapter: Any = nbformat.read(path, as_version=4)
        for number, cell in enumerate(chapter.cells):
            cell.id = f"cell-{number:02d}"
        notebook = chapter
    execute(notebook, path.parent)
    for cell in notebook.cells:
        expected = "raises-exception" in cell.metadata.get("tags", ())
        if expected and all(output.output_type != "error" for output in cell.outputs):
            told = "is tagged raises-exception and raised nothing; the file was not written"
            raise ValueError(f"{path}: cell {cell.id} {told}:\n{cell.source}")
    write_notebook(notebook, path)


def execute(notebook: nbformat.NotebookNode, folder: Path, seconds: Callable = lambda: 300) -> None:
    """Run `notebook` in a clean kernel in `folder` and normalise it, also if a cell fails.

    No cell may take longer than `seconds` says when it begins. What a failing cell raises is
    raised; the cells after it have no outputs then.
    """
    cells = [cell for cell in notebook.cells if cell.cell_type == "code"]
    for cell in cells:
        cell.outputs, cell.execution_count = [], None
    client = Recorder(
        notebook,
        timeout_func=lambda cell: seconds(),
        kernel_name="python3",
        resources={"metadata": {"path": str(folder)}},
        # Otherwise every cell's metadata would carry the time at which it ran.
        record_timing=False,
        coalesce_streams=True,
    )
    try:
        client.execute()
    finally:
        run = machine_facts() | {"date": datetime.date.today().isoformat()}
        notebook.metadata = nbformat.from_dict(METADATA | {"run": run})
        notebook.nbformat, notebook.nbformat_minor = 4, 5
        for cell in notebook.cells:
            cell.source = cell.source.rstrip()
        for count, cell in enumerate(cells, 1):
            if cell.execution_count:  # the kernel also counts what was repeated
                cell.execution_count = count
            cell.outputs = [normalise(output, cell.execution_count) for output in cell.outputs]
        notebook.metadata["run"]["outputs"] = digest(notebook)


def digest(notebook: nbformat.NotebookNode) -> str:
    """Of what the cells said, so that a note of a run is not taken for that of other outputs.

    Left out is what is made from files, and so made again when these change: tables, diffs.
    """
    outputs = (output for cell in notebook.cells for output in cell.get("outputs", ()))
    said = [output for output in outputs if "text/markdown" not in output.get("data", {})]
    return hashlib.sha256(json.dumps(said, sort_keys=True).encode()).hexdigest()[:16]


class Recorder(NotebookClient):
    """Runs a cell again, twice at most, whose claim on measured values failed."""

    async def async_execute_cell(self, cell, cell_index, *args, **options):
        tries_left = 2
        while True:
            try:
                return await super().async_execute_cell(cell, cell_index, *args, **options)
            except CellExecutionError as error:
                spoiled = "when_recorded(" in cell.source and error.ename == "AssertionError"
                if not spoiled or not tries_left:
                    raise
                print(f"{cell.id} again: what it measured is not what the page says", flush=True)
                tries_left -= 1


def write_notebook(notebook: nbformat.NotebookNode, path: Path) -> None:
    """Write `notebook` to `path`: all of it, or nothing."""
    write_text(nbformat.writes(notebook, ensure_ascii=False).rstrip("\n") + "\n", path)


def normalise(output: nbformat.NotebookNode, count: int | None) -> nbformat.NotebookNode:
    """The same output without what differs from run to run."""
    output.pop("transient", None)
    if "execution_count" in output:
        output.execution_count = count
    if output.output_type == "error":
        output.traceback = own_frames("\n".join(output.traceback), output.ename).split("\n")
    return output


def own_frames(traceback: str, name: str) -> str:
    """IPython's traceback without the frames of installed libraries; `name` is the exception's."""
    ansi = r"(?:\x1b\[[\d;]*m)*"
    header, *frames = re.split(rf"\n+(?={ansi}(?:Cell|File)\b)", traceback)
    # A syntax error comes without the line that starts the message.
    parts = re.split(rf"\n+(?={ansi}{name}\b)", frames[-1], maxsplit=1) if frames else []
    if len(parts) < 2:
        return traceback
    frames[-1], message = parts
    kept = [frame for frame in frames if re.match(rf"{ansi}Cell\b", frame)]
    return "\n".join([header, *kept, "", message])


def write_text(text: str, path: Path) -> None:
    """Write `text` to `path`: all of it, or nothing."""
    with atomic_file(path) as temporary:
        temporary.write_text(text, encoding="utf-8")


def main(names: list[str]) -> None:
    # A child's progress bars and colours are for terminals, not for a page. The other is that of
    # torchladder.measuring.when_recorded.
    os.environ.update(TQDM_DISABLE="1", TORCHLADDER_RECORDING="1")
    for path in [Path(name) for name in names] or sorted(NOTEBOOKS.glob("*.ipynb")):
        refresh(path)
        print(f"refreshed {path.name}", flush=True)
    for path, notebook in with_new_tables(sorted(NOTEBOOKS.glob("[0-9]*.ipynb"))):
        write_notebook(notebook, path)
        print(f"renewed the table of errors in {path.name}", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
