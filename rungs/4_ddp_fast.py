"""Rung 4 made fast: torchrun --standalone --nproc-per-node=2 rungs/4_ddp_fast.py (--help)."""

import argparse
import os
import sys
import tempfile
import time
from collections import Counter
from contextlib import nullcontext, suppress
from itertools import islice, pairwise
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


class LeNet(nn.Sequential):
    def __init__(self):
        super().__init__(
            nn.Conv2d(1, 6, 5, padding=2), nn.ReLU(), nn.MaxPool2d(2),
            nn.Conv2d(6, 16, 5), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(),
            nn.Linear(400, 120), nn.ReLU(), nn.Linear(120, 84), nn.ReLU(), nn.Linear(84, 10),
        )  # fmt: skip

    def forward(self, pixels):  # bytes until here: a quarter of the memory of floats
        return super().forward((pixels.float() / 255 - 0.2860) / 0.3530)


def read(path, split):
    if path.is_dir():
        from torchvision.datasets import FashionMNIST  # slow to import

        data = FashionMNIST(path, train=split == "train")
        return TensorDataset(data.data.unsqueeze(1), data.targets)
    with np.load(path) as arrays:
        images = torch.from_numpy(arrays[f"{split}_images"])
        labels = torch.from_numpy(arrays[f"{split}_labels"])
    return TensorDataset(images.unsqueeze(1), labels.long())


@torch.inference_mode()
def evaluate(model, batches):
    model.eval()
    for buffer in model.buffers():  # of batch norm, say: each rank has its own, 0 saves its own
        dist.broadcast(buffer, 0)
    right = torch.zeros((), device=device)  # also on a rank without an image
    for images, labels in batches:
        images, labels = images.to(device), labels.to(device)
        right += (model(images).argmax(1) == labels).sum()
    dist.all_reduce(right)
    return right.item() / len(test)


def target(path):
    """The file to write, behind any link: tried before the training, not after it."""
    path = Path(os.path.realpath(path))
    with suppress(OSError), tempfile.TemporaryDirectory(suffix=path.name, dir=path.parent):
        if path.is_file() or not path.exists():
            return path
    raise SystemExit(f"Cannot write {path}: name a file in a folder that you can write to.")


def save(state, path):
    """Beside the old file, then renamed: killed half-way, it spoils nothing."""
    with tempfile.TemporaryDirectory(dir=path.parent) as folder:
        torch.save(state, f"{folder}/new")
        os.replace(f"{folder}/new", path)


moments = []  # since the last report: a phase, and when it ended


def ended(phase):
    """Note the moment on the device's own clock: the CPU does not wait for it."""
    moment = time.perf_counter()
    if device.type != "cpu":
        moment = torch.Event(enable_timing=True)
        moment.record()
    moments.append((phase, moment))


def report(step):
    """What each phase took since the last report, and the peak of memory: those of rank 0."""
    if device.type == "cpu":
        import resource  # not on Windows

        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        peak /= 2**20 if sys.platform == "darwin" else 2**10  # Linux counts KiB
    else:
        torch.accelerator.synchronize()
        peak = torch.accelerator.max_memory_allocated() / 2**20
    spent = Counter()
    for (_, start), (phase, end) in pairwise(moments):
        ms = 1000 * (end - start) if device.type == "cpu" else start.elapsed_time(end)
        spent[phase] += ms / args.report
    del moments[:-1]
    if rank == 0:
        phases = ", ".join(f"{phase} {ms:.1f}" for phase, ms in spent.items())
        print(f"step {step}: {phases} ms per step, peak {peak:,.0f} MiB")


parser = argparse.ArgumentParser(epilog="An error? Add: 2>&1 | torchclinic explain")
parser.add_argument("--data", type=Path, required=True, help=".npz, or torchvision's folder")
parser.add_argument("--epochs", type=int, default=5)
parser.add_argument("--batch-size", type=int, default=64, help="images per step, in each process")
parser.add_argument("--lr", type=float, default=0.05)
parser.add_argument("--amp", choices=["bf16", "fp16", "no"], help="default: bf16 if supported")
parser.add_argument("--no-compile", action="store_true", help="compiling takes a minute on a CPU")
parser.add_argument("--workers", type=int, default=2, help="that load data, for each process")
parser.add_argument("--accumulate", type=int, default=1, help="batches per step")
parser.add_argument("--clip", type=float, default=1.0, help="largest norm of the gradients")
parser.add_argument("--warm-up", type=int, default=20, help="steps in which the rate rises")
parser.add_argument("--bucket-mb", type=float, help="of gradients; 1 or more if you compile")
parser.add_argument("--report", type=int, default=50, help="steps from one report to the next")
parser.add_argument("--trace", type=Path, help="the folder for each rank's profiler trace")
parser.add_argument("--save", type=target, help="the file for the trained state dict")
args = parser.parse_args()
counts = args.epochs, args.batch_size, args.accumulate, args.warm_up, args.report
if min(*counts, args.lr, args.clip) <= 0 or args.workers < 0:
    raise SystemExit("Numbers must be above 0 (of --workers: not below).")
if args.trace:
    target(args.trace / "rank0.json")
torch.manual_seed(0)
try:
    train, test = read(args.data, "train"), read(args.data, "test")
