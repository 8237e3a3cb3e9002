"""Run a function in several processes that form a process group; from a notebook, a script, a test.

``torchrun`` starts scripts. `launch` starts functions, such as one defined in a notebook's cell:

* The function travels as bytes made by cloudpickle, code included, so it may be defined anywhere.
* The processes are forked by Python's *fork server*, a small process that has imported torch and
  done nothing else. Forking the notebook itself would copy a started CUDA, which cannot work, and
  running OpenMP threads, which hang.
* The caller holds the `TCPStore` in which the ranks meet, on a port the system chose, as
  torchrun's agent does. Under it, all is plain `torch.distributed`.
"""

import atexit
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
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from queue import SimpleQueue
from typing import Any

import cloudpickle

from torchclinic.frames import Cells, cell_sources, describe, places
from torchclinic.process_group import GROUP, PEER_IS_GONE

# The first DDP or optimizer imports torch._dynamo, which takes a second: once, in the fork server.
PRELOAD = ["torch", "torch._dynamo", "torch.nn.parallel", "torchladder.launching"]
# The beginning of our packages' names: what they call, as the judge of the exercises does, is the
# reader's.
PACKAGE = os.path.join(os.path.dirname(os.path.dirname(__file__)), "torch")
GRACE = 2.0  # seconds for the ranks to say what happened to them, and to leave, once one has failed
KEPT = 10_000_000  # bytes of what a rank prints: of more, the last
LENGTH = 8  # bytes before a reply, which tell its length: see `_read_reply`
STARTING = threading.Lock()  # one launch at a time: see `_no_main_module`


class LaunchError(RuntimeError):
    """A rank failed: `rank` is the one that failed first, `kind` the name of its exception's class.

    `kind` is None if the process ended without an exception. Where two ranks give a collective
    different sizes, `rank` is the one that gloo ended: it received more than it expected.
    """

    def __init__(self, message: str, rank: int, kind: str | None = None) -> None:
        super().__init__(message, rank, kind)  # all of them, for pickle and copy
        self.rank = rank
        self.kind = kind
        self._when = time.time()  # a copy keeps it

    def __str__(self) -> str:
        return self.args[0]


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
    world_size: int = 2,
    timeout: float | None = None,
    show: str = "rank0",
    backend: str | None = None,
    **kwargs: object,
) -> list:
    """Call ``function(*args, **kwargs)`` in `world_size` processes at once; their results by rank.

    When the function starts, the process group is up (see `join_group`), the cores are shared out
    among the ranks, and ``RANK``, ``WORLD_SIZE`` and the like are set as torchrun sets them.
    Tensors arrive, and come back, on the CPU. What the function registers with `atexit` runs before
    its result is sent, and has two seconds after a failure; then the rank is killed, with its
    process group. Whatever happens, Ctrl-C included and however often, no rank is left, nor a
    process that one has started, unless in a group of its own.

    Parameters
    ----------
    function : callable
        Any function; closures, lambdas and functions defined in a notebook's cell too.
    world_size : int
        How many ranks: at most one for each core, but 64 are always allowed. Ranks that share a
        core take turns on it, so more of them are no faster.
    timeout : float, optional
        Seconds after which all is ended with a `TimeoutError` that says where each rank was.
    show : {'rank0', 'all', 'none'}
        Whose prints to show: rank 0's as they come; with ``'all'`` then those of the other ranks,
        in rank order. A failed rank's prints are always shown. Of prints that are not shown as they
        come, the last 10 MB of each rank are kept.
    backend : str, optional
        Default ``'nccl'`` if there is a GPU for each rank, else ``'gloo'``.

    Raises
    ------
    LaunchError
        If a rank raised, exited or was killed. The first to fail is named, with its traceback.
        A note says how to read about the error, if the catalogue (`torchclinic.errors`) has it.
    TypeError
        If `function` is not callable, or it or an argument cannot be sent to another process.

    Examples
    --------
    >>> import torch.distributed as dist
    >>> launch(lambda x: x + dist.get_rank(), 10)
    [10, 11]
    """
    name = getattr(function, "__name__", type(function).__name__)
    if not callable(function):
        raise TypeError(f"{name} is no function: launch(train), not launch(train()).")
    most = max(64, _cores())
    if not 1 <= world_size <= most:
        raise ValueError(f"world_size={world_size}: choose a whole number from 1 to {most}.")
    if show not in ("rank0", "all", "none"):
        raise ValueError(f"show={show!r}: choose 'rank0', 'all' or 'none'.")
    method = mp.get_start_method(allow_none=True)
    job = (function, args, kwargs, cell_sources(), backend, method)
    job = _to_bytes(job, f"{name} or its arguments cannot be sent to a process")
    ranks, said, (stopped, stop) = [], SimpleQueue(), mp.Pipe(duplex=False)
    keeps = (ranks, world_size, job, timeout, show, said, stopped)
    keeper, wake = threading.Thread(target=_keep, args=keeps, daemon=True), stop.fileno()
    with stopped, stop:
        try:
            keeper.start()
            error = said.get()
        finally:
            os.write(wake, b"!")  # a single call in C, which no further interrupt can forestall
            if keeper.is_alive():
                keeper.join()  # this one may be cut short: the keeper goes on
    _print_the_others(ranks, show)
    if error:
        from torchclinic.errors import note

        note(error)
        raise error
    return [cloudpickle.loads(r.reply) for r in ranks]


