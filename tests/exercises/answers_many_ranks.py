"""Answers to the exercises on several ranks; each says how it is judged."""

import torch
import torch.distributed as dist


class average_gradients:
    def summed(net):
        """is summed, not divided by the number of ranks"""
        for parameter in net.parameters():
            if parameter.grad is not None:
                dist.all_reduce(parameter.grad)

    def by_two(net):
        """is the sum divided by 2 (Right on 2 ranks.)"""
        for parameter in net.parameters():
            if parameter.grad is not None:
                dist.all_reduce(parameter.grad)
                parameter.grad /= 2

    def without_a_gradient(net):
        """'NoneType' object has no attribute"""
        for parameter in net.parameters():
            dist.all_reduce(parameter.grad.data)
            parameter.grad /= dist.get_world_size()

    def in_one_message(net):
        """right"""
        grads = [p.grad for p in net.parameters() if p.grad is not None]
        for grad in grads:
            parts = [grad.clone() for _ in range(dist.get_world_size())]
            dist.all_gather(parts, grad)
            grad.copy_(sum(parts) / len(parts))


def _order(n, seed):
    return torch.randperm(n, generator=torch.Generator().manual_seed(seed)).tolist()


class indices_of:
    def uneven(rank, ranks, n, epoch, seed):
        """10 samples on 4 ranks: the ranks have [2, 3] samples, so one would wait"""
        return _order(n, seed + epoch)[rank::ranks]

    def one_order(rank, ranks, n, epoch, seed):
        """another epoch has the same order"""
        order = _order(n, seed)
        return (order + order * ranks)[: -(-n // ranks) * ranks][rank::ranks]

    def own_order(rank, ranks, n, epoch, seed):
        """the ranks draw different orders, or samples are left out"""
        order = _order(n, seed + epoch + 100 * rank)
        return (order + order * ranks)[: -(-n // ranks) * ranks][rank::ranks]

    def in_blocks(rank, ranks, n, epoch, seed):
        """right"""
        order, each = _order(n, seed + epoch), -(-n // ranks)
        return [order[i % n] for i in range(rank * each, rank * each + each)]


class accuracy_over_ranks:
    def on_rank_0(right, count):
        """rank 1 of 2: with [2, 1] right of [8, 5], the accuracy is this rank's alone:"""
        dist.reduce(both := torch.stack([right, torch.full_like(right, count)]), 0)
        return both[0] / both[1]

    def in_place(right, count):
        """`right`, which was given, afterwards is"""
        dist.all_reduce(count := torch.tensor(count, device=right.device))
        dist.all_reduce(right)
        return right / count

    def from_the_cpu(right, count):
        """dist.all_reduce gets a tensor on the CPU, and NCCL sends from GPUs alone"""
        both = torch.tensor([right.item(), count])
        dist.all_reduce(both)
        return both[0] / both[1]

    def mean_of_means(right, count):
        """is the mean of the ranks' accuracies"""
        accuracy = right / max(count, 1)
        dist.all_reduce(accuracy)
        return accuracy / dist.get_world_size()

    def objects(right, count):
        """right"""
        pairs = [None] * dist.get_world_size()
        dist.all_gather_object(pairs, (right.item(), count))
        return sum(r for r, _ in pairs) / sum(c for _, c in pairs)


class all_stop:
    def of_rank_0(wish, device):
        """is rank 0's wish"""
        dist.broadcast(wish := torch.tensor(float(wish), device=device), 0)
        return wish.item() > 0

    def moved_there(wish, device):
        """right"""
        wishes = [torch.zeros(1).cuda() for _ in range(dist.get_world_size())]
        dist.all_gather(wishes, torch.full_like(wishes[0], wish))
        return max(wishes).item() > 0

    def who_wants(wish, device):
        """is this rank's own wish"""
        if wish:
            return True
        wish = torch.tensor(0.0, device=device)
        dist.all_reduce(wish, dist.ReduceOp.MAX)
        return wish.item() > 0


class broadcast_model:
    def in_a_set(net):
        """a rank that it exchanges with has returned, or sends tensors of other sizes"""
        for tensor in {*net.parameters(), *net.buffers()}:
            dist.broadcast(tensor.detach(), 0)

    def averaged(net):
        """result type Float can't be cast to the desired output type Long"""
        for tensor in (*net.parameters(), *net.buffers()):
            dist.all_reduce(tensor.detach())
            tensor.detach().div_(dist.get_world_size())

    def all_at_once(net):
        """right"""
        own = [tensor.detach() for tensor in (*net.parameters(), *net.buffers())]
        dist.broadcast_object_list(first := [own])
        for tensor, value in zip(own, first[0], strict=True):
            tensor.copy_(value)

    def parameters(net):
        """1.running_mean is this rank's own, not rank 0's"""
        for parameter in net.parameters():
            dist.broadcast(parameter.data, 0)


class buckets:
    def forwards(sizes, cap):
        """begins with the first parameter, whose gradient comes last"""
        return [[len(sizes) - 1 - i for i in part] for part in buckets.by_sum(sizes[::-1], cap)]

    def never_over(sizes, cap):
        """for sizes [3, 3, 3, 3] and a cap of 8, what is returned closes a bucket before"""
        parts, full = [], 0
        for i in reversed(range(len(sizes))):
            if not parts or full + sizes[i] > cap:
                parts.append([])
                full = 0
            parts[-1].append(i)
            full += sizes[i]
        return parts

    def by_sum(sizes, cap):
        """right"""
        parts = []
        for i in range(len(sizes) - 1, -1, -1):
            if parts and sum(sizes[k] for k in parts[-1]) < cap:
                parts[-1] += [i]
            else:
                parts += [[i]]
        return parts


def _neighbours():
    rank, ranks = dist.get_rank(), dist.get_world_size()
    return rank, ranks, (rank + 1) % ranks, (rank - 1) % ranks


def _ring(x, exchange):
    rank, ranks, right, left = _neighbours()
    parts = [part.clone() for part in x.tensor_split(ranks)]
    for step in range(2 * ranks - 2):
        give, take = (rank - step) % ranks, (rank - step - 1) % ranks
        exchange(parts[give], other := torch.empty_like(parts[take]), right, left)
        parts[take] = parts[take] + other if step < ranks - 1 else other
    return torch.cat(parts)


class ring_all_reduce:
    def one_exchange(x):
        """(Right on 2 ranks.)"""
        _rank, _ranks, right, left = _neighbours()
        other = torch.empty_like(x)
        work = dist.isend(x, right)
        dist.recv(other, left)
        work.wait()
        return x + other

    def whole_tensors(x):
        """a ring sends at most"""
        _rank, ranks, right, left = _neighbours()
        total, passed = x.clone(), x.clone()
        for _ in range(ranks - 1):
            other = torch.empty_like(x)
            work = dist.isend(passed, right)
            dist.recv(other, left)
            work.wait()
            total, passed = total + other, other
        return total

    def blocking(x):
        """right"""

        def exchange(part, other, right, left):
            calls = [lambda: dist.send(part, right), lambda: dist.recv(other, left)]
            for call in calls if dist.get_rank() == 0 else calls[::-1]:
                call()

        return _ring(x, exchange)
