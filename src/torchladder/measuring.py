"""Honest timing, throughput and memory.

A GPU works behind your back: a call returns when its kernels are queued, not when they are done.
So each clock here waits for the device before it is read, the first calls are not counted (they
allocate, choose algorithms, compile), and what comes out is several runs, not one.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from math import inf
from pathlib import Path
from statistics import median
from time import perf_counter

import torch
import torch.distributed as dist


def synchronize(device: torch.device) -> None:
    """Wait until `device` has done all that was asked of it; the CPU already has."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    elif device.type == "mps":
        torch.mps.synchronize()


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
        low, middle, high = (
            _in_seconds(s) for s in (min(self.seconds), self.median, max(self.seconds))
        )
        return f"{middle} (median of {len(self.seconds)} runs, {low} to {high})"


def _in_seconds(seconds: float) -> str:
    for unit, size in [("s", 1), ("ms", 1e-3)]:
        if seconds >= size:
            return f"{seconds / size:.3g} {unit}"
    return f"{seconds / 1e-6:.3g} us"


def measure(
    function: Callable[[], object],
    *,
    device: torch.device | None = None,
    repeats: int = 5,
    warmup: int = 2,
) -> Timing:
    """How long ``function()`` takes: `repeats` runs after `warmup` that are not counted.

    Parameters
    ----------
    function : callable without arguments
    device : torch.device, optional
        Where it works; waited for before each reading of the clock. Default: the CPU.
    repeats, warmup : int

    Raises
    ------
    ValueError
        If `repeats` is below 1 or `warmup` below 0.

    Notes
    -----
    For microbenchmarks prefer `torch.utils.benchmark.Timer`, which chooses the number of runs.
    """
    if repeats < 1 or warmup < 0:
        raise ValueError(f"repeats={repeats}, warmup={warmup}: at least 1 and 0.")
    device = device or torch.device("cpu")
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


def training_rates(
    build: Callable[[], torch.nn.Module],
    shape: tuple[int, ...],
    batch_size: int,
    *,
    ways: tuple[str, ...] = ("alone", "ddp"),
    threads: int | None = None,
    steps: int = 20,
    repeats: int = 5,
) -> dict[str, list[float]]:
    """Images per second that the ranks of a process group train on, all of them together.

    Every rank calls it. The ways take turns, block by block, so that each meets the same
    machine; a block starts at a barrier and ends with the slowest rank.

    Parameters
    ----------
    build : callable
        Makes the model, which gives logits.
    shape : tuple of int
        Of one image. One random batch is used again and again: loading is not measured.
    batch_size : int
        Images a step of each rank.
    ways : tuple of str
        ``'alone'``: each rank trains for itself, which is the most the machine can do;
        ``'ddp'``: the ranks train one model.
    threads : int, optional
        Threads of each rank; default as they are.
    steps, repeats : int
        Steps in a block, and blocks of each way after one that is not counted.

    Returns
    -------
    dict
        For each way, the rate of each block, in the order they ran; the same on every rank.

    Examples
    --------
    >>> from torchladder.launching import launch
    >>> from torchladder.models import LeNet
    >>> rates = launch(training_rates, LeNet, (1, 28, 28), 64, nprocs=2)[0]
    >>> list(rates), len(rates["ddp"])
    (['alone', 'ddp'], 5)
    """
    from torchladder.training import device_of, train_epoch, wrap

    if threads:
        torch.set_num_threads(threads)
    device = device_of("ddp")
    images = torch.randn(batch_size, *shape, device=device)
    batches = [(images, torch.zeros(batch_size, dtype=torch.long, device=device))] * steps
    nets, rates = {}, {way: [] for way in ways}
    for way in ways:
        net = wrap(build().to(device), {"alone": "cpu", "ddp": "ddp"}[way], device)
        nets[way] = net, torch.optim.SGD(net.parameters(), lr=1e-3, momentum=0.9)
    for block in range(1 + repeats):
        for way, (net, optimizer) in nets.items():
            dist.barrier()
            seconds = measure(
                lambda net=net, optimizer=optimizer: train_epoch(net, batches, optimizer),
                device=device, repeats=1, warmup=0,
            ).seconds[0]  # fmt: skip
            slowest = torch.tensor(seconds, dtype=torch.float64, device=device)
            dist.all_reduce(slowest, dist.ReduceOp.MAX)
            if block:
                images_trained = dist.get_world_size() * steps * batch_size
                rates[way].append(images_trained / slowest.item())
    return rates


@dataclass(frozen=True)
class Link:
    """What connects the ranks of a group.

    Parameters
    ----------
    latency : float
        Seconds that a message takes, however short it is.
    bandwidth : float
        Bytes per second that a rank can send, in one direction, while it receives as many.
    """

    latency: float
    bandwidth: float

    def __repr__(self) -> str:
        speed = "no limit" if self.bandwidth == inf else f"{self.bandwidth / 1e9:.3g} GB/s"
        return f"Link({_in_seconds(self.latency)} a message, {speed})"


