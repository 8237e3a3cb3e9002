"""Run every chapter and the GPU tests on this machine and keep what came out.

``make record MACHINE=1xH200`` calls this. It writes ``runs/1xH200/``: the chapters as they ran,
and ``machine.json``, which says on what, when and by which command. The machine's name is a claim;
where it is not true, nothing runs and nothing is written. A chapter that fails is kept as far as
it got.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable, Iterator
from pathlib import Path

import nbformat
from machine_facts import commit, machine_facts, machine_name, write_json
from nbclient.exceptions import CellControlSignal
from refresh import NOTEBOOKS, execute, write_notebook

ROOT = NOTEBOOKS.parent
CELL_TIMEOUT = 300
TESTS_TIMEOUT = 300  # a file
PARTS = ("notebooks", "gpu_tests")


def data_sets() -> dict[str, str]:
    """Which images the chapters get here."""
    from torchladder import data

    here = {"fashion_mnist_small": "bundled" if data.BUNDLED.exists() else "cut from the full set"}
    for name in ("fashion_mnist", "cifar10"):
        try:
            data.load(name)
            here[name] = "full"
        except (OSError, ValueError):
            here[name] = "not here"
    return here


# --- running ------------------------------------------------------------------------------------


def record(machine: str, runs: Path, command: str, parts: list[str] | None = None) -> bool:
    """Write ``runs/machine``; True if all chapters and tests that ran have passed.

    `parts` are names of chapters and files of tests, or ``chapters`` and ``tests`` for all of them:
    only these run, if they have not passed before. Each is kept as soon as it has ended.

    Raises
    ------
    ValueError
        If this machine is not `machine`, if there is no such part, or if the earlier run had
        other software; nothing is written then.
    """
    chapters = {path.stem: path for path in sorted(NOTEBOOKS.glob("*.ipynb"))}
    files = gpu_test_files()
    groups = {"chapters": list(chapters), "tests": files}
    if unknown := set(parts or []) - {*groups, *chapters, *files}:
        raise ValueError(f"no chapter and no file of GPU tests: {', '.join(sorted(unknown))}")
    facts = facts_of(machine, command)
    runs.mkdir(parents=True, exist_ok=True)
    if parts is not None:
        facts, differs = completed(facts, runs / machine)
        passed = {name for kind in PARTS for name, o in facts[kind].items() if is_good(o)}
        names = [name for part in parts for name in groups.get(part, [part])]
        (runs / machine).mkdir(exist_ok=True)
        todo = [name for name in names if name not in passed]
        run_parts(facts, runs / machine, todo, chapters, differs)
        return all(is_good(outcome) for kind in PARTS for outcome in facts[kind].values())
    with tempfile.TemporaryDirectory(dir=runs, prefix=".") as temporary:
        new = Path(temporary) / machine
        new.mkdir()
        for file in (runs / machine).glob("*.json"):  # measurements stay
            shutil.copy(file, new)
        facts |= {kind: {} for kind in PARTS}
        run_parts(facts, new, [*chapters, *files], chapters, {})
        put_in_place(new, runs / machine, Path(temporary) / "before")
    return all(is_good(outcome) for kind in PARTS for outcome in facts[kind].values())


def run_parts(facts: dict, folder: Path, names: list[str], chapters: dict, differs: dict) -> None:
    """Run chapters and files of tests, and keep each in `folder` as soon as it has ended."""
    clean = cleaner()
    write_json(facts, folder / "machine.json")
    for name in names:
        if name in chapters:
            kind, outcome = "notebooks", run(chapters[name], folder / chapters[name].name, clean)
            ended = "passed" if outcome["passed"] else f"FAILED: {outcome['error']}"
            print(f"{name}: {ended}, {outcome['seconds']} s", flush=True)
        else:
            kind, outcome = "gpu_tests", cleaned(run_gpu_tests(name), clean)
            print(f"{name}: {outcome}", flush=True)
        facts[kind] = dict(sorted({**facts[kind], name: outcome | differs}.items()))
        write_json(facts, folder / "machine.json")


def is_good(outcome: dict) -> bool:
    """Whether a chapter has passed, or no test of a file has failed."""
    return (
        outcome.get("passed", 0) is not False
        and not outcome.get("failed")
        and ("error" not in outcome)
    )


def facts_of(machine: str, command: str) -> dict:
    """What ``machine.json`` says besides the outcomes; ValueError if this is not `machine`."""
    # In a process of its own: a CUDA context here would take memory from the chapters.
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        facts = pool.apply(machine_facts)
        if machine != facts["machine"]:
            gpus = "; ".join(facts["gpus"]) or "no GPU that PyTorch can use"
            raise ValueError(
                f"{machine!r} is not here: this machine has {gpus}. What runs here can be recorded "
                f"as {facts['machine']!r}. Nothing was run or written."
            )
        return facts | {"command": command} | commit() | {"data": pool.apply(data_sets)}


def completed(facts: dict, folder: Path) -> tuple[dict, dict]:
    """What `folder` tells of a run that is to be completed, and what is different now.

    Raises
    ------
    ValueError
        If another machine or other software made it.
    """
    file = folder / "machine.json"
    if not file.exists():
        return facts | {kind: {} for kind in PARTS}, {}
    earlier = json.loads(file.read_text(encoding="utf-8"))
    same = ("machine", "gpus", "cuda", "torch", "torchvision", "python")
    if other := [f"{name} {earlier[name]}" for name in same if earlier[name] != facts[name]]:
        raise ValueError(f"{folder} is from elsewhere ({', '.join(other)}): name another folder")
    may_differ = ("commit", "clean", "driver", "date")
    return earlier, {name: facts[name] for name in may_differ if facts[name] != earlier[name]}


def put_in_place(new: Path, target: Path, before: Path) -> None:
    """Make `new` the folder `target`, whose present content is moved to `before`.

    If that fails, the content of `target` is as it was.
    """
    try:
        if target.exists():
            os.replace(target, before)
        os.replace(new, target)
    except BaseException:
        if before.exists():
            os.replace(before, target)
        raise


def run(path: Path, target: Path, clean: Callable[[str], str]) -> dict:
    """Run one chapter, keep it at `target`, and tell how it ended."""
    notebook = nbformat.read(path, as_version=4)
    reached, error = 0, None

    def reach(cell, cell_index):
        nonlocal reached
        reached = cell_index

    start = time.perf_counter()
    try:
        execute(notebook, path.parent, timeout=CELL_TIMEOUT, on_cell_execute=reach)
    # A cell that failed or took too long; a kernel that died or never started.
    except (CellControlSignal, RuntimeError) as problem:
        name = getattr(problem, "ename", type(problem).__name__)
        message = str(getattr(problem, "evalue", problem)).strip() or "no message"
        error = clean(f"{name}: {message.splitlines()[0]}")
    seconds = round(time.perf_counter() - start, 1)
    for cell in notebook.cells:
        if cell.cell_type == "code":
            cell.outputs = [cleaned(output, clean) for output in cell.outputs]
    write_notebook(notebook, target)
    outcome = {"passed": error is None, "seconds": seconds}
    if error:
        source = notebook.cells[reached].source.splitlines()
        outcome |= {"cell": notebook.cells[reached].id, "code": source[0] if source else ""}
        outcome["error"] = error
    elif quiet := [cell.id for cell in notebook.cells if should_have_failed(cell)]:
        outcome["did_not_fail"] = quiet
    return outcome


def should_have_failed(cell: nbformat.NotebookNode) -> bool:
    failed = any(output.output_type == "error" for output in cell.get("outputs", []))
    return "raises-exception" in cell.metadata.get("tags", []) and not failed


def cleaner() -> Callable[[str], str]:
    """A function that takes this machine's name and its paths out of a text."""
    places = dict.fromkeys(["/tmp", tempfile.gettempdir()], "<temporary>")
    places[str(ROOT)] = "<repository>"
    if sys.prefix != sys.base_prefix:
        places[sys.prefix] = "<environment>"
    places[str(Path.home())] = "~"
    places |= {os.path.realpath(path): word for path, word in places.items()}
    patterns = {
        rf"(?<![\w.>~]){re.escape(path)}(?![\w-])": word
        for path, word in sorted(places.items(), key=lambda place: -len(place[0]))
        if len(path) > 1
    }
    patterns |= dict.fromkeys(patterns_of_host(socket.gethostname()), "<host>")
    patterns[r"GPU-[0-9a-f]{8}(-[0-9a-f]{4,12}){4}"] = "GPU-<uuid>"

    def clean(text: str) -> str:
        for pattern, word in patterns.items():
            text = re.sub(pattern, word, text)
        return text

    return clean


