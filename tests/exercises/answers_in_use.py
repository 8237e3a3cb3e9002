"""Answers to the exercises of the cases in `in_use`; each says how it is judged."""

import torch
import torch.distributed as dist
from torch.nn import functional as F


def _by_index(model, inputs, size):
    outputs = []
    with torch.no_grad():
        for first in range(0, max(1, len(inputs)), size):
            part = inputs[first : first + size]
            rows = F.pad(part, (0, 0, 0, size - len(part)))
            outputs += [model(rows)[: len(part)]]
    return torch.cat(outputs)


class in_batches:
    def not_without_rows(model, inputs, size):
        """The case was: 0 inputs in batches of 4."""
        training, outputs = model.training, []
        model.eval()
        with torch.no_grad():
            for first in range(0, len(inputs), size):
                part = inputs[first : first + size]
                outputs += [model(F.pad(part, (0, 0, 0, size - len(part))))[: len(part)]]
        model.train(training)
        return torch.cat(outputs)

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
        """`training` of the model and its layers, afterwards, is {False}, not {True}"""
        model.eval()
        with torch.inference_mode():
            return torch.cat([model(part) for part in inputs.split(size)])

    def thawed(model, inputs, size):
        """`training` of a batch norm that was frozen, afterwards, is True, not False"""
        training = model.training
        try:
            return _by_index(model.eval(), inputs, size)
        finally:
            model.train(training)

    def not_after_an_error(model, inputs, size):
        """`training` of a model that raised an error, afterwards, is False, not True"""
        modes = [part.training for part in model.modules()]
        outputs = _by_index(model.eval(), inputs, size)
        for part, training in zip(model.modules(), modes, strict=True):
            part.training = training
        return outputs

    def by_index(model, inputs, size):
        """right"""
        modes = [part.training for part in model.modules()]
        try:
            return _by_index(model.eval(), inputs, size)
        finally:
            for part, training in zip(model.modules(), modes, strict=True):
                part.training = training


class finish:
    def with_a_graph(batch, model):
        """a client's answer keeps its graph, and so the memory of all layers"""
        finish.with_a_list(batch, model, kept=lambda row: row.clone())

    def of_the_batch(batch, model):
        """a client's answer is a view, which keeps the whole batch: 16 bytes instead of 4"""
        finish.with_a_list(batch, model, kept=lambda row: row.detach())

    def cut_off(batch, model):
        """a client gets an answer, though the model gave too many rows"""
        waiting = [(x, f) for x, f in batch if f.set_running_or_notify_cancel()]
        try:
            rows = model(torch.stack([x for x, _ in waiting])) if waiting else []
            answers = [rows[i].detach().clone() for i in range(len(waiting))]
        except Exception as error:
            _ = [f.set_exception(error) for _, f in waiting]
        else:
            _ = [f.set_result(row) for (_, f), row in zip(waiting, answers, strict=True)]

    def trusting(batch, model):
        """InvalidStateError"""
        inputs, futures = zip(*batch, strict=True)
        for future, row in zip(futures, model(torch.stack(inputs)), strict=True):
            future.set_result(row.detach().clone())

    def with_a_list(batch, model, kept=lambda row: row.detach().clone()):
        """right"""
        alive = [pair for pair in batch if pair[1].set_running_or_notify_cancel()]
        if not alive:
            return
        try:
            rows = [kept(row) for row in model(torch.stack([x for x, _ in alive]))]
            if len(rows) != len(alive):
                raise RuntimeError(f"{len(rows)} answers to {len(alive)} requests")
        except BaseException as error:
            _ = [future.set_exception(error) for _, future in alive]
            return
        _ = [future.set_result(row) for (_, future), row in zip(alive, rows, strict=True)]


class attend:
    def causal_alone(q, k, v, cache):
        """at a time, what is returned sees the text's first tokens alone: is_causal counts"""
        if cache:
            k, v = torch.cat([cache[0], k], dim=2), torch.cat([cache[1], v], dim=2)
        cache[:] = k, v
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)

    def new_first(q, k, v, cache):
        """for the tokens 5 to 6, if they come [3, 1, 1, 2] at a time, what is returned is"""
        if cache:
            k, v = torch.cat([k, cache[0]], dim=2), torch.cat([v, cache[1]], dim=2)
        cache[:] = k, v
        new, old = q.shape[2], k.shape[2] - q.shape[2]
        mask = torch.ones(new, old + new, dtype=torch.bool).tril(old)
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask)

    def by_hand(q, k, v, cache):
        """right"""
        cache.append((k, v))
        k, v = (torch.cat(parts, dim=2) for parts in zip(*cache, strict=True))
        last = torch.arange(k.shape[2])[-q.shape[2] :, None]
        scores = q @ k.transpose(2, 3) / q.shape[-1] ** 0.5
        return scores.where(torch.arange(k.shape[2]) <= last, -torch.inf).softmax(-1) @ v


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

    def on_no_rows(model, inputs):
        """cannot reshape tensor of 0 elements"""
        rank, ranks = dist.get_rank(), dist.get_world_size()
        parts = [None] * ranks
        dist.all_gather_object(parts, model(inputs.tensor_split(ranks)[rank]))
        return torch.cat(parts)

    def summed(model, inputs):
        """right"""
        rank, ranks = dist.get_rank(), dist.get_world_size()
        mine = inputs[rank::ranks]
        mine = model(mine) if len(mine) else model(inputs[:1])[:0]
        outputs = mine.new_zeros(len(inputs), *mine.shape[1:])
        outputs[rank::ranks] = mine
        dist.all_reduce(outputs)
        return outputs


class get_data:
    def everybody(download, disk, rank, local_rank, shared):
        """on a disk that all hosts share, the number of downloads is 4, not 1"""
        download(disk)
        dist.barrier()
        return "downloaded "

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

    def the_others_first(download, disk, rank, local_rank, shared):
        """right"""
        first = rank == 0 if shared else local_rank == 0
        if not first:
            dist.barrier()
        else:
            download(disk)
            dist.barrier()
        return disk.read_text()