def all_reduce_seconds(nbytes: float, ranks: int, link: Link) -> float:
    """How long a ring all-reduce of `nbytes` takes: a model, not a measurement.

    Notes
    -----
    In a ring each of N ranks sends 2(N - 1) messages of `nbytes` / N, and all do so at once [1]_.
    NCCL's tests call ``nbytes * 2(N - 1)/N / seconds`` the *bus bandwidth* [2]_; here it is
    ``link.bandwidth`` when messages are long. Adding the numbers up is taken to cost nothing.

    References
    ----------
    .. [1] Patarasuk and Yuan, *Bandwidth optimal all-reduce algorithms for clusters of
       workstations*, J. Parallel Distrib. Comput. 69 (2009), 117-124.
    .. [2] https://github.com/NVIDIA/nccl-tests/blob/master/doc/PERFORMANCE.md

    Examples
    --------
    >>> all_reduce_seconds(4e9, 2, Link(latency=0, bandwidth=1e9))
    4.0
    """
    messages, share = _ring(ranks)
    return messages * link.latency + share * nbytes / link.bandwidth


def step_seconds(
    compute: float, nbytes: float, ranks: int, link: Link, *, overlap: float = 0.0
) -> float:
    """How long a training step of DDP takes: a model, not a measurement.

    Parameters
    ----------
    compute : float
        Seconds for one rank's batch without communication.
    nbytes : float
        Size of the gradients; 4 a parameter in float32.
    ranks : int
    link : Link
    overlap : float
        Share of `compute` behind which communication can hide, 0 to 1. The backward pass is about
        two thirds of a step; 0 where communication and computing want the same cores.

    Raises
    ------
    ValueError
        If `overlap` is not between 0 and 1, or `ranks` is below 1.

    Notes
    -----
    The last bucket has nothing left to hide behind, buckets have a latency each, and neither is
    counted here. The overlap is that of Li et al., *PyTorch Distributed*, VLDB 2020,
    https://arxiv.org/abs/2006.15704.
    """
    if not 0 <= overlap <= 1:
        raise ValueError(f"overlap={overlap}: it is a share of the computing, 0 to 1.")
    return compute + max(0.0, all_reduce_seconds(nbytes, ranks, link) - overlap * compute)


def fit_link(sizes: Sequence[float], seconds: Sequence[float], ranks: int) -> Link:
    """The `Link` for which `all_reduce_seconds` comes closest to what was measured.

    Parameters
    ----------
    sizes, seconds : sequence of float
        Bytes, and how long their all-reduce took; at least two different sizes.
    ranks : int
        Of the group that was measured, at least 2.

    Raises
    ------
    ValueError
        For one rank, or fewer than two sizes, or times that are not above 0.

    Notes
    -----
    Least squares of the *relative* errors, or the largest size alone would decide. Neither latency
    nor time a byte can come out negative: what would is 0.
    """
    if ranks < 2 or len(set(sizes)) < 2 or min(seconds) <= 0:
        raise ValueError("fit_link() needs two ranks, two different sizes and times above 0.")
    messages, share = _ring(ranks)
    # seconds = latency * messages + share * size / bandwidth, both sides divided by seconds.
    rows = [[messages / t, share * s / t] for s, t in zip(sizes, seconds, strict=True)]
    table = torch.tensor(rows, dtype=torch.float64)
    ones = torch.ones(len(rows), dtype=torch.float64)
    scale = table.norm(dim=0)
    latency, per_byte = (torch.linalg.lstsq(table / scale, ones).solution / scale).tolist()
    alone = ((table * ones[:, None]).sum(0) / scale**2).tolist()  # each without the other
    if latency < 0:
        latency, per_byte = 0.0, alone[1]
    elif per_byte < 0:
        latency, per_byte = alone[0], 0.0
    return Link(latency, 1 / per_byte if per_byte else inf)


def _ring(ranks: int) -> tuple[int, float]:
    """Messages that each rank of a ring all-reduce sends, and what part of the data in all."""
    if ranks < 1:
        raise ValueError(f"ranks={ranks}: there is at least one.")
    return 2 * (ranks - 1), 2 * (ranks - 1) / ranks


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

    def __init__(self, device: torch.device | None = None) -> None:
        self.device = device or torch.device("cpu")
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
        torch.cuda.reset_peak_memory_stats(device)


def peak_memory(device: torch.device) -> int | None:
    """Most bytes in use at one time.

    On CUDA: by tensors, since `reset_peak_memory`. On MPS: what the driver holds now. On the CPU:
    by the whole process since it started; `None` on Windows, which does not say.
    """
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    if device.type == "mps":
        return torch.mps.driver_allocated_memory()
    status = Path("/proc/self/status")
    if status.exists():  # not getrusage: on Linux a child starts with its parent's peak
        return int(re.search(r"VmHWM:\s+(\d+) kB", status.read_text())[1]) * 1024
    try:
        import resource
    except ImportError:
        return None
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss  # bytes on macOS
