"""Save a training run so that no crash costs the last good file, and go on from it.

A checkpoint is one dict in one file, such as ``step_00000431.pt``, that ``torch.load`` opens with
``weights_only=True``. It holds the state dict of each part (model, optimizer, ...) on the CPU, the
model's under its names when unwrapped, so that every rung can load it; ``epoch``, ``batch`` and
``step``: how many are done, which with the seed is the sampler's position; ``rng``: the states of
each rank's random generators; ``run``: the settings that must stay; ``classes`` of the parts;
``versions``; ``number``: which save of the folder it was; and what else the caller gives.
"""

import copy
import itertools
import math
import os
import pickle
import platform
import random
import re
import sys
import zipfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.serialization import config

from torchclinic.modules import unwrapped
from torchclinic.writing import LEFTOVER, atomic_file, sole_use
from torchladder import __version__

_OWN_NAMES = ("epoch", "batch", "step", "rng", "run", "classes", "versions", "number")
_VERSIONS = {  # of what decides the numbers that a run computes
    "torch": str(torch.__version__),  # of a class that weights_only would refuse
    "numpy": np.__version__,
    "python": platform.python_version(),
    "torchladder": __version__,
}
_GIVE_UP_AFTER = 600  # seconds that a rank waits for the others


# --- saving -------------------------------------------------------------------------------------


def save(
    folder: str | os.PathLike,
    parts: Mapping[str, Any],
    *,
    step: int,
    epoch: int = 0,
    batch: int = 0,
    run: Mapping[str, Any] | None = None,
    of_each_rank: Mapping[str, Any] | None = None,
    keep: int = 3,
    best: bool = False,
    no_dist: bool = False,
    **more: Any,
) -> Path:
    """Write a checkpoint to ``folder/step_<step>.pt``, atomically; the path of the file.

    All ranks of a process group call this together. Rank 0 writes while the others wait, and if
    it fails, it fails on all of them. A folder is for one run at a time (`only_run_in` sees to
    that): what killed saves left half-written in it is removed. What has the name of the file and
    is no whole checkpoint of this `run` is renamed, not replaced.

    Parameters
    ----------
    parts : dict
        By name, all that learns or counts: the model (wrapped or not), optimizer, schedule,
        scaler; anything with ``state_dict()`` and ``load_state_dict()``.
    step, epoch, batch : int
        How many are done: steps in all, epochs, and batches of the next epoch.
    run : dict, optional
        Settings that must be the same when the run is resumed: numbers, strings, and the like.
    of_each_rank : dict, optional
        What each rank has for itself; the file holds a list by rank under each key.
    keep : int
        How many files stay; those saved before them go once this one is safely on the disk, also
        those of later steps, from an attempt that was given up.
    best : bool
        Write ``best.pt``, too.
    no_dist : bool
        This process saves for itself alone, whatever process group it is in.
    **more
        Numbers, strings, tensors, lists and dicts to find in the file again.

    Raises
    ------
    OSError
        If the disk is full, or not all ranks call this within ten minutes. Files stay as they were.
    ValueError
        If two things have one name, a tensor is sharded, or ``weights_only=True`` would not load
        what was given.

    Examples
    --------
    >>> import tempfile
    >>> parts = {"model": nn.DataParallel(nn.Linear(2, 1))}
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     path = save(folder, parts, step=7, epoch=1, note="the first epoch")
    ...     print(path.name, list(torch.load(path)["model"]))
    step_00000007.pt ['weight', 'bias']
    """
    _check_arguments(keep, step, [*parts, *(of_each_rank or ()), *more])
    path = Path(folder, f"step_{step:08d}.pt")
    rank, world_size = _meet(f"checkpoint.save to {path}", no_dist)
    by_rank = [{"rng": _rng_state(), **(of_each_rank or {})}] * world_size
    if world_size > 1:
        dist.all_gather_object(by_rank, by_rank[rank])

    def write() -> None:
        inner = {name: unwrapped(part) for name, part in parts.items()}
        checkpoint = {
            **{name: _state_of(part) for name, part in inner.items()},
            **{"epoch": epoch, "batch": batch, "step": step},
            **{key: [of_rank[key] for of_rank in by_rank] for key in by_rank[0]},
            "run": dict(run or {}),
            "classes": {name: type(part).__name__ for name, part in inner.items()},
            "versions": _VERSIONS,
            **_on_cpu(more, {}),
        }
        _write_files(checkpoint, path, keep, best)

    _on_first_rank(write, rank, world_size)
    return path


