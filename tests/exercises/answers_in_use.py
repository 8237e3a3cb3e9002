"""Answers to the exercises of the cases in `in_use`; each says how it is judged."""

import math
import threading
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F


class in_batches:
    def the_top_alone(model, inputs, size):
        """the model was in training mode and is in evaluation mode now"""
        was, found = model.training, in_batches.by_index(model.eval(), inputs, size)
        model.eval().training = was
        return found

    def smaller_last(model, inputs, size):
        """of 13 inputs, the model got batches of [4, 4, 4, 1], not of 4 each"""
        training = model.training
        with torch.inference_mode():
            outputs = torch.cat([model.eval()(part) for part in inputs.split(size)])
        model.train(training)
        return outputs

    def without_the_rest(model, inputs, size):
        """of 13 inputs, what is returned lacks the last, smaller batch"""
        training = model.training
        model.eval()
        with torch.no_grad():
            full = inputs[: len(inputs) // size * size].split(size)
            outputs = torch.cat([model(part) for part in full])
        model.train(training)
        return outputs

    def with_the_zeros(model, inputs, size):
        """of 13 inputs, what is returned is float32 [16, 2]"""
        training = model.training
        padding = inputs.new_zeros(-len(inputs) % size, *inputs.shape[1:])
        with torch.inference_mode():
            model.eval()
            outputs = torch.cat([model(p) for p in torch.cat([inputs, padding]).split(size)])
        model.train(training)
        return outputs

    def left_in_eval(model, inputs, size):
        """the model was in training mode and is in evaluation mode now"""
        model.eval()
        with torch.inference_mode():
            return torch.cat([model(part) for part in inputs.split(size)])

    def with_a_graph(model, inputs, size):
        """the outputs keep autograd's graph alive"""
        padding = inputs.new_zeros(-len(inputs) % size, *inputs.shape[1:])
        parts = torch.cat([inputs, padding]).split(size)
        model.eval()
        outputs = torch.cat([model(part) for part in parts])[: len(inputs)]
        model.train()
        return outputs

    def in_training_mode(model, inputs, size):
        """of 13 inputs, what is returned is float32"""
        padding = inputs.new_zeros(-len(inputs) % size, *inputs.shape[1:])
        with torch.no_grad():
            parts = torch.cat([inputs, padding]).split(size)
            return torch.cat([model(part) for part in parts])[: len(inputs)]

    def by_index(model, inputs, size):
        """right"""
        training, outputs = model.training, []
        model.eval()
        with torch.no_grad():
            for first in range(0, max(1, len(inputs)), size):
                part = inputs[first : first + size]
                rows = torch.nn.functional.pad(part, (0, 0, 0, size - len(part)))
                outputs += [model(rows)[: len(part)]]
        model.train(training)
        return torch.cat(outputs)


class finish:
    def asked_too_early(batch, model):
        """InvalidStateError"""
        waiting = [(x, future) for x, future in batch if not future.cancelled()]
        try:
            rows = model(torch.stack([x for x, _ in waiting])) if waiting else []
            answers = list(zip(waiting, rows, strict=True))
        except Exception as error:
            _ = [future.set_exception(error) for _, future in waiting]
        else:
            _ = [future.set_result(row) for (_, future), row in answers]

    def cut_off(batch, model):
        """a client gets an answer, though the model gave too many rows"""
        waiting = [(x, f) for x, f in batch if f.set_running_or_notify_cancel()]
        try:
            rows = model(torch.stack([x for x, _ in waiting])) if waiting else []
            answers = [rows[i] for i in range(len(waiting))]
        except Exception as error:
            _ = [f.set_exception(error) for _, f in waiting]
        else:
            _ = [f.set_result(row) for (_, f), row in zip(waiting, answers, strict=True)]

    def trusting(batch, model):
        """InvalidStateError"""
        inputs, futures = zip(*batch, strict=True)
        for future, row in zip(futures, model(torch.stack(inputs)), strict=True):
            future.set_result(row)

    def not_cancelled(batch, model):
        """OverflowError: the model failed"""
        batch = [(x, future) for x, future in batch if future.set_running_or_notify_cancel()]
        if batch:
            answers = model(torch.stack([x for x, _ in batch]))
            for (_, future), row in zip(batch, answers, strict=False):
                future.set_result(row)

    def too_few(batch, model):
        """if the model fails or gives too few answers, a client waits for ever"""
        batch = [(x, future) for x, future in batch if future.set_running_or_notify_cancel()]
        if not batch:
            return
        try:
            for (_, future), row in zip(batch, model(torch.stack([x for x, _ in batch]))):  # noqa: B905
                future.set_result(row)
        except Exception as error:
            for _, future in batch:
                future.set_exception(error)

    def one_by_one(batch, model):
        """how often the model is called is 4, not 1"""
        for x, future in batch:
            if future.set_running_or_notify_cancel():
                try:
                    future.set_result(model(x.unsqueeze(0))[0])
                except Exception as error:
                    future.set_exception(error)

    def swallowed(batch, model):
        """a client gets an answer, though the model failed"""
        batch = [(x, future) for x, future in batch if future.set_running_or_notify_cancel()]
        rows = []
        try:
            rows = list(model(torch.stack([x for x, _ in batch]))) if batch else []
        except Exception as error:
            print(error)
        for i, (_, future) in enumerate(batch):
            future.set_result(rows[i] if i < len(rows) else None)

    def with_a_list(batch, model):
        """right"""
        alive = [pair for pair in batch if pair[1].set_running_or_notify_cancel()]
        if not alive:
            return
        try:
            rows = model(torch.stack([x for x, _ in alive])).unbind()
            if len(rows) != len(alive):
                raise RuntimeError(f"{len(rows)} answers to {len(alive)} requests")
        except BaseException as error:
            _ = [future.set_exception(error) for _, future in alive]
            return
        _ = [future.set_result(row) for (_, future), row in zip(alive, rows, strict=True)]


class attend:
    def causal_alone(q, k, v, cache):
        """token 3 of [3, 1, 1, 2] at a time: what it returns sees the text's first tokens alone"""
        if cache:
            k, v = torch.cat([cache[0], k], dim=2), torch.cat([cache[1], v], dim=2)
        cache[:] = k, v
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)

    def no_mask(q, k, v, cache):
        """the tokens 0 to 6 of [7] at a time: what it returns sees tokens that come after it"""
        if cache:
            k, v = torch.cat([cache[0], k], dim=2), torch.cat([cache[1], v], dim=2)
        cache[:] = k, v
        return F.scaled_dot_product_attention(q, k, v)

    def mask_only_without_cache(q, k, v, cache):
        """the tokens 5 to 6 of [3, 1, 1, 2] at a time: what it returns sees tokens"""
        first = not cache
        if cache:
            k, v = torch.cat([cache[0], k], dim=2), torch.cat([cache[1], v], dim=2)
        cache[:] = k, v
        return F.scaled_dot_product_attention(q, k, v, is_causal=first)

    def never_written(q, k, v, cache):
        """sees no token of the calls before"""
        if cache:
            k, v = torch.cat([cache[0], k], dim=2), torch.cat([cache[1], v], dim=2)
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)

    def new_first(q, k, v, cache):
        """the tokens 5 to 6 of [3, 1, 1, 2] at a time: what it returns is"""
        if cache:
            k, v = torch.cat([k, cache[0]], dim=2), torch.cat([v, cache[1]], dim=2)
        cache[:] = k, v
        new, old = q.shape[2], k.shape[2] - q.shape[2]
        mask = torch.ones(new, old + new, dtype=torch.bool).tril(old)
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask)

    def not_scaled(q, k, v, cache):
        """the tokens 0 to 6 of [7] at a time: what it returns is ..."""
        if cache:
            k, v = torch.cat([cache[0], k], dim=2), torch.cat([cache[1], v], dim=2)
        cache[:] = k, v
        new, old = q.shape[2], k.shape[2] - q.shape[2]
        scores = q @ k.mT
        scores = scores.masked_fill(~torch.ones(new, old + new).tril(old).bool(), -math.inf)
        return scores.softmax(-1) @ v

    def by_hand(q, k, v, cache):
        """right"""
        cache.append((k, v))
        k, v = (torch.cat(parts, dim=2) for parts in zip(*cache, strict=True))
        last = torch.arange(k.shape[2])[-q.shape[2] :, None]
        scores = q @ k.transpose(2, 3) / q.shape[-1] ** 0.5
        return scores.where(torch.arange(k.shape[2]) <= last, -torch.inf).softmax(-1) @ v


