"""What is in a checkpoint, and what to do with it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from torchladder.checkpoints.contents import (
    describe,
    find_weights,
    is_model,
    run_model,
    weights_of,
)
from torchladder.checkpoints.keys import clean, prefixes, put_there_by
from torchladder.checkpoints.pickles import StandIn
from torchladder.checkpoints.reading import Checkpoint, open_checkpoint
from torchladder.checkpoints.reports import ends, printable, row, shape_text, some
from torchladder.checkpoints.tensors import CheckpointError, SavedTensor, verify
from torchladder.tables import in_bytes

QUICK = 200e6  # bytes whose checksums take no time worth an option


@dataclass(repr=False)
class Inspection:
    """What `inspect_checkpoint` found; its ``repr`` is the report."""

    path: Path
    format: str  # such as "torch.save (zip)"
    size: int  # bytes on the disk
    checksums: str  # whether there are some, and right
    contents: dict[str, str]  # what is at the top level: names and descriptions
    weights_at: str | None  # the dotted key of the state dict, "" at the top; None without one
    keys: dict[str, SavedTensor]  # the state dict's: .shape, .dtype, .storage.device
    parameters: int  # numbers in them, buffers too; of tied tensors once
    prefixes: dict[str, int]  # of wrappers, and on how many keys each is
    model_class: str | None  # of a whole pickled model
    shared: list[list[str]]  # keys that are one tensor
    oversized: list[str]  # keys whose storage holds more than they show
    calls: list[str]  # what loading with weights_only=False would import and call
    advice: list[str]  # what to do next

    def __repr__(self) -> str:
        lines = row("file", f"{self.path}: {self.format}, {in_bytes(self.size)}")
        lines += row("checksums", self.checksums)
        for name, what in ends(list(self.contents.items()), 12, 2):
            mark = " (the weights)" if name == self.weights_at else ""
            lines += row("holds", f"{name}: {what}{mark}" if name else what)
        if self.keys:
            lines += ["", *_key_lines(self.keys), ""]
            devices = ", ".join(sorted({t.storage.device for t in self.keys.values()}))
            size = in_bytes(sum({t.place: t.nbytes for t in self.keys.values()}.values()))
            total = f"{len(self.keys):,} tensors, {self.parameters:,} numbers, {size}"
            lines += row("total", f"{total}, saved on {devices}")
        for prefix, count in self.prefixes.items():
            on = f"{prefix!r} on {count:,} of {len(self.keys):,} keys"
            lines += row("prefix", f"{on}: put there by {put_there_by(prefix, self.keys)}")
        for names in self.shared[:3]:
            lines += row("shared", f"{some(names)}: one tensor under {len(names)} names")
        for name in self.oversized[:3]:
            tensor = self.keys[name]
            of = in_bytes(tensor.storage.nbytes)
            shown = f"{name}: {in_bytes(tensor.nbytes)} of a storage of {of}"
            lines += row("oversized", f"{shown}; fix leaves the rest out")
        if self.calls:
            lines += row("code", f"would import and call {some(self.calls, 6)}")
        for sentence in self.advice:
            lines += row("next", sentence)
        return printable(lines)


def _key_lines(keys: Mapping[str, SavedTensor]) -> Iterator[str]:
    """One line a layer: ``conv1.{weight, bias}``, shapes, dtypes."""
    layers: dict[str, dict[str, SavedTensor]] = {}
    for key, tensor in keys.items():
        layer, _, name = key.rpartition(".")
        layers.setdefault(layer, {})[name] = tensor
    rows = []
    for layer, tensors in layers.items():
        names = [*tensors][:2] + [f"+{len(tensors) - 2}"] * (len(tensors) > 2)
        inner = names[0] if len(tensors) == 1 else f"{{{', '.join(names)}}}"
        shapes = dict.fromkeys(shape_text(tensor.shape) for tensor in tensors.values())
        dtypes = dict.fromkeys(tensor.dtype for tensor in tensors.values())
        rows.append((f"{layer}.{inner}" if layer else inner, ", ".join([*shapes, *dtypes])))
    for label, what in ends(rows, 12, 4):
        yield f"  {_shortened(label, 44):44}  {_shortened(what, 32)}" if label else f"  {what}"


def _shortened(text: str, width: int) -> str:
    half = width // 2
    return text if len(text) <= width else f"{text[: width - half - 3]}...{text[-half:]}"


def inspect_checkpoint(
    path: str | Path, *, trust: bool = False, verify: bool | None = None
) -> Inspection:
    """Look into a checkpoint of any kind without running code from it or reading its numbers.

    Parameters
    ----------
    path : path
        A file, or the folder of a sharded checkpoint.
    trust : bool
        Of a whole pickled model, ask the model itself for its state dict. This loads the file with
        ``weights_only=False``: whatever code the file names is run. Only for files that you or
        someone you would give your password to have made.
    verify : bool, optional
        Compare the numbers with the checksums in the file. Reads all of it; by default only if
        that is quick.

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
    note = ""
    try:
        where, weights = find_weights(checkpoint.tree, checkpoint.path)
    except CheckpointError as error:
        where, weights, note = None, {}, str(error)
    model_class = weights.name if is_model(weights) else None
    if model_class:
        weights = run_model(checkpoint, where) if trust else weights_of(weights)
    keys = {key: value for key, value in weights.items() if isinstance(value, SavedTensor)}
    try:
        names = clean(keys, lightning=checkpoint.is_lightning)
    except CheckpointError as error:
        names, note = {}, str(error)
    tree = checkpoint.tree
    named = isinstance(tree, dict) and not isinstance(tree, StandIn) and where != ""
    inspection = Inspection(
        path=checkpoint.path,
        format=checkpoint.format,
        size=checkpoint.size,
        checksums=_checksums(checkpoint, verify),
        contents={str(k): describe(v) for k, v in tree.items()} if named else {"": describe(tree)},
        weights_at=where,
        keys=keys,
        parameters=sum({tensor.place: tensor.numel for tensor in keys.values()}.values()),
        prefixes=prefixes(names),
        model_class=model_class,
        shared=[names for names in by_place(keys).values() if len(names) > 1],
        oversized=oversized(keys),
        calls=checkpoint.calls,
        advice=[],
    )
    inspection.advice = [note] if note else list(_advice(inspection))
    return inspection


