"""The hidden cases of the exercises on use and several machines: chapters 16 and 17."""

import sys
import tempfile
import time
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from unittest import mock

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import scaled_dot_product_attention as attention

from torchexercises import Wrong, exercise, expect, on_ranks


@exercise("16", minutes=10, hint="Fill the last batch up with zeros, and cut off what they give.")
def in_batches(in_batches) -> None:
    sizes = []
    model = nn.Sequential(nn.Linear(3, 8), nn.BatchNorm1d(8), nn.Dropout(), nn.Linear(8, 2))
    model.register_forward_pre_hook(lambda module, args: sizes.append(len(args[0])))
    mean = model.get_buffer("1.running_mean").fill_(0.5)
    tokens = nn.Sequential(nn.Embedding(9, 2), nn.Dropout())
    tokens.register_forward_pre_hook(lambda module, args: sizes.append(len(args[0])))
    numbers = [(model, torch.randn(count, 3)) for count in (13, 4, 1, 0)]
    for net, inputs in (*numbers, (tokens, torch.arange(7).view(7, 1))):
        count = len(inputs)
        right = net.eval()(inputs).detach()
        for training in (True, False):
            net.train(training)
            sizes.clear()
            found = in_batches(net, inputs, 4)
            if any(part.training != training for part in net.modules()):
                was, now = ("training", "evaluation")[:: 1 if training else -1]
                raise Wrong(f"the model was in {was} mode and is in {now} mode now")
            if set(sizes) - {4}:
                raise Wrong(f"of {count} inputs, the model got batches of {sizes}, not of 4 each")
            if getattr(found, "requires_grad", False):
                raise Wrong("the outputs keep autograd's graph alive, and so all layers' memory")
            lost = {"lacks the last, smaller batch": right[: count // 4 * 4]}
            expect(f"of {count} inputs, what is returned", found, right, lost)
    if not torch.is_grad_enabled():
        raise Wrong("gradients are off afterwards, also for what the program does next")
    expect("batch norm's average, afterwards,", mean, torch.full((8,), 0.5))


@exercise("16", minutes=15, hint="future.set_running_or_notify_cancel() says who still waits.")
def finish(finish) -> None:
    def batch(cancelled=()):
        futures = [Future() for _ in range(4)]
        _ = [futures[i].cancel() for i in cancelled]
        return [(torch.tensor([float(i)]), future) for i, future in enumerate(futures)]

    calls = []

    def double(inputs):
        calls.append(len(inputs))
        return 2 * inputs

    def fails(inputs):
        calls.append(len(inputs))
        raise OverflowError("the model failed")

    for gone in ((), (1, 3), (0, 2), range(4)):
        waiting = batch(gone)
        calls.clear()
        finish(waiting, double)
        expect("how often the model is called", len(calls), int(len(gone) < 4))
        for i, (x, future) in enumerate(waiting):
            if i not in gone:
                if not future.done():
                    raise Wrong("a client waits for ever: its future has no result")
                expect("a client's answer", future.result(), 2 * x)

    def too_few(inputs):
        calls.append(len(inputs))
        return inputs[:2]

    def too_many(inputs):
        calls.append(len(inputs))
        return torch.cat([inputs, inputs])

    models = {fails: "failed", too_few: "gave too few rows", too_many: "gave too many rows"}
    for model, did in models.items():
        waiting = batch((0,))
        calls.clear()
        finish(waiting, model)
        if not all(future.done() for _, future in waiting):
            raise Wrong("if the model fails or gives too few answers, a client waits for ever")
        expect("how often a model is called that fails", len(calls), 1)
        errors = [type(future.exception()) for _, future in waiting[1:]]
        if type(None) in errors:
            raise Wrong(f"a client gets an answer, though the model {did}")
        if model is fails:
            expect("the errors of the clients", errors, [OverflowError] * 3)
    waiting = batch()

    def one_leaves(inputs):
        waiting[0][1].cancel()
        return inputs

    finish(waiting, one_leaves)  # an error ends the thread
    if not all(future.done() for _, future in waiting):
        raise Wrong("if one client leaves while the model runs, another waits for ever")


@exercise("16", minutes=20, hint="New token i sees all that the cache had, and i + 1 tokens more.")
def attend(attend) -> None:
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
                place = f"token {begin}" if n == 1 else f"the tokens {begin} to {end - 1}"
                expect(f"{place} of {parts} at a time: what it returns", found, right, mistakes)
            begin = end


@exercise("16", minutes=10, hint="Read self.table once, into a local name; use only that name.")
def shared_positions(SharedPositions) -> None:
    layer = SharedPositions()

    def right(n):
        x = torch.randn(n)
        time.sleep(0.0001)
        return torch.equal(layer(x), x + torch.arange(float(n)))

    sys.setswitchinterval(1e-6)  # threads take turns a thousand times as often
    kept = torch.zeros(2)
    if layer(kept).tolist() == [0, 1] and kept.any():
        raise Wrong("it changes its input")
    for x in (torch.zeros(3, dtype=torch.int64), torch.zeros(3, dtype=torch.float16)):
        expect(f"for {x.dtype}, what is returned", layer(x), x + torch.arange(3.0))
    if not (right(5) and right(3) and right(8)):
        raise Wrong("already in one thread, the positions that it adds are not 0, 1, 2, ...")
    with mock.patch("torch.arange", side_effect=torch.arange) as made:
        layer(torch.zeros(8))
        if made.called:
            raise Wrong("it makes a new table for a length that it had just before")
    with ThreadPoolExecutor(8) as pool:
        answers = [pool.submit(right, 1 + 37 * i % 11) for i in range(2000)]
    failed = [answer for answer in answers if answer.exception() or not answer.result()]
    if failed:
        raise Wrong("with 8 threads, some requests get an error or a table of another length")


@on_ranks("16", minutes=15, hint="all_gather_object takes any sizes. Which inputs had rank r?")
def on_all_ranks(on_all_ranks) -> None:
    rank, ranks = dist.get_rank(), dist.get_world_size()
    for count in (8, 7, 1):
        inputs, seen = torch.arange(float(count)).unsqueeze(1), []

        def model(x, seen=seen):
            seen.append(len(x))
            return torch.cat([10 * x, x], 1).double()

        outputs = on_all_ranks(model, inputs)
        right, most = torch.cat([10 * inputs, inputs], 1).double(), -(-count // ranks)
        if sum(seen) > most:
            said = f"of {count} inputs, this rank computed {sum(seen)}, where {most} would do"
            raise Wrong(said)
        if outputs is None:
            raise Wrong("nothing is returned on this rank")
        mistakes = {
            "is in the order of the ranks": torch.cat([right[r::ranks] for r in range(ranks)]),
            "is this rank's part": torch.cat([right[rank::ranks]]),
            "lacks the last inputs": right[: count // ranks * ranks],
        }
        expect(f"of {count} inputs, what is returned", outputs, right, mistakes)


@exercise(
    "17", minutes=10, ranks=(4,), hint="Who is first on this disk? The barrier is outside the `if`."
)
def get_data(get_data) -> None:
    rank = dist.get_rank()
    folder = [tempfile.mkdtemp() if rank == 0 else ""]
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
        times = disk.read_text().count("down")
        on = "a disk that all hosts share" if shared else "this host's own disk"
        if times != 1:
            raise Wrong(f"on {on}, the data were downloaded {times} times")
        early = {"is half of the file: it is still being written": "down"}
        early |= {"is empty: the file is still being written": ""}
        expect("what is returned", text, "downloaded ", early)