@contextmanager
def only_run_in(folder: str | os.PathLike, *, no_dist: bool = False) -> Iterator[None]:
    """Keep other runs from saving to `folder` while the block runs; all ranks call this together.

    Rank 0 holds a lock, ``folder/.run.lock``, which its death releases. A BlockingIOError, on every
    rank, names the process and the host that have it.
    """
    rank, world_size = _meet(f"checkpoint.only_run_in {folder}", no_dist)
    with ExitStack() as lock:
        _on_first_rank(lambda: lock.enter_context(sole_use(folder)), rank, world_size)
        yield


def files_in(folder: str | os.PathLike) -> list[Path]:
    """The files that `save` wrote to `folder`, the last saved last; not ``best.pt``.

    After a return to an earlier file, that need not be the one of the last step.
    """
    files = (p for p in Path(folder).glob("step_*.pt") if p.is_file())
    return sorted((p for p in files if re.fullmatch(r"step_\d{8,}", p.stem)), key=_number_of)


def _number_of(path: Path) -> float:
    """Which save of its folder a file was: a copy has another date. Infinity, if it was none."""
    saved = _saved(path)
    return saved["number"] if saved else math.inf


def _saved(path: Path) -> dict[str, Any] | None:
    """What `save` wrote to a file; None if it holds something else."""
    try:
        saved = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
        return saved if saved.keys() >= set(_OWN_NAMES) else None
    except Exception:  # a damaged file can make it raise anything; `load` says that it is damaged
        return None


def _check_arguments(keep: int, step: int, names: list[str]) -> None:
    """Raise a ValueError before anything is written."""
    if keep < 1 or step < 0:
        raise ValueError(f"keep={keep}, step={step}: keep at least 1 file; steps count from 0.")
    # Of two things under one name, the second would replace the first in the file.
    if taken := sorted({n for n in names if names.count(n) > 1 or n in _OWN_NAMES}):
        raise ValueError(
            f"Two things would be called {' and '.join(map(repr, taken))} in the checkpoint; not "
            f"saved. Give each a name of its own; taken are {', '.join(_OWN_NAMES)}."
        )


def _write_files(checkpoint: dict[str, Any], path: Path, keep: int, best: bool) -> None:
    def is_ours(saved: dict[str, Any]) -> bool:
        """Whether `load` would take it for one of this run: then it may go or be replaced."""
        return saved["run"] == checkpoint["run"] and _traits(saved) == _traits(checkpoint)

    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        for kind in ("step_*", "best"):  # not what `torchclinic fix` may be writing there
            for half_written in path.parent.glob(f".{kind}.pt.*{LEFTOVER}"):
                half_written.unlink(missing_ok=True)
        there = [(file, saved) for file in files_in(path.parent) if (saved := _saved(file))]
        checkpoint["number"] = 1 + max((saved["number"] for _, saved in there), default=0)
        # Both are written before one takes its place, and the best is the first to do so: killed
        # in between, the run goes on from before and finds it once more.
        with ExitStack() as files:
            for target in [path, path.with_name("best.pt")] if best else [path]:
                _keep_foreign(target, is_ours)
                _write(checkpoint, files.enter_context(atomic_file(target)))
    except OSError as error:
        what = f"{error.strerror or error}; not saved, and earlier checkpoints are as they were"
        raise type(error)(error.errno, what, str(path)) from error
    # What cannot be read, and what another run saved, is not ours to remove.
    ours = [file for file, saved in there if file != path and is_ours(saved)]
    for old in ours[: -(keep - 1) or None]:
        old.unlink(missing_ok=True)


