"""The i-th GPU, all of them, the device that a person has named, or two on every machine."""

import os

import torch

from torchclinic import simulate_gpus
from torchclinic.machine import why_no_cuda


def try_all_gpus() -> list[torch.device]:
    """Every GPU of this machine, whoever makes it, or ``[device(type='cpu')]`` if it has none."""
    gpu = torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")
    count = torch.accelerator.device_count()
    return [gpu] if gpu.type == "cpu" else [torch.device(gpu.type, i) for i in range(count)]


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
    gpus = try_all_gpus()
    return gpus[i] if i < len(gpus) else torch.device("cpu")


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
    module = getattr(torch, device.type, None)  # such as torch.cuda, torch.mps or torch.xpu
    count = module.device_count() if module and module.is_available() else 0
    if device.type in ("cpu", "meta") or (device.index or 0) < count:
        return device
    if device.type != "cuda":
        raise ValueError(f"No {str(device)!r} on this machine. Use 'cpu'.")
    if not count:
        raise ValueError(f"No GPU for {name!r}: {why_no_cuda()}")
    raise ValueError(
        f"No GPU {device.index} here: this machine shows {count}, counted from 0. "
        "CUDA_VISIBLE_DEVICES limits and renumbers what PyTorch sees."
    )


def two_gpus() -> None:
    """Have two GPUs from here on: this machine's if it has them, else simulated ones.

    See :func:`torchclinic.simulated_gpus.simulate_gpus` for what is simulated and what is not.
    """
    if torch.cuda.device_count() < 2:
        os.environ.pop("CUDA_VISIBLE_DEVICES", None)  # it was for the machine's own
        simulate_gpus(2, with_real_gpu=True)
