"""A GPT that draws clothes, or learns your own tokens: one file, from one CPU to a cluster.

    python rungs/gpt.py --out clothes
    torchrun --standalone --nproc-per-node=2 rungs/gpt.py --parallel ddp --out clothes
    python -c "import numpy; numpy.save('tokens.npy', numpy.fromfile('my.txt', 'uint8'))"
    python rungs/gpt.py --data tokens.npy --context 256 --out text

The same command goes on where a run was stopped; so does one with another --parallel, or with more
or fewer processes. Every option, with its unit: --help.
"""

import argparse
import contextlib
import json
import math
import os
import re
import resource
import signal
import sys
import time
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from torch import nn
from torch.distributed.checkpoint import state_dict as names_alike
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.elastic.multiprocessing.errors import record
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.utils.checkpoint import checkpoint
from tqdm import tqdm

CLOTHES = Path(__file__).parents[1] / "src/torchladder/bundled/fashion_mnist_small.npz"
SIDE, GREYS, CLASSES = 14, 16, 10  # a picture is its class, then 14 x 14 grey levels
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
STEP = re.compile(r"step-\d{8}")  # the folder of a checkpoint
RUNGS = ("none", "ddp", "fsdp", "hsdp")
OPTIONS = {  # default, what it is; those before "micro" must stay when a run goes on
    "layers": (3, "blocks"),
    "width": (64, "numbers per token between blocks"),
    "heads": (4, "of the queries"),
    "kv_heads": (4, "of keys and values"),
    "context": (SIDE * SIDE, "tokens per sequence; a picture has 196"),
    "tied": (False, "the head uses the embedding's weights"),
    "dropout": (0.0, "share of numbers, below 1"),
    "steps": (1500, "of the optimizer, in all"),
    "batch": (32, "sequences per step, of all ranks together"),
    "lr": (3e-3, "highest learning rate; it ends at a tenth"),
    "warm_up": (50, "steps until the highest learning rate"),
    "decay": (0.1, "weight decay, of matrices alone"),
    "clip": (1.0, "highest norm of the gradients"),
    "seed": (0, "of weights, order and dropout"),
    "micro": (32, "sequences that a rank computes at once; more are accumulated"),
    "shard": (int(os.environ.get("LOCAL_WORLD_SIZE", 1)), "hsdp: ranks that share a model"),
    "compile": (False, "each block with torch.compile"),
    "recompute": (False, "activations of each block: less memory, a third more work"),
    "log_every": (50, "steps"),
    "save_every": (250, "steps"),
    "peak": (0.0, "TFLOP/s of a device, for MFU; 0: measured by a matrix product"),
    "profile": (False, "write a trace of steps 4 and 5 to --out"),
}
STAYS = [*OPTIONS][: [*OPTIONS].index("micro")]


# --- the model ----------------------------------------------------------------------------------


def rotated(x, place):
    """Rotary position embedding: pairs of numbers, turned by an angle that grows with the place."""
    half = x.shape[-1] // 2
    angles = place[:, None] * 10_000 ** -(torch.arange(half, device=x.device) / half)
    (a, b), cos, sin = x.float().chunk(2, dim=-1), angles.cos(), angles.sin()
    return torch.cat([a * cos - b * sin, a * sin + b * cos], dim=-1).type_as(x)


