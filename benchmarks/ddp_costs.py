"""What takes the rest of DDP's time at 64 images a step, and what does not bring it back.

Each way trains as `rungs` does, in the same two ranks, in turns with the ceiling: each by itself.
"""

from functools import partial
from types import SimpleNamespace

from results import Result

from rungs import IMAGES

BATCH_SIZE, REPEATS = 64, 15
CEILING = "alone"


def training_seconds(repeats):
    """Of the blocks of each way, in each rank."""
    import torch
    import torch.distributed as dist

    from torchladder.measuring import measure_across_ranks
    from torchladder.models import LeNet
    from torchladder.training import parallelize, train_epoch

    torch.set_num_threads(1)
    images, labels = torch.randn(BATCH_SIZE, 1, 28, 28), torch.zeros(BATCH_SIZE, dtype=torch.long)
    batches = [(images, labels)] * (IMAGES // BATCH_SIZE)
    numbers = torch.zeros(sum(p.numel() for p in LeNet().parameters()))

    def way(rung="cpu", *, fused=None, each_step=None, **options):
        net = parallelize(LeNet(), rung, **options)
        optimizer = torch.optim.SGD(net.parameters(), lr=1e-3, momentum=0.9, fused=fused)
        # What is called after each step, where a schedule of the learning rate would be.
        schedule = each_step and SimpleNamespace(step=each_step)
        return partial(train_epoch, net, batches, optimizer, schedule)

    silent = way("ddp")

    def without_all_reduce():
        with silent.args[0].no_sync():
            silent()

    ways = {
        CEILING: way(),
        "Alone, with a barrier after each step": way(each_step=dist.barrier),
        "Alone, with an all-reduce of as many numbers after each step": way(
            each_step=partial(dist.all_reduce, numbers)
        ),
        "DDP without its all-reduce (`no_sync`)": without_all_reduce,
        "DDP": way("ddp"),
        "DDP with `gradient_as_bucket_view=False`": way("ddp", gradient_as_bucket_view=False),
        "DDP with `static_graph=True`": way("ddp", static_graph=True),
        "DDP with buckets of 0.1 MB": way("ddp", bucket_cap_mb=0.1),
        "DDP with fused SGD": way("ddp", fused=True),
    }
    timings = measure_across_ranks(ways, repeats=repeats)
    return {name: timing.seconds for name, timing in timings.items()}


def measure(full=True):
    from torchladder.launching import launch

    seconds = launch(training_seconds, REPEATS if full else 3, backend="gloo")[0]
    ceiling = seconds.pop(CEILING)
    return [
        Result.of_pairs(
            f"{name}: share of the ceiling", list(zip(ceiling, runs, strict=True)), None
        )
        for name, runs in seconds.items()
    ]
