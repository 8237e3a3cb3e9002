"""The hidden cases of the exercises on several ranks: chapters 08 to 10."""

import torch
import torch.distributed as dist
from torch import nn

from torchladder.check import Wrong, exercise, expect


@exercise(
    "10",
    minutes=10,
    ranks=(2, 3, 4),
    hint="dist.all_reduce sums, in place, on all ranks. Which parameters have no gradient?",
)
def average_gradients(average_gradients) -> None:
    rank, ranks = dist.get_rank(), dist.get_world_size()
    shapes = {"first": (3, 2), "frozen": (2, 2), "unused": (2, 2), "last": (2, 2)}
    net = nn.ModuleDict({name: nn.Linear(*shape) for name, shape in shapes.items()})
    net["frozen"].requires_grad_(False)
    net["last"].bias = net["first"].bias  # tied
    own = {}
    for i, (name, parameter) in enumerate(net.named_parameters()):
        if name.startswith(("first", "last")):
            own[name] = torch.arange(1.0, parameter.numel() + 1).reshape(parameter.shape) + i
            parameter.grad = own[name] * (rank + 1) ** 2
    average_gradients(net)
    total = sum((r + 1) ** 2 for r in range(ranks))
    for name, parameter in net.named_parameters():
        what = f"the gradient of {name}"
        if name not in own:
            if parameter.grad is not None:
                raise Wrong(f"{what} was None on every rank and is a tensor now")
            continue
        if parameter.grad is None:
            raise Wrong(f"{what} is None now")
        mistakes = {
            "is summed, not divided by the number of ranks": own[name] * total,
            "is your own: nothing came from the other ranks": own[name] * (rank + 1) ** 2,
            "is your own, divided by the number of ranks": own[name] * (rank + 1) ** 2 / ranks,
            "is divided by the number of ranks twice": own[name] * total / ranks**2,
            "is rank 0's": own[name],
            "is the sum divided by 2": own[name] * total / 2,
        }
        expect(what, parameter.grad, own[name] * total / ranks, mistakes)
