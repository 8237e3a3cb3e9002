"""What a rank asks of the others: its collectives, counted by kind and in bytes."""

from collections import Counter
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

# PyTorch's own names, which are private: fully_shard calls the first three, DTensor the others.
_KINDS = {
    "c10d::_allgather_base_": "all-gather",
    "c10d::_reduce_scatter_base_": "reduce-scatter",
    "c10d::allreduce_": "all-reduce",
    "_c10d_functional::all_gather_into_tensor": "all-gather",
    "_c10d_functional::reduce_scatter_tensor": "reduce-scatter",
    "_c10d_functional::all_reduce": "all-reduce",
}


class Traffic(TorchDispatchMode):
    """Inside it, the collectives of this rank are counted: how many, and of how many bytes.

    The bytes are those of the whole: of an all-gather what comes out, of a reduce-scatter what
    goes in. In a ring of N ranks, each sends (N - 1) / N of that, in an all-reduce twice as much.
    It is a dispatch mode as PyTorch's private ``CommDebugMode``, which counts calls only.

    Parameters
    ----------
    mesh : DeviceMesh
        Its dimensions have names.

    Attributes
    ----------
    calls, bytes : Counter
        For each pair of a name of `mesh` and a kind, such as ``("shard", "all-gather")``.

    Raises
    ------
    NotImplementedError
        For a collective of another kind, such as a broadcast: it would be missing in the count.
    KeyError
        For a collective of a group that is not one of `mesh`.
    """

    def __init__(self, mesh: DeviceMesh) -> None:
        super().__init__()
        self.names = {mesh.get_group(name).group_name: name for name in mesh.mesh_dim_names or ()}
        self.calls, self.bytes = Counter(), Counter()

    def __torch_dispatch__(self, func, types, args: tuple[Any, ...] = (), kwargs=None):
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # it comes again, as what each rank computes and sends
        out, name = func(*args, **kwargs or {}), func.name()
        if name in _KINDS:
            boxed = [a for a in args if isinstance(a, torch.ScriptObject)]
            group = dist.ProcessGroup.unbox(boxed[0]).group_name if boxed else args[-1]
            tensors = [a for a in tree_leaves((args, out)) if isinstance(a, torch.Tensor)]
            key = self.names[group], _KINDS[name]
            self.calls[key] += 1
            self.bytes[key] += max(a.numel() * a.element_size() for a in tensors)
        elif "c10d" in func.namespace and not ("wait" in name or "wrap" in name):
            raise NotImplementedError(f"{name} is not counted")
        return out
