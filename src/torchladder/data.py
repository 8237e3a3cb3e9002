"""Image data: a real set that comes with the package, the full sets, and batches of any data.

Three names: ``fashion_mnist_small`` (12,000 + 2,000 images, bundled), ``fashion_mnist``
(60,000 + 10,000) and ``cifar10`` (50,000 + 10,000). All of them are held in memory as ``uint8``
and become normalised ``float32`` batch by batch.
"""

from __future__ import annotations

import gzip
import hashlib
import os
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, DistributedSampler, IterableDataset

#: The data set that comes with the package, as a file; `load` reads it without network.
BUNDLED = Path(__file__).parent / "bundled" / "fashion_mnist_small.npz"
BUNDLED_SHA256 = "f7141659e8ec735fba11bc5fc813ac5e8f5fc0b8b0d88fe70051db4a270ae726"
DEBIAN = Path("/usr/share/datasets/fashion-mnist")
KAGGLE = Path("/kaggle/input")

#: The names of Fashion-MNIST's ten classes, by label.
FASHION_CLASSES = (
    "T-shirt/top", "Trouser", "Pullover", "Dress", "Coat",
    "Sandal", "Shirt", "Sneaker", "Bag", "Ankle boot",
)  # fmt: skip
#: The names of CIFAR-10's ten classes, by label.
CIFAR10_CLASSES = (
    "airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck",
)  # fmt: skip

# Of the uncompressed files. MNIST and KMNIST use the same file names for other pictures.
FASHION_SHA256 = {
    "train-images-idx3-ubyte": "c59f468a2f672dc815687fe0f83887768d799fd8a3f3276145d20f83aa44d888",
    "train-labels-idx1-ubyte": "bad3541b69d912435c50bb6ba87bec294ff4f6a2e1246121d8633921760443d9",
    "t10k-images-idx3-ubyte": "5b4141f0afbad91edebe8549f8fcffe087ea10ca49f1dbef5c9a5cd8815ce37b",
    "t10k-labels-idx1-ubyte": "0402a96d92fd2663957122ceb108a494c5af83dab82d92729df917d7dec38c34",
}
FASHION_CSV = {"fashion-mnist_train.csv": 60_000, "fashion-mnist_test.csv": 10_000}


@dataclass(frozen=True)
class ImageData:
    """A classification set in memory."""

    name: str
    train_images: Tensor  # uint8, shape (N, C, H, W)
    train_labels: Tensor  # int64, shape (N,)
    test_images: Tensor
    test_labels: Tensor
    classes: tuple[str, ...]  # the name of each label
    mean: tuple[float, ...]  # of each channel over the full training set, pixels from 0 to 1
    std: tuple[float, ...]

    def __repr__(self) -> str:
        shape = "x".join(map(str, self.shape))
        train, test = len(self.train_images), len(self.test_images)
        return (
            f"{self.name}: {train:,} train and {test:,} test images of {shape}, "
            f"{len(self.classes)} classes"
        )

    @property
    def shape(self) -> tuple[int, int, int]:
        """Channels, height and width of one image."""
        return tuple(self.train_images.shape[1:])

    def split(self, name: str) -> tuple[Tensor, Tensor]:
        """Images and labels of ``"train"`` or ``"test"``."""
        if name not in ("train", "test"):
            raise ValueError(f"No split {name!r}: there are 'train' and 'test'.")
        return getattr(self, f"{name}_images"), getattr(self, f"{name}_labels")

    def normalise(self, images: Tensor) -> Tensor:
        """``uint8`` pixels as ``float32`` with mean 0 and standard deviation 1 per channel."""
        return _normalise(images, self.mean, self.std)


def _normalise(images: Tensor, *mean_and_std: tuple[float, ...]) -> Tensor:
    mean, std = (torch.tensor(v, device=images.device).view(-1, 1, 1) for v in mean_and_std)
    return images.float().div_(255).sub_(mean).div_(std)


# --- loading ------------------------------------------------------------------------------------


