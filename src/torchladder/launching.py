"""Run a function in several processes that form a process group; from a notebook, a script, a test.

``torchrun`` starts scripts. `launch` starts functions, such as one defined in a notebook's cell:

* The function travels as bytes made by cloudpickle, code included, so it may be defined anywhere.
* The processes are forked by Python's *fork server*, a small process that has imported torch and
  done nothing else. Forking the notebook itself would copy a started CUDA, which cannot work, and
  running OpenMP threads, which hang.
* The caller holds the `TCPStore` in which the ranks meet, on a port the system chose, as
  torchrun's agent does. Under it, all is plain `torch.distributed`.
"""

from __future__ import annotations

import faulthandler
import gc
import importlib
import io
import linecache
import multiprocessing as mp
import os
import signal
import sys
import threading
import time
import types
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from pathlib import Path

import cloudpickle

from torchladder.frames import Cells, cell_sources, describe, stack_of

# The first DDP or optimizer imports torch._dynamo, which takes a second: once, in the fork server.
PRELOAD = ["torch", "torch._dynamo", "torch.nn.parallel", "torchladder.launching"]
START_METHOD = "forkserver" if "forkserver" in mp.get_all_start_methods() else "spawn"
GRACE = 2.0  # seconds for the other ranks to say what happened to them, once one has failed


class LaunchError(RuntimeError):
    """A rank failed; `rank` is the one that failed first.

    `kinds` are the names of its exception's class and of the classes that one is derived from,
    and nothing if the process ended without an exception.
    """

    def __init__(self, message: str, rank: int, kinds: tuple[str, ...] = ()) -> None:
        super().__init__(message)
        self.rank = rank
        self.kinds = kinds


def warm_up() -> None:
    """Start the fork server in the background, so that the first `launch` need not wait for it."""
    if START_METHOD == "forkserver":
        mp.set_forkserver_preload(PRELOAD)
        from multiprocessing import forkserver

        forkserver.ensure_running()


def launch(
    function: Callable,
    *args: object,
    nprocs: int = 2,
    timeout: float | None = None,
    show: str = "rank0",
    backend: str | None = None,
    **kwargs: object,
) -> list:
    """Call ``function(*args, **kwargs)`` in `nprocs` processes at once; their results by rank.

    When the function starts, the process group is up, the rank's GPU (if any) is the current
    device, the cores are shared out among the ranks, and ``RANK``, ``LOCAL_RANK``, ``WORLD_SIZE``
    and the like are set as torchrun sets them.

    Parameters
    ----------
    function : callable
        Any function; closures, lambdas and functions defined in a notebook's cell too.
    *args, **kwargs
        What to call it with. Tensors arrive on the CPU.
    nprocs : int
        The world size.
    timeout : float, optional
        Seconds after which all is ended with a `TimeoutError` that says where each rank was.
    show : {'rank0', 'all', 'none'}
        Whose prints to show: rank 0's as they come; with ``'all'`` then those of the other ranks,
        in rank order. A failed rank's prints are always shown.
    backend : str, optional
        Default ``'nccl'`` if there is a GPU for each rank, else ``'gloo'``.

    Returns
    -------
    list
        What each rank returned, in rank order; tensors are on the CPU.

    Raises
    ------
    LaunchError
        If a rank raised, exited or was killed. The first to fail is named, with its traceback.
    TimeoutError
        If it took longer than `timeout`.
    ValueError
        For a world size below 1, or an unknown `show`.
    TypeError
        If the function or an argument cannot be sent to another process.

    Notes
    -----
    Whatever happens, Ctrl-C included, no process is left. Where there is no fork server (Windows,
    not tried), processes are spawned, with a warning: that is slower, and their prints are not
    captured.

    Examples
    --------
    >>> import torch.distributed as dist
    >>> launch(lambda x: x + dist.get_rank(), 10)
    [10, 11]
    """
    if nprocs < 1:
        raise ValueError(f"nprocs={nprocs}: there is at least one process.")
    if show not in ("rank0", "all", "none"):
        raise ValueError(f"show={show!r}: choose 'rank0', 'all' or 'none'.")
    if START_METHOD == "spawn":
        warnings.warn("No fork server on this system: every launch takes seconds.", stacklevel=2)
    import torch.distributed as dist

    cells = cell_sources()
    try:
        method = mp.get_start_method(allow_none=True)
        job = _to_bytes((function, args, kwargs, cells, backend, method))
    except Exception as error:
        name = getattr(function, "__name__", function)
        raise TypeError(f"{name} or its arguments cannot be sent to a process: {error}") from error
    warm_up()
    # Bound here and now, on a free port: there is no port to agree on and none to lose.
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    ranks: list[_Rank] = []
    try:
        with _no_main_module():
            for rank in range(nprocs):
                ranks.append(_start(rank, nprocs, store.port, job))
        _follow(ranks, timeout, show)
        failed = [r for r in ranks if r.reply and r.reply[0] != "ok"]
        unfinished = [] if failed else [r for r in ranks if not r.reply]
        stacks = [stack_of(r.process.pid, r.stack, cells) for r in unfinished]
    finally:
        _end(ranks)
        del store
    _print_the_rest(ranks, show, failed)
    if failed:
        raise _blame(failed, nprocs)
    if unfinished:
        names = " and ".join(f"rank {r.rank}" for r in unfinished)
        lines = [f"{names} of {nprocs} still running after {timeout:g} s"]
        for r, stack in zip(unfinished, stacks, strict=True):
            lines += [f"rank {r.rank} was at:", *stack]
        raise TimeoutError("\n".join(lines))
    return [r.reply[1] for r in ranks]


