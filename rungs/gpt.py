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
import ctypes
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
import time
import zlib
from collections import deque
from pathlib import Path

if __name__ == "__main__" and "TORCHELASTIC_RUN_ID" in os.environ and sys.platform == "linux":
    ctypes.CDLL(None).prctl(1, signal.SIGTERM)  # PR_SET_PDEATHSIG: this rank ends with torchrun
import numpy as np
import safetensors.torch
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from torch import nn
from torch.distributed.checkpoint import state_dict as alike  # names are, on every rung
from torch.distributed.elastic.multiprocessing.errors import record
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.utils.checkpoint import checkpoint

CLOTHES = Path(__file__).parents[1] / "src/torchladder/bundled/fashion_mnist_small.npz"
RUNGS = ["none", "ddp", "fsdp", "hsdp"]
SIDE, GREYS, CLASSES = 14, 16, 10  # a picture is its class, then 14 x 14 grey levels
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
OPTIONS = {  # default, least, meaning; those before "micro" are fixed once a run has begun
    "layers": (3, 1, "number of blocks"),
    "width": (64, 1, "size of a token's embedding"),
    "heads": (4, 1, "attention heads"),
    "kv_heads": (0, 0, "heads of keys and values; 0: as many as --heads"),
    "vocabulary": (0, 0, "number of token ids; 0: the highest in the data + 1"),
    "context": (SIDE * SIDE, 1, "tokens per sequence; of pictures, 196"),
    "lora": (0, 0, "rank of adapters, which alone learn, on the weights of --base; 0: none"),
    "dropout": (0.0, 0, "probability, below 1"),
    "steps": (1500, 1, "optimizer steps in all; the learning rate is planned over them"),
    "batch": (32, 1, "sequences per step, of all processes together"),
    "lr": (3e-3, 1e-12, "highest learning rate; it ends at a tenth"),
    "warm_up": (50, 1, "steps until the highest learning rate"),
    "decay": (0.1, 0, "weight decay, of matrices alone"),
    "clip": (1.0, 1e-12, "highest norm of the gradients"),
    "seed": (0, 0, "of weights, order and dropout"),
    "micro": (32, 1, "sequences that a process computes at once; more are accumulated"),
    "shard": (int(os.environ.get("LOCAL_WORLD_SIZE", 1)), 1, "hsdp: processes that share a model"),
    "compile": (False, 0, "compile each block with torch.compile"),
    "recompute": (False, 0, "recompute activations in the backward pass: 1.2 times the work"),
    "log_every": (50, 1, "steps between two lines and validations"),
    "save_every": (250, 1, "steps between two checkpoints, of which two are kept"),
    "peak": (0.0, 0, "TFLOP/s of a device, for MFU; 0: measured by a matrix product"),
    "profile": (False, 0, "write a trace of steps 4 and 5 to --out, for ui.perfetto.dev"),
}
STAYS = [*OPTIONS][: [*OPTIONS].index("micro")]
FIXED = [*STAYS, "precision", "sequences", "checksum"]
SHAPE = ["layers", "width", "heads", "kv_heads", "vocabulary"]  # of the weights of --base
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
        self.args = args
        self.embedding = nn.Embedding(args.vocabulary, args.width)
        self.blocks = nn.ModuleList(Block(args) for _ in range(args.layers))
        self.norm = nn.RMSNorm(args.width)
        self.head = nn.Linear(args.width, args.vocabulary, bias=False)
        for name, parameter in self.named_parameters() if getattr(args, "lora", 0) else ():
            parameter.requires_grad_("lora" in name)

    def forward(self, tokens, caches=None):
        before = caches[0][0].shape[2] if caches and caches[0] else 0
        place = torch.arange(before, before + tokens.shape[1], device=tokens.device)
        x = self.embedding(tokens)
        for i, block in enumerate(self.blocks):
            if self.args.recompute and self.training:  # keeps x alone, and computes the rest again
                x = checkpoint(block, x, place, use_reentrant=False)
            else:
                x = block(x, place, caches and caches[i])
        return self.head(self.norm(x))

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
            new = new.to(value.device)
            if isinstance(value, DTensor):  # every rank has drawn the same: nothing to send
                new = distribute_tensor(
                    new, value.device_mesh, value.placements, src_data_rank=None
                )
            value.copy_(new)


