"""Which devices does this machine have, and what can each do?"""

from __future__ import annotations

import torch

from torchclinic.machine import Device as Device
from torchclinic.machine import DeviceTable as DeviceTable
from torchclinic.machine import device_table as device_table
from torchclinic.machine import why_no_cuda as why_no_cuda


def gpu_count() -> int:
    """How many GPUs PyTorch can use: CUDA's (or ROCm's), else 1 for Apple's MPS, else 0."""
    if torch.cuda.is_available():
        return torch.cuda.device_count()
    return int(torch.backends.mps.is_available())


def try_gpu(i: int = 0) -> torch.device:
    """The i-th GPU if this machine has one, else the CPU.

    Parameters
    ----------
    i : int
        Index as PyTorch counts, after ``CUDA_VISIBLE_DEVICES`` has renumbered.

    Raises
    ------
    ValueError
        If `i` is negative.
    """
    if i < 0:
        raise ValueError(f"GPUs are counted from 0, so there is no GPU {i}.")
    if i >= gpu_count():
        return torch.device("cpu")
    return torch.device("cuda", i) if torch.cuda.is_available() else torch.device("mps")


def try_all_gpus() -> list[torch.device]:
    """Every GPU of this machine, or ``[device(type='cpu')]`` if it has none."""
    return [try_gpu(i) for i in range(gpu_count())] or [torch.device("cpu")]


def named_device(name: str | torch.device) -> torch.device:
    """The device called `name`, as PyTorch spells it; unlike `try_gpu`, no fallback.

    Raises
    ------
    ValueError
        If it is not a device's name, or this machine has no such device.
    """
    try:
        device = torch.device(name)
    except RuntimeError:
        raise ValueError(
            f"{name!r} is not a device. Write 'cpu', 'cuda', 'cuda:1' or 'mps'."
        ) from None
    if device.type == "cuda":
        if not torch.cuda.is_available():
            raise ValueError(f"No GPU for {name!r}: {why_no_cuda()}")
        count = torch.cuda.device_count()
        if (device.index or 0) >= count:
            there = " and ".join(str(i) for i in range(count)) if count < 3 else f"0 to {count - 1}"
            raise ValueError(
                f"No GPU {device.index} here: this machine shows {count} ({there}). "
                "CUDA_VISIBLE_DEVICES limits and renumbers what PyTorch sees."
            )
    elif device.type == "mps" and not torch.backends.mps.is_available():
        raise ValueError("No 'mps' here: it needs a Mac with an Apple GPU. Use 'cpu'.")
    elif device.type not in ("cpu", "meta", "mps"):
        here = torch.accelerator.current_accelerator(check_available=True)
        count = torch.accelerator.device_count() if here and here.type == device.type else 0
        if (device.index or 0) >= count:
            raise ValueError(f"No {str(device)!r} on this machine. Use 'cpu'.")
    return device
