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
import re
import signal
import sys
import threading
import time
import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from pathlib import Path

import cloudpickle

from torchladder.frames import Cells, cell_sources, describe, last_place, places

# The first DDP or optimizer imports torch._dynamo, which takes a second: once, in the fork server.
PRELOAD = ["torch", "torch._dynamo", "torch.nn.parallel", "torchladder.launching"]
# How torchrun and `launch` tell a process which rank of which group it is.
GROUP = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
GRACE = 2.0  # seconds for the other ranks to say what happened to them, once one has failed
# What a rank says when another one is gone; the last words are NCCL's, the others gloo's.
PEER_IS_GONE = re.compile("Connection (closed|reset) by peer|Broken pipe|remote process exited")


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
    if "forkserver" not in mp.get_all_start_methods():
        raise OSError("launch needs Python's fork server, which Windows lacks: run this in WSL 2.")
    from multiprocessing import forkserver

    mp.set_forkserver_preload(PRELOAD)
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
    and the like are set as torchrun sets them. Whatever happens, Ctrl-C included, no process is
    left. Runs on Linux and macOS; on Windows, in WSL 2.

    Parameters
    ----------
    function : callable
        Any function; closures, lambdas and functions defined in a notebook's cell too.
    *args, **kwargs
        What to call it with. Tensors arrive on the CPU.
    nprocs : int
        The world size: at most 8 for each core, but 64 are always allowed. Ranks that share a
        core take turns on it, so more of them are no faster.
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
        For a world size below 1 or above what this machine can serve, or an unknown `show`.
    TypeError
        If the function or an argument cannot be sent to another process.
    OSError
        If Python has no fork server here.

    Examples
    --------
    >>> import torch.distributed as dist
    >>> launch(lambda x: x + dist.get_rank(), 10)
    [10, 11]
    """
    _check(nprocs, show)
    job = _job(function, args, kwargs, backend)
    warm_up()
    import torch.distributed as dist

    # Bound here and now, on a free port: there is no port to agree on and none to lose.
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    ranks: list[_Rank] = []
    try:
        with _no_main_module():
            for rank in range(nprocs):
                ranks.append(_start(rank, nprocs, store.port, job))
        _follow(ranks, timeout, show)
        error = _error(ranks, timeout)
    finally:
        _end(ranks)
        del store
    _print_the_rest(ranks, show)
    if error:
        raise error
    return [r.reply[0] for r in ranks]


# --- in the caller ------------------------------------------------------------------------------


@dataclass
class _Failure:
    """What is wrong with a rank; `text` goes on after "rank 1 of 2"."""

    text: str
    kinds: tuple[str, ...] = ()  # as in `LaunchError`
    place: list[str] = field(default_factory=list)  # its stack, as lines
    when: float = field(default_factory=time.time)


@dataclass
class _Rank:
    """What the caller knows of one rank."""

    rank: int
    process: mp.Process
    result: Connection
    output: Connection  # what it prints
    stack: Connection  # where it is, when asked by a signal or killed by an error
    printed: bytearray = field(default_factory=bytearray)
    shown: int = 0
    reply: tuple[object] | _Failure | None = None  # what it returned, or why it did not

    @property
    def failed(self) -> bool:
        return isinstance(self.reply, _Failure)


def _check(nprocs: int, show: str) -> None:
    most = max(64, 8 * _cores())
    if not 1 <= nprocs <= most:
        limit = "8 for each core, or 64 if that is more"
        raise ValueError(f"nprocs={nprocs}: choose 1 to {most}; the limit is {limit}.")
    if show not in ("rank0", "all", "none"):
        raise ValueError(f"show={show!r}: choose 'rank0', 'all' or 'none'.")


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()


def _job(function: Callable, args: tuple, kwargs: dict, backend: str | None) -> bytes:
    method = mp.get_start_method(allow_none=True)
    try:
        return _to_bytes((function, args, kwargs, cell_sources(), backend, method))
    except Exception as error:
        name = getattr(function, "__name__", function)
        raise TypeError(f"{name} or its arguments cannot be sent to a process: {error}") from error


def _start(rank: int, nprocs: int, port: int, job: bytes) -> _Rank:
    context = mp.get_context("forkserver")
    ours, theirs = zip(*(context.Pipe(duplex=False) for _ in range(3)), strict=True)
    environment = {"OMP_NUM_THREADS": str(max(1, _cores() // nprocs))} | dict(os.environ)
    values = (rank, rank, nprocs, nprocs, "127.0.0.1", port)
    environment |= zip(GROUP, map(str, values), strict=True)
    # What torchrun sets so that rank 0 joins its agent's store instead of opening one.
    environment["TORCHELASTIC_USE_AGENT_STORE"] = "True"
    process = context.Process(
        target=_run_rank, args=(job, environment, *theirs), name=f"rank {rank}"
    )
    process.start()
    for connection in theirs:
        connection.close()
    return _Rank(rank, process, *ours)


@contextmanager
def _no_main_module() -> Iterator[None]:
    """Keep ranks from importing the caller's script, which then needs no `__main__` guard."""
    main = sys.modules["__main__"]
    sys.modules["__main__"] = types.ModuleType("__main__")
    try:
        yield
    finally:
        sys.modules["__main__"] = main


