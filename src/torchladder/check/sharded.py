"""The hidden cases of the exercises on memory and sharding: chapters 11 to 14."""

import torch
import torch.distributed as dist
from torch import nn

from torchladder.check import exercise, expect


@exercise(
    "11", minutes=10, hint="Ask each parameter for its numel() and dtype. Who has a gradient?"
)
def training_bytes(training_bytes) -> None:
    plain, half = nn.Linear(10, 10, bias=False), nn.Linear(10, 10, bias=False).bfloat16()
    frozen, tied = nn.Sequential(nn.Linear(10, 10), nn.Linear(10, 10)), nn.ModuleList()
    frozen[0].requires_grad_(False)
    tied.extend([nn.Linear(10, 10, bias=False), nn.Linear(10, 10, bias=False)])
    tied[1].weight = tied[0].weight
    for said, net, states, right in (
        ("float32, SGD", plain, 0, 800),
        ("float32, Adam", plain, 2, 1600),
        ("bfloat16, Adam", half, 2, 800),
        ("a frozen layer, Adam", frozen, 2, 440 + 4 * 440),
        ("a weight that two layers share, momentum", tied, 1, 1200),
    ):
        count = sum(p.numel() for p in net.parameters())
        mistakes = {
            "counts 4 bytes for each number, whatever its dtype": 4 * count * (2 + states),
            "counts gradients and state of frozen parameters": 4 * count * (2 + states),
            "leaves out the gradients": right * (1 + states) / (2 + states),
            "leaves out the parameters themselves": right * (1 + states) / (2 + states),
        }
        expect(f"{said}: what is returned", training_bytes(net, states), right, mistakes)


@exercise(
    "12", minutes=15, ranks=(2, 3, 4), hint="Equal pieces need padding; cut it off afterwards."
)
def shard_and_gather(shard, gather) -> None:
    ranks = dist.get_world_size()
    for shape in ((8, 3), (7, 2), (2, 5), (1,)):
        whole = torch.arange(float(torch.Size(shape).numel())).reshape(shape)
        kept = whole.clone()
        piece = shard(whole)
        most = -(-shape[0] // ranks) * whole[:1].numel()
        said = f"of a tensor of shape {list(shape)}"
        too_much = piece.numel() > most or piece.untyped_storage().nbytes() > 4 * most
        expect(f"{said}, whether the piece keeps more than {most} numbers alive", too_much, False)
        lost = {"lacks the last rows": kept[: shape[0] // ranks * ranks]}
        expect(f"{said}, what is gathered", gather(piece, shape), kept, lost)
        expect(f"{said}, the tensor that was given", whole, kept)


@exercise("13", minutes=10, hint="divmod(rank, columns) is the row and the column.")
def groups_of(groups_of) -> None:
    for rows, columns in ((2, 4), (4, 2), (3, 1), (1, 3)):
        mesh = torch.arange(rows * columns).reshape(rows, columns)
        for rank in range(rows * columns):
            row, column = divmod(rank, columns)
            right = [mesh[row].tolist(), mesh[:, column].tolist()]
            by_rows = torch.arange(rows * columns).reshape(columns, rows)
            r, c = divmod(rank, rows)
            mistakes = {
                "are in the wrong order: the row comes first": right[::-1],
                "are those of a mesh whose first column has the ranks 0, 1, 2": [
                    by_rows[:, c].tolist(),
                    by_rows[r].tolist(),
                ],
                "lack the rank itself": [[i for i in part if i != rank] for part in right],
            }
            found = [sorted(part) for part in groups_of(rank, rows, columns)]
            expect(f"the groups of rank {rank} in {rows} x {columns}", found, right, mistakes)


@exercise("14", minutes=5, hint="One step takes batch x ranks x parts samples.")
def steps_and_rate(steps_and_rate) -> None:
    for samples, batch, ranks, parts, last in (
        (1000, 10, 1, 1, False), (1000, 10, 4, 5, True), (1003, 10, 4, 2, False),
        (1003, 10, 4, 2, True), (7, 4, 2, 1, False),
    ):  # fmt: skip
        step = batch * ranks * parts
        right = [samples // step if last else -(-samples // step), 0.1 * step / batch]
        other = -(-samples // step) if last else samples // step
        mistakes = {
            "forgets the accumulation": [
                samples // (batch * ranks) if last else -(-samples // (batch * ranks)),
                0.1 * ranks,
            ],
            "counts a last, smaller step wrongly": [other, right[1]],
            "has the learning rate of one batch": [right[0], 0.1],
        }
        said = f"{samples} samples, {batch} x {ranks} ranks x {parts} parts, drop_last={last}: "
        found = steps_and_rate(samples, batch, ranks, parts, drop_last=last, rate=0.1)
        expect(said + "what is returned", found, right, mistakes)
