"""Each data set comes whole and right, from wherever it lies, or not at all."""

import dataclasses
import gzip
import hashlib
import pickle
import shutil

import numpy as np
import pytest
import torch
import torchvision
import torchvision.transforms.functional as TF

from torchladder import data
from torchladder.data import DeviceBatches, balanced_subset, flip_and_crop, load, loader

needs_full_set = pytest.mark.skipif(
    not data.DEBIAN.is_dir(), reason="Debian's dataset-fashion-mnist is not installed"
)


@pytest.fixture(scope="module")
def small():
    return load()


@pytest.fixture
def elsewhere(monkeypatch, tmp_path):
    """A machine without any full data set; its home, Debian folder and Kaggle input are empty."""
    for name in ("home", "debian", "kaggle"):
        (tmp_path / name).mkdir()
    monkeypatch.setattr(data.Path, "home", lambda: tmp_path / "home")
    monkeypatch.setattr(data, "DEBIAN", tmp_path / "debian")
    monkeypatch.setattr(data, "KAGGLE", tmp_path / "kaggle")
    monkeypatch.delenv("TORCHLADDER_DATA", raising=False)
    return tmp_path


# --- the bundled subset -------------------------------------------------------------------------


def test_the_bundled_set_is_balanced_uint8_and_of_the_stated_size(small):
    assert small.train_images.shape == (12_000, 1, 28, 28)
    assert small.test_images.shape == (2_000, 1, 28, 28)
    assert small.train_images.dtype == torch.uint8
    assert small.train_labels.bincount().tolist() == [1200] * 10
    assert small.test_labels.bincount().tolist() == [200] * 10
    assert repr(small).startswith("fashion_mnist_small: 12,000 train and 2,000 test images of 1x28")


@needs_full_set
def test_the_bundled_set_is_what_the_script_makes_of_the_full_one(small):
    made = balanced_subset(load("fashion_mnist", data.DEBIAN), 1200, 200)
    assert made.name == small.name
    for split in ("train", "test"):
        for ours, theirs in zip(small.split(split), made.split(split), strict=True):
            assert torch.equal(ours, theirs)


def test_a_changed_bundled_file_is_refused(monkeypatch, tmp_path):
    changed = tmp_path / "changed.npz"
    changed.write_bytes(data.BUNDLED.read_bytes()[:-100])
    monkeypatch.setattr(data, "BUNDLED", changed)
    with pytest.raises(ValueError, match=r"changed\.npz is not the subset .* truncated, changed"):
        load()


@needs_full_set
def test_without_the_bundled_file_the_subset_is_taken_from_the_full_set(
    monkeypatch, small, tmp_path
):
    monkeypatch.setattr(data, "BUNDLED", tmp_path / "not there")
    assert torch.equal(load().train_images, small.train_images)


def test_unknown_names_are_refused_with_the_known_ones(small):
    with pytest.raises(ValueError, match="No data set 'mnist': there are fashion_mnist_small"):
        load("mnist")
    with pytest.raises(ValueError, match="No split 'validation': there are 'train' and 'test'"):
        small.split("validation")


def test_normalised_pixels_have_mean_zero_and_deviation_one(small):
    pixels = small.normalise(small.train_images)
    assert pixels.dtype == torch.float32
    assert abs(pixels.mean()) < 0.01
    assert abs(pixels.std() - 1) < 0.01


# --- full Fashion-MNIST -------------------------------------------------------------------------


@pytest.fixture(scope="module")
def tiny_fashion(small):
    """A tenth of the bundled set in Fashion-MNIST's file formats: idx bytes, and CSV tables."""
    tiny = balanced_subset(small, 120, 20)
    idx, csv = {}, {}
    for split, prefix in [("train", "train"), ("test", "t10k")]:
        images, labels = (t.squeeze(1) if t.ndim == 4 else t for t in tiny.split(split))
        shape = np.array(images.shape, ">i4").tobytes()
        idx[f"{prefix}-images-idx3-ubyte"] = b"\0\0\x08\x03" + shape + images.numpy().tobytes()
        count = np.array([len(labels)], ">i4").tobytes()
        idx[f"{prefix}-labels-idx1-ubyte"] = b"\0\0\x08\x01" + count + bytes(labels.tolist())
        table = np.column_stack([labels, images.flatten(1)])
        rows = "\n".join(",".join(map(str, row)) for row in table)
        header = ",".join(["label", *(f"pixel{i + 1}" for i in range(784))])
        csv[f"fashion-mnist_{split}.csv"] = f"{header}\n{rows}\n".encode()
    return tiny, idx, csv


