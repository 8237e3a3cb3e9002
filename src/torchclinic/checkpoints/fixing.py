"""Turn a checkpoint of any kind into a plain state dict that loads everywhere."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save, save_file
from torch import Tensor, nn

from torchclinic.checkpoints.inspecting import (
    by_place,
    not_finite,
    not_finite_note,
    oversized,
    place,
)
from torchclinic.checkpoints.keys import COUNTER, Match, clean_names, removed_prefixes, wrapper_of
from torchclinic.checkpoints.loading import match_model, misfit
from torchclinic.checkpoints.pickles import storage_id
from torchclinic.checkpoints.reading import (
    Checkpoint,
    CheckpointError,
    is_utf8,
    open_checkpoint,
    shard_note,
)
from torchclinic.checkpoints.reports import counted, report, some
from torchclinic.checkpoints.state_dicts import (
    choose,
    describe,
    split,
)
from torchclinic.modules import unwrapped
from torchclinic.tables import in_bytes
from torchclinic.writing import atomic_file


@dataclass(repr=False)
class FixReport:
    """What `fix_checkpoint` did; its ``repr`` is the report."""

    source: Path
    target: Path
    format: str  # "torch" or "safetensors"
    size: int  # bytes of the target
    weights_at: str  # the dotted key of the state dict in the source, "" at the top
    names: dict[str, str]  # from the keys that were written to the source's
    dropped: dict[str, str]  # what was left out, and what it is or why
    cloned: list[str]  # keys that showed a part of a larger storage
    devices: dict[str, int]  # how many tensors had been saved on which device
    tied: list[list[str]]  # keys that were one tensor and still are
    not_finite: dict[str, int]  # how many numbers are NaN or infinite, by key
    verified: int  # how many tensors' numbers were compared with a checksum
    missing_keys: list[str]  # keys of the model that the file lacks, with strict=False
    mismatched_shapes: dict[str, tuple[tuple, tuple]]  # left out for them: file's, model's

    def __repr__(self) -> str:
        renamed = {old: new for new, old in self.names.items() if old != new}
        at = f", from {self.weights_at!r}" if self.weights_at else ""
        tensors = f"the checksums of {self.verified} tensor{'s' * (self.verified != 1)}"
        return report(
            file=f"{self.source} -> {self.target}",
            wrote=f"{self.format}, {in_bytes(self.size)}: {len(self.names)} entries{at}",
            prefix=[
                f"{name!r} taken off {count} keys: put there by {wrapper_of(name, self.dropped)}"
                for name, count in removed_prefixes(renamed).items()
            ],
            renamed=some((f"{a} -> {b}" for a, b in renamed.items()), 1),
            moved=[
                f"{count} tensors from {device} to the CPU"
                for device, count in self.devices.items()
                if device != "cpu"
            ],
            not_finite=not_finite_note(self.not_finite, len(self.names)),
            cloned=some(self.cloned),
            missing=counted(self.missing_keys),
            other_shape=counted(self.mismatched_shapes),
            tied=some(" = ".join(names) for names in self.tied),
            left_out=some((f"{key} ({what})" for key, what in self.dropped.items()), 6),
            verified=tensors if self.verified else "nothing: there are no checksums",
        )


def fix_checkpoint(
    src: str | Path,
    dst: str | Path,
    *,
    model: nn.Module | None = None,
    key: str | None = None,
    strict: bool = True,
) -> FixReport:
    """Write the weights of any checkpoint as a plain state dict that loads on every rung.

    It is unwrapped, without wrappers' prefixes, for the CPU, without what is not weights, and each
    tensor with no more than its own numbers. `dst` is written whole or not at all.

    Parameters
    ----------
    src : path
        What `inspect_checkpoint` knows. No code in it is run.
    dst : path
        The file to write, not the source; one called ``.safetensors`` gets that format.
    model : Module, optional
        Whose keys the file gets: prefixes come and go as it needs, other keys are left out.
    key : str, optional
        Under which dotted key the state dict is, if there are several.
    strict : bool
        Refuse if the result would not load into `model`, for missing keys or other shapes.

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
    target = Path(dst)
    checkpoint = open_checkpoint(src)
    if target.exists() and any(target.samefile(file) for file in checkpoint.files):
        raise CheckpointError(f"{target} is the source: name another file.")
    if model is None and (note := shard_note(checkpoint.path)):
        raise CheckpointError(f"{checkpoint.path}: {note} Nothing was written.")
    where, weights = choose(checkpoint.tree, checkpoint.path, key)
    found, rest = split(weights, checkpoint.path)
    if where:
        above = where.split(".")[0]
        rest |= {k: value for k, value in checkpoint.tree.items() if k != above}
    dropped = {str(k): describe(value) for k, value in rest.items()}
    match = _match(checkpoint, found, model, strict)
    taken = set(match.names.values())
    for old in [key for key in found if key not in taken]:
        dropped[old] = "AveragedModel's counter" if old == COUNTER else "the model has no such key"
    values = {new: found[old] for new, old in match.names.items()}
    verified = _write(checkpoint, values, target)
    return FixReport(
        source=Path(src),
        target=target,
        format="safetensors" if target.suffix == ".safetensors" else "torch",
        size=target.stat().st_size,
        weights_at=where,
        names=match.names,
        dropped=dropped,
        cloned=oversized(values),
        devices=Counter(checkpoint.device(v) for v in values.values() if isinstance(v, Tensor)),
        tied=[keys for keys in by_place(values).values() if len(keys) > 1],
        not_finite=not_finite(values),
        verified=verified,
        missing_keys=match.missing_keys,
        mismatched_shapes=match.mismatched_shapes,
    )


