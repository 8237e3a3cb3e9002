"""A training step of a tiny net: the book's loop, the same by hand, and three libraries' loops.

The net is so small that what surrounds the arithmetic counts. Each side has a net and an optimizer
of its own that begin alike, takes the same batches, which are in memory, and sums up loss and
correct answers. In the end all nets must be equal. Blocks of steps take turns in one process.
"""

import logging
import time
import warnings
from collections import UserList
from functools import partial
from statistics import median

import torch
import torch.nn.functional as F
from torch import nn

from benchmarks.results import Result

STEPS, BATCH_SIZE = 200, 16
REPEATS = 100


def new_parts():
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(784, 32), nn.ReLU(), nn.Linear(32, 10))
    return net, torch.optim.SGD(net.parameters(), lr=0.01, momentum=0.9)


def by_torchladder(net, optimizer, batches):
    from torchladder.training import train_epoch

    start = time.perf_counter()
    train_epoch(net, batches, optimizer)
    return time.perf_counter() - start


def by_hand(net, optimizer, batches, backward=torch.Tensor.backward):
    """The loop of `rungs/1_cpu.py`, with the correct answers."""
    start = time.perf_counter()
    net.train()
    total, right = torch.zeros(()), torch.zeros(())
    for images, labels in batches:
        logits = net(images)
        loss = F.cross_entropy(logits, labels)
        optimizer.zero_grad()
        backward(loss)
        optimizer.step()
        total += loss.detach() * len(labels)
        right += (logits.argmax(1) == labels).sum()
    total.item(), right.item()
    return time.perf_counter() - start


def accelerate_block(net, optimizer):
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True)
    return partial(by_hand, *accelerator.prepare(net, optimizer), backward=accelerator.backward)


def fabric_block(net, optimizer):
    from lightning.fabric import Fabric

    fabric = Fabric(accelerator="cpu", devices=1)
    return partial(by_hand, *fabric.setup(net, optimizer), backward=fabric.backward)


def trainer_block(net, optimizer):
    """Its epoch alone is timed, without what `fit` does before and after."""
    import lightning

    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)  # it has messages at each fit
    warnings.filterwarnings("ignore", module="lightning")

    class Module(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.net = net

        def configure_optimizers(self):
            return optimizer

        def on_train_epoch_start(self):
            self.start = time.perf_counter()
            self.total, self.right = torch.zeros(()), torch.zeros(())

        def training_step(self, batch, index):
            images, labels = batch
            logits = self.net(images)
            loss = F.cross_entropy(logits, labels)
            self.total += loss.detach() * len(labels)
            self.right += (logits.argmax(1) == labels).sum()
            return loss

        def on_train_epoch_end(self):
            self.total.item(), self.right.item()
            self.seconds = time.perf_counter() - self.start

    def block(batches):
        module = Module()
        # Barebones: without logs, checkpoints and a bar, as its makers advise for measuring it.
        trainer = lightning.Trainer(accelerator="cpu", max_epochs=1, barebones=True)
        trainer.fit(module, UserList(batches))  # a plain list would be one of loaders
        return module.seconds

    return block


PEERS = {
    "accelerate": accelerate_block,
    "Lightning Fabric": fabric_block,
    "Lightning Trainer": trainer_block,
}


def seconds_of_blocks():
    """For each side, the seconds of its blocks; the first of each is not counted."""
    images = torch.randn(STEPS, BATCH_SIZE, 784, generator=torch.manual_seed(0))
    batches = list(zip(images, torch.randint(10, (STEPS, BATCH_SIZE)), strict=True))
    parts = {side: new_parts() for side in ("torchladder", "by hand", *PEERS)}
    blocks = {
        "torchladder": partial(by_torchladder, *parts["torchladder"]),
        "by hand": partial(by_hand, *parts["by hand"]),
    }
    blocks |= {peer: make(*parts[peer]) for peer, make in PEERS.items()}
    seconds = {side: [] for side in blocks}
    for repeat in range(1 + REPEATS):
        # There and back: what follows the Trainer's block finds cold caches.
        for side in list(blocks)[:: -1 if repeat % 2 else 1]:
            seconds[side].append(blocks[side](batches))
    trained = {side: nn.utils.parameters_to_vector(parts[side][0].parameters()) for side in blocks}
    if unlike := [side for side in trained if not trained[side].equal(trained["by hand"])]:
        raise RuntimeError(f"not trained as by hand: {', '.join(unlike)}")
    return {side: runs[1:] for side, runs in seconds.items()}


def measure():
    torch.set_num_threads(1)
    seconds = seconds_of_blocks()
    ours, by_hand = seconds["torchladder"], seconds["by hand"]

    def microseconds(*sides):
        return " against ".join(f"{1e6 * median(side) / STEPS:.0f} µs" for side in sides)

    pairs = list(zip(ours, by_hand, strict=True))
    what, detail = "A step of the loop, against the same by hand", microseconds(ours, by_hand)
    results = [Result.of_pairs(what, pairs, detail=detail)]
    for peer in PEERS:
        pairs = list(zip(seconds[peer], ours, strict=True))
        what = f"A step of the loop: how many times faster than {peer}'s"
        detail = microseconds(ours, seconds[peer])
        results.append(Result.of_pairs(what, pairs, detail=detail))
    return results