def _follow(ranks: list[_Rank], timeout: float | None, show: str) -> None:
    """Read prints and replies until all ranks are done, time is up, or a failure has settled."""
    deadline = time.monotonic() + timeout if timeout is not None else float("inf")
    while (left := deadline - time.monotonic()) > 0 and not all(r.reply for r in ranks):
        sources = [c for r in ranks for c in (r.output, r.result) if not c.closed]
        sources += [r.process.sentinel for r in ranks if not r.reply]
        wait(sources, min(left, 1.0))
        for r in ranks:
            _read(r)
        if show != "none":
            _print_new_lines(ranks[0])
        if any(r.failed for r in ranks):
            deadline = min(deadline, time.monotonic() + GRACE)


def _read(r: _Rank) -> None:
    """Take what a rank has printed, its reply, or the news of its death."""
    alive = r.process.is_alive()  # asked first: what it wrote before it died is then in the pipes
    _read_prints(r)
    if not r.result.closed and r.result.poll():
        try:
            r.reply = cloudpickle.loads(r.result.recv_bytes())
        except EOFError:
            pass
        except Exception as error:
            text = f"returned what cannot be read here: {type(error).__name__}: {error}"
            r.reply = _Failure(text, _kinds(error))
        r.result.close()
    if not alive and not r.reply:
        r.reply = _death(r)


def _read_prints(r: _Rank) -> None:
    for _ in range(16):  # not for ever: some rank may print faster than this reads
        if r.output.closed or not r.output.poll():
            break
        chunk = os.read(r.output.fileno(), 65536)
        r.printed += chunk
        if not chunk:
            r.output.close()


def _death(r: _Rank) -> _Failure:
    """How a process ended that left no reply."""
    r.process.join()
    code = r.process.exitcode
    if code >= 0:
        return _Failure(f"exited with {code}")
    text = f"was killed by {signal.Signals(-code).name}"
    if code == -signal.SIGABRT:
        # C++ ends a process that does not catch an exception, and prints the exception.
        printed = r.printed.decode(errors="replace")
        last = re.findall(r"terminat(?:e called|ing).*(?:\n +what\(\): +.*)?", printed)[-1:]
        text += "".join(f": {words.rpartition('what():')[2].strip()}" for words in last)
    return _Failure(text, place=_stack(r))


