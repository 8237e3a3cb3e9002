"""Load a checkpoint of any rung into a model of any rung, and say what happened."""

from __future__ import annotations

import copy
import difflib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from torchladder.checkpoints.keys import (
    COUNTER,
    Match,
    drop_segments,
    match,
    strip_leading_wrappers,
)
from torchladder.checkpoints.reading import Checkpoint, CheckpointError, open_checkpoint
from torchladder.checkpoints.reports import counted, report
from torchladder.checkpoints.state_dicts import choose, is_model, split
from torchladder.models import unwrapped

WAY_OUT = "Name new parts in reinit= and old ones in skip=; strict=False loads what fits."


@dataclass(repr=False)
class LoadReport:
    """What `load_into` did; its ``repr`` is the report. The last lists are of ``strict=False``."""

    names: dict[str, str]  # from the model's keys to those they were loaded from
    skipped: list[str]  # keys of the model that were left alone, as asked
    reinitialised: list[str]  # keys of the model that got new numbers, as asked
    missing_keys: list[str]  # keys of the model that the source lacks
    unexpected_keys: list[str]  # keys of the source that the model lacks
    mismatched_shapes: dict[str, tuple[tuple, tuple]]  # not loaded: source's and model's
    left_out: list[str]  # keys of the source that are not weights: AveragedModel's counter

    def __repr__(self) -> str:
        renamed = sum(key != source for key, source in self.names.items())
        return report(
            loaded=f"{len(self.names)} keys, {renamed} of them under another name",
            initialised=counted(self.reinitialised),
            skipped=counted(self.skipped),
            missing=counted(self.missing_keys),
            unexpected=counted(self.unexpected_keys),
            other_shape=counted(self.mismatched_shapes),
            left_out=counted(self.left_out),
        )


def load_into(
    model: nn.Module,
    source: str | Path | Mapping[str, Any],
    *,
    strict: bool = True,
    skip: Iterable[str] = (),
    reinit: Iterable[str] | Mapping[str, Callable[[Tensor], Any]] = (),
    key: str | None = None,
) -> LoadReport:
    """Load weights by name, whatever wraps the model here or wrapped it when it was saved.

    Parameters
    ----------
    model : Module
        May be in DataParallel, DistributedDataParallel or ``torch.compile``. It keeps its devices
        and dtypes. If this raises, it is as it was.
    source : path or dict
        A checkpoint of any kind that `inspect_checkpoint` knows, or a state dict.
    strict : bool
        Whether every key must find its partner, in the right shape. If not, those that do are
        loaded; if none does, it is an error all the same.
    skip : sequence of str
        Names of parameters, buffers or submodules: the model's are left as they are, the
        source's are not looked at.
    reinit : sequence of str, or dict
        Names of the model's to initialise, as for a new head. A sequence calls the submodules'
        ``reset_parameters()``; a dict says how, by a function of ``torch.nn.init`` for each name.
    key : str, optional
        Under which dotted key of the source the state dict is, if there are several.

    Raises
    ------
    CheckpointError
        If the source cannot be read or does not fit; the message has the keys and the shapes.
    OSError
        If there is no such file or it may not be read.

    Examples
    --------
    A head of 200 classes on a model that was trained, in DataParallel, for 1000:

    >>> from functools import partial
    >>> old = nn.Sequential(nn.Linear(8, 4), nn.Linear(4, 1000))
    >>> new = nn.Sequential(nn.Linear(8, 4), nn.Linear(4, 200))
    >>> how = {"1.weight": partial(nn.init.normal_, std=0.02), "1.bias": nn.init.zeros_}
    >>> load_into(new, nn.DataParallel(old).state_dict(), reinit=how)
    loaded      2 keys, 2 of them under another name
    initialised 2: 1.weight, 1.bias
    """
    plain = unwrapped(model)
    ours = plain.state_dict()
    values, checkpoint = _source(source, key)
    _must_exist([*skip, *reinit], {*ours, *values}, type(plain).__name__)
    if empty := [k for k, value in ours.items() if getattr(value, "is_meta", False)]:
        raise CheckpointError(
            f"{type(plain).__name__}: {empty[0]!r} is on the meta device, which holds no numbers: "
            "model.to_empty(device=...) first."
        )
    skipped = [k for k in ours if _is_under(k, skip)]
    initialised = _initialised(plain, reinit)
    found = match_model({k: v for k, v in values.items() if not _is_under(k, skip)}, plain)
    aside = {*skipped, *initialised}
    found.names = {k: file_key for k, file_key in found.names.items() if k not in aside}
    found.missing_keys = [k for k in found.missing_keys if k not in aside]
    found.mismatched_shapes = {k: v for k, v in found.mismatched_shapes.items() if k not in aside}
    if found.problems() and (strict or not found.names):
        raise misfit(source if checkpoint else "This state dict", plain, found, WAY_OUT)
    state = {k: values[file_key] for k, file_key in found.names.items()}
    if checkpoint:
        checkpoint.verify((file_key, values[file_key]) for file_key in found.names.values())
    plain.load_state_dict(state | initialised, strict=False)
    trouble = found.missing_keys, found.unexpected_keys, found.mismatched_shapes
    left_out = [k for k in values if k == COUNTER and k not in ours]
    return LoadReport(found.names, skipped, list(initialised), *trouble, left_out)


