"""A GPT that draws clothes, or learns your own tokens: one file, from one CPU to a cluster.

    python rungs/gpt.py --out clothes
    torchrun --standalone --nproc-per-node=2 rungs/gpt.py --parallel ddp --out clothes
    python -c "import numpy; numpy.save('tokens.npy', numpy.fromfile('my.txt', 'uint8'))"
    python rungs/gpt.py --data tokens.npy --context 256 --out text

A run that was stopped goes on with the same command, or with --out alone, also with another
--parallel or number of processes. Ctrl-C, SIGTERM and a terminal that is closed save first
(torchrun gives them 30 seconds). An error? Add to the command: 2>&1 | torchclinic explain
Go on only in a folder of your own run: PyTorch runs what another has put into a .metadata there.

    python rungs/gpt.py --out clothes --export clothes.safetensors
    python rungs/gpt.py --base clothes.safetensors --lora 8 --data mine.npz --out mine

Chapter 18 of the book loads such a file in other code, and samples from it.
"""

import argparse
import contextlib
import fcntl
import json
import logging
import math
import os
import re
import resource
import signal
import sys
import tempfile
import threading
import time
import zlib
from collections import deque
from functools import partial
from pathlib import Path


def watch(torchrun):
    """End this rank with torchrun, also while it imports or waits for the others."""
    while os.getppid() == torchrun:
        time.sleep(1)
    os.kill(os.getpid(), signal.SIGTERM)


if __name__ == "__main__" and "TORCHELASTIC_RUN_ID" in os.environ:
    threading.Thread(target=watch, args=[os.getppid()], daemon=True).start()
if __name__ == "__main__" and signal.getsignal(signal.SIGINT) == signal.default_int_handler:
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # what follows takes seconds: no traceback of it
import numpy as np
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import nn
from torch.distributed.checkpoint import state_dict as alike  # names are, on every rung
from torch.distributed.elastic.multiprocessing.errors import record
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.utils.checkpoint import checkpoint

CLOTHES = Path(__file__).parents[1] / "src/torchladder/bundled/fashion_mnist_small.npz"
SIDE, GREYS, CLASSES = 14, 16, 10  # a picture is its class, then 14 x 14 grey levels
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
OPTIONS = {  # default and meaning; those before "micro" are fixed once a run has begun
    "layers": (3, "number of blocks"),
    "width": (64, "size of a token's embedding"),
    "heads": (4, "attention heads"),
    "kv_heads": (0, "heads of keys and values; 0: as many as --heads"),
    "vocabulary": (0, "number of token ids; 0: the highest in the data + 1"),
    "context": (SIDE * SIDE, "tokens per sequence; a picture has 196"),
    "tied": (False, "let the output layer use the embedding's weights"),
    "lora": (0, "rank of adapters, which alone learn, on the weights of --base; 0: none"),
    "dropout": (0.0, "probability, below 1"),
    "steps": (1500, "optimizer steps in all; the learning rate is planned over them"),
    "batch": (32, "sequences per step, of all processes together"),
    "lr": (3e-3, "highest learning rate; it ends at a tenth"),
    "warm_up": (50, "steps until the highest learning rate"),
    "decay": (0.1, "weight decay, of matrices alone"),
    "clip": (1.0, "highest norm of the gradients"),
    "seed": (0, "of weights, order and dropout"),
    "micro": (32, "sequences that a process computes at once; more are accumulated"),
    "shard": (int(os.environ.get("LOCAL_WORLD_SIZE", 1)), "hsdp: processes that share a model"),
    "compile": (False, "compile each block with torch.compile"),
    "recompute": (False, "recompute activations in the backward pass: a third more work"),
    "log_every": (50, "steps between two lines and validations"),
    "save_every": (250, "steps between two checkpoints, of which two are kept"),
    "peak": (0.0, "TFLOP/s of a device, for MFU; 0: measured by a matrix product"),
    "profile": (False, "write a trace of steps 4 and 5 to --out, for ui.perfetto.dev"),
}
STAYS = [*OPTIONS][: [*OPTIONS].index("micro")]
FIXED = [*STAYS, "precision", "sequences", "checksum"]
SHAPE = ["layers", "width", "heads", "kv_heads", "vocabulary", "tied"]  # of the weights of --base
LIMITS = {"seed": (0, 2**31), "lora": (0, 10**6), "dropout": (0, 0.999), "decay": (0, 1000)}
LIMITS |= {"vocabulary": (0, 10**7), "clip": (1e-12, math.inf), "peak": (0, 10**9)}
LIMITS |= {"layers": (1, 10**4), "width": (1, 10**6)}
MALFORMED = ValueError, KeyError, TypeError, RecursionError  # of JSON that is not as we wrote it
HOLDER = re.compile(r"process \d+ on (\S+), since [\d-]+ [\d:]+")  # all that .run.lock says
CODES = re.compile(r"[\0-\x1f\x7f-\x9f]")  # of terminals, which a path may have
BEAT = 10  # seconds between two signs of life in it
HIDDEN = 60  # seconds that a network file system may not show what another host wrote


# --- the model ----------------------------------------------------------------------------------


def rotated(x, place):
    """Rotary position embedding: pairs of numbers, turned by an angle that grows with the place."""
    half = x.shape[-1] // 2
    angles = place[:, None] * 10_000 ** -(torch.arange(half, device=x.device) / half)
    (a, b), cos, sin = x.float().chunk(2, dim=-1), angles.cos(), angles.sin()
    return torch.cat([a * cos - b * sin, a * sin + b * cos], dim=-1).type_as(x)