def _stack(r: _Rank, seconds: float = 0.0) -> list[str]:
    """Where a rank is, or was when it died; for at most `seconds`, wait until it has said so."""
    dump, end = b"", time.monotonic() + seconds
    # faulthandler writes it in many pieces, the outermost frame last.
    while not dump.endswith(b"in <module>\n") and r.stack.poll(max(0.0, end - time.monotonic())):
        if not (piece := os.read(r.stack.fileno(), 65536)):
            break
        dump += piece
    return places(dump.decode(errors="replace"))


def _error(ranks: list[_Rank], timeout: float | None) -> Exception | None:
    """What to raise, if anything; asks the ranks that still run where they are."""
    if any(r.failed for r in ranks):
        return _blame([r for r in ranks if r.failed], len(ranks))
    unfinished = [r for r in ranks if not r.reply]
    if not unfinished:
        return None
    names = " and ".join(f"rank {r.rank}" for r in unfinished)
    lines = [f"{names} of {len(ranks)} still running after {timeout:g} s"]
    for r in unfinished:
        with suppress(ProcessLookupError):  # it may have ended just now
            os.kill(r.process.pid, signal.SIGUSR1)
        lines += [f"rank {r.rank} was at:", *_stack(r, 5.0)]
    return TimeoutError("\n".join(lines))


def _blame(failed: list[_Rank], nprocs: int) -> LaunchError:
    """The error of the rank that failed first; the others fail because it is gone."""

    def order(r: _Rank) -> tuple:
        text = r.reply.text
        if PEER_IS_GONE.search(text):
            return 2, r.reply.when
        # A death is noticed after the errors that it causes, so deaths come first whatever their
        # time. Not this one (pytorch#179291), which is as often the effect of another rank's end.
        died = not r.reply.kinds and "terminate called without an active exception" not in text
        return 0 if died else 1, r.reply.when

    first, *others = sorted(failed, key=order)
    lines = [f"rank {first.rank} of {nprocs} {first.reply.text}"]
    if first.reply.place:
        # The others' places too: gloo aborts the rank that receives a message of the wrong size,
        # and the mistake may be with the rank that sent it.
        for r in (first, *sorted(others, key=lambda r: r.rank)):
            place = r.reply.place or last_place(r.reply.text)
            lines += [f"rank {r.rank} was at:", *place] if place else []
    return LaunchError("\n".join(lines), first.rank, first.reply.kinds)


def _kinds(error: BaseException) -> tuple[str, ...]:
    return tuple(kind.__name__ for kind in type(error).__mro__)


def _end(ranks: list[_Rank]) -> None:
    """No process and no pipe is left, whatever state they are in."""
    for r in ranks:
        if not r.reply:
            r.process.terminate()
    end = time.monotonic() + 1.0
    for r in ranks:
        r.process.join(max(0.0, end - time.monotonic()))
        if r.process.is_alive():
            r.process.kill()
            r.process.join()
        _read_prints(r)
        for connection in (r.result, r.output, r.stack):
            connection.close()
        r.process.close()


def _print_new_lines(r: _Rank, *, rest: bool = False) -> None:
    end = len(r.printed) if rest else r.printed.rfind(b"\n") + 1
    if end > r.shown:
        sys.stdout.write(r.printed[r.shown : end].decode(errors="replace"))
        sys.stdout.flush()
        r.shown = end


