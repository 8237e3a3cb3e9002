"""Load a checkpoint of any rung into a model of any rung, and say what happened."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn

from torchclinic.checkpoints.keys import (
    COUNTER,
    Match,
    drop_segments,
    match,
    strip_leading_wrappers,
)
from torchclinic.checkpoints.reading import CheckpointError, open_checkpoint
from torchclinic.checkpoints.reports import counted, report
from torchclinic.checkpoints.state_dicts import choose, split
from torchclinic.modules import unwrapped

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
    reinit: Iterable[str] = (),
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
    skip, reinit : sequence of str
        Names of submodules (for `skip`, of parameters and buffers too) that take nothing from the
        source: they are left as they are, or get new numbers by their ``reset_parameters()``.
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

    >>> old = nn.Sequential(nn.Linear(8, 4), nn.Linear(4, 1000))
    >>> new = nn.Sequential(nn.Linear(8, 4), nn.Linear(4, 200))
    >>> load_into(new, nn.DataParallel(old).state_dict(), skip=["1"])
    loaded      2 keys, 2 of them under another name
    skipped     2: 1.weight, 1.bias
    """
    plain, checkpoint = unwrapped(model), None
    if isinstance(source, str | Path):
        checkpoint = open_checkpoint(source)
    where = source if checkpoint else "This state dict"
    values, _ = split(choose(checkpoint.tree if checkpoint else source, where, key)[1], where)
    ours, aside = plain.state_dict(), [*skip, *reinit]
    _must_exist(aside, [*ours, *values], type(plain).__name__)
    if empty := [k for k, value in ours.items() if getattr(value, "is_meta", False)]:
        raise CheckpointError(
            f"{type(plain).__name__}: {empty[0]!r} is on the meta device, which holds no numbers: "
            "model.to_empty(device=...) first."
        )
    parts = [part for name in reinit for part in _resettable(plain, name)]
    found = match_model({k: v for k, v in values.items() if not _is_under(k, aside)}, plain)
    for k in [k for k in ours if _is_under(k, aside)]:
        found.forget(k)
    if found.problems() and (strict or not found.names):
        raise misfit(where, plain, found, WAY_OUT)
    if checkpoint:
        checkpoint.verify((file_key, values[file_key]) for file_key in found.names.values())
    state = {k: values[file_key] for k, file_key in found.names.items()}
    plain.load_state_dict(state, strict=False)
    for part in parts:
        part.reset_parameters()
    return LoadReport(
        names=found.names,
        skipped=[k for k in ours if _is_under(k, skip)],
        reinitialised=[k for k in ours if _is_under(k, reinit)],
        missing_keys=found.missing_keys,
        unexpected_keys=found.unexpected_keys,
        mismatched_shapes=found.mismatched_shapes,
        left_out=[k for k in values if k == COUNTER and k not in ours],
    )


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


def _is_under(key: str, names: Iterable[str]) -> bool:
    """Whether `key`, apart from wrappers, is one of `names` or in one of these submodules."""
    parts = drop_segments(key).split(".")
    forms = key, ".".join(parts), strip_leading_wrappers(".".join(parts))
    return any(f"{k}.".startswith(f"{name}.") for k in forms for name in names)


def _must_exist(names: Iterable[str], keys: Iterable[str], model: str) -> None:
    for name in names:
        if not any(_is_under(key, [name]) for key in keys):
            near = difflib.get_close_matches(
                name, dict.fromkeys([*(k.rpartition(".")[0] for k in keys), *keys]), 1
            )
            hint = f"; is it {near[0]!r}?" if near else "."
            raise CheckpointError(f"skip or reinit: {model} has no {name!r}{hint}")


def _resettable(model: nn.Module, name: str) -> list[nn.Module]:
    """The modules in the submodule `name` that have parameters of their own."""
    modules = [
        module for path, module in model.named_modules() if f"{path}.".startswith(f"{name}.")
    ]
    modules = [m for m in modules if next(m.parameters(recurse=False), None) is not None]
    if not modules or not all(hasattr(module, "reset_parameters") for module in modules):
        raise CheckpointError(
            f"reinit: {name!r} has no reset_parameters(). Name it in skip=, and give it new "
            "numbers afterwards, by torch.nn.init."
        )
    return modules
