"""From which size on is a GPU faster than the CPU? And what does the posts' whole network take?

    python benchmarks/gpu/sizes.py            # needs a GPU
    python benchmarks/gpu/sizes.py --small    # a rehearsal on the CPU

Every row is a training step of one net with 64 images: on the CPU with all its cores, on the CPU
with one thread, and on the GPU. The last rows are the posts' network with all its 0.80 billion
parameters, on the GPU only.
"""

from __future__ import annotations

import sys
from functools import partial

import torch
import torch.nn.functional as F
from measurement import Sheet, flops_of, main

from torchladder import measuring, models

BATCH = 64
CPU = torch.device("cpu")


def step_of(build, shape, batch: int, device: torch.device, *, amp: bool = False):
    """A function that trains one step on `device`."""
    with device:
        net = build()
        images = torch.randn(batch, *shape)
        labels = torch.zeros(batch, dtype=torch.long)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01)

    def step():
        with torch.autocast(device.type, torch.bfloat16, enabled=amp):
            loss = F.cross_entropy(net(images), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

    return step


def on_cpu(step, threads: int) -> list[float]:
    """Seconds of the step with so many threads; fewer runs where one is long."""
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        once = measuring.measure(step, repeats=1, warmup=1).median
        return list(measuring.measure(step, repeats=3 if once > 1 else 9, warmup=0).seconds)
    finally:
        torch.set_num_threads(before)


def compared(build, shape, device: torch.device, *, cpu: bool) -> dict:
    """One row: the step on the CPU and on `device`."""
    facts = {"flops": flops_of(build, shape, BATCH)}
    facts["parameters"] = models.count_parameters(build())
    if cpu:
        step = step_of(build, shape, BATCH, CPU)
        facts["cpu_seconds"] = on_cpu(step, torch.get_num_threads())
        facts["cpu_threads"] = torch.get_num_threads()
        facts["one_thread_seconds"] = on_cpu(step, 1)
    step = step_of(build, shape, BATCH, device)
    facts["gpu_seconds"] = list(measuring.measure(step, device=device, repeats=21).seconds)
    return facts


def whole(width: float, batch: int, device: torch.device, *, amp: bool) -> dict:
    """The posts' network: seconds of a step, share of the matrix peak, memory."""
    build, shape = partial(models.LinearConvNet, width=width), (3, 32, 32)
    measuring.reset_peak_memory(device)
    step = step_of(build, shape, batch, device, amp=amp)
    seconds = list(measuring.measure(step, device=device, repeats=5).seconds)
    facts = {"batch": batch, "amp": amp, "flops": flops_of(build, shape, batch)}
    with torch.device("meta"):
        facts["parameters"] = models.count_parameters(build())
    return facts | {"gpu_seconds": seconds, "peak_bytes": measuring.peak_memory(device)}


def measure(sheet: Sheet, device: torch.device) -> None:
    parts = (64, 32, 16, 8, 4) if not sheet.small else (64,)
    hidden = (32, 256, 2048, 16384) if not sheet.small else (32,)
    nets = {f"MLP, {h:,} hidden": (partial(models.MLP, 784, h), (784,)) for h in hidden}
    nets["LeNet"] = models.LeNet, (1, 28, 28)
    for part in parts:
        build = partial(models.LinearConvNet, width=1 / part)
        nets[f"the posts' network, 1/{part}"] = build, (3, 32, 32)
    for name, (build, shape) in nets.items():
        sheet.take(name, partial(compared, build, shape, device, cpu=True))
    full, batches = (1.0, (64, 256)) if not sheet.small else (1 / 64, (8,))
    for batch in batches:
        for amp in (False, True):
            name = f"the posts' network, whole, batch {batch}, {'bf16' if amp else 'float32'}"
            sheet.take(name, partial(whole, full, batch, device, amp=amp))


if __name__ == "__main__":
    sys.exit(main("sizes", measure))
