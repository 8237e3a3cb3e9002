"""Run the GPU tests and all chapters on this machine: what came out is kept for the site.

    python -m tools.record 1xH200
    python -m tools.record 1xH200 --minutes 9 --runs kept    # again, to go on in that folder

The machine's name is a claim; where it is not true, nothing runs. Each part is kept as soon as it
has ended, a chapter that fails as far as it got, and what has passed is not run again. For a
machine without a network, ``make pack`` prepares what is needed (CONTRIBUTING.md).
"""

import argparse
import datetime
import json
import multiprocessing
import os
import re
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import nbformat
from nbclient.exceptions import CellControlSignal

from tools.machine_facts import ROOT, commit, machine_facts
from tools.refresh import NOTEBOOKS, execute, write_notebook, write_text

LIMIT = 300  # seconds: a cell, a file of tests
SAME = ("machine", "gpus", "torch", "commit")  # or it is another run


class Record:
    """A machine's folder: a notebook for each chapter, and ``machine.json`` about all of it."""

    def __init__(self, folder: Path, facts: dict, until: float) -> None:
        self.folder, self.until = folder, until
        self.file, self.clean = folder / "machine.json", cleaner()
        before = json.loads(self.file.read_text("utf-8")) if self.file.exists() else {}
        goes_on = all(before.get(key) == facts[key] for key in SAME)
        note = facts["note"] or before.get("note", "")
        self.facts = before | {"note": note} if goes_on else facts | {"parts": {}}
        folder.mkdir(parents=True, exist_ok=True)

    def run(self, name: str, path: Path) -> None:
        """Run a notebook or a file of tests, unless it has passed or no time is left."""
        start = time.monotonic()
        if self.facts["parts"].get(name, {}).get("ended") == "passed" or self.until - start < 30:
            return
        run = run_notebook if path.suffix == ".ipynb" else run_tests
        outcome = run(path, self.folder / path.name, self.until - 15, self.clean)
        outcome["seconds"] = round(time.monotonic() - start, 1)
        self.facts["parts"][name] = outcome
        write_text(json.dumps(self.facts, indent=1, ensure_ascii=False) + "\n", self.file)
        print(f"{name}: {outcome['ended']}, {outcome['seconds']} s", flush=True)


def seconds(until: float) -> int:
    """For a cell or a file of tests that begins now."""
    return max(1, min(LIMIT, int(until - time.monotonic())))


def run_notebook(path: Path, target: Path, until: float, clean) -> dict:
    """Run one chapter, keep it at `target` as far as it came, and tell how it ended."""
    notebook: Any = nbformat.read(path, as_version=4)
    ended = "passed"
    try:
        execute(notebook, path.parent, lambda: seconds(until))
    except (CellControlSignal, RuntimeError) as error:  # a cell that failed; a kernel that died
        name = getattr(error, "ename", type(error).__name__)
        said = str(getattr(error, "evalue", error)).strip().splitlines() or ["no message"]
        ended = clean(f"{name}: {said[0]}")
    for cell in notebook.cells:
        cell.update(nbformat.from_dict(cleaned(dict(cell), clean)))
    write_notebook(notebook, target)
    return {"ended": ended}


