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


def expanded_buffers_cloned(part: Any) -> Any:
    """A model whose buffers torch can write to: not to one of `expand`, which is cloned."""
    for module in part.modules() if isinstance(part, nn.Module) else ():
        for name, buffer in module._buffers.items():
            is_plain = buffer is not None and not nn.parameter.is_lazy(buffer)
            if is_plain and buffer.layout == torch.strided and 0 in buffer.stride():
                module._buffers[name] = buffer.clone(memory_format=torch.contiguous_format)
    return part


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