# --- in the caller ------------------------------------------------------------------------------


def _keep(ranks, world_size, job, timeout, show, said, stopped) -> None:
    """Start the ranks, follow and end them; `said` gets what to raise, or None.

    In a thread of its own, since an interrupt may come at any moment, and once more while it is
    seen to. It raises in the main thread, which does nothing but wait.
    """
    try:
        import torch.distributed as dist

        warm_up()
        # Bound here and now, on a free port: there is no port to agree on and none to lose.
        # Where the loopback is down, it would try again for five minutes.
        store = dist.TCPStore("127.0.0.1", 0, None, True, timedelta(0, 30), wait_for_workers=False)
        try:
            with STARTING, _no_main_module():
                for rank in range(world_size):
                    ranks.append(_start(rank, world_size, store.port, job))
                    if stopped.poll():
                        raise InterruptedError
            ranks[0].live = show != "none"
            _follow(ranks, timeout, stopped)
            error = _error(ranks, timeout)
        finally:
            _end(ranks)
            del store
    except BaseException as problem:
        error = problem
    said.put(error)


@dataclass
class _Rank:
    """What the caller knows of one rank."""

    name: str  # "rank 1 of 2"
    rank: int
    process: BaseProcess
    pid: Any
    result: Connection
    output: Connection  # what it prints
    stack: Connection  # where it is, when asked by a signal or killed by an error
    printed: bytearray = field(default_factory=bytearray)
    live: bool = False  # what it prints is shown at once
    alive: bool = True  # as far as is known: see `_alive`
    received: bytearray = field(default_factory=bytearray)  # of its reply, so far
    reply: bytes | LaunchError | None = None  # what it returned, pickled; or why it did not

    @property
    def failed(self) -> bool:
        return isinstance(self.reply, LaunchError)

    @property
    def done(self) -> bool:  # a failure is sent before what is registered at exit runs
        return not self.alive if self.failed else bool(self.reply)


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


@contextmanager
def _no_main_module() -> Iterator[None]:
    """Keep ranks from importing the caller's script, which then needs no `__main__` guard."""
    main = sys.modules["__main__"]
    sys.modules["__main__"] = types.ModuleType("__main__")
    try:
        yield
    finally:
        sys.modules["__main__"] = main


