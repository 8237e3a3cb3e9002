"""How long inspecting and fixing large checkpoints takes, and how much memory.

    python benchmarks/checkpoints.py [--folder DIR] [--gigabytes 4] [--runs 3]

Memory is anonymous memory (``RssAnon``): what the process holds itself. Pages of mapped files are
not counted, for the system can drop them at any time.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import threading
from pathlib import Path

from torchladder.tables import Table, in_bytes


def make_ddp_checkpoint(path: Path, gigabytes: float) -> None:
    """A file as a DDP run saves it: ``module.`` before each key, an optimizer beside it."""
    import torch

    count = int(gigabytes * 1e9 / 4 / 40)
    layer = torch.randn(count)
    state = {f"module.layers.{i}.weight": layer + i for i in range(40)}
    torch.save({"model": state, "optimizer": {"state": {}, "param_groups": []}, "epoch": 3}, path)


def run_measured(program: str) -> dict[str, float]:
    """Run Python code in a new process: seconds of the statements after ``START``, peak memory."""
    program = program.replace("START", "import time; START = time.perf_counter()")
    program += "\nprint(time.perf_counter() - START)"
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True) as p:
        peak, over = [0], threading.Event()

        def poll() -> None:
            while not over.wait(0.02):
                peak[0] = max(peak[0], anonymous_memory(p.pid))

        watch = threading.Thread(target=poll)
        watch.start()
        printed = p.communicate()[0]
        over.set()
        watch.join()
    if p.returncode:
        raise RuntimeError(f"exit status {p.returncode}")
    return {"seconds": float(printed), "peak_bytes": peak[0]}


def anonymous_memory(pid: int) -> int:
    """Bytes of memory that a process holds and that are no file's."""
    try:
        status = Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return 0
    return sum(int(line.split()[1]) * 1024 for line in status.splitlines() if "RssAnon" in line)


def measure_inspect(folder: Path, gigabytes: float = 5, runs: int = 3) -> dict:
    """Inspect a large file in a new process, which imports what it needs in that time, too."""
    path = folder / "inspected.pt"
    make_ddp_checkpoint(path, gigabytes)
    program = (
        "START\n"
        "from torchladder.checkpoints import inspect_checkpoint\n"
        f"assert len(repr(inspect_checkpoint({str(path)!r}, verify=VERIFY))) > 0"
    )
    found = [run_measured(program.replace("VERIFY", "False")) for _ in range(runs)]
    whole = run_measured(program.replace("VERIFY", "True"))
    path.unlink()
    return {
        "bytes": int(gigabytes * 1e9),
        "seconds": statistics.median(run["seconds"] for run in found),
        "peak_bytes": max(run["peak_bytes"] for run in found),
        "verify_seconds": whole["seconds"],
        "verify_peak_bytes": whole["peak_bytes"],
        "limit_seconds": 2,
        "limit_peak_bytes": 400e6,
    }


def measure_fix(folder: Path, gigabytes: float = 4, runs: int = 3, to: str = "torch") -> dict:
    """Fix a DDP checkpoint, until it is on the disk, and copy it with ``cp``, in turns.

    Both from a new process that has imported the same: on a virtual machine, memory that has been
    free for a second is slower to get than memory that was free just now.
    """
    source, target = folder / "ddp.pt", folder / "target"
    make_ddp_checkpoint(source, gigabytes)
    start = "import subprocess, torch\nfrom torchladder.checkpoints import fix_checkpoint\nSTART\n"
    copy = f"subprocess.run(['cp', {str(source)!r}, {str(target)!r}], check=True)"
    fix = f"fix_checkpoint({str(source)!r}, {str(target)!r}, to={to!r})"
    copies, fixes = [], []
    for _ in range(runs):
        for program, results in ((copy, copies), (fix, fixes)):
            os.sync()
            results.append(run_measured(start + program))
            target.unlink()
    source.unlink()
    pairs = [(f["seconds"], c["seconds"]) for f, c in zip(fixes, copies, strict=True)]
    return {
        "to": to,
        "bytes": int(gigabytes * 1e9),
        "cp_seconds": [copied["seconds"] for copied in copies],
        "fix_seconds": [fix["seconds"] for fix in fixes],
        "ratio": statistics.median(fixed / copied for fixed, copied in pairs),
        "peak_bytes": max(fix["peak_bytes"] for fix in fixes),
        "limit_ratio": 2.0,
        "limit_peak_bytes": 1e9,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--folder", type=Path, help="where to make the files (default: temporary)")
    parser.add_argument("--gigabytes", type=float, default=4)
    parser.add_argument("--runs", type=int, default=3)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=options.folder) as name:
        folder = Path(name)
        look = measure_inspect(folder, options.gigabytes * 1.25, options.runs)
        fixes = [measure_fix(folder, options.gigabytes, options.runs, to)
                 for to in ("torch", "safetensors")]  # fmt: skip
    rows = [
        ["inspect", in_bytes(look["bytes"]), f"{look['seconds']:.2f} s", "2 s",
         in_bytes(look["peak_bytes"]), "400 MB"],
        ["inspect --verify", in_bytes(look["bytes"]), f"{look['verify_seconds']:.2f} s", "",
         in_bytes(look["verify_peak_bytes"]), ""],
    ]  # fmt: skip
    rows += [
        [f"fix --to {fix['to']}", in_bytes(fix["bytes"]), f"{fix['ratio']:.2f} x cp", "2.00 x cp",
         in_bytes(fix["peak_bytes"]), "1 GB"]
        for fix in fixes
    ]  # fmt: skip
    print(Table(["what", "file", "took", "limit", "memory", "limit"], rows))
    for fix in fixes:
        print(f"fix --to {fix['to']}: cp {_all(fix['cp_seconds'])}, fix {_all(fix['fix_seconds'])}")


def _all(seconds: list[float]) -> str:
    return ", ".join(f"{each:.1f}" for each in seconds) + " s"


if __name__ == "__main__":
    main()
