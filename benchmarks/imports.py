"""How long a new Python takes to import the package, and to import PyTorch, in turns."""

import subprocess
import sys
import time
from statistics import median

from results import Result

TORCH = "torch"
MODULES = {
    "torchladder": "which loads nothing else",
    "torchladder.training": "with all that it loads, PyTorch among it",
}


def seconds(module):
    """From the start of the process to its end."""
    start = time.perf_counter()
    subprocess.run([sys.executable, "-c", f"import {module}"], check=True)
    return time.perf_counter() - start


def measure(full=True):
    rounds = range(1 + (15 if full else 3))  # the first reads files from the disk
    runs = [{module: seconds(module) for module in (TORCH, *MODULES)} for _ in rounds][1:]
    results = []
    for module, loads in MODULES.items():
        pairs = [(run[module], run[TORCH]) for run in runs]
        these, those = (median(side) for side in zip(*pairs, strict=True))
        what = f"Time of import {module} against import torch"
        detail = f"{these:.2f} s against {those:.2f} s; {loads}"
        results.append(Result.of_pairs(what, pairs, 1.03, at_most=True, detail=detail))
    return results