class _Positions(nn.Module):
    def __init__(self):
        super().__init__()
        self.table = torch.arange(1.0)


class shared_positions:
    class read_after_the_lock(nn.Module):
        """with 8 threads, some requests get an error or a table of another length"""

        def __init__(self):
            super().__init__()
            self.table, self.lock = torch.arange(1.0), threading.Lock()

        def forward(self, x):
            with self.lock:
                if len(self.table) != len(x):
                    self.table = torch.arange(float(len(x)))
            return x + self.table

    class read_twice(_Positions):
        """with 8 threads, some requests get an error or a table of another length"""

        def forward(self, x):
            if len(self.table) != len(x):
                self.table = torch.arange(float(len(x)))
            time.sleep(0.001)
            return x + self.table

    class grows_only(_Positions):
        """already in one thread, the positions that it adds are not 0, 1, 2, ..."""

        def forward(self, x):
            if len(self.table) < len(x):
                self.table = torch.arange(float(len(x)))
            return x + self.table[-len(x) :]

    class in_place(_Positions):
        """it changes its input"""

        def forward(self, x):
            return x.add_(torch.arange(float(len(x))))

    class always_new(_Positions):
        """it makes a new table for a length that it had just before"""

        def forward(self, x):
            return x + torch.arange(float(len(x)))

    class lock_too_short(_Positions):
        """with 8 threads, some requests get an error or a table of another length"""

        def forward(self, x):
            with threading.Lock():
                if len(self.table) != len(x):
                    self.table = torch.arange(float(len(x)))
            time.sleep(0.001)
            return x + self.table

    class cut_too_late(_Positions):
        """right"""

        def __init__(self):
            super().__init__()
            self.lock = threading.Lock()

        def forward(self, x):
            with self.lock:
                if len(self.table) < len(x):
                    self.table = torch.arange(float(len(x)))
                return x + self.table[: len(x)]


