"""Load a checkpoint of any rung into a model of any rung, and say what happened."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
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
from torchclinic.checkpoints.reports import Report, counted, lines
from torchclinic.checkpoints.weights import choose, split
from torchclinic.modules import unwrapped


def load_into(
    model: nn.Module,
    source: str | Path | Mapping[str, Any],
    *,
    strict: bool = True,
    skip: Iterable[str] = (),
    reinit: Iterable[str] = (),
    key: str | None = None,
) -> Report:
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

    Returns
    -------
    Report
        Its attributes: ``names``, from the model's keys to those they were loaded from;
        ``skipped`` and ``reinitialised`` keys, as asked; with ``strict=False``, ``missing_keys``,
        ``unexpected_keys`` and ``mismatched_shapes``, as PyTorch has them.

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
        found.names.pop(k, None)
        found.mismatched_shapes.pop(k, None)
    found.missing_keys = [k for k in found.missing_keys if not _is_under(k, aside)]
    if found.problems() and (strict or not found.names):
        way_out = "Name new parts in reinit= and old ones in skip=; strict=False loads what fits."
        raise misfit(where, plain, found, way_out)
    if checkpoint:
        checkpoint.verify((file_key, values[file_key]) for file_key in found.names.values())
    plain.load_state_dict({k: values[old] for k, old in found.names.items()}, strict=False)
    for part in parts:
        part.reset_parameters()
    done = Report(**vars(found))
    done.skipped = [k for k in ours if _is_under(k, skip)]
    done.reinitialised = [k for k in ours if _is_under(k, reinit)]
    renamed = sum(k != old for k, old in found.names.items())
    done.text = lines(
        loaded=f"{len(found.names)} keys, {renamed} of them under another name",
        initialised=counted(done.reinitialised),
        skipped=counted(done.skipped),
        missing=counted(found.missing_keys),
        unexpected=counted(found.unexpected_keys),
        other_shape=counted(found.mismatched_shapes),
        left_out=counted({COUNTER} & values.keys() - ours.keys()),
    )
    return done


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
    problems = (
        f"{where} does not fit {type(model).__name__}: {fits}, {', '.join(found.problems())}."
    )
    return CheckpointError(f"{problems} {way_out}" if found.names else problems)


def _is_under(key: str, names: Iterable[str]) -> bool:
    """Whether `key`, apart from wrappers, is one of `names` or in one of these submodules."""
    inner = drop_segments(key)
    forms = key, inner, strip_leading_wrappers(inner)
    return any(f"{k}.".startswith(f"{name}.") for k in forms for name in names)


def _must_exist(names: Iterable[str], keys: Iterable[str], model: str) -> None:
    for name in [name for name in names if not any(_is_under(key, [name]) for key in keys)]:
        layers = dict.fromkeys([*(key.rpartition(".")[0] for key in keys), *keys])
        near = difflib.get_close_matches(name, layers, 1)
        hint = f"; is it {near[0]!r}?" if near else "."
        raise CheckpointError(f"skip or reinit: {model} has no {name!r}{hint}")


def _resettable(model: nn.Module, name: str) -> list[nn.Module]:
    """The modules in the submodule `name` that have parameters of their own."""
    inner = [m for path, m in model.named_modules() if f"{path}.".startswith(f"{name}.")]
    modules = [m for m in inner if next(m.parameters(recurse=False), None) is not None]
    if not modules or not all(hasattr(module, "reset_parameters") for module in modules):
        raise CheckpointError(
            f"reinit: {name!r} has no reset_parameters(). Name it in skip=, and give it new "
            "numbers afterwards, by torch.nn.init."
        )
    return modules