class Block(nn.Module):
    """Attention, then a gated MLP; each is added to its input."""

    def __init__(self, args):
        super().__init__()
        self.args, width, self.head = args, args.width, args.width // args.heads
        hidden = 16 * round(width / 6)  # its three matrices have as much as a plain MLP's two
        self.norm1, self.norm2 = nn.RMSNorm(width), nn.RMSNorm(width)
        self.qkv = nn.Linear(width, (args.heads + 2 * args.kv_heads) * self.head, bias=False)
        self.out = nn.Linear(width, width, bias=False)
        self.gate_up = nn.Linear(width, 2 * hidden, bias=False)
        self.down = nn.Linear(hidden, width, bias=False)

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
            cache[:] = k, v
        grouped = args.heads != args.kv_heads
        y = F.scaled_dot_product_attention(q, k, v, is_causal=length > 1, enable_gqa=grouped)
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

    def forward(self, tokens, caches=None):
        before = caches[0][0].shape[2] if caches and caches[0] else 0
        place = torch.arange(before, before + tokens.shape[1], device=tokens.device)
        x = self.embedding(tokens)
        for i, block in enumerate(self.blocks):
            x = block(x, place, caches and caches[i])
        x = self.norm(x)
        return self.head(x) if self.head else F.linear(x, self.embedding.weight)

    @torch.no_grad()
    def initialize(self, seed):
        """Draw each parameter from a seed of its own: alike on every rung, sharded or not."""
        for i, (name, value) in enumerate(self.named_parameters()):
            adds = name.endswith(("out.weight", "down.weight"))  # to what all blocks sum up
            std = 0.02 / (2 * len(self.blocks)) ** 0.5 if adds else 0.02
            seeded = torch.Generator().manual_seed(1000 * seed + i)
            whole = torch.randn(value.shape, generator=seeded).mul_(std).to(value.device)
            whole = torch.ones_like(whole) if value.dim() == 1 else whole
            if isinstance(value, DTensor):  # every rank has drawn the same: nothing to send
                where = value.device_mesh, value.placements
                whole = distribute_tensor(whole, *where, src_data_rank=None)
            value.copy_(whole)


def flops_of(args, model):
    """Of training, per token: what the model needs, and what is computed with --recompute.

    Two for each weight of a matrix, and attention over the whole context, as papers count it
    (PaLM, arXiv:2204.02311, appendix B); three times that with the backward pass.
    """
    weights = sum(p.numel() for p in model.blocks.parameters() if p.dim() > 1)
    blocks = 2 * weights + 4 * args.layers * args.context * args.width
    needed = 3 * (blocks + 2 * args.vocabulary * args.width)
    last = 2 * sum(block.down.weight.numel() for block in model.blocks)  # its result is not needed
    return needed, needed + args.recompute * (blocks - last)


# --- data ---------------------------------------------------------------------------------------


