"""What is in a checkpoint, and what to do with it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from torchclinic.checkpoints.keys import clean_names, removed_prefixes, wrapper_of
from torchclinic.checkpoints.pickles import StandIn, storage_id
from torchclinic.checkpoints.reading import (
    Checkpoint,
    CheckpointError,
    open_checkpoint,
    shard_note,
)
from torchclinic.checkpoints.reports import report, some
from torchclinic.checkpoints.state_dicts import (
    choose,
    describe,
    is_model,
    kind_of,
    split,
    state_dicts,
)
from torchclinic.tables import in_bytes

QUICK = 200e6  # bytes whose checksums take no time worth an option


@dataclass(repr=False)
class Inspection:
    """What `inspect_checkpoint` found; its ``repr`` is the report."""

    path: Path
    format: str  # such as "torch.save (zip)"
    size: int  # bytes on the disk
    checksums: str  # whether there are some, and right
    contents: dict[str, str]  # what is at the top level: names and descriptions
    state_dicts: list[str]  # the dotted key of each state dict, "" at the top
    weights_at: str | None  # the one that fix takes if no key is named; None without one
    keys: dict[str, Tensor]  # the tensors of that state dict
    devices: dict[str, str]  # where each of them was when it was saved, if the format says so
    not_finite: dict[str, int] | None  # how many numbers are NaN or infinite; None: not read
    parameters: int  # numbers in them, buffers too; of tied tensors once
    prefixes: dict[str, int]  # of wrappers, and on how many keys each is
    model_class: str | None  # of a whole pickled model
    shared: list[list[str]]  # keys that are one tensor
    oversized: list[str]  # keys whose storage holds more than they show
    imports: list[str]  # what weights_only=False would import (and may call or change)
    advice: list[str]  # what to do next

    def __repr__(self) -> str:
        holds = [
            f"{name}{': ' * bool(name)}{what}{' (the weights)' * (name == self.weights_at)}"
            for name, what in self.contents.items()
        ]
        if len(holds) > 15:
            holds[12:-2] = [f"... {len(holds) - 14:,} more ..."]
        others = [name for name in self.state_dicts if name != self.weights_at]
        return report(
            file=f"{self.path}: {self.format}, {in_bytes(self.size)}",
            checksums=self.checksums,
            not_finite=not_finite_note(self.not_finite, len(self.keys)),
            holds=holds,
            or_take=[f"{name or 'the top level'}: --key {name or repr(name)}" for name in others],
            table="\n" + "\n".join([*_key_lines(self.keys), ""]) if self.keys else "",
            total=self._total() if self.keys else "",
            prefix=[
                f"{prefix!r} on {count:,} of {len(self.keys):,} keys: put there by "
                f"{wrapper_of(prefix, [*self.keys, *self.contents])}"
                for prefix, count in self.prefixes.items()
            ],
            shared=[
                f"{some(names)}: one tensor under {len(names)} names" for names in self.shared[:3]
            ],
            oversized=[
                f"{name}: {in_bytes(self.keys[name].nbytes)} of a storage of "
                f"{in_bytes(self.keys[name].untyped_storage().nbytes())}; fix leaves the rest out"
                for name in self.oversized[:3]
            ],
            code=f"would import {some(self.imports, 6)}" if self.imports else "",
            next=self.advice,
        )

    def _total(self) -> str:
        size = in_bytes(sum({place(t): t.nbytes for t in self.keys.values()}.values()))
        devices = ", ".join(sorted({*self.devices.values()}))
        numbers = f"{len(self.keys):,} tensors, {self.parameters:,} numbers"
        return f"{numbers}, {size}" + f", saved on {devices}" * bool(devices)


def _key_lines(keys: Mapping[str, Tensor]) -> list[str]:
    """One line a layer: ``conv1.{weight, bias}``, shapes, dtypes."""
    layers: dict[str, dict[str, Tensor]] = {}
    for key, tensor in keys.items():
        layer, _, name = key.rpartition(".")
        layers.setdefault(layer, {})[name] = tensor
    lines = []
    for layer, tensors in layers.items():
        names = [*tensors][:2] + [f"+{len(tensors) - 2}"] * (len(tensors) > 2)
        inner = names[0] if len(tensors) == 1 else f"{{{', '.join(names)}}}"
        kinds = [kind_of(tensor) for tensor in tensors.values()]
        shapes, dtypes = (dict.fromkeys(words) for words in zip(*kinds, strict=True))
        label, what = f"{layer}.{inner}" if layer else inner, ", ".join([*shapes, *dtypes])
        lines.append(f"  {_shortened(label, 44):44}  {_shortened(what, 32)}")
    if len(lines) > 17:
        lines[12:-4] = [f"  ... {len(lines) - 16:,} more ..."]
    return lines


def _shortened(text: str, width: int) -> str:
    half = width // 2
    return text if len(text) <= width else f"{text[: width - half - 3]}...{text[-half:]}"


def inspect_checkpoint(path: str | Path, *, verify: bool | None = None) -> Inspection:
    """Look into a checkpoint of any kind without running code from it or reading its numbers.

    (The numbers are read of files that ``torch.save`` wrote before PyTorch 1.6.)

    Parameters
    ----------
    path : path
        A file, or the folder of a sharded checkpoint.
    verify : bool, optional
        Compare the numbers with the checksums in the file, and look for NaN and inf. Reads all of
        it; by default only if that is quick.

    Raises
    ------
    CheckpointError
        If this is not a checkpoint, or is damaged.
    OSError
        If there is no such file or it may not be read.

    Examples
    --------
    >>> import tempfile, torch
    >>> wrapped = torch.nn.DataParallel(torch.nn.Linear(2, 1))
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     torch.save({"model": wrapped.state_dict(), "epoch": 3}, f"{folder}/dp.pt")
    ...     found = inspect_checkpoint(f"{folder}/dp.pt")
    >>> found.weights_at, list(found.keys), found.prefixes
    ('model', ['module.weight', 'module.bias'], {'module.': 2})
    """
    checkpoint = open_checkpoint(path)
    there, note = state_dicts(checkpoint.tree), ""
    try:
        where, weights = choose(checkpoint.tree, checkpoint.path)
    except CheckpointError as error:
        where, weights, note = None, {}, str(error)
    keys = {key: value for key, value in weights.items() if isinstance(value, Tensor)}
    names = {}
    try:
        names = clean_names(keys, lightning=checkpoint.is_lightning)
        split(weights, checkpoint.path)  # what fix would refuse
    except CheckpointError as error:
        note = str(error)
    found = Inspection(
        path=Path(path),
        format=checkpoint.format,
        size=sum(file.stat().st_size for file in checkpoint.files),
        checksums="",
        contents=_contents(checkpoint.tree, where),
        state_dicts=list(there),
        weights_at=where,
        keys=keys,
        devices={k: checkpoint.device(t) for k, t in keys.items()} if checkpoint.devices else {},
        not_finite=None,
        parameters=sum({place(tensor): tensor.numel() for tensor in keys.values()}.values()),
        prefixes=removed_prefixes(names),
        model_class=there[where].name if is_model(there.get(where)) else None,
        shared=[names for names in by_place(keys).values() if len(names) > 1],
        oversized=oversized(keys),
        imports=checkpoint.imports,
        advice=[],
    )
    reads = verify or (verify is None and found.size < QUICK)
    found.checksums = _checksums(checkpoint, reads)
    found.not_finite = not_finite(keys) if reads else None
    found.advice = [note] if note else list(_advice(found))
    return found


def _contents(tree: Any, where: str | None) -> dict[str, str]:
    """Names and descriptions of what is at the top level; of weights, what is beside them."""
    if not isinstance(tree, dict) or isinstance(tree, StandIn):
        return {"": describe(tree)}
    words = {id(value): value for value in tree.values() if where or not isinstance(value, Tensor)}
    words = {i: describe(value) for i, value in words.items()}  # once each: one may stand often
    inside = {str(key): words[id(value)] for key, value in tree.items() if id(value) in words}
    return inside if where else {"": describe(tree)} | inside


def _checksums(checkpoint: Checkpoint, wanted: bool) -> str:
    if not checkpoint.checksums:
        return "none in this file"
    if not wanted:
        return "not compared: verify=True (--verify) reads the whole file"
    count = checkpoint.verify()
    return f"right, of {count:,} storage{'s' * (count != 1)}"


def not_finite(values: Mapping[str, Any]) -> dict[str, int]:
    """How many numbers are NaN or infinite, by the keys of the tensors that hold such."""
    counts = {}
    for key, value in values.items():
        if not isinstance(value, Tensor) or not (value.is_floating_point() or value.is_complex()):
            continue
        if value.nbytes > value.untyped_storage().nbytes():  # shows them again and again
            value = torch.empty(0, dtype=value.dtype).set_(value.untyped_storage())
        with suppress(NotImplementedError):  # float4, which has neither
            parts = value.flatten().split(1 << 22)
            counts[key] = sum(part.numel() - int(part.isfinite().sum()) for part in parts)
    return {key: count for key, count in counts.items() if count}


def not_finite_note(counts: Mapping[str, int] | None, tensors: int) -> str:
    """The report's line on them: nothing, if all numbers are finite."""
    if counts is None:
        return "not read: verify=True (--verify) looks for NaN and inf"
    names = some(f"{key} ({count:,})" for key, count in counts.items())
    return f"NaN or inf in {len(counts)} of {tensors} tensors: {names}" if counts else ""


