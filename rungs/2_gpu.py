"""Rung 2, one GPU: train LeNet on Fashion-MNIST and say how good it is (options: --help)."""

import os
import tempfile
import time
from argparse import SUPPRESS, ArgumentParser
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, RandomSampler, TensorDataset


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


@torch.inference_mode()
def evaluate(model, batches, device):
    model.eval()
    right = torch.zeros((), device=device)
    for images, labels in batches:
        images, labels = images.to(device), labels.to(device)
        right += (model(images).argmax(1) == labels).sum()
    return right.item()


def main():
    parser = ArgumentParser(usage=SUPPRESS, epilog="An error? Add: 2>&1 | torchclinic explain")
    parser.add_argument("--data", type=Path, required=True, help=".npz, or torchvision's folder")
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--batch-size", type=int, default=64, help="images per step and process")
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
    load = {"num_workers": args.workers, "persistent_workers": args.workers > 0}
    sampler = RandomSampler(train, generator=torch.Generator().manual_seed(0))
    train_batches = DataLoader(train, args.batch_size, sampler=sampler, **load)
    test_batches = DataLoader(test, args.batch_size, **load)
    model = LeNet().to(device)
    print(f"training on {model[0].weight.device}")
    optimizer = torch.optim.SGD(model.parameters(), args.lr, momentum=0.9, weight_decay=5e-4)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1, 0, args.epochs * len(train_batches))

    for epoch in range(1, args.epochs + 1):
        start = time.perf_counter()
        total = torch.zeros((), device=device)  # one .item() per epoch, not per step
        model.train()
        for images, labels in train_batches:
            images, labels = images.to(device), labels.to(device)
            loss = F.cross_entropy(model(images), labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            schedule.step()
            total += loss.detach() * len(images)  # by image: the last batch may be smaller
        loss = total.item() / len(train)
        if not nn.utils.get_total_norm(model.parameters()).isfinite():  # before anything is saved
            parser.error(f"epoch {epoch}: loss {loss:.3}, weights not finite. Lower --lr.")
        rate = len(train) / (time.perf_counter() - start)
        accuracy = evaluate(model, test_batches, device) / len(test)
        print(f"epoch {epoch}: loss {loss:.3f}, test {accuracy:.2%}, {rate:,.0f} images/s")

    if path:
        weights = {name: tensor.cpu() for name, tensor in model.state_dict().items()}
        try:
            with tempfile.TemporaryDirectory(dir=path.parent) as folder:
                torch.save(weights, new := Path(folder, "new"))
                new.chmod((path if path.exists() else new).stat().st_mode)
                os.replace(new, path)  # a save that is killed leaves the old file
        except (OSError, RuntimeError) as error:
            torch.save(weights, spare := Path(tempfile.mkdtemp(), path.name))
            parser.error(f"--save {path}: {error}. The weights are in {spare}")


if __name__ == "__main__":
    main()
