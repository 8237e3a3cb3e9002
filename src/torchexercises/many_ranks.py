"""The hidden cases of the exercises on several ranks: chapters 08 to 10."""

import torch
import torch.distributed as dist
from torch import nn

from torchexercises import Wrong, exercise, expect, on_ranks


@exercise(
    "09",
    minutes=15,
    hint="A torch.Generator of its own, seeded by seed + epoch; then [rank::ranks].",
)
def indices_of(indices_of) -> None:
    for n, ranks in ((10, 2), (10, 4), (7, 3), (3, 4), (2, 5)):
        said = f"{n} samples on {ranks} ranks"
        for epoch in (7, 1, 0):
            parts = []
            for rank in range(ranks):
                torch.manual_seed(rank)  # as programs do that want other noise on each rank
                parts.append(list(map(int, indices_of(rank, ranks, n, epoch, 3))))
            lengths = {len(part) for part in parts}
            if len(lengths) > 1:
                raise Wrong(f"{said}: the ranks have {sorted(lengths)} samples, so one would wait")
            seen = [i for part in parts for i in part]
            if set(seen) != set(range(n)):
                at_random = "the ranks draw different orders, or samples are left out"
                raise Wrong(f"{said}: together they see {sorted(set(seen))}: {at_random}")
            expect(f"{said}: the samples of each", lengths.pop(), -(-n // ranks))
        numbers = torch.manual_seed(99).get_state()
        expect("the same call once more", list(map(int, indices_of(0, ranks, n, 0, 3))), parts[0])
        if not torch.equal(torch.get_rng_state(), numbers):
            raise Wrong("it changes which random numbers the program draws afterwards")
    first, second, other = (list(indices_of(0, 2, 100, *of)) for of in ((0, 3), (1, 3), (0, 4)))
    if first == sorted(first):
        raise Wrong("a rank has its samples in ascending order: the order is not shuffled")
    if first == second:
        raise Wrong("another epoch has the same order")
    if set(first) == set(second):
        raise Wrong("a rank has the same samples in each epoch: shuffle all, then deal them out")
    if first == other:
        raise Wrong("another seed has the same order")


@on_ranks("09", minutes=5, hint="Add up both over the ranks, and divide once.")
def accuracy_over_ranks(accuracy_over_ranks) -> None:
    rank, ranks = dist.get_rank(), dist.get_world_size()
    for rights, counts in (([2, 1, 1, 2], [8, 5, 4, 2]), ([2, 0, 1, 2], [5, 0, 1, 7])):
        right, count = rights[:ranks], counts[:ranks]
        means = [r / max(c, 1) for r, c in zip(right, count, strict=True)]
        mistakes = {
            "is the mean of the ranks' accuracies": sum(means) / ranks,
            "is this rank's": means[rank],
            "is the sum of the ranks' accuracies": sum(means),
        }
        found = accuracy_over_ranks(torch.tensor(right[rank]), count[rank])
        said = f"with {right} right of {count}, the accuracy"
        expect(said, float(found), sum(right) / sum(count), mistakes)


@on_ranks("09", minutes=5, hint="All ranks call the same collective, also who goes on.")
def all_stop(all_stop) -> None:
    rank, ranks = dist.get_rank(), dist.get_world_size()
    every = [0, 1, 0, 0], [0, 0, 0, 0], [1, 0, 0, 0], [1, 1, 1, 1], [1, 1, 0, 0], [0, 0, 0, 1]
    for wishes in every:
        wish, right = bool(wishes[rank]), any(wishes[:ranks])
        found = bool(all_stop(wish))
        mistakes = {
            "is rank 0's wish": bool(wishes[0]),
            "is this rank's own wish": wish,
            "is True only if all want it": all(wishes[:ranks]),
            "is True only if most want it": sum(wishes[:ranks]) > ranks / 2,
            "is True only if one alone wants it": sum(wishes[:ranks]) == 1,
        }
        expect(f"with the wishes {wishes[:ranks]}, what is returned", found, right, mistakes)


@on_ranks(
    "10", minutes=10, hint="dist.all_reduce sums in place. Which parameters have no gradient?"
)
def average_gradients(average_gradients) -> None:
    rank, ranks = dist.get_rank(), dist.get_world_size()
    net = nn.ModuleDict({name: nn.Linear(2, 2) for name in ("first", "frozen", "unused", "last")})
    net["last_block"] = nn.Sequential(nn.Linear(3, 2))
    net["last_half"] = nn.Linear(2, 1, dtype=torch.bfloat16)
    net["frozen"].requires_grad_(False)
    net["last"].bias = net["first"].bias  # tied
    own = {}
    for i, (name, parameter) in enumerate(net.named_parameters()):
        if name.startswith(("first", "last")):
            numbers = torch.arange(1, parameter.numel() + 1).reshape(parameter.shape)
            own[name] = numbers.to(parameter.dtype) + i
            parameter.grad = own[name].movedim(0, -1).contiguous().movedim(-1, 0) * (rank + 1) ** 2
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


@on_ranks("10", minutes=10, hint="Buffers count, too. dist.broadcast(tensor, 0) is in place.")
def broadcast_model(broadcast_model) -> None:
    rank = dist.get_rank()

    def model(seed):
        torch.manual_seed(seed)
        net = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3), nn.Linear(3, 3))
        net[2].weight = net[0].weight  # tied
        net[2].bias.requires_grad_(False)
        net.get_buffer("1.running_mean").fill_(seed)
        net.get_buffer("1.num_batches_tracked").fill_(seed + 2**40 + 1)
        net[1].register_buffer("mask", torch.tensor([seed > 0, True]), persistent=False)
        net.append(nn.Linear(2, 1, dtype=torch.bfloat16))
        return net

    def all_of(net):
        return dict([*net.named_parameters(remove_duplicate=False), *net.named_buffers()])

    net, first, own = model(rank), all_of(model(0)), all_of(model(rank))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    broadcast_model(net)
    for name, found in all_of(net).items():
        mistakes = {"is this rank's own, not rank 0's": own[name]}
        expect(name, found.detach(), first[name].detach(), mistakes)
    if optimizer.param_groups[0]["params"][0] is not net[0].weight:
        raise Wrong("the parameters are new tensors, which the optimizer does not know")
    if net[0].weight is not net[2].weight:
        raise Wrong("two layers that shared their weight share it no longer")
    for name, found in all_of(net).items():
        if found.requires_grad != first[name].requires_grad:
            raise Wrong(f"{name} is {'trained' * found.requires_grad or 'frozen'} now")