# --- in the caller ------------------------------------------------------------------------------


@dataclass
class _Rank:
    """What the caller knows of one rank."""

    rank: int
    process: mp.Process
    result: Connection
    output: Connection | None  # what it prints; None on Windows
    stack: Connection | None  # where it is, when asked by a signal; None on Windows
    printed: bytearray = field(default_factory=bytearray)
    shown: int = 0
    # ("ok", value), ("error", time, text, kinds) or ("died", time, text, ())
    reply: tuple | None = None


def _start(rank: int, nprocs: int, port: int, job: bytes) -> _Rank:
    context = mp.get_context(START_METHOD)
    pipes = [context.Pipe(duplex=False) for _ in range(3 if os.name == "posix" else 1)]
    ours, theirs = ([*ends, None, None][:3] for ends in zip(*pipes, strict=True))
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    environment = {"OMP_NUM_THREADS": str(max(1, cores // nprocs))} | dict(os.environ)
    environment |= {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(nprocs),
        "LOCAL_WORLD_SIZE": str(nprocs),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        # What torchrun sets so that rank 0 joins its agent's store instead of opening one.
        "TORCHELASTIC_USE_AGENT_STORE": "True",
    }
    process = context.Process(
        target=_run_rank, args=(job, environment, *theirs), name=f"rank {rank}"
    )
    process.start()
    for connection in filter(None, theirs):
        connection.close()
    return _Rank(rank, process, *ours)


@contextmanager
def _no_main_module() -> Iterator[None]:
    """Keep the new processes from importing the caller's script.

    What they need of it is in the job. So a script that calls `launch` needs no
    ``if __name__ == "__main__"``.
    """
    main = sys.modules["__main__"]
    sys.modules["__main__"] = types.ModuleType("__main__")
    try:
        yield
    finally:
        sys.modules["__main__"] = main


def _follow(ranks: list[_Rank], timeout: float | None, show: str) -> None:
    """Read prints and replies until all ranks are done, time is up, or a failure has settled."""
    deadline = time.monotonic() + timeout if timeout is not None else float("inf")
    while (left := deadline - time.monotonic()) > 0:
        sources = [c for r in ranks for c in (r.output, r.result) if c and not c.closed]
        sources += [r.process.sentinel for r in ranks if r.reply is None]
        if not sources:
            break
        wait(sources, min(left, 1.0))
        for r in ranks:
            _read(r)
        if show != "none":
            _print_new_lines(ranks[0])
        if any(r.reply and r.reply[0] != "ok" for r in ranks):
            deadline = min(deadline, time.monotonic() + GRACE)
        if all(r.reply for r in ranks):
            break


def _read(r: _Rank) -> None:
    """Take what a rank has printed, its reply, or the news of its death."""
    alive = r.process.is_alive()  # asked first: what it wrote before it died is then in the pipes
    for _ in range(16):  # not for ever: some rank may print faster than this reads
        if not r.output or r.output.closed or not r.output.poll():
            break
        chunk = os.read(r.output.fileno(), 65536)
        r.printed += chunk
        if not chunk:
            r.output.close()
    if not r.result.closed and r.result.poll():
        try:
            r.reply = cloudpickle.loads(r.result.recv_bytes())
        except EOFError:
            pass
        except Exception as error:
            text = f"its result cannot be read here: {type(error).__name__}: {error}"
            r.reply = ("error", time.time(), text, ())
        r.result.close()
    if not alive and r.reply is None:
        r.process.join()
        code = r.process.exitcode
        how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"exited with {code}"
        r.reply = ("died", time.time(), how, ())


def _blame(failed: list[_Rank], nprocs: int) -> LaunchError:
    """The error of the rank that failed first; the others fail because it is gone."""

    def order(r: _Rank) -> tuple:
        kind, when, text, _ = r.reply
        # A death is noticed after the errors it causes; an abort is such an error itself.
        return ({"died": 2 if "SIGABRT" in text else 0, "error": 1}[kind], when)

    first = min(failed, key=order)
    kind, _, text, kinds = first.reply
    text = f"failed with {text}" if kind == "error" else text
    return LaunchError(f"rank {first.rank} of {nprocs} {text}", first.rank, kinds)


def _end(ranks: list[_Rank]) -> None:
    """No process and no pipe is left, whatever state they are in."""
    for r in ranks:
        if r.reply is None:
            r.process.terminate()
    end = time.monotonic() + 1.0
    for r in ranks:
        r.process.join(max(0.0, end - time.monotonic()))
        if r.process.is_alive():
            r.process.kill()
            r.process.join()
        _read(r)
        for connection in filter(None, (r.result, r.output, r.stack)):
            connection.close()
        r.process.close()


def _print_new_lines(r: _Rank, *, rest: bool = False) -> None:
    end = len(r.printed) if rest else r.printed.rfind(b"\n") + 1
    if end > r.shown:
        sys.stdout.write(r.printed[r.shown : end].decode(errors="replace"))
        sys.stdout.flush()
        r.shown = end


def _print_the_rest(ranks: list[_Rank], show: str, failed: list[_Rank]) -> None:
    if show != "none":
        _print_new_lines(ranks[0], rest=True)
    for r in ranks:
        shown_live = r.rank == 0 and show != "none"
        if (show == "all" or r in failed) and r.printed and not shown_live:
            text = r.printed.decode(errors="replace").rstrip("\n")
            print("\n".join(f"[rank {r.rank}] {line}" for line in text.split("\n")))


class _CpuPickler(cloudpickle.Pickler):
    """Pickles tensors as if they were on the CPU: the reader need not have the device.

    Modules such as ``torch.backends.cudnn``, which are of a class of their own, go by their names.
    """

    def reducer_override(self, thing):
        import torch

        if isinstance(thing, torch.Tensor) and thing.device.type not in ("cpu", "meta"):
            moved = thing.detach().cpu()
            if isinstance(thing, torch.nn.Parameter):
                moved = torch.nn.Parameter(moved, thing.requires_grad)
            return moved.__reduce_ex__(4)
        if isinstance(thing, types.ModuleType) and type(thing) is not types.ModuleType:
            return importlib.import_module, (thing.__name__,)
        return super().reducer_override(thing)


def _to_bytes(thing: object) -> bytes:
    buffer = io.BytesIO()
    _CpuPickler(buffer).dump(thing)
    return buffer.getvalue()


# --- in each rank -------------------------------------------------------------------------------


def _run_rank(
    job: bytes,
    environment: dict,
    result: Connection,
    output: Connection | None,
    stack: Connection | None,
) -> None:
    # What the fork server imported is nothing to collect; to look at it would copy its pages.
    gc.freeze()
    threading.Thread(target=_end_with_the_caller, daemon=True).start()
    os.environ.clear()  # the fork server has those of the moment it was started
    os.environ.update(environment)
    if output:
        # An interrupt goes to the whole process group; the caller decides what it means.
        os.setsid()
        os.dup2(output.fileno(), 1)
        os.dup2(output.fileno(), 2)
        output.close()
        sys.stdout, sys.stderr = (
            io.TextIOWrapper(
                io.FileIO(fd, "w", closefd=False), errors="replace", line_buffering=True
            )
            for fd in (1, 2)
        )
        faulthandler.register(signal.SIGUSR1, file=stack.fileno(), all_threads=False)
    cells: Cells = {}
    try:
        import torch
        import torch.distributed as dist

        function, args, kwargs, cells, backend, method = cloudpickle.loads(job)
        # The fork server passes itself on. A data loader here shall start its workers as the
        # caller would: by fork on most systems, which needs no pickling of a cell's classes.
        mp.set_start_method(method, force=True)
        linecache.cache.update({file: (0, None, lines, file) for file, (_, lines) in cells.items()})
        torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
        with _quiet_stdout():
            join_group(backend)
        value = function(*args, **kwargs)
        try:
            reply = _to_bytes(("ok", value))
        except Exception as error:
            kind = type(value).__name__
            raise TypeError(f"the {kind} that was returned cannot be sent back: {error}") from None
        function = args = kwargs = value = None
        # Before the group: a DDP reducer that outlives it aborts the process (pytorch#179291).
        gc.collect()
        if dist.is_initialized():
            dist.destroy_process_group()
    except BaseException as error:
        kinds = tuple(kind.__name__ for kind in type(error).__mro__)
        reply = _to_bytes(("error", time.time(), describe(error, cells), kinds))
    for child in mp.active_children():  # a data loader's workers
        child.terminate()
        child.join()
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    result.send_bytes(reply)
    # Past Python's own way out: gloo's threads may still run and abort it (SIGABRT).
    os._exit(0)


def join_group(backend: str | None = None) -> None:
    """Join the process group that the environment describes (torchrun's, or `launch`'s).

    The rank's GPU becomes the current device. The backend is NCCL if there is a GPU for each rank
    of this machine, else gloo, in which case the ranks share what GPUs there are.
    """
    import torch
    import torch.distributed as dist

    local_rank, local_size = int(os.environ["LOCAL_RANK"]), int(os.environ["LOCAL_WORLD_SIZE"])
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if gpus:
        torch.cuda.set_device(local_rank % gpus)
    dist.set_debug_level_from_env()  # read when torch was imported: in the fork server, long ago
    backend = backend or ("nccl" if gpus >= local_size else "gloo")
    device = torch.device("cuda", local_rank) if backend == "nccl" else None
    dist.init_process_group(backend, device_id=device)
    dist.barrier()  # or a rank might be done and gone while another still connects to it
    _calm_gloo()


def _calm_gloo() -> None:
    """Let the threads that compute come before gloo's event loop.

    The loop asks for events without a pause while a message lies there that nobody waits for yet.
    On a busy core Linux leaves it running to the end of its time slice, and the thread that would
    take the message waits. (Measured on 2 cores with Linux 6.18 and torch 2.15: of all-reduces of
    LeNet's gradients, which take 0.5 ms, one in ten took 4.) In torch 2.10 the thread has no name
    to find it by, and stays as it is.
    """
    for thread in Path("/proc/self/task").glob("*"):
        if (thread / "comm").read_text() == "gloo_tcp_loop\n":
            os.sched_setscheduler(int(thread.name), os.SCHED_BATCH, os.sched_param(0))


@contextmanager
def _quiet_stdout() -> Iterator[None]:
    """Until PyTorch 2.12, gloo announces every connection on the standard output."""
    kept, nowhere = os.dup(1), os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 1)
    try:
        yield
    finally:
        os.dup2(kept, 1)
        os.close(kept)
        os.close(nowhere)


def _end_with_the_caller() -> None:
    wait([mp.parent_process().sentinel])
    if hasattr(os, "killpg"):
        os.killpg(0, signal.SIGKILL)
    os._exit(1)
