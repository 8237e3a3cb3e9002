"""GPUs on a machine that has none: is a program right about *where*? Never about speed.

Every tensor stays in the CPU's memory and every kernel is the CPU's, so values are right; its
storage carries the number of a GPU, and PyTorch's own errors are raised where devices meet.

| simulated | not simulated |
|---|---|
| where each tensor is, and the errors of mixed devices | speed, and how much overlaps |
| copies, views, `.data`, state dicts, `torch.save`, `map_location` | CUDA's own rounding |
| `nn.DataParallel`, DDP, FSDP2, DTensor, DCP; `nccl`, sent by gloo | NCCL's hangs and limits |
| memory as the sum of storages, out of memory at a limit | fragmentation, the context's memory |
| each GPU's random generator | CUDA's own random numbers |
| streams and events, whose work is done at once | races between streams |
| autocast and the scaler | kernels that a GPU lacks; DLPack, which finds CPU tensors |
| `CUDA_VISIBLE_DEVICES`, CUDA's error in a forked process | `torch.compile`: it runs eagerly |
"""

import json
import os
import sys
from pathlib import Path
from typing import Any

from torchclinic import OLDEST_TORCH, UserError

VARIABLE = "TORCHCLINIC_SIMULATED_GPUS"
FOLDER = str(Path(__file__).parent / "inherited")


def simulate_gpus(count: int = 2, **options: Any) -> None:
    """Have this process and all that it starts see `count` simulated GPUs, for good.

    Parameters
    ----------
    count
        How many GPUs, 1 to 16.
    **options
        ``with_real_gpu=True``: simulate though this machine has a GPU. What each simulated one is:
        `name` ("Tesla T4"), `capability` ((7, 5)) and `memory` in bytes (15.8e9). The name always
        ends in "(simulated)".

    Raises
    ------
    UserError
        If `count` is no such number, if other GPUs are simulated here already or a real one is
        there, on Windows, and on a PyTorch older than 2.10.

    Examples
    --------
    >>> import torchclinic
    >>> torchclinic.simulate_gpus(2)  # doctest: +SKIP
    >>> torch.ones(3, device="cuda:1")  # doctest: +SKIP
    tensor([1., 1., 1.], device='cuda:1')
    """
    settings = describe(count, **options)
    before = os.environ.get(VARIABLE, settings)
    if before != settings:
        raise UserError(f"Other GPUs are simulated here already: {before}. Restart Python first.")
    install(settings)
    os.environ |= inherited(settings)


def describe(
    count: int,
    *,
    name: str = "Tesla T4",
    capability: tuple[int, int] = (7, 5),
    memory: float = 15_843_721_216,
    with_real_gpu: bool = False,
) -> str:
    """The GPUs as one line of JSON."""
    if not 1 <= count <= 16:
        raise UserError(f"{count!r} GPUs cannot be simulated: give a number from 1 to 16.")
    if sys.platform == "win32":
        raise UserError("GPUs are simulated on Linux and macOS only; on Windows, use WSL.")
    if not 0 < memory < float("inf"):
        raise UserError(f"No GPU has {memory} bytes of memory: give a number such as 16e9.")
    if not (isinstance(capability, tuple) and len(capability) == 2):
        raise UserError(f"{capability!r} is no compute capability: give two numbers, as (8, 0).")
    gpu = {"name": f"{name} (simulated)", "capability": capability, "memory": int(memory)}
    return json.dumps({"count": count, "with_real_gpu": with_real_gpu, "gpu": gpu})


def inherited(settings: str) -> dict[str, str]:
    """What the environment of a process has to hold for simulated GPUs."""
    paths = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    paths = [FOLDER, *(path for path in paths if path and path != FOLDER)]
    return {VARIABLE: settings, "PYTHONPATH": os.pathsep.join(paths)}


def install(settings: str) -> None:
    """Simulate in this process what `settings` describes; a second time changes nothing."""
    import torch

    from torchclinic.simulated_gpus import autocast, cuda, parallel, placing, tensors

    if placing.ALL:
        return
    if tuple(map(int, torch.__version__.split(".")[:2])) < OLDEST_TORCH:
        raise UserError(f"GPUs are simulated for torch 2.10 and newer, not {torch.__version__}.")
    asked = json.loads(settings)
    if not asked["with_real_gpu"] and torch.cuda.is_available():
        raise UserError(
            "This machine has a real GPU. Use it, or hide it with CUDA_VISIBLE_DEVICES='', or "
            "simulate all the same: with_real_gpu=True, or torchclinic simulate --with-real-gpu."
        )
    for i in range(asked["count"]):
        placing.ALL.append(placing.GPU(**asked["gpu"], uuid=f"GPU-simulated-{i}"))
    # Where the real GPU has been used, CUDA starts again.
    torch.cuda._initialized, torch.cuda._cached_device_count = False, None
    cuda.simulate_cuda()
    autocast.simulate_autocast()
    parallel.simulate_data_parallel()
    parallel.simulate_nccl()
    tensors.simulate_tensors()
