"""DDP against its ceiling and against DDP as torchrun starts it.

Two ranks with a thread each train LeNet. The ceiling is the same two ranks, each by itself.
"""

import json
import os
import subprocess
import sys
import time
from functools import partial
from statistics import median

from results import Result

BATCHES = {64: 0.85, 256: 0.95}  # images a step of each rank, and the goal
IMAGES = 5120  # of each rank in a block
REPEATS, QUICK_REPEATS = 31, 3


def by_torchladder(batch_size, repeats):
    """Images per second of both ranks, block by block: alone and under DDP."""
    from torchladder.launching import launch

    return launch(training_rates, batch_size, repeats, backend="gloo")[0]


def training_rates(batch_size, repeats):
    """What chapter 14 shows, in each rank."""
    import torch

    from torchladder.measuring import measure_across_ranks
    from torchladder.models import LeNet
    from torchladder.training import parallelize, train_epoch

    torch.set_num_threads(1)
    images, labels = torch.randn(batch_size, 1, 28, 28), torch.zeros(batch_size, dtype=torch.long)
    batches = [(images, labels)] * (IMAGES // batch_size)
    blocks = {}
    for way, rung in {"alone": "cpu", "ddp": "ddp"}.items():
        net = parallelize(LeNet(), rung)
        optimizer = torch.optim.SGD(net.parameters(), lr=1e-3, momentum=0.9)
        blocks[way] = partial(train_epoch, net, batches, optimizer)
    timings = measure_across_ranks(blocks, repeats=repeats)
    return {way: timing.rates(2 * IMAGES) for way, timing in timings.items()}


def bare_rank(batch_size, repeats):
    """The same by hand, with nothing but what the DDP tutorial shows; run by torchrun."""
    import torch
    import torch.distributed as dist
    import torch.nn.functional as F
    from torch.nn.parallel import DistributedDataParallel

    from torchladder.models import LeNet

    dist.init_process_group("gloo")
    images, labels = torch.randn(batch_size, 1, 28, 28), torch.zeros(batch_size, dtype=torch.long)
    nets = {"alone": LeNet(), "ddp": DistributedDataParallel(LeNet())}
    optimizers = {w: torch.optim.SGD(n.parameters(), 1e-3, momentum=0.9) for w, n in nets.items()}
    rates = {way: [] for way in nets}
    for block in range(1 + repeats):
        for way, net in nets.items():
            dist.barrier()
            start = time.perf_counter()
            for _ in range(IMAGES // batch_size):
                loss = F.cross_entropy(net(images), labels)
                optimizers[way].zero_grad()
                loss.backward()
                optimizers[way].step()
            slowest = torch.tensor(time.perf_counter() - start)
            dist.all_reduce(slowest, dist.ReduceOp.MAX)
            if block:
                rates[way].append(2 * IMAGES / slowest.item())
    if dist.get_rank() == 0:
        print(json.dumps(rates), flush=True)
    dist.barrier()
    os._exit(0)


def by_torchrun(batch_size, repeats):
    command = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", __file__]
    done = subprocess.run(
        [sys.executable, *command, str(batch_size), str(repeats)],
        env={**os.environ, "OMP_NUM_THREADS": "1"}, capture_output=True, text=True, check=True,
    )  # fmt: skip
    return json.loads(done.stdout.splitlines()[-1])


def measure(full=True):
    repeats = REPEATS if full else QUICK_REPEATS
    results = []
    for batch_size, goal in list(BATCHES.items())[: None if full else 1]:
        shares = {}
        for name, rates in [("launch", by_torchladder), ("torchrun", by_torchrun)]:
            blocks = rates(batch_size, repeats)
            pairs = list(zip(blocks["ddp"], blocks["alone"], strict=True))
            shares[name] = [ddp / alone for ddp, alone in pairs]
            if name == "launch":
                middle = [f"{median(blocks[way]):,.0f}" for way in ("ddp", "alone")]
                what = f"DDP on two ranks, {batch_size} images each, as a share of the ceiling"
                detail = "{} against {} images/s".format(*middle)
                results.append(Result.of_pairs(what, pairs, goal, detail=detail))
        what = f"That share against the share of bare DDP under torchrun, {batch_size} images"
        results.append(Result.of_samples(what, shares["launch"], shares["torchrun"], 1.0))
    return results


if __name__ == "__main__":
    bare_rank(*map(int, sys.argv[1:]))
