"""Tensors in a file: what is known of them before their numbers are read."""

from __future__ import annotations

import mmap
import os
import zlib
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # looking at a file needs no torch, whose import takes longer than the look
    import torch

# Bytes an element, by torch's name for the dtype.
SIZES = {"bool": 1, "uint8": 1, "int8": 1, "uint16": 2, "int16": 2, "uint32": 4, "int32": 4}
SIZES |= {"uint64": 8, "int64": 8, "float16": 2, "bfloat16": 2, "float32": 4, "float64": 8}
SIZES |= {"complex32": 4, "complex64": 8, "complex128": 16, "float8_e4m3fn": 1, "float8_e5m2": 1}
SIZES |= {"float8_e4m3fnuz": 1, "float8_e5m2fnuz": 1, "float8_e8m0fnu": 1, "float4_e2m1fn_x2": 1}


class CheckpointError(ValueError, RuntimeError):
    """A checkpoint that cannot be read, fixed or loaded: the message says why, and the way out.

    A RuntimeError too, as that is what ``load_state_dict`` raises and programs catch.
    """


@contextmanager
def any_damage_told(path: Path) -> Iterator[None]:
    """Turn whatever goes wrong in reading a file into a `CheckpointError`; `OSError` stays."""
    try:
        yield
    except (CheckpointError, OSError):
        raise
    except Exception as error:  # damage can show anywhere, as anything
        what = f"{type(error).__name__}: {error}"[:150]
        raise CheckpointError(
            f"{path}: damaged, or not a checkpoint ({what}). Copy or save it again."
        ) from error


class MappedFile:
    """A file whose bytes are read from the disk when they are used."""

    def __init__(self, path: Path) -> None:
        self.path, self.size = path, path.stat().st_size

    @cached_property
    def bytes(self) -> memoryview:
        if not self.size:  # which cannot be mapped
            return memoryview(b"")
        with open(self.path, "rb") as file:
            return memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))

    @cached_property
    def storage(self) -> torch.UntypedStorage:
        import torch

        return torch.UntypedStorage.from_file(str(self.path), False, self.size)


@dataclass(eq=False)
class Storage:
    """The block of numbers under one or more tensors: `nbytes` bytes from `start` of `file`.

    `crc` is the checksum that was written with them, if one was.
    """

    dtype: str
    nbytes: int
    file: MappedFile | None
    start: int
    device: str = "cpu"  # when it was saved
    crc: int | None = None
    key: str = ""  # of a tensor in it

    def __post_init__(self) -> None:
        if not isinstance(self.device, str):
            raise ValueError(f"a device {self.device!r}")

    @cached_property
    def memory(self) -> torch.UntypedStorage:
        """The numbers, mapped from the file."""
        import torch

        if not self.nbytes:
            return torch.UntypedStorage(0)
        part = self.file.storage[self.start : self.start + self.nbytes]
        # Old formats do not align numbers; computing on such memory is undefined.
        return part.clone() if self.start % 16 else part

    def is_intact(self) -> bool:
        return zlib.crc32(self.file.bytes[self.start : self.start + self.nbytes]) == self.crc


@dataclass(eq=False)
class SavedTensor:
    """A tensor in a file; `stride` and `offset` count elements, as in ``torch.as_strided``."""

    dtype: str
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    storage: Storage = field(repr=False)

    def __post_init__(self) -> None:
        if not all(type(n) is int and n >= 0 for n in (*self.shape, *self.stride, self.offset)):
            raise ValueError(f"a tensor of shape {self.shape}, stride {self.stride}")
        if self.dtype not in SIZES:
            raise ValueError(f"the unknown dtype {self.dtype}")
        last = sum((n - 1) * step for n, step in zip(self.shape, self.stride, strict=True))
        needs = (self.offset + last + 1) * SIZES[self.dtype] if self.numel else 0
        if needs > self.storage.nbytes:  # what lies behind it would be read
            raise ValueError(f"a tensor that needs {needs} bytes of {self.storage.nbytes}")

    @property
    def numel(self) -> int:
        return prod(self.shape)

    @property
    def nbytes(self) -> int:
        return self.numel * SIZES[self.dtype]

    @property
    def place(self) -> tuple:
        """Equal for tensors that are one: they show the same numbers in the same way."""
        return id(self.storage), self.offset, self.shape, self.stride, self.dtype

    def load(self) -> torch.Tensor:
        """The tensor itself, on the CPU, its numbers mapped from the file."""
        import torch

        empty = torch.empty(0, dtype=getattr(torch, self.dtype))
        return empty.set_(self.storage.memory, self.offset, self.shape, self.stride)


@dataclass(eq=False)
class LiveTensor(SavedTensor):
    """A tensor that is in memory, seen as one in a file."""

    tensor: torch.Tensor = field(repr=False, kw_only=True)

    def load(self) -> torch.Tensor:
        return self.tensor


def live_tensors(state: Mapping[str, torch.Tensor]) -> dict[str, LiveTensor]:
    """The tensors of a state dict in memory; what shares a storage still does."""
    storages: dict[int, Storage] = {}
    found = {}
    for key, tensor in state.items():
        dtype, memory = str(tensor.dtype).removeprefix("torch."), tensor.untyped_storage()
        storage = Storage(dtype, memory.nbytes(), None, 0, str(tensor.device))
        storage = storages.setdefault(memory.data_ptr() or id(tensor), storage)
        found[key] = LiveTensor(
            dtype, tuple(tensor.shape), tensor.stride(), tensor.storage_offset(), storage,
            tensor=tensor,
        )  # fmt: skip
    return found


def contiguous(shape: tuple[int, ...]) -> tuple[int, ...]:
    """The strides of a tensor that lies in order.

    >>> contiguous((2, 3, 4))
    (12, 4, 1)
    """
    return tuple(prod(shape[i + 1 :]) for i in range(len(shape)))


def verify(storages: Iterable[Storage]) -> int:
    """Compare numbers with their checksums, which ``torch.load`` never does; how many have one.

    Raises
    ------
    CheckpointError
        If some are not what was written.
    """
    checked = [storage for storage in storages if storage.crc is not None]
    with ThreadPoolExecutor(os.cpu_count()) as threads:  # crc32 lets other threads run
        intact = list(threads.map(Storage.is_intact, checked))
    damaged = [s for s, good in zip(checked, intact, strict=True) if not good]
    if damaged:
        raise damage(damaged)
    return len(checked)


def damage(storages: list[Storage]) -> CheckpointError:
    """What to say of storages whose numbers do not have their checksum."""
    more = f" and {len(storages) - 1} more" if len(storages) > 1 else ""
    return CheckpointError(
        f"{storages[0].file.path}: the numbers of {storages[0].key!r}{more} are not those that "
        "were saved, for their checksum differs. Copy the file anew, or take an older one."
    )
