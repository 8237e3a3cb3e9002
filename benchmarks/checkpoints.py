"""How long inspecting and fixing large checkpoints takes, and how much memory.

Memory is anonymous memory (``RssAnon``): what the process holds itself. Pages of mapped files are
not counted, for the system can drop them at any time.
"""

import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median

from benchmarks.results import Result

RUNS = 6  # enough for the range of the median


def make_ddp_checkpoint(path: Path, gigabytes: float, keys: int = 40) -> None:
    """A file as a DDP run saves it: ``module.`` before each key, an optimizer beside it."""
    import torch

    layer = torch.randn(int(gigabytes * 1e9 / 4 / keys))
    state = {f"module.layers.{i}.weight": layer + i for i in range(keys)}
    torch.save({"model": state, "optimizer": {"state": {}, "param_groups": []}, "epoch": 3}, path)


def run_measured(program: str) -> tuple[float, float]:
    """Run Python code in a new process: seconds after ``START``, and megabytes at the peak."""
    program = program.replace("START", "import time; START = time.perf_counter()")
    program += "\nprint(time.perf_counter() - START)"
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True) as p:
        peak = 0
        while p.poll() is None:
            peak = max(peak, anonymous_bytes(p.pid))
            time.sleep(0.02)
        printed = p.stdout.read()
    if p.returncode:
        raise RuntimeError(f"exit status {p.returncode}")
    return float(printed), peak / 1e6


def anonymous_bytes(pid: int) -> int:
    """Bytes of memory that a process holds and that are no file's; 0 if it has just ended."""
    status = Path(f"/proc/{pid}/status").read_text()
    return sum(int(line.split()[1]) * 1024 for line in status.splitlines() if "RssAnon" in line)


def measure_inspect(folder: Path, gigabytes: float = 5) -> list[Result]:
    """Inspect a large file in a new process, which imports what it needs in that time, too."""
    path = folder / "inspected.pt"
    make_ddp_checkpoint(path, gigabytes)
    program = (
        "START\n"
        "from torchclinic.checkpoint_files import inspect_checkpoint\n"
        f"assert len(repr(inspect_checkpoint({str(path)!r}))) > 0"
    )
    seconds, peaks = zip(*(run_measured(program) for _ in range(RUNS)), strict=True)
    path.unlink()
    what = f"Inspecting a file of {gigabytes:g} GB"
    return [
        Result.of_runs(f"{what}: seconds", seconds),
        Result.of_runs(f"{what}: megabytes of memory", peaks),
    ]


def measure_fix(folder: Path, to: str, gigabytes: float = 4) -> list[Result]:
    """Fix a DDP checkpoint, until it is on the disk, and copy it with ``cp``, in turns.

    Both from a new process that has imported the same: on a virtual machine, memory that has been
    free for a second is slower to get than memory that was free just now.
    """
    source, target = folder / "ddp.pt", folder / f"target.{to}"
    make_ddp_checkpoint(source, gigabytes)
    start = (
        "import subprocess, torch\nfrom torchclinic.checkpoint_files import fix_checkpoint\nSTART\n"
    )
    copy = f"subprocess.run(['cp', {str(source)!r}, {str(target)!r}], check=True)"
    fix = f"fix_checkpoint({str(source)!r}, {str(target)!r})"
    pairs, peaks = [], []
    for _ in range(RUNS):
        both = []
        for program in (fix, copy):
            os.sync()
            both.append(run_measured(start + program))
            target.unlink()
        pairs.append([seconds for seconds, _ in both])
        peaks.append(both[0][1])
    source.unlink()
    what = f"Fixing a DDP checkpoint of {gigabytes:g} GB, to {to}"
    detail = "{:.1f} s against {:.1f} s".format(*map(median, zip(*pairs, strict=True)))
    return [
        Result.of_pairs(f"{what}: time against cp", pairs, detail=detail),
        Result.of_runs(f"{what}: megabytes of memory", peaks),
    ]


def measure() -> list[Result]:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        results = measure_inspect(folder)
        for to in ("torch", "safetensors"):
            results += measure_fix(folder, to)
    return results