def load(
    name: str = "fashion_mnist_small",
    folder: str | os.PathLike | None = None,
    *,
    download: bool = False,
) -> ImageData:
    """The data set called `name`, checked: all of it, and the right one, or an error.

    Parameters
    ----------
    name : {'fashion_mnist_small', 'fashion_mnist', 'cifar10'}
    folder : path, optional
        Where to look, up to four folders deep. Without it: ``$TORCHLADDER_DATA``, Debian's
        ``dataset-fashion-mnist``, Kaggle's ``/kaggle/input`` and what was downloaded before.
    download : bool
        Fetch the set with torchvision if it was not found: into `folder`, else
        ``$TORCHLADDER_DATA``, else ``~/.cache/torchladder``.

    Raises
    ------
    ValueError
        If `name` is unknown, or a file is truncated or holds something else.
    FileNotFoundError
        If the set, or one of its files, is not there.
    """
    loaders = {
        "fashion_mnist_small": _fashion_mnist_small,
        "fashion_mnist": _fashion_mnist,
        "cifar10": _cifar10,
    }
    if name not in loaders:
        raise ValueError(f"No data set {name!r}: there are {', '.join(loaders)}.")
    if not (folder is None or download or Path(folder).is_dir()):
        raise FileNotFoundError(f"{folder} is not a folder; nothing was loaded.")
    folders = _folders(folder)
    try:
        return loaders[name](folders)
    except FileNotFoundError:
        if not download:
            raise
    _download("CIFAR10" if name == "cifar10" else "FashionMNIST", folders[0])
    return loaders[name](folders)


def _folders(folder: str | os.PathLike | None) -> list[Path]:
    """Where to look; the first is also where to download to."""
    if folder is not None:
        return [Path(folder)]
    usual = [Path.home() / ".cache" / "torchladder", DEBIAN, KAGGLE]
    chosen = os.environ.get("TORCHLADDER_DATA")
    return [Path(chosen), *usual] if chosen else usual


def _find(folders: list[Path], *names: str) -> list[Path]:
    """Every file called one of `names`, up to four levels below `folders`."""
    patterns = ["*/" * depth + name for depth in range(5) for name in names]
    found = [p for root in folders for pattern in patterns for p in sorted(root.glob(pattern))]
    return [path for path in found if path.is_file()]


def _two_ways(what: str, slug: str) -> str:
    return (
        f"Two ways to get it: put {what} in a folder and name it with folder= or "
        f"TORCHLADDER_DATA (on Kaggle, attach the data set {slug}), "
        "or pass download=True (--download in the terminal), which needs internet."
    )


def _download(name: str, folder: Path) -> None:
    """Let torchvision's class `name` fetch its files into `folder`."""
    from torchvision import datasets

    try:
        getattr(datasets, name)(folder, download=True)
    except (OSError, RuntimeError) as error:
        raise OSError(
            f"{name} could not be downloaded to {folder} ({error}). Without internet, "
            "get the files elsewhere and name their folder with folder= or TORCHLADDER_DATA."
        ) from error


def _checked_file(path: Path, sha256: str, what: str) -> bytes:
    """The bytes of `path`, unpacked if it ends in .gz; ValueError if they are not `what`."""
    try:
        raw = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise ValueError(f"{path} is damaged ({error}); {what} was expected.") from error
    if (found := hashlib.sha256(raw).hexdigest()) != sha256:
        raise ValueError(
            f"{path} is not {what}: {len(raw):,} bytes with SHA-256 {found[:12]}..., "
            f"expected {sha256[:12]}.... It is truncated, changed, or another data set's."
        )
    return raw


def _fashion_mnist_small(folders: list[Path]) -> ImageData:
    if not BUNDLED.exists():  # the package's source was copied without its data
        return balanced_subset(_fashion_mnist(folders), 1200, 200)
    _checked_file(BUNDLED, BUNDLED_SHA256, "the subset this version of torchladder came with")
    with np.load(BUNDLED, allow_pickle=False) as arrays:
        return _fashion("fashion_mnist_small", arrays)


def _fashion(name: str, arrays: Mapping[str, np.ndarray]) -> ImageData:
    tensors = {}
    for key in ("train_images", "train_labels", "test_images", "test_labels"):
        tensor = torch.tensor(arrays[key])
        tensors[key] = tensor.long() if "labels" in key else tensor.view(-1, 1, 28, 28)
    return ImageData(name, **tensors, classes=FASHION_CLASSES, mean=(0.2860,), std=(0.3530,))


def balanced_subset(data: ImageData, train: int, test: int) -> ImageData:
    """The first `train` and `test` images of each class, in the order of the full set."""
    parts = {}
    for split, count in [("train", train), ("test", test)]:
        images, labels = data.split(split)
        of_class = [(labels == label).nonzero()[:count, 0] for label in range(len(data.classes))]
        keep = torch.cat(of_class).sort().values
        parts |= {f"{split}_images": images[keep], f"{split}_labels": labels[keep]}
    return replace(data, name=data.name.removesuffix("_small") + "_small", **parts)


