"""Where a tensor is: its storage carries the number of a simulated GPU.

PyTorch keeps the Python object of a storage as long as the storage lives, so all views of one
storage, `Parameter`, `detach()` and `.data` share the number. Without one it is on the CPU.
"""

import threading
import weakref
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch

ANYWHERE = -1  # what PyTorch makes inside itself: it joins what it meets
BLOCK = 512  # bytes; CUDA's allocator rounds up to these
KEPT = 2 << 20  # bytes; and asks the driver for these

real_device: Any = torch._C.TensorBase.device.__get__  # pyrefly: ignore
real_storage = torch.Tensor.untyped_storage


@dataclass
class GPU:
    """One simulated GPU: what it is, and which storages lie on it."""

    name: str
    capability: tuple[int, int]
    memory: int
    uuid: str
    fraction: float = 1.0  # of the memory that this process may take
    used: dict[int, int] = field(default_factory=dict)  # bytes by storage
    peak: int = 0
    kept: int = 0  # "reserved": given back by empty_cache() only
    generator: Any = None

    def allocated(self) -> int:
        return sum(self.used.values())

    def hold(self, key: int, size: int, index: int) -> None:
        size = -(-size // BLOCK) * BLOCK
        total = self.allocated() - self.used.get(key, 0) + size
        if total > self.memory * self.fraction:
            free = self.memory - total + size
            raise torch.OutOfMemoryError(
                f"CUDA out of memory. Tried to allocate {readable(size)}. GPU {index} has a total "
                f"capacity of {readable(self.memory)} of which {readable(free)} is free. Including "
                f"non-PyTorch memory, this process has {readable(total - size)} memory in use. Of "
                f"the allocated memory {readable(total - size)} is allocated by PyTorch, and "
                f"0 bytes is reserved by PyTorch but unallocated. (This GPU is simulated.)"
            )
        self.used[key] = size
        self.peak = max(self.peak, total)
        self.kept = max(self.kept, -(-total // KEPT) * KEPT)


ALL: list[GPU] = []
GPUS: list[GPU] = []  # those that CUDA_VISIBLE_DEVICES showed when CUDA was used first
generators: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()
here = threading.local()  # as CUDA's, the current device is each thread's own


def readable(size: int) -> str:
    power, unit = (30, "GiB") if size >= 1 << 30 else (20, "MiB")
    return f"{size / (1 << power):.2f} {unit}"


def current() -> int:
    return getattr(here, "index", 0)


def checked(index: int) -> int:
    """`index`, if there is such a GPU; CUDA's own error if not."""
    torch.cuda._lazy_init()
    if not 0 <= index < len(GPUS):
        raise torch.AcceleratorError(
            "CUDA error: invalid device ordinal\n"
            "GPU device may be out of range, do you have enough GPUs?\n"
        )
    return index


def gpu_in(device: Any) -> int | None:
    """The GPU that `device` (a name, a number, a device) means; None for the CPU."""
    device = torch.device("cuda", device) if isinstance(device, int) else torch.device(device)
    if device.type != "cuda":
        return None
    return checked(current() if device.index is None else device.index)


def device_at(gpu: int | None) -> torch.device:
    return torch.device("cpu") if gpu in (None, ANYWHERE) else torch.device("cuda", gpu)


def storages_of(tensor: torch.Tensor) -> list:
    while hasattr(type(tensor), "__tensor_flatten__"):  # a DTensor is where its local tensor is
        tensor = getattr(tensor, tensor.__tensor_flatten__()[0][0])  # pyrefly: ignore
    if tensor.layout is torch.strided:
        return [real_storage(tensor)]
    if tensor.layout is torch.sparse_coo:
        return [real_storage(part) for part in (tensor._values(), tensor._indices())]
    return [real_storage(tensor.values())]


def storage_of(tensor: torch.Tensor) -> Any:
    return storages_of(tensor)[0]


def gpu_of(tensor: torch.Tensor) -> int | None:
    return getattr(storage_of(tensor), "simulated_gpu", None)


def device_of(tensor: torch.Tensor) -> torch.device:
    real = real_device(tensor)
    return device_at(gpu_of(tensor)) if real.type == "cpu" else real


def put(storage: Any, gpu: int | None) -> None:
    """The storage is on that GPU from now on, and counts there as long as it lives."""
    if getattr(storage, "simulated_gpu", None) == gpu:
        return
    storage.simulated_gpu = gpu
    if gpu is not None and gpu != ANYWHERE:
        key = storage._cdata
        GPUS[gpu].hold(key, storage.nbytes(), gpu)
        weakref.finalize(storage, GPUS[gpu].used.pop, key, None)


@contextmanager
def asking(gpu: int | None):
    """Within it, what is made is there because somebody asked for it."""
    before = getattr(here, "asked", ANYWHERE)
    here.asked = gpu
    try:
        yield
    finally:
        here.asked = before