except Exception as error:  # its words may advise to trust a pickle
    kinds = "Fashion-MNIST's .npz nor the folder of torchvision's FashionMNIST"
    raise SystemExit(f"--data {args.data}: neither {kinds} ({type(error).__name__}).") from None

device = torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")
if device.type == "mps":  # PyTorch cannot send its tensors to another process
    device = torch.device("cpu")
processes = int(os.environ.get("LOCAL_WORLD_SIZE", 0))  # of this host; 0: not by torchrun
if not processes or (device.type != "cpu" and processes > torch.accelerator.device_count()):
    raise SystemExit("Start it with torchrun, a process per GPU (CUDA_VISIBLE_DEVICES= hides all).")
if device.type != "cpu":
    torch.accelerator.set_device_index(int(os.environ["LOCAL_RANK"]))  # to each its own
dist.init_process_group(dist.get_default_backend_for_device(device))
rank, ranks = dist.get_rank(), dist.get_world_size()
sampler = DistributedSampler(train)  # each process its share of the images
train_batches = DataLoader(
    train, args.batch_size, sampler=sampler, drop_last=True,  # one shape: compiled once
    num_workers=args.workers, persistent_workers=args.workers > 0, pin_memory=device.type != "cpu",
    multiprocessing_context="fork" if args.workers else None,  # others would run this file again
)  # fmt: skip
test_batches = DataLoader(test, args.batch_size, sampler=range(rank, len(test), ranks))
model = LeNet().to(device, memory_format=torch.channels_last)
print(f"training on {model[0].weight.device}")
parallel = nn.parallel.DistributedDataParallel(
    torch.compile(model, disable=args.no_compile),  # `model` itself stays as it is, to be saved
    bucket_cap_mb=args.bucket_mb, gradient_as_bucket_view=True,
)  # fmt: skip
torch.manual_seed(rank)  # last: data, split and weights are alike on all, dropout is not
optimizer = torch.optim.SGD(
    model.parameters(), args.lr, momentum=0.9, weight_decay=5e-4, fused=True
)
for p in model.parameters():  # or fused leaves it undefined if the first step overflows
    optimizer.state[p]["momentum_buffer"] = torch.zeros_like(p)
per_epoch = len(train_batches) // args.accumulate
used = per_epoch * args.accumulate * args.batch_size * ranks  # images; the rest makes no step
steps = args.epochs * per_epoch
if not steps:
    raise SystemExit(f"--data {args.data}: fewer images than one step takes.")
schedule = torch.optim.lr_scheduler.LambdaLR(  # up in the first steps, then down to 0
    optimizer, lambda step: min((step + 1) / args.warm_up, 1) * (1 - step / steps)
)
old_gpu = device.type == "cuda" and not torch.cuda.is_bf16_supported(including_emulation=False)
amp = args.amp or ("fp16" if old_gpu else "bf16")
amp_dtype = torch.float16 if amp == "fp16" else torch.bfloat16
scaler = torch.amp.GradScaler(device.type, enabled=amp == "fp16")
if args.trace:
    profiler = torch.profiler.profile(
        schedule=torch.profiler.schedule(wait=10, warmup=2, active=2, repeat=1),
        on_trace_ready=lambda p: p.export_chrome_trace(f"{args.trace}/rank{rank}.json"),
        acc_events=True,  # PyTorch 2.10 warns without
    )
    profiler.start()

step = 0
for epoch in range(1, args.epochs + 1):
    start = time.perf_counter()
    total = 0  # becomes a tensor: one .item() per epoch, not per step
    model.train()
    sampler.set_epoch(epoch)  # another order in each epoch
    ended("evaluation")  # of the epoch before
    for part, batch in enumerate(islice(train_batches, per_epoch * args.accumulate), 1):
        images, labels = (tensor.to(device, non_blocking=True) for tensor in batch)
        ended("data")
        last = part % args.accumulate == 0
        with nullcontext() if last else parallel.no_sync():
            with torch.autocast(device.type, amp_dtype, enabled=amp != "no"):
                loss = F.cross_entropy(parallel(images), labels)
            ended("forward")
            scaler.scale(loss / args.accumulate).backward()
        ended("backward")
        total += loss.detach() * len(images)
        if not last:
            continue
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), args.clip)  # the same norm on every rank
        scaler.step(optimizer)  # fused: skips after an overflow, without a wait
        scaler.update()
        schedule.step()
        optimizer.zero_grad()
        ended("update")
        step += 1
        if args.trace:
            profiler.step()
        if step % args.report == 0:
            report(step)
    dist.all_reduce(total)
    loss = total.item() / used
    norm = nn.utils.get_total_norm(model.parameters())
    if not norm.isfinite():  # before anything is saved
        raise SystemExit(f"epoch {epoch}: loss {loss:.3}, norm of weights {norm:.3}. Lower --lr.")
    rate = used / (time.perf_counter() - start)
    accuracy = evaluate(model, test_batches)
    if rank == 0:
        print(f"epoch {epoch}: loss {loss:.3f}, test {accuracy:.2%}, {rate:,.0f} images/s")

if args.trace:
    profiler.stop()
if args.save and rank == 0:
    save({name: tensor.cpu() for name, tensor in model.state_dict().items()}, args.save)
dist.destroy_process_group()
