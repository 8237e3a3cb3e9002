"""Go on with a training run from its newest checkpoint that is whole."""

from __future__ import annotations

import os
import random
import sys
import zipfile
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from torchladder.checkpoints.saving import (
    checkpoints_in,
    on_first_rank,
    ranks_of,
    versions,
)
from torchladder.models import unwrapped


def resume(
    source: str | os.PathLike,
    parts: Mapping[str, Any],
    *,
    run: Mapping[str, Any] | None = None,
) -> dict[str, Any] | None:
    """Load the newest whole checkpoint into `parts`, and set this rank's random generators.

    Rank 0 says on stderr what was loaded, what is damaged and what has changed since. Call it
    last, when nothing more is to be drawn at random before the next step.

    Parameters
    ----------
    source : path
        A folder that `save_checkpoint` wrote to, or one file. Every rank has to see it.
    parts, run
        As for `save_checkpoint`.

    Returns
    -------
    dict or None
        The checkpoint; None if there is none in the folder.

    Raises
    ------
    ValueError
        If it is of another model or another run, or every file is damaged.

    Examples
    --------
    >>> import tempfile
    >>> from torchladder.checkpoints import save_checkpoint
    >>> parts = {"model": nn.Linear(2, 1)}
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     print(resume(folder, parts))  # nothing there: the first start
    ...     _ = save_checkpoint(folder, parts, step=7)
    ...     print(resume(folder, parts)["step"])
    None
    7
    """
    path = on_first_rank(lambda: _newest_whole(Path(source)), parts)
    if path is None:
        return None
    checkpoint = torch.load(path, map_location="cpu", weights_only=True)
    _check_agreement(path.name, checkpoint, parts, run or {})
    for name, part in parts.items():
        unwrapped(part).load_state_dict(checkpoint[name])
    rank, ranks = ranks_of(parts)
    set_rng_state(checkpoint["rng"][rank % len(checkpoint["rng"])])
    if rank == 0:
        print(_news(path.name, checkpoint, ranks), file=sys.stderr, flush=True)
    return checkpoint


def damage(path: str | os.PathLike) -> str | None:
    """What is wrong with a file of `save_checkpoint`; None if all its contents are right.

    The file is a zip archive with a checksum (CRC-32) for each tensor, which ``torch.load`` does
    not look at: zeros in the middle, as a power failure may leave, load without a word.
    """
    try:
        with zipfile.ZipFile(path) as archive:
            wrong = archive.testzip()
    except (zipfile.BadZipFile, EOFError, NotImplementedError) as error:
        return str(error)
    return wrong and f"the checksum of {wrong} is not that of its content"


def _newest_whole(source: Path) -> Path | None:
    files = checkpoints_in(source) if source.is_dir() else [source]
    for path in reversed(files):
        if not (wrong := damage(path)):
            return path
        before = ": trying the one before" if path != files[0] else ""
        print(f"{path.name} is damaged ({wrong}) and left as it is{before}", file=sys.stderr)
    if files:
        raise ValueError(f"No checkpoint in {source} is whole: take one from a backup.")
    return None


def _check_agreement(
    name: str, checkpoint: Any, parts: Mapping[str, Any], run: Mapping[str, Any]
) -> None:
    """Raise a ValueError with both values wherever the file and the program are at odds."""
    if not (isinstance(checkpoint, dict) and {"run", "rng", "classes"} <= checkpoint.keys()):
        raise ValueError(f"{name} holds no training run; load_into takes the weights of any file.")
    bare = {key: unwrapped(part) for key, part in parts.items()}
    models = {key: part.state_dict() for key, part in bare.items() if isinstance(part, nn.Module)}
    classes = {key: type(part).__name__ for key, part in bare.items()}
    then = {key: checkpoint["run"].get(key, "not there") for key in run}
    then |= _described(checkpoint, checkpoint["classes"], models)
    now = {**run, **_described(models, classes, models)}
    at_odds = [
        f"{key} was {then.get(key, 'not there')}, now {now.get(key, 'not there')}"
        for key in {**then, **now}
        if then.get(key) != now.get(key)
    ]
    if at_odds:
        rest = f"; and {len(at_odds) - 3} more" if len(at_odds) > 3 else ""
        raise ValueError(
            f"{name} is of another run: {'; '.join(at_odds[:3])}{rest}. Go on with what it was "
            "saved with, or start anew in another folder; load_into takes over weights alone."
        )


def _described(
    states: Mapping[str, Any], classes: Mapping[str, str], models: Iterable[str]
) -> dict[str, str]:
    """Shape and type of each of the models' tensors, and the classes of the other parts."""
    described = {key: kind for key, kind in classes.items() if key not in models}
    for key in models:
        for name, value in states.get(key, {}).items():
            if isinstance(value, Tensor):
                kind = f"{tuple(value.shape)} {str(value.dtype).removeprefix('torch.')}"
                described[f"{key}'s {name}"] = kind
    return described


def _news(name: str, checkpoint: Mapping[str, Any], ranks: int) -> str:
    """Where the run goes on, and what is no longer as it was."""
    epoch, batch = checkpoint["epoch"], checkpoint["batch"]
    where = f"in epoch {epoch + 1}" if batch else f"after epoch {epoch}"
    news = f"resumed from {name} {where}, step {checkpoint['step']:,}"
    then = checkpoint["versions"] | {"ranks": len(checkpoint["rng"])}
    now = versions() | {"ranks": ranks}
    if changes := [f"{key} {then[key]} -> {now[key]}" for key in now if then[key] != now[key]]:
        news += f"; changed: {', '.join(changes)}, so the numbers are not those of an unbroken run"
    if then["ranks"] != ranks:
        news += " (each step reads the same images, dropout draws anew)"
    return news


def set_rng_state(state: Mapping[str, Any]) -> None:
    """Put this process's random generators where `rng_state` found them."""
    torch.set_rng_state(state["torch"])
    random.setstate(state["python"])
    np.random.set_state(state["numpy"])  # noqa: NPY002 - that of np.random.rand
    for i, of_gpu in enumerate(state.get("cuda", ())[: torch.cuda.device_count()]):
        torch.cuda.set_rng_state(of_gpu, i)
