"""Turn a checkpoint of any kind into a plain state dict that loads everywhere."""

import json
import os
from collections import Counter, OrderedDict
from collections.abc import Mapping
from copy import deepcopy
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.utils.serialization import config

from torchclinic.checkpoint_files import weights
from torchclinic.checkpoint_files.foreign import SHARD, WAYS, key_note, part_note, what_it_is
from torchclinic.checkpoint_files.keys import (
    clean_names,
    is_counter,
    prefix_notes,
    removed_prefixes,
    renamed_versions,
)
from torchclinic.checkpoint_files.loading import match_model, misfit
from torchclinic.checkpoint_files.pickles import storage_id
from torchclinic.checkpoint_files.reading import (
    ENDINGS,
    LIGHTNING,
    TIES,
    Checkpoint,
    CheckpointError,
    open_checkpoint,
)
from torchclinic.checkpoint_files.reports import Report, lines, some
from torchclinic.modules import unwrapped
from torchclinic.tables import in_bytes
from torchclinic.writing import atomic_file

COUNTER = "AveragedModel's counter"


def fix_checkpoint(
    src: str | Path,
    dst: str | Path,
    *,
    model: nn.Module | None = None,
    key: str | None = None,
    dtype: torch.dtype | None = None,
) -> Report:
    """Write the weights of any checkpoint as a plain state dict that loads on every rung.

    It is unwrapped, without wrappers' prefixes, for the CPU, without what is not weights, and each
    tensor with no more than its own numbers. `dst` is written whole or not at all.

    Parameters
    ----------
    src : path
        What `inspect_checkpoint` knows. No code in it is run.
    dst : path
        The file to write, not the source: its name ends as a checkpoint's does, in ``.pt`` or the
        like, or in ``.safetensors``, which gets that format.
    model : Module, optional
        Whose keys the file gets: prefixes come and go as it needs, other keys are left out. It is
        an error if a key of the model is missing or has another shape.
    key : str, optional
        Under which dotted key the state dict is, if there are several; or what the keys of one
        of several models begin with, such as ``teacher``.
    dtype : torch.dtype, optional
        To which all floating-point tensors are converted; integers, booleans and what is in
        extra state stay.

    Returns
    -------
    Report
        Printed, it is the whole report. Its attributes: ``names``, from the keys that were written
        to the source's; ``dropped``: what was left out, and what it is or why; ``cloned``: keys
        that showed a part of a larger storage; ``tied``: keys that were one tensor and still are;
        ``converted``: of how many tensors the dtype changed, by "float32 to bfloat16" and the like;
        ``changed``: how many numbers that changed by more than rounding (of which some may
        become 0), by key;
        ``not_finite``: how many numbers that were written are NaN or infinite, by key;
        ``verified``: how many storages were compared with their checksums.

    Raises
    ------
    CheckpointError
        If it cannot be done safely; the message says why. Nothing is written then.
    OSError
        If a file is not there or may not be read.

    Examples
    --------
    >>> import tempfile
    >>> wrapped = nn.DataParallel(nn.Linear(2, 1))
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     torch.save({"model": wrapped.state_dict(), "epoch": 3}, f"{folder}/dp.pt")
    ...     report = fix_checkpoint(f"{folder}/dp.pt", f"{folder}/fixed.pt")
    ...     keys = list(torch.load(f"{folder}/fixed.pt"))
    >>> keys, report.dropped
    (['weight', 'bias'], {'epoch': '3'})
    """
    target, checkpoint = Path(dst), open_checkpoint(src)
    if target.is_dir() or not target.name.lower().endswith(ENDINGS):
        raise CheckpointError(f"{target}: name a file to write that ends in .pt or .safetensors.")
    if target.exists() and any(target.samefile(file) for file in checkpoint.files):
        raise CheckpointError(f"{target} is the source: name another file.")
    if target.exists() and not (target.stat().st_mode & 0o222 and os.access(target, os.W_OK)):
        raise CheckpointError(f"{target} is write-protected: name another file, or chmod +w it.")
    shard = part_note(checkpoint.path) if SHARD.search(checkpoint.path.name) else ""
    if shard and model is None:
        raise CheckpointError(f"{checkpoint.path}: {shard} Nothing was written.")
    where, at, state = weights.choose(checkpoint.tree, checkpoint.path, key)
    found, rest = weights.split(state, checkpoint.path, at)
    if where and isinstance(checkpoint.tree, dict):
        ours, beside = f"{where}.", {f"{k}.": (k, v) for k, v in checkpoint.tree.items()}
        apart = [key for key in beside if not (ours.startswith(key) or key.startswith(ours))]
        rest |= dict(beside[key] for key in apart)
    what = what_it_is(state, checkpoint.path, at)
    if what and (model is None or dtype):
        raise CheckpointError(f"{checkpoint.path}: {what}")
    names = _names(checkpoint, found, model, what)
    dropped = weights.described(rest)
    taken = set(names.values())
    for old in [key for key in found if key not in taken]:
        if is_counter(old, found) and getattr(found[old], "shape", ()) not in ((), (1,)):
            raise CheckpointError(
                f"{checkpoint.path}: {old} is called like a counter, and has many numbers. Nothing "
                "was written: --for names the model that it belongs to."
            )
        dropped[old] = COUNTER if is_counter(old, found) else "the model has no such key"
    values = {new: found[old] for new, old in names.items()}
    tensors = weights.tensors_in(values)
    devices = Counter(map(checkpoint.device, tensors.values()))
    done = Report(
        names=names,
        dropped=dropped,
        cloned=weights.oversized(tensors),
        tied=[names for names in weights.ties(tensors) if len(names) > 1],
        verified=checkpoint.verify(tensors.items()),
    )
    done.converted, done.changed = _convert(checkpoint.path, values, dtype) if dtype else ({}, {})
    done.not_finite = weights.not_finite(weights.tensors_in(values))
    versions = getattr(state, "_metadata", None) or {}
    versions = renamed_versions(versions, {old: new for new, old in names.items()})
    _write(checkpoint, values, target, versions)
    rows = _rows(done, checkpoint, target, where, devices)
    done.text = lines(file=f"{src} -> {target}", **rows)
    return done


