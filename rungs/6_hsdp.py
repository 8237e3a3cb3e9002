"""Rung 6, HSDP: torchrun --standalone --nproc-per-node=4 rungs/6_hsdp.py --replicas=2 ..."""

import argparse
import os
import tempfile
import time
from contextlib import suppress
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.fsdp import fully_shard
from torch.utils.data import ConcatDataset, DataLoader, DistributedSampler, TensorDataset


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


@torch.no_grad()  # inference_mode breaks the next training step if the model has not run yet
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


parser = argparse.ArgumentParser(epilog="An error? Add: 2>&1 | torchclinic explain")
parser.add_argument("--data", type=Path, required=True, help=".npz, or torchvision's folder")
parser.add_argument("--epochs", type=int, default=5)
parser.add_argument("--batch-size", type=int, default=64, help="images per step, in each process")
parser.add_argument("--replicas", type=int, default=1, help="copies of the model: one per host")
parser.add_argument("--lr", type=float, default=0.05)
parser.add_argument("--save", type=target, help="the file for the trained state dict")
args = parser.parse_args()
if min(args.epochs, args.batch_size, args.lr) <= 0:
    raise SystemExit("--epochs, --batch-size and --lr must be above 0.")
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
train_batches = DataLoader(train, args.batch_size, sampler=sampler)
# A call of the model exchanges weights: all need equally many batches. Class -1 is never right.
padded = ConcatDataset([test, [(test[0][0], torch.tensor(-1))] * (-len(test) % ranks)])
test_batches = DataLoader(padded, args.batch_size, sampler=range(rank, len(padded), ranks))
model = LeNet()  # the same weights on all, by the seed: fully_shard sends nothing
if args.replicas < 1 or ranks % args.replicas:
    raise SystemExit(f"--replicas {args.replicas}: must divide {ranks}, the number of processes.")
# Rows: a copy in shards, on neighbouring ranks, which share a host. Columns: the same shard.
shape, names = (args.replicas, ranks // args.replicas), ("replicate", "shard")
mesh = dist.init_device_mesh(device.type, shape, mesh_dim_names=names)
for unit in [layer for layer in model if list(layer.parameters())] + [model]:
    fully_shard(unit, mesh=mesh)  # gathers in a row of the mesh, averages in a column too
print(f"training on {model[0].weight.device}")
torch.manual_seed(rank)  # last: data, split and weights are alike on all, dropout is not
optimizer = torch.optim.SGD(model.parameters(), args.lr, momentum=0.9, weight_decay=5e-4)
steps = args.epochs * len(train_batches)
schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1, 0, steps)

for epoch in range(1, args.epochs + 1):
    start = time.perf_counter()
    total = 0  # becomes a tensor: one .item() per epoch, not per step
    model.train()
    sampler.set_epoch(epoch)  # another order in each epoch
    for images, labels in train_batches:
        images, labels = images.to(device), labels.to(device)
        loss = F.cross_entropy(model(images), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
        total += loss.detach() * len(images)  # by image: the last batch may be smaller
    dist.all_reduce(total)
    loss = total.item() / sampler.total_size
    norm = nn.utils.get_total_norm(model.parameters()).full_tensor()
    if not norm.isfinite():  # before anything is saved
        raise SystemExit(f"epoch {epoch}: loss {loss:.3}, norm of weights {norm:.3}. Lower --lr.")
    rate = len(train) / (time.perf_counter() - start)
    accuracy = evaluate(model, test_batches)
    if rank == 0:
        print(f"epoch {epoch}: loss {loss:.3f}, test {accuracy:.2%}, {rate:,.0f} images/s")

whole = StateDictOptions(full_state_dict=True, cpu_offload=True)
weights = get_model_state_dict(model, options=whole)  # by all ranks; rank 0 gets them
if args.save and rank == 0:
    save(weights, args.save)
dist.destroy_process_group()