@pytest.fixture
def expect_tiny(monkeypatch, tiny_fashion):
    """Make the tiny set the one that `load` expects, so that the tests need not read 47 MB."""
    _, idx, _ = tiny_fashion
    sums = {name: hashlib.sha256(raw).hexdigest() for name, raw in idx.items()}
    monkeypatch.setattr(data, "FASHION_SHA256", sums)
    sizes = {"fashion-mnist_train.csv": 1200, "fashion-mnist_test.csv": 200}
    monkeypatch.setattr(data, "FASHION_CSV", sizes)


def write(folder, files, *, compress=False):
    folder.mkdir(parents=True, exist_ok=True)
    for name, raw in files.items():
        (folder / (f"{name}.gz" if compress else name)).write_bytes(
            gzip.compress(raw) if compress else raw
        )


def same(one, other):
    pairs = [*zip(one.split("train"), other.split("train"), strict=True)]
    pairs += zip(one.split("test"), other.split("test"), strict=True)
    return all(torch.equal(a, b) for a, b in pairs)


@pytest.mark.parametrize("compress", [False, True])
@pytest.mark.parametrize(
    "place",
    [
        "debian",
        "home/.cache/torchladder/FashionMNIST/raw",
        "kaggle/fashionmnist",
        "kaggle/datasets/zalando-research/fashionmnist",
    ],
)
def test_idx_files_are_found_wherever_they_usually_lie(
    elsewhere, expect_tiny, tiny_fashion, place, compress
):
    tiny, idx, _ = tiny_fashion
    write(elsewhere / place, idx, compress=compress)
    assert same(load("fashion_mnist"), tiny)


@pytest.mark.parametrize("slug", ["fashionmnist", "datasets/zalando-research/fashionmnist"])
def test_kaggles_csv_files_give_the_same_set(elsewhere, expect_tiny, tiny_fashion, slug):
    tiny, _, csv = tiny_fashion
    write(elsewhere / "kaggle" / slug, csv)
    assert same(load("fashion_mnist"), tiny)


def test_kaggles_idx_files_in_folders_of_their_own_name_are_found(
    elsewhere, expect_tiny, tiny_fashion
):
    tiny, idx, _ = tiny_fashion
    for name, raw in idx.items():
        write(elsewhere / "kaggle/datasets/zalando-research/fashionmnist" / name, {name: raw})
    assert same(load("fashion_mnist"), tiny)


def test_the_environment_variable_comes_before_other_places(
    elsewhere, expect_tiny, tiny_fashion, monkeypatch
):
    tiny, idx, _ = tiny_fashion
    write(elsewhere / "mine", idx)
    write(elsewhere / "debian", dict.fromkeys(idx, b"another set"))
    monkeypatch.setenv("TORCHLADDER_DATA", str(elsewhere / "mine"))
    assert same(load("fashion_mnist"), tiny)
    with pytest.raises(ValueError, match="is not Fashion-MNIST's train-images-idx3-ubyte"):
        load("fashion_mnist", elsewhere / "debian")


def test_digits_of_the_same_file_names_are_passed_over(elsewhere, expect_tiny, tiny_fashion):
    tiny, idx, _ = tiny_fashion
    write(elsewhere / "kaggle" / "a-digits", dict.fromkeys(idx, b"other pictures"))
    write(elsewhere / "kaggle" / "fashionmnist", idx)
    assert same(load("fashion_mnist"), tiny)


def test_a_truncated_file_is_named_with_what_was_expected(elsewhere, expect_tiny, tiny_fashion):
    _, idx, _ = tiny_fashion
    name = "t10k-images-idx3-ubyte"
    write(elsewhere / "debian", idx | {name: idx[name][:-1]})
    with pytest.raises(ValueError, match=rf"{name} is not Fashion-MNIST's {name}: 156,815 bytes"):
        load("fashion_mnist")


def test_a_truncated_gz_file_is_named(elsewhere, expect_tiny, tiny_fashion):
    _, idx, _ = tiny_fashion
    write(elsewhere / "debian", idx, compress=True)
    path = elsewhere / "debian" / "train-labels-idx1-ubyte.gz"
    path.write_bytes(path.read_bytes()[:50])
    with pytest.raises(ValueError, match=r"train-labels-idx1-ubyte\.gz is damaged"):
        load("fashion_mnist")


