"""Save a training run so that no crash, at any instant, costs the last good file.

A checkpoint is one dict in one file, such as ``step_00000431.pt``, that ``torch.load`` opens with
``weights_only=True``. It holds the state dict of each part (model, optimizer, ...) on the CPU, the
model's under its names when unwrapped, so that every rung can load it; ``epoch``, ``batch`` and
``step``: how many are done, which with the seed is the sampler's position; ``rng``: the states of
each rank's random generators; ``run``: the settings that must stay; ``classes`` of the parts;
``versions``; and what else the caller gives.
"""

from __future__ import annotations

import copy
import os
import platform
import random
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from torchladder import __version__
from torchladder.models import unwrapped
from torchladder.writing import atomic_file


def save_checkpoint(
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
    **more: Any,
) -> Path:
    """Write a checkpoint to ``folder/step_<step>.pt``, atomically; the path of the file.

    If the model is wrapped in DDP, all ranks call this together: rank 0 writes while the others
    wait, and if it fails, it fails on all of them.

    Parameters
    ----------
    folder : path
        Is made if it is not there.
    parts : dict
        By name, all that learns or counts: the model (wrapped or not), optimizer, schedule,
        scaler; anything with ``state_dict()`` and ``load_state_dict()``.
    step, epoch, batch : int
        How many steps, epochs, and batches of the next epoch are done.
    run : dict, optional
        Settings that must be the same when the run is resumed.
    of_each_rank : dict, optional
        What each rank has for itself; the file holds a list by rank under each key.
    keep : int
        How many files stay; older ones are removed once this one is safely on the disk.
    best : bool
        Write ``best.pt``, too.
    **more
        Numbers, strings, tensors, lists and dicts to find in the file again.

    Raises
    ------
    OSError
        If the disk is full or the folder cannot be written. No earlier file is touched.
    ValueError
        If `keep` is below 1, or ``weights_only=True`` would not load what was given.

    Examples
    --------
    >>> import tempfile
    >>> parts = {"model": nn.DataParallel(nn.Linear(2, 1))}
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     path = save_checkpoint(folder, parts, step=7, epoch=1, note="the first epoch")
    ...     print(path.name, list(torch.load(path)["model"]))
    step_00000007.pt ['weight', 'bias']
    """
    if keep < 1:
        raise ValueError(f"keep={keep}: at least the newest checkpoint stays.")
    mine = {"rng": rng_state(), **(of_each_rank or {})}
    of_all = [mine] * ranks_of(parts)[1]
    if len(of_all) > 1:
        dist.all_gather_object(of_all, mine)
    path = Path(folder, f"step_{step:08d}.pt")

    def write() -> None:
        bare = {name: unwrapped(part) for name, part in parts.items()}
        checkpoint = {
            **{name: _on_cpu(part.state_dict()) for name, part in bare.items()},
            "epoch": epoch,
            "batch": batch,
            "step": step,
            **{key: [rank[key] for rank in of_all] for key in mine},
            "run": dict(run or {}),
            "classes": {name: type(part).__name__ for name, part in bare.items()},
            "versions": versions(),
            **more,
        }
        path.parent.mkdir(parents=True, exist_ok=True)
        # The best first: killed in between, the run goes on from before and finds it once more.
        for target in [path.with_name("best.pt"), path] if best else [path]:
            with atomic_file(target) as temporary:
                _write(checkpoint, temporary)
        # Files of later steps are damaged, or of an attempt given up: not ours to remove.
        for old in [p for p in checkpoints_in(folder) if p.name <= path.name][:-keep]:
            old.unlink(missing_ok=True)

    try:
        on_first_rank(write, parts)
    except OSError as error:
        what = f"{error.strerror or error}; not saved, and earlier checkpoints are as they were"
        raise type(error)(error.errno, what, str(path)) from error
    return path


def checkpoints_in(folder: str | os.PathLike) -> list[Path]:
    """The files that `save_checkpoint` wrote to `folder`, the newest last; not ``best.pt``."""
    return sorted(Path(folder).glob("step_" + "[0-9]" * 8 + ".pt"))


def rng_state() -> dict[str, Any]:
    """The states of this process's random generators, as plain values and tensors."""
    name, keys, *position = np.random.get_state()  # noqa: NPY002 - that of np.random.rand
    state = {
        "torch": torch.get_rng_state(),
        "python": random.getstate(),
        "numpy": (name, keys.tolist(), *position),  # weights_only would refuse an array
    }
    if torch.cuda.is_initialized():
        state["cuda"] = torch.cuda.get_rng_state_all()
    return state


def versions() -> dict[str, str]:
    """Of the programs that compute."""
    return {
        "torch": str(torch.__version__),  # of a class that weights_only would refuse
        "numpy": np.__version__,
        "python": platform.python_version(),
        "torchladder": __version__,
    }


def ranks_of(parts: Mapping[str, Any]) -> tuple[int, int]:
    """This process's rank and the number of ranks that train `parts`: 0 and 1 without DDP."""
    models = [part for part in parts.values() if isinstance(part, nn.Module)]
    if any(isinstance(m, DistributedDataParallel) for model in models for m in model.modules()):
        return dist.get_rank(), dist.get_world_size()
    return 0, 1


def on_first_rank(work: Callable[[], Any], parts: Mapping[str, Any]) -> Any:
    """What `work` returns on rank 0, the only one to call it; its failure raises on every rank.

    Were it to raise on rank 0 alone, the others would wait for it in their next collective.
    """
    rank, ranks = ranks_of(parts)
    if ranks == 1:
        return work()
    result, failure = None, None
    if rank == 0:
        try:
            result = work()
        except Exception as error:
            failure = error
            if type(error).__module__ != "builtins":  # then it may not survive the journey
                failure = RuntimeError(f"{type(error).__name__}: {error}")
                failure.__cause__ = error
    outcome = [result, failure]
    dist.broadcast_object_list(outcome)  # the others wait here until rank 0 is done
    result, failure = outcome
    if failure is not None:
        raise failure
    return result


def _write(checkpoint: dict[str, Any], path: Path) -> None:
    with open(path, "wb") as file:
        torch.save(checkpoint, file)
    try:
        torch.load(path, weights_only=True, mmap=True)  # reads the structure, not the tensors
    except Exception as error:
        why = str(error).splitlines()[0]
        raise ValueError(f"It would not load with weights_only=True; not saved: {why}") from error


def _on_cpu(state: Any) -> Any:
    """`state` with every tensor on the CPU, so that it loads where there is no GPU."""
    if isinstance(state, Tensor):
        return state.cpu()
    if isinstance(state, dict):
        moved = copy.copy(state)  # keeps a state dict's _metadata
        moved.update({key: _on_cpu(value) for key, value in state.items()})
        return moved
    if isinstance(state, list | tuple):
        return type(state)(_on_cpu(value) for value in state)
    return state
