"""Ranks that must send from a GPU, on every machine: gloo also sends what NCCL does not."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from unittest import mock

import torch
import torch.distributed as dist
from torch.overrides import TorchFunctionMode

from torchexercises import Wrong, tensors_in

GPU = torch.device("cuda", 0)
THERE = "is_on_the_pretended_gpu"  # an attribute of tensors, which in truth are on the CPU


@contextmanager
def as_with_nccl() -> Iterator[torch.device]:
    """The rank's GPU; `Wrong` is raised for a collective of a tensor that is not there."""
    with ExitStack() as patches:
        for name in ("all_reduce", "reduce", "broadcast", "all_gather", "gather", "send"):
            patches.enter_context(mock.patch.object(dist, name, _from_gpu(getattr(dist, name))))
        with _Gpu():
            yield GPU


def _from_gpu(collective: Callable) -> Callable:
    def checked(*args, **kwargs):
        if not all(hasattr(tensor, THERE) for tensor in tensors_in([*args, *kwargs.values()])):
            name = collective.__name__
            raise Wrong(f"dist.{name} gets a tensor on the CPU, and NCCL sends from GPUs alone")
        return collective(*args, **kwargs)

    return checked


class _Gpu(TorchFunctionMode):
    """Notes which tensors are made on the GPU, or computed of such."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        given = [*args, *kwargs.values()]
        there = any(hasattr(tensor, THERE) for tensor in tensors_in(given))
        if there and getattr(func, "__self__", None) is torch.Tensor.device:
            return GPU
        asked = func is torch.Tensor.cuda or any(map(_is_gpu, given))
        if func is torch.Tensor.cuda:
            func, args = torch.clone, args[:1]
        elif asked:
            args = ["cpu" if _is_gpu(value) else value for value in args]
            kwargs = {key: "cpu" if _is_gpu(value) else value for key, value in kwargs.items()}
        found = func(*args, **kwargs)
        if asked or (there and func is not torch.Tensor.cpu):
            for tensor in tensors_in(found):
                setattr(tensor, THERE, True)
        return found


def _is_gpu(value: object) -> bool:
    return isinstance(value, (str, torch.device)) and str(value).startswith("cuda")
