"""The hidden cases of the exercises on memory, sharding and placements."""

import itertools

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from torchexercises import Wrong, exercise, expect, expect_alone, on_ranks, unchanged
from torchladder.traffic import Traffic

ROWS, COLUMNS, WHOLE, PART = KINDS = "Shard(0)", "Shard(1)", "Replicate()", "Partial()"


@exercise("11", 10, hint="Ask each parameter for its numel() and dtype. Who has a gradient?")
def training_bytes(training_bytes) -> None:
    half, tied = nn.Linear(10, 10, bias=False).bfloat16(), nn.Linear(10, 10, bias=False)
    frozen = nn.Sequential(nn.Linear(10, 10), nn.Linear(10, 5))
    frozen[0].requires_grad_(False)
    shared = nn.ModuleList([tied, nn.Linear(10, 10, bias=False)])
    shared[1].weight = tied.weight
    for label, net, states, right in (
        ("a frozen layer, Adam", frozen, 2, 440 + 4 * 220),
        ("bfloat16, Adam", half, 2, 800), ("batch norm, SGD", nn.BatchNorm1d(10), 0, 160),
        ("a weight that two layers share, momentum", shared, 1, 1200),
        ("float32 and bfloat16, Adam", nn.Sequential(tied, half), 2, 1600 + 800),
        ("on meta, Adam", nn.Linear(9, 10).to("meta"), 2, 4 * 400), ("a ReLU", nn.ReLU(), 2, 0),
    ):  # fmt: skip
        every = sum(p.nbytes for p in net.parameters())
        size = next(net.parameters(), torch.ones(1)).itemsize
        mistakes = {
            "counts 4 bytes for each number, whatever its dtype": right * 4 / size,
            "counts gradients and state of frozen parameters": every * (2 + states),
            "counts the buffers": right + sum(b.nbytes for b in net.buffers()),
            "leaves out the gradients": right - (right - every) / (1 + states),
        }
        expect(f"{label}: what is returned", training_bytes(net, states), right, mistakes)


