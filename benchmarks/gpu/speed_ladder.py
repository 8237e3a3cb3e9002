"""How fast can one GPU train? From a loop as most programs have it, one change a row.

    python benchmarks/gpu/speed_ladder.py            # needs a GPU and Fashion-MNIST
    python benchmarks/gpu/speed_ladder.py --small    # a rehearsal on the CPU

Each row trains the same small convolutional net on Fashion-MNIST and keeps the changes of the rows
above it. Two things are measured: images a second, in five blocks of steps; and how many seconds of
training it takes until 92 % of the test images are right, in up to five runs. That clock counts the
training of whole epochs. It stops during the evaluation after each epoch, and it starts after the
row's first steps, in which memory is allocated, algorithms are chosen and code is compiled; those
have a number of their own. Rows that take long have fewer runs.

The ideas come from programs that were made for such records: Keller Jordan's airbench, Tysam
Balsam's hlb-CIFAR10 and David Page's "How to train your ResNet".
"""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from importlib.util import find_spec
from itertools import islice
from time import perf_counter

import torch
import torch.nn.functional as F
from measurement import Sheet, flops_of, main, matrix_product_rate
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset
from torchvision.transforms.functional import to_pil_image, to_tensor

from torchladder import data
from torchladder.measuring import synchronize

TARGET = 0.92
EPOCHS = 8  # over which the learning rate falls to 0
REPEATS = 5
LONG = 40.0  # seconds; after so many, no further run begins


@dataclass(frozen=True)
class Settings:
    """One way to train."""

    loader: str = "as in the posts"  # or "pinned" or "device"
    channels_last: bool = False
    amp: bool = False
    batch: int = 64
    lr: float = 0.05
    fused: bool = False
    compile: bool = False
    graph: bool = False


# Name, what is different from the row above, and why that should help.
LADDER = [
    ("the posts' loop", {}, "one picture after the other, made a tensor by Python; plain copies"),
    (
        "workers, pinned, non-blocking",
        {"loader": "pinned"},
        "other processes make the pictures; the CPU does not wait for the copies",
    ),
    (
        "data on the device",
        {"loader": "device"},
        "the pixels are copied once; an epoch is flipped, cropped and normalised in three calls",
    ),
    ("channels_last", {"channels_last": True}, "the order that convolution kernels read"),
    ("bf16 autocast", {"amp": True}, "half the bytes, and hardware for 16-bit products"),
    (
        "batches of 1,024, learning rate times 8",
        {"batch": 1024, "lr": 0.4},
        "a sixteenth of the requests; a larger step makes up for fewer steps",
    ),
    ("fused optimizer", {"fused": True}, "one kernel for all parameters"),
    ("compile", {"compile": True}, "normalisation and activation become one kernel"),
    ("CUDA graph", {"graph": True}, "the CPU asks once for the kernels of a whole step"),
]


# --- the net ------------------------------------------------------------------------------------


class Block(nn.Sequential):
    """Two convolutions; the first halves height and width."""

    def __init__(self, before: int, after: int) -> None:
        super().__init__(
            nn.Conv2d(before, after, 3, padding=1, bias=False), nn.MaxPool2d(2),
            nn.BatchNorm2d(after), nn.ReLU(),
            nn.Conv2d(after, after, 3, padding=1, bias=False),
            nn.BatchNorm2d(after), nn.ReLU(),
        )  # fmt: skip