def _keep_foreign(path: Path, is_ours: Callable[[dict], bool]) -> None:
    """Rename what is there under a checkpoint's name, unless it is a whole one of this run."""
    saved = _saved(path)
    if not os.path.lexists(path) or (saved and is_ours(saved) and not _why_damaged(path)):
        return
    names = (path.with_name(f"{path.name}.aside-{i}") for i in itertools.count(1))
    aside = next(name for name in names if not os.path.lexists(name))
    path.rename(aside)
    moved = f"{path.name} was no whole checkpoint of this run: it is {aside.name} now"
    print(moved, file=sys.stderr)


def _write(checkpoint: dict[str, Any], path: Path) -> None:
    # pyrefly: ignore[missing-attribute] - torch adds it to the module when it runs
    with open(path, "wb") as file, config.patch("save.compute_crc32", True):
        torch.save(checkpoint, file)
    try:
        torch.load(path, weights_only=True, mmap=True)  # reads the structure, not the tensors
    except pickle.UnpicklingError as error:
        raise ValueError(
            "The checkpoint would not load with weights_only=True; not saved. Numbers, strings, "
            "tensors, and lists and dicts of them do load."
        ) from error


def _state_of(part: Any) -> Any:
    # The parameters themselves: else tied ones are two tensors, and two copies in the file.
    variables = {"keep_vars": True} if isinstance(part, nn.Module) else {}
    return _on_cpu(part.state_dict(**variables), {})


def _on_cpu(state: Any, copies: dict[int, Tensor]) -> Any:
    """`state` with every tensor on the CPU, so that it loads where there is no GPU.

    `copies` holds one by the id of each tensor in it: what is there twice stays one.
    """
    if hasattr(state, "device_mesh"):
        raise ValueError(
            "A tensor is sharded (a DTensor), and rank 0 has only its own piece; not saved. "
            "torch.distributed.checkpoint saves all pieces."
        )
    if isinstance(state, Tensor):
        if id(state) not in copies:
            copies[id(state)] = state.detach().cpu()
        return copies[id(state)]
    if isinstance(state, dict):
        moved = copy.copy(state)  # keeps a state dict's _metadata
        moved.update({key: _on_cpu(value, copies) for key, value in state.items()})
        return moved
    if type(state) in (list, tuple):
        return type(state)(_on_cpu(value, copies) for value in state)
    return state


# --- going on -----------------------------------------------------------------------------------


def load(
    source: str | os.PathLike,
    parts: Mapping[str, Any],
    *,
    run: Mapping[str, Any] | None = None,
    no_dist: bool = False,
) -> dict[str, Any] | None:
    """Load the newest whole checkpoint into `parts`, and set this rank's random generators.

    Rank 0 says on stderr what was loaded, what is damaged and what has changed since. Call it
    last, when nothing more is to be drawn at random before the next step.

    Parameters
    ----------
    source : path
        A folder that `save` wrote to, or one file. Every rank has to see it.
    parts, run, no_dist
        As for `save`.

    Returns
    -------
    dict or None
        The checkpoint; None if there is none in the folder, or no folder yet.

    Raises
    ------
    OSError
        If a file is named that is not there, or one cannot be read.
    ValueError
        If it is of another model or another run, or every file is damaged. Models are then as they
        were, as they are if the state of another part does not fit.

    Examples
    --------
    >>> import tempfile
    >>> parts = {"model": nn.Linear(2, 1)}
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     print(load(folder, parts))  # nothing there: the first start
    ...     _ = save(folder, parts, step=7)
    ...     print(load(folder, parts)["step"])
    None
    7
    """
    rank, world_size = _meet(f"checkpoint.load from {source}", no_dist)
    path = _on_first_rank(lambda: _newest_whole(Path(source)), rank, world_size)
    if path is None:
        return None
    checkpoint = torch.load(path, map_location="cpu", weights_only=True)
    _check_agreement(path.name, checkpoint, parts, run or {})
    # Models last: theirs has been compared, of another part's only the class.
    for name in sorted(parts, key=lambda name: isinstance(parts[name], nn.Module)):
        unwrapped(parts[name]).load_state_dict(checkpoint[name])
    _set_rng_state(checkpoint["rng"][rank % len(checkpoint["rng"])])
    if rank == 0:
        print(_message(path.name, checkpoint, world_size), file=sys.stderr, flush=True)
    return checkpoint


