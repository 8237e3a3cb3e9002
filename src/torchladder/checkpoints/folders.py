"""Checkpoints that are folders: shards with an index, and torch.distributed.checkpoint (DCP)."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torchladder.checkpoints.pickles import StandIn, read_pickle
from torchladder.checkpoints.tensors import (
    CheckpointError,
    MappedFile,
    SavedTensor,
    Storage,
    any_damage_told,
    contiguous,
    verify,
)
from torchladder.checkpoints.torch_files import read_zip

if TYPE_CHECKING:
    import torch


def read_folder(path: Path, open_file: Callable) -> tuple[str, int, Any, list[Path], list[str]]:
    """The format, size, tree, files and calls of a folder; `open_file` reads a file in it.

    An index file stands for its folder.
    """
    if path.is_file():
        return _read_shards(path, open_file)
    names = sorted(p.name for p in path.iterdir())
    indices = [name for name in names if name.endswith(".index.json")]
    single = [n for n in names if n.endswith((".safetensors", ".pt", ".pth", ".ckpt", ".bin"))]
    weights = [n for n in single if n in ("model.safetensors", "pytorch_model.bin")] or single
    if ".metadata" in names:
        return _read_dcp(path)
    if "zero_to_fp32.py" in names:
        raise CheckpointError(
            f"{path}: of DeepSpeed. Run the zero_to_fp32.py in it: it makes one file."
        )
    if "data.pkl" in names:
        raise CheckpointError(
            f"{path}: an unpacked torch.save file. Pack it again: zip -0 -r x.pt {path.name}"
        )
    if len(indices) == 1:
        return _read_shards(path / indices[0], open_file)
    if len(weights) == 1:
        found = open_file(path / weights[0])
        return found.format, found.size, found.tree, found.files, found.calls
    inside = ", ".join(names[:8]) + (", ..." if len(names) > 8 else "")
    raise CheckpointError(f"{path}: a folder; name a checkpoint in it ({inside or 'it is empty'}).")


def _part(folder: Path, name: Any) -> Path:
    """The file `name` of a folder, and never one outside."""
    if not isinstance(name, str) or Path(name).name != name:
        raise CheckpointError(f"{folder}: its index names {name!r}, which is not a file in it.")
    if not (folder / name).is_file():
        raise CheckpointError(f"{folder}: {name} is missing, which its index names. Copy it anew.")
    return folder / name


def _read_shards(index: Path, open_file: Callable) -> tuple[str, int, Any, list[Path], list[str]]:
    """Hugging Face's: a JSON file says in which shard each key lies."""
    homes = json.loads(index.read_text())["weight_map"]
    shards = {name: open_file(_part(index.parent, name)) for name in sorted(set(homes.values()))}
    for key, name in homes.items():
        if key not in shards[name].tree:
            raise CheckpointError(f"{index}: {key!r} is not in {name}, where it should be.")
    tree = {key: shards[name].tree[key] for key, name in homes.items()}
    kinds = {shard.format for shard in shards.values()}
    size = sum(shard.size for shard in shards.values())
    files = [index, *(shard.path for shard in shards.values())]
    calls = [call for shard in shards.values() for call in shard.calls]
    return f"{len(shards)} shards, {' and '.join(sorted(kinds))}", size, tree, files, calls


@dataclass(eq=False)
class ShardedTensor(SavedTensor):
    """A tensor in pieces: for each, where it begins in the tensor, and where it lies."""

    pieces: list[tuple[tuple, MappedFile, int, int]] = field(repr=False, default_factory=list)

    def load(self) -> torch.Tensor:
        import torch

        whole = torch.empty(self.shape, dtype=getattr(torch, self.dtype))
        covered = 0
        for offsets, file, start, size in self.pieces:
            with any_damage_told(file.path):
                piece = read_zip(file, start, size)[0]
                piece.storage.key = self.storage.key
                verify([piece.storage])
                ends = [at + n for at, n in zip(offsets, piece.shape, strict=True)]
                whole[tuple(map(slice, offsets, ends))] = piece.load()
                covered += piece.numel
        if covered != self.numel:
            raise CheckpointError(
                f"{self.storage.file.path}: pieces of {self.storage.key!r} are lost."
            )
        return whole


def _read_dcp(folder: Path) -> tuple[str, int, Any, list[Path], list[str]]:
    """What torch.distributed.checkpoint writes, FSDP for one: ``.metadata`` is a pickle."""
    files: dict[str, MappedFile] = {}
    index = MappedFile(folder / ".metadata")
    with open(index.path, "rb") as source:
        about = read_pickle(source).state
    homes: dict[str, list] = {}  # of each key, the pieces
    for piece, home in about["storage_data"].items():
        name = home.state["relative_path"]
        file = files.setdefault(name, MappedFile(_part(folder, name)))
        offsets = piece.state.get("offset") or ()
        place = (offsets, file, home.state["offset"], home.state["length"])
        homes.setdefault(piece.state["fqn"], []).append(place)
    tree: dict = {}
    for key, entry in about["state_dict_metadata"].items():
        value = _dcp_value(entry, key, index, homes.get(key, []))
        *above, last = (about.get("planner_data") or {}).get(key) or (key,)
        inner = tree
        for name in above:
            inner = inner.setdefault(name, {})
        inner[last] = value
    size = sum(file.size for file in files.values())
    return (
        f"DCP, {len(files)} files",
        size,
        tree,
        [index.path, *(f.path for f in files.values())],
        [],
    )


def _dcp_value(entry: StandIn, key: str, index: MappedFile, pieces: list) -> Any:
    if not entry.name.endswith(".TensorStorageMetadata"):  # a pickled value
        return read_zip(*pieces[0][1:])[0] if pieces else None
    properties, shape = entry.state["properties"].state, entry.state["size"]
    dtype = properties[0] if isinstance(properties, tuple) else properties["dtype"]
    name = dtype.name.removeprefix("torch.")
    storage = Storage(name, sum(piece[3] for piece in pieces), index, 0, key=key)
    tensor = ShardedTensor(name, shape, contiguous(shape), 0, storage, pieces)
    storage.nbytes = tensor.nbytes  # the pieces' archives are larger
    return tensor
