"""What surrounds a model: its wrappers, and the mode it is in."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DataParallel, DistributedDataParallel


@contextmanager
def evaluation_mode(model: nn.Module) -> Iterator[None]:
    """``model.eval()`` for a while; afterwards every module is in the mode it was in.

    ``model.train()`` would not do to go back: it also wakes layers that were frozen in `eval`.
    """
    modes = {module: module.training for module in model.modules()}
    model.eval()
    try:
        yield
    finally:
        for module, mode in modes.items():
            module.training = mode


def clone_expanded_buffers(part: Any) -> Any:
    """Let torch write to each buffer that a state dict holds: not to one of `expand`. The part."""
    clones: dict[int, torch.Tensor] = {}  # one for a buffer that several modules share
    for module in part.modules() if isinstance(part, nn.Module) else ():
        for name in module._buffers.keys() - module._non_persistent_buffers_set:
            buffer = module._buffers[name]
            if buffer is not None and _is_expanded(buffer):
                if id(buffer) not in clones:
                    clones[id(buffer)] = buffer.clone(memory_format=torch.contiguous_format)
                module._buffers[name] = clones[id(buffer)]
    return part


def _is_expanded(buffer: torch.Tensor) -> bool:
    if nn.parameter.is_lazy(buffer) or buffer.layout != torch.strided:
        return False
    places = zip(buffer.shape, buffer.stride(), strict=True)
    return any(size > 1 and step == 0 for size, step in places)


def unwrapped(part: Any) -> Any:
    """The model inside DataParallel, DDP and ``torch.compile``; any other part as it is."""
    while isinstance(part, nn.Module):
        if isinstance(part, DataParallel | DistributedDataParallel):
            part = part.module
        elif "_orig_mod" in part._modules:
            part = part._orig_mod
        else:
            break
    return part