def _newest_whole(source: Path) -> Path | None:
    """The newest file of `source` that is whole; those that are not are named on stderr."""
    one_file = source.is_file() or source.suffix == ".pt"
    files = [source] if one_file else files_in(source)
    for path in reversed(files):
        if not (wrong := _why_damaged(path)):
            return path
        before = ": trying the one before" if path != files[0] else ""
        print(f"{path.name} is damaged ({wrong}) and left as it is{before}", file=sys.stderr)
    if files:
        way = "take one from a backup"
        if (source / "best.pt").is_file():
            way = "move them away, copy best.pt to step_00000000.pt there, or " + way
        raise ValueError(f"No checkpoint in {source} is whole: {way}.")
    return None


def _why_damaged(path: str | os.PathLike) -> str | None:
    """What is wrong with a file of `save`; None if nothing is.

    The file is a zip archive with a checksum (CRC-32) for each tensor, which ``torch.load`` does
    not look at: zeros in the middle, as a power failure may leave, load without a word.
    """
    with open(path, "rb") as file:  # whether it can be read at all is another question
        try:
            with zipfile.ZipFile(file) as archive:
                if wrong := archive.testzip():
                    return f"the checksum of {wrong} is not that of its content"
        except Exception as error:  # a damaged file can make it raise anything
            return str(error) or type(error).__name__
    return None


def _check_agreement(
    name: str, checkpoint: Any, parts: Mapping[str, Any], run: Mapping[str, Any]
) -> None:
    """Raise a ValueError with both values wherever the file and the program differ."""
    if not (isinstance(checkpoint, dict) and checkpoint.keys() >= set(_OWN_NAMES)):
        raise ValueError(f"{name} holds no training run; load_into takes the weights of any file.")
    inner = {key: unwrapped(part) for key, part in parts.items()}
    states = {key: part.state_dict() for key, part in inner.items()}
    classes = {key: type(part).__name__ for key, part in inner.items()}
    then = {key: checkpoint["run"].get(key, "not there") for key in run} | _traits(checkpoint)
    now = {**run, **_traits({**states, "classes": classes})}
    differences = [
        f"{key} was {then.get(key, 'not there')}, now {now.get(key, 'not there')}"
        for key in {**then, **now}
        if then.get(key) != now.get(key)
    ]
    if differences:
        rest = f"; and {len(differences) - 3} more" if len(differences) > 3 else ""
        raise ValueError(
            f"{name} is of another run: {'; '.join(differences[:3])}{rest}. Go on with what it was "
            "saved with, or start a new run in another folder; load_into takes over weights alone."
        )


def _traits(checkpoint: Mapping[str, Any]) -> dict[str, str]:
    """What tells the parts from others: a model's shapes and types, of the rest the classes."""
    traits = {}
    for part, kind in checkpoint["classes"].items():
        tensors = {key: t for key, t in checkpoint[part].items() if isinstance(t, Tensor)}
        for key, t in tensors.items():
            shape, dtype = tuple(t.shape), str(t.dtype).removeprefix("torch.")
            traits[f"{part}'s {key}"] = f"{shape} {dtype}"
        if not tensors:
            traits[part] = kind
    return traits


def _message(name: str, checkpoint: Mapping[str, Any], world_size: int) -> str:
    """Where the run goes on, and what is no longer as it was."""
    epoch, batch = checkpoint["epoch"], checkpoint["batch"]
    where = f"in epoch {epoch + 1}" if batch else f"after epoch {epoch}"
    text = f"resumed from {name} {where}, step {checkpoint['step']:,}"
    then = checkpoint["versions"] | {"world_size": len(checkpoint["rng"])}
    now = _VERSIONS | {"world_size": world_size}
    if changes := [f"{key} {then[key]} -> {now[key]}" for key in now if then[key] != now[key]]:
        text += f"; changed: {', '.join(changes)}, so the numbers are not those of an unbroken run"
    if then["world_size"] != world_size:
        text += " (each step reads the same images, dropout draws other numbers)"
    return text


