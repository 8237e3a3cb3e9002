"""Load a checkpoint of any rung into a model of any rung, and say what happened."""

from __future__ import annotations

import copy
import difflib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torchladder.checkpoints.contents import find_weights, is_model, tensors_of
from torchladder.checkpoints.keys import COUNTER, Match, bare, match, without
from torchladder.checkpoints.reading import open_checkpoint
from torchladder.checkpoints.reports import printable, row, some
from torchladder.checkpoints.tensors import CheckpointError, SavedTensor, verify

if TYPE_CHECKING:
    import torch

WAY_OUT = "Name new parts in reinit= and old ones in skip=; strict=False loads what fits."


@dataclass(repr=False)
class LoadReport:
    """What `load_into` did; its ``repr`` is the report. The last lists are of ``strict=False``."""

    names: dict[str, str]  # from the model's keys to those they were loaded from
    skipped: list[str]  # keys of the model that were left alone, as asked
    reinitialised: list[str]  # keys of the model that were made anew, as asked
    missing: list[str]  # keys of the model that found no partner
    left_over: list[str]  # keys of the source that found none
    changed: dict[str, tuple[tuple, tuple]]  # not loaded for their shapes: source's and model's
    left_out: list[str]  # keys of the source that are not weights: AveragedModel's counter

    def __repr__(self) -> str:
        renamed = sum(key != source for key, source in self.names.items())
        lines = row("loaded", f"{len(self.names)} keys, {renamed} of them under another name")
        labels = {"made anew": self.reinitialised, "skipped": self.skipped}
        labels |= {"missing": self.missing, "left over": self.left_over}
        labels |= {"other shape": list(self.changed), "left out": self.left_out}
        for label, keys in labels.items():
            lines += row(label, f"{len(keys)}: {some(keys)}") if keys else []
        return printable(lines)


def load_into(
    model: torch.nn.Module,
    source: str | Path | Mapping[str, Any],
    *,
    strict: bool = True,
    skip: Iterable[str] = (),
    reinit: Iterable[str] | Mapping[str, Callable[[torch.Tensor], Any]] = (),
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
        Names of the model's to make anew, as for a new head. A sequence calls the submodules'
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
    >>> from torch import nn
    >>> old = nn.Sequential(nn.Linear(8, 4), nn.Linear(4, 1000))
    >>> new = nn.Sequential(nn.Linear(8, 4), nn.Linear(4, 200))
    >>> how = {"1.weight": partial(nn.init.normal_, std=0.02), "1.bias": nn.init.zeros_}
    >>> load_into(new, nn.DataParallel(old).state_dict(), reinit=how)
    loaded      2 keys, 2 of them under another name
    made anew   2: 1.weight, 1.bias
    """
    from torchladder.models import unwrapped

    plain = unwrapped(model)
    ours = plain.state_dict()
    tensors, where = _tensors(source, key)
    skipped = [k for k in ours if _is_under(k, skip)]
    left = [k for k in tensors if _is_under(k, skip)]
    _must_exist([*skip, *reinit], {*ours, *tensors}, type(plain).__name__)
    if empty := [k for k, value in ours.items() if getattr(value, "is_meta", False)]:
        raise CheckpointError(
            f"{type(plain).__name__}: {empty[0]!r} is on the meta device, which holds no numbers: "
            "model.to_empty(device=...) first."
        )
    anew = _made_anew(plain, reinit)
    found = match_model({k: t for k, t in tensors.items() if k not in left}, plain)
    aside = {*skipped, *anew}
    found.names = {k: file_key for k, file_key in found.names.items() if k not in aside}
    found.missing = [k for k in found.missing if k not in aside]
    found.changed = {k: shapes for k, shapes in found.changed.items() if k not in aside}
    if found.problems() and (strict or not found.names):
        raise misfit(where, plain, found, WAY_OUT)
    state = {k: tensors[file_key] for k, file_key in found.names.items()}
    verify({id(t.storage): t.storage for t in state.values()}.values())
    plain.load_state_dict({k: t.load() for k, t in state.items()} | anew, strict=False)
    trouble = found.missing, found.left_over, found.changed
    left_out = [k for k in tensors if k == COUNTER and k not in ours]
    return LoadReport(found.names, skipped, list(anew), *trouble, left_out)


def match_model(tensors: Mapping[str, SavedTensor], model: torch.nn.Module) -> Match:
    """`match` with a model's state dict; a tied tensor may be in the file under one name."""
    found = match(tensors, model.state_dict())
    parameters = dict(model.named_parameters(remove_duplicate=False))
    homes = {id(parameters.get(k)): file_key for k, file_key in found.names.items()}
    for name in [k for k in found.missing if k in parameters and id(parameters[k]) in homes]:
        found.names[name] = homes[id(parameters[name])]
        found.missing.remove(name)
    return found


def misfit(where: Any, model: torch.nn.Module, found: Match, way_out: str) -> CheckpointError:
    """The error for weights that do not fit, with keys, shapes and near names."""
    fits = f"{len(found.names)} keys fit" if found.names else "no key fits"
    return CheckpointError(
        f"{where} does not fit {type(model).__name__}: {fits}, {', '.join(found.problems())}."
        + (f" {way_out}" if found.names else "")
    )


def _tensors(source: Any, key: str | None) -> tuple[dict[str, SavedTensor], Any]:
    """The tensors of a file or of a state dict, and what to call it."""
    if isinstance(source, str | Path):
        tree, where = open_checkpoint(source).tree, source
    else:
        tree, where = source, "This state dict"
    weights = find_weights(tree, where, key)[1]
    if is_model(weights):
        raise CheckpointError(
            f"{where}: a whole model of class {weights.name}. If you trust the file, make a state "
            "dict of it first: fix_checkpoint(..., trust=True)."
        )
    return tensors_of(weights, where)[0], where


def _is_under(key: str, names: Iterable[str]) -> bool:
    """Whether `key`, apart from wrappers, is one of `names` or in one of these submodules."""
    parts = without(key).split(".")
    forms = key, ".".join(parts), bare(".".join(parts))
    return any(f"{k}.".startswith(f"{name}.") for k in forms for name in names)


def _must_exist(names: Iterable[str], keys: Iterable[str], model: str) -> None:
    for name in names:
        if not any(_is_under(key, [name]) for key in keys):
            near = difflib.get_close_matches(
                name, {k.rpartition(".")[0] for k in keys} | {*keys}, 1
            )
            hint = f"; is it {near[0]!r}?" if near else "."
            raise CheckpointError(f"skip or reinit: {model} has no {name!r}{hint}")


def _made_anew(model: torch.nn.Module, reinit: Any) -> dict[str, torch.Tensor]:
    """New tensors for the parts of `model` named in `reinit`; the model stays as it is."""
    import torch

    state, parameters = model.state_dict(), dict(model.named_parameters(remove_duplicate=False))
    anew = {}
    for name in reinit:
        keys = [k for k in state if _is_under(k, [name])]
        if isinstance(reinit, Mapping):
            for k in keys:
                if k in parameters or k == name:
                    tensor = torch.empty_like(state[k])
                    with torch.no_grad():
                        made = reinit[name](tensor)
                    anew[k] = made if isinstance(made, torch.Tensor) else tensor
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
        anew |= {f"{name}.{k}": tensor for k, tensor in part.state_dict().items()}
    return anew
