"""The hidden cases of the exercises on several ranks: chapters 09 and 10."""

import itertools
from collections.abc import Iterator
from contextlib import contextmanager
from unittest import mock

import torch
import torch.distributed as dist
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from torchexercises import Wrong, exercise, expect, on_ranks, tensors_in, unchanged
from torchexercises.as_with_nccl import as_with_nccl


@contextmanager
def sets_differ(net: nn.Module) -> Iterator[None]:
    """Let ranks go through a set of the net's tensors in different orders, as they do by chance.

    A set's order is that of the tensors' addresses.
    """
    tensors = [*net.parameters(), *net.buffers()]
    if dist.get_rank():
        tensors.reverse()
    places = {id(tensor): i for i, tensor in enumerate(tensors)}
    with mock.patch.object(torch.Tensor, "__hash__", lambda t: places.get(id(t), id(t))):
        yield


@exercise("09", 15, hint="A torch.Generator of its own, by seed + epoch; [rank::ranks].")
def indices_of(indices_of) -> None:
    def drawn(rank, ranks, n, epoch, seed):
        torch.manual_seed(rank)  # as programs do that want other noise on each rank
        before = torch.get_rng_state()
        indices = [int(i) for i in indices_of(rank, ranks, n, epoch, seed)]
        if not torch.equal(torch.get_rng_state(), before):
            raise Wrong("it changes which random numbers the program draws afterwards")
        return indices

    for (n, ranks), epoch in itertools.product(
        ((10, 2), (10, 4), (7, 3), (3, 4), (2, 5)), (7, 1, 0)
    ):
        label = f"{n} samples on {ranks} ranks"
        parts = [drawn(rank, ranks, n, epoch, 3) for rank in range(ranks)]
        lengths, seen = {len(part) for part in parts}, {i for part in parts for i in part}
        if len(lengths) > 1:
            raise Wrong(f"{label}: the ranks have {sorted(lengths)} samples, so one would wait")
        if seen != set(range(n)):
            at_random = "the ranks draw different orders, or samples are left out"
            raise Wrong(f"{label}: together they see {sorted(seen)}: {at_random}")
        expect(f"{label}: the samples of each", lengths.pop(), -(-n // ranks))
        expect("the same call once more", drawn(0, ranks, n, epoch, 3), parts[0])
    first = drawn(0, 2, 100, 0, 3)
    if first == sorted(first):
        raise Wrong("a rank has its samples in ascending order: the order is not shuffled")
    for what, other in (("epoch", drawn(0, 2, 100, 1, 3)), ("seed", drawn(0, 2, 100, 0, 4))):
        if first == other:
            raise Wrong(f"another {what} has the same order")
        if set(first) == set(other):
            raise Wrong("a rank always has the same samples: shuffle all, then deal them out")


@on_ranks("09", 5, hint="Add up both over the ranks, and divide once.")
def accuracy_over_ranks(accuracy_over_ranks) -> None:
    rank, ranks = dist.get_rank(), dist.get_world_size()
    accuracy_over_ranks = unchanged(accuracy_over_ranks, "right count")
    for rights, counts in (([2, 1, 1, 2], [8, 5, 4, 2]), ([2, 0, 1, 2], [5, 0, 1, 7])):
        right, count = rights[:ranks], counts[:ranks]
        means = [r / max(c, 1) for r, c in zip(right, count, strict=True)]
        mistakes = {
            "is the mean of the ranks' accuracies": sum(means) / ranks,
            "is this rank's alone: the others' are not in it": means[rank],
            "is the sum of the ranks' accuracies": sum(means),
        }
        with as_with_nccl() as device:
            found = accuracy_over_ranks(torch.tensor(right[rank], device=device), count[rank])
        label = f"with {right} right of {count}, the accuracy"
        expect(label, found, sum(right) / sum(count), mistakes)


@on_ranks("09", 5, hint="All ranks call the same collective, also who goes on.")
def all_stop(all_stop) -> None:
    rank, ranks = dist.get_rank(), dist.get_world_size()
    every = [0, 1, 0, 0], [0, 0, 0, 0], [1, 0, 0, 0], [1, 1, 1, 1], [0, 0, 1, 0], [0, 0, 0, 1]
    every = [wishes[:ranks] for wishes in every]
    with as_with_nccl() as device:
        found = [bool(all_stop(bool(wishes[rank]), device)) for wishes in every]
    mistakes = {  # of all cases together: in one alone, several give the same
        "is this rank's own wish": [wishes[rank] for wishes in every],
        "is rank 0's wish": [wishes[0] for wishes in every],
        "is True only if most want it": [sum(wishes) > ranks / 2 for wishes in every],
        "is True only if all want it": [all(wishes) for wishes in every],
    }
    expect(f"with the wishes {every}, what is returned", found, [*map(any, every)], mistakes)


@on_ranks("10", 10, hint="dist.all_reduce sums in place. Which parameters have no gradient?")
def average_gradients(average_gradients) -> None:
    rank, ranks = dist.get_rank(), dist.get_world_size()
    net = nn.ModuleDict({name: nn.Linear(2, 2) for name in ("first", "frozen", "unused", "last")})
    net["last_half"] = nn.Linear(2, 1, dtype=torch.bfloat16)
    net["frozen"].requires_grad_(False)
    net["last"].bias = net["first"].bias  # tied
    of_rank_0 = {}
    for i, (name, parameter) in enumerate(net.named_parameters()):
        if name.startswith(("first", "last")):
            numbers = torch.arange(1, parameter.numel() + 1).reshape(parameter.shape)
            of_rank_0[name] = numbers.to(parameter.dtype) + i
            parameter.grad = of_rank_0[name] * (rank + 1) ** 2
    with sets_differ(net):
        average_gradients(net)
    total = sum((r + 1) ** 2 for r in range(ranks))
    for name, parameter in net.named_parameters():
        what = f"the gradient of {name}"
        if (grad := of_rank_0.get(name)) is None:
            expect(what, parameter.grad, None)
            continue
        mistakes = {
            "is summed, not divided by the number of ranks": grad * total,
            "is your own: the others' are not in it": grad * (rank + 1) ** 2,
            "is the sum divided by 2": grad * total / 2,
        }
        expect(what, parameter.grad, grad * total / ranks, mistakes)


@on_ranks("10", 10, hint="Buffers count, too. dist.broadcast(tensor, 0) is in place.")
def broadcast_model(broadcast_model) -> None:
    def model(seed):
        torch.manual_seed(seed)
        net = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3), nn.Linear(3, 3))
        net[2].weight = net[0].weight  # tied
        net[2].bias.requires_grad_(False)
        net.get_buffer("1.running_mean").fill_(seed)
        net.get_buffer("1.num_batches_tracked").fill_(seed + 2**40 + 1)
        net[1].register_buffer("mask", torch.tensor([seed > 0, True]), persistent=False)
        return net.append(nn.Linear(2, 1, dtype=torch.bfloat16))

    def all_of(net):
        return dict([*net.named_parameters(remove_duplicate=False), *net.named_buffers()])

    rank = dist.get_rank()
    net, first, mine = model(rank), all_of(model(0)), all_of(model(rank))
    with sets_differ(net):
        broadcast_model(net)
    for name, found in all_of(net).items():
        expect(name, found, first[name], {"is this rank's own, not rank 0's": mine[name]})