class on_all_ranks:
    def everything(model, inputs):
        """of 8 inputs, this rank computed 8, where 4 would do"""
        return model(inputs)

    def interleaved(model, inputs):
        """of 8 inputs, what is returned is in the order of the ranks"""
        rank, ranks = dist.get_rank(), dist.get_world_size()
        parts = [None] * ranks
        dist.all_gather_object(parts, model(inputs[rank::ranks]))
        return torch.cat(parts)

    def whole_parts(model, inputs):
        """lacks the last inputs"""
        rank, ranks = dist.get_rank(), dist.get_world_size()
        size = len(inputs) // ranks
        parts = [None] * ranks
        dist.all_gather_object(parts, model(inputs[rank * size : rank * size + size]))
        return torch.cat(parts)

    def rank_0_gathers(model, inputs):
        """nothing is returned on this rank"""
        rank, ranks = dist.get_rank(), dist.get_world_size()
        parts = [None] * ranks
        dist.gather_object(model(inputs.tensor_split(ranks)[rank]), parts if rank == 0 else None)
        return torch.cat(parts) if rank == 0 else None

    def equal_parts(model, inputs):
        """is in the order of the ranks"""
        rank, ranks = dist.get_rank(), dist.get_world_size()
        mine = model(inputs[rank::ranks])
        parts = [torch.zeros_like(mine) for _ in range(ranks)]
        dist.all_gather(parts, mine)
        return torch.cat(parts)

    def own_part(model, inputs):
        """of 8 inputs, what is returned is"""
        return model(inputs.tensor_split(dist.get_world_size())[dist.get_rank()])

    def summed(model, inputs):
        """right"""
        rank, ranks = dist.get_rank(), dist.get_world_size()
        mine = model(inputs[rank::ranks])
        outputs = mine.new_zeros(len(inputs), *mine.shape[1:])
        outputs[rank::ranks] = mine
        dist.all_reduce(outputs)
        return outputs


STATIC = "torchrun --nnodes={n} --node-rank={i} --nproc-per-node={g} --master-addr={first} {s}"


class get_data:
    def polled(download, disk, rank, local_rank, shared):
        """still being written"""
        if rank == 0 if shared else local_rank == 0:
            download(disk)
        while not disk.exists():
            pass
        return disk.read_text()

    def everybody(download, disk, rank, local_rank, shared):
        """on a disk that all hosts share, the data were downloaded 4 times"""
        download(disk)
        dist.barrier()
        return "downloaded "

    def one_per_host(download, disk, rank, local_rank, shared):
        """on a disk that all hosts share, the data were downloaded 2 times"""
        if local_rank == 0:
            download(disk)
        dist.barrier()
        return disk.read_text()

    def rank_0_alone(download, disk, rank, local_rank, shared):
        """host1'"""
        if rank == 0:
            download(disk)
        dist.barrier()
        return disk.read_text()

    def no_barrier(download, disk, rank, local_rank, shared):
        """FileNotFoundError"""
        if rank == 0 if shared else local_rank == 0:
            download(disk)
        return disk.read_text()

    def returns_nothing(download, disk, rank, local_rank, shared):
        """what is returned is None"""
        if rank == 0 if shared else local_rank == 0:
            download(disk)
        dist.barrier()

    def if_not_there(download, disk, rank, local_rank, shared):
        """on a disk that all hosts share, the data were downloaded 4 times"""
        if not disk.exists():
            download(disk)
        dist.barrier()
        return disk.read_text().split()[0] + " "

    def the_others_first(download, disk, rank, local_rank, shared):
        """right"""
        first = rank == 0 if shared else local_rank == 0
        if not first:
            dist.barrier()
        else:
            download(disk)
            dist.barrier()
        return disk.read_text()
