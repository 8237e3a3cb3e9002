"""Latency and throughput of answers, by batch size: chapter 14 on a GPU.

    python benchmarks/gpu/inference.py            # needs a GPU
    python benchmarks/gpu/inference.py --small    # a rehearsal on the CPU

Latency is from a batch in the CPU's memory to the answers there: copy, compute, copy back.
"""

from __future__ import annotations

import sys
from functools import partial

import torch
from measurement import Sheet, main
from torchvision import models as vision

from torchladder import measuring, models


def latencies(net, shape, batch: int, device, dtype, repeats: int) -> dict:
    """Seconds of each of `repeats` answers to a batch, as percentiles, and answers a second."""
    net = net.to(device, dtype).eval()
    images = torch.randn(batch, *shape, dtype=dtype, pin_memory=device.type == "cuda")

    @torch.inference_mode()
    def answer():
        return net(images.to(device, non_blocking=True)).argmax(1).cpu()

    seconds = measuring.measure(answer, device=device, repeats=repeats, warmup=5).seconds
    p50, p99 = torch.tensor(seconds).quantile(torch.tensor([0.5, 0.99])).tolist()
    facts = {"batch": batch, "p50_seconds": p50, "p99_seconds": p99, "runs": repeats}
    return facts | {"images_per_second": batch / p50}


def measure(sheet: Sheet, device: torch.device) -> None:
    torch.manual_seed(0)
    cuda, cpu = device.type == "cuda", torch.device("cpu")
    sizes = (1, 4, 16, 64, 256, 1024, 4096) if not sheet.small else (1, 4)
    repeats = 300 if not sheet.small else 5
    lenet, resnet = (models.LeNet, (1, 28, 28)), (vision.resnet18, (3, 224, 224))
    ways = [
        ("LeNet, float32", *lenet, device, torch.float32, sizes),
        ("ResNet-18, float32", *resnet, device, torch.float32, sizes[:6]),
        ("ResNet-18, bf16", *resnet, device, torch.bfloat16, sizes[:6]),
    ]
    if cuda:
        ways += [
            ("LeNet, float32, on the CPU", *lenet, cpu, torch.float32, sizes),
            ("ResNet-18, float32, on the CPU", *resnet, cpu, torch.float32, sizes[:3]),
        ]
    for name, build, shape, where, dtype, batches in ways:
        # A slow answer is repeated less often, enough for a 99th percentile all the same.
        times = repeats if where == device or build is models.LeNet else min(repeats, 100)
        for batch in batches:
            row = partial(latencies, build(), shape, batch, where, dtype, times)
            sheet.take(f"{name}, batch {batch}", row)


if __name__ == "__main__":
    sys.exit(main("inference", measure))
