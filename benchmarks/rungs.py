"""DDP against its ceiling.

Two ranks with a thread each train LeNet. The ceiling is the same two ranks, each by itself.
"""

from functools import partial
from statistics import median

from benchmarks.results import Result
from torchladder.launching import launch

BATCHES = (64, 256)  # images per step of each rank
IMAGES = 5120  # of each rank in a block
REPEATS = 31


def training_rates(batch_size):
    """Images per second of both ranks, block by block, alone and under DDP, as in chapter 13."""
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
    timings = measure_across_ranks(blocks, repeats=REPEATS)
    return {way: timing.rates(2 * IMAGES) for way, timing in timings.items()}


def measure():
    results = []
    for batch_size in BATCHES:
        blocks = launch(training_rates, batch_size, backend="gloo")[0]
        pairs = list(zip(blocks["ddp"], blocks["alone"], strict=True))
        what = f"DDP on two ranks, {batch_size} images each, as a share of the ceiling"
        detail = "{:,.0f} against {:,.0f} images/s".format(*map(median, zip(*pairs, strict=True)))
        results.append(Result.of_pairs(what, pairs, detail=detail))
    return results
