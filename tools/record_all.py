"""Record and measure all that a machine with a GPU can tell, in one command.

    python tools/record_all.py --folder FOLDER
    python tools/record_all.py --folder FOLDER --rehearse    # small sizes, on a CPU

runs the GPU tests, all chapters and the programs of ``benchmarks/gpu``. Each step is a process with
a time limit. A step that fails is noted, and the next one starts. After every step, all that there
is stands in one archive, ``FOLDER.tar.gz``.

Nothing but PyTorch and pytest has to be installed: what else the steps need, and the images, may
lie in a folder that ``tools/pack_offline.py`` has made (``--packed``). A machine that is there for
minutes only: ``--minutes 9`` starts nothing that will not fit, and the same command does what is
left, on another machine after ``--resume FOLDER.tar.gz``. A step that has failed comes last then.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import shutil
import signal
import subprocess
import sys
import tarfile
import time
from collections.abc import Iterable
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, distribution
from json import loads
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "src"), str(ROOT / "tools")]

from machine_facts import write_json

GRACE = 10  # seconds between asking a process to stop and stopping it
RESERVE = 15  # seconds of a session that are kept for the archive


@dataclass(frozen=True)
class Step:
    """A command; with fewer `minutes` left it is not begun, after `limit` minutes it is stopped."""

    name: str
    command: list[str]
    minutes: float
    limit: float


# --- what there is to do ------------------------------------------------------------------------


# Minutes on an H100, as far as one can guess without one.
MEASUREMENTS = {"speed_ladder": 6.0, "copies": 0.5, "inference": 1.0, "memory": 0.5, "sizes": 1.5}


def all_steps(folder: Path, machine: str, rehearse: bool) -> list[Step]:
    """Everything; the chapters come last, since they go on where they were stopped."""
    python = sys.executable
    record = [python, "tools/record.py", machine, "--runs", str(folder / "runs"), "--parts"]
    steps = [Step("tests", [*record, "tests"], 1, 9)]
    for name, minutes in MEASUREMENTS.items():
        command = [python, f"benchmarks/gpu/{name}.py", "--folder", str(folder / "runs" / machine)]
        steps.append(Step(name, command + ["--small"] * rehearse, minutes, 9))
    # A rehearsal shows whether a chapter can run; whether all do, `make test` knows.
    parts = ["01_tensors_on_disk"] if rehearse else ["chapters"]
    return [*steps, Step("record", [*record, *parts], 1, 20)]


def chosen(steps: list[Step], only: str, skip: str) -> list[Step]:
    """All of them, or those that are named.

    Raises
    ------
    ValueError
        If a name is no step's.
    """
    known = [step.name for step in steps]
    wanted, unwanted = (set(filter(None, words.split(","))) for words in (only, skip))
    if unknown := (wanted | unwanted) - set(known):
        raise ValueError(f"no step {', '.join(sorted(unknown))}; there are: {', '.join(known)}")
    return [s for s in steps if (not wanted or s.name in wanted) and s.name not in unwanted]


# --- doing it -----------------------------------------------------------------------------------


class Session:
    """The steps' outcomes in ``session.json``, their output in ``logs``, all in one archive."""

    def __init__(self, folder: Path, archive: Path) -> None:
        self.folder, self.archive, self.file = folder, archive, folder / "session.json"
        (folder / "logs").mkdir(parents=True, exist_ok=True)
        self.outcomes = loads(self.file.read_text("utf-8")) if self.file.exists() else {}

    def left(self, steps: list[Step]) -> list[Step]:
        """What has not passed yet; what was tried before comes last."""
        states = {step.name: self.outcomes.get(step.name, {}).get("ended") for step in steps}
        left = [step for step in steps if states[step.name] != "passed"]
        return sorted(left, key=lambda step: states[step.name] is not None)

    def run(self, steps: list[Step], environment: dict, until: float) -> list[str]:
        """Run them in order; the names of those for which no time was left."""
        no_time = []
        for step in steps:
            remaining = until - time.monotonic() - RESERVE
            if remaining < 60 * step.minutes:
                no_time.append(step.name)
                continue
            self.note(step, "running", 0.0)  # stays, if this program is killed meanwhile
            start = time.monotonic()
            log = self.folder / "logs" / f"{step.name}.txt"
            ended = run(step.command, log, min(60 * step.limit, remaining), environment)
            self.note(step, ended, time.monotonic() - start)
            print(f"{step.name}: {ended}, {time.monotonic() - start:.0f} s", flush=True)
            if ended != "passed":
                print("".join(f"    {line}\n" for line in last_lines(log)), end="", flush=True)
            self.pack()
        return no_time

    def note(self, step: Step, ended: str, seconds: float) -> None:
        self.outcomes[step.name] = {"ended": ended, "seconds": round(seconds, 1)}
        write_json(self.outcomes, self.file)

    def pack(self) -> None:
        """Put the whole folder into the archive: all of it, or the archive stays as it was."""
        temporary = self.archive.with_name(f".{self.archive.name}")
        with tarfile.open(temporary, "w:gz") as archive:
            for path in sorted(self.folder.rglob("*")):
                hidden = any(part.startswith(".") for part in path.relative_to(self.folder).parts)
                if path.is_file() and not hidden:
                    archive.add(path, path.relative_to(self.folder))
        os.replace(temporary, self.archive)


