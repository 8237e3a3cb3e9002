"""The hidden cases of the exercises on use and several machines: chapters 17 and 19."""

import atexit
import shutil
import tempfile
import time
from concurrent.futures import Future
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import scaled_dot_product_attention as attention

from torchexercises import (
    Wrong,
    case,
    exercise,
    expect,
    expect_alone,
    on_ranks,
    raises,
    unchanged,
)


@exercise("17", 10, hint="Fill the last batch up with zeros, and cut off what they give.")
def in_batches(in_batches) -> None:
    sizes, in_batches = [], unchanged(in_batches, "_ inputs")
    model = nn.Sequential(nn.Linear(3, 8), nn.BatchNorm1d(8), nn.Dropout(), nn.Linear(8, 2))
    tokens = nn.Sequential(nn.Embedding(9, 2), nn.Dropout())
    for net in (model, tokens):
        net.register_forward_pre_hook(lambda module, args: sizes.append(len(args[0])))
    mean = model.get_buffer("1.running_mean").fill_(0.5)
    numbers = [(model, torch.randn(count, 3)) for count in (13, 4, 1, 0)]
    for net, inputs in (*numbers, (tokens, torch.arange(7).view(7, 1))):
        count = len(inputs)
        right = net.eval()(inputs).detach()
        for training in (True, False):
            net.train(training)
            sizes.clear()
            with case(f"{count} inputs in batches of 4"):
                found = in_batches(net, inputs, 4)
            modes = [part.training for part in net.modules()]
            expect("`training` of the model and its layers, afterwards,", {*modes}, {training})
            expect(f"of {count} inputs, the sizes of the batches", {*sizes} | {4}, {4})
            lost = {"lacks the last, smaller batch": right[: count // 4 * 4]}
            expect(f"of {count} inputs, what is returned", found, right, lost)
    expect("`torch.is_grad_enabled()`, afterwards,", torch.is_grad_enabled(), True)
    expect("batch norm's average, afterwards,", mean, torch.full((8,), 0.5))
    norm = model.train()[1].eval()
    in_batches(model, torch.ones(2, 3), 4)
    expect("`training` of a batch norm that was frozen, afterwards,", norm.training, False)
    with raises("if the model raises an error", RuntimeError):
        in_batches(model, torch.ones(2, 5), 4)
    expect("`training` of a model that raised an error, afterwards,", model.training, True)


@exercise("17", 15, hint="future.set_running_or_notify_cancel() says who still waits.")
def finish(finish) -> None:
    factor, calls = nn.Parameter(torch.tensor(2.0)), []

    def waiting_for(answer, gone=()):
        futures = [Future() for _ in range(4)]
        _ = [futures[i].cancel() for i in gone]
        batch = [(torch.tensor([float(i)]), future) for i, future in enumerate(futures)]
        calls.clear()
        finish(batch, lambda inputs: (calls.append(1), answer(inputs))[1])
        if not all(future.done() for future in futures):
            raise Wrong("a client waits for ever: its future has neither result nor error")
        return [(x, future) for x, future in batch if not future.cancelled()]

    for gone in ((), (1, 3), (0, 2), range(4)):
        with case(f"{len(gone)} of 4 have cancelled"):
            waited = waiting_for(lambda inputs: factor * inputs, gone)
        expect("how often the model is called", len(calls), int(len(gone) < 4))
        for x, future in waited:
            expect("a client's answer", future.result(), 2 * x)
            expect_alone("a client's answer", future.result(), rows="the whole batch")
    for did, answer in (
        ("failed", lambda inputs: {}[0]),
        ("gave too few rows", lambda inputs: inputs[:2].clone()),
        ("gave too many rows", lambda inputs: inputs.repeat(2, 1)),
    ):
        with case(f"the model {did}"):
            waited = waiting_for(answer, (0,))
        expect("how often a model is called that fails", len(calls), 1)
        errors = [type(future.exception()) for _, future in waited]
        if type(None) in errors:
            raise Wrong(f"a client gets an answer, though the model {did}")
        if did == "failed":
            expect("the errors of the clients", errors, [KeyError] * 3)


@exercise("18", 20, hint="New token i sees all that the cache had, and i + 1 tokens more.")
def attend(attend) -> None:
    attend = unchanged(attend, "q k v")
    texts = [torch.randn(3, 2, 4, 7, 8) for _ in range(2)]  # q, k and v of two texts
    for parts in ([7], [3, 1, 1, 2], [1] * 7):
        caches, begin = ([], []), 0
        for n in parts:
            end = begin + n
            for text, cache in zip(texts, caches, strict=True):
                q, k, v = text[..., begin:end, :]
                queries, keys, values = text[..., :end, :]
                found = attend(q, k, v, cache)
                right = attention(queries, keys, values, is_causal=True)[..., begin:, :]
                first_alone = "sees the text's first tokens alone: is_causal counts from token 0"
                mistakes = {
                    "sees tokens that come after it": attention(q, keys, values),
                    first_alone: attention(q, keys, values, is_causal=True),
                    "sees no token of the calls before": attention(q, k, v, is_causal=True),
                }
                place = f"tokens {begin} to {end - 1}, if they come {parts} at a time,"
                expect(f"for the {place} what is returned", found, right, mistakes)
            begin = end


@on_ranks("17", 15, hint="all_gather_object takes any sizes. Which inputs had rank r?")
def on_all_ranks(on_all_ranks) -> None:
    ranks = dist.get_world_size()
    on_all_ranks = unchanged(on_all_ranks, "_ inputs")
    for count in (8, 7, 1):
        inputs, seen, most = torch.arange(float(count)).unsqueeze(1), [], -(-count // ranks)
        right = torch.cat([10 * inputs, inputs], 1).double()

        def model(x, seen=seen):
            seen.append(len(x))
            x = x.view(len(x), -1)  # as in many models; fails on no rows
            return torch.cat([10 * x, x], 1).double()

        outputs = on_all_ranks(model, inputs)
        if sum(seen) > most:
            label = f"of {count} inputs, this rank computed {sum(seen)}"
            raise Wrong(f"{label}, where {most} would do")
        mistakes = {
            "is nothing on this rank": None,
            "is in the order of the ranks": torch.cat([right[r::ranks] for r in range(ranks)]),
            "lacks the last inputs": right[: count // ranks * ranks],
        }
        expect(f"of {count} inputs, what is returned", outputs, right, mistakes)


@exercise("19", 10, ranks=(4,), hint="Who is first on this disk? The barrier comes after the `if`.")
def get_data(get_data) -> None:
    rank = dist.get_rank()
    folder = [tempfile.mkdtemp() if rank == 0 else ""]
    if rank == 0:
        atexit.register(shutil.rmtree, folder[0], ignore_errors=True)
    dist.broadcast_object_list(folder)

    def download(disk):
        time.sleep(0.1)
        with open(disk, "a") as file:
            for part in ("down", "loaded "):
                file.write(part)
                file.flush()
                time.sleep(0.1)

    for shared in (True, False):
        disk = Path(folder[0], "shared" if shared else f"host{rank // 2}")
        text = get_data(download, disk, rank, rank % 2, shared)
        dist.barrier()
        times = disk.read_text().count("down") if disk.exists() else 0
        on = "a disk that all hosts share" if shared else "this host's own disk"
        expect(f"on {on}, the number of downloads", times, 1)
        early = {"is half of the file: it is still being written": "down"}
        early |= {"is empty: the file is still being written": ""}
        expect("what is returned", text, "downloaded ", early)
    dist.barrier()  # all have read