class Net(nn.Module):
    """Seven convolutions in the manner of VGG, for 28x28 pixels; 0.48 million parameters at 32."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        w = width
        self.stem = nn.Sequential(
            nn.Conv2d(1, w, 3, padding=1, bias=False), nn.BatchNorm2d(w), nn.ReLU()
        )
        self.blocks = nn.Sequential(Block(w, 2 * w), Block(2 * w, 4 * w), Block(4 * w, 4 * w))
        self.last = nn.Linear(4 * w, 10)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.blocks(self.stem(x)).amax((2, 3)))


# --- the data -----------------------------------------------------------------------------------


class Pictures(Dataset):
    """Fashion-MNIST as torchvision gives it, with the transform ``ToTensor()``."""

    def __init__(self, fashion: data.ImageData) -> None:
        self.images, self.labels = fashion.train_images, fashion.train_labels

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        return to_tensor(to_pil_image(self.images[index])), int(self.labels[index])


class Batches:
    """An epoch of batches at each ``iter()``, as `settings` wants them."""

    def __init__(self, fashion: data.ImageData, settings: Settings, device: torch.device) -> None:
        self.settings, self.device, self.data = settings, device, fashion
        self.mean, self.std = fashion.mean[0], fashion.std[0]
        if settings.loader == "device":
            self.images = fashion.train_images.to(device)
            self.labels = fashion.train_labels.to(device)
            return
        options = {"batch_size": settings.batch, "shuffle": True, "drop_last": True}
        if settings.loader == "pinned":
            workers = min(4, os.cpu_count())
            options |= {"num_workers": workers, "persistent_workers": True}
            options |= {"pin_memory": device.type == "cuda"}
        self.loader = DataLoader(Pictures(fashion), **options)

    def __len__(self) -> int:
        return len(self.data.train_labels) // self.settings.batch

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        return self._here() if self.settings.loader == "device" else self._copied()

    def _copied(self) -> Iterator[tuple[Tensor, Tensor]]:
        later = {"non_blocking": self.settings.loader == "pinned"}
        for images, labels in self.loader:
            images, labels = images.to(self.device, **later), labels.to(self.device, **later)
            yield (images - self.mean) / self.std, labels

    def _here(self) -> Iterator[tuple[Tensor, Tensor]]:
        size = self.settings.batch
        order = torch.randperm(len(self.labels), device=self.device)[: len(self) * size]
        images = data.flip_and_crop(self.images[order])
        images = images.float().div_(255).sub_(self.mean).div_(self.std)
        yield from zip(images.split(size), self.labels[order].split(size), strict=True)


def forever(batches: Batches) -> Iterator[tuple[Tensor, Tensor]]:
    while True:
        yield from batches


# --- training -----------------------------------------------------------------------------------


class Training:
    """A net and its optimizer, which can be set back to the start without making new ones.

    So what was compiled or recorded for them stays good for the next run.
    """

    def __init__(self, net: nn.Module, settings: Settings, device: torch.device) -> None:
        self.settings, self.device = settings, device
        self.net = net.to(device)
        if settings.channels_last:
            self.net.to(memory_format=torch.channels_last)
        # A graph repeats the numbers it was recorded with: a learning rate that changes has to be
        # a tensor then.
        lr = torch.tensor(settings.lr, device=device) if settings.graph else settings.lr
        self.optimizer = torch.optim.SGD(
            self.net.parameters(), lr, momentum=0.9, nesterov=True, weight_decay=5e-4,
            fused=settings.fused,
        )  # fmt: skip
        self.forward = torch.compile(self.net, **self._compiler()) if settings.compile else self.net
        self.recorded = None

    def _compiler(self) -> dict:
        return {} if self.device.type == "cuda" else {"backend": "eager"}

    def set_back(self, seed: int) -> None:
        """Random weights again, and no momentum."""
        torch.manual_seed(seed)
        width = self.net.last.in_features // 4
        self.net.load_state_dict(Net(width).state_dict())
        for state in self.optimizer.state.values():
            state["momentum_buffer"].zero_()

    def set_lr(self, factor: float) -> None:
        (group,) = self.optimizer.param_groups
        if isinstance(group["lr"], Tensor):
            group["lr"].fill_(factor * self.settings.lr)
        else:
            group["lr"] = factor * self.settings.lr

    def compute(self, images: Tensor, labels: Tensor) -> Tensor:
        # A recording must not use casts that were made before it: no cache.
        cached = not self.settings.graph
        kind = {"dtype": torch.bfloat16, "enabled": self.settings.amp, "cache_enabled": cached}
        with torch.autocast(self.device.type, **kind):
            loss = F.cross_entropy(self.forward(images), labels, label_smoothing=0.1)
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        return loss.detach()

    def step(self, images: Tensor, labels: Tensor) -> Tensor:
        if not self.settings.graph or self.device.type != "cuda":
            return self.compute(images, labels)
        if self.recorded is None:
            self.recorded = self.record(images, labels)
        graph, (static_images, static_labels), loss = self.recorded
        static_images.copy_(images)
        static_labels.copy_(labels)
        graph.replay()
        return loss

    def record(self, images: Tensor, labels: Tensor) -> tuple:
        """A CUDA graph of one step, the tensors it reads, and its loss."""
        static = images.clone(), labels.clone()
        beside = torch.cuda.Stream()
        beside.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(beside):  # what happens only once must not be recorded
            for _ in range(3):
                self.compute(*static)
        torch.cuda.current_stream().wait_stream(beside)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            loss = self.compute(*static)
        return graph, static, loss

    @torch.inference_mode()
    def accuracy(self, images: Tensor, labels: Tensor) -> float:
        self.net.eval()
        pairs = zip(images.split(2000), labels.split(2000), strict=True)
        right = sum((self.net(x).argmax(1) == y).sum() for x, y in pairs)
        self.net.train()
        return right.item() / len(labels)


def steps(training: Training, batches: Iterator) -> int:
    """Train on `batches`; how many images they had."""
    plain = training.settings.loader == "as in the posts"
    count = 0
    for number, (images, labels) in enumerate(batches, 1):
        loss = training.step(images, labels)
        if plain and number % 10 == 0:
            loss.item()  # the posts print it
        count += len(labels)
    return count


def with_schedule(training: Training, batches: Iterable, done: int, total: int) -> Iterator:
    """`batches`, each after the learning rate of its step is set; `done` of `total` steps are."""
    for number, batch in enumerate(batches, done + 1):
        training.set_lr(triangle(number / (total + 1)))
        yield batch


def triangle(at: float, warm_up: float = 0.2) -> float:
    """The learning rate's factor: up, then down to 0 at the end of the run (`at` = 1)."""
    return min(at / warm_up, (1 - at) / (1 - warm_up))


