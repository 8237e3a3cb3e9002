"""Turn a checkpoint of any kind into a plain state dict that loads everywhere."""

from __future__ import annotations

import itertools
import json
import os
import shutil
import zlib
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from torchladder.checkpoints.contents import (
    describe,
    find_weights,
    is_model,
    run_model,
    tensors_of,
)
from torchladder.checkpoints.inspecting import by_place, oversized
from torchladder.checkpoints.keys import COUNTER, clean, prefixes, put_there_by
from torchladder.checkpoints.loading import match_model, misfit
from torchladder.checkpoints.reading import CHECKSUMS, Checkpoint, open_checkpoint
from torchladder.checkpoints.reports import printable, row, some
from torchladder.checkpoints.tensors import CheckpointError, SavedTensor, damage, verify
from torchladder.models import unwrapped
from torchladder.tables import in_bytes
from torchladder.writing import atomic_file

if TYPE_CHECKING:
    import torch


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
    verified: str  # against what the numbers were compared
    missing: list[str]  # keys of the model that the file lacks, with strict=False
    changed: dict[str, tuple[tuple, tuple]]  # and that it has in another shape: file's, model's
    backup: Path | None  # the source as it was, if the target took its place

    def __repr__(self) -> str:
        at = f", from {self.weights_at!r}" if self.weights_at else ""
        lines = row("file", f"{self.source} -> {self.target}")
        lines += row(
            "wrote", f"{self.format}, {in_bytes(self.size)}: {len(self.names)} tensors{at}"
        )
        renamed = {old: new for new, old in self.names.items() if old != new}
        for prefix, count in prefixes(renamed).items():
            maker = put_there_by(prefix, self.dropped)
            lines += row("prefix", f"{prefix!r} taken off {count} keys: put there by {maker}")
        if renamed:
            lines += row("renamed", some((f"{a} -> {b}" for a, b in renamed.items()), 1))
        for device in self.devices.keys() - {"cpu"}:
            lines += row("moved", f"{self.devices[device]} tensors from {device} to the CPU")
        labels = {"cloned": self.cloned, "missing": self.missing, "other shape": self.changed}
        labels |= {"tied": [" = ".join(names) for names in self.tied]}
        labels |= {"left out": [f"{key} ({what})" for key, what in self.dropped.items()]}
        for label, keys in labels.items():
            lines += row(label, some(keys, 6)) if keys else []
        lines += row("verified", self.verified)
        lines += row("backup", str(self.backup)) if self.backup else []
        return printable(lines)


def fix_checkpoint(
    src: str | Path,
    dst: str | Path | None = None,
    *,
    model: torch.nn.Module | None = None,
    key: str | None = None,
    to: str | None = None,
    in_place: bool = False,
    strict: bool = True,
    trust: bool = False,
) -> FixReport:
    """Write the weights of any checkpoint as a plain state dict that loads on every rung.

    It is unwrapped, without wrappers' prefixes, for the CPU, without what is not weights, and each
    tensor with no more than its own numbers. `dst` is written whole or not at all.

    Parameters
    ----------
    src : path
        What `inspect_checkpoint` knows. No code in it is run.
    dst : path
        The file to write; not the source, unless `in_place`.
    model : Module, optional
        Whose keys the file shall have: prefixes come and go as it needs, other keys are left out.
    key : str, optional
        Under which dotted key the state dict is, if there are several.
    to : ``"torch"`` or ``"safetensors"``, optional
        The kind of file; by default what the name `dst` ends in.
    in_place : bool
        Write over `src` after all. A copy stays beside it: ``x.pt.bak``.
    strict : bool
        Refuse if the result would not load into `model`, for missing keys or other shapes.
    trust : bool
        Take the state dict of a whole pickled model. This loads the file with
        ``weights_only=False``: whatever code the file names is run. Only for files that you or
        someone you would give your password to have made.

    Raises
    ------
    CheckpointError
        If it cannot be done safely; the message says why. Nothing is written then.
    OSError
        If a file is not there or may not be read.

    Examples
    --------
    >>> import tempfile, torch
    >>> wrapped = torch.nn.DataParallel(torch.nn.Linear(2, 1))
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     torch.save({"model": wrapped.state_dict(), "epoch": 3}, f"{folder}/dp.pt")
    ...     report = fix_checkpoint(f"{folder}/dp.pt", f"{folder}/fixed.pt")
    ...     keys = list(torch.load(f"{folder}/fixed.pt"))
    >>> keys, report.dropped
    (['weight', 'bias'], {'epoch': '3'})
    """
    source, target = _paths(src, dst, in_place)
    kind = to or ("safetensors" if target.suffix == ".safetensors" else "torch")
    if kind not in ("torch", "safetensors"):
        raise CheckpointError(f"to={to!r}: 'torch' or 'safetensors'.")
    checkpoint = open_checkpoint(source)
    if in_place and checkpoint.files != [source]:
        raise CheckpointError(f"{source}: more than one file; only one can be fixed in place.")
    if not in_place and target.exists() and any(target.samefile(f) for f in checkpoint.files):
        raise CheckpointError(
            f"{target} is the source: name another file, or in_place (--in-place)."
        )
    where, tensors, dropped = _weights(checkpoint, key, trust)
    names, missing, changed = _names(checkpoint, tensors, model, strict)
    dropped |= {k: _why_dropped(k) for k in tensors if k not in names.values()}
    tensors = {new: tensors[old] for new, old in names.items()}
    cloned, backup = oversized(tensors), None
    try:
        with atomic_file(target) as temporary:
            write = _write_torch if kind == "torch" else _write_safetensors
            verified = write(tensors, temporary, set(cloned))
            backup = _keep_copy(source) if in_place else None
    except CheckpointError:
        raise
    except Exception as error:  # of the disk, of torch, of safetensors
        raise CheckpointError(
            f"{target}: could not be written ({error}). Nothing was changed. Is the folder there, "
            f"and {in_bytes(sum(t.nbytes for t in tensors.values()))} of space in it?"
        ) from error
    return FixReport(
        source=source,
        target=target,
        format=kind,
        size=target.stat().st_size,
        weights_at=where,
        names=names,
        dropped=dropped,
        cloned=cloned,
        devices=dict(Counter(tensor.storage.device for tensor in tensors.values())),
        tied=[keys for keys in by_place(tensors).values() if len(keys) > 1],
        verified=verified,
        missing=missing,
        changed=changed,
        backup=backup,
    )