@on_ranks("12", 15, hint="Equal pieces need padding; cut it off afterwards.")
def shard_and_gather(shard, gather) -> None:
    ranks = dist.get_world_size()
    shard, gather = unchanged(shard, "whole"), unchanged(gather, "piece")
    for shape, dtype in (
        ((8, 3), torch.float64), ((7, 2), torch.bfloat16), ((2, 5), torch.int64),
        ((1,), torch.float32), ((5, 2, 3), torch.float32),
    ):  # fmt: skip
        whole = torch.arange(torch.Size(shape).numel()).reshape(shape).to(dtype)
        piece = shard(whole)
        rows, label = -(-shape[0] // ranks), f"of a tensor of shape {list(shape)}"
        if piece.numel() > rows * whole[:1].numel():
            raise Wrong(f"{label}, the piece is {list(piece.shape)}, where {rows} rows would do")
        expect_alone(f"{label}, the piece", piece)
        lost = {"lacks the last rows": whole[: shape[0] // ranks * ranks]}
        expect(f"{label}, what is gathered", gather(piece, shape), whole, lost)
    if shard(nn.Parameter(torch.ones(ranks, 1))).grad_fn:
        raise Wrong("the piece is in a graph, which keeps the whole parameter alive: detach it")


@on_ranks("12", 15, hint="Which gradient does the owner need? Who knows the result?")
def zero_step(zero_step) -> None:
    rank, ranks = dist.get_rank(), dist.get_world_size()
    start = [torch.arange(6.0), torch.ones(2, 3), torch.ones(4, dtype=torch.float64), torch.ones(5)]
    parameters, owners = [nn.Parameter(value.clone()) for value in start], [3, 2, 1, 0]
    owners = [owner % ranks for owner in owners]
    mine = [p for p, owner in zip(parameters, owners, strict=True) if owner == rank]
    optimizer = torch.optim.SGD(mine, lr=0.1, momentum=0.9)
    right, speed = start, [0.0] * len(start)
    for step in (1, 2):
        gradients = [[(r + 1) * step + i for i in range(len(start))] for r in range(ranks)]
        for parameter, size in zip(parameters, gradients[rank], strict=True):
            parameter.grad = torch.full_like(parameter, size)
        sums = [sum(all_ranks) for all_ranks in zip(*gradients, strict=True)]
        speed = [0.9 * v + total / ranks for v, total in zip(speed, sums, strict=True)]
        before, right = right, [p - 0.1 * v for p, v in zip(right, speed, strict=True)]
        zero_step(parameters, owners, optimizer)
        for i, owner in enumerate(owners):
            used = {"the sum of the gradients, not the mean": sums[i]}
            used |= {"its owner's gradient only": gradients[owner][i]}
            mistakes = {f"was updated with {g}": before[i] - 0.1 * n for g, n in used.items()}
            mistakes["is as it was: its owner's new value is not here"] = before[i]
            label = f"after step {step}, parameter {i} of rank {owner}"
            expect(label, parameters[i].detach(), right[i], mistakes if step == 1 else None)
            if not (parameters[i].requires_grad and parameters[i].is_leaf):
                raise Wrong(f"{label} can no longer be trained: copy under torch.no_grad()")


@exercise("15", 15, hint="Which rows has each rank? Where do two such ranges overlap?")
def rows_to_read(rows_to_read) -> None:
    def ranges(pieces, which=None):
        kept = [[i for i in piece.tolist() if which is None or i in which] for piece in pieces]
        return [(rank, rows[0], rows[-1] + 1) for rank, rows in enumerate(kept) if rows]

    for n, before, after in ((64, 2, 4), (64, 4, 2), (10, 4, 3), (10, 3, 4), (5, 4, 1), (3, 2, 8)):
        whole = torch.arange(n)
        saved = whole.chunk(before)
        for rank, mine in enumerate((*whole.chunk(after), *[whole[:0]] * after)[:after]):
            right = ranges(saved, mine.tolist())
            mistakes = {
                "counts rows from the file's first": [
                    (file, first - saved[file][0].item(), last - saved[file][0].item())
                    for file, first, last in right
                ],
                "takes the last row in": [(file, first, last - 1) for file, first, last in right],
                "reads all of each file that is needed": [
                    part for part in ranges(saved) if part[0] in [file for file, *_ in right]
                ],
            }
            label = f"{n} rows, saved on {before} ranks: what rank {rank} of {after} reads"
            found = [tuple(part) for part in rows_to_read(n, before, after, rank)]
            expect(label, found, right, mistakes)


@exercise("20", 10, hint="What can a rank compute? Is it a piece or a summand?")
def product_of(product_of) -> None:
    free = {(ROWS, WHOLE): ROWS, (WHOLE, COLUMNS): COLUMNS, (WHOLE, WHOLE): WHOLE}
    free |= dict.fromkeys([(COLUMNS, ROWS), (COLUMNS, WHOLE), (WHOLE, ROWS)], PART)
    free |= dict.fromkeys([(PART, WHOLE), (WHOLE, PART)], PART)
    for x, w in itertools.product(KINDS, KINDS):
        right = free.get((x, w))
        mistakes = {"is None, but each rank can compute its share alone": None}
        if x == w == PART:
            mistakes = {"is Partial(), but (a + b) @ (c + d) is more than a @ c + b @ d": PART}
        elif right is None:
            mistakes = {f"is {kind}, but something must be sent for it": kind for kind in KINDS}
        elif right == PART:
            mistakes["is Replicate(), but nobody has added the summands yet"] = WHOLE
        expect(f"the product of {x} and {w}", product_of(x, w), right, mistakes)


@exercise("20", 10, hint="Which collective makes the change? What does it send in a ring?")
def bytes_sent(bytes_sent) -> None:
    changes = [c for c in itertools.product(KINDS, KINDS) if c[1] != PART or c[0] == PART]
    for ranks, (before, after) in itertools.product((2, 3, 4, 8), changes):
        size = 240 * ranks
        once = size * (ranks - 1) / ranks
        all_to_all = {before, after} == {ROWS, COLUMNS}
        if before in (after, WHOLE):
            right = 0
        elif after == WHOLE:
            right = once * (1 + (before == PART))
        else:
            right = once / ranks if all_to_all else once
        mistakes = {
            "counts the whole tensor, also the share that the rank has": right and size,
            # Of an all-to-all, they are what each rank sends in an all-gather.
            "is that of all ranks together": None if all_to_all else ranks * right,
            "is that of an all-reduce": 2 * once,
            "is that of an all-gather": once,
        }
        label = f"{size} bytes from {before} to {after} on {ranks} ranks: what each sends"
        expect(label, bytes_sent(size, before, after, ranks), right, mistakes)


@on_ranks("20", 15, hint="Which placement has each product? Look at it.")
def column_row(column_row) -> None:
    mesh = dist.init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("gpu",))
    for inner in (12, 10):
        torch.manual_seed(inner)
        x, up, down = torch.randn(5, 4), torch.randn(4, inner), torch.randn(inner, 3)
        kinds = {x: Replicate(), up: Shard(1), down: Shard(0)}
        placed = [distribute_tensor(tensor, mesh, [kind]) for tensor, kind in kinds.items()]
        with Traffic(mesh) as traffic:
            found = column_row(*placed)
        label = f"with {inner} hidden columns, "
        expect(label + "the type of the result", type(found).__name__, "DTensor")
        expect(label + "its placement", type(found.placements[0]).__name__, "Replicate")
        _, my_up, my_down = (tensor.to_local() for tensor in placed)
        mistakes = {
            "lacks the relu": x @ up @ down,
            "has the relu after the sum": (x @ up @ down).relu(),
            "is this rank's part of the sum only": (x @ my_up).relu() @ my_down,
        }
        expect(label + "the result", found.to_local(), (x @ up).relu() @ down, mistakes)
        sent = {kind: calls for (_, kind), calls in traffic.calls.items()}
        expect(label + "what is sent", sent, {"all-reduce": 1})
