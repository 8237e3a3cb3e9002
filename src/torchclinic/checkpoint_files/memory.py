"""Which tensors lie in one memory: as views, or by way of NumPy, DLPack or two Parameters."""

from collections.abc import Iterator, Mapping
from contextlib import suppress
from typing import Any, TypeGuard

import torch
from torch import Tensor, nn

from torchclinic.checkpoint_files.pickles import storage_id


def _storage(tensor: Tensor) -> tuple[int, int]:
    """From where its numbers are counted, and where in that its storage begins.

    Two storages can be one memory, of which only the addresses tell.
    """
    with suppress(RuntimeError):  # a subclass may have none of its own
        address = tensor.untyped_storage().data_ptr()
        if address and tensor.device.type in ("cpu", "cuda"):
            return 0, address
    return storage_id(tensor), 0


def begin(tensor: Tensor) -> tuple[int, int]:
    """Where the first of its numbers is; equal for two tensors if it is one number."""
    space, start = _storage(tensor)
    return space, start + int(tensor.storage_offset()) * tensor.itemsize


def _length(tensor: Tensor) -> int:
    """How many bytes there are from its first number to the last."""
    sides = zip(tensor.shape, tensor.stride(), strict=True)
    return tensor.numel() and (1 + sum((n - 1) * step for n, step in sides)) * tensor.itemsize


def is_plain(value: Any) -> TypeGuard[Tensor]:
    """Whether its numbers are in one storage, by strides."""
    is_tensor = isinstance(value, Tensor) and value.layout == torch.strided
    return is_tensor and not nn.parameter.is_lazy(value)


def ties(values: Mapping[str, Any]) -> list[list[str]]:
    """The keys of each tensor; those that show the same numbers in the same way are one."""
    names: dict[object, list[str]] = {}
    for key, value in values.items():
        if isinstance(value, Tensor):
            place: object = id(value)
            if is_plain(value) and value.numel():
                view = value.shape, value.stride(), value.dtype, value.is_conj(), value.is_neg()
                place = begin(value), view
            names.setdefault(place, []).append(key)
    return list(names.values())


def in_memory_of(others: Mapping[str, Tensor], tensors: Mapping[str, Tensor]) -> list[str]:
    """The keys of tensors whose storage has memory of the others' storages."""
    both = [(*_storage(t), t.untyped_storage().nbytes(), "") for t in others.values()]
    both += [(*_storage(t), t.untyped_storage().nbytes(), key) for key, t in tensors.items()]
    return [key for group in _groups(both) if "" in group for key in group if key]


def _groups(stretches: list[tuple[int, int, int, str]]) -> Iterator[list[str]]:
    """The names of stretches of memory that overlap; each is given with its begin and length."""
    group, end = [], (0, 0)
    for space, start, length, name in sorted(stretches):
        if group and (space, start) >= end:
            yield group
            group = []
        end = max(end, (space, start + length))
        group.append(name)
    yield group


def clash(tensors: Mapping[str, Tensor], values: Mapping[str, Tensor]) -> list[str]:
    """The keys of tensors in one memory that cannot all have their values; none, if all can.

    The values are copied, as they would be, into memory that is laid out in the same way.
    """
    places = [(*begin(tensor), _length(tensor), key) for key, tensor in tensors.items()]
    for keys in _groups(places):
        lone = len(keys) == 1 and not torch._debug_has_internal_overlap(tensors[keys[0]])
        if not keys or lone:
            continue
        found = {key: (start, length) for _, start, length, key in places if key in keys}
        first = min(start for start, _ in found.values()) // 16 * 16
        memory = torch.empty(max(map(sum, found.values())) - first, dtype=torch.uint8)
        copies = {}
        with suppress(RuntimeError):  # no numbers can be copied into one: that is told later
            for key, (start, _) in found.items():
                mine = tensors[key]
                offset = (start - first) // mine.itemsize
                copies[key] = torch.empty(0, dtype=mine.dtype).set_(
                    memory.untyped_storage(), offset, mine.shape, mine.stride()
                )
                copies[key].copy_(values[key].detach().reshape(mine.shape))
            for key, copy in copies.items():
                wanted = torch.empty(copy.shape, dtype=copy.dtype)
                wanted.copy_(values[key].detach().reshape(copy.shape))
                if not torch.equal(bits(copy), bits(wanted)):
                    return keys
    return []


def bits(value: Tensor) -> Tensor:
    """Its bytes, in which also two NaN can be equal."""
    return value.cpu().resolve_conj().resolve_neg().flatten().unsqueeze(-1).view(torch.uint8)
