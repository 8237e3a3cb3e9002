"""The hidden cases of the exercises on memory, sharding and placements."""

import itertools

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from torchexercises import Wrong, exercise, expect, on_ranks
from torchladder.traffic import Traffic


@exercise(
    "11", minutes=10, hint="Ask each parameter for its numel() and dtype. Who has a gradient?"
)
def training_bytes(training_bytes) -> None:
    plain, half = nn.Linear(10, 10, bias=False), nn.Linear(10, 10, bias=False).bfloat16()
    frozen, tied = nn.Sequential(nn.Linear(10, 10), nn.Linear(10, 10)), nn.ModuleList()
    frozen[0].requires_grad_(False)
    part = nn.Linear(10, 10)
    part.bias.requires_grad_(False)
    tied.extend([nn.Linear(10, 10, bias=False), nn.Linear(10, 10, bias=False)])
    tied[1].weight = tied[0].weight
    for said, net, states, right in (
        ("a frozen layer, Adam", frozen, 2, 440 + 4 * 440),
        ("float32, SGD", plain, 0, 800),
        ("bfloat16, Adam", half, 2, 800),
        ("a weight that two layers share, momentum", tied, 1, 1200),
        ("batch norm, SGD", nn.BatchNorm1d(10), 0, 160),
        ("float32 and bfloat16, Adam", nn.Sequential(plain, half), 2, 1600 + 800),
        ("a frozen bias, SGD", part, 0, 840),
        ("on meta, Adam", nn.Sequential(nn.Linear(9, 10), nn.Linear(10, 1)).to("meta"), 2, 4 * 444),
        ("nothing but a ReLU, Adam", nn.ReLU(), 2, 0),
    ):
        every = sum(p.nbytes for p in net.parameters())
        of_each = (right - every) / (1 + states)
        size = next(net.parameters(), torch.ones(1)).itemsize
        mistakes = {
            "counts 4 bytes for each number, whatever its dtype": right * 4 / size,
            "counts gradients and state of frozen parameters": every * (2 + states),
            "counts the buffers": right + sum(b.nbytes for b in net.buffers()),
            "leaves out the gradients": right - of_each,
            "leaves out the parameters themselves": right - every,
        }
        expect(f"{said}: what is returned", training_bytes(net, states), right, mistakes)