def patterns_of_host(full: str) -> Iterator[str]:
    """Where this machine's name stands in a text.

    A host may be called ``torch`` or ``cpu``. Where such a word stands alone it is the book's own;
    only beside a port or behind a user's name is it surely the host.
    """
    host = re.escape(full.split(".")[0])
    if host in ("", "localhost"):
        return
    if "." in full:
        yield rf"(?<![\w.-]){re.escape(full)}(?![\w-])"
    yield rf"(?<![\w.-]){host}(?=\]?:\d{{4}})|(?<=\w@){host}(?![\w-])"
    if not re.search(rf"\b{host}\b", words_of_the_book(), re.IGNORECASE):
        yield rf"(?<![\w.-]){host}(\.[\w-]+)*(?![\w-])"


def words_of_the_book() -> str:
    """All chapters as they are committed, without pictures, in whose code any word may occur."""
    text = "\n".join(path.read_text(encoding="utf-8") for path in NOTEBOOKS.glob("*.ipynb"))
    return re.sub(r"[\w+/=]{100,}", "", text)


def cleaned(value, clean: Callable[[str], str]):
    """An output, or a part of one, with every text in it cleaned; pictures stay as they are."""
    if isinstance(value, str):
        return clean(value)
    if isinstance(value, list):
        return [cleaned(item, clean) for item in value]
    if isinstance(value, dict):
        kept = ("image/png", "image/jpeg", "output_type", "name")
        parts = {k: v if k in kept else cleaned(v, clean) for k, v in value.items()}
        return nbformat.from_dict(parts)
    return value


