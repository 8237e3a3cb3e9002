"""Each data set comes whole and right, from wherever it lies, or not at all."""

import dataclasses
import gzip
import shutil

import numpy as np
import pytest
import torch
import torchvision
from torch.utils.data import Dataset, IterableDataset, TensorDataset

from torchladder import data
from torchladder.data import DeviceBatches, balanced_subset, dataloader, load_dataset

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def small():
    return load_dataset()


@pytest.fixture
def elsewhere(monkeypatch, tmp_path):
    """A machine without any full data set; its home, Debian folder and Kaggle input are empty."""
    for name in ("home", "debian", "kaggle"):
        (tmp_path / name).mkdir()
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setattr(data, "_DEBIAN", tmp_path / "debian")
    monkeypatch.setattr(data, "_KAGGLE", tmp_path / "kaggle")
    monkeypatch.delenv("TORCHLADDER_DATA", raising=False)
    return tmp_path


def same(one, other):
    pairs = [*zip(one.split("train"), other.split("train"), strict=True)]
    pairs += zip(one.split("test"), other.split("test"), strict=True)
    return all(torch.equal(a, b) for a, b in pairs)


# --- the bundled subset -------------------------------------------------------------------------


def test_the_bundled_set_is_balanced_uint8_and_of_the_stated_size(small):
    assert small.train_images.shape == (12_000, 1, 28, 28)
    assert small.train_images.dtype == torch.uint8
    assert small.train_labels.bincount().tolist() == [1200] * 10
    assert small.test_labels.bincount().tolist() == [200] * 10
    assert repr(small).startswith("fashion_mnist_small: 12,000 train and 2,000 test images of 1x28")
    pixels = small.normalise(small.train_images)
    assert pixels.dtype == torch.float32
    assert abs(pixels.mean()) < 0.01
    assert abs(pixels.std() - 1) < 0.01
    image, label = dataloader(small).dataset[-1]
    assert torch.equal(image, pixels[-1])
    assert label == small.train_labels[-1]


@pytest.mark.skipif(not data._DEBIAN.is_dir(), reason="no dataset-fashion-mnist of Debian's")
def test_the_bundled_set_is_the_first_images_of_the_full_one(small):
    full = load_dataset("fashion_mnist", data._DEBIAN)
    assert (len(full.train_images), len(full.test_images)) == (60_000, 10_000)
    assert same(balanced_subset(full, 1200, 200), small)
    pixels = full.train_images.float() / 255
    assert (round(pixels.mean().item(), 4), round(pixels.std().item(), 4)) == (0.2860, 0.3530)


def test_unknown_names_are_refused_with_the_known_ones():
    with pytest.raises(ValueError, match="No data set 'mnist': there are fashion_mnist_small"):
        load_dataset("mnist")


# --- full Fashion-MNIST -------------------------------------------------------------------------


@pytest.fixture(scope="module")
def full_size(small):
    """A set as large as the full one, of the bundled images five times, and its four files."""
    parts, files = {}, {}
    for split, prefix in [("train", "train"), ("test", "t10k")]:
        images, labels = (t.repeat(5, *[1] * (t.ndim - 1)) for t in small.split(split))
        parts |= {f"{split}_images": images, f"{split}_labels": labels}
        shape = np.array(images.squeeze(1).shape, ">i4").tobytes()
        files[f"{prefix}-images-idx3-ubyte"] = b"\0\0\x08\x03" + shape + images.numpy().tobytes()
        count = np.array([len(labels)], ">i4").tobytes()
        files[f"{prefix}-labels-idx1-ubyte"] = b"\0\0\x08\x01" + count + bytes(labels.tolist())
    return dataclasses.replace(small, **parts), files


def write(folder, files, *, compress=False):
    for name, raw in files.items():
        packed = compress and "labels" in name  # the images would take seconds
        path = folder / (f"{name}.gz" if packed else name)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(gzip.compress(raw) if packed else raw)


@pytest.mark.parametrize(
    ("place", "how"),
    [
        ("debian", "gz"),
        ("home/.cache/torchladder/FashionMNIST/raw", ""),
        ("kaggle/datasets/zalando-research/fashionmnist", "a folder each"),
        ("mine", "named"),
    ],
)
def test_idx_files_are_found_wherever_they_usually_lie(
    elsewhere, full_size, place, how, monkeypatch
):
    expected, files = full_size
    # Of another data set, in files of the same names.
    write(elsewhere / "kaggle" / "a-digits", dict.fromkeys(files, b"other pictures"))
    if how == "named":
        monkeypatch.setenv("TORCHLADDER_DATA", str(elsewhere / place))
    if how == "a folder each":
        files = {f"{name}/{name}": raw for name, raw in files.items()}
    write(elsewhere / place, files, compress=how == "gz")
    assert same(load_dataset("fashion_mnist"), expected)


