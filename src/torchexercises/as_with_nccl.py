"""Ranks that must send from a GPU, on every machine: gloo also sends what NCCL does not."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from unittest import mock

import torch
import torch.distributed as dist

from torchexercises import Wrong, tensors_in
from torchladder.devices import two_gpus


@contextmanager
def as_with_nccl() -> Iterator[torch.device]:
    """The rank's GPU; `Wrong` is raised for a collective of a tensor that is on the CPU."""
    two_gpus()
    with ExitStack() as patches:
        for name in ("all_reduce", "reduce", "broadcast", "all_gather", "gather", "send"):
            patches.enter_context(mock.patch.object(dist, name, _from_gpu(getattr(dist, name))))
        yield torch.device("cuda", dist.get_rank() % 2)


def _from_gpu(collective: Callable) -> Callable:
    def checked(*args, **kwargs):
        if not all(tensor.is_cuda for tensor in tensors_in([*args, *kwargs.values()])):
            name = collective.__name__
            raise Wrong(f"dist.{name} gets a tensor on the CPU, and NCCL sends from GPUs alone")
        return collective(*args, **kwargs)

    return checked
