"""Load a checkpoint of any rung into a model of any rung, and say what happened."""

from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from copy import deepcopy
from pathlib import Path
from textwrap import shorten
from typing import Any

import torch
from torch import Tensor, nn

from torchclinic.checkpoint_files import foreign, weights
from torchclinic.checkpoint_files.keys import Match, is_counter, match, renamed_versions
from torchclinic.checkpoint_files.memory import clash, is_plain, memory_of, ties
from torchclinic.checkpoint_files.reading import CheckpointError, open_checkpoint
from torchclinic.checkpoint_files.reports import Report, counted, lines, literal, some
from torchclinic.modules import clone_expanded_buffers, unwrapped

UNREADY: dict[str, Callable[[Any], bool]] = {
    "meta": lambda value: getattr(value, "is_meta", False),
    "lazy": nn.parameter.is_lazy,
    "sharded": lambda value: hasattr(value, "full_tensor"),  # a DTensor
}

PLAIN_LOAD = nn.Module._load_from_state_dict  # batch norm's own may do without its counter


def load_into(
    model: nn.Module,
    source: str | Path | Mapping[str, Any],
    *,
    strict: bool = True,
    key: str | None = None,
) -> Report:
    """Load weights by name, whatever wraps the model here or wrapped it when it was saved.

    PyTorch has the last word: the keys, renamed, go to the model's ``load_state_dict``.

    Parameters
    ----------
    model : Module
        May be in DataParallel, DistributedDataParallel or ``torch.compile``; not under
        ``fully_shard``. It keeps its devices and dtypes. If this raises, it is as it was.
    source : path or dict
        A checkpoint of any kind that `inspect_checkpoint` knows, or a state dict.
    strict : bool
        Whether every key must find its partner, in the right shape. If not, those that do are
        loaded; if none does, it is an error all the same.
    key : str, optional
        Under which dotted key of the source the state dict is, if there are several; or what the
        keys of one of several models begin with, such as ``teacher``.

    Returns
    -------
    Report
        Its attributes: ``names``, from the model's keys to those they were loaded from; with
        ``strict=False``, ``missing_keys``, ``unexpected_keys`` and ``mismatched_shapes``, as
        PyTorch has them; ``converted``: of how many tensors the dtype is the model's and not the
        source's, by "float64 to float32" and the like; ``changed``: how many numbers the model's
        dtype changed by more than rounding (to infinity, say), by key.

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
    >>> load_into(new, nn.DataParallel(old).state_dict(), strict=False)
    loaded      2 keys, 2 of them under another name
    other shape 2: 1.weight, 1.bias
    """
    plain = unwrapped(model)
    checkpoint = open_checkpoint(source) if isinstance(source, str | Path) else None
    where, tree = (source, checkpoint.tree) if checkpoint else ("This state dict", source)
    name, at, state = weights.choose(tree, where, key)
    ours = plain.state_dict()
    values, _ = weights.split(state, where, at, ours)
    _refuse_unready(plain, ours)
    found = match_model(where, values, plain)
    what = foreign.what_it_is(state, checkpoint.path if checkpoint else Path(), at)
    runs_code = any(map(_runs_code, plain.modules()))  # and may know these, as bitsandbytes' does
    if what and found.problems() and not (strict and runs_code):
        raise CheckpointError(f"{where}: {what}")
    is_simple = all(type(m)._load_from_state_dict is PLAIN_LOAD for m in plain.modules())
    if found.problems() and (strict or not found.names) and is_simple and not runs_code:
        raise misfit(where, plain, found, _not_strict(found))
    if checkpoint:
        checkpoint.verify(weights.tensors_in(values).items())
    ours = clone_expanded_buffers(plain).state_dict()
    versions = getattr(state, "_metadata", None)
    try:
        _load(where, values, found, strict, plain, ours, versions, runs_code)
    except CheckpointError as error:
        if what:
            raise CheckpointError(f"{where}: {what}") from error
        raise
    unlisted = [checkpoint.unlisted_note(), checkpoint.class_note()] if checkpoint else []
    return _report(values, found, ours, weights.not_taken(tree, name, where), unlisted)


def _refuse_unready(model: nn.Module, ours: Mapping[str, Any]) -> None:
    """Refuse if a tensor of the model's is one that no weights can be loaded into."""
    for kind, is_unready in UNREADY.items():
        for key in [key for key, value in ours.items() if is_unready(value)][:1]:
            raise CheckpointError(
                f"{type(model).__name__}: {key!r} {foreign.TEXTS['unready'][kind]}"
            )