def _print_the_rest(ranks: list[_Rank], show: str) -> None:
    if show != "none":
        _print_new_lines(ranks[0], rest=True)
    for r in ranks:
        shown_live = r.rank == 0 and show != "none"
        if (show == "all" or r.failed) and r.printed and not shown_live:
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
    job: bytes, environment: dict, result: Connection, output: Connection, stack: Connection
) -> None:
    _set_up_process(environment, output, stack)
    cells: Cells = {}
    try:
        import torch
        import torch.distributed as dist

        function, args, kwargs, cells, backend, method = cloudpickle.loads(job)
        # The fork server made itself the default here too. A data loader's workers start as the
        # caller would start them: by fork on most systems, which need not pickle a cell's classes.
        mp.set_start_method(method, force=True)
        linecache.cache.update({file: (0, None, lines, file) for file, (_, lines) in cells.items()})
        torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        join_group(backend)
        os.dup2(2, 1)  # only now: before PyTorch 2.12, gloo announces every connection on stdout
        value = function(*args, **kwargs)
        try:
            reply = _to_bytes((value,))
        except Exception as error:
            kind = type(value).__name__
            raise TypeError(f"the {kind} that was returned cannot be sent back: {error}") from None
        function = args = kwargs = value = None
        # Before the group: a DDP reducer that outlives it aborts the process (pytorch#179291).
        gc.collect()
        if dist.is_initialized():
            dist.destroy_process_group()
    except BaseException as error:
        reply = _to_bytes(_Failure(f"failed with {describe(error, cells)}", _kinds(error)))
    for child in mp.active_children():  # a data loader's workers
        child.terminate()
        child.join()
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    result.send_bytes(reply)
    # Not sys.exit: gloo's threads may still run, and would abort the process (SIGABRT).
    os._exit(0)


def _set_up_process(environment: dict, output: Connection, stack: Connection) -> None:
    """Make the forked process one of its own: its group, environment, prints and signals."""
    # Freeze what was preloaded: a collection would unshare copy-on-write pages.
    gc.freeze()
    # A group of its own: an interrupt goes to the caller, who decides what it means here. It comes
    # before the thread that kills the group once the caller is gone.
    os.setsid()
    threading.Thread(target=_end_with_the_caller, daemon=True).start()
    os.environ.clear()  # the fork server has those of the moment it was started
    os.environ.update(environment)
    os.dup2(output.fileno(), 1)
    os.dup2(output.fileno(), 2)
    output.close()
    sys.stdout, sys.stderr = (
        io.TextIOWrapper(io.FileIO(fd, "w", closefd=False), errors="replace", line_buffering=True)
        for fd in (1, 2)
    )
    os.set_blocking(stack.fileno(), False)  # nobody empties it before the process has ended
    # The thread that aborts is often gloo's, which has no Python stack: the others say where.
    faulthandler.enable(file=stack.fileno(), all_threads=True)
    faulthandler.register(signal.SIGUSR1, file=stack.fileno(), all_threads=False)


def _end_with_the_caller() -> None:
    wait([mp.parent_process().sentinel])
    if os.getpgrp() == os.getpid():  # never a group that others are in
        os.killpg(0, signal.SIGKILL)  # with the workers of data loaders
    os._exit(1)


def join_group(backend: str | None = None) -> None:
    """Join the process group that the environment describes (torchrun's, or `launch`'s).

    The rank's GPU becomes the current device. The backend is NCCL if there is a GPU for each rank
    of this machine, else gloo, in which case the ranks share what GPUs there are.

    Raises
    ------
    ValueError
        If a variable of that environment is missing.
    """
    import torch
    import torch.distributed as dist

    if missing := [name for name in GROUP if name not in os.environ]:
        raise ValueError(
            f"{', '.join(missing)} not set: a rank knows its group by {', '.join(GROUP)}. "
            "Start the program with torchrun, which sets them all, or its function with launch."
        )
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

    gloo's epoll thread spins while a message is unread; SCHED_BATCH lets compute preempt it.
    (Measured on 2 cores with Linux 6.18 and torch 2.15: of all-reduces of LeNet's gradients, which
    take 0.5 ms, one in ten took 4.) In torch 2.10 the thread has no name to find it by, and stays
    as it is.
    """
    for thread in Path("/proc/self/task").glob("*"):
        with suppress(OSError):  # the thread has ended, or the system refuses: no harm
            if (thread / "comm").read_text() == "gloo_tcp_loop\n":
                os.sched_setscheduler(int(thread.name), os.SCHED_BATCH, os.sched_param(0))