# --- what is measured ---------------------------------------------------------------------------


def first_steps(training: Training, batches: Batches) -> float:
    """Seconds until five steps are done."""
    start = perf_counter()
    steps(training, islice(forever(batches), 5))
    synchronize(training.device)
    return perf_counter() - start


def rates(training: Training, batches: Batches, block: int, repeats: int) -> list[float]:
    """Images a second in each of `repeats` blocks of steps."""
    endless, found = forever(batches), []
    steps(training, islice(endless, block // 4 + 1))  # workers have started, caches are full
    for _ in range(repeats):
        synchronize(training.device)
        start = perf_counter()
        count = steps(training, islice(endless, block))
        synchronize(training.device)
        found.append(count / (perf_counter() - start))
    return found


def one_run(training, batches, tests, epochs: int, target: float, seed: int) -> dict:
    """Train until `target`; seconds, epochs and accuracy, seconds None if it was not reached."""
    training.set_back(seed)
    seconds, in_epoch = 0.0, len(batches)
    for epoch in range(1, epochs + 1):
        synchronize(training.device)
        start = perf_counter()
        done = (epoch - 1) * in_epoch
        steps(training, with_schedule(training, batches, done, epochs * in_epoch))
        synchronize(training.device)
        seconds += perf_counter() - start
        accuracy = training.accuracy(*tests)
        if accuracy >= target:
            return {"seconds": seconds, "epochs": epoch, "accuracy": accuracy}
    return {"seconds": None, "epochs": epochs, "accuracy": accuracy}


def runs(*arguments, repeats: int) -> dict:
    """The runs of a row as lists; fewer than `repeats` if they are long."""
    found, start = [], perf_counter()
    while len(found) < repeats and perf_counter() - start < LONG:
        found.append(one_run(*arguments, seed=len(found)))
    names = {"seconds": "seconds_to_target", "epochs": "epochs", "accuracy": "accuracies"}
    return {new: [run[old] for run in found] for old, new in names.items()}


def why_not(change: dict, device: torch.device) -> str | None:
    """What this row lacks here."""
    if "compile" in change and device.type == "cuda":
        if not find_spec("triton"):
            return "no Triton here"
        if not (shutil.which("gcc") or shutil.which("clang")):
            return "no C compiler here"
    return None


def measure(sheet: Sheet, device: torch.device) -> None:
    cuda = device.type == "cuda"
    torch.backends.cudnn.benchmark = True  # all batches of a row have one shape
    width, block, epochs, repeats, target = 32, 200, EPOCHS, REPEATS, TARGET
    if sheet.small:
        width, block, epochs, repeats, target = 4, 2, 2, 2, 0.2
        fashion = data.balanced_subset(data.load(), 32, 20)
    else:
        fashion = data.load("fashion_mnist")
    tests = fashion.normalise(fashion.test_images).to(device), fashion.test_labels.to(device)
    kinds = ["float32", "tf32", "bfloat16"] if cuda else ["float32"]
    for kind in kinds:
        size = 8192 if cuda else 256
        sheet.take(
            f"matrix product, {kind}",
            lambda kind=kind, size=size: {
                "n": size, "flops_per_second": matrix_product_rate(device, kind, size)
            },
        )  # fmt: skip
    settings, rows = Settings(), []
    for name, change, reason in LADDER:
        if missing := why_not(change, device):
            sheet.add(name, skipped=missing)
            continue
        settings = replace(settings, **change)
        if sheet.small:
            settings = replace(settings, batch=min(settings.batch, 128))
        # Convolutions of float32 numbers use TF32 without being asked, where there is TF32.
        kind = ("bfloat16" if settings.amp else "tf32") if cuda else "float32"
        rows.append((name, settings, reason, kind))
    work = flops_of(lambda: Net(width), (1, 28, 28), 2) // 2
    for name, settings, reason, kind in rows:

        def row(settings=settings, reason=reason, kind=kind):
            training = Training(Net(width), settings, device)
            batches = Batches(fashion, settings, device)
            first = first_steps(training, batches)
            rate = rates(training, batches, min(block, len(batches)), repeats)
            facts = {"reason": reason, "first_five_steps": first, "images_per_second": rate}
            peak = sheet.content["rows"][f"matrix product, {kind}"]["flops_per_second"]
            middle = sorted(rate)[len(rate) // 2]
            share = middle * work / sorted(peak)[len(peak) // 2]
            facts |= {"share_of_peak": share, "peak_in": kind, "flops_an_image": work}
            facts |= {"target": target}
            return facts | runs(training, batches, tests, epochs, target, repeats=repeats)

        sheet.take(name, row)


if __name__ == "__main__":
    sys.exit(main("speed_ladder", measure))
