"""Rung 4, DDP: torchrun --standalone --nproc-per-node=2 rungs/4_ddp.py (options: --help)."""

import argparse
import os
import tempfile
import time
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.elastic.multiprocessing.errors import record
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
        images, labels = (torch.from_numpy(arrays[f"{split}_{of}"]) for of in ("images", "labels"))
    return TensorDataset(images.unsqueeze(1), labels.long())


@torch.inference_mode()
def evaluate(model, batches, device):
    model.eval()
    right = torch.zeros((), device=device)
    for images, labels in batches:
        images, labels = images.to(device), labels.to(device)
        right += (model(images).argmax(1) == labels).sum()
    dist.all_reduce(right)
    return right.item()


@record  # torchrun then names the error of the rank that failed first
def main():
    parser = argparse.ArgumentParser(epilog="An error? Add: 2>&1 | torchclinic explain")
    parser.add_argument("--data", type=Path, required=True, help=".npz, or torchvision's folder")
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--batch-size", type=int, default=64, help="images per step and process")
    parser.add_argument("--lr", type=float, default=0.05)
    parser.add_argument("--workers", type=int, default=0, help="processes that load images")
    parser.add_argument("--save", type=Path, help="the file for the trained state dict")
    args = parser.parse_args()
    path = args.save and args.save.resolve()  # behind any link
    if path and not path.is_file() and (path.exists() or not path.parent.is_dir()):
        parser.error(f"--save {path}: name a file in a folder that exists")
    try:
        train, test = read(args.data, "train"), read(args.data, "test")
    except Exception as error:  # its words may advise to trust a pickle
        parser.error(f"--data {args.data}: no Fashion-MNIST there ({type(error).__name__})")

    torch.manual_seed(0)
    device = torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")
    if "LOCAL_RANK" not in os.environ:
        parser.error("start it with torchrun, a process per GPU (CUDA_VISIBLE_DEVICES= hides all)")
    if device.type in ("cpu", "mps"):  # PyTorch cannot send an Apple GPU's tensors
        device = torch.device("cpu")
        dist.init_process_group("gloo")
    else:
        device = torch.device(device.type, int(os.environ["LOCAL_RANK"]))  # to each its own
        torch.accelerator.set_device_index(device.index)
        dist.init_process_group(device_id=device)  # NCCL between NVIDIA's GPUs
    rank, ranks = dist.get_rank(), dist.get_world_size()
    load = {"num_workers": args.workers, "persistent_workers": args.workers > 0}
    sampler = DistributedSampler(train)  # each process its share of the images
    train_batches = DataLoader(train, args.batch_size, sampler=sampler, **load)
    test_batches = DataLoader(test, args.batch_size, sampler=range(rank, len(test), ranks), **load)
    model = LeNet().to(device)
    print(f"training on {model[0].weight.device}")
    parallel = nn.parallel.DistributedDataParallel(model)  # averages gradients over all
    torch.manual_seed(rank)  # last: data, split and weights are alike on all, dropout is not
    optimizer = torch.optim.SGD(model.parameters(), args.lr, momentum=0.9, weight_decay=5e-4)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1, 0, args.epochs * len(train_batches))

    for epoch in range(1, args.epochs + 1):
        start = time.perf_counter()
        total = torch.zeros((), device=device)  # one .item() per epoch, not per step
        model.train()
        sampler.set_epoch(epoch)  # another order in each epoch
        for images, labels in train_batches:
            images, labels = images.to(device), labels.to(device)
            loss = F.cross_entropy(parallel(images), labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            schedule.step()
            total += loss.detach() * len(images)  # by image: the last batch may be smaller
        dist.all_reduce(total)
        loss = total.item() / sampler.total_size
        if not nn.utils.get_total_norm(model.parameters()).isfinite():  # before anything is saved
            raise SystemExit(f"epoch {epoch}: loss {loss:.3}, weights not finite. Lower --lr.")
        rate = len(train) / (time.perf_counter() - start)
        accuracy = evaluate(model, test_batches, device) / len(test)
        if rank == 0:
            print(f"epoch {epoch}: loss {loss:.3f}, test {accuracy:.2%}, {rate:,.0f} images/s")

    if path and rank == 0:
        weights = {name: tensor.cpu() for name, tensor in model.state_dict().items()}
        with tempfile.TemporaryDirectory(dir=path.parent) as folder:
            torch.save(weights, f"{folder}/new")
            os.replace(f"{folder}/new", path)  # a save that is killed leaves the old file
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
