"""NCCL's groups, whose messages gloo carries; and what `nn.DataParallel` asks C++ for."""

import functools
import inspect
from typing import Any

import torch
from torch.nn.parallel._functions import Broadcast

from torchclinic.simulated_gpus.placing import ANYWHERE, device_at, gpu_of, put, storage_of

only_cuda: set[str] = set()  # names of the groups without a backend for the CPU
bound_to: dict[str, list[int]] = {}  # each group's `device_id`


def check(args: Any, tensors: list) -> None:
    """Refuse a CPU tensor where no backend of the group could send it."""
    if not only_cuda or all(gpu_of(tensor) is not None for tensor in tensors):
        return
    from torch._C._distributed_c10d import ProcessGroup

    scripted = [arg for arg in args if isinstance(arg, torch.ScriptObject)]
    groups = [ProcessGroup.unbox(arg) for arg in scripted if "ProcessGroup" in str(arg._type())]
    if any(group.group_name in only_cuda for group in groups):
        raise RuntimeError("No backend type associated with device type cpu")


def simulate_nccl() -> None:
    import torch.distributed as dist

    if not dist.is_available():
        return
    from torch.distributed import distributed_c10d as c10d

    make = c10d._new_process_group_helper
    parameters = inspect.signature(make)

    @functools.wraps(make)
    def with_gloo(*args, **kwargs):
        given = parameters.bind(*args, **kwargs)
        backend = str(given.arguments.get("backend") or "undefined")
        config = c10d.BackendConfig(c10d.Backend(backend))
        devices = config.get_device_backend_map()
        if "nccl" not in devices.values():
            return make(*args, **kwargs)
        bound = given.arguments.get("device_id")
        given.arguments |= {"backend": "cpu:gloo,cuda:gloo", "device_id": None}
        given.arguments.pop("backend_options", None)
        given.arguments.pop("pg_options", None)
        made = make(*given.args, **given.kwargs)
        group = made[0]
        if bound:  # not as an attribute of the group, which PyTorch would then split as NCCL can
            bound_to[group.group_name] = [bound.index]
        if group in c10d._world.pg_map:
            c10d._world.pg_map[group] = (backend, c10d._world.pg_map[group][1])
            c10d._world.pg_backend_config[group] = str(config)
            if "cpu" not in devices:
                only_cuda.add(group.group_name)
        return made

    c10d._new_process_group_helper = with_gloo
    c10d.barrier = dist.barrier = with_its_device(dist.barrier)
    c10d.is_nccl_available = dist.is_nccl_available = lambda: True
    c10d._get_object_coll_device = on_gpu_if_only_there(c10d._get_object_coll_device, "cuda")
    c10d._get_pg_default_device = on_gpu_if_only_there(
        c10d._get_pg_default_device, torch.device("cuda")
    )


def with_its_device(barrier: Any) -> Any:
    """`barrier` asks which device it should use, unless the group is bound to one."""

    @functools.wraps(barrier)
    def on_bound(group=None, async_op=False, device_ids=None, **kwargs):
        whole = group or torch.distributed.distributed_c10d._get_default_group()
        name = getattr(whole, "group_name", None)
        return barrier(group, async_op, device_ids or bound_to.get(name), **kwargs)

    return on_bound


def on_gpu_if_only_there(choose: Any, gpu: Any) -> Any:
    """Gloo could send from the CPU, too, where NCCL has no choice."""

    def chosen(group=None):
        whole = group or torch.distributed.distributed_c10d._get_default_group()
        return gpu if whole.group_name in only_cuda else choose(group)

    return chosen


def simulate_data_parallel() -> None:
    c = torch._C

    def broadcast(tensor, devices):
        return [tensor.to(device_at(index)) for index in devices]

    def scatter(tensor, devices, sizes=None, dim=0, streams=None):
        parts = tensor.split(sizes, dim) if sizes else tensor.chunk(len(devices), dim)
        pairs = zip(parts, devices, strict=False)
        return [part.contiguous().to(device_at(index)) for part, index in pairs]

    c._broadcast = broadcast
    c._broadcast_coalesced = lambda tensors, devices, size: [
        [tensor.to(device_at(index)) for tensor in tensors] for index in devices
    ]
    c._scatter = scatter

    def gather(tensors, dim, index):
        if not all(tensor.is_cuda for tensor in tensors):
            raise RuntimeError("Expected all input tensors to be CUDA tensors")
        shape, sizes = list(tensors[0].shape), [tensor.shape[dim] for tensor in tensors]
        shape[dim] = sum(sizes)
        there = "cuda" if index is None else device_at(index)
        whole = torch.empty(shape, dtype=tensors[0].dtype, device=there)
        # Not torch.cat, which autocast changes.
        for part, tensor in zip(whole.split(sizes, dim), tensors, strict=True):
            part.copy_(tensor)
        return whole

    c._gather = gather
    broadcast_backward = Broadcast.backward

    def backward(ctx, *grads):  # the zeros for what had no gradient were made inside C++
        for i, grad in enumerate(grads):
            if gpu_of(grad) == ANYWHERE:
                put(storage_of(grad), ctx.target_gpus[i // ctx.num_inputs])
        return broadcast_backward(ctx, *grads)

    Broadcast.backward = staticmethod(backward)
    torch.cuda.nccl.is_available = lambda tensors: False
    group = c._group_tensors_by_device_and_dtype
    c._group_tensors_by_device_and_dtype = functools.partial(by_device, group)


def by_device(group: Any, lists: list, with_indices: bool = False) -> dict:
    """Group as `group` does, each simulated device for itself."""
    devices = [tensor.device for tensor in lists[0]]
    for tensors in lists[1:]:
        for device, other in zip(devices, tensors, strict=False):
            if other is not None and other.device != device and (other.is_cuda or other.dim()):
                raise RuntimeError(
                    "Tensors of the same index must be on the same device and the same dtype "
                    "except `step` tensors that can be on CPU and float32/64 notwithstanding"
                )
    groups = {}
    for device in dict.fromkeys(devices):
        chosen = [i for i, other in enumerate(devices) if other == device]
        parts = [[one[i] for i in chosen] if one else [] for one in lists]
        for (_, dtype), (tensors, indices) in group(parts, with_indices).items():
            groups[device, dtype] = (tensors, [chosen[i] for i in indices])
    return groups
