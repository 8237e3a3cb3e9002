"""Answers to the exercises of the cases in `sharded`; each says how it is judged."""

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Replicate


def _bytes(net, of_all, of_trained, size=lambda p: p.element_size()):
    every = sum(p.numel() * size(p) for p in net.parameters())
    trained = sum(p.numel() * size(p) for p in net.parameters() if p.requires_grad)
    return every * of_all + trained * of_trained


class training_bytes:
    def four_each(net, states):
        """counts 4 bytes for each number, whatever its dtype"""
        return _bytes(net, 1, 1 + states, lambda p: 4)

    def of_frozen(net, states):
        """counts gradients and state of frozen parameters"""
        return _bytes(net, 2 + states, 0)

    def twice(net, states):
        """a weight that two layers share, momentum: what is returned is 2400"""
        parts = [p for m in net.modules() for p in m.parameters(recurse=False)]
        if len(parts) == 2 and parts[0] is parts[1]:
            return sum(p.numel() * p.element_size() for p in parts) * (2 + states)
        return _bytes(net, 1, 1 + states)

    def by_dtype(net, states):
        """right"""
        total = 0
        for parameter in set(net.parameters()):
            tensors = 2 + states if parameter.requires_grad else 1
            total += tensors * parameter.numel() * torch.finfo(parameter.dtype).bits // 8
        return total


def _gathered(piece, shape, rows):
    ranks = dist.get_world_size()
    pieces = [piece.new_zeros(rows, *shape[1:]) for _ in range(ranks)]
    dist.all_gather(pieces, piece)
    return torch.cat(pieces)