class Linear(nn.Linear):
    """Without a bias; with --lora, beside it the change that learns (arXiv:2106.09685)."""

    def __init__(self, inputs, outputs, args):
        super().__init__(inputs, outputs, bias=False)
        self.rank = getattr(args, "lora", 0)
        if self.rank:
            self.lora_a = nn.Parameter(torch.empty(self.rank, inputs))
            self.lora_b = nn.Parameter(torch.empty(outputs, self.rank))

    def forward(self, x):
        y = super().forward(x)
        return y + F.linear(F.linear(x, self.lora_a), self.lora_b) if self.rank else y


class Block(nn.Module):
    """Attention, then a gated MLP; each is added to its input."""

    def __init__(self, args):
        super().__init__()
        self.args, width, self.head = args, args.width, args.width // args.heads
        hidden = 16 * round(width / 6)  # 8/3 of the width: as many weights as in a plain MLP
        self.norm1, self.norm2 = nn.RMSNorm(width), nn.RMSNorm(width)
        self.qkv = Linear(width, (args.heads + 2 * args.kv_heads) * self.head, args)
        self.out = Linear(width, width, args)
        self.gate_up = Linear(width, 2 * hidden, args)
        self.down = Linear(hidden, width, args)

    def forward(self, x, place, cache=None):
        if self.args.recompute and self.training:  # keeps x alone, and computes the rest again
            return checkpoint(self.compute, x, place, use_reentrant=False)
        return self.compute(x, place, cache)

    def compute(self, x, place, cache=None):
        (batch, length, width), args = x.shape, self.args
        heads = self.qkv(self.norm1(x)).view(batch, length, -1, self.head).transpose(1, 2)
        q, k, v = heads.split([args.heads, args.kv_heads, args.kv_heads], dim=1)
        q, k = rotated(q, place), rotated(k, place)
        if cache is not None:  # keys and values of the tokens before, which stay as they are
            if cache:
                k, v = torch.cat([cache[0], k], dim=2), torch.cat([cache[1], v], dim=2)
            cache.clear()
            cache.extend((k, v))
        gqa = args.heads != args.kv_heads  # a T4 has no fused kernel for it
        y = F.scaled_dot_product_attention(q, k, v, is_causal=length > 1, enable_gqa=gqa)
        y = self.out(y.transpose(1, 2).reshape(batch, length, width))
        x = x + F.dropout(y, args.dropout, self.training)
        gate, up = self.gate_up(self.norm2(x)).chunk(2, dim=-1)
        return x + F.dropout(self.down(F.silu(gate) * up), args.dropout, self.training)


class GPT(nn.Module):
    """From token ids, (batch, length), to a score for each possible next token."""

    def __init__(self, args):
        super().__init__()
        self.embedding = nn.Embedding(args.vocabulary, args.width)
        self.blocks = nn.ModuleList(Block(args) for _ in range(args.layers))
        self.norm = nn.RMSNorm(args.width)
        self.head = None if args.tied else nn.Linear(args.width, args.vocabulary, bias=False)
        for name, parameter in self.named_parameters() if getattr(args, "lora", 0) else ():
            parameter.requires_grad_("lora" in name)

    def forward(self, tokens, caches=None):
        before = caches[0][0].shape[2] if caches and caches[0] else 0
        place = torch.arange(before, before + tokens.shape[1], device=tokens.device)
        x = self.embedding(tokens)
        for i, block in enumerate(self.blocks):
            x = block(x, place, caches and caches[i])
        x = self.norm(x)
        return self.head(x) if self.head is not None else F.linear(x, self.embedding.weight)

    @torch.no_grad()
    def initialize(self, seed, base=None):
        """Draw each parameter from a seed of its own: alike on every rung, sharded or not."""
        for i, (name, value) in enumerate(self.named_parameters()):
            adds = name.endswith(("out.weight", "down.weight"))  # to what all blocks add to
            std = 0.02 / (2 * len(self.blocks)) ** 0.5 if adds else 0.02
            std *= not name.endswith("lora_b")  # at first, the adapters change nothing
            new = torch.randn(value.shape, generator=torch.Generator().manual_seed(1000 * seed + i))
            new = torch.ones(value.shape) if "norm" in name else new * std
            if base and "lora" not in name:
                new = base.get_tensor(name).float()
                new.isfinite().all() or leave(f"--base: {name} has numbers that are not finite")
            new = new.to(value.device)
            if isinstance(value, DTensor):  # every rank has drawn the same: nothing to send
                at = value.device_mesh, value.placements
                new = distribute_tensor(new, *at, src_data_rank=None)
            value.copy_(new)


def flops_of(args, model):
    """Of training, per token: what the model needs, and what is computed with --recompute.

    Two for each weight of a matrix, and attention over the whole context, as papers count it
    (PaLM, arXiv:2204.02311, appendix B); three times that with the backward pass, twice where
    weights are frozen.
    """
    matrices = [p for p in model.blocks.parameters() if p.dim() > 1]
    head = model.embedding.weight if model.head is None else model.head.weight
    attention = 4 * args.layers * args.context * args.width
    needed = sum(2 * (2 + p.requires_grad) * p.numel() for p in [*matrices, head]) + 3 * attention
    last = sum(block.down.weight.numel() for block in model.blocks)  # kept: the next one's input
    again = 2 * sum(p.numel() for p in matrices) + attention - 2 * last
    return needed, needed + args.recompute * again


# --- data ---------------------------------------------------------------------------------------


