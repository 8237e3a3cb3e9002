"""Open a checkpoint of any kind: no code in it is run, and its numbers stay on the disk."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torchladder.checkpoints import folders, torch_files
from torchladder.checkpoints.pickles import StandIn
from torchladder.checkpoints.tensors import (
    CheckpointError,
    MappedFile,
    SavedTensor,
    Storage,
    any_damage_told,
    contiguous,
)
from torchladder.tables import in_bytes

SAFETENSORS = {"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16"}
SAFETENSORS |= {"I64": "int64", "I32": "int32", "I16": "int16", "I8": "int8", "BOOL": "bool"}
SAFETENSORS |= {"U64": "uint64", "U32": "uint32", "U16": "uint16", "U8": "uint8"}
SAFETENSORS |= {"C64": "complex64", "F8_E4M3": "float8_e4m3fn", "F8_E5M2": "float8_e5m2"}
CHECKSUMS = "torchladder.crc32"  # in the files that we write: each tensor's, as JSON

# How files begin that are taken for checkpoints.
OTHERS = {b"\x89HDF": "HDF5, which Keras writes", b"GGUF": "GGUF, which llama.cpp reads"}
OTHERS |= {b"\x93NUMPY": "an array that numpy.load reads", b"\x1f\x8b": "gzip: unpack it"}


@dataclass
class Checkpoint:
    """An open checkpoint.

    Attributes
    ----------
    path : Path
    format : str
        Such as ``"torch.save (zip)"``.
    size : int
        Bytes on the disk.
    tree : object
        What was saved: containers and numbers as they were, a `SavedTensor` for each tensor, a
        `StandIn` for everything else.
    files : list of Path
        All that it lies in.
    calls : list of str
        What it would import and call if it were loaded with ``weights_only=False``.
    """

    path: Path
    format: str
    size: int
    tree: Any
    files: list[Path]
    calls: list[str] = field(default_factory=list)

    @property
    def is_lightning(self) -> bool:
        return isinstance(self.tree, dict) and "pytorch-lightning_version" in self.tree

    def storages(self) -> list[Storage]:
        """The storage of each tensor, once, with the name of a tensor in it."""
        found = {}
        for where, value in walk(self.tree):
            if isinstance(value, SavedTensor) and id(value.storage) not in found:
                found[id(value.storage)] = value.storage
                value.storage.key = ".".join(map(str, where))
        return list(found.values())


def walk(tree: Any) -> Iterator[tuple[tuple, Any]]:
    """Each thing in a tree of containers and stand-ins, after the keys that lead to it.

    What is in two places is opened once: a file may hold a list that holds itself.
    """
    waiting, opened = [((), tree)], set()
    while waiting:
        where, value = waiting.pop()
        yield where, value
        if isinstance(value, dict | list | tuple) and id(value) not in opened:
            opened.add(id(value))
            inside = list(value.items() if isinstance(value, dict) else enumerate(value))
            if isinstance(value, StandIn):
                inside += [("state", value.state), ("args", value.args)]
            waiting += [((*where, key), child) for key, child in reversed(inside)]


def open_checkpoint(path: str | Path) -> Checkpoint:
    """Recognise a file or folder and read all of it but the numbers.

    Raises
    ------
    CheckpointError
        If it is not a checkpoint, or is damaged.
    OSError
        If it is not there or may not be read.
    """
    path = Path(path)
    with any_damage_told(path):
        if path.is_dir() or path.name.endswith(".index.json"):
            return Checkpoint(path, *folders.read_folder(path, open_checkpoint))
        return Checkpoint(path, *_read_file(MappedFile(path)))


def _read_file(file: MappedFile) -> tuple[str, int, Any, list[Path], list[str]]:
    head = bytes(file.bytes[:512])
    if head.startswith(b"PK\x03\x04"):
        kind, (tree, calls) = "torch.save (zip)", torch_files.read_zip(file)
    elif head.startswith(b"\x80"):
        kind, tree, calls = torch_files.read_pickles(file)
    elif head[8:9] == b"{":
        kind, tree, calls = "safetensors", _read_safetensors(file), []
    else:
        raise CheckpointError(f"{file.path}: {_what_else(head, file.size)}")
    return kind, file.size, tree, [file.path], calls


def _read_safetensors(file: MappedFile) -> dict[str, SavedTensor]:
    data = 8 + int.from_bytes(file.bytes[:8], "little")  # where the numbers begin
    header = json.loads(bytes(file.bytes[8:data]))
    notes = header.pop("__metadata__", {})
    checksums = json.loads(notes.get(CHECKSUMS, "{}"))
    tree = {}
    for name, entry in header.items():
        dtype, shape = SAFETENSORS[entry["dtype"]], tuple(entry["shape"])
        begin, end = entry["data_offsets"]
        storage = Storage(dtype, end - begin, file, data + begin, crc=checksums.get(name))
        tree[name] = SavedTensor(dtype, shape, contiguous(shape), 0, storage)
        if tree[name].nbytes != storage.nbytes or begin < 0:
            raise ValueError(f"{name} has {storage.nbytes} bytes for shape {shape}")
    length = max((t.storage.start + t.storage.nbytes for t in tree.values()), default=data)
    if length > file.size:
        raise CheckpointError(
            f"{file.path}: cut off, as by a full disk or a broken copy: {file.size:,} of its "
            f"{length:,} bytes are there. Copy or save it again."
        )
    # One tensor under two names is stored once; the second name stands in the notes.
    return tree | {name: tree[kept] for name, kept in notes.items() if kept in tree}


def _what_else(head: bytes, size: int) -> str:
    """What a file is that is no checkpoint, and what to do."""
    text = head.lstrip().lower()
    if not head.strip(b"\0"):
        what = "begins with nothing but zeros" if size else "is empty"
        return f"this file {what}: the program that wrote it was stopped. Copy or save it again."
    if text.startswith((b"<!doctype", b"<html", b"<?xml")):
        return "this is a web page about the file, not the file: the link to download is another."
    if text.startswith(b"version https://git-lfs"):
        found = re.search(rb"size (\d{1,15})\b", head)
        of = f" of {in_bytes(int(found[1]))}" if found else ""
        return f"this is a Git-LFS pointer to the file{of}, not the file: run `git lfs pull`."
    for start, kind in OTHERS.items():
        if head.startswith(start):
            return f"this is not a checkpoint of PyTorch but {kind}."
    return f"neither torch.save nor safetensors writes files that begin with {head[:12]!r}."
