"""Kill a process again and again while it saves; is the last good checkpoint ever lost?

A process does nothing but save. At a random instant it gets SIGKILL, which no program can see
coming. Then every file is read back, and the next process goes on from the newest.
"""

from __future__ import annotations

import contextlib
import copy
import io
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from results import Result
from torch import nn

from torchclinic.writing import LEFTOVER
from torchladder import checkpoint


def kills(count: int = 200, *, seed: int = 0, longest: float = 0.05) -> dict[str, int]:
    """Kill `count` processes, each up to `longest` seconds after its first save.

    Returns
    -------
    dict
        ``kills``; ``lost``, how often the last file that was reported saved, or a later one, was
        not there whole; ``files checked``; ``half-written files``, those that a kill left behind.
    """
    result = {"kills": 0, "lost": 0, "files checked": 0, "half-written files": 0}
    wait = random.Random(seed)
    command = [sys.executable, __file__]
    with (
        tempfile.TemporaryDirectory() as folder,
        subprocess.Popen(
            [*command, folder], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        ) as server,
    ):
        for _ in range(count):
            print(file=server.stdin, flush=True)
            pid = int(server.stdout.readline())
            saved = int(server.stdout.readline())
            time.sleep(wait.uniform(0, longest))
            os.kill(pid, signal.SIGKILL)
            while (line := server.stdout.readline()) != "dead\n":
                saved = int(line)
            files = [*checkpoint.files_in(folder), *Path(folder).glob("best.pt")]
            result["kills"] += 1
            result["lost"] += not all(map(is_right, files)) or newest_step(folder) < saved
            result["files checked"] += len(files)
            # Of this kill: the next save removes it.
            result["half-written files"] += len(list(Path(folder).glob(f".*{LEFTOVER}")))
        server.stdin.close()
    return result


def is_right(path: Path) -> bool:
    """Whether the file is whole and each number in it is the step that it was saved at."""
    parts = {"model": nn.Linear(500, 500), "average": nn.Linear(500, 500)}
    try:
        with contextlib.redirect_stderr(io.StringIO()):
            step = checkpoint.load(path, parts)["step"]
    except ValueError:  # its checksums are wrong, for example
        return False
    return bool((parts["model"].weight == step).all())


def newest_step(folder: str) -> int:
    return int(checkpoint.files_in(folder)[-1].stem.removeprefix("step_"))


def serve(folder: str) -> None:
    """For each line read, fork a process that saves until it dies; torch is imported but once."""
    for _ in sys.stdin:
        pid = os.fork()
        if not pid:
            try:
                save_for_ever(folder)
            finally:
                os._exit(1)
        os.waitpid(pid, 0)
        print("dead", flush=True)


def save_for_ever(folder: str) -> None:
    model = nn.Linear(500, 500)
    parts = {"model": model, "average": copy.deepcopy(model)}
    print(os.getpid(), flush=True)
    with contextlib.redirect_stderr(io.StringIO()):  # where it goes on is of no interest here
        step = (checkpoint.load(folder, parts) or {"step": 0})["step"]
    while True:
        step += 1
        nn.init.constant_(model.weight, step)
        checkpoint.save(folder, parts, step=step, best=step % 3 == 0)
        print(step, flush=True)


def measure(full: bool = True) -> list[Result]:
    counted = kills(200 if full else 20)
    lost, others = counted.pop("lost"), ", ".join(f"{n:,} {what}" for what, n in counted.items())
    what = f"Checkpoints lost by {counted['kills']} kills of a process that saves"
    return [Result(what, lost, lost, lost, counted["kills"], detail=others)]


if __name__ == "__main__":
    serve(sys.argv[1])
