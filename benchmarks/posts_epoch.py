"""A training epoch as older code writes it, and what each change to it brings.

Older code reads one image at a time through torchvision, prints ``loss.item()`` every ten steps and
saves the state dict. Batch size, order, network and optimizer stay as they are, so the losses do.
All of it in one thread: more threads would compute faster, but not read single images faster.
"""

from __future__ import annotations

import contextlib
import dataclasses
import io
import time
from collections.abc import Callable, Iterator
from functools import partial
from statistics import median

import torch
import torch.nn.functional as F
from loading import OneByOne, first_images
from results import Result
from torch import Tensor, nn
from torch.utils.data import DataLoader
from torchvision.transforms import ToTensor

from torchladder.data import DeviceBatches, ImageData, dataloader, load_dataset
from torchladder.models import LeNet, LinearConvNet

#: Each with all changes above it.
CHANGES = {
    "as older code writes it": {},
    "bytes in memory, a batch at a time": {"whole_batches": True},
    "loss read once, at the end": {"item": False},
    "a fused optimizer": {"fused": True},
    "channels_last": {"channels_last": True},
    "autocast to bfloat16": {"bfloat16": True},
}
ROUNDING = {"autocast to bfloat16": 0.02}  # how far its losses may be off; the others' 1e-4
NETS: dict[str, tuple[Callable[[], nn.Module], int, int]] = {  # images of an epoch: quick, full
    "LeNet": (LeNet, 2_560, 12_000),
    "LinearConvNet at 1/16": (partial(LinearConvNet, (1, 28, 28), width=1 / 16), 320, 960),
}


def posts_data(images: int) -> ImageData:
    """Pixels from 0 to 1, as ``ToTensor`` makes them: older code does not normalise further."""
    return dataclasses.replace(first_images(load_dataset(), images), mean=(0.0,), std=(1.0,))


def batches_of(data: ImageData, whole_batches: bool) -> Iterator:
    if whole_batches:
        return iter(DeviceBatches(data, device=torch.device("cpu")))
    pictures = OneByOne(data, ToTensor())
    return iter(DataLoader(pictures, batch_size=64, sampler=dataloader(data).sampler))


def epoch(
    make: Callable[[], nn.Module],
    data: ImageData,
    *,
    whole_batches: bool = False,
    item: bool = True,
    fused: bool = False,
    channels_last: bool = False,
    bfloat16: bool = False,
) -> tuple[float, Tensor]:
    """Train for an epoch: its seconds of processor time, and the loss at each step."""
    torch.manual_seed(0)
    net, losses = make(), []
    layout = torch.channels_last if channels_last else torch.contiguous_format
    net.to(memory_format=layout)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01, fused=fused or None)
    start = time.process_time()  # leaves out other programs
    net.train()
    for images, labels in batches_of(data, whole_batches):
        images = images.contiguous(memory_format=layout)
        with torch.autocast("cpu", torch.bfloat16, enabled=bfloat16):
            loss = F.cross_entropy(net(images), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
        if item and len(losses) % 10 == 0:
            print(f"step {len(losses)}, loss {loss.item()}")
    torch.save(net.state_dict(), io.BytesIO())
    return time.process_time() - start, torch.stack(losses)


def rounds(make, data: ImageData, runs: int) -> dict[str, list[float]]:
    """Seconds of each run after each change, all changes in turns; their losses are compared."""
    seconds = {name: [] for name in CHANGES}
    for _ in range(runs):
        options = {}
        for name, change in CHANGES.items():
            options |= change
            with contextlib.redirect_stdout(io.StringIO()):
                taken, losses = epoch(make, data, **options)
            seconds[name].append(taken)
            if not change:
                expected = losses
            torch.testing.assert_close(losses, expected, rtol=ROUNDING.get(name, 1e-4), atol=0)
    return seconds


def measure(full: bool = True) -> list[Result]:
    torch.set_num_threads(1)
    results = []
    for net, (make, few, many) in NETS.items():
        data = posts_data(many if full else few)
        seconds = rounds(make, data, 5 if full else 3)
        results += chain(net, len(data.train_images), seconds)
    return results


def chain(net: str, images: int, seconds: dict[str, list[float]]) -> list[Result]:
    """A row a change, times as fast as the one before; then the last against the first."""
    results, start = [], seconds["as older code writes it"]
    before = start
    for name, runs in list(seconds.items())[1:]:
        times = [f"{median(run):.2f}" for run in (before, runs)]
        total = median(start) / median(runs)
        detail = f"{times[0]} s, then {times[1]} s; {total:.2f} times as fast as the start"
        pairs = list(zip(before, runs, strict=True))
        results.append(Result.of_pairs(f"{net}: {name}", pairs, None, detail=detail))
        before = runs
    pairs = list(zip(start, before, strict=True))
    detail = f"an epoch of {images:,} images: {median(start):.2f} s, then {median(before):.2f} s"
    return [*results, Result.of_pairs(f"{net}: all of these", pairs, 1, detail=detail)]
