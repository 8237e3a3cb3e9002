"""Kill a process again and again while it saves; is the last good checkpoint ever lost?

A process does nothing but save. At a random instant it gets SIGKILL, which no program can see
coming. Then every file is read back, and the next process goes on from the newest.
"""

import contextlib
import copy
import io
import multiprocessing
import random
import tempfile
import time
from multiprocessing.connection import Connection
from pathlib import Path

from torch import nn

from benchmarks.results import Result
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
    result = {"kills": count, "lost": 0, "files checked": 0, "half-written files": 0}
    wait, context = random.Random(seed), multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torchladder.checkpoint"])  # imports torch but once
    with tempfile.TemporaryDirectory() as folder:
        for _ in range(count):
            told, tell = context.Pipe(duplex=False)
            process = context.Process(target=save_for_ever, args=(folder, tell))
            process.start()
            tell.close()  # the other end is the process's alone
            saved = told.recv()
            time.sleep(wait.uniform(0, longest))
            process.kill()
            process.join()
            with told, contextlib.suppress(EOFError):
                while True:
                    saved = told.recv()
            files = [*checkpoint.files_in(folder), *Path(folder).glob("best.pt")]
            result["lost"] += not all(map(is_right, files)) or newest_step(folder) < saved
            result["files checked"] += len(files)
            # Of this kill: the next save removes it.
            result["half-written files"] += len(list(Path(folder).glob(f".*{LEFTOVER}")))
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


def save_for_ever(folder: str, tell: Connection) -> None:
    """Save until this process is killed, and tell the step of each file that is saved."""
    model = nn.Linear(500, 500)
    parts = {"model": model, "average": copy.deepcopy(model)}
    with contextlib.redirect_stderr(io.StringIO()):  # where it goes on is of no interest here
        step = (checkpoint.load(folder, parts) or {"step": 0})["step"]
    while True:
        step += 1
        nn.init.constant_(model.weight, step)
        checkpoint.save(folder, parts, step=step, best=step % 3 == 0)
        tell.send(step)


def measure() -> list[Result]:
    counted = kills()
    lost, others = counted.pop("lost"), ", ".join(f"{n:,} {what}" for what, n in counted.items())
    what = f"Checkpoints lost by {counted['kills']} kills of a process that saves"
    return [Result(what, lost, lost, lost, counted["kills"], detail=others)]