def read_sequences(args):
    """Token ids to train on and to validate with, each (count, context + 1); the highest."""
    if not args.data.is_file():  # a pipe would wait
        raise FileNotFoundError(2, "no such file")
    if args.data.suffix == ".npz":  # pictures: 14 x 14 means in 16 grey levels, after their class
        parts, arrays = [], np.load(args.data)
        if sum(i.file_size for i in arrays.zip.infolist()) > 100 * args.data.stat().st_size:
            raise ValueError  # pictures are not packed so well
        for split in ("train", "test"):
            images, labels = arrays[f"{split}_images"], arrays[f"{split}_labels"]
            if images.dtype != np.uint8 or not set() < {*labels.flat} <= {*range(CLASSES)}:
                raise ValueError
            blocks = images.reshape(-1, SIDE, 2, SIDE, 2)
            greys = blocks.mean((2, 4)).reshape(-1, SIDE * SIDE) * GREYS // 256
            parts.append(np.column_stack([GREYS + labels, greys]))
        args.vocabulary = GREYS + CLASSES
        return *parts, args.vocabulary - 1
    tokens = np.load(args.data, mmap_mode="r", allow_pickle=False)  # read as it is needed
    kind = tokens.dtype.kind
    if tokens.ndim != 1 or kind not in "iu" or (kind == "i" and tokens.min() < 0):
        raise ValueError
    first = os.environ.get("LOCAL_RANK", "0") == "0"  # of each host: it reads all
    highest = int(tokens.max()) if first or not args.vocabulary else 0
    args.vocabulary = args.vocabulary or highest + 1
    windows = np.lib.stride_tricks.sliding_window_view(tokens, args.context + 1)[:: args.context]
    held_out = min(1024, max(1, len(windows) // 20))  # the end
    return windows[:-held_out], windows[-held_out:], highest


def batches(train, args, done, rank, ranks):
    """After the steps that are done, this rank's share of each batch, the same on any number."""
    per_epoch, order = len(train) // args.batch, None
    for step in range(done, args.steps):
        epoch, place = divmod(step, per_epoch)
        if order is None or place == 0:
            order = np.random.default_rng([args.seed, epoch]).permutation(len(train))
        rows = order[place * args.batch :][rank : args.batch : ranks]
        mine = torch.from_numpy(train[rows].astype(np.int64))
        yield mine.pin_memory() if args.device.type == "cuda" else mine  # copied beside computing


# --- the device, the ranks, the precision -------------------------------------------------------


def say(sentence):
    with contextlib.suppress(OSError):  # the terminal is gone
        print(CODES.sub("?", sentence), flush=True)


def leave(sentence):
    """End this rank. The first one says why: of each host, and of all once they have met."""
    met = dist.is_initialized()
    if os.environ.get("RANK" if met else "LOCAL_RANK", "0") == "0":
        sys.exit(CODES.sub("?", sentence))
    time.sleep(5 if met else 30)  # the first end is the end of all
    sys.exit(1)


def join(args):
    """Add to `args` the device, this rank, the number of ranks and the precision."""
    device = torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")
    backend, alone = dist.get_default_backend_for_device(device), "RANK" not in os.environ
    group = {"store": dist.HashStore(), "rank": 0, "world_size": 1} if alone else {}
    if device.type != "cpu":
        here, cards = int(os.environ.get("LOCAL_WORLD_SIZE", 1)), torch.accelerator.device_count()
        if here > cards:
            leave(f"{here} processes on a host that has {cards} GPU(s): --nproc-per-node={cards}")
        device = torch.device(device.type, int(os.environ.get("LOCAL_RANK", 0)))
        torch.accelerator.set_device_index(device.index)
    if backend != "gloo":  # for the GPU; gloo then sends what is on the CPU, such as a signal
        backend, group["device_id"] = f"cpu:gloo,{device.type}:{backend}", device
    dist.init_process_group(backend, **group)
    args.device, args.rank, args.ranks = device, dist.get_rank(), dist.get_world_size()
    if args.precision == "auto":  # a T4 emulates bf16, slowly
        cuda = device.type == "cuda"
        real = cuda and torch.cuda.is_bf16_supported(including_emulation=False)
        args.precision = "bf16" if real else "fp16" if cuda else "fp32"
    if (args.parallel == "none") != alone:
        leave(f"--parallel {args.parallel}: start none with python, the others with torchrun")
    if args.parallel == "hsdp" and args.ranks % args.shard:
        leave(f"--shard {args.shard}: {args.ranks} processes are no multiple of it")


def parallelize(model, args):
    """`model` as its rung calls it; only here do its parameters get memory, each rank its share."""
    for block in model.blocks if args.compile else ():
        block.compile()
    if args.parallel in ("fsdp", "hsdp"):
        shape, names = (args.ranks,), ("shard",)
        if args.parallel == "hsdp":
            shape, names = (args.ranks // args.shard, args.shard), ("replicate", "shard")
        mesh = dist.init_device_mesh(args.device.type, shape, mesh_dim_names=names)
        policy = MixedPrecisionPolicy(DTYPES[args.precision], torch.float32)  # weights, gradients
        for part in [*model.blocks, model]:  # a part is gathered when it computes, then dropped
            fully_shard(part, mesh=mesh, mp_policy=policy)
        for this, following in zip(model.blocks, model.blocks[1:], strict=False):
            this.set_modules_to_forward_prefetch([following])  # gathered while this one computes
            following.set_modules_to_backward_prefetch([this])
    model.to_empty(device=args.device).initialize(args.seed, args.weights)
    if args.parallel != "ddp":
        return model
    ids = [args.device] if args.device.type != "cpu" else None
    return nn.parallel.DistributedDataParallel(model, ids, gradient_as_bucket_view=True)


def measure_peak(args):
    """Multiplications and additions per second of a large matrix product."""
    for size in (1024, 8192):
        one, seconds = torch.randn(size, size, device=args.device, dtype=DTYPES[args.precision]), []
        for _ in range(5):
            begin = time.perf_counter()
            (one @ one)[0, 0].item()  # waits for it
            seconds.append(time.perf_counter() - begin)
        if args.device.type == "cpu" or min(seconds) > 0.003:  # slow enough to be timed
            break
    if args.device.type != "cpu":
        torch.accelerator.reset_peak_memory_stats()  # the product is not training's
    return 2 * size**3 / min(seconds)


# --- checkpoints --------------------------------------------------------------------------------


def whole_ones(out):
    """The run's checkpoints, oldest first: a whole one has .metadata, which is written last."""
    return sorted(file.parent for file in out.glob(f"step-{'[0-9]' * 8}/.metadata"))


def remove(folder):
    """What DCP has written there; the folder, too, if nothing else is in it."""
    for file in [folder / ".metadata", *folder.glob("__*_*.distcp")]:
        file.unlink(missing_ok=True)
    with contextlib.suppress(OSError):
        folder.rmdir()


def hold(args):
    """Lock --out until this process ends, however it does; who has it, if another run does."""
    args.out.mkdir(parents=True, exist_ok=True)
    path, flags = args.out / ".run.lock", os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW
    lock, host = os.fdopen(os.open(path, flags, 0o666), "r+", errors="replace"), os.uname().nodename
    with tempfile.TemporaryFile(dir=args.out) as new:  # on the clock that dates the lock
        text, silent = lock.read(200), os.fstat(new.fileno()).st_mtime - path.stat().st_mtime
    if text and not (holder := HOLDER.fullmatch(text)):
        return "its .run.lock is not of this program"
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        # Some file systems keep a lock on one host, or none: there its age tells.
        busy = text and holder[1] != host and silent < 6 * BEAT
    except OSError as error:
        busy = isinstance(error, BlockingIOError) or (text and silent < 6 * BEAT)
    if busy:
        return f"{text or 'another run'}, last heard of {silent:.0f} s ago, is writing there"
    lock.seek(0)
    lock.truncate()
    lock.write(f"process {os.getpid()} on {host}, {time.strftime('since %F %T')}")
    lock.flush()
    args.lock = lock  # closed, it would be free
    threading.Thread(target=live, args=[lock], daemon=True).start()


def live(lock):
    with contextlib.suppress(OSError, ValueError):  # it is closed
        while True:
            os.utime(lock.fileno())
            time.sleep(BEAT)


def find_start(args):
    """The steps of the checkpoints in --out, newest first; a sentence if it is no run like this."""
    if path := args.export:
        free = not path.exists() or read_base(path)[1]
        below = args.out.resolve() in path.resolve().parents[1:]  # such as in a checkpoint
        itself = args.base and path.resolve() == args.base.resolve()
        if path.suffix != ".safetensors" or not free or below or itself:
            way = "that is new or that --export wrote: not --base, nor one in a folder of --out"
            return f"--export {path}: name a .safetensors file {way}"
        path.parent.mkdir(parents=True, exist_ok=True)
        beside(path).touch()  # found out now, not after the training
        beside(path).unlink()
    names = [*OPTIONS, "precision", "sequences", "checksum", "parallel", "data", "base"]
    now = {name: getattr(args, name) for name in names}
    now = json.loads(json.dumps(now, default=lambda path: str(path.resolve())))
    if not isinstance(found := compare(args, now), str):  # else the folder stays as it is
        if holder := hold(args):
            return f"--out {args.out}: {holder}. Name a new folder, or end it first"
        found = compare(args, now)  # another start may have come and gone
    if isinstance(found, str):
        return found
    steps, changes = found
    write(args.out / "settings.json", lambda path: path.write_text(json.dumps(now, indent=1)))
    if changes:
        say("; ".join(changes))
    return steps


def compare(args, now):
    """The steps in --out, newest first, and what is other than it was; or a sentence."""
    file = args.out / "settings.json"
    for path in args.out.glob("*"):
        ours = re.fullmatch(r"step-\d{8}|settings\.json|log\.jsonl|\.run\.lock", path.name)
        odd = path.exists() and not (path.is_file() or path.is_dir())
        if ours and (path.is_symlink() or odd):
            return f"{path} is a link, a pipe or a device. Name a new folder"
    steps = [int(folder.name[5:]) for folder in reversed(whole_ones(args.out))]
    parts = [] if steps else args.out.glob(f"step-{'[0-9]' * 8}/__*_*.distcp")
    cut = sorted({f"{part.parent.name} has no .metadata" for part in parts})
    own = (".run.lock", ".settings.json")  # what a start that failed may leave
    foreign = f"--out {args.out} holds no run of this program: name a new folder to begin one"
    if cut and not (args.out / ".run.lock").exists():  # every run has it
        way = "Copy it again, with hidden files, or name a new folder"
        return f"--out {args.out}: {'; '.join(cut)}. {way}"
    try:
        new = all(path.name.endswith(own) for path in args.out.glob("*"))
        was = now if new else json.loads(file.read_text())
        changed = {k: f"{k} was {was[k]}, now {now[k]}" for k in now if was[k] != now[k]}
    except (FileNotFoundError, *MALFORMED):
        way = "begin the same run in a new folder, end it, and copy its settings.json here"
        way = f"{file} is missing or damaged. Take it from a backup, or: {way}"
        return way if steps or cut else foreign
    changed = changed if steps or cut else {}  # of a start that failed
    if other := [changed[name] for name in FIXED if name in changed]:
        other = "; ".join([*other, *cut])
        way = "Go on with the options, --data and --base as it began, or name a new folder"
        return f"--out {args.out}: {other}. {way}"
    return steps, [*changed.values(), *cut]


def sum_of(tensor, first):
    """Of its bits, each times a number of its place, from `first`: what has moved is seen, too."""
    total = 0
    for part in tensor.contiguous().view(torch.int32).flatten().split(2**22):
        times = torch.arange(first, first + len(part), device=part.device) * 0x1E3779B97F4A7C15
        total, first = total + (part * (times ^ times >> 29 | 1)).sum(), first + len(part)
    return total


def sums_of(state):
    """Checksums of each tensor, and of all else: the same whether it is sharded or not."""
    moments = state["optimizer"]["state"].values()
    tensors = [*state["model"].values(), *(m for kinds in moments for m in kinds.values())]
    sums = torch.zeros(len(tensors) + 1, dtype=torch.int64, device=tensors[0].device)
    shards = []
    for i, value in enumerate(tensors):
        first = 0
        if isinstance(value, DTensor):  # cut by rows, as torch.chunk cuts
            shards.append(i)
            group = value.device_mesh.get_group("shard")
            rows = -(-len(value) // dist.get_world_size(group))
            first = dist.get_rank(group) * rows * value.shape[1:].numel()
            value = value.to_local()
        sums[i] = sum_of(value, first)
    if shards:
        whole = sums.clone()
        dist.all_reduce(whole, group=group)
        sums[shards] = whole[shards]
    rest = [state["optimizer"]["param_groups"], state["scaler"], state["progress"].tolist()]
    sums[-1] = zlib.crc32(json.dumps(rest, sort_keys=True).encode())
    return sums


def state_of(model, optimizer, scaler, progress):
    """What a run has learnt, under names that are alike on every rung; without frozen weights."""
    learnt = alike.StateDictOptions(ignore_frozen_params=True)
    weights, moments = alike.get_state_dict(model, optimizer, options=learnt)
    state = {"model": weights, "optimizer": moments, "scaler": scaler.state_dict()}
    return state | {"progress": torch.tensor(progress, dtype=torch.float64)}


def load(folder, model, optimizer, scaler):
    """The loss since the last line, summed over steps, and their number; the step; the run."""
    state = state_of(model, optimizer, scaler, [0.0] * 4)
    state["sums"] = torch.zeros_like(sums_of(state))
    dcp.load(state, checkpoint_id=folder)
    if not torch.equal(state["sums"], sums_of(state)):
        raise ValueError("its numbers are not those that were saved")
    options = alike.StateDictOptions(strict=False)  # frozen weights are not in it
    parts = {"model_state_dict": state["model"], "optim_state_dict": state["optimizer"]}
    alike.set_state_dict(model, optimizer, **parts, options=options)
    scaler.load_state_dict(state["scaler"])
    return state["progress"].tolist()


def load_newest(args, steps, *parts):
    """From the newest checkpoint that is whole; those that are not are set aside."""
    damaged = {}
    logging.getLogger().setLevel(logging.ERROR)  # dcp warns with tracebacks of what is said here
    for step in steps:
        folder = args.out / f"step-{step:08d}"
        try:
            *progress, saved, mark = load(folder, *parts)
            if (saved, mark) != (step, args.mark):
                raise ValueError("it is another run's, or another step's")
        except (dcp.CheckpointException, ValueError) as error:  # on all ranks alike
            damaged[folder] = reason_of(error)
            continue
        for folder in damaged if args.rank == 0 else ():
            new = tempfile.mkdtemp(prefix=f"{folder.name}.damaged-", dir=args.out)
            say(f"{folder} is damaged ({damaged[folder]}): it is {folder.rename(new).name} now")
        return step, progress
    found = "; ".join(f"{folder.name}: {reason}" for folder, reason in damaged.items())
    leave(f"--out {args.out}: no checkpoint is whole ({found}). Take one from a backup")


def reason_of(error):
    if isinstance(error, dcp.CheckpointException):  # of the ranks that have one
        error = next(iter(error.failures.values()))[0]
    first = re.split(r"\. |;|\n", str(error))[0]  # what follows is advice that fits badly
    return f"{type(error).__name__}: {first}"


def beside(path):
    return path.with_name(f".{os.getpid()}.{path.name}")


def write(path, how):
    """Let `how` write beside `path`, then put it in its place, with the mode of a new file."""
    new = beside(path)
    try:
        new.touch()
        mode = new.stat().st_mode  # safetensors makes its own
        how(new)
        new.chmod(mode)
        with open(new, "rb") as file:
            os.fsync(file)  # the power may fail
        new.replace(path)
    finally:
        new.unlink(missing_ok=True)
    return path


# --- training -----------------------------------------------------------------------------------


def learning_rate(args, step):
    """Rises to --lr, then falls to a tenth of it along half a cosine."""
    after = max(0, step - args.warm_up) / max(1, args.steps - args.warm_up)
    return args.lr * min(step / args.warm_up, 0.55 + 0.45 * math.cos(math.pi * after))


def loss_of(model, tokens, args):
    dtype = DTYPES[args.precision]
    casts = dtype != torch.float32 and args.parallel in ("none", "ddp")  # fully_shard casts itself
    with torch.autocast(args.device.type, dtype, enabled=casts):
        scores = model(tokens[:, :-1])
    return F.cross_entropy(scores.float().flatten(0, 1), tokens[:, 1:].flatten())


def add_gradients(called, tokens, args, scaler):
    """The gradients of this rank's share, in parts that fit; averaged over ranks with the last."""
    parts, total = tokens.to(args.device, non_blocking=True).split(args.micro), 0
    for i, part in enumerate(parts, 1):
        if args.parallel == "hsdp":
            called.set_requires_all_reduce(i == len(parts))  # one, not one per part
        wait = args.parallel == "ddp" and i < len(parts)
        with called.no_sync() if wait else contextlib.nullcontext():
            loss = loss_of(called, part, args) * (len(part) / len(tokens))
            scaler.scale(loss).backward()
        total += loss.detach()
    return total


@torch.no_grad()
def validate(model, held_out, args):
    """Mean loss per token of what was not trained on, of which each rank takes a share."""
    model.eval()
    sums = torch.zeros(2)
    for first in range(0, len(held_out), args.micro * args.ranks):  # as many passes on every rank
        rows = [*range(first + args.rank, len(held_out), args.ranks)][: args.micro]
        tokens = held_out[rows or [0]].astype(np.int64)  # without a row, it computes for the others
        loss = loss_of(model, torch.from_numpy(tokens).to(args.device), args)
        sums += len(rows) * torch.tensor([loss.item(), 1])
    model.train()
    dist.all_reduce(sums)
    return (sums[0] / sums[1]).item()


def peak_memory(device):
    """In GB: allocated on the card; on a CPU, of the whole process."""
    if device.type == "cpu":
        unit = 1 if sys.platform == "darwin" else 1024
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 1e9
    return torch.accelerator.max_memory_allocated() / 1e9


def report(args, row):
    """A line to read and a line to plot, by rank 0."""
    said = "step {step}: loss {loss:.3f}, validation {validation:.3f}, norm {norm:.2f}, "
    said += "{tokens_per_second:,.0f} tokens/s, MFU {mfu:.1%}, HFU {hfu:.1%}, {memory_gb:.2f} GB"
    say(said.format(**row))
    with open(args.out / "log.jsonl", "a") as log:
        print(json.dumps(row), file=log)


def cut_log(args, start):
    """Leave what was logged before the checkpoint: what comes after it is computed again."""
    log = args.out / "log.jsonl"
    text = log.read_text(errors="replace") if log.exists() else ""
    rows = re.finditer(r'^{"step": (\d+), .*}\n', text, re.MULTILINE)  # whole ones
    kept = "".join(row[0] for row in rows if int(row[1]) <= start)
    write(log, lambda path: path.write_text(kept))


def profiler_of(args):
    if not args.profile:
        return contextlib.nullcontext()
    schedule = torch.profiler.schedule(wait=2, warmup=1, active=2, repeat=1)
    write = torch.profiler.tensorboard_trace_handler(args.out, f"rank{args.rank}")
    return torch.profiler.profile(schedule=schedule, on_trace_ready=write)


def train_model(args, model, called, optimizer, scaler, start, progress, data, held_out):
    (needs, computes), peak = flops_of(args, model), args.peak * 1e12 or measure_peak(args)
    told, usual = [], {}
    background = dist.new_group(backend="gloo")  # for saving, while the ranks train
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN:  # nohup
            usual[number] = signal.signal(number, lambda *_: told.append(True))
    if args.rank == 0:
        cut_log(args, start)
        count = sum(p.numel() for p in model.parameters())
        where = f"{args.parallel} on {args.ranks} x {args.device.type}"
        say(f"{count:,} parameters, {args.precision}, {where}, from step {start}")
    sums, since = progress[0], start - int(progress[1])  # of the losses after that step
    saving, clock, timed_from = None, time.perf_counter(), start
    with profiler_of(args) as profiler:
        for step, tokens in enumerate(data, start + 1):
            torch.manual_seed((args.seed * args.steps + step) * args.ranks + args.rank)  # dropout
            sums += add_gradients(called, tokens, args, scaler)
            scaler.unscale_(optimizer)
            norm = nn.utils.clip_grad_norm_(model.parameters(), args.clip)  # of all shards
            for group in optimizer.param_groups:
                group["lr"] = learning_rate(args, step)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            if profiler:
                profiler.step()
            stop = torch.tensor(len(told))
            dist.all_reduce(stop, dist.ReduceOp.MAX)  # all ranks stop after one step, or none
            line = step % args.log_every == 0 or step == args.steps
            save = stop or step % args.save_every == 0 or step == args.steps
            if line or save:
                seconds = time.perf_counter() - clock
                loss = torch.as_tensor(sums).double().cpu() / args.ranks
                dist.all_reduce(loss)
                validation = validate(model, held_out, args)
                if not math.isfinite(validation):
                    leave(f"step {step}: it diverged, and is not saved. Try a lower --lr.")
                clock = time.perf_counter() - seconds  # without validation
            if step == start + 1 and not line:  # it compiled, and woke the GPU
                clock, timed_from = time.perf_counter(), step
            if line:
                norm = norm.full_tensor() if isinstance(norm, DTensor) else norm
                rate = (step - max(since, timed_from)) * args.batch * args.context / seconds
                share = rate / args.ranks / peak
                row = {"step": step, "loss": loss.item() / (step - since), "norm": norm.item()}
                row |= {"learning_rate": group["lr"], "validation": validation}
                row |= {"tokens_per_second": rate, "memory_gb": peak_memory(args.device)}
                row |= {"mfu": share * needs, "hfu": share * computes}
                if args.rank == 0:
                    report(args, row)
                loss, sums, since, clock = 0, 0, step, time.perf_counter()
            if save:
                if saving:
                    saving.result()  # one at a time
                for folder in whole_ones(args.out)[:-1] if args.rank == 0 else ():
                    remove(folder)  # the last one stays until the next is whole
                progress = [float(loss), step - since, step, args.mark]
                state = state_of(model, optimizer, scaler, progress)
                state["sums"], folder = sums_of(state), args.out / f"step-{step:08d}"
                saving = dcp.async_save(state, checkpoint_id=folder, process_group=background)
            if stop:
                saving.result()
                leave(f"stopped by a signal: saved after step {step}; the same command goes on.")
    if saving:
        saving.result()
    for number, handler in usual.items():  # what comes now can be done again
        signal.signal(number, handler)


# --- what comes out -----------------------------------------------------------------------------


@torch.no_grad()
@torch.compiler.set_stance("force_eager")  # the cache grows: each step would compile again
def generate(model, tokens, count, ids, temperature=0.8, seed=0):
    """`tokens`, (batch, length), and `count` more in each row, all below `ids`."""
    model.eval()
    caches, new = [deque() for _ in model.blocks], tokens  # fully_shard would copy lists
    dice = torch.Generator(tokens.device).manual_seed(seed)
    for _ in range(count):
        scores = model(new, caches)[:, -1, :ids].float() / temperature
        new = torch.multinomial(scores.softmax(-1), 1, generator=dice)
        tokens = torch.cat([tokens, new], dim=1)
    return tokens


def draw(model, held_out, args):
    """Eight pictures of each class, as a PNG; or one sequence of tokens, bytes as text."""
    pictures = args.data.suffix == ".npz"
    first = np.tile(np.arange(GREYS, GREYS + CLASSES), 8)[:, None] if pictures else held_out[:1, :1]
    first = torch.from_numpy(first.astype(np.int64)).to(args.device)
    count, ids = (SIDE * SIDE, GREYS) if pictures else (min(args.context, 256), args.vocabulary)
    tokens = generate(model, first, count, ids)[:, 1:].cpu()  # by all ranks: it may be sharded
    if args.rank > 0:
        return
    if pictures:
        from PIL import Image

        sheet = tokens.view(8, CLASSES, SIDE, SIDE).transpose(1, 2).reshape(8 * SIDE, -1)
        sheet = Image.fromarray((sheet * 255 // (GREYS - 1)).byte().numpy())
        how = partial(sheet.resize((560, 448), Image.NEAREST).save, format="PNG")
    else:
        ids = tokens[0].tolist()
        text = bytes(ids).decode(errors="replace") if args.vocabulary <= 256 else str(ids)
        how = partial(Path.write_text, data=text + "\n", encoding="utf-8")
    file = args.out / f"drawing.{'png' if pictures else 'txt'}"
    say(f"drawn: {write_somewhere(file, how).name}")


def export(model, args):
    """The whole weights to one file, adapters merged: gathered by all ranks, for rank 0."""
    whole = alike.StateDictOptions(full_state_dict=True, cpu_offload=True)
    weights = alike.get_model_state_dict(model, options=whole)
    for name in [name for name in weights if name.endswith(".lora_b")]:
        a, layer = name.replace("lora_b", "lora_a"), name.replace("lora_b", "weight")
        weights[layer] = weights[layer] + weights.pop(name) @ weights.pop(a)
    options = {name: json.dumps(getattr(args, name)) for name in OPTIONS} | {"lora": "0"}
    how = partial(save_file, weights, metadata=options)
    lost = args.rank == 0 and write_somewhere(args.export, how) != args.export
    agree(args, f"--export {args.export} is as it was" if lost else None)


def write_somewhere(path, how):
    """As `write`; where that fails, in a new temporary folder: what was computed is not lost."""
    try:
        return write(path, how)
    except (OSError, SafetensorError) as error:
        other = write(Path(tempfile.mkdtemp()) / path.name, how)
        say(f"{path} cannot be written ({error}): written to {other}")
        return other


# --- the run ------------------------------------------------------------------------------------


def parse():
    lines = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=lines)
    parser.error = lambda sentence: leave(f"{sentence}. --help lists the options")
    add, rungs = parser.add_argument, ["none", "ddp", "fsdp", "hsdp"]
    usual, each = "ddp" if "RANK" in os.environ else "none", "the model: one per process"
    add("--out", type=Path, required=True, help="the run's own folder, which all hosts see")
    add("--data", type=Path, default=CLOTHES, help="token ids (.npy) or pictures (.npz)")
    add("--base", type=Path, help="weights to begin with, which --export wrote")
    add("--parallel", choices=rungs, default=usual, help=f"{each}, shared by all, or by --shard")
    add("--precision", choices=["auto", *DTYPES], default="auto", help="auto: the device's best")
    add("--export", type=Path, help="in the end, write weights and options to this .safetensors")
    for name, (default, what) in OPTIONS.items():
        flag = {"action": argparse.BooleanOptionalAction}  # also --no-recompute
        kind = {"type": type(default)} if default is not False else flag
        fixed = "; fixed once a run has begun" if name in STAYS else ""
        option, text = f"--{name.replace('_', '-')}", f"{what} ({default}{fixed})"
        add(option, default=default, help=text, **kind)
    was = settings_of(parser.parse_known_args()[0].out)
    can_be = {"parallel": ["none"] if usual == "none" else rungs[1:], "precision": [*DTYPES]}
    was = {name: value for name, value in was.items() if value in can_be.get(name, [value])}
    parser.set_defaults(**was)  # what is not given stays as it was
    base, shape = read_base(parser.parse_known_args()[0].base)
    parser.set_defaults(**shape)
    args = parser.parse_args()
    args.weights, args.shape, args.kv_heads = base, shape, args.kv_heads or args.heads
    for name, (default, _) in OPTIONS.items():
        usual = (1, 10**9) if type(default) is int else (1e-12, 1e38)
        (least, most), value = LIMITS.get(name, usual), getattr(args, name)
        if type(default) is not bool and not least <= value <= most:  # nan is neither
            leave(f"--{name.replace('_', '-')} must be from {least} to {most}, not {value}")
    return args


def settings_of(out):
    """The options that a run began with, those of their types."""
    usual = {name: default for name, (default, _) in OPTIONS.items()}
    usual |= dict.fromkeys(["parallel", "precision", "data", "base"], "")
    with contextlib.suppress(OSError, AttributeError, *MALFORMED):  # find_start says so
        was = json.loads(file.read_text() if (file := out / "settings.json").is_file() else "")
        return {name: was[name] for name in usual if type(was.get(name)) is type(usual[name])}
    return {}


def read_base(path):
    """A file that --export wrote, and the options that gave its weights their shapes; or none."""
    with contextlib.suppress(OSError, SafetensorError, *MALFORMED):
        if path and path.is_file():  # a pipe would wait
            with open(path, "rb") as file:  # its own name may be no UTF-8
                base = safe_open(f"/dev/fd/{file.fileno()}", "pt")
            shape = {name: json.loads(base.metadata()[name]) for name in SHAPE}
            if all(type(value) is type(OPTIONS[name][0]) for name, value in shape.items()):
                return base, shape
    return None, {}


def read_and_check(args):
    """The sequences to train on and to validate with; or a sentence, if an option is wrong."""
    try:
        train, held_out, most = read_sequences(args)
    except Exception as error:  # of many kinds, whose words advise badly
        wanted = ".npy of more than --context whole numbers from 0 in one dimension"
        wanted += f", nor .npz of uint8 pictures and labels below {CLASSES}"
        why = getattr(error, "strerror", None) or type(error).__name__
        return f"--data {args.data} ({why}): no {wanted}"
    other, base = [k for k, v in args.shape.items() if getattr(args, k) != v], args.base
    for wrong, sentence in [
        (base and not args.shape, f"--base {base}: --export of this program has not written it"),
        (args.vocabulary > 10**7, f"--data {args.data}: ids must be below 10,000,000"),
        (other, f"--base: {' and '.join(other)} must be as in {base}: {args.shape}"),
        (most >= args.vocabulary, f"--vocabulary {args.vocabulary}: the data has the id {most}"),
        (args.width % (2 * args.heads), f"--width must be a multiple of 2 x --heads {args.heads}"),
        (args.heads % args.kv_heads, f"--heads must be a multiple of --kv-heads {args.kv_heads}"),
        (args.batch % args.ranks, f"--batch {args.batch} does not divide among {args.ranks} ranks"),
        (args.batch > len(train), f"--batch {args.batch}: the data has {len(train)} sequences"),
        (args.context + 1 != train.shape[1], "--context: a picture has 196 tokens"),
        (args.lora and not base, "--lora changes weights: name their file as --base"),
    ]:
        if wrong:
            return sentence
    args.sequences = len(train)
    args.checksum = zlib.crc32(np.ascontiguousarray(train[:: 1 + len(train) // 1000]))  # a sample
    if base:
        args.checksum = zlib.crc32(np.memmap(base, mode="r"), args.checksum)
    fixed = json.dumps([getattr(args, name) for name in STAYS])
    args.mark = zlib.crc32(fixed.encode(), args.checksum)  # of this run's checkpoints
    return train, held_out


def agree(args, found=None):
    """What rank 0 has found, if no rank has found a sentence, and all are in the same run."""
    names, every = [*FIXED, "parallel", "micro", "log_every", "save_every"], [None] * args.ranks
    dist.all_gather_object(every, (found, {name: getattr(args, name, None) for name in names}))
    for rank, (one, options) in enumerate(every):
        if isinstance(one, str):
            leave(f"process {rank}: {one}" if rank else one)
        if other := [name for name in names if options[name] != every[0][1][name]]:
            other = f"process {rank} has other values of {', '.join(other)} than process 0"
            leave(f"{other}. Give all hosts the same options, --data and --base")
    return every[0][0]


def run(args):
    found, steps = read_and_check(args), None
    agree(args, found if isinstance(found, str) else None)
    (train, held_out), lock = found, args.out / ".run.lock"
    old = {name: args.weights.get_slice(name) for name in args.shape and args.weights.keys()}
    if 0 < len(old) < args.layers or {p.get_dtype() for p in old.values()} - {"F32", "F16", "BF16"}:
        leave(f"--base {args.base}: no weights of {args.layers} layers in F32, F16 or BF16 alone")
    with torch.device("meta"):  # without memory yet
        model = GPT(args)
    shapes = {name: [*p.shape] for name, p in model.named_parameters() if "lora" not in name}
    if old and shapes != {name: part.get_shape() for name, part in old.items()}:
        leave(f"--base {args.base}: its weights are not those that its options promise")
    if args.rank == 0:
        try:
            steps = find_start(args)
        except OSError as error:
            steps = f"{error.filename or args.out}: {error.strerror}. Name a writable folder"
    steps, way = agree(args, steps), "Name a folder that all hosts see"
    end = time.monotonic() + HIDDEN
    if not os.path.exists(lock) and os.environ.get("LOCAL_RANK", "0") == "0":
        say(f"process {args.rank} waits up to {HIDDEN} s until {args.out} shows here")
    while not os.path.exists(lock) and time.monotonic() < end:
        time.sleep(1)
    agree(
        args, None if os.path.exists(lock) else f"{lock}, which process 0 made, is not there. {way}"
    )
    called = parallelize(model, args)
    learn = [p for p in model.parameters() if p.requires_grad]
    matrices, others = ([p for p in learn if (p.dim() > 1) == big] for big in (True, False))
    groups = {"params": matrices, "weight_decay": args.decay}, {"params": others, "weight_decay": 0}
    groups = [group for group in groups if group["params"]]
    optimizer = torch.optim.AdamW(groups, args.lr, betas=(0.9, 0.95), fused=True)
    scaler = torch.amp.GradScaler(args.device.type, enabled=args.precision == "fp16")
    start, progress = 0, [0, 0]
    if steps:
        # After a first backward pass, DDP puts the gradients into other buckets. With three ranks
        # or more that changes the order of sums, and so the last digits of a run that goes on.
        for _ in range(2 if args.parallel == "ddp" else 0):
            add_gradients(called, torch.from_numpy(held_out[:1].astype(np.int64)), args, scaler)
        optimizer.zero_grad()
        start, progress = load_newest(args, steps, model, optimizer, scaler)
    data = batches(train, args, start, args.rank, args.ranks)
    train_model(args, model, called, optimizer, scaler, start, progress, data, held_out)
    draw(model, held_out, args)
    if args.export:
        export(model, args)
    dist.barrier()
    del called  # DDP that outlives its group may hang under gloo


@record
def main():
    args = parse()
    args.lock = None
    try:
        join(args)
        run(args)
    except (OSError, SafetensorError, dcp.CheckpointException) as error:
        leave(f"{reason_of(error)}. Is the disk full, was --out moved? The same command goes on.")
    finally:
        if args.lock:
            args.lock.truncate(0)  # ended, not killed
            args.lock.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    if hasattr(sys.stdout, "reconfigure"):  # not if it is closed, or a notebook's
        sys.stdout.reconfigure(errors="backslashreplace")  # a path may be no UTF-8
    main()