def test_a_set_that_lacks_a_file_is_not_half_loaded(elsewhere, expect_tiny, tiny_fashion):
    _, idx, csv = tiny_fashion
    write(elsewhere / "debian", {k: v for k, v in idx.items() if "t10k" not in k})
    with pytest.raises(FileNotFoundError, match=r"lacks t10k-images-idx3-ubyte, t10k-labels"):
        load("fashion_mnist")
    shutil.rmtree(elsewhere / "debian")
    write(elsewhere / "kaggle" / "x", {"fashion-mnist_test.csv": csv["fashion-mnist_test.csv"]})
    with pytest.raises(FileNotFoundError, match=r"lacks fashion-mnist_train\.csv"):
        load("fashion_mnist")


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda raw: raw[:-2000], "is damaged|holds"),
        (lambda raw: raw.rsplit(b"\n", 2)[0] + b"\n", "holds 1,199 rows; expected 1,200 rows"),
        (lambda raw: raw.replace(b"\n9,", b"\n8,"), "every label equally often"),
        (lambda raw: raw.replace(b"\n9,", b"\n900,"), "is damaged"),
        (lambda raw: raw.replace(b"\n9,", b"\n50,"), "every label equally often"),
        (lambda raw: b"<!DOCTYPE html>\n<p>Sign in</p>\n", "is damaged"),
        (lambda raw: b"", "holds 0 rows"),
    ],
)
@pytest.mark.filterwarnings("ignore:loadtxt. input contained no data")
def test_a_damaged_csv_file_is_refused(elsewhere, expect_tiny, tiny_fashion, damage, message):
    _, _, csv = tiny_fashion
    name = "fashion-mnist_train.csv"
    write(elsewhere / "debian", csv | {name: damage(csv[name])})
    with pytest.raises(ValueError, match=rf"{name}.*({message})"):
        load("fashion_mnist")


def test_a_set_that_is_nowhere_says_where_it_looked_and_the_two_ways(elsewhere):
    with pytest.raises(FileNotFoundError) as caught:
        load("fashion_mnist")
    for part in (str(elsewhere / "debian"), "TORCHLADDER_DATA", "download=True", "zalando"):
        assert part in str(caught.value)
    with pytest.raises(FileNotFoundError, match="is not a folder"):
        load("fashion_mnist", elsewhere / "no such folder")


def test_download_asks_torchvision_and_then_checks_what_came(
    elsewhere, expect_tiny, tiny_fashion, monkeypatch
):
    tiny, idx, _ = tiny_fashion

    def fetch(folder, download):
        assert download
        write(folder / "FashionMNIST" / "raw", idx)

    monkeypatch.setattr(torchvision.datasets, "FashionMNIST", fetch)
    assert same(load("fashion_mnist", elsewhere / "new", download=True), tiny)


def test_a_failed_download_names_the_other_way(elsewhere, monkeypatch):
    class CIFAR10:
        base_folder = "cifar-10-batches-py"

        def __init__(self, folder, download):
            raise RuntimeError("Error downloading")

    monkeypatch.setattr(torchvision.datasets, "CIFAR10", CIFAR10)
    with pytest.raises(OSError, match=r"CIFAR10 could not be downloaded .* TORCHLADDER_DATA"):
        load("cifar10", download=True)


@needs_full_set
def test_debians_full_set_has_all_images_and_the_published_mean():
    full = load("fashion_mnist", data.DEBIAN)
    assert len(full.train_images) == 60_000
    assert full.test_labels.bincount().tolist() == [1000] * 10
    pixels = full.train_images.float() / 255
    assert (round(pixels.mean().item(), 4), round(pixels.std().item(), 4)) == (0.2860, 0.3530)


# --- CIFAR-10 -----------------------------------------------------------------------------------


@pytest.fixture
def tiny_cifar(elsewhere, monkeypatch):
    """Six small batch files in CIFAR-10's format, with their checksums."""
    folder = elsewhere / "kaggle" / "datasets" / "pankrzysiu" / "cifar10-python"
    folder /= torchvision.datasets.CIFAR10.base_folder
    folder.mkdir(parents=True)
    sums = {}
    generator = np.random.default_rng(0)
    for name in [*(f"data_batch_{i}" for i in range(1, 6)), "test_batch"]:
        pixels = generator.integers(0, 256, (20, 3072), dtype=np.uint8)
        sums[name] = pickle.dumps({"data": pixels, "labels": list(range(10)) * 2})
    sums["batches.meta"] = pickle.dumps({"label_names": list(data.CIFAR10_CLASSES)})
    for name, raw in sums.items():
        (folder / name).write_bytes(raw)
        sums[name] = hashlib.md5(raw).hexdigest()
    train = [[name, md5] for name, md5 in sums.items() if name.startswith("data")]
    cifar = torchvision.datasets.CIFAR10
    monkeypatch.setattr(cifar, "train_list", train)
    monkeypatch.setattr(cifar, "test_list", [["test_batch", sums["test_batch"]]])
    monkeypatch.setattr(cifar, "meta", cifar.meta | {"md5": sums["batches.meta"]})
    return folder