@exercise(
    "10", minutes=10, hint="DDP goes from the last parameter to the first. A full bucket is closed."
)
def buckets(buckets) -> None:
    for sizes, cap, right in (
        ([4, 4, 4, 4], 8, [[3, 2], [1, 0]]),
        ([4, 4, 4], 8, [[2, 1], [0]]),
        ([3, 3, 3, 3], 8, [[3, 2, 1], [0]]),
        ([2, 2, 20, 2, 2], 8, [[4, 3, 2], [1, 0]]),
        ([20], 8, [[0]]),
        ([2, 20], 8, [[1], [0]]),
        ([4, 20, 2], 8, [[2, 1], [0]]),
        ([0, 4, 4], 8, [[2, 1], [0]]),
        ([2**20] * 4, 2**21, [[3, 2], [1, 0]]),
        ([], 8, []),
    ):
        given = list(sizes)
        found = [list(part) for part in buckets(given, cap)]
        expect("the list of sizes that you were given", given, sizes)
        n = len(sizes)
        mistakes = {
            "begins with the first parameter, whose gradient comes last": [
                [n - 1 - i for i in part] for part in right
            ]
            if sizes == sizes[::-1]
            else None,
            "has one bucket for each parameter": [[i] for i in reversed(range(n))],
            "lacks the last bucket": right[:-1],
            "has all in one bucket": n > 1 and [list(reversed(range(n)))],
            # Each of these two is right in one of the first cases and wrong in the other.
            "fills a bucket further that has reached the cap": [[3, 2, 1], [0]],
            "closes a bucket before it has reached the cap": [[3, 2], [1, 0]],
        }
        expect(f"for sizes {sizes} and a cap of {cap}, what is returned", found, right, mistakes)


@on_ranks("10", minutes=25, hint="ranks - 1 rounds add, ranks - 1 pass on. First isend, then recv.")
def ring_all_reduce(ring_all_reduce) -> None:
    rank, ranks = dist.get_rank(), dist.get_world_size()
    sent, send = [], dist.ProcessGroup.send  # dist.send and isend call it

    def counted(self, tensors, dstRank, tag):
        sent.append(tensors[0].numel())
        return send(self, tensors, dstRank, tag)

    dist.ProcessGroup.send = counted
    for name in ("all_reduce", "all_gather", "reduce_scatter", "broadcast", "reduce", "gather"):
        setattr(dist, name, lambda *args, n=name, **kwargs: _not_allowed(n))
    ints = [(n, torch.int32, 0) for n in (7, 1, 4, 13)]
    for n, dtype, more in ((12, torch.float32, 0.5), *ints, (6, torch.int64, 2**40)):
        x = torch.arange(n, dtype=dtype) + 10 * rank + more
        own, sent[:] = x.clone(), []
        found = ring_all_reduce(x)
        right = (torch.arange(n, dtype=dtype) + more) * ranks + 10 * sum(range(ranks))
        mistakes = {"is this rank's own": own, "is the average": right / ranks}
        expect(f"the sum of {n} numbers", x if found is None else found, right, mistakes)
        if n == 12 and not sent:
            raise Wrong("nothing was sent by send or isend: a collective did it for you")
        most = 2 * (ranks - 1) * -(-n // ranks)
        if sum(sent) > most:
            raise Wrong(f"this rank sent {sum(sent)} of {n} numbers; a ring sends at most {most}")


def _not_allowed(name: str) -> None:
    raise Wrong(f"dist.{name} does it for you: use send and recv, or isend and irecv")