def _report(
    values: Mapping[str, Any],
    found: Match,
    ours: Mapping[str, Any],
    others: Mapping[str, str],
    unlisted: list[str],
) -> Report:
    """What was loaded, and what was not.

    `others` are more weights in the file, and `unlisted` are lines on those that an index does not
    list, and on what tensors had else.
    """
    pairs = {key: (values[old], ours[key]) for key, old in found.names.items() if key in ours}
    pairs = {key: pair for key, pair in pairs.items() if all(map(is_plain, pair))}
    differ = {key: (a, b.dtype) for key, (a, b) in pairs.items() if a.dtype != b.dtype}
    kinds = Counter(f"{a.dtype} to {kind}".replace("torch.", "") for a, kind in differ.values())
    counts = {key: weights.changed(*pair) for key, pair in differ.items()}
    counts = {key: count for key, count in counts.items() if count}
    done = Report(**vars(found), converted=dict(kinds), changed=counts)
    renamed = sum(key != old for key, old in found.names.items())
    rest = [
        f"{n:.80}: {way_out or f'weights too; key={literal(n, 300)} takes them'}"
        for n, way_out in others.items()
    ]
    left_out = [key for key in values if is_counter(key, values) and key not in found.renamed]
    done.text = lines(
        loaded=f"{len(found.names)} keys, {renamed} of them under another name",
        converted=[f"{n} tensors from {kind}" for kind, n in kinds.items()],
        changed=weights.count_note(done.changed, len(pairs), weights.NOT_ROUNDED),
        missing=counted(found.missing_keys),
        unexpected=counted(found.unexpected_keys),
        other_shape=counted(found.mismatched_shapes),
        left_out=[counted(left_out), *rest[:4], *unlisted],
    )
    return done


def _load(
    where: Any,
    values: dict[str, Any],
    found: Match,
    strict: bool,
    model: nn.Module,
    ours: dict[str, Any],
    versions: Mapping[str, Any] | None,
    runs_code: bool,
) -> None:
    """``load_state_dict``, which has the last word on `found`; or the model is as it was.

    It is given all keys, and what was noted beside them: a module may know older names of its own.
    Whether torch can copy each tensor is tried with a few numbers of it. The model is copied before
    if torch, or code in the model, may refuse when some values are there already.
    """
    _try_copies(where, {key: (ours[key], values[old]) for key, old in found.names.items()})
    values = values | _copies({old: values[old] for old in found.names.values()}, ours)
    given = OrderedDict((new, values[old]) for old, new in found.renamed.items())
    given.update((new, values[old]) for new, old in found.names.items())  # tied ones, too
    if not strict:
        given = OrderedDict(i for i in given.items() if i[0] not in found.mismatched_shapes)
    if versions is not None:
        given.__dict__["_metadata"] = renamed_versions(versions, found.renamed)
    may_refuse = bool(found.problems()) and (strict or not found.names)
    with _as_it_was(where, model, ours, may_refuse or runs_code):
        own_method = type(model).load_state_dict is not nn.Module.load_state_dict
        try:
            told = model.load_state_dict(given, strict=strict and own_method)
        except RuntimeError as error:
            if may_refuse and not runs_code:  # by torch, of shapes that differ
                raise misfit(where, model, found, _not_strict(found)) from error
            raise
        if told is None:  # by a method of the model's own
            return
        files = {new: old for old, new in found.renamed.items()}
        found.missing_keys = [k for k in told.missing_keys if k not in found.mismatched_shapes]
        found.unexpected_keys = [files.get(key, key) for key in told.unexpected_keys]
        for key in {*told.missing_keys, *told.unexpected_keys} & found.names.keys():
            del found.names[key]
        if strict:
            found.mismatched_shapes = {}  # torch took them
        took_none = {*given} <= {*told.unexpected_keys}
        if (strict and found.problems()) or took_none:
            raise misfit(where, model, found, _not_strict(found))


@contextmanager
def _as_it_was(where: Any, model: nn.Module, ours: dict[str, Any], copied: bool) -> Iterator[None]:
    """Give the model back what it had, if loading raises; `ours` is its state dict."""
    tables, numbers, extra = [], {}, {}
    try:
        if copied:
            parts = [part for m in model.modules() for part in (m._parameters, m._buffers)]
            extra = deepcopy({k: v for k, v in ours.items() if k.endswith(weights.EXTRA_STATE)})
            there = [tensor for part in parts for tensor in part.values() if tensor is not None]
            there = [tensor for tensor in there if not tensor.is_meta]
            numbers = {tensor: tensor.detach().to("cpu", copy=True) for tensor in there}
            tables = [(part, dict(part)) for part in parts]
        yield
    except BaseException as error:
        for part, before in tables:
            part.clear()
            part.update(before)
        for tensor, before in numbers.items():
            with suppress(RuntimeError):  # what cannot be written to is as it was
                tensor.data.copy_(before)
        for name, module in model.named_modules():
            key = f"{name}.{weights.EXTRA_STATE}".removeprefix(".")
            with suppress(Exception):
                if key in extra:
                    module.set_extra_state(extra[key])
        if isinstance(error, CheckpointError) or not isinstance(error, Exception):
            raise
        what = shorten(f"{type(error).__name__}: {error}", 300, placeholder=" ...")
        raise CheckpointError(f"{where}: {type(model).__name__} refused it ({what}).") from error


