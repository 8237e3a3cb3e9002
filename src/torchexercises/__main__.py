"""Judge what a learner hands in: a file of Python, or a notebook, in which check cells may be left.

``python -m torchexercises answers.py average_gradients --out verdict.json`` prints a line for each
exercise, and ends with 0 if all are right, else with 1. Without names it judges what is defined.
The hand-in runs in a process of its own, and each answer in others, under one limit of time.
"""

import argparse
import base64
import inspect
import io
import json
import linecache
import math
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import redirect_stdout, suppress
from pathlib import Path

import torchexercises as check
from torchclinic.writing import atomic_file

Cells = list[tuple[str, str]]  # the name of each in a traceback, and its source


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m torchexercises", description=__doc__)
    parser.add_argument("file", type=Path, help="a file.py, or a notebook.ipynb")
    parser.add_argument("names", nargs="*", metavar="name", help="default: all that it defines")
    parser.add_argument("--cases", type=Path, help="a file of exercises of your own")
    parser.add_argument("--out", type=Path, help="a file that gets the verdicts as JSON")
    parser.add_argument("--limit", type=float, default=300, help="seconds for all; default: 300")
    options = parser.parse_args()
    known, end = check.all_exercises(), time.monotonic() + options.limit
    books = set(known)
    try:
        cells = read_cells(options.file)
        cases = options.cases.read_bytes() if options.cases else b""
    except OSError as error:
        parser.error(f"{error.filename}: {error.strerror}")
    except (ValueError, KeyError, TypeError):
        parser.error(f"{options.file} is no notebook")
    read = [path.resolve() for path in (options.file, options.cases) if path]
    if options.out and options.out.resolve() in read:
        parser.error(f"--out {options.out} would replace a file that is read")
    if cases:  # as if it lay beside the book's cases: no traceback shows it
        exec(compile(cases, f"{check.HERE}/{options.cases.name}", "exec"), {"__name__": "cases"})
    if unknown := set(options.names) - set(known):
        parser.error(f"no exercise is called {' or '.join(sorted(unknown))}")
    names = options.names or [name for name in known if name not in books]
    wanted = sorted({part for name in names or known for part in parameters(name)})
    answers, failure = load(cells, wanted, options.file.parent, options.limit)
    names = names or [name for name in known if {*parameters(name)} <= answers.keys()]
    verdicts = {}
    for name in names:
        given = [answers.get(part) for part in parameters(name)]
        missing = [part for part in parameters(name) if part not in answers]
        left = end - time.monotonic()
        if missing:
            unwritten = f"{check.NOT_WRITTEN}: the hand-in defines no {missing[0]}"
            right, reason = False, failure or unwritten
        elif left <= 0:
            right, reason = False, f"not judged: {options.limit:g} s were over"
        else:
            with redirect_stdout(io.StringIO()):  # `launch` shows what a rank printed that failed
                right, reason = known[name].judge(*given, limit=left, show="none")
        verdicts[name] = {"right": right, "reason": reason}
        print(f"{name}: {in_one_line(reason)}", flush=True)
    if options.out:
        try:
            with atomic_file(options.out) as file:
                Path(file).write_text(json.dumps(verdicts, indent=1) + "\n")
        except OSError as error:
            parser.error(f"--out {options.out}: {error.strerror}")
    if not verdicts:
        why = failure or "all functions of one must be there"
        print(in_one_line(f"{options.file} defines no exercise: {why}"))
    return 0 if verdicts and all(verdict["right"] for verdict in verdicts.values()) else 1


def in_one_line(text: str, most: int = 400) -> str:
    """A hand-in's words, so that they can forge no line and send no code to a terminal."""
    text = " ".join(text.split())
    text = "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)
    return text if len(text) <= most else f"{text[:most]}..."


def parameters(name: str) -> list[str]:
    """What a hand-in must define for the exercise."""
    return list(inspect.signature(check.EXERCISES[name].cases).parameters)


def read_cells(path: Path) -> Cells:
    """A notebook's cells, or those of its export, or the whole file; not the book's solutions."""
    text = path.read_text(encoding="utf-8", errors="replace")
    if path.suffix == ".ipynb":
        cells = [c["source"] for c in json.loads(text)["cells"] if c["cell_type"] == "code"]
        cells = [(f"cell {i} of {path.name}", "".join(c)) for i, c in enumerate(cells, 1)]
    else:
        parts = re.split(r"^(?=# In\[.*\]:)", text, flags=re.MULTILINE)
        lines = [0, *(part.count("\n") for part in parts)]
        # In front of each as many empty lines as the others have, for the numbers in a traceback.
        cells = [(str(path), "\n" * sum(lines[: i + 1]) + part) for i, part in enumerate(parts)]
    return [cell for cell in cells if len(cells) == 1 or "solution=True)" not in cell[1]]


def load(cells: Cells, names: list[str], folder: Path, limit: float) -> tuple[dict, str]:
    """What the cells define, pickled, by name; None for a stub. And what failed last, or ''."""
    for name, source in cells:  # of a notebook: `launch` shows its lines
        if not os.path.exists(name):
            linecache.cache[name] = (len(source), None, source.splitlines(keepends=True), name)
    with tempfile.TemporaryDirectory() as temporary:
        out, seconds = Path(temporary, "answers.json"), str(math.ceil(limit))
        command = [sys.executable, "-m", "torchexercises.loading", str(out), seconds, *names]
        # What a hand-in prints might look like a verdict.
        child = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
            text=True, cwd=folder, start_new_session=True,
        )  # fmt: skip
        try:
            child.communicate(json.dumps(cells), timeout=limit)
        except subprocess.TimeoutExpired:
            return {}, f"the hand-in itself, before any call, still runs after {limit:g} s"
        finally:
            with suppress(ProcessLookupError):
                os.killpg(child.pid, signal.SIGKILL)
            child.wait()
        with suppress(OSError, ValueError, KeyError):
            loaded = json.loads(out.read_text())
            pickled = {n: base64.b85decode(a) or None for n, a in loaded["answers"].items()}
            return pickled, loaded["failure"]
    return {}, f"the hand-in ended its own process, with status {child.returncode}"


if __name__ == "__main__":
    sys.exit(main())
