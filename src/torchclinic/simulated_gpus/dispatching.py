"""Each operation runs on the CPU, and its result is where its inputs are, or PyTorch's error."""

import re
import threading
from functools import cache
from pathlib import Path
from typing import Any

import torch
import torchgen
from torch._ops import HigherOrderOperator
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from torchclinic.simulated_gpus import parallel
from torchclinic.simulated_gpus.placing import (
    ANYWHERE,
    GPUS,
    device_at,
    generators,
    gpu_in,
    gpu_of,
    here,
    put,
    real_device,
    storage_of,
    storages_of,
)

COPIES = {"copy_", "_to_copy", "_copy_from", "set_", "_foreach_copy_", "copy"}
INDEXING = {"index", "index_put", "index_put_", "_index_put_impl_", "_unsafe_index"}
INDEXING |= {"_unsafe_index_put"}
MAY_MIX = {"index_fill_"}  # the CPU's way of x[indices] = number
MAY_MIX |= {"_pack_padded_sequence", "_pack_padded_sequence_backward"}
CPU = torch.device("cpu")
CUDA, COMPOSITE = torch._C.DispatchKey.CUDA, torch._C.DispatchKey.CompositeExplicitAutograd
NONE = torch._C._disabled_torch_dispatch_impl


class Places(TorchDispatchMode):
    """Every operation of the process passes here."""

    supports_higher_order_operators = True

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if is_fake():  # FakeTensorMode knows devices itself
            return func(*args, **(kwargs or {}))
        if any(kind.__torch_dispatch__ is not NONE for kind in types):
            return NotImplemented  # what a DTensor does with its parts comes here again
        if isinstance(func, HigherOrderOperator):
            kernels = func.py_kernels
            with self:
                return (kernels.get(CUDA) or kernels[COMPOSITE])(*args, **(kwargs or {}))
        if is_composite(func):  # inference mode hands it over undivided
            with self:
                return func.decompose(*args, **(kwargs or {}))
        kwargs = dict(kwargs or {})
        tensors = [t for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)]
        device = kwargs.get("device")
        if any(real_device(t).type != "cpu" for t in tensors) and device is None:
            return func(*args, **kwargs)
        if device is not None and device.type not in ("cpu", "cuda"):
            return func(*args, **kwargs)
        if func.namespace == "c10d":
            parallel.check(args, tensors)
        refuse_other_places(func, args)
        gpu = place(func, args, tensors, device)
        if device is not None:
            kwargs["device"] = CPU
        if kwargs.get("pin_memory"):
            kwargs["pin_memory"] = False
        try:
            results = drawn(func, args, kwargs, gpu) if is_random(func) else func(*args, **kwargs)
        except RuntimeError as error:
            size = re.search(r"CPUAllocator: can't allocate memory.* (\d+) bytes", str(error))
            if size and gpu not in (None, ANYWHERE):
                GPUS[gpu].hold(0, int(size[1]), gpu)
            raise
        if gpu is not None:
            label(func, results, gpu)
        return results


def place(func: Any, args: Any, tensors: list, device: torch.device | None) -> int | None:
    """Where the results of `func` are; every tensor that may join is there afterwards, too."""
    asked = getattr(here, "asked", ANYWHERE)
    if device is not None and device.type == "cuda":
        return gpu_in(device)
    if not tensors or (device is not None and asked != ANYWHERE):
        return asked
    name = func._opname
    if device is not None or name in COPIES:  # C++ sees a CPU tensor and asks for the same device
        join(tensors, gpu_of(tensors[0]) if gpu_of(tensors[0]) != ANYWHERE else gpu_of(tensors[-1]))
        return gpu_of(tensors[0])
    known = [(t, gpu_of(t)) for t in tensors]
    known = [(t, gpu) for t, gpu in known if gpu != ANYWHERE]
    if not known:
        return ANYWHERE
    if name in INDEXING:
        return indexed(args, tensors, known)
    own = args[0] if func._schema.is_mutable and torch.Tag.pointwise in func.tags else None
    meeting = [(t, gpu) for t, gpu in known if t.dim() or gpu is not None or t is own] or known
    places = {gpu for _, gpu in meeting}
    if name.startswith("_foreach"):
        for row in zip(*(arg for arg in args if isinstance(arg, (list, tuple))), strict=False):
            inputs = [t for t in row if isinstance(t, torch.Tensor)]
            place(torch.ops.aten.add.Tensor, row, inputs, None)
    elif len(places) > 1 and func.namespace == "aten" and name not in MAY_MIX:
        raise mismatch(func, args, meeting)
    join(tensors, meeting[0][1])
    return meeting[0][1]