def gpu_test_files() -> list[str]:
    """The files with tests marked ``gpu`` or ``multigpu``, of the package and its programs."""
    # Tests of the site and of these tools need what builds it, and no GPU.
    others = [ROOT / "tests" / name for name in ("site", "tools")]
    return [
        str(path.relative_to(ROOT))
        for path in sorted((ROOT / "tests").rglob("test_*.py"))
        if not any(path.is_relative_to(folder) for folder in others)
        and re.search(r"\bmark\.(multi)?gpu\b", path.read_text(encoding="utf-8"))
    ]


def run_gpu_tests(file: str) -> dict:
    """How many of a file's tests marked ``gpu`` or ``multigpu`` passed, and which failed."""
    with tempfile.TemporaryDirectory() as folder:
        return told_by_pytest(file, Path(folder, "tests.xml"))


def told_by_pytest(file: str, report: Path) -> dict:
    options = ["-q", "-p", "no:cacheprovider", "-m", "gpu or multigpu", f"--junitxml={report}"]
    try:
        done = subprocess.run(
            [sys.executable, "-m", "pytest", *options, file],
            cwd=ROOT, timeout=TESTS_TIMEOUT, text=True,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        return {"error": f"not finished after {TESTS_TIMEOUT} s"}
    print(done.stdout)
    if not report.exists():
        return {"error": done.stdout.strip().splitlines()[-1] if done.stdout else "no report"}
    cases = list(ElementTree.parse(report).iter("testcase"))
    failed = [case for case in cases if {"failure", "error"} & {part.tag for part in case}]
    skipped = [case for case in cases if case.find("skipped") is not None]
    return {
        "passed": len(cases) - len(failed) - len(skipped),
        "failed": len(failed),
        "skipped": len(skipped),
        "names_of_failed": [f"{case.get('classname')}.{case.get('name')}" for case in failed],
    }


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("machine", nargs="?", help="what this machine is: cpu, 1xH200, 2xT4 ...")
    parser.add_argument("--runs", type=Path, default=ROOT / "runs", metavar="FOLDER")
    told = "go on with a record: chapters, tests, or names; what has passed is left out"
    parser.add_argument("--parts", nargs="+", metavar="NAME", help=told)
    options = parser.parse_args(arguments)
    if not options.machine:
        parser.error(f"say which machine this is; it looks like {machine_name()!r}")
    # A child's progress bars and colours are for terminals. The package is this tree's own, whether
    # or not one is installed.
    paths = [str(ROOT / "src"), *filter(None, [os.environ.get("PYTHONPATH")])]
    os.environ.update(TQDM_DISABLE="1", PYTHONPATH=os.pathsep.join(paths))
    sys.path.insert(0, str(ROOT / "src"))
    # Stopped like this, nbclient still ends its kernel.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("record: was told to stop"))
    command = f"python tools/record.py {options.machine}"
    try:
        passed = record(options.machine, options.runs, command, options.parts)
    except ValueError as error:
        print(f"record: {error}", file=sys.stderr)
        return 2
    folder = options.runs / options.machine
    print(f"Written: {folder}. {'All passed.' if passed else 'Not all passed; the pages say so.'}")
    return 0 if passed else 1


if __name__ == "__main__":
    sys.exit(main())