def flops_of(args, model):
    """What training needs per token.

    Two for each weight of a matrix, and attention over the whole context, as papers count it
    (PaLM, arXiv:2204.02311, appendix B); three times that with the backward pass, twice where
    weights are frozen.
    """
    matrices = [model.head.weight, *(p for p in model.blocks.parameters() if p.dim() > 1)]
    attention = 4 * args.layers * args.context * args.width
    return sum(2 * (2 + p.requires_grad) * p.numel() for p in matrices) + 3 * attention


# --- data ---------------------------------------------------------------------------------------


def read_pictures(args):
    """14 x 14 means in 16 grey levels, each after its class."""
    arrays, rows = np.load(args.data), []
    for split in ("train", "test"):
        images, labels = arrays[f"{split}_images"], arrays[f"{split}_labels"]
        if images.dtype != np.uint8 or not set() < {*labels.flat} <= {*range(CLASSES)}:
            raise ValueError
        blocks = images.reshape(-1, SIDE, 2, SIDE, 2)
        greys = blocks.mean((2, 4)).reshape(-1, SIDE * SIDE) * GREYS // 256
        rows.append(np.column_stack([GREYS + labels, greys]))
    return *rows, GREYS + CLASSES - 1


def read_tokens(args):
    """Sequences of one long one, which begin every --context tokens; the last 5 % are held out."""
    tokens = np.load(args.data, mmap_mode="r")  # read as it is needed
    kind = tokens.dtype.kind
    if tokens.ndim != 1 or kind not in "iu" or (kind == "i" and tokens.min() < 0):
        raise ValueError
    windows = np.lib.stride_tricks.sliding_window_view(tokens, args.context + 1)[:: args.context]
    held_out = min(1024, max(1, len(windows) // 20))
    return windows[:-held_out], windows[-held_out:], int(tokens.max())


def batches(train, args, done):
    """After the steps that are done, this rank's share of each batch, the same on any number."""
    per_epoch = len(train) // args.batch
    for step in range(done, args.steps):
        epoch, place = divmod(step, per_epoch)
        if step == done or place == 0:
            order = np.random.default_rng([args.seed, epoch]).permutation(len(train))
        rows = order[place * args.batch :][args.rank : args.batch : args.ranks]
        mine = torch.from_numpy(train[rows].astype(np.int64))
        yield mine.pin_memory() if args.device.type == "cuda" else mine  # copied beside computing


# --- the device, the ranks, the precision -------------------------------------------------------


def say(sentence):
    with contextlib.suppress(OSError, UnicodeError):  # the terminal is gone, or lacks a letter
        print(sentence, flush=True)


def leave(sentence):
    """End this rank. The first one says why: of each host, and of all once they have met."""
    met = dist.is_initialized()
    if os.environ.get("RANK" if met else "LOCAL_RANK", "0") == "0":
        sys.exit(sentence)
    time.sleep(5 if met else 30)  # the first end is the end of all
    sys.exit(1)


def join(args):
    """Add to `args` the device, this rank, the number of ranks and the precision."""
    device = torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")
    backend, args.alone = dist.get_default_backend_for_device(device), "RANK" not in os.environ
    group = {"store": dist.HashStore(), "rank": 0, "world_size": 1} if args.alone else {}
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
    model.to_empty(device=args.device).initialize(args.seed, args.weights)
    if args.parallel != "ddp":
        return model
    return nn.parallel.DistributedDataParallel(model, gradient_as_bucket_view=True)


def measure_peak(args):
    """Multiplications and additions per second of a large matrix product."""
    for size in (1024,) if args.device.type == "cpu" else (512, 8192):
        one, seconds = torch.randn(size, size, device=args.device, dtype=DTYPES[args.precision]), []
        for _ in range(5):
            begin = time.perf_counter()
            (one @ one)[0, 0].item()  # waits for it
            seconds.append(time.perf_counter() - begin)
        if min(seconds) > 0.003:  # a simulated GPU, on which the large one takes hours
            break
    if args.device.type != "cpu":
        torch.accelerator.reset_peak_memory_stats()  # the product is not training's
    return 2 * size**3 / min(seconds)


# --- checkpoints --------------------------------------------------------------------------------

STEP = "step-" + "[0-9]" * 8


def whole_ones(out):
    """The run's checkpoints, oldest first: a whole one has .metadata, which is written last."""
    return sorted(file.parent for file in out.glob(f"{STEP}/.metadata"))


def remove(folder):
    """What DCP has written there; the folder, too, if nothing else is in it."""
    for file in [folder / ".metadata", *folder.glob("__*_*.distcp")]:
        file.unlink(missing_ok=True)
    with contextlib.suppress(OSError):
        folder.rmdir()


def hold(args):
    """Lock --out until this process ends, however it does; who has it, if another run does."""
    args.out.mkdir(parents=True, exist_ok=True)
    args.lock = lock = open(args.out / ".run.lock", "a+")  # closed, it would be free
    lock.seek(0)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return lock.read() or "another run"
    except OSError:
        pass  # a file system without locks
    lock.truncate(0)
    lock.write(f"process {os.getpid()} on {os.uname().nodename}, {time.strftime('since %F %T')}")
    lock.flush()
    return None


def find_start(args):
    """The steps of the checkpoints in --out, newest first; a sentence if it is no run like this."""
    if args.export:
        args.export.parent.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=args.export.parent).close()  # found out before the training
    names = [*FIXED, *OPTIONS, "parallel", "data", "base"]
    now = {name: getattr(args, name) for name in names}
    now = json.loads(json.dumps(now, default=lambda path: str(path.resolve())))
    here, way, folders = f"--out {args.out}", "or name a new folder", [*args.out.glob(STEP)]
    if not settings_of(args.out) and any(args.out.glob("[!.]*")):
        return f"{here}: no settings.json of this program. Take it from a backup, {way}"
    if any(folder.is_symlink() for folder in folders):
        return f"{here}: a {STEP} is a link. Copy what it leads to, {way}"
    if folders and not whole_ones(args.out) and not (args.out / ".run.lock").exists():
        return f"{here}: no checkpoint has .metadata. Copy it again, with hidden files, {way}"
    if holder := hold(args):
        return f"{here}: {holder} is writing there. End it first, {way}"
    steps = [int(folder.name[5:]) for folder in reversed(whole_ones(args.out))]
    was = settings_of(args.out) if steps else now  # a start that failed fixes nothing
    changed = {k: f"{k} was {was.get(k)}, now {now[k]}" for k in now if was.get(k) != now[k]}
    if other := "; ".join(changed[name] for name in FIXED if name in changed):
        return f"{here}: {other}. Go on with options, data, base and gpt.py as it began, {way}"
    write(args.out / "settings.json", json.dumps(now, indent=1).encode())
    if changed:
        say("; ".join(changed.values()))
    return steps


def settings_of(out):
    """The options of the run in this folder, if there is one."""
    with contextlib.suppress(OSError, ValueError):
        was = json.loads((out / "settings.json").read_text())
        return was if "checksum" in was else {}
    return {}


def sums_of(state):
    """Of each tensor, the sum of its bits, and a checksum of all else: alike on every rung."""
    moments = state["optimizer"]["state"].values()
    tensors = [*state["model"].values(), *(m for kinds in moments for m in kinds.values())]
    rest = [state["optimizer"]["param_groups"], state["scaler"], state["progress"].tolist()]
    sums = [zlib.crc32(json.dumps(rest, sort_keys=True).encode())]
    for tensor in tensors:
        part = tensor.to_local() if isinstance(tensor, DTensor) else tensor
        total = part.contiguous().view(torch.int32).sum()
        if isinstance(tensor, DTensor):
            dist.all_reduce(total, group=tensor.device_mesh.get_group("shard"))
        sums.append(total.item())
    return torch.tensor(sums)


def state_of(model, optimizer, scaler, progress):
    """What a run has learnt, under names that are alike on every rung; without frozen weights."""
    learnt = alike.StateDictOptions(ignore_frozen_params=True)
    weights, moments = alike.get_state_dict(model, optimizer, options=learnt)
    state = {"model": weights, "optimizer": moments, "scaler": scaler.state_dict()}
    return state | {"progress": torch.tensor(progress, dtype=torch.float64)}


def load(folder, model, optimizer, scaler):
    """The losses of all sequences since the last line; the number of steps; the step."""
    state = state_of(model, optimizer, scaler, [0.0] * 3)
    state["sums"] = torch.zeros_like(sums_of(state))
    dcp.load(state, checkpoint_id=folder)
    if not torch.equal(state["sums"], sums_of(state)):
        raise ValueError("its numbers are not those that were saved")
    options = alike.StateDictOptions(strict=False)  # frozen weights are not in it
    parts = {"model_state_dict": state["model"], "optim_state_dict": state["optimizer"]}
    alike.set_state_dict(model, optimizer, **parts, options=options)
    scaler.load_state_dict(state["scaler"])
    loss, counted, step = state["progress"].tolist()
    return loss, int(counted), int(step)


def load_newest(args, steps, *parts):
    """From the newest checkpoint that is whole; those that are not are set aside."""
    damaged = {}
    logging.getLogger().setLevel(logging.ERROR)  # dcp warns with tracebacks of what is said here
    for step in steps:
        folder = args.out / f"step-{step:08d}"
        try:
            progress = load(folder, *parts)
        except (dcp.CheckpointException, ValueError) as error:  # on all ranks alike
            damaged[folder] = reason_of(error)
            continue
        for folder, reason in damaged.items() if args.rank == 0 else ():
            new = folder.rename(f"{folder}.damaged-{time.time_ns()}")
            say(f"{folder} is damaged ({reason}): it is {new.name} now")
        return progress
    found = "; ".join(f"{folder.name}: {reason}" for folder, reason in damaged.items())
    leave(f"--out {args.out}: no checkpoint is whole ({found}). Take one from a backup")


def reason_of(error):
    if isinstance(error, dcp.CheckpointException):  # of the ranks that have one
        error = next(iter(error.failures.values()))[0]
    # After the first sentence comes advice that fits badly.
    return re.split(r"\. |;|\n", f"{type(error).__name__}: {error}")[0]


def write(path, data):
    """Beside `path`, then in its place: whenever this is ended, the old or the new is whole."""
    new = path.with_name(f".{path.name}.new")
    try:
        with open(new, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())  # the power may fail
        new.replace(path)
    finally:
        new.unlink(missing_ok=True)  # a part of it would fill the disk, unseen


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
        total += loss.detach().double() * len(tokens)  # of sequences: exact, in whatever order
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
    """On rank 0, a line to read and a line to plot."""
    said = "step {step}: loss {loss:.3f}, validation {validation:.3f}, norm {norm:.2f}, "
    said += "{tokens_per_second:,.0f} tokens/s, MFU {mfu:.1%}, {memory_gb:.2f} GB"
    if args.rank == 0:
        say(said.format(**row))
        with open(args.out / "log.jsonl", "a") as log:
            print(json.dumps(row), file=log)


def cut_log(args, start):
    """Leave what was logged before the checkpoint: what comes after it is computed again."""
    log = args.out / "log.jsonl"
    text = log.read_text() if log.exists() else ""
    rows = re.finditer(r'^{"step": (\d+), .*}\n', text, re.MULTILINE)  # whole ones
    write(log, "".join(row[0] for row in rows if int(row[1]) <= start).encode())


def profiler_of(args):
    if not args.profile:
        return contextlib.nullcontext()
    schedule = torch.profiler.schedule(wait=2, warmup=1, active=2, repeat=1)
    write = torch.profiler.tensorboard_trace_handler(args.out, f"rank{args.rank}")
    return torch.profiler.profile(schedule=schedule, on_trace_ready=write)


@contextlib.contextmanager
def signals_noted():
    """Meanwhile these end nothing: the list tells whether one came."""
    told, usual = [], {}
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        if signal.getsignal(number) != signal.SIG_IGN:  # nohup's stays
            usual[number] = signal.signal(number, lambda *_: told.append(True))
    yield told
    for number, handler in usual.items():
        signal.signal(number, handler)


def update(args, step, model, optimizer, scaler):
    """One step of the optimizer; the gradients' norm, of all shards."""
    scaler.unscale_(optimizer)
    norm = nn.utils.clip_grad_norm_(model.parameters(), args.clip)
    for group in optimizer.param_groups:
        group["lr"] = learning_rate(args, step)
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad()
    return norm


def save(args, parts, progress, background):
    """Begin to write a checkpoint. The last one stays until this is whole."""
    for folder in whole_ones(args.out)[:-1] if args.rank == 0 else ():
        remove(folder)
    state, folder = state_of(*parts, progress), args.out / f"step-{progress[2]:08d}"
    state["sums"] = sums_of(state)
    return dcp.async_save(state, checkpoint_id=folder, process_group=background)


def train_model(args, called, parts, progress):
    model, saving, background = parts[0], None, dist.new_group(backend="gloo")  # saves meanwhile
    peak = args.peak * 1e12 or measure_peak(args)
    needed = flops_of(args, model) / args.ranks / peak  # seconds per token
    loss, counted, start = progress
    losses, since = loss * (args.rank == 0), start - counted  # of all sequences after that step
    clock, timed_from = time.perf_counter(), start
    with signals_noted() as told, profiler_of(args) as profiler:
        for step, tokens in enumerate(batches(args.train, args, start), start + 1):
            torch.manual_seed((args.seed * args.steps + step) * args.ranks + args.rank)  # dropout
            losses += add_gradients(called, tokens, args, parts[2])
            norm = update(args, step, *parts)
            if profiler:
                profiler.step()
            stop = torch.tensor(len(told))
            dist.all_reduce(stop, dist.ReduceOp.MAX)  # all ranks stop after one step, or none
            line = step % args.log_every == 0 or step == args.steps
            save_now = stop or step % args.save_every == 0 or step == args.steps
            if line or save_now:
                dist.all_reduce(loss := losses.to("cpu", copy=True))
                # In fp16 the scaler skips steps with NaN: weights stay finite, the loss does not.
                norm_now = nn.utils.get_total_norm(model.parameters())
                if not (loss.isfinite() and norm_now.isfinite()):
                    leave(f"step {step}: it diverged, and is not saved. Try a lower --lr.")
            if line:
                seconds = time.perf_counter() - clock
                rate = (step - timed_from) * args.batch * args.context / seconds
                norm = norm.full_tensor() if isinstance(norm, DTensor) else norm
                row = {"step": step, "loss": loss.item() / args.batch / (step - since)}
                row |= {"norm": norm.item(), "learning_rate": learning_rate(args, step)}
                row |= {"validation": validate(model, args.held_out, args)}
                row |= {"tokens_per_second": rate, "mfu": rate * needed}
                report(args, row | {"memory_gb": peak_memory(args.device)})
                loss, losses, since = 0, 0, step
            if line or step == start + 1:  # the first compiled, and woke the GPU
                clock, timed_from = time.perf_counter(), step
            if save_now:
                if saving:
                    saving.result()  # one at a time
                saving = save(args, parts, [float(loss), step - since, step], background)
            if stop:
                saving.result()
                leave(f"stopped by a signal: saved after step {step}; the same command goes on.")
        if saving:
            saving.result()


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


def draw_pictures(model, args):
    """Eight of each class: a file's name, and how to write it."""
    from PIL import Image

    first = torch.arange(GREYS, GREYS + CLASSES, device=args.device).repeat(8)[:, None]
    greys = generate(model, first, SIDE * SIDE, GREYS)[:, 1:].cpu()
    sheet = greys.view(8, CLASSES, SIDE, SIDE).transpose(1, 2).reshape(8 * SIDE, -1)
    sheet = Image.fromarray((sheet * 255 // (GREYS - 1)).byte().numpy())
    sheet = sheet.resize((4 * CLASSES * SIDE, 4 * 8 * SIDE), Image.NEAREST)
    return "drawing.png", sheet.save


def draw_text(model, args):
    """One sequence, bytes as text: a file's name, and how to write it."""
    first = torch.tensor([[int(args.held_out[0, 0])]], device=args.device)
    ids = generate(model, first, min(args.context, 256), args.vocabulary)[0, 1:].tolist()
    text = bytes(ids).decode(errors="replace") if args.vocabulary <= 256 else str(ids)
    return "drawing.txt", lambda path: path.write_text(text + "\n", encoding="utf-8")


def export(model, args):
    """The whole weights to one file, adapters merged: gathered by all ranks, for rank 0."""
    whole = alike.StateDictOptions(full_state_dict=True, cpu_offload=True)
    weights = alike.get_model_state_dict(model, options=whole)
    for name in [name for name in weights if name.endswith(".lora_b")]:
        a, layer = name.replace("lora_b", "lora_a"), name.replace("lora_b", "weight")
        weights[layer] = weights[layer] + weights.pop(name) @ weights.pop(a)
    options = {name: json.dumps(getattr(args, name)) for name in OPTIONS} | {"lora": "0"}
    if args.rank == 0:
        write(args.export, safetensors.torch.save(weights, options))


# --- the run ------------------------------------------------------------------------------------


def parse():
    lines = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=lines)
    parser.error = lambda sentence: leave(f"{sentence}. --help lists the options")
    each = "the model: one per process"
    add, usual = parser.add_argument, "ddp" if "RANK" in os.environ else "none"
    add("--out", type=Path, required=True, help="the run's own folder, which all hosts see")
    add("--data", type=Path, default=CLOTHES, help="token ids (.npy) or pictures (.npz)")
    add("--base", type=Path, help="weights to begin with, which --export wrote")
    add("--parallel", choices=RUNGS, default=usual, help=f"{each}, shared by all, or by --shard")
    add("--precision", choices=["auto", *DTYPES], default="auto", help="auto: the device's best")
    add("--export", type=Path, help="in the end, write weights and options to this .safetensors")
    for name, (default, _, what) in OPTIONS.items():
        kind = {"action": argparse.BooleanOptionalAction}  # also --no-recompute
        kind = kind if default is False else {"type": type(default)}
        fixed = "; fixed once a run has begun" if name in STAYS else ""
        add(option(name), default=default, help=f"{what} ({default}{fixed})", **kind)
    was = settings_of(parser.parse_known_args()[0].out)
    if (was.get("parallel") == "none") != (usual == "none"):
        was.pop("parallel", None)  # it was started in the other way
    parser.set_defaults(**was)  # what is not given stays as it was
    base, shape = read_base(parser.parse_known_args()[0].base)
    parser.set_defaults(**shape)
    args = parser.parse_args()
    args.weights, args.shape, args.kv_heads = base, shape, args.kv_heads or args.heads
    for name, (_, least, _) in OPTIONS.items():
        if not least <= (value := getattr(args, name)) < 2**31:  # nan is not
            leave(f"{option(name)} must be at least {least}, not {value}, and below 2**31")
    return args


def option(name):
    return f"--{name.replace('_', '-')}"


def read_base(path):
    """A file that --export wrote, and the options that gave its weights their shapes; or none."""
    with contextlib.suppress(OSError, safetensors.SafetensorError, ValueError, KeyError, TypeError):
        base = safetensors.safe_open(path, "pt")
        return base, {name: json.loads(base.metadata()[name]) for name in SHAPE}
    return None, {}


def read_and_check(args):
    """Read the data; a sentence, if an option is wrong."""
    read = read_pictures if args.data.suffix == ".npz" else read_tokens
    try:
        args.train, args.held_out, most = read(args)
    except Exception as error:  # of many kinds, whose words advise badly
        wanted = "no .npy of more than --context whole numbers from 0 in one dimension"
        wanted += f", nor .npz of uint8 pictures and labels below {CLASSES}"
        return f"--data {args.data} ({type(error).__name__}): {wanted}"
    args.vocabulary, train, base = args.vocabulary or most + 1, args.train, args.base
    other = [name for name in args.shape if getattr(args, name) != args.shape[name]]
    group = args.shard if args.parallel == "hsdp" else 1
    taken = args.export and args.export.exists()
    taken = taken and (not read_base(args.export)[1] or (base and base.samefile(args.export)))
    how = f"--parallel {args.parallel}: start none with python, the others with torchrun"
    for wrong, sentence in [
        (args.alone != (args.parallel == "none"), how),
        (args.ranks % group, f"--shard {group}: {args.ranks} processes are no multiple of it"),
        (base and not args.shape, f"--base {base}: --export of this program has not written it"),
        (other, f"--base: {' and '.join(other)} must be as in {base}: {args.shape}"),
        (taken, f"--export {args.export} is --base or no file of this program: name another"),
        (args.vocabulary > 10**7, f"--data {args.data}: ids must be below 10,000,000"),
        (most >= args.vocabulary, f"--vocabulary {args.vocabulary}: the data has the id {most}"),
        (args.width % (2 * args.heads), f"--width must be a multiple of 2 x --heads {args.heads}"),
        (args.heads % args.kv_heads, f"--heads must be a multiple of --kv-heads {args.kv_heads}"),
        (args.batch % args.ranks, f"--batch {args.batch} does not divide among {args.ranks} ranks"),
        (args.batch > len(train), f"--batch {args.batch}: the data has {len(train)} sequences"),
        (args.dropout >= 1, f"--dropout must be below 1, not {args.dropout}"),
        (train.shape[1] != args.context + 1, f"--context of pictures must be {SIDE * SIDE}"),
        (args.lora and not base, "--lora changes weights: name their file as --base"),
    ]:
        if wrong:
            return sentence
    args.sequences = len(train)
    args.checksum = zlib.crc32(np.concatenate([train[:: 1 + len(train) // 1000], args.held_out]))
    if base:
        args.checksum = zlib.crc32(np.memmap(base, mode="r"), args.checksum)
    return None


def agree(args, found):
    """What rank 0 has found, if no rank has found a sentence, and all are in the same run."""
    names, every = [*FIXED, "parallel", "micro", "log_every", "save_every"], [None] * args.ranks
    dist.all_gather_object(every, (found, {name: getattr(args, name, None) for name in names}))
    for rank, (one, options) in enumerate(every):
        if isinstance(one, str):
            leave(f"process {rank}: {one}" if rank else one)
        if other := ", ".join(name for name in names if options[name] != every[0][1][name]):
            other = f"process {rank} has other values of {other} than process 0"
            leave(f"{other}. Give all hosts the same options, --data and --base")
    return every[0][0]


def begin(args):
    """On rank 0, find the steps of the checkpoints in --out; on all, wait until they see it."""
    agree(args, read_and_check(args))
    try:
        steps = find_start(args) if args.rank == 0 else None
    except OSError as error:  # the other ranks wait for what this one says
        steps = f"{error.filename or args.out}: {error.strerror}. Name a writable folder"
    steps = agree(args, steps)
    lock, end = args.out / ".run.lock", time.monotonic() + HIDDEN
    while not lock.exists() and time.monotonic() < end:
        time.sleep(1)
    unseen = f"{lock}, which process 0 made, is not there. Name a folder that all hosts see"
    agree(args, None if lock.exists() else unseen)
    return steps


def optimizer_of(model, args):
    learn = [p for p in model.parameters() if p.requires_grad]
    matrices, others = ([p for p in learn if (p.dim() > 1) == big] for big in (True, False))
    groups = [{"params": matrices, "weight_decay": args.decay}]
    groups += [{"params": others, "weight_decay": 0}] if others else []
    return torch.optim.AdamW(groups, args.lr, betas=(0.9, 0.95), fused=True)


def run(args):
    steps = begin(args)
    with torch.device("meta"):  # without memory yet
        model = GPT(args)
    called = parallelize(model, args)
    scaler = torch.amp.GradScaler(args.device.type, enabled=args.precision == "fp16")
    parts, progress = (model, optimizer_of(model, args), scaler), [0, 0, 0]
    if steps:
        # After a first backward pass, DDP puts the gradients into other buckets. With three ranks
        # or more that changes the order of sums, and so the last digits of a run that goes on.
        for _ in range(2 if args.parallel == "ddp" else 0):
            tokens = torch.from_numpy(args.held_out[:1].astype(np.int64))
            add_gradients(called, tokens, args, scaler)
        model.zero_grad()
        progress = load_newest(args, steps, *parts)
    if args.rank == 0:
        cut_log(args, progress[2])
        count = sum(p.numel() for p in model.parameters())
        where = f"{args.parallel} on {args.ranks} x {args.device.type}"
        say(f"{count:,} parameters, {args.precision}, {where}, from step {progress[2]}")
    train_model(args, called, parts, progress)
    name, how = (draw_pictures if args.data.suffix == ".npz" else draw_text)(model, args)
    if args.rank == 0:  # all have drawn: the model may be sharded
        how(args.out / name)
        say(f"drawn: {name}")
    if args.export:
        export(model, args)
    dist.barrier()
    del called  # DDP that outlives its group may hang under gloo


@record
def main():
    args = parse()
    join(args)
    try:
        run(args)
    except (OSError, dcp.CheckpointException) as error:
        leave(
            f"{reason_of(error)}. Can --out be written, is the disk full? The same command goes on."
        )
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