def _names(
    checkpoint: Checkpoint, values: dict, model: nn.Module | None, what: str
) -> dict[str, str]:
    """The keys to write, and whose values they get; `what` they are that are not weights."""
    if model is None:
        names = clean_names(checkpoint.path, values, checkpoint.tree)
        return {new: old for old, new in names.items()}
    found = match_model(checkpoint.path, values, unwrapped(model))
    if what and found.problems():
        raise CheckpointError(f"{checkpoint.path}: {what}")
    changes = key_note(found.unexpected_keys, checkpoint.path)
    if not found.names or found.missing_keys or found.mismatched_shapes or changes:
        raise misfit(checkpoint.path, unwrapped(model), found, WAYS["as_saved"])
    return found.names


def _convert(
    path: Path, values: dict[str, Any], dtype: torch.dtype
) -> tuple[dict[str, int], dict[str, int]]:
    """Put floating-point tensors into `dtype`, tied ones once; from what to what, how many.

    Second, how many numbers that changed, by key.
    """
    counts, changed = Counter[str](), {}
    try:
        weights.refuse_endless(values, dtype)
        for first, *others in weights.ties(values):
            old = values[first]
            if old.is_floating_point() and old.dtype != dtype:
                values |= dict.fromkeys([first, *others], old.to(dtype))
                counts[f"{old.dtype} to {dtype}".replace("torch.", "")] += 1 + len(others)
                changed |= dict.fromkeys([first, *others], weights.changed(old, dtype))
    except (CheckpointError, NotImplementedError) as error:  # float4 has no conversion
        raise CheckpointError(f"{path}: {error}") from error
    return dict(counts), {key: count for key, count in changed.items() if count}


