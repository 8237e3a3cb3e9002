"""What Python asks tensors, storages and factories about devices, answered from where they are."""

import functools
import threading
from contextlib import contextmanager
from multiprocessing.reduction import ForkingPickler
from typing import Any

import torch
from torch.multiprocessing import reductions
from torch.overrides import (
    _get_current_function_mode_stack,
    handle_torch_function,
    has_torch_function_unary,
)
from torch.utils._device import DeviceContext, _device_constructors

from torchclinic.simulated_gpus.dispatching import CPU, Places, is_fake
from torchclinic.simulated_gpus.placing import (
    ANYWHERE,
    GPUS,
    asking,
    checked,
    current,
    device_at,
    device_of,
    gpu_in,
    gpu_of,
    put,
    real_device,
    storage_of,
)

Tensor, UntypedStorage = torch.Tensor, torch.UntypedStorage
MODE = Places()  # which only C++ would hold otherwise
REAL = {name: getattr(Tensor, name) for name in ("to", "numpy", "type", "is_pinned")}


def overridable(method: Any) -> Any:
    """As PyTorch's own methods, hand it to subclasses and modes first: they would call it again."""

    @functools.wraps(method)
    def call(self, *args, **kwargs):
        if has_torch_function_unary(self):
            return handle_torch_function(call, (self,), self, *args, **kwargs)
        return method(self, *args, **kwargs)

    return call


# --- copies -------------------------------------------------------------------------------------


class ToCopy(torch.autograd.Function):
    """A copy whose gradient goes back to where it came from."""

    @staticmethod
    def forward(ctx, tensor, gpu, options):
        ctx.back = gpu_of(tensor), {"dtype": tensor.dtype}
        return copied(tensor, gpu, options)

    @staticmethod
    def backward(ctx, grad):
        gpu, options = ctx.back
        return copied(grad, gpu, options), None, None


def copied(tensor: Tensor, gpu: int | None, options: dict) -> Tensor:
    with asking(gpu):
        return torch.ops.aten._to_copy(tensor, device=CPU, **options)


def moved(tensor: Tensor, gpu: int | None, **options: Any) -> Tensor:
    if tensor.requires_grad and torch.is_grad_enabled():
        return ToCopy.apply(tensor, gpu, options)
    return copied(tensor, gpu, options)


def to(self, *args, **kwargs):
    if is_fake():
        return REAL["to"](self, *args, **kwargs)
    given, copy = (args, dict(kwargs)), kwargs.pop("copy", False)
    other = args[0] if args else kwargs.pop("other", None)
    if isinstance(other, Tensor):
        args = (other.device, other.dtype, *args[1:])
    device, dtype, non_blocking, layout = torch._C._nn._parse_to(*args, **kwargs)
    if device is not None and device.type == "cuda" and real_device(self).type == "meta":
        return REAL["to"](self, "cpu")  # refused in the same words
    whole = device is None and hasattr(type(self), "__tensor_flatten__")
    known = device is None or device.type in ("cpu", "cuda")
    if whole or not known or real_device(self).type != "cpu":
        return REAL["to"](self, *given[0], **given[1])
    gpu = gpu_of(self) if device is None else gpu_in(device)
    options = {"dtype": dtype or self.dtype}
    options |= {} if layout is None else {"memory_format": layout}
    same_layout = layout in (None, torch.preserve_format) or self.is_contiguous(
        memory_format=layout
    )
    if not copy and gpu == gpu_of(self) and options["dtype"] == self.dtype and same_layout:
        return self
    result = moved(self, gpu, **options)
    if non_blocking and gpu is None:
        storage_of(result).simulated_pin = True
    return result


def cuda(self, device=None, non_blocking=False, memory_format=torch.preserve_format):
    index = torch.device("cuda", current()) if device is None else device
    index = torch.device("cuda", index) if isinstance(index, int) else torch.device(index)
    if index.type != "cuda":
        raise RuntimeError(f"Invalid device, must be cuda device, but got {index}")
    return self.to(index, memory_format=memory_format)


def cpu(self, memory_format=torch.preserve_format):
    return self.to("cpu", memory_format=memory_format)


