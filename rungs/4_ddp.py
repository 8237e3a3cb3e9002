"""Rung 4, DDP: train LeNet on Fashion-MNIST; torchrun --standalone --nproc-per-node=2 4_ddp.py."""

import argparse
import gc
import os
import time
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, Subset, TensorDataset
from torchvision.datasets import FashionMNIST


class LeNet(nn.Sequential):
    def __init__(self):
        super().__init__(
            nn.Conv2d(1, 6, 5, padding=2), nn.ReLU(), nn.MaxPool2d(2),
            nn.Conv2d(6, 16, 5), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(),
            nn.Linear(400, 120), nn.ReLU(), nn.Linear(120, 84), nn.ReLU(), nn.Linear(84, 10),
        )  # fmt: skip

    def forward(self, pixels):  # bytes until here: a quarter of the floats' size to load and copy
        return super().forward((pixels.float() / 255 - 0.2860) / 0.3530)


def read(path, split):
    if path.is_dir():
        data = FashionMNIST(path, train=split == "train", download=True)
        return TensorDataset(data.data.unsqueeze(1), data.targets)
    with np.load(path) as arrays:
        images, labels = (torch.from_numpy(arrays[f"{split}_{k}"]) for k in ("images", "labels"))
    return TensorDataset(images.unsqueeze(1), labels.long())


@torch.inference_mode()
def evaluate(model, batches):
    model.eval()
    right = sum((model(x.to(device)).argmax(1) == y.to(device)).sum() for x, y in batches)
    dist.all_reduce(right)
    return right.item() / len(test)


parser = argparse.ArgumentParser()
parser.add_argument("--data", type=Path, required=True, help="an .npz, or a folder to download to")
parser.add_argument("--epochs", type=int, default=5)
parser.add_argument("--batch-size", type=int, default=64, help="of each process")
parser.add_argument("--lr", type=float, default=0.05)
parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
parser.add_argument("--amp", choices=["fp16", "bf16"], help="mixed precision; default: float32")
parser.add_argument("--save", type=Path, help="the file for the trained state dict")
args = parser.parse_args()
if args.device == "cuda" and not torch.cuda.is_available():
    raise SystemExit("PyTorch finds no CUDA GPU here. Try --device cpu.")
if "LOCAL_RANK" not in os.environ:
    raise SystemExit("Start this with: torchrun --standalone --nproc-per-node=2 rungs/4_ddp.py")
local_rank, gpus = int(os.environ["LOCAL_RANK"]), torch.cuda.device_count()
device = torch.device(f"cuda:{local_rank % gpus}" if args.device == "cuda" else "cpu")
if device.type == "cuda":
    torch.cuda.set_device(device)  # for all that asks for "the" GPU
own_gpu = device.type == "cuda" and gpus >= int(os.environ["LOCAL_WORLD_SIZE"])
dist.init_process_group("nccl" if own_gpu else "gloo", device_id=device if own_gpu else None)
rank, world_size = dist.get_rank(), dist.get_world_size()
amp_dtype = {"fp16": torch.float16, "bf16": torch.bfloat16}.get(args.amp)
if min(args.epochs, args.batch_size) < 1:
    raise SystemExit("--epochs and --batch-size start at 1.")
if args.save and not args.save.parent.is_dir():
    raise SystemExit(f"--save {args.save}: the folder {args.save.parent} does not exist.")
if rank > 0:
    dist.barrier()  # until rank 0 has downloaded the data
try:
    train, test = read(args.data, "train"), read(args.data, "test")
except Exception as error:
    why = " ".join(str(error).split())[:200]
    raise SystemExit(f"--data {args.data}: no Fashion-MNIST there ({why}).") from None
if rank == 0:
    dist.barrier()

torch.manual_seed(0)
sampler = DistributedSampler(train)  # each process its share of the images
share = Subset(test, range(rank, len(test), world_size))  # no image twice, as a sampler would pad
train_batches = DataLoader(train, args.batch_size, sampler=sampler, pin_memory=own_gpu)
test_batches = DataLoader(share, args.batch_size, pin_memory=own_gpu)
model = LeNet().to(device)
parallel = DistributedDataParallel(model)  # averages the gradients over all processes
optimizer = torch.optim.SGD(model.parameters(), args.lr, momentum=0.9, weight_decay=5e-4)
schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1, 0, args.epochs * len(train_batches))
scaler = torch.amp.GradScaler(device.type, enabled=args.amp == "fp16")

for epoch in range(1, args.epochs + 1):
    start = time.perf_counter()
    total = torch.zeros((), device=device)  # a tensor: one .item() an epoch, not one a step
    model.train()
    sampler.set_epoch(epoch)  # another order in each epoch
    for images, labels in train_batches:
        images, labels = (t.to(device, non_blocking=True) for t in (images, labels))
        with torch.autocast(device.type, amp_dtype, enabled=args.amp is not None):
            loss = F.cross_entropy(parallel(images), labels)
        optimizer.zero_grad()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        schedule.step()
        total += loss.detach() * len(images)  # summed by image: the last batch may be smaller
    dist.all_reduce(total)
    loss = total.item() / sampler.total_size
    rate = sampler.total_size / (time.perf_counter() - start)
    accuracy = evaluate(model, test_batches)
    if rank == 0:
        line = f"epoch {epoch}: loss {loss:.3f}, test {accuracy:.1%}, {rate:,.0f} images/s"
        print(line, flush=True)

if rank == 0:
    print(f"test accuracy: {accuracy:.2%}")
if args.save and rank == 0:  # beside it, then renamed: killed half-way, it spoils nothing
    temporary = args.save.with_name(args.save.name + ".tmp")
    torch.save({name: t.cpu() for name, t in model.state_dict().items()}, temporary)
    os.replace(temporary, args.save)
del parallel
gc.collect()  # DDP outliving the group can abort the process (pytorch issue 179291)
dist.destroy_process_group()