def test_cifar10_is_channels_first_and_in_order(tiny_cifar):
    cifar = load("cifar10")
    assert cifar.train_images.shape == (100, 3, 32, 32)
    assert cifar.train_labels.tolist() == list(range(10)) * 10
    batch = pickle.loads((tiny_cifar / "data_batch_1").read_bytes())
    expected = torch.from_numpy(batch["data"]).view(-1, 3, 32, 32)
    assert torch.equal(cifar.train_images[:20], expected)
    assert cifar.classes[3] == "cat"


def test_a_changed_cifar10_pickle_is_not_opened(tiny_cifar, tmp_path):
    class Marker:
        def __reduce__(self):
            return (open, (str(tmp_path / "opened"), "w"))

    (tiny_cifar / "data_batch_3").write_bytes(pickle.dumps(Marker()))
    with pytest.raises(ValueError, match=r"data_batch_3 is not CIFAR-10's data_batch_3"):
        load("cifar10")
    assert not (tmp_path / "opened").exists()


def test_missing_cifar10_files_are_named(tiny_cifar):
    (tiny_cifar / "test_batch").unlink()
    with pytest.raises(FileNotFoundError, match="lacks test_batch"):
        load("cifar10")
    shutil.rmtree(tiny_cifar)
    with pytest.raises(FileNotFoundError, match=r"CIFAR-10 not found.*pankrzysiu/cifar10-python"):
        load("cifar10")


def test_a_download_completes_a_set_that_lacks_a_file(tiny_cifar, monkeypatch):
    lacking = tiny_cifar / "test_batch"
    raw = lacking.read_bytes()
    lacking.unlink()
    cifar = torchvision.datasets.CIFAR10
    monkeypatch.setattr(cifar, "download", lambda self: lacking.write_bytes(raw))
    assert len(load("cifar10", tiny_cifar.parent, download=True).test_images) == 20


# --- batches ------------------------------------------------------------------------------------


def test_an_epoch_holds_every_image_once_in_an_order_set_by_seed_and_epoch(small):
    def labels(seed, epoch):
        batches = loader(small, batch_size=500, seed=seed)
        batches.sampler.set_epoch(epoch)
        return torch.cat([labels for _, labels in batches])

    first = labels(0, 0)
    assert first.bincount().tolist() == [1200] * 10
    assert torch.equal(first, labels(0, 0))
    assert not torch.equal(first, labels(0, 1))
    assert not torch.equal(first, labels(1, 0))


def test_test_images_come_in_order(small):
    assert torch.equal(torch.cat([y for _, y in loader(small, "test")]), small.test_labels)


@pytest.mark.parametrize("workers", [0, 2])
def test_batches_of_the_loader_and_of_the_device_are_equal(small, workers):
    one = loader(small, batch_size=5000, seed=3, workers=workers)
    other = DeviceBatches(small, device=torch.device("cpu"), batch_size=5000, seed=3)
    assert len(one) == len(other) == 3
    for epoch in range(2):
        one.sampler.set_epoch(epoch)
        other.sampler.set_epoch(epoch)
        for (images, labels), (images_there, labels_there) in zip(one, other, strict=True):
            assert torch.equal(images, images_there)
            assert torch.equal(labels, labels_there)


def test_single_items_equal_their_place_in_a_batch(small):
    dataset = data.ImageSet(small, "test")
    images, labels = dataset.__getitems__([5, 7])
    in_workers = loader(small, "test", workers=1).dataset
    for image, label in [dataset[7], dataset[7 - len(dataset)], in_workers[7]]:
        assert torch.equal(images[1], image)
        assert labels[1] == label


def test_a_pair_of_data_sets_gives_the_batches_of_the_same_images(small):
    train, test = (data.ImageSet(small, split) for split in ("train", "test"))
    pair = ([train[i] for i in range(100)], test)
    few = balanced_subset(small, 1200, 200)
    few = dataclasses.replace(
        few, train_images=few.train_images[:100], train_labels=few.train_labels[:100]
    )
    for split in ("train", "test"):
        one, other = (loader(d, split, batch_size=32, seed=3) for d in (few, pair))
        assert len(one) == len(other)
        for (images, labels), (theirs, their_labels) in zip(one, other, strict=True):
            assert torch.equal(images, theirs)
            assert torch.equal(labels, their_labels)
    with pytest.raises(ValueError, match="No split 'tset'"):
        loader(pair, "tset")