def _rows(
    done: Report, source: Checkpoint, target: Path, where: str, devices: Mapping[str, int]
) -> dict[str, Any]:
    """The rows of the report."""
    kind = "safetensors" if _is_safetensors(target) else "torch"
    at = f", from {where!r}" if where else ""
    renamed = {old: new for new, old in done.names.items() if old != new}
    tensors = f"the checksums of {done.verified} tensor{'s' * (done.verified != 1)}"
    beside = [key for key, what in done.dropped.items() if key == LIGHTNING or what == COUNTER]
    return {
        "part": part_note(source.path),
        "beware": key_note(done.names.values(), source.path),
        "wrote": f"{kind}, {in_bytes(target.stat().st_size)}: {len(done.names)} entries{at}",
        "taken_off": prefix_notes(removed_prefixes(renamed), beside),
        "renamed": some((f"{a} -> {b}" for a, b in renamed.items()), 1),
        "moved": [
            f"{n} tensors from {device} to the CPU" for device, n in devices.items()
            if device != "cpu"
        ],
        "converted": [f"{n} tensors from {dtypes}" for dtypes, n in done.converted.items()],
        "changed": weights.count_note(done.changed, sum(devices.values()), weights.NOT_ROUNDED),
        "not_finite": weights.count_note(done.not_finite, sum(devices.values())),
        "cloned": some(done.cloned),
        "tied": some(" = ".join(names) for names in done.tied),
        "left_out": [
            some((f"{key} ({what})" for key, what in done.dropped.items()), 6),
            source.unlisted_note(),
            source.class_note(),
        ],
        "verified": tensors if done.verified else "nothing: there are no checksums",
    }  # fmt: skip


def _write(
    checkpoint: Checkpoint, values: Mapping[str, Any], target: Path, versions: dict[str, dict]
) -> None:
    """Write all of the file, or leave what was there."""
    try:
        with atomic_file(target) as temporary:
            if _is_safetensors(target):
                _write_safetensors(values, temporary)
            else:
                _write_torch(values, temporary, versions)
    except CheckpointError as error:
        advice = " Write a .pt file." * _is_safetensors(target)
        raise CheckpointError(f"{checkpoint.path}: {error}{advice}") from None
    except Exception as error:  # of the disk, of torch, of safetensors
        needed = in_bytes(sum(tensor.nbytes for tensor in weights.tensors_in(values).values()))
        raise CheckpointError(
            f"{target}: could not be written ({error}). Nothing was changed. Is the folder there, "
            f"and {needed} of space in it?"
        ) from error


def _is_safetensors(target: Path) -> bool:
    return target.suffix.lower() == ".safetensors"


def _write_torch(values: Mapping[str, Any], path: Path, versions: dict[str, dict]) -> None:
    """A plain dict; with notes on the modules' versions, if some have more than batch norm's."""
    tensors = weights.tensors_in(values)
    written = {id(tensor): tensor for tensor in tensors.values()}
    parts = {name: tensors[name] for name in weights.oversized(tensors)}
    weights.refuse_endless(parts)
    for names in weights.ties(parts):
        written |= dict.fromkeys((id(tensors[name]) for name in names), tensors[names[0]].clone())
    # torch's own writer takes small steps: with large ones the whole takes half the time.
    # pyrefly: ignore[missing-attribute] - torch adds it to the module when it runs
    with open(path, "wb", buffering=1 << 24) as file, config.patch("save.compute_crc32", True):
        state = deepcopy(dict(values), written)  # of tensors, no copies but those
        norms = {f"{key}." for key, note in versions.items() if note.get("version", 1) != 1}
        if any(f"{norm}num_batches_tracked".removeprefix(".") not in values for norm in norms):
            state = OrderedDict(state)
            state.__dict__["_metadata"] = versions
        torch.save(state, file)


def _write_safetensors(values: Mapping[str, Any], path: Path) -> None:
    """The format has no sharing: ties go into a note."""
    state, names, used = {}, {}, set()
    if "__metadata__" in values:
        raise CheckpointError("'__metadata__' is a name that safetensors keeps for itself.")
    for key in [key for key, value in values.items() if not isinstance(value, Tensor)]:
        what = weights.describe(values[key])
        raise CheckpointError(f"{key!r} is {what}, and safetensors holds tensors alone.")
    weights.refuse_endless(values)
    for first, *others in weights.ties(values):
        value = values[first]
        is_whole = value.nbytes == value.untyped_storage().nbytes() and value.is_contiguous()
        is_whole &= storage_id(value) not in used
        used.add(storage_id(value))
        state[first] = value if is_whole else value.clone(memory_format=torch.contiguous_format)
        names |= dict.fromkeys(others, first)
    notes = {"format": "pt"} | ({TIES: json.dumps(names)} if names else {})
    mode = path.stat().st_mode
    try:
        save_file(state, path, notes)
        path.chmod(mode)  # safetensors makes a file of its own, for its owner alone
    except KeyError as dtype:  # its own error for one that it lacks
        raise CheckpointError(f"safetensors has no {dtype}.") from None