@exercise("10", 10, hint="DDP begins with the last parameter. A full bucket is closed.")
def buckets(buckets) -> None:
    buckets = unchanged(buckets, "sizes")
    for sizes, cap, right in (
        ([4, 4, 4, 4], 8, [[3, 2], [1, 0]]), ([3, 3, 3, 3], 8, [[3, 2, 1], [0]]),
        ([2, 2, 20, 2, 2], 8, [[4, 3, 2], [1, 0]]), ([2, 20], 8, [[1], [0]]), ([], 8, []),
        ([4, 20, 2], 8, [[2, 1], [0]]), ([2**20] * 4, 2**21, [[3, 2], [1, 0]]),
        ([0, 4, 4], 8, [[2, 1], [0]]),
    ):  # fmt: skip
        n = len(sizes)
        mistakes = {
            "begins with the first parameter, whose gradient comes last": (
                [[n - 1 - i for i in part] for part in right]  # of sizes that read both ways
            ),
            "lacks the last bucket": right[:-1],
            # Each of these two is right in one of the first cases and wrong in the other.
            "fills a bucket further that has reached the cap": [[3, 2, 1], [0]],
            "closes a bucket before it has reached the cap": [[3, 2], [1, 0]],
        }
        found = [list(part) for part in buckets(sizes, cap)]
        expect(f"for sizes {sizes} and a cap of {cap}, what is returned", found, right, mistakes)


class _Sends(TorchDispatchMode):
    """Notes how many numbers are sent."""

    def __init__(self) -> None:
        super().__init__()
        self.sent = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if "c10d" in func.namespace and func._opname == "send":
            self.sent += [tensor.numel() for tensor in tensors_in(args)]
        return func(*args, **(kwargs or {}))


@on_ranks("10", 25, hint="ranks - 1 rounds add, ranks - 1 pass on. First isend, then recv.")
def ring_all_reduce(ring_all_reduce) -> None:
    rank, ranks = dist.get_rank(), dist.get_world_size()
    ints = [(n, torch.int32, 0) for n in (7, 1, 4, 13)]
    for n, dtype, more in ((12, torch.float32, 0.5), *ints, (6, torch.int64, 2**40)):
        x = torch.arange(n, dtype=dtype) + 10 * rank + more
        mine = x.clone()
        with _Sends() as watched:
            found = ring_all_reduce(x)
        right = (torch.arange(n, dtype=dtype) + more) * ranks + 10 * sum(range(ranks))
        mistakes = {"is this rank's own": mine, "is the average": right / ranks}
        expect(f"the sum of {n} numbers", x if found is None else found, right, mistakes)
        sent, most = sum(watched.sent), 2 * (ranks - 1) * -(-n // ranks)
        if sent > most:
            raise Wrong(f"this rank sent {sent} of {n} numbers; a ring sends at most {most}")