def copy_(self, source, non_blocking=False):
    if gpu_of(self) != gpu_of(source) and not is_fake() and real_device(source).type == "cpu":
        source = moved(source, gpu_of(self))
    return torch.ops.aten.copy_(self, source, non_blocking)


# --- questions ----------------------------------------------------------------------------------


def numpy(self, *, force=False):
    if self.is_cuda and not force:
        raise TypeError(
            f"can't convert {self.device} device type tensor to numpy. Use Tensor.cpu() to copy "
            "the tensor to host memory first."
        )
    return REAL["numpy"](self, force=force)


def type_(self, dtype=None, non_blocking=False, **kwargs):
    if dtype is None:
        name = REAL["type"](self)
        return name.replace("torch.", "torch.cuda.") if self.is_cuda else name
    if isinstance(dtype, torch.dtype):
        return self.to(dtype)
    name = dtype if isinstance(dtype, str) else f"{dtype.__module__}.{dtype.__name__}"
    there = self.cuda() if name.startswith("torch.cuda.") else self.cpu()
    return REAL["type"](there, name.replace(".cuda", ""), non_blocking, **kwargs)


def pin_memory(self, device=None):
    if self.is_cuda:
        raise RuntimeError(f"cannot pin '{self.type()}' only dense CPU tensors can be pinned")
    pinned = self if self.is_pinned() else self.clone()
    storage_of(pinned).simulated_pin = True
    return pinned


def is_pinned(self, device=None):
    return getattr(storage_of(self), "simulated_pin", False)


def set_grad(self, grad):
    if grad is not None and grad.device != self.device:
        kinds = [f"with device type '{t.device.type}'" for t in (grad, self)]
        if grad.is_cuda and self.is_cuda:
            kinds = [f"located on device with index '{t.device.index}'" for t in (grad, self)]
        raise RuntimeError(
            f"attempting to assign a gradient {kinds[0]} to a tensor {kinds[1]}. Please ensure "
            "that the gradient and the tensor are on the same device"
        )
    torch._C.TensorBase.grad.__set__(self, grad)  # pyrefly: ignore


real_make_grads = torch.autograd._make_grads


def make_grads(outputs, grads, *args, **kwargs):
    for i, (output, grad) in enumerate(zip(outputs, grads, strict=False)):
        both = isinstance(grad, Tensor) and isinstance(output, Tensor)  # not a GradientEdge
        if both and grad.device != output.device:
            raise RuntimeError(
                f"invalid gradient at index {i} - expected device {output.device} but got "
                f"{grad.device}"
            )
    return real_make_grads(outputs, grads, *args, **kwargs)


# --- factories ----------------------------------------------------------------------------------


def placed(make: Any, tensor_method: bool = False) -> Any:
    """The factory `make`, whose result is on the device that is asked for."""

    @functools.wraps(make)
    def make_there(*args, **kwargs):
        device = kwargs.get("device")
        source = args[0] if args and isinstance(args[0], Tensor) else None
        if is_fake() or (device is None and (tensor_method or source is not None)):
            return make(*args, **kwargs)
        device = default_device() if device is None else device
        if not isinstance(device, int) and torch.device(device).type not in ("cpu", "cuda"):
            return make(*args, **kwargs)
        gpu = gpu_in(device)
        pinned = kwargs.pop("pin_memory", False)
        with asking(gpu):
            result = make(*args, **{**kwargs, "device": "cpu"})
        if pinned:
            return result.pin_memory()
        if gpu_of(result) == gpu:
            return result
        if source is None:  # C++ made it where no mode looks
            put(storage_of(result), gpu)
            return result
        needs_grad = kwargs.get("requires_grad", False)
        return moved(result.detach(), gpu).requires_grad_(needs_grad)

    return make_there


def default_device() -> torch.device:
    """What `with torch.device(...)` and `set_default_device` say."""
    modes = reversed(_get_current_function_mode_stack())
    return next((m.device for m in modes if isinstance(m, DeviceContext)), torch.device("cpu"))


def new_tensor(self, data, *, dtype=None, device=None, requires_grad=False):
    dtype, device = dtype or self.dtype, device or self.device
    return torch.tensor(data, dtype=dtype, device=device, requires_grad=requires_grad)


# --- storages -----------------------------------------------------------------------------------