def _match(checkpoint: Checkpoint, values: dict, model: nn.Module | None, strict: bool) -> Match:
    """The keys to write and whose values they get; the model's that are missing or differ."""
    if model is None:
        try:
            names = clean_names(values, lightning=checkpoint.is_lightning)
        except CheckpointError as error:
            raise CheckpointError(f"{checkpoint.path}: {error}") from None
        return Match({new: old for old, new in names.items()}, [], [], {})
    found = match_model(values, unwrapped(model))
    if not found.names or (strict and (found.missing_keys or found.mismatched_shapes)):
        way_out = "Nothing was written; strict=False (--partial) writes what fits."
        raise misfit(checkpoint.path, unwrapped(model), found, way_out)
    return found


def _write(checkpoint: Checkpoint, values: Mapping[str, Any], target: Path) -> int:
    """Write all of the file, or leave what was there; how many tensors were verified."""
    write = _write_safetensors if target.suffix == ".safetensors" else _write_torch
    try:
        with atomic_file(target) as temporary:
            return write(checkpoint, values, temporary)
    except CheckpointError:
        raise
    except Exception as error:  # of the disk, of torch, of safetensors
        needed = in_bytes(sum(v.nbytes for v in values.values() if isinstance(v, Tensor)))
        raise CheckpointError(
            f"{target}: could not be written ({error}). Nothing was changed. Is the folder there, "
            f"and {needed} of space in it?"
        ) from error


def _write_torch(checkpoint: Checkpoint, values: Mapping[str, Any], path: Path) -> int:
    """Write, and compare the checksums that torch made of the numbers with those of the source."""
    cloned = {key: values[key] for key in oversized(values)}
    checkpoint.verify(cloned.items())
    written = dict(values)
    for keys in by_place(values).values():
        tensor = values[keys[0]].clone() if keys[0] in cloned else values[keys[0]]
        written |= dict.fromkeys(keys, tensor)
    before = torch.serialization.get_crc32_options()
    torch.serialization.set_crc32_options(True)
    try:
        # torch's own writer takes small steps: with large ones the whole takes half the time.
        with open(path, "wb", buffering=1 << 24) as file:
            torch.save(written, file)
    finally:
        torch.serialization.set_crc32_options(before)
    there, ids = (
        open_checkpoint(path),
        {k: storage_id(v) for k, v in values.items() if isinstance(v, Tensor)},
    )
    known = {k: checkpoint.checksums[i] for k, i in ids.items() if i in checkpoint.checksums}
    copies = {k: there.checksums[storage_id(there.tree[k])] for k in known if k not in cloned}
    checkpoint.refuse(key for key, checksum in copies.items() if checksum != known[key])
    return len(known)


def _write_safetensors(checkpoint: Checkpoint, values: Mapping[str, Any], path: Path) -> int:
    """Write after comparing checksums. The format has no sharing: ties go into its notes."""
    state, notes, first = {}, {"format": "pt"}, {}
    for key, value in values.items():
        if not isinstance(value, Tensor):
            raise CheckpointError(
                f"{checkpoint.path}: {key!r} is {describe(value)}, and safetensors holds tensors "
                "alone. Write a .pt file."
            )
        there = value.untyped_storage().nbytes()
        if value.nbytes > 1e6 + there:  # a stride of 0: else 4 bytes fill the disk
            raise CheckpointError(
                f"{checkpoint.path}: {key!r} shows the same {in_bytes(there)} again and again, "
                f"which would be {in_bytes(value.nbytes)} in safetensors. Write a .pt file."
            )
        if first.setdefault(place(value), key) != key:
            notes[key] = first[place(value)]  # as safetensors.torch.save_model says it
        elif value.nbytes == there and value.is_contiguous():
            state[key] = value
        else:
            state[key] = value.clone(memory_format=torch.contiguous_format)
    count = checkpoint.verify(values.items())
    if is_utf8(path):
        save_file(state, path, notes)
    else:
        path.write_bytes(save(state, notes))
    return count