# --- random generators --------------------------------------------------------------------------


def _rng_state() -> dict[str, Any]:
    """The states of this process's random generators, as plain values and tensors."""
    numpy: Any = np.random.get_state()  # noqa: NPY002 - that of np.random.rand
    state: dict[str, Any] = {
        "torch": torch.get_rng_state(),
        "python": random.getstate(),
        "numpy": (numpy[0], numpy[1].tolist(), *numpy[2:]),  # weights_only would refuse an array
    }
    if torch.cuda.is_initialized():
        state["cuda"] = torch.cuda.get_rng_state_all()
    if torch.backends.mps.is_available():  # not verified on macOS
        state["mps"] = torch.mps.get_rng_state()
    return state


def _set_rng_state(state: Mapping[str, Any]) -> None:
    """Put this process's random generators where `_rng_state` found them."""
    torch.set_rng_state(state["torch"])
    random.setstate(state["python"])
    np.random.set_state(state["numpy"])  # noqa: NPY002 - that of np.random.rand
    for i, of_gpu in enumerate(state.get("cuda", ())[: torch.cuda.device_count()]):
        torch.cuda.set_rng_state(of_gpu, i)
    if "mps" in state and torch.backends.mps.is_available():
        torch.mps.set_rng_state(state["mps"])


# --- ranks --------------------------------------------------------------------------------------


def _meet(call: str, no_dist: bool) -> tuple[int, int]:
    """This process's rank and the number of ranks, once all of them have made the same `call`.

    0 and 1 without a process group. The ranks meet in the group's store, not in a collective: if
    rank 0 alone saves (``if rank == 0: save(...)``), the others are in a collective of
    the training by then, and the two would be taken for one.
    """
    if no_dist or not (dist.is_available() and dist.is_initialized()):
        return 0, 1
    rank, world_size = dist.get_rank(), dist.get_world_size()
    store = dist.distributed_c10d._get_default_store()
    count = store.add(f"torchladder/meetings of rank {rank}", 1)
    keys = [f"torchladder/meeting {count} of rank {r}" for r in range(world_size)]
    store.set(keys[rank], call)
    rule = (
        "All ranks of a process group call it, and rank 0 writes; for one rank by itself, "
        "save and load take no_dist=True."
    )
    try:
        store.wait(keys, timedelta(seconds=_GIVE_UP_AFTER))
    except dist.DistStoreError as error:
        late = ", ".join(str(r) for r in range(world_size) if not store.check([keys[r]]))
        waited = f"rank {rank} has waited {_GIVE_UP_AFTER} s for rank {late}"
        raise TimeoutError(f"{call}: {waited}. {rule}") from error
    if len(calls := {store.get(key).decode() for key in keys}) > 1:
        raise ValueError(f"The ranks differ: {'; '.join(sorted(calls))}. {rule}")
    return rank, world_size


def _on_first_rank(work: Callable[[], Any], rank: int, world_size: int) -> Any:
    """What `work` returns on rank 0, the only one to call it; its failure raises on every rank.

    Were it to raise on rank 0 alone, the others would wait for it in their next collective.
    """
    if world_size == 1:
        return work()
    outcome: list[Any] = [None, None]  # result and failure
    if rank == 0:
        try:
            outcome[0] = work()
        except Exception as error:
            outcome[1] = error
            if type(error).__module__ != "builtins":  # then it may not survive the journey
                outcome[1] = RuntimeError(f"{type(error).__name__}: {error}")
                outcome[1].__cause__ = error
    dist.broadcast_object_list(outcome)  # the others wait here until rank 0 is done
    result, failure = outcome
    if failure is not None:
        raise failure
    return result