def _fashion_mnist(folders: list[Path]) -> ImageData:
    idx = {name: _find(folders, name, f"{name}.gz") for name in FASHION_SHA256}
    if all(idx.values()):
        return _fashion_from_idx(idx)
    csv = {name: _find(folders, name) for name in FASHION_CSV}
    if all(csv.values()):
        return _fashion_from_csv(csv)
    two_ways = _two_ways("the four idx files or the two CSV files", "zalando-research/fashionmnist")
    for files in (idx, csv):
        if any(files.values()):
            missing = ", ".join(name for name, paths in files.items() if not paths)
            there = next(paths[0].parent for paths in files.values() if paths)
            raise FileNotFoundError(f"Fashion-MNIST in {there} lacks {missing}. {two_ways}")
    looked = ", ".join(map(str, folders))
    raise FileNotFoundError(f"Fashion-MNIST not found: looked in {looked}. {two_ways}")


def _fashion_from_idx(files: dict[str, list[Path]]) -> ImageData:
    arrays = {}
    for name, paths in files.items():
        # MNIST's files have the same names: take the first file whose contents are right.
        for path in paths:
            try:
                raw = _checked_file(path, FASHION_SHA256[name], f"Fashion-MNIST's {name}")
                break
            except ValueError:
                if path == paths[-1]:
                    raise
        split, kind = name.replace("t10k", "test").split("-")[:2]
        # Before the values: 4 bytes, and 4 for each dimension (http://yann.lecun.com/exdb/mnist/).
        header = 16 if kind == "images" else 8
        arrays[f"{split}_{kind}"] = np.frombuffer(raw, np.uint8, offset=header)
    return _fashion("fashion_mnist", arrays)


