"""Which tensors lie in one memory: as views, or by way of NumPy or two Parameters."""

from collections.abc import Mapping
from contextlib import suppress
from typing import Any, TypeGuard

import torch
from torch import Tensor, nn

from torchclinic.checkpoint_files.pickles import storage_id


def memory_of(tensor: Tensor) -> int:
    """Equal for tensors whose storages are one, or begin at one address, as NumPy's may."""
    with suppress(RuntimeError):  # a subclass may have none of its own
        return tensor.untyped_storage().data_ptr() or storage_id(tensor)
    return storage_id(tensor)


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
                view = value.storage_offset(), value.shape, value.stride(), value.dtype
                place = memory_of(value), view
            names.setdefault(place, []).append(key)
    return list(names.values())


def clash(tensors: Mapping[str, Tensor], values: Mapping[str, Tensor]) -> list[str]:
    """The keys of tensors in one memory that cannot all have their values; none, if all can.

    The values are copied, as they would be, into memory that is laid out in the same way.
    """
    homes: dict[int, list[str]] = {}
    for key, tensor in tensors.items():
        homes.setdefault(memory_of(tensor), []).append(key)
    for keys in homes.values():
        if len(keys) == 1 and not torch._debug_has_internal_overlap(tensors[keys[0]]):
            continue
        size = max(tensors[key].untyped_storage().nbytes() for key in keys)
        memory, pairs = torch.empty(size, dtype=torch.uint8).untyped_storage(), []
        with suppress(RuntimeError):  # what cannot be copied is told later
            for mine, value in [(tensors[key], values[key]) for key in keys]:
                wanted = torch.empty(mine.shape, dtype=mine.dtype)
                wanted.copy_(value.detach().reshape(mine.shape))
                place = mine.storage_offset(), mine.shape, mine.stride()
                pairs.append((torch.empty(0, dtype=mine.dtype).set_(memory, *place), wanted))
                pairs[-1][0].copy_(wanted)
            if not all(torch.equal(bits(copy), bits(wanted)) for copy, wanted in pairs):
                return keys
    return []


def bits(value: Tensor) -> Tensor:
    """Its bytes, in which also two NaN can be equal."""
    return value.flatten().unsqueeze(-1).view(torch.uint8)