@on_ranks("12", minutes=15, hint="Equal pieces need padding; cut it off afterwards.")
def shard_and_gather(shard, gather) -> None:
    ranks = dist.get_world_size()
    earlier = []
    for shape, dtype in (
        ((8, 3), torch.float64), ((7, 2), torch.bfloat16), ((2, 5), torch.int64),
        ((1,), torch.float32), ((5, 2, 3), torch.float32),
    ):  # fmt: skip
        whole = torch.arange(torch.Size(shape).numel()).reshape(shape).to(dtype)
        kept = whole.clone()
        piece = shard(whole)
        earlier.append((piece, shape, kept))
        rows = -(-shape[0] // ranks)
        said, most = f"of a tensor of shape {list(shape)}", rows * whole[:1].numel()
        if piece.numel() > most:
            raise Wrong(f"{said}, the piece is {list(piece.shape)}, where {rows} rows would do")
        if piece.untyped_storage().nbytes() > most * piece.itemsize:
            raise Wrong(f"{said}, the piece keeps the other rows alive: it is a view")
        lost = {"lacks the last rows": kept[: shape[0] // ranks * ranks]}
        expect(f"{said}, what is gathered", gather(piece, shape), kept, lost)
        expect(f"{said}, the tensor that was given", whole, kept)
    for piece, shape, kept in earlier:  # as if an optimizer had trained it
        said = f"of a tensor of shape {list(shape)}, what is gathered"
        expect(f"{said} when all pieces have doubled", gather(2 * piece, shape), 2 * kept)


@on_ranks("12", minutes=15, hint="Which gradient does the owner need? Who knows the result?")
def zero_step(zero_step) -> None:
    rank, ranks = dist.get_rank(), dist.get_world_size()
    start = [torch.arange(6.0), torch.ones(2, 3), torch.tensor([2.0])]
    start += [torch.ones(4, dtype=torch.float64), torch.ones(5)]
    parameters = [nn.Parameter(value.clone()) for value in start]
    owner = [i % ranks for i in range(len(start))][::-1]
    mine = [p for p, of in zip(parameters, owner, strict=True) if of == rank]
    optimizer = torch.optim.SGD(mine, lr=0.1, momentum=0.9)
    plain, speed = [value.clone() for value in start], [0.0] * len(start)
    for step in (1, 2):
        gradients = [[(r + 1) * step + i for i in range(len(start))] for r in range(ranks)]
        for parameter, size in zip(parameters, gradients[rank], strict=True):
            parameter.grad = torch.full_like(parameter, size)
        sums = [sum(of_rank) for of_rank in zip(*gradients, strict=True)]
        speed = [0.9 * v + total / ranks for v, total in zip(speed, sums, strict=True)]
        before, plain = plain, [p - 0.1 * v for p, v in zip(plain, speed, strict=True)]
        zero_step(parameters, owner, optimizer)
        for i, (parameter, right) in enumerate(zip(parameters, plain, strict=True)):
            mistakes = {
                "was updated with the sum of the gradients, not the mean": before[i]
                - 0.1 * sums[i],
                "was updated with this rank's gradient only": before[i] - 0.1 * gradients[rank][i],
                "was updated with its owner's gradient only": (
                    before[i] - 0.1 * gradients[owner[i]][i]
                ),
                "is as it was: its owner's new value is not here": before[i],
            }
            said = f"after step {step}, parameter {i} of rank {owner[i]}"
            expect(said, parameter.detach(), right, mistakes if step == 1 else None)
            if not (parameter.requires_grad and parameter.is_leaf):
                raise Wrong(f"{said} can no longer be trained: copy under torch.no_grad()")


@exercise(
    "18", minutes=10, hint="What can each rank compute of its pieces? Is it a piece or a summand?"
)
def product_of(product_of) -> None:
    rows, columns, whole, part = "Shard(0)", "Shard(1)", "Replicate()", "Partial()"
    free = {(rows, whole): rows, (whole, columns): columns, (whole, whole): whole}
    free |= dict.fromkeys([(columns, rows), (columns, whole), (whole, rows)], part)
    free |= dict.fromkeys([(part, whole), (whole, part)], part)
    kinds = (rows, columns, whole, part)
    for x, w in itertools.product(kinds, kinds):
        right = free.get((x, w))
        mistakes = {"is None, but each rank can compute its share alone": None}
        if x == w == part:
            mistakes = {"is Partial(), but (a + b) @ (c + d) is more than a @ c + b @ d": part}
        elif right is None:
            mistakes = {f"is {kind}, but something must be sent for it": kind for kind in kinds}
        elif right == part:
            mistakes["is Replicate(), but nobody has added the summands yet"] = whole
        expect(f"the product of {x} and {w}", product_of(x, w), right, mistakes)


@exercise("18", minutes=10, hint="Which collective makes the change? What does it send in a ring?")
def bytes_sent(bytes_sent) -> None:
    rows, columns, whole, part = "Shard(0)", "Shard(1)", "Replicate()", "Partial()"
    for ranks in (2, 3, 4, 8):
        size = 240 * ranks
        once = size * (ranks - 1) / ranks
        prices = {(rows, whole): once, (columns, whole): once, (part, columns): once}
        prices |= {(part, whole): 2 * once, (rows, columns): once / ranks, (part, part): 0}
        prices |= {(whole, rows): 0, (whole, whole): 0, (columns, columns): 0}
        for (before, after), right in prices.items():
            mistakes = {
                "counts the whole tensor, also the share that the rank has": right and size,
                "is that of all ranks together": ranks * right,
                "is that of an all-reduce": 2 * once,
                "is that of an all-gather": once,
            }
            found = bytes_sent(size, before, after, ranks)
            said = f"{size} bytes from {before} to {after} on {ranks} ranks: what each sends"
            expect(said, found, right, mistakes)


@on_ranks("18", minutes=15, hint="Which placement has each product? Look at it.")
def column_row(column_row) -> None:
    mesh = dist.init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("gpu",))
    for inner in (12, 10):
        generator = torch.Generator().manual_seed(inner)
        shapes = ((5, 4), (4, inner), (inner, 3))
        x, up, down = (torch.randn(shape, generator=generator) for shape in shapes)
        kinds = (Replicate(), Shard(1), Shard(0))
        placed = [
            distribute_tensor(t, mesh, [kind]) for t, kind in zip((x, up, down), kinds, strict=True)
        ]
        with Traffic(mesh) as traffic:
            found = column_row(*placed)
        said = f"with {inner} hidden columns, "
        expect(said + "the type of the result", type(found).__name__, "DTensor")
        expect(said + "its placement", type(found.placements[0]).__name__, "Replicate")
        right, local = (x @ up).relu() @ down, [t.to_local() for t in placed]
        mistakes = {
            "lacks the relu": x @ up @ down,
            "has the relu after the sum": (x @ up @ down).relu(),
            "is this rank's part of the sum only": (x @ local[1]).relu() @ local[2],
        }
        expect(said + "the result", found.to_local(), right, mistakes)
        sent = {kind: calls for (_, kind), calls in traffic.calls.items()}
        expect(said + "what is sent", sent, {"all-reduce": 1})