def _paths(src: str | Path, dst: str | Path | None, in_place: bool) -> tuple[Path, Path]:
    source = Path(src)
    if not in_place:
        if dst is None:
            raise CheckpointError("Name the file to write, or pass in_place=True (--in-place).")
        return source, Path(dst)
    if dst is not None and Path(dst) != source:
        raise CheckpointError(f"Either {dst} or in place (--in-place), not both.")
    return source, source


def _weights(
    checkpoint: Checkpoint, key: str | None, trust: bool
) -> tuple[str, dict[str, SavedTensor], dict[str, str]]:
    """Where the weights are, the weights, and what else there is."""
    where, weights = find_weights(checkpoint.tree, checkpoint.path, key)
    if is_model(weights):
        if not trust:
            raise CheckpointError(
                f"{checkpoint.path}: a whole model of class {weights.name}, which loads by running "
                "code of the file. If you trust whoever made it: trust=True (--trust)."
            )
        verify(checkpoint.storages())
        weights = run_model(checkpoint, where)
    tensors, rest = tensors_of(weights, checkpoint.path)
    above = where.split(".")[0]
    beside = {k: v for k, v in checkpoint.tree.items() if k != above} if where else {}
    return where, tensors, {str(k): describe(value) for k, value in (rest | beside).items()}


def _names(
    checkpoint: Checkpoint, tensors: dict, model: torch.nn.Module | None, strict: bool
) -> tuple[dict[str, str], list[str], dict]:
    """The keys to write and whose tensors they get; the model's that are missing or differ."""
    if model is None:
        try:
            names = clean(tensors, lightning=checkpoint.is_lightning)
        except CheckpointError as error:
            raise CheckpointError(f"{checkpoint.path}: {error}") from None
        return {new: old for old, new in names.items()}, [], {}
    found = match_model(tensors, unwrapped(model))
    if not found.names or (strict and (found.missing or found.changed)):
        way_out = "Nothing was written; strict=False (--partial) writes what fits."
        raise misfit(checkpoint.path, unwrapped(model), found, way_out)
    return found.names, found.missing, found.changed


def _why_dropped(key: str) -> str:
    return "AveragedModel's counter" if key == COUNTER else "the model has no such key"


def _write_torch(tensors: Mapping[str, SavedTensor], path: Path, cloned: set[str]) -> str:
    """Write, and compare the checksums that torch made of the numbers with those of the source."""
    import torch

    verify({id(tensors[key].storage): tensors[key].storage for key in cloned}.values())
    made: dict[tuple, torch.Tensor] = {}
    for key, tensor in tensors.items():
        if tensor.place not in made:
            made[tensor.place] = tensor.load().clone() if key in cloned else tensor.load()
    before = torch.serialization.get_crc32_options()
    torch.serialization.set_crc32_options(True)
    try:
        # torch's own writer takes small steps: with large ones the whole takes half the time.
        with open(path, "wb", buffering=1 << 24) as file:
            torch.save({key: made[tensor.place] for key, tensor in tensors.items()}, file)
    finally:
        torch.serialization.set_crc32_options(before)
    written = open_checkpoint(path).tree
    known = [key for key, tensor in tensors.items() if tensor.storage.crc is not None]
    wrong = [
        tensors[key].storage
        for key in known
        if key not in cloned and tensors[key].storage.crc != written[key].storage.crc
    ]
    if wrong:
        raise damage(wrong)
    return _verified(len(known))


def _write_safetensors(tensors: Mapping[str, SavedTensor], path: Path, cloned: set[str]) -> str:
    """Write with a checksum for each tensor. The format has no sharing: ties go into its notes."""
    import torch
    from safetensors.torch import save_file

    count = verify({id(t.storage): t.storage for t in tensors.values()}.values())
    state, checksums, notes, first = {}, {}, {"format": "pt"}, {}
    for key, tensor in tensors.items():
        if first.setdefault(tensor.place, key) != key:
            notes[key] = first[tensor.place]  # as safetensors.torch.save_model says it
            continue
        state[key], crc = tensor.load(), tensor.storage.crc
        if tensor.nbytes != tensor.storage.nbytes or not state[key].is_contiguous():
            state[key], crc = state[key].clone(memory_format=torch.contiguous_format), None
        if crc is None:
            crc = zlib.crc32(state[key].reshape(-1).view(torch.uint8).numpy())
        checksums[key] = crc
    save_file(state, path, notes | {CHECKSUMS: json.dumps(checksums)})
    return _verified(count)


def _verified(count: int) -> str:
    tensors = f"{count} tensor{'s' * (count != 1)}"
    return f"the checksums of {tensors}" if count else "nothing: there are no checksums"


def _keep_copy(source: Path) -> Path:
    """A second name for the file, which stays when the first one gets another file."""
    for number in itertools.count():
        backup = source.with_name(f"{source.name}.bak{number or ''}")
        try:
            os.link(os.path.realpath(source), backup)
            return backup
        except FileExistsError:
            continue
        except OSError:  # no links on this file system
            if not backup.exists():
                return Path(shutil.copy2(source, backup))
