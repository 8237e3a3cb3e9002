"""What ``torch.save`` writes: a zip archive; before version 1.6, a row of pickles and storages."""

from __future__ import annotations

import io
import re
import struct
import zipfile
import zlib
from collections.abc import Callable
from typing import Any, BinaryIO

from torchladder.checkpoints.pickles import StandIn, read_pickle
from torchladder.checkpoints.tensors import (
    SIZES,
    CheckpointError,
    MappedFile,
    SavedTensor,
    Storage,
)

# dtypes whose storages have a class of their own: torch.FloatStorage
STORAGES = {"Double": "float64", "Float": "float32", "Half": "float16", "BFloat16": "bfloat16"}
STORAGES |= {"Long": "int64", "Int": "int32", "Short": "int16", "Char": "int8", "Byte": "uint8"}
STORAGES |= {"Bool": "bool", "ComplexFloat": "complex64", "ComplexDouble": "complex128"}
STORAGES |= {"QInt8": "int8", "QUInt8": "uint8", "QInt32": "int32", "Untyped": "uint8"}

OURS = ("torch._utils.", "torch._tensor.", "torch.serialization.", "torch.device", "numpy.dtype")
LEGACY = 0x1950A86A20F9469CFC6C  # the first number in an old file


def read_zip(file: MappedFile, start: int = 0, size: int | None = None) -> tuple[Any, list[str]]:
    """What a ``torch.save`` archive at `start` of `file` holds, and `read_objects`' calls."""
    archive = _Archive(file, start, file.size if size is None else size)
    return read_objects(io.BytesIO(archive.content("data.pkl")), archive.storage)


class _Archive:
    """The entries of a zip archive: where each lies in the file, and its checksum."""

    def __init__(self, file: MappedFile, start: int, size: int) -> None:
        self.file, self.start, self.data = file, start, file.bytes[start : start + size]
        try:
            whole = size == file.size
            with open(file.path, "rb") if whole else io.BytesIO(self.data) as source:
                entries = {info.filename: info for info in zipfile.ZipFile(source).infolist()}
        except zipfile.BadZipFile:
            raise CheckpointError(
                f"{file.path}: cut off, as by a full disk or a broken copy: torch.save's directory "
                "at the end of the file is missing. Copy or save it again."
            ) from None
        if any(name.endswith("/constants.pkl") for name in entries):
            raise CheckpointError(
                f"{file.path}: a TorchScript archive, which is a program. If you trust it, save "
                "torch.jit.load(path).state_dict() to another file."
            )
        roots = [name[:-8] for name in entries if re.fullmatch(r"[^/]+/data\.pkl", name)]
        if len(roots) != 1:
            raise CheckpointError(f"{file.path}: a zip archive, but not one of torch.save.")
        self.entries = {name.removeprefix(roots[0]): info for name, info in entries.items()}
        # Under torch.serialization.set_crc32_options(False), torch writes 0 for all of them.
        self.has_checksums = any(info.CRC for info in entries.values())
        self.storages: dict[str, Storage] = {}
        if "byteorder" in self.entries and self.content("byteorder") != b"little":
            raise CheckpointError(f"{file.path}: saved on a big-endian machine; convert it there.")

    def place(self, name: str) -> tuple[int, int, int | None]:
        """Where the entry begins, its size, and its checksum."""
        info = self.entries[name]
        if info.compress_type != zipfile.ZIP_STORED:
            raise CheckpointError(
                f"{self.file.path}: its entries are compressed, as torch.save's never are. Unpack "
                "it, and pack it with `zip -0 -r`."
            )
        at = info.header_offset
        names = struct.unpack("<HH", self.data[at + 26 : at + 30])  # lengths of what is between
        at += 30 + sum(names)
        if at + info.file_size > len(self.data):
            raise ValueError(f"{name} ends after the file")
        return at, info.file_size, info.CRC if self.has_checksums else None

    def content(self, name: str) -> bytes:
        at, size, crc = self.place(name)
        found = bytes(self.data[at : at + size])
        if crc is not None and zlib.crc32(found) != crc:
            raise ValueError(f"the checksum of {name} differs")
        return found

    def storage(self, tag: tuple) -> Storage:
        _, kind, key, device, count = tag
        if key not in self.storages:
            at, size, crc = self.place(f"data/{key}")
            dtype = _dtype(kind)
            if size != count * SIZES[dtype]:
                raise ValueError(f"{size} bytes for {count} elements")
            self.storages[key] = Storage(dtype, size, self.file, self.start + at, device, crc)
        return self.storages[key]


