"""Batches of small images: whole batches out of memory, and one image at a time.

Most older code gives torchvision's data set with its transforms to a DataLoader, in batches of 64.
Both sides read the same images in the same order, and their batches are equal.
"""

from __future__ import annotations

import dataclasses
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


def assert_same_batches(data: ImageData, count: int, workers: int = 0) -> None:
    """The first `count` batches of older code, `dataloader` and `DeviceBatches` are equal."""
    ways = (
        posts_loader(data, workers=workers),
        dataloader(data, workers=workers),
        DeviceBatches(data, device=CPU),
    )
    for theirs, *ours in islice(zip(*ways, strict=True), count):
        for batch in ours:
            assert all(map(torch.equal, batch, theirs))


def first_images(data: ImageData, count: int) -> ImageData:
    """`count` training images, some of them several times if there are fewer."""
    chosen = torch.arange(count) % len(data.train_images)
    images, labels = data.train_images[chosen], data.train_labels[chosen]
    return dataclasses.replace(data, train_images=images, train_labels=labels)


def fashion_mnist() -> ImageData:
    """60,000 images: where the full set is not installed, the bundled ones five times."""
    try:
        return load_dataset("fashion_mnist")
    except FileNotFoundError:
        return first_images(load_dataset(), 60_000)


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


def compared(what: str, theirs: Iterable, ours: Iterable, full: bool) -> Result:
    """How many times as many batches a second `ours` gives; both are timed in turns."""
    runs, count, our_count = (7, 150, 900) if full else (3, 60, 400)
    pairs = [
        (seconds_a_batch(theirs, count), seconds_a_batch(ours, our_count)) for _ in range(runs)
    ]
    rates = [f"{1 / median(seconds):,.0f}" for seconds in zip(*pairs, strict=True)]
    detail = "{1} against {0} batches/s".format(*rates)
    return Result.of_pairs(what, pairs, detail=detail)


def measure(full: bool = True) -> list[Result]:
    torch.set_num_threads(1)
    data = fashion_mnist()
    assert_same_batches(data, count=100 if full else 20)
    results = []
    ways = {
        "no workers": (0, dataloader(data)),
        "no workers, without a DataLoader": (0, DeviceBatches(data, device=CPU)),
        "2 workers, and none of ours": (2, dataloader(data)),
    }
    for name, (workers, ours) in ways.items():
        what = f"Batches of 64 small images, {name}: times the rate of one at a time"
        theirs = posts_loader(data, workers=workers)
        results.append(compared(what, theirs, ours, full))
    return results