def _checksums(checkpoint: Checkpoint, wanted: bool | None) -> str:
    storages = checkpoint.storages()
    if not any(storage.crc is not None for storage in storages):
        return "none in this file"
    if wanted or (wanted is None and checkpoint.size < QUICK):
        count = verify(storages)
        return f"right, of {count:,} storage{'s' * (count != 1)}"
    return "not compared: verify=True (--verify) reads the whole file"


def by_place(keys: Mapping[str, SavedTensor]) -> dict[tuple, list[str]]:
    """The keys of each tensor."""
    names: dict[tuple, list[str]] = {}
    for key, tensor in keys.items():
        if tensor.numel:
            names.setdefault(tensor.place, []).append(key)
    return names


def oversized(keys: Mapping[str, SavedTensor]) -> list[str]:
    """Keys whose storage holds numbers that none of the keys shows."""
    shown: dict[int, int] = {}
    for tensor in {tensor.place: tensor for tensor in keys.values()}.values():
        shown[id(tensor.storage)] = shown.get(id(tensor.storage), 0) + tensor.nbytes
    return [key for key, t in keys.items() if shown[id(t.storage)] < t.storage.nbytes]


def _advice(found: Inspection) -> Iterator[str]:
    """Sentences on what to do next."""
    if found.model_class:
        yield (
            f"A whole model: loading it runs code. If you trust the file and {found.model_class} "
            f"can be imported: torchladder fix {found.path} -o fixed.pt --trust"
        )
        return
    if found.calls:
        yield (
            "torch.load refuses this file unless weights_only=False, which runs what stands under "
            "'code'. fix leaves it out and runs nothing."
        )
    saved_on_gpu = any(t.storage.device != "cpu" for t in found.keys.values())
    folder = found.path.is_dir() and found.format != "safetensors"
    if (
        found.prefixes
        or found.weights_at
        or found.oversized
        or found.calls
        or saved_on_gpu
        or folder
    ):
        yield f"torchladder fix {found.path} -o fixed.pt makes a plain state dict of it."
    else:
        yield "A plain state dict: load_into(model, path), or model.load_state_dict."
