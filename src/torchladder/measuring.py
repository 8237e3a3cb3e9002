"""Honest timing, throughput and memory.

A GPU works in the background: a call returns when its kernels are queued, not when they are done.
So each clock here waits for the device before it is read, the first calls are not counted (they
allocate, choose algorithms, compile), and what comes out is several runs, not one.
"""

import os
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from time import perf_counter

import torch
import torch.distributed as dist

CPU = torch.device("cpu")
RECORDING = "TORCHLADDER_RECORDING"  # set where the outputs that readers see are made


def when_recorded(claim: object) -> bool:
    """`claim`, where a page's outputs are recorded; elsewhere True, since another machine decides.

    ``make refresh`` records, and runs a cell again whose claim a busy machine has spoiled.

    Examples
    --------
    >>> assert when_recorded(measure(lambda: sum(range(10**5))).median > 0)
    """
    return bool(claim) or RECORDING not in os.environ


def synchronize(device: torch.device) -> None:
    """Wait until `device` has done all that was asked of it; the CPU already has."""
    if device.type != "cpu":
        torch.accelerator.synchronize(device)


@dataclass(frozen=True)
class Timing:
    """Seconds that each of several runs took, in the order they ran."""

    seconds: tuple[float, ...]

    @property
    def median(self) -> float:
        return median(self.seconds)

    def rates(self, count: float) -> list[float]:
        """`count` items a run, as items per second of each run."""
        return [count / seconds for seconds in self.seconds]

    def __repr__(self) -> str:
        low, high = _in_seconds(min(self.seconds)), _in_seconds(max(self.seconds))
        runs = len(self.seconds)
        return f"{_in_seconds(self.median)} (median of {runs} runs, {low} to {high})"


def _in_seconds(seconds: float) -> str:
    for unit, size in [("s", 1), ("ms", 1e-3)]:
        text = f"{seconds / size:.3g}"
        if float(text) >= 1:  # as it is written: 0.9999 s are no 1e+03 ms
            return f"{text} {unit}"
    return f"{seconds / 1e-6:.3g} us"


def measure(
    function: Callable[[], object],
    *,
    device: torch.device = CPU,
    repeats: int = 5,
    warmup: int = 2,
) -> Timing:
    """How long ``function()`` takes: `repeats` runs after `warmup` that are not counted.

    For microbenchmarks prefer `torch.utils.benchmark.Timer`, which chooses the number of runs.

    Parameters
    ----------
    device : torch.device
        Where it works; waited for before each reading of the clock.
    """
    for _ in range(warmup):
        function()
    seconds = []
    for _ in range(repeats):
        synchronize(device)
        start = perf_counter()
        function()
        synchronize(device)
        seconds.append(perf_counter() - start)
    return Timing(tuple(seconds))


def measure_across_ranks(
    functions: Mapping[str, Callable[[], object]],
    *,
    device: torch.device = CPU,
    repeats: int = 5,
) -> dict[str, Timing]:
    """How long the slowest rank of the process group takes for each of `functions`.

    Every rank calls it, with the same names in the same order, and gets the same timings. The
    functions take turns, so that a moment in which the machine is busy does not count against
    one of them alone. Each run starts at a barrier; the first of each is not counted.

    Examples
    --------
    >>> from torchladder.launching import launch
    >>> timings = launch(measure_across_ranks, {"add": lambda: torch.ones(9) + 1}, world_size=2)
    >>> timings[0] == timings[1], len(timings[0]["add"].seconds)
    (True, 5)
    """
    seconds = {name: [] for name in functions}
    for run in range(1 + repeats):
        for name, function in functions.items():
            dist.barrier()
            own = measure(function, device=device, repeats=1, warmup=0).seconds[0]
            slowest = torch.tensor(own, dtype=torch.float64, device=device)
            dist.all_reduce(slowest, dist.ReduceOp.MAX)
            if run > 0:
                seconds[name].append(slowest.item())
    return {name: Timing(tuple(runs)) for name, runs in seconds.items()}


class Stopwatch:
    """Adds up the time that the named parts of a loop take.

    Waiting for the device after each part makes the parts add up, and the loop slower than it
    is without: use it to find out where time goes, not how fast a loop is.

    Examples
    --------
    >>> watch = Stopwatch()
    >>> for _ in range(3):
    ...     with watch("sum"):
    ...         _ = torch.ones(1000).sum()
    >>> list(watch.seconds), watch.share("sum")
    (['sum'], 1.0)
    """

    def __init__(self, device: torch.device = CPU) -> None:
        self.device = device
        self.seconds: dict[str, float] = {}

    @contextmanager
    def __call__(self, part: str) -> Iterator[None]:
        synchronize(self.device)
        start = perf_counter()
        try:
            yield
        finally:
            synchronize(self.device)
            self.seconds[part] = self.seconds.get(part, 0.0) + perf_counter() - start

    def share(self, part: str) -> float:
        """The part's share of all the time measured, between 0 and 1."""
        return self.seconds[part] / sum(self.seconds.values())


def reset_peak_memory(device: torch.device) -> None:
    """Start a new peak on a CUDA device; other devices keep the one they have."""
    if device.type == "cuda":
        torch.cuda.init()  # before CUDA has started: "Invalid device argument"
        torch.cuda.reset_peak_memory_stats(device)


def peak_memory(device: torch.device) -> int:
    """Most bytes in use at one time.

    On CUDA: by tensors, since `reset_peak_memory`. On MPS: what the driver holds now. On the CPU:
    by the whole process since it started.
    """
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    if device.type == "mps":
        return torch.mps.driver_allocated_memory()
    status = Path("/proc/self/status")
    # Not getrusage, if it can be: on Linux a child starts with its parent's peak.
    if found := re.search(r"VmHWM:\s+(\d+) kB", status.read_text() if status.exists() else ""):
        return int(found[1]) * 1024
    import resource  # which Windows lacks

    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