def test_damaged_files_and_other_data_sets_are_named(elsewhere, full_size):
    _, files = full_size
    test_images, labels = "t10k-images-idx3-ubyte", "train-labels-idx1-ubyte"
    folder = elsewhere / "debian"
    digits = files[test_images][:16] + bytes(10_000 * 784 // 2) + files[test_images][-3_920_000:]
    for name, raw, message in [
        (test_images, files[test_images][:-1], "is damaged"),
        (test_images, b"<!DOCTYPE html>", "is damaged"),
        (test_images, digits, "holds something other than Fashion-MNIST's"),
        (labels, files[labels].replace(b"\x09", b"\x08"), "holds something other"),
    ]:
        write(folder, files | {name: raw})
        with pytest.raises(ValueError, match=f"{name} {message}"):
            load_dataset("fashion_mnist", folder)
    shutil.rmtree(folder)
    write(folder, files, compress=True)
    path = folder / f"{labels}.gz"
    path.write_bytes(path.read_bytes()[:50])
    with pytest.raises(ValueError, match=rf"{labels}\.gz is damaged"):
        load_dataset("fashion_mnist")


def test_a_set_that_is_not_whole_says_where_it_looked_and_the_two_ways(elsewhere, full_size):
    _, files = full_size
    write(elsewhere / "debian", {name: raw for name, raw in files.items() if "t10k" not in name})
    with pytest.raises(FileNotFoundError) as caught:
        load_dataset("fashion_mnist")
    for part in (
        str(elsewhere / "debian"), "t10k-labels-idx1-ubyte", "TORCHLADDER_DATA", "download=True",
        "zalando-research/fashionmnist",
    ):  # fmt: skip
        assert part in str(caught.value)
    with pytest.raises(FileNotFoundError, match=r"not found: looked in .*no such folder"):
        load_dataset("fashion_mnist", elsewhere / "no such folder")


def test_download_asks_torchvision_and_then_checks_what_came(elsewhere, full_size, monkeypatch):
    expected, files = full_size

    def fetch(folder, download):
        assert download
        write(folder / "FashionMNIST" / "raw", files)

    monkeypatch.setattr(torchvision.datasets, "FashionMNIST", fetch)
    assert same(load_dataset("fashion_mnist", elsewhere / "new", download=True), expected)


# --- batches ------------------------------------------------------------------------------------


def test_an_epoch_holds_every_image_once_in_an_order_set_by_seed_and_epoch(small):
    def labels(seed, epoch):
        batches = dataloader(small, batch_size=500, seed=seed)
        batches.sampler.set_epoch(epoch)
        return torch.cat([labels for _, labels in batches])

    first = labels(0, 0)
    assert first.bincount().tolist() == [1200] * 10
    assert torch.equal(first, labels(0, 0))
    assert not torch.equal(first, labels(0, 1))
    assert not torch.equal(first, labels(1, 0))
    assert torch.equal(torch.cat([y for _, y in dataloader(small, "test")]), small.test_labels)


@pytest.mark.parametrize("workers", [0, 2])
def test_batches_of_the_loader_and_of_the_device_are_equal(small, workers):
    one = dataloader(small, batch_size=5000, seed=3, workers=workers)
    other = DeviceBatches(small, device=CPU, batch_size=5000, seed=3)
    assert len(one) == len(other) == 3
    for epoch in range(2):
        one.sampler.set_epoch(epoch)
        other.sampler.set_epoch(epoch)
        for pair in zip(one, other, strict=True):
            assert all(map(torch.equal, *pair))


class Stream(IterableDataset):
    def __iter__(self):
        yield torch.zeros(1, 28, 28), 0

    def __len__(self):  # it may have one; that does not make it one to index
        return 1


def test_what_cannot_be_dealt_out_to_batches_is_refused(small):
    samples = TensorDataset(torch.eye(4))
    for wrong, split, message in [
        (samples, "train", "data is TensorDataset: give an ImageData or a pair"),
        ((samples, Stream()), "test", "data is TensorDataset and Stream: .*Chapter 10"),
        ((samples, []), "test", "test split is empty"),
        (balanced_subset(small, 0, 1), "train", "train split is empty"),
    ]:
        with pytest.raises(ValueError, match=message):
            dataloader(wrong, split)
    with pytest.raises(ValueError, match="train split is empty"):
        DeviceBatches(balanced_subset(small, 0, 1), device=CPU)
    for split in ("train", "test"):
        with pytest.raises(ValueError, match="rank=3, world_size=2: ranks are 0 to world_size - 1"):
            dataloader(small, split, rank=3, world_size=2)


class Noise(Dataset):
    """Pictures that a worker draws."""

    def __len__(self):
        return 16

    def __getitem__(self, index):
        return torch.rand(1, 2, 2), index % 2


@pytest.mark.slow
def test_the_workers_of_each_rank_and_epoch_draw_numbers_of_their_own():
    def drawn(rank, epoch, start=0):
        batches = dataloader((Noise(),) * 2, batch_size=4, workers=1, rank=rank, world_size=2)
        batches.sampler.set_epoch(epoch, start)
        return torch.cat([images for images, _ in batches]).flatten().tolist()

    runs = [drawn(rank, epoch) for rank in (0, 1) for epoch in (0, 1)]
    runs.append(drawn(1, 1, start=4))  # as a run that was stopped in the middle goes on
    numbers = [number for run in runs for number in run]
    assert len(set(numbers)) == len(numbers) == (4 * 8 + 4) * 4
    assert drawn(1, 1) == runs[-2]
