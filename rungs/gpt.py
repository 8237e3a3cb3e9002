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
from torch.distributed.elastic.multiprocessing.errors import record
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.utils.benchmark import Timer
from torch.utils.checkpoint import checkpoint
from tqdm import tqdm

CLOTHES = Path(__file__).parents[1] / "src/torchladder/bundled/fashion_mnist_small.npz"
SIDE, GREYS, CLASSES = 14, 16, 10  # a picture is its class, then 14 x 14 grey levels
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
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
        gqa = args.heads != args.kv_heads
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
            new = torch.randn(value.shape, generator=torch.Generator().manual_seed(1000 * seed + i))
            new = (new * std if value.dim() > 1 else torch.ones(value.shape)).to(value.device)
            if isinstance(value, DTensor):  # every rank has drawn the same: nothing to send
                at = value.device_mesh, value.placements
                new = distribute_tensor(new, *at, src_data_rank=None)
            value.copy_(new)


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
        parts, arrays = [], np.load(path)
        for split in ("train", "test"):
            blocks = arrays[f"{split}_images"].reshape(-1, SIDE, 2, SIDE, 2)
            greys = blocks.mean((2, 4)).reshape(-1, SIDE * SIDE) * GREYS // 256
            parts.append(np.column_stack([GREYS + arrays[f"{split}_labels"], greys]))
        return *parts, GREYS + CLASSES
    tokens = np.load(path, mmap_mode="r", allow_pickle=False)  # from the disk as it is needed
    if tokens.ndim != 1 or tokens.dtype.kind not in "iu":
        raise ValueError
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


def join(args):
    """Add to `args` the device, this rank, the number of ranks and the precision."""
    device = torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")
    backend, alone = dist.get_default_backend_for_device(device), "RANK" not in os.environ
    group = {"store": dist.HashStore(), "rank": 0, "world_size": 1} if alone else {}
    if device.type != "cpu":
        device = torch.device(device.type, int(os.environ.get("LOCAL_RANK", 0)))
        group["device_id"] = device
        torch.accelerator.set_device_index(device.index)
    if backend != "gloo":  # which sends what is on the CPU: a signal, a checkpoint
        backend = f"cpu:gloo,{device.type}:{backend}"
    dist.init_process_group(backend, **group)
    args.device, args.rank, args.ranks = device, dist.get_rank(), dist.get_world_size()
    if args.precision == "auto":  # a T4 emulates bf16, slowly
        cuda = device.type == "cuda"
        real = cuda and torch.cuda.is_bf16_supported(including_emulation=False)
        args.precision = "bf16" if real else "fp16" if cuda else "fp32"
    if (args.parallel == "none") != alone:
        sys.exit(f"--parallel {args.parallel}: none by python; ddp, fsdp, hsdp by torchrun")
    if args.batch % args.ranks or (args.parallel == "hsdp" and args.ranks % args.shard):
        sys.exit(f"{args.ranks} ranks: cannot divide --batch {args.batch} or --shard {args.shard}")


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
        for part in [*model.blocks, model]:
            fully_shard(part, mesh=mesh, mp_policy=policy)
        for this, following in zip(model.blocks, model.blocks[1:], strict=False):
            this.set_modules_to_forward_prefetch([following])  # gathered while this one computes
            following.set_modules_to_backward_prefetch([this])
    model.to_empty(device=args.device).initialize(args.seed)
    if args.parallel != "ddp":
        return model
    ids = [args.device] if args.device.type != "cpu" else None
    return nn.parallel.DistributedDataParallel(model, ids, gradient_as_bucket_view=True)


def measure_peak(args):
    """Multiplications and additions per second of a large matrix product."""
    size = 1024 if args.device.type == "cpu" else 8192
    one = torch.ones(size, size, device=args.device, dtype=DTYPES[args.precision])
    return 2 * size**3 / Timer("one @ one", globals={"one": one}).timeit(5).mean


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


def find_start(args):
    """The step that the run in --out has reached; a sentence if it is no run with these options."""
    now = {name: getattr(args, name) for name in [*STAYS, "precision", "sequences"]} | {
        "data": args.data.name
    }
    file, new = args.out / "settings.json", args.out / "settings.new"
    if not file.exists():
        if args.out.exists() and any(args.out.iterdir()):
            return f"--out {args.out} holds other files: name a new folder"
        args.out.mkdir(parents=True, exist_ok=True)
        new.write_text(json.dumps(now, indent=1))
        new.replace(file)
    was = json.loads(file.read_text())
    if other := [f"{n} was {was.get(n)}, now {v}" for n, v in now.items() if was.get(n) != v]:
        return f"--out {args.out} is of another run: {'; '.join(other)}. Name another folder"
    return max((int(folder.name[5:]) for folder in whole_ones(args.out)), default=0)


def state_of(model, optimizer, scaler):
    """What a run has learnt, under names that are alike on every rung."""
    weights, moments = names_alike.get_state_dict(model, optimizer)
    return {"model": weights, "optimizer": moments, "scaler": scaler.state_dict()}