def refuse_other_places(func: Any, args: Any) -> None:
    """What PyTorch refuses before any kernel runs."""
    if func._opname == "_pack_padded_sequence" and (gpu := gpu_of(args[1])) is not None:
        raise RuntimeError(
            "'lengths' argument should be a 1D CPU int64 tensor, but got "
            f"{args[1].dim()}D {device_at(gpu)} {args[1].type().split('.')[-1][:-6]} tensor"
        )
    if func._opname == "set_" and isinstance(source := args[1], torch.UntypedStorage):
        own, other = gpu_of(args[0]), getattr(source, "simulated_gpu", None)
        if own != other and ANYWHERE not in (own, other):
            raise RuntimeError(
                f'Attempted to set the storage of a tensor on device "{device_at(own)}" to a '
                f'storage on different device "{device_at(other)}".  This is no longer allowed; '
                "the devices must match."
            )


def join(tensors: list, gpu: int | None) -> None:
    for tensor in tensors:
        if gpu_of(tensor) == ANYWHERE:
            put(storage_of(tensor), gpu)


def indexed(args: Any, tensors: list, known: list) -> int | None:
    own = gpu_of(args[0])
    own = known[0][1] if own == ANYWHERE else own
    for index in tree_leaves(args[1]):
        if isinstance(index, torch.Tensor) and gpu_of(index) not in (None, own, ANYWHERE):
            raise RuntimeError(
                "indices should be either on cpu or on the same device as the indexed tensor "
                f"({device_at(own)})"
            )
    for value in args[2:3]:
        if isinstance(value, torch.Tensor) and value.dim() and gpu_of(value) not in (own, ANYWHERE):
            raise two_devices([(args[0], own), (value, gpu_of(value))])
    join(tensors, own)
    return own


def label(func: Any, results: Any, gpu: int) -> None:
    each = results if isinstance(results, tuple) else (results,)
    for result, is_new in zip(each, new_results(func), strict=False):
        for tensor in tree_leaves(result) if is_new else ():
            if isinstance(tensor, torch.Tensor) and real_device(tensor).type == "cpu":
                for storage in storages_of(tensor):
                    put(storage, gpu)


def is_fake() -> bool:
    return torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FAKE) is not None


@cache
def is_composite(func: Any) -> bool:
    key = "CompositeImplicitAutograd"
    return torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), key)


@cache
def new_results(func: Any) -> list[bool]:
    if func._opname == "_pack_padded_sequence":  # whose batch sizes are on the CPU
        return [True, False]
    return [result.alias_info is None for result in func._schema.returns]


# --- random numbers -----------------------------------------------------------------------------


@cache
def is_random(func: Any) -> bool:
    return torch.Tag.nondeterministic_seeded in func.tags


@cache
def takes_generator(func: Any) -> bool:
    return any(argument.name == "generator" for argument in func._schema.arguments)