def _copies(values: Mapping[str, Any], ours: Mapping[str, Any]) -> dict[str, Tensor]:
    """Of tensors that lie in the model's own memory: what is written there would change them."""
    mine = {memory_of(value) for value in ours.values() if is_plain(value)}
    theirs = {key: value for key, value in values.items() if is_plain(value)}
    return {key: value.clone() for key, value in theirs.items() if memory_of(value) in mine}


def _try_copies(where: Any, pairs: dict[str, tuple]) -> None:
    """Refuse if a tensor of the model's cannot take the numbers of the one for it."""
    for key in [key for key, (mine, _) in pairs.items() if isinstance(mine, Tensor)]:
        mine, new = pairs[key]
        first = (slice(2),) * mine.dim()
        try:
            kept = mine[first].clone()
            torch.empty_like(kept).copy_(new[first] if mine.dim() else new.flatten()[0])
            mine.data[first].copy_(kept)  # not if it is expanded, or of torch.inference_mode
        except Exception as error:
            raise CheckpointError(
                f"{where}: {key!r} cannot be copied from {new.dtype} into {mine.dtype} "
                f"({' '.join(str(error).split())[:200]})."
            ) from error


def _runs_code(module: nn.Module) -> bool:
    """Whether code that is not torch's own runs when values are loaded into it, or were saved."""
    kind = type(module)
    methods = kind.set_extra_state, kind._load_from_state_dict, kind.load_state_dict
    methods += kind._save_to_state_dict, kind.state_dict
    hooks = module._load_state_dict_pre_hooks or module._load_state_dict_post_hooks
    hooks = hooks or module._state_dict_hooks or module._state_dict_pre_hooks
    return bool(hooks) or not all(m.__module__.startswith("torch.nn.") for m in methods)


def match_model(where: Any, values: dict[str, Any], model: nn.Module) -> Match:
    """`match` with a model's state dict; a tied tensor may be in the file under one name.

    If it is there under several, they become one in `values`.

    Raises
    ------
    CheckpointError
        If they differ: the model can take only one of them.
    """
    state = model.state_dict()
    found = match(values, state)
    missing = {*found.missing_keys}
    pairs = {name: (state[name], values[old]) for name, old in found.names.items()}
    pairs = {name: pair for name, pair in pairs.items() if all(map(is_plain, pair))}
    mine, theirs = ({name: pair[i] for name, pair in pairs.items()} for i in range(2))
    if names := clash(mine, theirs):
        differ = some((repr(found.names[name]) for name in names), between=" and ")
        raise CheckpointError(
            f"{where}: numbers of {differ} differ, and {type(model).__name__} ties them. Give a "
            "model with a tensor for each."
        )
    for names in ties(state):
        homes = [found.names[name] for name in names if name in found.names]
        if len(names) < 2 or not homes:
            continue
        values |= dict.fromkeys(homes, values[homes[0]])
        like = (values[key] for key in found.unexpected_keys)
        if any(is_plain(value) and value.shape == state[names[0]].shape for value in like):
            continue  # a tensor for each, one of them under another name
        found.names |= {name: homes[0] for name in names if name in missing}
    found.missing_keys = [key for key in found.missing_keys if key not in found.names]
    return found


def _not_strict(found: Match) -> str:
    """What ``strict=False`` would do: what is wanted, or a layer stays random."""
    left = len(found.missing_keys) + len(found.mismatched_shapes)
    does = [f"leave {left} of the model's keys as they are"] * bool(left)
    does += [f"leave out {len(found.unexpected_keys)} of the file's"] * bool(found.unexpected_keys)
    return f"load_into(..., strict=False) would {' and '.join(does)}."


def misfit(where: Any, model: nn.Module, found: Match, way_out: str) -> CheckpointError:
    """The error for weights that do not fit, with keys, shapes, near names and a way out."""
    fits = f"{len(found.names)} keys fit" if found.names else "no key fits"
    wanted, there = list(model.state_dict()) or [""], {*found.unexpected_keys}
    starts = [key.removesuffix(wanted[0]) for key in there if key.endswith(f".{wanted[0]}")][:50]
    if several := sorted(s[:-1] for s in starts if {f"{s}{key}" for key in wanted} <= there):
        fitting = found.names.get(wanted[0], "").removesuffix(wanted[0])[:-1]
        several = sorted({*several, *filter(None, [fitting])})
        way_out = f"Choose one: {some(f'key={literal(name)}' for name in several)}."
    if note := foreign.part_note(Path(where)):
        way_out = f"The file is {note}"
    elif note := (
        foreign.experts_note(found.missing_keys, found.unexpected_keys, Path(where))
        or foreign.key_note(found.unexpected_keys, Path(where))
        or foreign.key_note(found.mismatched_shapes, Path(where), "other_shapes")
        or foreign.key_note(found.missing_keys, Path(where), "other_names")
    ):
        way_out = note
    elif Path(where).exists() and (note := foreign.home_note(Path(where))):
        way_out = note if way_out == foreign.WAYS["as_saved"] else f"{note} {way_out}"
    return CheckpointError(
        f"{where} does not fit {type(model).__name__}: {fits}, {', '.join(found.problems())}."
        f"{f' {way_out}' if found.names or several or note else ''}"
    )