def place(tensor: Tensor) -> tuple:
    """Equal for tensors that are one: they show the same numbers in the same way."""
    view = tensor.storage_offset(), tensor.shape, tensor.stride(), tensor.dtype
    return storage_id(tensor), *view


def by_place(values: Mapping[str, Any]) -> dict[tuple, list[str]]:
    """The keys of each tensor."""
    names: dict[tuple, list[str]] = {}
    for key, value in values.items():
        if isinstance(value, Tensor) and value.numel():
            names.setdefault(place(value), []).append(key)
    return names


def oversized(values: Mapping[str, Any]) -> list[str]:
    """Keys of tensors whose storage holds numbers that none of the keys shows."""
    tensors = {key: value for key, value in values.items() if isinstance(value, Tensor)}
    shown: dict[int, int] = {}
    for tensor in {place(tensor): tensor for tensor in tensors.values()}.values():
        shown[storage_id(tensor)] = shown.get(storage_id(tensor), 0) + tensor.nbytes
    return [k for k, t in tensors.items() if shown[storage_id(t)] < t.untyped_storage().nbytes()]


def _advice(found: Inspection) -> Iterator[str]:
    """Sentences on what to do next."""
    if note := shard_note(found.path):
        yield f"This is {note}"
        return
    if found.imports:
        yield (
            "torch.load refuses this file unless weights_only=False, which imports what stands "
            "under 'code' and may call it. fix leaves it out and runs nothing."
        )
    is_plain = found.weights_at == "" and set(found.devices.values()) <= {"cpu"}
    sharded = found.path.is_dir() and found.format != "safetensors"
    if found.prefixes or found.oversized or found.imports or sharded or not is_plain:
        yield f"torchclinic fix {found.path} -o fixed.pt makes a plain state dict of it."
    else:
        yield "A plain state dict: load_into(model, path), or model.load_state_dict."