def _fashion_from_csv(files: dict[str, list[Path]]) -> ImageData:
    """Kaggle's form: a header, then a row an image: label, pixel1, ..., pixel784."""
    arrays = {}
    for (name, (path, *_)), split in zip(files.items(), ["train", "test"], strict=True):
        count = FASHION_CSV[name]
        wanted = f"expected {count:,} rows of a label and 784 pixels, every label equally often"
        try:
            table = np.loadtxt(path, dtype=np.uint8, delimiter=",", skiprows=1, ndmin=2)
        except ValueError as error:
            raise ValueError(f"{path} is damaged ({error}); {wanted}.") from error
        balanced = (np.bincount(table[:, 0], minlength=10) == count // 10).all()
        if table.shape != (count, 785) or not balanced:
            raise ValueError(f"{path} holds {len(table):,} rows; {wanted}. Download it again.")
        arrays |= {f"{split}_labels": table[:, 0], f"{split}_images": table[:, 1:]}
    return _fashion("fashion_mnist", arrays)


def _cifar10(folders: list[Path]) -> ImageData:
    from torchvision.datasets import CIFAR10
    from torchvision.datasets.utils import check_integrity

    found = _find(folders, f"{CIFAR10.base_folder}/*")
    if not found:
        looked = ", ".join(map(str, folders))
        ways = _two_ways(f"its folder {CIFAR10.base_folder}", "pankrzysiu/cifar10-python")
        raise FileNotFoundError(f"CIFAR-10 not found: looked in {looked}. {ways}")
    folder = found[0].parent
    meta = [CIFAR10.meta["filename"], CIFAR10.meta["md5"]]
    for name, md5 in [*CIFAR10.train_list, *CIFAR10.test_list, meta]:
        path = folder / name
        if not path.exists():
            raise FileNotFoundError(f"CIFAR-10 in {folder} lacks {name}; download it again.")
        # These files are pickles: nothing is read from one before its checksum is right.
        if not check_integrity(path, md5):
            raise ValueError(
                f"{path} is not CIFAR-10's {name}: {path.stat().st_size:,} bytes, MD5 differs from "
                f"{md5}. It is truncated or changed; delete it and download it again."
            )
    parts = {}
    for split in ("train", "test"):
        part = CIFAR10(folder.parent, train=split == "train")
        parts[f"{split}_images"] = torch.from_numpy(part.data).permute(0, 3, 1, 2).contiguous()
        parts[f"{split}_labels"] = torch.tensor(part.targets)
    mean, std = (0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)
    return ImageData("cifar10", **parts, classes=CIFAR10_CLASSES, mean=mean, std=std)


# --- batches ------------------------------------------------------------------------------------


class ImageSet(Dataset):
    """One split of `data` as a map-style dataset of ``(normalised image, label)``.

    `augment` is given the ``uint8`` images of each batch of ``"train"``.
    """

    def __init__(
        self,
        data: ImageData,
        split: str,
        augment: Callable[[Tensor], Tensor] | None = None,
        device: torch.device | None = None,
    ) -> None:
        self.data = data
        self.images, self.labels = (tensor.to(device) for tensor in data.split(split))
        self.augment = augment if split == "train" else None

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        chosen = torch.tensor([range(len(self))[index]], device=self.images.device)
        images, labels = self.batch(chosen)
        return images[0], labels[0]

    # DataLoader calls this, if it is there, once a batch instead of __getitem__ once an image:
    # no stacking of single images (https://pytorch.org/docs/stable/data.html).
    def __getitems__(self, indices: list[int]) -> tuple[Tensor, Tensor]:
        return self.batch(torch.from_numpy(np.array(indices)))

    def batch(self, indices: Tensor) -> tuple[Tensor, Tensor]:
        """The images and labels of these indices, which are on the same device."""
        images, labels = self.pixels(indices)
        return self.data.normalise(images), labels

    def pixels(self, indices: Tensor) -> tuple[Tensor, Tensor]:
        """The same as `batch`, with images that are not normalised yet."""
        # Not images[indices]: for small images that takes several times as long on a CPU.
        images = self.images.index_select(0, indices)
        if self.augment is not None:
            images = self.augment(images)
        return images, self.labels.index_select(0, indices)


class _InWorkers(ImageSet):
    """An `ImageSet` whose batches go from a worker to the main process as bytes in a pipe.

    Tensors would go through shared memory, with a file descriptor and a connection for each:
    six times as long for small images.
    """

    def __getitems__(self, indices: list[int]) -> _Packed:
        arrays = [tensor.numpy() for tensor in self.pixels(torch.tensor(indices))]
        return _Packed((*arrays, self.data.mean, self.data.std))


class _Packed(tuple):
    """Becomes a batch when the main process unpickles it; images are normalised there."""

    def __reduce__(self) -> tuple:
        return _unpacked, tuple(self)


def _unpacked(images: np.ndarray, labels: np.ndarray, *mean_and_std) -> tuple[Tensor, Tensor]:
    return _normalise(torch.from_numpy(images), *mean_and_std), torch.from_numpy(labels)


def _as_it_is(batch: tuple) -> tuple:
    return batch


def flip_and_crop(
    images: Tensor, *, padding: int = 2, generator: torch.Generator | None = None
) -> Tensor:
    """A batch of new images, each mirrored left-right or not, and shifted, both at random.

    Every shift by up to `padding` pixels is as likely as any other, and zeros come in at the
    edges: torchvision's ``RandomCrop(size, padding)`` and ``RandomHorizontalFlip()``, for all
    images at once and on their device.

    Parameters
    ----------
    images : Tensor
        Of shape ``(N, C, H, W)`` and any dtype.
    generator : torch.Generator, optional
        Of the images' device; default the global one. Workers of a data loader would each use
        a copy of it and draw the same: leave it out there.

    Raises
    ------
    ValueError
        If `padding` is negative.
    """
    if padding < 0:
        raise ValueError(f"padding={padding}: shift by so many pixels at most, 0 or more.")
    count, _, height, width = images.shape
    # Which of two, and where the window into the padded image begins.
    mirrored, top, left = (
        torch.randint(ways, (count,), generator=generator, device=images.device)
        for ways in (2, 2 * padding + 1, 2 * padding + 1)
    )
    both = F.pad(torch.stack([images, images.flip(3)]), [padding] * 4)
    windows = both.unfold(3, height, 1).unfold(4, width, 1)  # views: nothing is copied yet
    return windows[mirrored, torch.arange(count, device=images.device), :, top, left]


def dataset_of(
    data: ImageData | Sequence[Dataset],
    split: str,
    augment: Callable[[Tensor], Tensor] | None = None,
) -> Dataset:
    """The data set of ``"train"`` or ``"test"``: of an `ImageData`, or of a pair of data sets.

    Raises
    ------
    ValueError
        If `data` is neither, the data set cannot be indexed, or a pair comes with an `augment`.
    """
    if isinstance(data, ImageData):
        return ImageSet(data, split, augment)
    if not (isinstance(data, tuple | list) and len(data) == 2):
        raise ValueError(
            f"data is a {type(data).__name__}: give an ImageData or a pair (train_set, test_set)."
        )
    if augment is not None:
        raise ValueError("augment= is for an ImageData: let a data set of your own augment itself.")
    pair = dict(zip(("train", "test"), data, strict=True))
    if split not in pair:
        raise ValueError(f"No split {split!r}: there are 'train' and 'test'.")
    if isinstance(pair[split], IterableDataset):
        raise ValueError(
            f"The {split} set is an IterableDataset, which cannot be dealt out to batches and "
            "ranks by index. Chapter 10 shows how to shard one in a loop of your own."
        )
    return pair[split]


def describe(data: ImageData | Sequence[Dataset]) -> str:
    """One line that tells these data from others, the same in every process."""
    if isinstance(data, ImageData):
        return str(data)
    return " and ".join(f"{type(dataset).__name__} of {len(dataset):,}" for dataset in data)


def loader(
    data: ImageData | Sequence[Dataset],
    split: str = "train",
    *,
    batch_size: int = 64,
    seed: int = 0,
    workers: int = 0,
    pin_memory: bool = False,
    rank: int = 0,
    world_size: int = 1,
    augment: Callable[[Tensor], Tensor] | None = None,
) -> DataLoader:
    """Batches of one split on the CPU; ``"train"`` is shuffled again each epoch, ``"test"`` never.

    `data` is an `ImageData`, or a pair ``(train_set, test_set)`` of map-style data sets.

    The order depends on `seed` and on the epoch given to ``loader.sampler.set_epoch(epoch)``,
    and on nothing else. Of that one order, rank r of n reads every n-th image from the r-th on.
    For training, each rank gets equally many: up to n - 1 images are read twice. Test images are
    each read once, by one rank.

    `augment`, such as `flip_and_crop`, is called with each ``uint8`` batch of ``"train"`` before
    it is normalised. It draws from the global generator; that of each worker follows `seed`, and
    goes on from epoch to epoch.

    Raises
    ------
    ValueError
        If `batch_size` is below 1, `workers` is negative, the split is empty or cannot be
        indexed, or there is an `augment` for a pair of data sets.
    """
    if workers < 0:
        raise ValueError(f"workers={workers}: give 0 (load in this process) or more.")
    dataset = dataset_of(data, split, augment)
    if workers and isinstance(data, ImageData):
        dataset = _InWorkers(data, split, augment)
    sampler = _sampler(split, dataset, batch_size, seed, rank, world_size)
    return DataLoader(
        dataset,
        batch_size,
        sampler=sampler,
        num_workers=workers,
        # An `ImageSet` has made the batch: nothing to collate.
        collate_fn=_as_it_is if isinstance(dataset, ImageSet) else None,
        # Each epoch begins with a random number for the workers. From the global generator, it
        # would change what dropout draws afterwards.
        generator=torch.Generator().manual_seed(seed + rank),
        pin_memory=pin_memory,
        persistent_workers=workers > 0,
    )


class DeviceBatches:
    """The same batches as `loader`, from a split that is kept on `device` as ``uint8``.

    Indexing, augmenting and normalising happen there, so an epoch copies nothing but the order.
    """

    def __init__(
        self,
        data: ImageData,
        split: str = "train",
        *,
        device: torch.device,
        batch_size: int = 64,
        seed: int = 0,
        rank: int = 0,
        world_size: int = 1,
        augment: Callable[[Tensor], Tensor] | None = None,
    ) -> None:
        self.dataset = ImageSet(data, split, augment, device)
        self.batch_size = batch_size
        self.sampler = _sampler(split, self.dataset, batch_size, seed, rank, world_size)

    def __len__(self) -> int:
        return -(-len(self.sampler) // self.batch_size)

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        order = torch.from_numpy(np.fromiter(self.sampler, np.int64))
        indices = order.to(self.dataset.images.device).split(self.batch_size)
        return map(self.dataset.batch, indices)


class ShuffledSampler(DistributedSampler):
    """`DistributedSampler` that can begin an epoch in the middle, as a resumed run must."""

    start = 0

    def set_epoch(self, epoch: int, start: int = 0) -> None:
        """Choose the epoch's order, and how many of this rank's images are left out of it."""
        super().set_epoch(epoch)
        self.start = start

    def __iter__(self) -> Iterator[int]:
        return islice(super().__iter__(), self.start, None)


def _sampler(
    split: str, samples: Dataset, batch_size: int, seed: int, rank: int, world_size: int
) -> ShuffledSampler | range:
    if batch_size < 1:
        raise ValueError(f"batch_size={batch_size}: a batch holds at least one image.")
    if len(samples) == 0:
        raise ValueError(f"The {split} split is empty: there is nothing to train on or evaluate.")
    if split == "train":
        return ShuffledSampler(samples, world_size, rank, shuffle=True, seed=seed)
    # DistributedSampler would repeat images to give each rank as many, and count them twice.
    return range(rank, len(samples), world_size)