def run(command: list[str], log: Path, limit: float, environment: dict) -> str:
    """Run `command` for `limit` seconds at most, its output in `log`; how it ended."""
    with log.open("w", encoding="utf-8") as output:
        process = subprocess.Popen(
            command, cwd=ROOT, env=environment, start_new_session=True,
            stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT,
        )  # fmt: skip
        try:
            code = process.wait(limit)
        except subprocess.TimeoutExpired:
            end(process)
            return f"stopped after {limit:.0f} s"
        except BaseException:  # this program itself is told to stop
            end(process)
            raise
        end(process)  # what it has left behind
    if code < 0:
        return f"killed by {signal.Signals(-code).name}"
    return "passed" if code == 0 else f"failed with status {code}"


def end(process: subprocess.Popen) -> None:
    """Stop `process` and all processes of its group: kindly first."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, number)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(GRACE)
            if number == signal.SIGKILL:
                return


def last_lines(log: Path, count: int = 8) -> list[str]:
    return log.read_text(encoding="utf-8", errors="replace").splitlines()[-count:]


# --- what the steps find around them -----------------------------------------------------------


def environment_with(packed: Path | None, site: Path) -> dict:
    """This tree's package, and what `packed` brings: installed wheels, images, the commit."""
    paths = [str(ROOT / "src")]
    environment = os.environ | {"TQDM_DISABLE": "1", "PYTHONUNBUFFERED": "1"}
    environment["PATH"] = path_with_torchrun(site.with_name(f"{site.name}-bin"))
    if packed is not None:
        if not (ROOT / ".git").exists():
            shutil.copy(packed / "commit.json", ROOT)
        wheels = [str(file) for file in sorted((packed / "wheels").glob("*.whl")) if lacks(file)]
        if wheels and not site.exists():
            pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-index", "--no-deps"]
            subprocess.run([*pip, "--no-compile", "--target", str(site), *wheels], check=True)
        paths.append(str(site))
        environment["TORCHLADDER_DATA"] = str(packed.resolve())
    paths += filter(None, [os.environ.get("PYTHONPATH")])
    return environment | {"PYTHONPATH": os.pathsep.join(paths)}


def path_with_torchrun(folder: Path) -> str:
    """The PATH on which chapters find `torchrun`, of which `folder` gets one if there is none."""
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)])
    if shutil.which("torchrun", path=path):
        return path
    folder.mkdir(parents=True, exist_ok=True)
    program = folder / "torchrun"
    program.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m torch.distributed.run "$@"\n')
    program.chmod(0o755)
    return f"{folder}{os.pathsep}{path}"


def lacks(wheel: Path) -> bool:
    """Whether no version of what `wheel` holds is installed."""
    try:
        distribution(wheel.name.split("-")[0])
    except PackageNotFoundError:
        return True
    return False


def machine_here(environment: dict) -> str:
    """In a process of its own: CUDA started here would take memory from the steps."""
    program = "import machine_facts as m; print(m.machine_name())"
    command = [sys.executable, "-c", f"import sys; sys.path.insert(0, 'tools'); {program}"]
    told = subprocess.check_output(command, cwd=ROOT, env=environment, text=True)
    return told.splitlines()[-1]


def unpack(archive: Path, folder: Path) -> None:
    """An earlier session's results, unless `folder` has some already."""
    if (folder / "session.json").exists():
        return
    folder.mkdir(parents=True, exist_ok=True)
    with tarfile.open(archive) as packed:
        packed.extractall(folder, filter="data")


def told(steps: Iterable[Step], session: Session, no_time: list[str]) -> int:
    """Say how all of it went; 0 if every step has passed."""
    states = {step.name: session.outcomes.get(step.name, {}).get("ended") for step in steps}
    passed = [name for name, state in states.items() if state == "passed"]
    bad = [f"{n} ({state})" for n, state in states.items() if state and n not in passed]
    print(f"\npassed: {len(passed)} of {len(states)} steps")
    if bad:
        print(f"not passed: {'; '.join(bad)}")
    if no_time:
        print(f"no time was left for: {', '.join(no_time)}. The same command goes on with them.")
    print(f"all results: {session.archive}")
    return 0 if len(passed) == len(states) else 1


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--folder", type=Path, required=True, help="where the results go")
    parser.add_argument("--archive", type=Path, help="the same as one file; else FOLDER.tar.gz")
    parser.add_argument("--resume", type=Path, metavar="ARCHIVE", help="an earlier call's results")
    parser.add_argument("--packed", type=Path, help="what tools/pack_offline.py has made")
    parser.add_argument("--minutes", type=float, default=40, help="end after so long (default 40)")
    parser.add_argument("--only", default="", metavar="A,B", help="tests, record, speed_ladder ...")
    parser.add_argument("--skip", default="", metavar="A,B")
    parser.add_argument("--rehearse", action="store_true", help="small sizes, on a CPU, too")
    options = parser.parse_args(arguments)
    until = time.monotonic() + 60 * options.minutes
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("record_all: was told to stop"))
    folder = options.folder.resolve()
    if options.resume:
        unpack(options.resume, folder)
    session = Session(folder, options.archive or folder.with_name(f"{folder.name}.tar.gz"))
    environment = environment_with(options.packed, folder.with_name(f".{folder.name}-site"))
    machine = machine_here(environment)
    if machine == "cpu" and not options.rehearse:
        parser.error("there is no GPU here that PyTorch can use; --rehearse runs small sizes")
    steps = all_steps(folder, machine, options.rehearse)
    try:
        steps = chosen(steps, options.only, options.skip)
    except ValueError as error:
        parser.error(str(error))
    no_time = []
    try:
        no_time = session.run(session.left(steps), environment, until)
    finally:
        session.pack()
    return told(steps, session, no_time)


if __name__ == "__main__":
    sys.exit(main())