def read_pickles(file: MappedFile) -> tuple[str, Any, list[str]]:
    """The format and content of a file that begins with a pickle, and `read_objects`' calls."""
    storages: dict[str, Storage] = {}

    def find(tag: tuple) -> Storage | StandIn:
        if tag[0] == "module":  # a class, with its source text
            return tag[1]
        _, kind, key, device, count, view = tag
        if view is not None:
            raise ValueError("a view of a storage, as torch 0.1 wrote them")
        if key not in storages:
            dtype = _dtype(kind)
            storages[key] = Storage(dtype, count * SIZES[dtype], file, 0, device)
        return storages[key]

    with open(file.path, "rb") as source:
        first, calls = read_objects(source, find)
        if first != LEGACY:
            return "pickle, not by torch.save", first, calls
        _version, system = read_pickle(source), read_pickle(source)
        if not system["little_endian"]:
            raise CheckpointError(f"{file.path}: saved on a big-endian machine; convert it there.")
        tree, calls = read_objects(source, find)
        keys, at = read_pickle(source), source.tell()
    for key in keys:  # each storage after its length
        storages[key].start = at + 8
        at += 8 + storages[key].nbytes
    if at > file.size:
        raise CheckpointError(
            f"{file.path}: cut off, as by a full disk or a broken copy: {at - file.size:,} bytes "
            "are missing. Copy or save it again."
        )
    for key, storage in storages.items():
        count = int.from_bytes(file.bytes[storage.start - 8 : storage.start], "little")
        if count * SIZES[storage.dtype] != storage.nbytes:
            raise ValueError(f"storage {key} has {count} elements")
    return "torch.save (before 1.6)", tree, calls


def read_objects(source: BinaryIO, storage: Callable) -> tuple[Any, list[str]]:
    """What a pickle describes, with a `SavedTensor` for each tensor.

    And what it would call if torch loaded it with ``weights_only=False``, apart from the functions
    that build tensors.
    """
    calls = {}

    def make(name: str, args: tuple) -> Any:
        made = _make(name, args)
        if isinstance(made, StandIn) and not name.startswith(OURS):
            calls[name] = None
        return made

    return read_pickle(source, make, storage), list(calls)


def _make(name: str, args: tuple) -> Any:
    """What the call of a function gives, if it is one that builds tensors or numbers."""
    match name.removeprefix("torch._utils.").removeprefix("torch._tensor."):
        case "_rebuild_tensor" | "_rebuild_tensor_v2" if not any(args[6:]):
            storage, offset, shape, stride = args[:4]
            return SavedTensor(storage.dtype, shape, stride, offset, storage)
        case "_rebuild_tensor_v3" if not any(args[7:]):  # for dtypes that came later
            storage, offset, shape, stride = args[:4]
            return SavedTensor(args[6].name.removeprefix("torch."), shape, stride, offset, storage)
        case "_rebuild_parameter" | "_rebuild_parameter_with_state":
            return args[0]
        case "_rebuild_from_type_v2":  # a tensor of a subclass, or with attributes
            inner = _make(args[0].name, args[2])
            return inner if isinstance(inner, SavedTensor) else StandIn(name, args)
        case "numpy.core.multiarray.scalar" | "numpy._core.multiarray.scalar":
            formats = {"f8": "<d", "f4": "<f", "i8": "<q", "i4": "<i", "u1": "<B", "b1": "<?"}
            if args[0].args[0] in formats:
                return struct.unpack(formats[args[0].args[0]], args[1])[0]
    return StandIn(name, args)


def _dtype(storage_class: StandIn) -> str:
    return STORAGES[storage_class.name.rsplit(".", 1)[1].removesuffix("Storage")]
