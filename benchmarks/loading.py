"""Batches of small images: whole batches out of memory, and one image at a time.

Most older code gives torchvision's data set with its transforms to a DataLoader, in batches of 64.
Both sides read the same images in the same order, and their batches are equal.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from itertools import islice
from statistics import median

import torch
from results import Result
from torch.utils.data import DataLoader
from torchvision.datasets import FashionMNIST
from torchvision.transforms import Compose, Normalize, ToTensor

from torchladder.data import DeviceBatches, ImageData, dataloader, load_dataset

CPU = torch.device("cpu")


class OneByOne(FashionMNIST):
    """torchvision's Fashion-MNIST, of images that are in memory already."""

    def __init__(self, data: ImageData, transform) -> None:
        self.data, self.targets = data.train_images[:, 0], data.train_labels
        self.transform, self.target_transform = transform, None


def posts_loader(data: ImageData, *, workers: int = 0) -> DataLoader:
    """Batches as older code makes them, in the order of `dataloader`."""
    transform = Compose([ToTensor(), Normalize(data.mean, data.std)])
    order = dataloader(data).sampler
    return DataLoader(OneByOne(data, transform), 64, sampler=order, num_workers=workers)


def assert_same_batches(data: ImageData) -> None:
    """The first 100 batches of older code, `dataloader` and `DeviceBatches` are equal."""
    ways = posts_loader(data), dataloader(data), DeviceBatches(data, device=CPU)
    for theirs, *ours in islice(zip(*ways, strict=True), 100):
        for batch in ours:
            assert all(map(torch.equal, batch, theirs))


# --- measuring ----------------------------------------------------------------------------------


def seconds_a_batch(batches: Iterable, count: int) -> float:
    """Without the first eight, for which workers are started and fill their queues."""
    iterator = iter(batches)
    for _ in islice(iterator, 8):
        pass
    start = time.perf_counter()
    for _ in islice(iterator, count):
        pass
    return (time.perf_counter() - start) / count


def compared(what: str, theirs: Iterable, ours: Iterable) -> Result:
    """How many times as many batches a second `ours` gives; both are timed in turns."""
    pairs = [(seconds_a_batch(theirs, 150), seconds_a_batch(ours, 900)) for _ in range(7)]
    rates = [f"{1 / median(seconds):,.0f}" for seconds in zip(*pairs, strict=True)]
    detail = "{1} against {0} batches/s".format(*rates)
    return Result.of_pairs(what, pairs, detail=detail)


def measure() -> list[Result]:
    torch.set_num_threads(1)
    data = load_dataset("fashion_mnist")
    assert_same_batches(data)
    results = []
    ways = {
        "no workers": (0, dataloader(data)),
        "no workers, without a DataLoader": (0, DeviceBatches(data, device=CPU)),
        "2 workers, and none of ours": (2, dataloader(data)),
    }
    for name, (workers, ours) in ways.items():
        what = f"Batches of 64 small images, {name}: times the rate of one at a time"
        theirs = posts_loader(data, workers=workers)
        results.append(compared(what, theirs, ours))
    return results