real_storage_device: Any = UntypedStorage.__dict__.get("device") or torch._C.StorageBase.device
real_new_storage, real_resize = UntypedStorage.__new__, UntypedStorage.resize_


def storage_device(self):
    gpu = getattr(self, "simulated_gpu", None)
    return real_storage_device.__get__(self) if gpu is None else device_at(gpu)


def new_storage(cls, *args, device=None, **kwargs):
    device = "cpu" if device is None else device
    if torch.device(device).type not in ("cpu", "cuda"):
        return real_new_storage(cls, *args, device=device, **kwargs)
    storage = real_new_storage(cls, *args, **kwargs)
    put(storage, gpu_in(device))
    return storage


def resize(self, size):
    gpu = getattr(self, "simulated_gpu", None)
    if gpu not in (None, ANYWHERE):
        GPUS[gpu].hold(self._cdata, size, gpu)
    return real_resize(self, size)


# --- other processes ----------------------------------------------------------------------------


@contextmanager
def without_place(storage):
    gpu = getattr(storage, "simulated_gpu", None)
    storage.simulated_gpu = None
    try:
        yield gpu
    finally:
        storage.simulated_gpu = gpu


def sent(tensor):
    """A tensor on its way to another process, which will see the same memory."""
    with without_place(storage_of(tensor)):
        return reductions.reduce_tensor(tensor)


def sent_storage(storage):
    with without_place(storage) as gpu:
        return received, (gpu, *reductions.reduce_storage(storage))


def received(gpu, rebuild, args):
    put(storage := rebuild(*args), gpu if gpu in (None, ANYWHERE) else checked(gpu))
    return storage


# --- all of them --------------------------------------------------------------------------------


real_make_wrapper, real_start = Tensor._make_wrapper_subclass, threading.Thread._bootstrap_inner


@functools.wraps(real_make_wrapper)
def make_on_cpu(cls, *args, **kwargs):
    """DTensors and fake tensors, which for a GPU C++ would give to a driver."""
    device = kwargs.get("device")
    if device is not None and torch.device(device).type == "cuda":
        kwargs["device"] = CPU
    return real_make_wrapper(cls, *args, **kwargs)


def start_with_mode(self):
    """A mode is each thread's own."""
    with MODE:
        real_start(self)


class Answer(property):
    """A property; torch._dynamo asks each where it is from."""

    __objclass__ = None


def simulate_tensors() -> None:
    Tensor.device = Answer(device_of)
    Tensor.is_cuda = Answer(lambda self: self.device.type == "cuda")
    Tensor.is_cpu = Answer(lambda self: self.device.type == "cpu")
    Tensor.get_device = lambda self: -1 if self.device.index is None else self.device.index
    Tensor.grad = Answer(
        torch._C.TensorBase.grad.__get__, set_grad, lambda self: set_grad(self, None)
    )
    torch.autograd._make_grads = make_grads
    Tensor.record_stream = lambda self, stream: None
    for method in (to, cuda, cpu, copy_, numpy, pin_memory, is_pinned, new_tensor):
        setattr(Tensor, method.__name__, overridable(method))
    Tensor.type = overridable(type_)
    for name in ("new_empty", "new_full", "new_ones", "new_zeros", "new_empty_strided"):
        setattr(Tensor, name, overridable(placed(getattr(Tensor, name), tensor_method=True)))
    for factory in _device_constructors():
        if getattr(torch, factory.__name__, None) is factory:
            setattr(torch, factory.__name__, placed(factory))
    for name in ("empty", "full", "ones", "rand", "randint", "randn", "zeros"):
        setattr(torch, f"{name}_like", placed(getattr(torch, f"{name}_like")))
    UntypedStorage.device = Answer(storage_device)
    UntypedStorage.is_cuda = Answer(lambda self: self.device.type == "cuda")
    UntypedStorage.__new__ = staticmethod(new_storage)
    UntypedStorage.resize_ = resize
    for kind in (Tensor, torch.nn.Parameter):
        ForkingPickler.register(kind, sent)
    ForkingPickler.register(UntypedStorage, sent_storage)
    Tensor._make_wrapper_subclass = staticmethod(make_on_cpu)
    threading.Thread._bootstrap_inner = start_with_mode
    MODE.__enter__()