def run_tests(path: Path, target: Path, until: float, clean) -> dict:
    """What pytest says last of a file's tests marked ``gpu`` or ``multigpu``."""
    pytest = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-rf"]
    limit = seconds(until)
    try:
        done = subprocess.run(
            [*pytest, "-m", "gpu or multigpu", path],
            cwd=ROOT, timeout=limit, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        return {"ended": f"not finished after {limit} s"}
    print(done.stdout, flush=True)
    *lines, last = done.stdout.strip().splitlines() or ["no output"]
    failed = [clean(line.removeprefix("FAILED ")) for line in lines if line.startswith("FAILED ")]
    return {"ended": "passed" if not done.returncode else "failed", "told": last, "failed": failed}


def cleaned(value, clean):
    """A cell, or a part of one, with every text in it cleaned; pictures stay as they are."""
    if isinstance(value, str):
        return clean(value)
    if isinstance(value, list):
        return [cleaned(item, clean) for item in value]
    if isinstance(value, dict):
        kept = {"image/png", "source", "id", "metadata"}
        return {k: v if k in kept else cleaned(v, clean) for k, v in value.items()}
    return value


def cleaner():
    """A function that takes this machine's paths out of a text, and its name where it is one."""
    places = {str(ROOT): "<repository>", sys.prefix: "<environment>", str(Path.home()): "~"}
    places |= {tempfile.gettempdir(): "<temporary>", "/tmp": "<temporary>"}
    words = [(re.escape(path), word) for path, word in places.items() if len(path) > 1]
    words.sort(key=lambda pair: -len(pair[0]))
    for name in dict.fromkeys([socket.gethostname(), socket.gethostname().partition(".")[0]]):
        host = re.escape(name)
        # A host may be called "torch": beside a port or behind a user's name it is surely one.
        words += [(rf"(?<![\w.-]){host}(?=\]?:\d{{4}})|(?<=\w@){host}", "<host>")]
        if len(name) > 5 and re.search(r"[\d.-]", name):  # no word of a chapter is like this
            words += [(rf"(?<![\w.-]){host}(?![\w-])", "<host>")]
    words += [(r"GPU-[0-9a-f]{8}(-[0-9a-f]{4,12}){4}", "GPU-<uuid>")]

    def clean(text: str) -> str:
        for pattern, word in words:
            text = re.sub(pattern, word, text)
        return text

    return clean


def parts_of_the_book() -> dict[str, Path]:
    """The files with GPU tests, then the notebooks."""
    tests = [
        path
        for path in sorted((ROOT / "tests").glob("**/test_*.py"))
        if re.search(r"\bmark\.(multi)?gpu\b", path.read_text(encoding="utf-8"))
    ]
    files = {str(path.relative_to(ROOT)): path for path in tests}
    return files | {path.stem: path for path in sorted(NOTEBOOKS.glob("*.ipynb"))}


def prepare_environment(folder: Path) -> None:
    """For the processes to come: this tree's package, no progress bars, a ``torchrun``."""
    paths = [str(ROOT / "src"), *filter(None, [os.environ.get("PYTHONPATH")])]
    os.environ.update(TQDM_DISABLE="1", PYTHONPATH=os.pathsep.join(paths))
    os.environ["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    if not shutil.which("torchrun"):
        program = folder / "torchrun"
        program.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m torch.distributed.run "$@"\n')
        program.chmod(0o755)
        os.environ["PATH"] = os.pathsep.join([str(folder), os.environ["PATH"]])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("machine", help="what this machine is: cpu, 1xH200, 2xT4 ...")
    parser.add_argument("--runs", type=Path, default=ROOT / "book/runs", metavar="FOLDER")
    parser.add_argument("--minutes", type=float, default=60, help="begin nothing after so long")
    parser.add_argument("--only", nargs="+", default=[""], metavar="WORD", help="names, in order")
    parser.add_argument(
        "--note", default="", help="a sentence for readers, such as what ran beside"
    )
    options = parser.parse_args()
    until = time.monotonic() + 60 * options.minutes
    # In a process of its own: CUDA started here would take memory from the chapters.
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        facts = pool.apply(machine_facts)
    if options.machine != facts["machine"]:
        parser.error(f"this machine is {facts['machine']!r}, not {options.machine!r}")
    facts |= {"date": datetime.date.today().isoformat(), "commit": commit(), "note": options.note}
    of_the_book = parts_of_the_book().items()
    parts = {name: path for word in options.only for name, path in of_the_book if word in name}
    with tempfile.TemporaryDirectory() as programs:
        prepare_environment(Path(programs))
        record = Record(options.runs / options.machine, facts, until)
        for name, path in parts.items():
            record.run(name, path)
    outcomes = record.facts["parts"]
    passed = [name for name in parts if outcomes.get(name, {}).get("ended") == "passed"]
    print(f"{len(passed)} of {len(parts)} parts have passed; {record.folder} holds them.")
    return 0 if len(passed) == len(parts) else 1


if __name__ == "__main__":
    sys.exit(main())
