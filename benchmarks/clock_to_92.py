"""One GPU and the same small net: seconds until 92 % of Fashion-MNIST's test images are right.

    python -m benchmarks.clock_to_92

Three ways: the loop of many tutorials, chapter 06's rung, and chapter 07's changes. An epoch's end
is looked at by the first alone; the others plan their learning rate, and so are given as few epochs
as brought all seeds there. The data set is in memory when the clock begins; the compiler, all
epochs and evaluations count.
"""

import json
from time import perf_counter

import torch
import torch.nn.functional as F
from PIL import Image
from torch import nn
from torch.utils.data import DataLoader, Dataset
from torchvision.transforms import ToTensor

from torchladder.data import DeviceBatches, load_dataset
from torchladder.devices import try_gpu
from torchladder.training import evaluate, train

GOAL = 0.92


def new_net():
    """Three stages of two convolutions with batch norm: 0.3 million parameters."""
    layers = []
    for before, after in ((1, 32), (32, 64), (64, 128)):
        for inputs in (before, after):
            layers += [nn.Conv2d(inputs, after, 3, padding=1, bias=False), nn.BatchNorm2d(after)]
            layers += [nn.ReLU()]
        layers += [nn.MaxPool2d(2)]
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(128 * 9, 10))


class Pictures(Dataset):
    """As torchvision's FashionMNIST gives them: one by one, through PIL."""

    def __init__(self, images, labels):
        self.images, self.labels, self.transform = images, labels, ToTensor()

    def __len__(self):
        return len(self.labels)

    def __getitem__(self, i):
        return self.transform(Image.fromarray(self.images[i, 0].numpy())), int(self.labels[i])


def tutorial(model, data, device, epochs):
    """64 pictures a step, a constant rate, and a loss that is read at each step."""
    batches = DataLoader(Pictures(*data.split("train")), 64, shuffle=True)
    test = DataLoader(Pictures(*data.split("test")), 64)
    model, loss_of = model.to(device), nn.CrossEntropyLoss()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for _ in range(epochs):
        model.train()
        for images, labels in batches:
            loss = loss_of(model(images.to(device)), labels.to(device))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            loss.item()
        yield evaluate(model, test).accuracy


def rung_2(model, data, device, epochs):
    """`train` as it is: a batch at once, momentum, a rate that falls to 0."""
    rung = "cpu" if device.type == "cpu" else "gpu"
    yield train(model, data, epochs=epochs, rung=rung)[-1].test_accuracy


def chapter_07(model, data, device, epochs):
    """Data on the GPU, 512 a step, bf16, compiled; the rate rises and falls."""
    batches = DeviceBatches(data, "train", device=device, batch_size=512)
    test = DeviceBatches(data, "test", device=device, batch_size=2000)
    model = model.to(device, memory_format=torch.channels_last)
    model.compile(disable=device.type == "cpu")
    options = {"momentum": 0.9, "weight_decay": 5e-4, "nesterov": True, "fused": True}
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2, **options)
    steps = epochs * len(batches)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.2, total_steps=steps)
    for epoch in range(epochs):
        batches.sampler.set_epoch(epoch)
        model.train()
        for images, labels in batches:
            with torch.autocast(device.type, torch.bfloat16):
                loss = F.cross_entropy(model(images), labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            schedule.step()
    yield evaluate(model, test, precision="bf16-mixed").accuracy


WAYS = {"tutorial": (tutorial, 15), "rung 2": (rung_2, 4), "chapter 07": (chapter_07, 3)}  # epochs


def race(way, data, device, seed):
    """Seconds, epochs (planned, or until the goal) and the accuracy."""
    loop, epochs = WAYS[way]
    torch.manual_seed(seed)
    model, start = new_net(), perf_counter()
    tried = []
    for accuracy in loop(model, data, device, epochs):
        tried.append(accuracy)
        if accuracy >= GOAL:
            break
    seconds = perf_counter() - start
    done = len(tried) if way == "tutorial" else epochs
    return {"way": way, "seed": seed, "seconds": seconds, "epochs": done, "accuracy": tried[-1]}


def main():
    data, device = load_dataset("fashion_mnist"), try_gpu()
    torch.zeros(1, device=device)  # CUDA starts before the clock
    for seed in range(3):
        for way in WAYS:
            print(json.dumps(race(way, data, device, seed)), flush=True)


if __name__ == "__main__":
    main()
