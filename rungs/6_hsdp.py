"""Rung 6, HSDP: torchrun --standalone --nproc-per-node=4 rungs/6_hsdp.py --replicas=2 ...."""

import os
import tempfile
import time
from argparse import SUPPRESS, ArgumentParser
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.checkpoint import state_dict as sd
from torch.distributed.elastic.multiprocessing.errors import record
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
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
        images, labels = data.data, data.targets
    else:
        arrays = np.load(path)
        images, labels = (torch.from_numpy(arrays[f"{split}_{of}"]) for of in ("images", "labels"))
    known = set() < set(labels.unique().tolist()) <= set(range(10))
    if images.dtype != torch.uint8 or not known or labels.numel() != len(images):
        raise ValueError("images are bytes, labels 0 to 9, one for each")
    return TensorDataset(images.reshape(len(images), 1, 28, 28), labels.long().flatten())


@torch.no_grad()  # inference_mode breaks the next training step if the model has not run yet
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
    parser = ArgumentParser(usage=SUPPRESS, epilog="An error? Add: 2>&1 | torchclinic explain")
    parser.print_usage = lambda _: os.getenv("RANK", "0") == "0" or time.sleep(30)  # rank 0 says it
    parser.add_argument("--data", type=Path, required=True, help=".npz, or torchvision's folder")
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--batch-size", type=int, default=64, help="images per step and process")
    parser.add_argument("--replicas", type=int, default=1, help="copies of the model: one per host")
    parser.add_argument("--lr", type=float, default=0.05)
    parser.add_argument("--workers", type=int, default=0, help="processes that load images")
    parser.add_argument("--save", type=Path, help="the file for the trained state dict")
    args = parser.parse_args()
    try:
        what = f"--data {args.data}: no Fashion-MNIST there"
        train, test = read(args.data, "train"), read(args.data, "test")
        what = f"--save {args.save}: name a file in a folder that can be written"
        if path := args.save and args.save.resolve():  # behind any link
            assert path.is_file() or not path.exists(), "this is no file"
            assert path != args.data.resolve(), "this is the data"
            tempfile.TemporaryFile(dir=path.parent).write(bytes(2**20))
    except Exception as error:  # its second sentence may advise to trust a pickle
        parser.error(f"{what} ({(str(error) or repr(error)).split('. ')[0]})")
    good = {"epochs": (1, 999), "batch_size": (1, len(train)), "lr": (1e-9, 99), "workers": (0, 99)}
    for name, (least, most) in good.items():
        if not least <= (value := vars(args)[name]) <= most:
            parser.error(f"--{name.replace('_', '-')} {value}: must be from {least} to {most}")

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
    even = test + [(test[0][0], torch.tensor(-1))] * (-len(test) % ranks)  # -1 is never right
    test_batches = DataLoader(even, args.batch_size, sampler=range(rank, len(even), ranks), **load)
    with torch.device("meta"):  # shapes alone: no rank needs memory for the whole model
        model = LeNet()
    if args.replicas < 1 or ranks % args.replicas:
        parser.error(f"--replicas {args.replicas}: must divide {ranks}, the number of processes")
    # A row is a copy in shards, on one host's ranks; columns, of one shard, average gradients, too.
    shape, names = (args.replicas, ranks // args.replicas), ("replicate", "shard")
    mesh = dist.init_device_mesh(device.type, shape, mesh_dim_names=names)
    bf16 = torch.bfloat16 if torch.cuda.is_bf16_supported(including_emulation=False) else None
    for unit in [layer for layer in model if list(layer.parameters())] + [model]:
        fully_shard(unit, mesh=mesh, mp_policy=MixedPrecisionPolicy(bf16, torch.float32))
    model.to_empty(device=device)
    whole = sd.StateDictOptions(full_state_dict=True, broadcast_from_rank0=True, cpu_offload=True)
    sd.set_model_state_dict(model, LeNet().state_dict() if rank == 0 else {}, options=whole)
    print(f"training on {model[0].weight.device}")
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
            loss = F.cross_entropy(model(images).float(), labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            schedule.step()
            total += loss.detach() * len(images)  # by image: the last batch may be smaller
        dist.all_reduce(total)
        loss = total.item() / sampler.total_size
        if not nn.utils.get_total_norm(model.parameters()).isfinite():  # before anything is saved
            parser.error(f"epoch {epoch}: loss {loss:.3}, weights not finite. Lower --lr.")
        rate = len(train) / (time.perf_counter() - start)
        accuracy = evaluate(model, test_batches, device) / len(test)
        if rank == 0:
            print(f"epoch {epoch}: loss {loss:.3f}, test {accuracy:.2%}, {rate:,.0f} images/s")

    weights = sd.get_model_state_dict(model, options=whole) if path else None  # by all ranks
    if path and rank == 0:
        try:
            with tempfile.TemporaryDirectory(dir=path.parent) as folder:
                torch.save(weights, new := Path(folder, "new"))
                new.chmod((path if path.exists() else new).stat().st_mode)
                os.replace(new, path)  # a save that is killed leaves the old file
        except (OSError, RuntimeError) as error:
            torch.save(weights, spare := Path(tempfile.mkdtemp(), path.name))
            parser.error(f"--save {path}: {error}. The weights are in {spare}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
