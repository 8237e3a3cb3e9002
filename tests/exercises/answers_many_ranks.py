"""Answers to the exercises on several ranks; each says how it is judged."""

import torch
import torch.distributed as dist


class average_gradients:
    def copies(net):
        """is your own: nothing came from the other ranks"""
        for parameter in net.parameters():
            if parameter.grad is not None:
                dist.all_reduce(whole := parameter.grad.contiguous())
                whole /= dist.get_world_size()

    def summed(net):
        """is summed, not divided by the number of ranks"""
        for parameter in net.parameters():
            if parameter.grad is not None:
                dist.all_reduce(parameter.grad)

    def by_two(net):
        """is the sum divided by 2 (Right on 2 ranks: is 2 in it?)"""
        for parameter in net.parameters():
            if parameter.grad is not None:
                dist.all_reduce(parameter.grad)
                parameter.grad /= 2

    def divided_only(net):
        """is your own, divided by the number of ranks"""
        for parameter in net.parameters():
            if parameter.grad is not None:
                parameter.grad /= dist.get_world_size()

    def a_copy(net):
        """is your own: nothing came from the other ranks"""
        for parameter in net.parameters():
            if parameter.grad is not None:
                average = parameter.grad.clone()
                dist.all_reduce(average)
                average /= dist.get_world_size()

    def without_a_gradient(net):
        """'NoneType' object has no attribute"""
        for parameter in net.parameters():
            dist.all_reduce(parameter.grad.data)
            parameter.grad /= dist.get_world_size()

    def on_rank_0(net):
        """waited for a rank that had returned: do all make the same calls"""
        for parameter in net.parameters():
            if parameter.grad is not None:
                dist.all_reduce(parameter.grad)
                parameter.grad /= dist.get_world_size()
        if dist.get_rank() == 0:
            dist.barrier()

    def of_children(net):
        """the gradient of last_block.0.weight is your own: nothing came from the other ranks"""
        children = torch.nn.ModuleList(net.children())
        for child in children:
            for parameter in child.parameters(recurse=False):
                if parameter.grad is not None:
                    dist.all_reduce(parameter.grad)
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
    def global_state(rank, ranks, n, epoch, seed):
        """the ranks draw different orders, or samples are left out"""
        order = torch.randperm(n).tolist()
        return (order + order * ranks)[: -(-n // ranks) * ranks][rank::ranks]

    def uneven(rank, ranks, n, epoch, seed):
        """10 samples on 4 ranks: the ranks have [2, 3] samples, so one would wait"""
        return _order(n, seed + epoch)[rank::ranks]

    def dropped(rank, ranks, n, epoch, seed):
        """10 samples on 4 ranks: together they see"""
        return _order(n, seed + epoch)[: n // ranks * ranks][rank::ranks]

    def one_order(rank, ranks, n, epoch, seed):
        """another epoch has the same order"""
        order = _order(n, seed)
        return (order + order * ranks)[: -(-n // ranks) * ranks][rank::ranks]

    def no_seed(rank, ranks, n, epoch, seed):
        """another seed has the same order"""
        order = _order(n, epoch)
        return (order + order * ranks)[: -(-n // ranks) * ranks][rank::ranks]

    def own_order(rank, ranks, n, epoch, seed):
        """the ranks draw different orders, or samples are left out"""
        order = _order(n, seed + epoch + 100 * rank)
        return (order + order * ranks)[: -(-n // ranks) * ranks][rank::ranks]

    def own_share(rank, ranks, n, epoch, seed):
        """a rank has the same samples in each epoch: shuffle all, then deal them out"""
        share = [i % n for i in range(rank, -(-n // ranks) * ranks, ranks)]
        return [share[i] for i in _order(len(share), seed + epoch)]

    def of_all(rank, ranks, n, epoch, seed):
        """it changes which random numbers the program draws afterwards"""
        torch.manual_seed(seed + epoch)
        return indices_of.global_state(rank, ranks, n, epoch, seed)

    def renamed(r, world, total, e, s):
        """right"""
        with torch.random.fork_rng():
            return indices_of.of_all(r, world, total, e, s)

    def in_blocks(rank, ranks, n, epoch, seed):
        """right"""
        order, each = _order(n, seed + epoch), -(-n // ranks)
        return [order[i % n] for i in range(rank * each, rank * each + each)]


class accuracy_over_ranks:
    def mean_of_means(right, count):
        """is the mean of the ranks' accuracies"""
        accuracy = right / max(count, 1)
        dist.all_reduce(accuracy)
        return accuracy / dist.get_world_size()

    def own(right, count):
        """is this rank's"""
        return right / max(count, 1)

    def sum_of_means(right, count):
        """is the sum of the ranks' accuracies"""
        accuracy = right / max(count, 1)
        dist.all_reduce(accuracy)
        return accuracy

    def one_sum(right, count):
        """the accuracy is"""
        dist.all_reduce(right)
        return right / max(count, 1)

    def of_own_count(right, count):
        """, not 0.230769"""
        dist.all_reduce(right)
        return right / max(count * dist.get_world_size(), 1)

    def integers(right, count):
        """the accuracy is 0"""
        both = torch.tensor([int(right), count])
        dist.all_reduce(both)
        return both[0] // both[1]

    def objects(right, count):
        """right"""
        pairs = [None] * dist.get_world_size()
        dist.all_gather_object(pairs, (right.item(), count))
        return sum(r for r, _ in pairs) / sum(c for _, c in pairs)


class all_stop:
    def own(wish):
        """is this rank's own wish"""
        return wish

    def all_want(wish):
        """is True only if all want it"""
        wish = torch.tensor(float(wish))
        dist.all_reduce(wish, dist.ReduceOp.MIN)
        return wish.item() > 0

    def first(wish):
        """what is returned is rank 0's wish"""
        wish = torch.tensor(float(wish))
        dist.broadcast(wish, 0)
        return wish.item() > 0

    def who_wants(wish):
        """is this rank's own wish"""
        if wish:
            return True
        wish = torch.tensor(0.0)
        dist.all_reduce(wish, dist.ReduceOp.MAX)
        return wish.item() > 0

    def most_want(wish):
        """is True only if most want it"""
        wish = torch.tensor(float(wish))
        dist.all_reduce(wish)
        return wish.item() / dist.get_world_size() > 0.5

    def gathered(wish):
        """right"""
        wishes = [None] * dist.get_world_size()
        dist.all_gather_object(wishes, wish)
        return any(wishes)


class broadcast_model:
    def all_at_once(net):
        """right"""
        own = [tensor.detach() for tensor in (*net.parameters(), *net.buffers())]
        dist.broadcast_object_list(first := [own])
        for tensor, value in zip(own, first[0], strict=True):
            tensor.copy_(value)

    def as_float32(net):
        """1.num_batches_tracked is int64 [] on cpu 1099511627776, not"""
        for tensor in (*net.parameters(), *net.buffers()):
            dist.broadcast(number := tensor.detach().float(), 0)
            tensor.detach().copy_(number)

    def parameters(net):
        """1.running_mean is this rank's own, not rank 0's"""
        for parameter in net.parameters():
            dist.broadcast(parameter.data, 0)

    def trainable(net):
        """is this rank's own, not rank 0's"""
        for parameter in filter(lambda p: p.requires_grad, net.parameters()):
            dist.broadcast(parameter.data, 0)

    def average(net):
        """0.weight is float32"""
        for tensor in net.state_dict().values():
            if tensor.is_floating_point():
                dist.all_reduce(tensor)
                tensor /= dist.get_world_size()

    def new_parameters(net):
        """the parameters are new tensors, which the optimizer does not know"""
        for name, parameter in list(net.named_parameters(remove_duplicate=False)):
            dist.broadcast(parameter.data, 0)
            module = net.get_submodule(name.rpartition(".")[0])
            setattr(module, name.rpartition(".")[2], torch.nn.Parameter(parameter.data))
        for buffer in net.buffers():
            dist.broadcast(buffer, 0)

    def of_the_last_rank(net):
        """0.weight is"""
        for tensor in net.state_dict().values():
            dist.broadcast(tensor, dist.get_world_size() - 1)

    def rank_0_alone(net):
        """is this rank's own, not rank 0's"""
        if dist.get_rank() == 0:
            net.load_state_dict(net.state_dict())

    def an_object(net):
        """1.mask is this rank's own, not rank 0's"""
        states = [net.state_dict() if dist.get_rank() == 0 else None]
        dist.broadcast_object_list(states)
        net.load_state_dict(states[0])


class buckets:
    def never_one_alone(sizes, cap):
        """for sizes [2, 20] and a cap of 8, what is returned has all in one bucket"""
        parts, held = [[]] * bool(sizes), cap
        for i in reversed(range(len(sizes))):
            if held >= cap and parts[-1:] != [[i + 1]]:
                parts, held = [part for part in parts if part] + [[]], 0
            parts[-1].append(i)
            held += sizes[i]
        return parts

    def one_at_least(sizes, cap):
        """what is returned is [[]], not []"""
        return buckets.by_sum(sizes, cap) or [[]]

    def popped(sizes, cap):
        """the list of sizes that you were given is [], not [4, 4, 4, 4]"""
        parts = buckets.by_sum(sizes, cap)
        sizes.clear()
        return parts

    def forwards(sizes, cap):
        """begins with the first parameter, whose gradient comes last"""
        return [[len(sizes) - 1 - i for i in part] for part in buckets.by_sum(sizes[::-1], cap)]

    def no_rest(sizes, cap):
        """lacks the last bucket"""
        return buckets.by_sum(sizes, cap)[:-1]

    def one_each(sizes, cap):
        """has one bucket for each parameter"""
        return [[i] for i in reversed(range(len(sizes)))]

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

    def too_full(sizes, cap):
        """for sizes [4, 4, 4, 4] and a cap of 8, what is returned fills a bucket further"""
        parts, full = [], cap + 1
        for i in reversed(range(len(sizes))):
            if full > cap:
                parts.append([])
                full = 0
            parts[-1].append(i)
            full += sizes[i]
        return parts

    def an_empty_one(sizes, cap):
        """what is returned is [[3, 2], [1, 0], []], not [[3, 2], [1, 0]]"""
        parts, full = [[]], 0
        for i in reversed(range(len(sizes))):
            parts[-1].append(i)
            full += sizes[i]
            if full >= cap:
                parts.append([])
                full = 0
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

    def as_ddp(sizes, cap):
        """right"""
        gradients = [torch.empty(size, dtype=torch.uint8) for size in sizes[::-1]]
        if not sizes:  # DDP refuses a model without parameters
            return []
        parts, _ = dist._compute_bucket_assignment_by_size(gradients, [cap])
        return [[len(sizes) - 1 - i for i in part] for part in parts]


def _neighbours():
    rank, ranks = dist.get_rank(), dist.get_world_size()
    return rank, ranks, (rank + 1) % ranks, (rank - 1) % ranks


def _batched(part, other, right, left):
    ops = [dist.P2POp(dist.isend, part, right), dist.P2POp(dist.irecv, other, left)]
    for work in dist.batch_isend_irecv(ops):
        work.wait()


def _ring(x, exchange=_batched, buffer=torch.empty_like, way=1, rounds=lambda ranks: 2 * ranks - 2):
    rank, ranks, *neighbours = _neighbours()
    parts = [part.clone() for part in x.tensor_split(ranks)]
    for step in range(rounds(ranks)):
        give, take = (rank - way * step) % ranks, (rank - way * (step + 1)) % ranks
        other = buffer(parts[take])
        exchange(parts[give], other, *neighbours[::way])
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

    def the_library(x):
        """dist.all_reduce does it for you"""
        dist.all_reduce(x)
        return x

    def another_collective(x):
        """nothing was sent by send or isend: a collective did it for you"""
        parts = [None] * dist.get_world_size()
        dist.all_gather_object(parts, x)
        return sum(parts)

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

    def averaged(x):
        """the sum of 12 numbers is the average"""
        return ring_all_reduce.by_hand(x) / dist.get_world_size()

    def nothing(x):
        """the sum of 12 numbers is this rank's own"""
        return x

    def too_short(x):
        """the sum of 12 numbers is float32 [12] on cpu"""
        return _ring(x, rounds=lambda ranks: 2 * ranks - 3)

    def of_float32(x):
        """the sum of 7 numbers is float32 [7]"""
        return _ring(x.float())

    def float32_buffers(x):
        """the sum of 7 numbers is float32 [7]"""
        return _ring(x, buffer=lambda part: torch.empty(len(part)))

    def by_hand(x):
        """right"""
        return _ring(x)

    def blocking(x):
        """right"""

        def exchange(part, other, right, left):
            calls = [lambda: dist.send(part, right), lambda: dist.recv(other, left)]
            for call in calls if dist.get_rank() == 0 else calls[::-1]:
                call()

        return _ring(x, exchange)

    def the_other_way_round(x):
        """right"""

        def exchange(part, other, right, left):
            work = dist.irecv(other, left)
            dist.send(part, right)
            work.wait()

        return _ring(x, exchange, way=-1)