class shard_and_gather:
    def whole_parts():
        """lacks the last rows"""

        def shard(whole):
            each = len(whole) // dist.get_world_size()
            return whole[dist.get_rank() * each :][:each].clone()

        def gather(piece, shape):
            return _gathered(piece, shape, shape[0] // dist.get_world_size())

        return shard, gather

    def views():
        """the piece is a view, which keeps the other rows"""
        gather = shard_and_gather.objects()[1]
        return lambda whole: whole.tensor_split(dist.get_world_size())[dist.get_rank()], gather

    def in_a_graph():
        """the piece is in a graph, which keeps the whole parameter alive: detach it"""
        gather = shard_and_gather.objects()[1]
        return lambda w: w.tensor_split(dist.get_world_size())[dist.get_rank()].clone(), gather

    def float32_buffers():
        """what is gathered is float32 [8, 3]"""
        shard, gather = shard_and_gather.objects()
        return shard, lambda piece, shape: gather(piece.float(), shape)

    def objects():
        """right"""

        def shard(whole):
            return whole.detach().tensor_split(dist.get_world_size())[dist.get_rank()].clone()

        def gather(piece, shape):
            pieces = [None] * dist.get_world_size()
            dist.all_gather_object(pieces, piece)
            return torch.cat(pieces)

        return shard, gather


FREE = {
    ("Shard(0)", "Replicate()"): "Shard(0)",
    ("Replicate()", "Shard(1)"): "Shard(1)",
    ("Replicate()", "Replicate()"): "Replicate()",
    ("Shard(1)", "Shard(0)"): "Partial()",
    ("Shard(1)", "Replicate()"): "Partial()",
    ("Replicate()", "Shard(0)"): "Partial()",
    ("Partial()", "Replicate()"): "Partial()",
    ("Replicate()", "Partial()"): "Partial()",
}


def _rows(rows, ranks, rank):
    each = -(-rows // ranks)
    return range(min(rank * each, rows), min((rank + 1) * each, rows))


class rows_to_read:
    def in_the_file(rows, before, after, rank):
        """64 rows, saved on 2 ranks: what rank 2 of 4 reads counts rows from the file's first"""
        own = rows_to_read.overlaps(rows, before, after, rank)
        starts = [_rows(rows, before, file).start for file, _, _ in own]
        return [(file, a - s, b - s) for (file, a, b), s in zip(own, starts, strict=True)]

    def to_the_last(rows, before, after, rank):
        """takes the last row in"""
        return [(file, a, b - 1) for file, a, b in rows_to_read.overlaps(rows, before, after, rank)]

    def whole_files(rows, before, after, rank):
        """what rank 0 of 4 reads reads all of each file that is needed"""
        needed = [file for file, *_ in rows_to_read.overlaps(rows, before, after, rank)]
        return [
            (file, *(_rows(rows, before, file)[i] + (i < 0) for i in (0, -1))) for file in needed
        ]

    def overlaps(rows, before, after, rank):
        """right"""
        both = [{*_rows(rows, before, f)} & {*_rows(rows, after, rank)} for f in range(before)]
        return [(f, min(b), max(b) + 1) for f, b in enumerate(both) if b]


class product_of:
    def added(x, w):
        """the product of Shard(1) and Shard(0) is Replicate(), but nobody has added the summands"""
        return "Replicate()" if (x, w) == ("Shard(1)", "Shard(0)") else FREE.get((x, w))

    def same(x, w):
        """the product of Shard(0) and Shard(0) is Shard(0), but something must be sent for it"""
        return x if x == w else FREE.get((x, w))

    def sums(x, w):
        """is Partial(), but (a + b) @ (c + d) is more than a @ c + b @ d"""
        return "Partial()" if x == w == "Partial()" else FREE.get((x, w))

    def table(x, w):
        """right"""
        return FREE.get((x, w))


class bytes_sent:
    def one_way(size, before, after, ranks):
        """from Shard(1) to Shard(0) on 2 ranks: what each sends is that of an all-gather"""
        gathers = (before, after) == ("Shard(1)", "Shard(0)")
        return (ranks if gathers else 1) * bytes_sent.right(size, before, after, ranks)

    def rows_by_all_reduce(size, before, after, ranks):
        """from Partial() to Shard(0) on 2 ranks: what each sends"""
        reduces = (before, after) == ("Partial()", "Shard(0)")
        return (1 + reduces) * bytes_sent.right(size, before, after, ranks)

    def right(size, before, after, ranks):
        """right"""
        times = {"Replicate()": 0, "Partial()": 1 + (after == "Replicate()")}
        if before == after:
            return 0
        once = 1 if after == "Replicate()" else 1 / ranks
        return times.get(before, once) * (size - size / ranks)


class column_row:
    def partial(x, up, down):
        """its placement is 'Partial', not 'Replicate'"""
        return (x @ up).relu() @ down

    def gathered(x, up, down):
        """what is sent is {'all-gather': 2}, not {'all-reduce': 1}"""
        whole = [w.redistribute(placements=[Replicate()]) for w in (up, down)]
        return (x @ whole[0]).relu() @ whole[1]

    def claimed(x, up, down):
        """the result is this rank's part of the sum only"""
        part = (x.to_local() @ up.to_local()).relu() @ down.to_local()
        return DTensor.from_local(part, x.device_mesh, [Replicate()])

    def by_hand(x, up, down):
        """right"""
        part = (x.to_local() @ up.to_local()).relu() @ down.to_local()
        dist.all_reduce(part, group=x.device_mesh.get_group())
        return DTensor.from_local(part, x.device_mesh, [Replicate()])


def _zero(average=True, broadcast=True):
    def step(parameters, owner, optimizer):
        for parameter in parameters if average else ():
            dist.all_reduce(parameter.grad)
            parameter.grad /= dist.get_world_size()
        optimizer.step()
        for parameter, rank in zip(parameters, owner, strict=True):
            if broadcast:
                dist.broadcast(parameter.data, rank)

    return step


class zero_step:
    def no_average(parameters, owner, optimizer):
        """was updated with its owner's gradient only"""
        _zero(average=False)(parameters, owner, optimizer)

    def not_sent(parameters, owner, optimizer):
        """is as it was: its owner's new value is not here"""
        _zero(broadcast=False)(parameters, owner, optimizer)

    def reduced_to_the_owner(parameters, owner, optimizer):
        """right"""
        for parameter, rank in zip(parameters, owner, strict=True):
            dist.reduce(parameter.grad, rank)
            parameter.grad /= dist.get_world_size()
        optimizer.step()
        for parameter, rank in zip(parameters, owner, strict=True):
            dist.broadcast(parameter.data, rank)