def read_sequences(path, context):
    """Token ids to train on and to validate with, (count, context + 1); how many ids there are."""
    if path.suffix == ".npz":  # pictures: averaged to 14 x 14, in 16 grey levels, after their class
        parts = []
        with np.load(path) as arrays:
            for split in ("train", "test"):
                pixels = torch.from_numpy(arrays[f"{split}_images"]).float().unsqueeze(1)
                greys = F.avg_pool2d(pixels, 2).flatten(1).mul(GREYS / 256).long()
                labels = torch.from_numpy(arrays[f"{split}_labels"]).long().unsqueeze(1)
                parts.append(torch.cat([GREYS + labels, greys], dim=1).numpy())
        return *parts, GREYS + CLASSES
    tokens = np.load(path, mmap_mode="r", allow_pickle=False)  # from the disk as it is needed
    if tokens.ndim != 1 or tokens.dtype.kind not in "iu":
        raise TypeError(f"an array of {tokens.dtype} in {tokens.ndim} dimensions")
    windows = np.lib.stride_tricks.sliding_window_view(tokens, context + 1)[::context]
    held_out = max(1, len(windows) // 20)  # the end
    return windows[:-held_out], windows[-held_out:], int(tokens.max()) + 1


def batches(train, args, done, rank, ranks):
    """After the steps that are done, this rank's share of each batch, the same on any number."""
    per_epoch, order = len(train) // args.batch, None
    for step in range(done, args.steps):
        epoch, place = divmod(step, per_epoch)
        if order is None or place == 0:
            order = np.random.default_rng([args.seed, epoch]).permutation(len(train))
        mine = order[place * args.batch :][: args.batch][rank::ranks]
        yield torch.from_numpy(train[mine].astype(np.int64))


# --- the device, the ranks, the precision -------------------------------------------------------


def join(args, refuse):
    """The device, this rank and the number of ranks; one process alone is a group of one."""
    device = torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")
    started = (
        {} if "RANK" in os.environ else {"store": dist.HashStore(), "rank": 0, "world_size": 1}
    )
    if device.type != "cpu":
        device = torch.device(device.type, int(os.environ.get("LOCAL_RANK", 0)))
        torch.accelerator.set_device_index(device.index)
        started["device_id"] = device
    backend = dist.get_default_backend_for_device(device)
    # gloo for what is on the CPU: agreeing on a signal, saving in the background.
    dist.init_process_group(
        "gloo" if backend == "gloo" else f"cpu:gloo,{device.type}:{backend}", **started
    )
    ranks = dist.get_world_size()
    if args.parallel == "none" and ranks > 1:
        refuse("--parallel none is for one process: choose ddp, fsdp or hsdp")
    if args.parallel != "none" and "store" in started:
        refuse(f"--parallel {args.parallel}: start it by torchrun --nproc-per-node=GPUS")
    if args.batch % ranks or (args.parallel == "hsdp" and ranks % args.shard):
        refuse(f"{ranks} ranks: --batch {args.batch}, --shard {args.shard} cannot be dealt out")
    return device, dist.get_rank(), ranks


def parallelize(model, args, device, dtype, ranks):
    """`model` as its rung calls it; only here do its parameters get memory, each rank its share."""
    for block in model.blocks if args.compile else ():
        block.compile()
    if args.parallel in ("fsdp", "hsdp"):
        shape, names = (ranks,), ("shard",)
        if args.parallel == "hsdp":
            shape, names = (ranks // args.shard, args.shard), ("replicate", "shard")
        casts = {"param_dtype": dtype, "reduce_dtype": torch.float32}
        policy = MixedPrecisionPolicy(**casts if dtype != torch.float32 else {})
        mesh = init_device_mesh(device.type, shape, mesh_dim_names=names)
        for part in [*model.blocks, model]:
            fully_shard(part, mesh=mesh, mp_policy=policy)
        for this, following in zip(model.blocks, model.blocks[1:], strict=False):
            this.set_modules_to_forward_prefetch([following])  # gathered while this one computes
            following.set_modules_to_backward_prefetch([this])
    model.to_empty(device=device).initialize(args.seed)
    if args.parallel != "ddp":
        return model
    ids = [device] if device.type != "cpu" else None
    return nn.parallel.DistributedDataParallel(model, ids, gradient_as_bucket_view=True)


def measure_peak(device, dtype):
    """Multiplications and additions per second of a large matrix product."""
    size, seconds = 8192 if device.type != "cpu" else 1024, []
    one = torch.ones(size, size, device=device, dtype=dtype)
    for _ in range(5):
        begin = time.perf_counter()
        (one @ one)[0, 0].item()  # waits for it
        seconds.append(time.perf_counter() - begin)
    return 2 * size**3 / min(seconds)


# --- checkpoints --------------------------------------------------------------------------------


def whole_ones(out):
    """The run's checkpoints, oldest first: a whole one has .metadata, which is written last."""
    return sorted(f.parent for f in out.glob("step-*/.metadata") if STEP.fullmatch(f.parent.name))


def remove(folder):
    """What DCP has written there; the folder, too, if nothing else is in it."""
    for file in [folder / ".metadata", *folder.glob("__*_*.distcp")]:
        file.unlink(missing_ok=True)
    with contextlib.suppress(OSError):
        folder.rmdir()


def find_start(args):
    """The step that the run in --out has reached; a sentence if it is no run with these options."""
    now = {name: getattr(args, name) for name in STAYS} | {"data": args.data.name}
    now["sequences"], file = args.sequences, args.out / "settings.json"
    if file.exists():
        was = json.loads(file.read_text())
        other = [f"{n} was {was.get(n)}, now {v}" for n, v in now.items() if was.get(n) != v]
        if other:
            return f"--out {args.out} is of another run: {'; '.join(other)}. Name another folder"
        return max((int(folder.name[5:]) for folder in whole_ones(args.out)), default=0)
    if args.out.exists() and any(args.out.iterdir()):
        return f"--out {args.out} holds other files: name a new folder"
    args.out.mkdir(parents=True, exist_ok=True)
    file.with_suffix(".new").write_text(json.dumps(now, indent=1))
    file.with_suffix(".new").replace(file)
    return 0


def state_of(model, optimizer, scaler, step, own):
    """What a run is, under names that are alike on every rung; `own`: this rank's generators."""
    weights, moments = names_alike.get_state_dict(model, optimizer)
    generators = {"cpu": torch.get_rng_state()}
    if torch.cuda.is_available():
        generators["cuda"] = torch.cuda.get_rng_state()
    state = {"model": weights, "optimizer": moments, "step": step, own: generators}
    return state | ({"scaler": scaler.state_dict()} if scaler.is_enabled() else {})


def load(folder, model, optimizer, scaler, own):
    state = state_of(model, optimizer, scaler, 0, own)
    saved = dcp.FileSystemReader(folder).read_metadata().state_dict_metadata
    there = {name.split(".")[0] for name in saved}  # not with other ranks, another precision
    state = {name: part for name, part in state.items() if name in there}
    dcp.load(state, checkpoint_id=folder)
    parts = {"model_state_dict": state["model"], "optim_state_dict": state["optimizer"]}
    names_alike.set_state_dict(model, optimizer, **parts)
    scaler.load_state_dict(state.get("scaler", scaler.state_dict()))
    if own in state:
        torch.set_rng_state(state[own]["cpu"])
    if "cuda" in state.get(own, {}):
        torch.cuda.set_rng_state(state[own]["cuda"])


# --- what comes out -----------------------------------------------------------------------------


@torch.no_grad()
def validate(model, held_out, args, device, rank, ranks, autocast):
    """Mean loss per token of what was not trained on, of which each rank takes a share."""
    model.eval()
    sums = torch.zeros(2)
    for first in range(0, -(-len(held_out) // ranks), args.micro):  # as often on every rank
        rows = [*range(first * ranks + rank, len(held_out), ranks)][: args.micro]
        tokens = torch.from_numpy(held_out[rows or [0]].astype(np.int64)).to(device)
        sums += len(rows) * torch.tensor([loss_of(model, tokens, autocast).item(), 1])
    model.train()
    dist.all_reduce(sums)
    return (sums[0] / sums[1]).item()


@torch.inference_mode()
def generate(model, tokens, count, ids, temperature=0.8, seed=0):
    """`tokens`, (batch, length), and `count` more in each row, all below `ids`."""
    model.eval()
    caches, new = [[] for _ in model.blocks], tokens
    dice = torch.Generator(tokens.device).manual_seed(seed)
    for _ in range(count):
        scores = model(new, caches)[:, -1, :ids].float() / temperature
        new = torch.multinomial(scores.softmax(-1), 1, generator=dice)
        tokens = torch.cat([tokens, new], dim=1)
    return tokens


def draw(model, args, device, path):
    """Eight pictures of each class, as a PNG; of other tokens, one sequence as text."""
    if args.data.suffix == ".npz":
        from PIL import Image

        classes = GREYS + torch.arange(CLASSES, device=device).repeat(8)[:, None]
        greys = generate(model, classes, SIDE * SIDE, GREYS)[:, 1:].cpu()
        sheet = greys.view(8, CLASSES, SIDE, SIDE).transpose(1, 2).reshape(8 * SIDE, -1)
        sheet = sheet.repeat_interleave(4, dim=0).repeat_interleave(4, dim=1) * 255 // (GREYS - 1)
        return Image.fromarray(sheet.byte().numpy()).save(path)
    first = torch.zeros(1, 1, dtype=torch.long, device=device)
    ids = generate(model, first, args.context - 1, args.vocabulary)[0, 1:].tolist()
    words = bytes(ids).decode(errors="replace") if max(ids) < 256 else " ".join(map(str, ids))
    path.write_text(words + "\n")


REPORT = "step {step}: loss {loss:.3f}, validation {validation:.3f}, norm {norm:.2f}, "
REPORT += "{tokens_per_second:,.0f} tokens/s, MFU {mfu:.1%}, HFU {hfu:.1%}, {memory_gb:.2f} GB"


def peak_memory(device):
    """Bytes: allocated on the card; on a CPU, of the whole process."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated()
    return 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


# --- the run ------------------------------------------------------------------------------------


def parse():
    parser = argparse.ArgumentParser(epilog="An error? Add: 2>&1 | torchclinic explain")
    add = parser.add_argument
    add("--out", type=Path, required=True, help="the run's own folder, which all hosts see")
    add("--data", type=Path, default=CLOTHES, help="token ids (.npy) or pictures (.npz)")
    add("--parallel", choices=RUNGS, default="ddp" if "RANK" in os.environ else "none")
    add("--precision", choices=["auto", *DTYPES], default="auto", help="auto: as the device can")
    add("--draw", type=Path, help="draw to this file with the newest checkpoint, and end")
    add("--export", type=Path, help="in the end, write the weights to this .safetensors")
    for name, (default, what) in OPTIONS.items():
        kind = {"type": type(default)} if default is not False else {"action": "store_true"}
        add(f"--{name.replace('_', '-')}", default=default, help=f"{what} ({default})", **kind)
    args = parser.parse_args()
    whole = [name for name, (default, _) in OPTIONS.items() if type(default) is int]
    if low := [name for name in whole if getattr(args, name) < (name != "seed")]:
        parser.error(f"--{low[0].replace('_', '-')} must be at least 1")
    if args.width % (2 * args.heads) or args.heads % args.kv_heads or not 0 <= args.dropout < 1:
        parser.error("--width: a multiple of 2 x --heads, --heads of --kv-heads; --dropout below 1")
    try:
        train, held_out, args.vocabulary = read_sequences(args.data, args.context)
        args.sequences = len(train)
    except (OSError, ValueError, KeyError, TypeError) as error:
        told = (
            error if isinstance(error, TypeError) else type(error).__name__
        )  # NumPy's advise badly
        parser.error(f"--data {args.data}: no token ids (.npy), no pictures (.npz): {told}")
    if args.batch > len(train) or args.context + 1 != train.shape[1]:
        parser.error(f"--data: {len(train)} sequences of {train.shape[1] - 1}: --batch, --context")
    return parser.error, args, train, held_out


def learning_rate(args, step):
    """Rises to --lr, then falls to a tenth of it along half a cosine."""
    after = max(0, step - args.warm_up) / max(1, args.steps - args.warm_up)
    return args.lr * min(step / args.warm_up, 0.55 + 0.45 * math.cos(math.pi * after))


def loss_of(model, tokens, autocast):
    with autocast:
        scores = model(tokens[:, :-1])
    return F.cross_entropy(scores.float().flatten(0, 1), tokens[:, 1:].flatten())


@record
def main():
    refuse, args, train, held_out = parse()
    device, rank, ranks = join(args, refuse)
    start = [find_start(args) if rank == 0 else None]
    dist.broadcast_object_list(start, device=torch.device("cpu"))
    start = refuse(start[0]) if isinstance(start[0], str) else start[0]
    precision = args.precision
    if precision == "auto":  # a T4 emulates bf16, slowly
        real = device.type == "cuda" and torch.cuda.is_bf16_supported(including_emulation=False)
        precision = "bf16" if real else "fp16" if device.type == "cuda" else "fp32"
    dtype = DTYPES[precision]
    with torch.device("meta"):  # no memory yet
        model = GPT(args)
    count, (needed, computed) = sum(p.numel() for p in model.parameters()), flops_of(args, model)
    called = parallelize(model, args, device, dtype, ranks)
    groups = [
        {"params": [p for p in model.parameters() if p.dim() == dims], "weight_decay": decay}
        for dims, decay in ((2, args.decay), (1, 0))
    ]
    optimizer = torch.optim.AdamW(groups, args.lr, betas=(0.9, 0.95), fused=device.type == "cuda")
    casts = precision != "fp32" and args.parallel in ("none", "ddp")  # else FSDP's policy does
    autocast = torch.autocast(device.type, dtype, enabled=casts)
    scaler = torch.amp.GradScaler(device.type, enabled=precision == "fp16")
    own = f"rank {rank} of {ranks}"
    torch.manual_seed(args.seed * ranks + rank)  # dropout is another on each rank
    if start:
        # After a first backward pass, DDP puts the gradients into other buckets. With three ranks
        # or more that changes the order of sums, and so the last digits of a run that goes on.
        for _ in range(2 if args.parallel == "ddp" else 0):
            tokens = torch.from_numpy(train[:1].astype(np.int64)).to(device)
            loss_of(called, tokens, autocast).backward()
        optimizer.zero_grad()
        load(args.out / f"step-{start:08d}", model, optimizer, scaler, own)
    if args.draw:
        return (
            draw(model, args, device, args.draw)
            if ranks == 1 and start
            else refuse(f"--draw: by one process, with a checkpoint in --out {args.out}")
        )
    peak = 1e12 * args.peak or measure_peak(device, dtype)
    if rank == 0:
        print(f"{count:,} parameters, {precision}, {args.parallel} on {ranks} x {device.type}, "
              f"{peak / 1e12:.3g} TFLOP/s each, from step {start}", flush=True)  # fmt: skip

    told = []
    signal.signal(signal.SIGTERM, lambda *_: told.append(True))
    background = dist.new_group(backend="gloo")  # for saving alone, while the ranks train
    saving, sums, since, clock = None, torch.zeros((), device=device), start, time.perf_counter()
    profiler = contextlib.nullcontext()
    if args.profile:
        profiler = torch.profiler.profile(
            schedule=torch.profiler.schedule(wait=2, warmup=1, active=2, repeat=1),
            on_trace_ready=lambda p: p.export_chrome_trace(f"{args.out}/trace_{rank}.json"),
        )
    bar = tqdm(total=args.steps, initial=start, disable=rank > 0 or not sys.stderr.isatty())
    with profiler, bar:
        for step, tokens in enumerate(batches(train, args, start, rank, ranks), start + 1):
            parts = tokens.to(device).split(args.micro)
            for i, part in enumerate(parts, 1):
                if args.parallel == "hsdp":
                    model.set_requires_all_reduce(i == len(parts))  # one, not one per part
                wait = args.parallel == "ddp" and i < len(parts)
                with called.no_sync() if wait else contextlib.nullcontext():
                    loss = loss_of(called, part, autocast) * (len(part) / len(tokens))
                    scaler.scale(loss).backward()
                sums += loss.detach()
            scaler.unscale_(optimizer)
            norm = nn.utils.clip_grad_norm_(model.parameters(), args.clip)  # of all shards
            for group in optimizer.param_groups:
                group["lr"] = learning_rate(args, step)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            bar.update()
            if args.profile:
                profiler.step()
            stop = torch.tensor(len(told))
            dist.all_reduce(stop, dist.ReduceOp.MAX)  # all ranks stop after one step, or none
            if step % args.log_every == 0 or step == args.steps:
                mean = sums.cpu() / ranks / (step - since)
                dist.all_reduce(mean)
                rate = (step - since) * args.batch * args.context / (time.perf_counter() - clock)
                row = {"step": step, "loss": mean.item(), "learning_rate": group["lr"]}
                row |= {"norm": getattr(norm, "full_tensor", norm.clone)().item()}
                row |= {"tokens_per_second": rate, "memory_gb": peak_memory(device) / 1e9}
                row |= {"mfu": rate * needed / peak / ranks, "hfu": rate * computed / peak / ranks}
                row |= {
                    "validation": validate(model, held_out, args, device, rank, ranks, autocast)
                }
                if not math.isfinite(row["loss"]):
                    raise SystemExit(f"step {step}: loss {row['loss']}. Try a lower --lr.")
                if rank == 0:
                    tqdm.write(REPORT.format(**row), file=sys.stdout)
                    with open(args.out / "log.jsonl", "a") as log:
                        print(json.dumps(row), file=log)
                sums, since, clock = torch.zeros_like(sums), step, time.perf_counter()
            if stop or step % args.save_every == 0 or step == args.steps:
                weights = nn.utils.get_total_norm(model.parameters())
                if not getattr(weights, "full_tensor", weights.clone)().isfinite():
                    raise SystemExit(f"step {step}: the weights are not finite. Try a lower --lr.")
                if saving:
                    saving.result()  # one at a time
                for folder in whole_ones(args.out)[:-1] if rank == 0 else ():
                    remove(folder)  # the last one stays until the next is whole
                state = state_of(model, optimizer, scaler, step, own)
                folder = args.out / f"step-{step:08d}"
                saving = dcp.async_save(state, checkpoint_id=folder, process_group=background)
            if stop:
                saving.result()
                raise SystemExit(f"SIGTERM: saved after step {step}; the same command goes on.")
    if saving:
        saving.result()
    all_of_it = names_alike.StateDictOptions(full_state_dict=True, cpu_offload=True)
    weights = names_alike.get_model_state_dict(model, options=all_of_it)  # all ranks, for rank 0
    if rank == 0:
        plain = GPT(args).to(device)
        plain.load_state_dict(weights)
        draw(
            plain,
            args,
            device,
            args.out / f"drawing.{'png' if args.data.suffix == '.npz' else 'txt'}",
        )
        if args.export:
            from safetensors.torch import save_file

            save_file(weights, args.export)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