def load(folder, model, optimizer, scaler):
    state = state_of(model, optimizer, scaler)
    dcp.load(state, checkpoint_id=folder)
    parts = {"model_state_dict": state["model"], "optim_state_dict": state["optimizer"]}
    names_alike.set_state_dict(model, optimizer, **parts)
    scaler.load_state_dict(state["scaler"])


# --- training -----------------------------------------------------------------------------------


def learning_rate(args, step):
    """Rises to --lr, then falls to a tenth of it along half a cosine."""
    after = max(0, step - args.warm_up) / max(1, args.steps - args.warm_up)
    return args.lr * min(step / args.warm_up, 0.55 + 0.45 * math.cos(math.pi * after))


def loss_of(model, tokens, args):
    dtype = DTYPES[args.precision]
    with torch.autocast(args.device.type, dtype, enabled=dtype != torch.float32):
        scores = model(tokens[:, :-1])
    return F.cross_entropy(scores.float().flatten(0, 1), tokens[:, 1:].flatten())


def add_gradients(called, tokens, args, scaler):
    """The gradients of this rank's share, in parts that fit; averaged over ranks with the last."""
    parts, total = tokens.to(args.device).split(args.micro), 0
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
    for first in range(0, -(-len(held_out) // args.ranks), args.micro):  # as often on every rank
        rows = range(first * args.ranks + args.rank, len(held_out), args.ranks)[: args.micro]
        tokens = torch.from_numpy(held_out[[*rows] or [0]].astype(np.int64)).to(args.device)
        sums += len(rows) * torch.tensor([loss_of(model, tokens, args).item(), 1])
    model.train()
    dist.all_reduce(sums)
    return (sums[0] / sums[1]).item()


def peak_memory(device):
    """In GB: allocated on the card; on a CPU, of the whole process."""
    if device.type == "cpu":
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6
    return torch.accelerator.max_memory_allocated() / 1e9


def report(args, row):
    """A line to read and a line to plot, by rank 0."""
    said = "step {step}: loss {loss:.3f}, validation {validation:.3f}, norm {norm:.2f}, "
    said += "{tokens_per_second:,.0f} tokens/s, MFU {mfu:.1%}, HFU {hfu:.1%}, {memory_gb:.2f} GB"
    tqdm.write(said.format(**row), file=sys.stdout)
    with open(args.out / "log.jsonl", "a") as log:
        print(json.dumps(row), file=log)


def profiler_of(args):
    if not args.profile:
        return contextlib.nullcontext()
    schedule = torch.profiler.schedule(wait=2, warmup=1, active=2, repeat=1)
    write = torch.profiler.tensorboard_trace_handler(args.out, f"rank{args.rank}")
    return torch.profiler.profile(schedule=schedule, on_trace_ready=write)


def train_model(args, model, called, optimizer, scaler, start, data, held_out):
    (needs, computes), peak = flops_of(args, model), args.peak * 1e12 or measure_peak(args)
    if args.rank == 0:
        count = sum(p.numel() for p in model.parameters())
        where = f"{args.parallel} on {args.ranks} x {args.device.type}"
        print(f"{count:,} parameters, {args.precision}, {where}, from step {start}", flush=True)
    told, background = [], dist.new_group(backend="gloo")  # for saving, while the ranks train
    signal.signal(signal.SIGTERM, lambda *_: told.append(True))
    saving, sums, since, clock = None, 0, start, time.perf_counter()
    bar = tqdm(total=args.steps, initial=start, disable=args.rank > 0 or not sys.stderr.isatty())
    with profiler_of(args) as profiler, bar:
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
            bar.update()
            if profiler:
                profiler.step()
            stop = torch.tensor(len(told))
            dist.all_reduce(stop, dist.ReduceOp.MAX)  # all ranks stop after one step, or none
            save = stop or step % args.save_every == 0 or step == args.steps
            if save or step % args.log_every == 0:
                loss = sums.cpu() / args.ranks / (step - since)
                dist.all_reduce(loss)
                norm = norm.full_tensor() if isinstance(norm, DTensor) else norm
                rate = (step - since) * args.batch * args.context / (time.perf_counter() - clock)
                share = rate / args.ranks / peak
                row = {"step": step, "loss": loss.item(), "norm": norm.item()}
                row |= {"learning_rate": group["lr"], "validation": validate(model, held_out, args)}
                row |= {"tokens_per_second": rate, "memory_gb": peak_memory(args.device)}
                row |= {"mfu": share * needs, "hfu": share * computes}
                if args.rank == 0:
                    report(args, row)
                if not math.isfinite(row["validation"]):
                    sys.exit(f"step {step}: it diverged, and is not saved. Try a lower --lr.")
                sums, since, clock = 0, step, time.perf_counter()
            if save:
                if saving:
                    saving.result()  # one at a time
                for folder in whole_ones(args.out)[:-1] if args.rank == 0 else ():
                    remove(folder)  # the last one stays until the next is whole
                state, folder = state_of(model, optimizer, scaler), args.out / f"step-{step:08d}"
                saving = dcp.async_save(state, checkpoint_id=folder, process_group=background)
            if stop:
                saving.result()
                sys.exit(f"SIGTERM: saved after step {step}; the same command goes on.")
    if saving:
        saving.result()


# --- what comes out -----------------------------------------------------------------------------


@torch.no_grad()
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


def draw(model, args):
    """Eight pictures of each class, as a PNG; of other tokens, one sequence as text."""
    pictures = args.data.suffix == ".npz"
    first = torch.arange(GREYS, args.vocabulary).repeat(8) if pictures else torch.zeros(1).long()
    first, ids = first[:, None].to(args.device), GREYS if pictures else args.vocabulary
    tokens = generate(model, first, args.context, ids)[:, 1:].cpu()  # by all ranks, if sharded
    if args.rank == 0 and pictures:
        from PIL import Image

        sheet = tokens.view(8, CLASSES, SIDE, SIDE).transpose(1, 2).reshape(8 * SIDE, -1)
        sheet = Image.fromarray((sheet * 255 // (GREYS - 1)).byte().numpy())
        sheet.resize((560, 448), Image.NEAREST).save(args.draw or args.out / "drawing.png")
    elif args.rank == 0:
        ids = tokens[0].tolist()
        text = bytes(ids).decode(errors="replace") if args.vocabulary <= 256 else str(ids)
        (args.draw or args.out / "drawing.txt").write_text(text + "\n")


def export(model, args):
    """The whole weights to one file: gathered by all ranks, for rank 0."""
    whole = names_alike.StateDictOptions(full_state_dict=True, cpu_offload=True)
    weights = names_alike.get_model_state_dict(model, options=whole)
    if args.rank == 0:
        from safetensors.torch import save_file

        save_file(weights, args.export)


# --- the run ------------------------------------------------------------------------------------


def parse():
    parser = argparse.ArgumentParser(epilog="An error? Add: 2>&1 | torchclinic explain")
    add, rungs = parser.add_argument, ["none", "ddp", "fsdp", "hsdp"]
    add("--out", type=Path, required=True, help="the run's own folder, which all hosts see")
    add("--data", type=Path, default=CLOTHES, help="token ids (.npy) or pictures (.npz)")
    add("--parallel", choices=rungs, default="ddp" if "RANK" in os.environ else "none")
    add("--precision", choices=["auto", *DTYPES], default="auto", help="auto: as the device can")
    add("--draw", type=Path, help="draw to this file with the newest checkpoint, and end")
    add("--export", type=Path, help="in the end, write the weights to this .safetensors")
    for name, (default, what) in OPTIONS.items():
        kind = {"type": type(default)} if default is not False else {"action": "store_true"}
        add(f"--{name.replace('_', '-')}", default=default, help=f"{what} ({default})", **kind)
    args = parser.parse_args()
    whole = [name for name, (default, _) in OPTIONS.items() if type(default) is int]
    if low := [name for name in whole if getattr(args, name) < (name != "seed")]:
        sys.exit(f"--{low[0].replace('_', '-')} must be at least 1")
    if args.width % (2 * args.heads) or args.heads % args.kv_heads or not 0 <= args.dropout < 1:
        sys.exit("--width: a multiple of 2 x --heads, --heads of --kv-heads; --dropout below 1")
    try:
        train, held_out, args.vocabulary = read_sequences(args.data, args.context)
    except (OSError, ValueError, KeyError) as error:  # NumPy's own words advise badly
        said = "is no row of token ids (.npy) and no set of pictures (.npz)"
        sys.exit(f"--data {args.data} {said}: {type(error).__name__}")
    args.sequences = len(train)
    if args.batch > len(train) or args.context + 1 != train.shape[1]:
        sys.exit(f"--data: {len(train)} sequences of {train.shape[1] - 1}: --batch, --context")
    return args, train, held_out


@record
def main():
    args, train, held_out = parse()
    join(args)
    start = [find_start(args) if args.rank == 0 else None]
    dist.broadcast_object_list(start, device=torch.device("cpu"))
    start = sys.exit(start[0]) if isinstance(start[0], str) else start[0]
    with torch.device("meta"):  # no memory yet
        model = GPT(args)
    called = parallelize(model, args)
    groups = [
        {"params": [p for p in model.parameters() if p.dim() == dims], "weight_decay": decay}
        for dims, decay in ((2, args.decay), (1, 0))
    ]
    optimizer = torch.optim.AdamW(groups, args.lr, betas=(0.9, 0.95))
    scaler = torch.amp.GradScaler(args.device.type, enabled=args.precision == "fp16")
    if start:
        # After a first backward pass, DDP puts the gradients into other buckets. With three ranks
        # or more that changes the order of sums, and so the last digits of a run that goes on.
        for _ in range(2 if args.parallel == "ddp" else 0):
            add_gradients(called, torch.from_numpy(train[:1].astype(np.int64)), args, scaler)
        optimizer.zero_grad()
        load(args.out / f"step-{start:08d}", model, optimizer, scaler)
    elif args.draw:
        sys.exit(f"--draw: no checkpoint in --out {args.out}")
    if not args.draw:
        data = batches(train, args, start, args.rank, args.ranks)
        train_model(args, model, called, optimizer, scaler, start, data, held_out)
    draw(model, args)
    if args.export:
        export(model, args)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