def drawn(func: Any, args: Any, kwargs: dict, gpu: int | None) -> Any:
    """What a GPU draws comes from its own generator, and leaves the CPU's alone."""
    given = kwargs.get("generator")
    generator = generators.get(given._cdata, given) if given is not None else None
    if generator is not None and generator.device.type != device_at(gpu).type:
        raise RuntimeError(
            f"Expected a '{device_at(gpu).type}' device type for generator but found "
            f"'{generator.device.type}'"
        )
    if gpu is None or gpu == ANYWHERE:
        return func(*args, **kwargs)
    generator = generator or GPUS[gpu].generator
    seed = hash(tuple(generator.seed_and_offset))
    generator.seed_and_offset[1] += 4
    if takes_generator(func):
        return func(*args, **kwargs | {"generator": torch._C.Generator().manual_seed(seed)})
    with one_at_a_time:
        before = torch.default_generator.get_state()
        torch.default_generator.manual_seed(seed)
        try:
            return func(*args, **kwargs)
        finally:
            torch.default_generator.set_state(before)


one_at_a_time = threading.Lock()


# --- PyTorch's own words ------------------------------------------------------------------------


def mismatch(func: Any, args: Any, meeting: list) -> RuntimeError:
    name = func._opname
    if name in ("convolution", "_convolution", "mkldnn_convolution", "convolution_overrideable"):
        (x, x_gpu), (w, w_gpu), *bias = meeting
        kind = "weight"
        if x_gpu == w_gpu:
            (w, w_gpu), kind = bias[0], "bias"
        if None in (x_gpu, w_gpu):
            extra = f" or input should be a MKLDNN tensor and {kind} is a dense tensor"
            return RuntimeError(
                f"Input type ({x.type()}) and {kind} type ({w.type()}) should be the same"
                f"{extra if x_gpu is None else ''}"
            )
        return RuntimeError(
            f"Expected tensor for argument #1 'input' to have the same device as tensor for "
            f"argument #2 '{kind}'; but device {x_gpu} does not equal {w_gpu} (while checking "
            "arguments for cudnn_convolution)"
        )
    if name in ("masked_fill", "masked_fill_"):
        (_, own), (_, mask) = meeting[:2]
        return RuntimeError(
            "expected self and mask to be on the same device, but got mask on "
            f"{device_at(mask)} and self on {device_at(own)}"
        )
    if by_iterator(func):
        return two_devices(meeting)
    if name == "mkldnn_rnn_layer":
        (_, x), *others = meeting
        odd, where = next((t, gpu) for t, gpu in others if gpu != x)
        kind = "hidden" if any(odd is state for state in args[5:7]) else "parameter"
        return RuntimeError(
            f"Input and {kind} tensors are not at the same device, found input tensor at "
            f"{device_at(x)} and {kind} tensor at {device_at(where)}"
        )
    first = device_at(meeting[0][1])
    odd, there = next((t, device_at(gpu)) for t, gpu in meeting if device_at(gpu) != first)
    argument = next(
        (a.name for a, value in zip(func._schema.arguments, args, strict=False) if value is odd),
        "tensors",
    )
    if name == "embedding":  # which CUDA does by another operation
        name, argument = "index_select", {"indices": "index"}.get(argument, "self")
    structured = name.endswith("_forward") or "structured" in declaration(name)
    return RuntimeError(
        f"Expected all tensors to be on the same device, but got {argument} is on {there}, "
        f"different from other tensors on {first} (when checking argument in method "
        f"wrapper_CUDA_{'' if structured else '_'}{name})"
    )


@cache
def declaration(name: str) -> str:
    """How PyTorch declares the operation, from which its checks of devices are generated."""
    path = Path(torchgen.__file__).parent / "packaged/ATen/native/native_functions.yaml"
    blocks = path.read_text().split("- func: ")
    return "".join(block for block in blocks if re.match(rf"{name}[.(]", block))


def by_iterator(func: Any) -> bool:
    if torch.Tag.pointwise in func.tags or torch.Tag.reduction in func.tags:
        return True
    return func._opname == "allclose" or "device_check: NoCheck" in declaration(func._opname)


def two_devices(meeting: list) -> RuntimeError:
    gpu = next(device_at(gpu) for _, gpu in meeting if gpu is not None)
    other = next(device_at(other) for _, other in meeting if device_at(other) != gpu)
    return RuntimeError(
        "Expected all tensors to be on the same device, but found at least two devices, "
        f"{gpu} and {other}!"
    )