def _start(rank: int, world_size: int, port: int, job: bytes) -> _Rank:
    context = mp.get_context("forkserver")
    ours, theirs = zip(*(context.Pipe(duplex=False) for _ in range(3)), strict=True)
    values = (rank, rank, world_size, world_size, "127.0.0.1", port)
    environment = os.environ | dict(zip(GROUP, map(str, values), strict=True))
    # What torchrun sets so that rank 0 joins its agent's store instead of opening one.
    environment["TORCHELASTIC_USE_AGENT_STORE"] = "True"
    environment.setdefault("OMP_NUM_THREADS", str(max(1, _cores() // world_size)))
    name = f"rank {rank} of {world_size}"
    process = context.Process(target=_run_rank, args=(name, job, environment, *theirs))
    process.start()
    # Or whoever starts the next process would take this one's exit code, and Python's end await it.
    mp.process._children.discard(process)  # pyrefly: ignore[missing-attribute] - it is private
    for connection in theirs:
        connection.close()
    return _Rank(name, rank, process, process.pid, *ours)


def _follow(ranks: list[_Rank], timeout: float | None, stopped: Connection) -> None:
    """Read prints and replies until all ranks are done, time is up, or a failure has settled."""
    deadline = time.monotonic() + timeout if timeout is not None else float("inf")
    while (left := deadline - time.monotonic()) > 0 and not all(r.done for r in ranks):
        sources = [c for r in ranks for c in (r.output, r.result) if not c.closed]
        sources += [r.process.sentinel for r in ranks if not r.done]
        if stopped in wait([stopped, *sources], min(left, 1.0)):
            raise InterruptedError
        for r in ranks:
            _read(r)
        if any(r.failed for r in ranks):
            deadline = min(deadline, time.monotonic() + GRACE)


def _read(r: _Rank) -> None:
    """Take what a rank has printed, its reply, or the news of its death."""
    alive = _alive(r)  # first: what it wrote before it died is then in the pipes
    _read_prints(r)
    while _read_reply(r) and not alive:
        pass
    if not alive and not r.reply:
        r.reply = LaunchError(f"{r.name} {_death(r)}", r.rank)


def _alive(r: _Rank) -> bool:
    """Whether a rank lives; when it is first seen not to, all that it has started is ended.

    Another process may get a dead rank's number later: nothing is sent without asking this first.
    """
    if r.alive and not r.process.is_alive():
        r.alive = False
        with suppress(ProcessLookupError, PermissionError):  # the latter is macOS's
            os.killpg(r.pid, signal.SIGKILL)
    return r.alive


def _read_prints(r: _Rank) -> None:
    if r.output.closed or not r.output.poll():
        return
    piece = os.read(r.output.fileno(), 2**20)  # a pipe holds 16 pages, of at most 64 kB
    r.printed += piece
    del r.printed[:-KEPT]
    if r.live:
        print(piece.decode(errors="replace"), end="", flush=True)
    if not piece:
        r.output.close()


def _read_reply(r: _Rank) -> bool:
    """Take what is there of a reply; whether there was any. A rank may stop, or end, within it."""
    if r.result.closed or not r.result.poll():
        return False
    piece = os.read(r.result.fileno(), 2**20)
    r.received += piece
    size = int.from_bytes(r.received[:LENGTH], "big")
    if len(r.received) == LENGTH + size > LENGTH:
        r.reply = cloudpickle.loads(memoryview(r.received)[LENGTH:])
        r.received = bytearray()  # a result may be large
    if not piece:
        r.result.close()
    return bool(piece)


def _death(r: _Rank) -> str:
    """How a process ended that left no reply."""
    r.process.join()
    code = r.process.exitcode
    assert code is not None  # it has ended
    if code >= 0:
        # Python says 255, too, when it has lost the fork server, which would know.
        return f"exited with {code}" + " (or the fork server was killed)" * (code == 255)
    text = f"was killed by {signal.Signals(-code).name}"
    if code == -signal.SIGABRT:
        # C++ ends a process that does not catch an exception, and prints the exception.
        pattern = r"terminat(?:e called|ing).*(?:\n +what\(\): +.*)?"
        if last_words := re.findall(pattern, r.printed.decode(errors="replace")):
            text += f": {last_words[-1].rpartition('what():')[2].strip()}"
    return text + _place(r)


def _place(r: _Rank, end: float = 0.0) -> str:
    """Where a rank is, or was when it died; wait until it has said so, or it is `end` o'clock."""
    dump = b""
    # faulthandler writes it in many pieces, the outermost frame last.
    while not dump.endswith(b"in <module>\n") and r.stack.poll(max(0.0, end - time.monotonic())):
        if not (piece := os.read(r.stack.fileno(), 65536)):
            break
        dump += piece
    lines = places(dump.decode(errors="replace"), hide=PACKAGE)
    return "\n".join([f"\nrank {r.rank} was at:", *lines]) if lines else ""


def _error(ranks: list[_Rank], timeout: float | None) -> Exception | None:
    """What to raise, if anything; asks the ranks that still run where they are."""
    unfinished = [r for r in ranks if not r.reply]
    if failures := [r.reply for r in ranks if isinstance(r.reply, LaunchError)]:
        return _blame(failures, unfinished)
    if not unfinished:
        return None
    names = " and ".join(f"rank {r.rank}" for r in unfinished)
    text = f"{names} of {len(ranks)} still running after {timeout:g} s"
    return TimeoutError(text + "".join(_places_now(unfinished)))


def _places_now(ranks: list[_Rank]) -> list[str]:
    """Where each of the ranks is that still run, unless it does not say so in time."""
    for r in ranks:
        if _alive(r):
            os.kill(r.pid, signal.SIGUSR1)
    end = time.monotonic() + 5.0
    return [_place(r, end) for r in ranks]


def _blame(failures: list[LaunchError], unfinished: list[_Rank]) -> LaunchError:
    """The error of the rank that failed first; the others fail because it is gone."""

    def order(failure: LaunchError) -> tuple:
        text = str(failure)
        if PEER_IS_GONE.search(text):
            return 2, failure._when
        # A death is noticed after the errors that it causes, so deaths come first whatever their
        # time. Not this one (pytorch#179291), which is as often the effect of another rank's end.
        died = not failure.kind and "terminate called without an active exception" not in text
        return 0 if died else 1, failure._when

    first, *others = sorted(failures, key=order)
    more = []
    if "SIGABRT" in str(first):
        # gloo aborts the rank that receives a message of the wrong size; the mistake may be with
        # the rank that sent it, so that one's traceback is told too, or where it waits.
        more = [*map(str, others), *(place.lstrip() for place in _places_now(unfinished))]
    elif not first.kind:  # perhaps another rank's own error made it give up
        more = [str(failure) for failure in others if failure.kind and order(failure)[0] < 2]
    first.args = ("\n\n".join(text for text in (str(first), *more) if text), *first.args[1:])
    return first


def _end(ranks: list[_Rank]) -> None:
    """No process and no pipe is left, whatever state they are in."""
    for r in ranks:
        if _alive(r):  # its reply may be here before it ends itself
            r.process.kill()
    for r in ranks:
        r.process.join()
        _alive(r)  # for what it has started
        _read_prints(r)
        for connection in (r.result, r.output, r.stack):
            connection.close()
        r.process.close()


def _print_the_others(ranks: list[_Rank], show: str) -> None:
    """What the ranks printed, of those that are asked for or failed and were not shown live."""
    for r in ranks:
        text = r.printed.decode(errors="replace").rstrip("\n")
        if text and not r.live and (show == "all" or r.failed):
            print(*(f"[rank {r.rank}] {line}" for line in text.split("\n")), sep="\n")


class _CpuPickler(cloudpickle.Pickler):
    """Pickles tensors as if they were on the CPU: the reader need not have the device.

    Modules such as ``torch.backends.cudnn``, which are of a class of their own, go by their names.
    """

    def reducer_override(self, obj):
        import torch

        if isinstance(obj, torch.Tensor) and obj.device.type not in ("cpu", "meta"):
            moved = obj.detach().cpu()
            if isinstance(obj, torch.nn.Parameter):
                moved = torch.nn.Parameter(moved, obj.requires_grad)
            return moved.__reduce_ex__(4)
        if isinstance(obj, types.ModuleType) and type(obj) is not types.ModuleType:
            return importlib.import_module, (obj.__name__,)
        if isinstance(obj, types.CodeType):  # of which cloudpickle 3.1.3 forgets the file
            return _code_of, (obj.co_filename, *self.dispatch_table[types.CodeType](obj))
        return super().reducer_override(obj)


def _code_of(file: str, make: Callable, parts: tuple) -> types.CodeType:
    return make(*parts).replace(co_filename=file)


def _to_bytes(thing: object, complaint: str = "") -> bytes:
    buffer = io.BytesIO()
    try:
        _CpuPickler(buffer).dump(thing)
    except Exception as error:
        raise TypeError(f"{complaint}: {describe(error, {}, hide=PACKAGE)}") from None
    return buffer.getvalue()


# --- in each rank -------------------------------------------------------------------------------


def join_group(backend: str | None = None) -> None:
    """Join the process group that the environment describes (torchrun's, or `launch`'s).

    The rank's GPU becomes the current device. The backend is NCCL if this machine has a GPU for
    each of its ranks, else gloo, in which case the ranks share what GPUs there are. Name it where
    machines differ.
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


def _run_rank(
    name: str,
    job: bytes,
    environment: dict[str, str],
    result: Connection,
    output: Connection,
    stack: Connection,
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
        kind = type(value).__name__
        reply = _to_bytes(value, f"the {kind} that was returned cannot be sent back")
        function = args = kwargs = value = None
        # Before the group: a DDP reducer that outlives it aborts the process (pytorch#179291).
        gc.collect()
        atexit._run_exitfuncs()  # before the group goes, which they may use
        if dist.is_initialized():
            dist.destroy_process_group()
    except BaseException as error:
        kind = type(error).__name__
        text = f"{name} failed with {describe(error, cells, hide=PACKAGE)}"
        reply = LaunchError(text, int(environment["RANK"]), kind)
    for stream in (sys.stdout, sys.stderr):
        with suppress(Exception):  # the function may have closed or replaced it
            stream.flush()
    reply = _to_bytes(reply)
    with os.fdopen(result.fileno(), "wb", closefd=False) as pipe:
        pipe.write(len(reply).to_bytes(LENGTH, "big"))
        pipe.write(reply)
    atexit._run_exitfuncs()  # of a failure, which must not wait for them
    # With all that it has started, such as a data loader's workers. Not sys.exit, even without
    # them: gloo's threads may still run, and would abort the process (SIGABRT).
    os.killpg(0, signal.SIGKILL)


def _set_up_process(environment: dict, output: Connection, stack: Connection) -> None:
    """Make the forked process one of its own: its group, environment, prints and signals."""
    # Freeze what was preloaded: a collection would unshare copy-on-write pages.
    gc.freeze()
    # A group of its own: an interrupt goes to the caller, who decides what it means here. It comes
    # before the thread that kills the group once the caller is gone.
    os.setsid()
    caller: Any = mp.parent_process()
    _end_with(caller.sentinel)
    # What runs at exit is the function's own: what torch registered in the fork server takes 0.2 s.
    atexit._clear()
    finalize: Any = weakref.finalize  # whose private names the type checker does not know
    finalize._registry.clear()
    atexit.register(finalize._exitfunc)  # removes temporary folders
    os.environ.clear()  # the fork server has those of the moment it was started
    os.environ.update(environment)
    os.dup2(output.fileno(), 1)
    os.dup2(output.fileno(), 2)
    output.close()
    by_line = {"buffering": 1, "encoding": "utf-8", "errors": "replace", "closefd": False}
    sys.stdout, sys.stderr = (os.fdopen(fd, "w", **by_line) for fd in (1, 2))
    os.set_blocking(stack.fileno(), False)  # nobody empties it before the process has ended
    # The thread that aborts is often gloo's, which has no Python stack: the others say where.
    faulthandler.enable(file=stack.fileno(), all_threads=True)
    # After a stop any thread may get the signal. Of all stacks the last is the main thread's.
    faulthandler.register(signal.SIGUSR1, file=stack.fileno(), all_threads=True)


def _end_with(pipe: int) -> None:
    """End this process's group once a pipe's other end is closed, as by the end of its process.

    The caller of `launch` closes it, too, if the fork server was killed.
    """

    def end() -> None:
        wait([pipe])
        os.killpg(0, signal.SIGKILL)  # with the workers of data loaders

    threading.Thread(target=end, daemon=True).start()
    # Linux does the same if no thread can: as one hangs with the interpreter's lock, say.
    with suppress(ImportError, AttributeError, OSError):
        from fcntl import F_SETFL, F_SETOWN, F_SETSIG, fcntl

        fcntl(pipe, F_SETOWN, -os.getpid())
        fcntl(pipe, F_SETSIG, signal.SIGKILL)
        fcntl(pipe, F_SETFL, os.O_ASYNC)