def match_model(values: Mapping[str, Any], model: nn.Module) -> Match:
    """`match` with a model's state dict; a tied tensor may be in the file under one name."""
    found = match(values, model.state_dict())
    parameters = dict(model.named_parameters(remove_duplicate=False))
    homes = {id(parameters.get(k)): file_key for k, file_key in found.names.items()}
    for name in [k for k in found.missing_keys if k in parameters and id(parameters[k]) in homes]:
        found.names[name] = homes[id(parameters[name])]
        found.missing_keys.remove(name)
    return found


def misfit(where: Any, model: nn.Module, found: Match, way_out: str) -> CheckpointError:
    """The error for weights that do not fit, with keys, shapes and near names."""
    fits = f"{len(found.names)} keys fit" if found.names else "no key fits"
    return CheckpointError(
        f"{where} does not fit {type(model).__name__}: {fits}, {', '.join(found.problems())}."
        + (f" {way_out}" if found.names else "")
    )


def _source(source: Any, key: str | None) -> tuple[dict[str, Any], Checkpoint | None]:
    """What of a file or state dict a model can take, and the file."""
    checkpoint = open_checkpoint(source) if isinstance(source, str | Path) else None
    where = source if checkpoint else "This state dict"
    weights = choose(checkpoint.tree if checkpoint else source, where, key)[1]
    if is_model(weights):
        raise CheckpointError(
            f"{where}: a whole model of class {weights.name}. If you trust the file, make a state "
            "dict of it first: fix_checkpoint(..., trust=True)."
        )
    return split(weights, where)[0], checkpoint


def _is_under(key: str, names: Iterable[str]) -> bool:
    """Whether `key`, apart from wrappers, is one of `names` or in one of these submodules."""
    parts = drop_segments(key).split(".")
    forms = key, ".".join(parts), strip_leading_wrappers(".".join(parts))
    return any(f"{k}.".startswith(f"{name}.") for k in forms for name in names)


def _must_exist(names: Iterable[str], keys: Iterable[str], model: str) -> None:
    for name in names:
        if not any(_is_under(key, [name]) for key in keys):
            near = difflib.get_close_matches(
                name, {k.rpartition(".")[0] for k in keys} | {*keys}, 1
            )
            hint = f"; is it {near[0]!r}?" if near else "."
            raise CheckpointError(f"skip or reinit: {model} has no {name!r}{hint}")


def _initialised(model: nn.Module, reinit: Any) -> dict[str, Tensor]:
    """New tensors for the parts of `model` named in `reinit`; the model stays as it is."""
    state, parameters = model.state_dict(), dict(model.named_parameters(remove_duplicate=False))
    initialised = {}
    for name in reinit:
        keys = [k for k in state if _is_under(k, [name])]
        if isinstance(reinit, Mapping):
            for k in keys:
                if k in parameters or k == name:
                    tensor = torch.empty_like(state[k])
                    with torch.no_grad():
                        made = reinit[name](tensor)
                    initialised[k] = made if isinstance(made, Tensor) else tensor
            continue
        part = copy.deepcopy(model.get_submodule(name)) if name not in state else None
        for module in part.modules() if part is not None else [None]:
            if hasattr(module, "reset_parameters"):
                module.reset_parameters()
            elif part is None or next(module.parameters(recurse=False), None) is not None:
                raise CheckpointError(
                    f"reinit: {name!r} has no reset_parameters(). Say how it is made: "
                    f"reinit={{{name!r}: torch.nn.init.zeros_}}."
                )
        initialised |= {f"{name}.{k}": tensor for k, tensor in part.state_dict().items()}
    return initialised