def test_impossible_batches_are_refused(small):
    with pytest.raises(ValueError, match="batch_size=0: a batch holds at least one image"):
        loader(small, batch_size=0)
    with pytest.raises(ValueError, match="workers=-1"):
        loader(small, workers=-1)
    with pytest.raises(ValueError, match="train split is empty"):
        loader(balanced_subset(small, 0, 1))
    with pytest.raises(ValueError, match="train split is empty"):
        DeviceBatches(balanced_subset(small, 0, 1), device=torch.device("cpu"))


# --- augmentation -------------------------------------------------------------------------------


def every_flip_and_crop(image, padding):
    """What torchvision makes of one image: each shift, as it is and mirrored."""
    height, width = image.shape[-2:]
    padded, shifts = TF.pad(image, padding), range(2 * padding + 1)
    crops = [TF.crop(padded, top, left, height, width) for top in shifts for left in shifts]
    return torch.stack([*crops, *map(TF.hflip, crops)])


def test_each_flip_and_shift_occurs_equally_often_and_is_torchvisions():
    image = torch.rand(1, 6, 5)
    generator = torch.Generator().manual_seed(0)
    made = flip_and_crop(image.expand(10_000, -1, -1, -1), padding=2, generator=generator)
    same = (made[:, None] == every_flip_and_crop(image, 2)).flatten(2).all(2)
    assert same.shape == (10_000, 50)
    assert (same.sum(1) == 1).all()
    # 200 of each are expected, and 14 more or fewer is the standard deviation.
    assert same.sum(0).min() > 130
    assert same.sum(0).max() < 270


@pytest.mark.parametrize("dtype", [torch.uint8, torch.float32])
@pytest.mark.parametrize("padding", [0, 3])
def test_all_channels_of_an_image_move_alike_and_no_other_image_comes_in(dtype, padding):
    images = torch.randint(1, 255, (40, 3, 7, 5)).to(dtype)
    before = images.clone()
    made = flip_and_crop(images, padding=padding)
    assert made.dtype == dtype
    assert torch.equal(images, before)
    for image, result in zip(images, made, strict=True):
        assert any(torch.equal(result, way) for way in every_flip_and_crop(image, padding))


def test_the_generator_alone_decides_how_images_are_moved(small):
    images = small.train_images[:100]
    one, same, other = (
        flip_and_crop(images, generator=torch.Generator().manual_seed(seed)) for seed in (1, 1, 2)
    )
    assert torch.equal(one, same)
    assert not torch.equal(one, other)


@pytest.mark.parametrize(
    "make", [loader, lambda *a, **k: DeviceBatches(*a, device=torch.device("cpu"), **k)]
)
def test_training_images_are_augmented_as_bytes_and_test_images_never(small, make):
    seen = []

    def invert(images):
        seen.append(images.dtype)
        return 255 - images

    plain, inverted = make(small, batch_size=6000), make(small, batch_size=6000, augment=invert)
    inverse = dataclasses.replace(small, train_images=255 - small.train_images)
    for (_, labels), (images, same_labels), (expected, _) in zip(
        plain, inverted, make(inverse, batch_size=6000), strict=True
    ):
        assert torch.equal(labels, same_labels)
        assert torch.equal(images, expected)
    assert seen == [torch.uint8] * 2
    assert all(map(torch.equal, next(iter(make(small, "test", augment=invert))),
                   next(iter(make(small, "test")))))  # fmt: skip


def test_each_worker_and_each_epoch_moves_images_in_its_own_way_set_by_the_seed(small):
    same = dataclasses.replace(small, train_images=small.train_images[:1].expand(400, -1, -1, -1),
                               train_labels=small.train_labels[:400])  # fmt: skip

    def batches(seed):
        source = loader(same, batch_size=100, workers=2, seed=seed, augment=flip_and_crop)
        return [images for _ in range(2) for images, _ in source]

    one, again, other = batches(0), batches(0), batches(1)
    assert all(map(torch.equal, one, again))
    different = [*one, *other]
    assert not any(torch.equal(a, b) for i, a in enumerate(different) for b in different[:i])


def test_impossible_augmentations_are_refused(small):
    with pytest.raises(ValueError, match="padding=-1"):
        flip_and_crop(small.train_images[:2], padding=-1)
    pair = (data.ImageSet(small, "train"), data.ImageSet(small, "test"))
    with pytest.raises(ValueError, match="augment= is for an ImageData"):
        loader(pair, augment=flip_and_crop)
