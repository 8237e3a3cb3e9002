"""Image data: a real set that comes with the package, the full sets, and batches of any data.

Two names: ``fashion_mnist_small`` (12,000 + 2,000 images, bundled) and ``fashion_mnist`` (60,000 +
10,000). Both are held in memory as ``uint8`` and become normalised ``float32`` batch by batch.
"""

import gzip
import os
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, DistributedSampler, IterableDataset

#: The data set that comes with the package, as a file; `load_dataset` reads it without network.
BUNDLED = Path(__file__).parent / "bundled" / "fashion_mnist_small.npz"
_DEBIAN = Path("/usr/share/datasets/fashion-mnist")
_KAGGLE = Path("/kaggle/input")

_FASHION_CLASSES = (
    "T-shirt/top", "Trouser", "Pullover", "Dress", "Coat",
    "Sandal", "Shirt", "Sneaker", "Bag", "Ankle boot",
)  # fmt: skip
_FASHION_FILES = {
    "train_images": "train-images-idx3-ubyte",
    "train_labels": "train-labels-idx1-ubyte",
    "test_images": "t10k-images-idx3-ubyte",
    "test_labels": "t10k-labels-idx1-ubyte",
}


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
    def shape(self) -> tuple[int, ...]:
        """Channels, height and width of one image."""
        return tuple(self.train_images.shape[1:])

    def split(self, name: str) -> tuple[Tensor, Tensor]:
        """Images and labels of ``"train"`` or ``"test"``."""
        return getattr(self, f"{name}_images"), getattr(self, f"{name}_labels")

    def normalise(self, images: Tensor) -> Tensor:
        """``uint8`` pixels as ``float32`` with mean 0 and standard deviation 1 per channel."""
        mean, std = (
            torch.tensor(v, device=images.device).view(-1, 1, 1) for v in (self.mean, self.std)
        )
        return images.float().div_(255).sub_(mean).div_(std)


# --- loading ------------------------------------------------------------------------------------


def load_dataset(
    name: str = "fashion_mnist_small",
    folder: str | os.PathLike | None = None,
    *,
    download: bool = False,
) -> ImageData:
    """The data set called `name`: all of it, and the right one, or an error.

    Parameters
    ----------
    name : {'fashion_mnist_small', 'fashion_mnist'}
    folder : path, optional
        Where to look, up to four folders deep. Without it: ``$TORCHLADDER_DATA``, what was
        downloaded before, Debian's ``dataset-fashion-mnist`` and Kaggle's ``/kaggle/input``.
    download : bool
        Fetch the set with torchvision if it was not found: into `folder`, else
        ``$TORCHLADDER_DATA``, else ``~/.cache/torchladder``.

    Raises
    ------
    ValueError
        If `name` is unknown, or a file is damaged or holds something else.
    FileNotFoundError
        If the set, or one of its files, is not there.
    """
    if name == "fashion_mnist_small":
        with np.load(BUNDLED) as arrays:  # a zip archive: its checksums are compared
            return _fashion(name, arrays)
    if name != "fashion_mnist":
        raise ValueError(f"No data set {name!r}: there are fashion_mnist_small, fashion_mnist.")
    # Not Path.home(): a container's user may have none.
    folders = [Path(os.path.expanduser("~/.cache/torchladder")), _DEBIAN, _KAGGLE]
    if chosen := os.environ.get("TORCHLADDER_DATA"):
        folders.insert(0, Path(chosen))
    if folder is not None:
        folders = [Path(folder)]
    try:
        return _fashion_mnist(folders)
    except FileNotFoundError:
        if not download:
            raise
        from torchvision import datasets

        datasets.FashionMNIST(folders[0], download=True)
        return _fashion_mnist(folders)


def _find(folder: Path, *names: str) -> list[Path]:
    """Every file called one of `names`, up to four levels below `folder`."""
    patterns = ["*/" * depth + name for depth in range(5) for name in names]
    return [p for pattern in patterns for p in sorted(folder.glob(pattern)) if p.is_file()]


def _fashion_mnist(folders: list[Path]) -> ImageData:
    for folder in folders:
        found = {key: _find(folder, name, f"{name}.gz") for key, name in _FASHION_FILES.items()}
        if all(found.values()):
            break
    else:
        looked, files = ", ".join(map(str, folders)), ", ".join(_FASHION_FILES.values())
        raise FileNotFoundError(
            f"Fashion-MNIST not found: looked in {looked}. Put its files ({files}) in a folder "
            "and name it with folder= or TORCHLADDER_DATA (on Kaggle, attach the data set "
            "zalando-research/fashionmnist), or pass download=True, which needs internet."
        )
    arrays = {}
    for key, paths in found.items():
        # MNIST's files have the same names: one that lies in a folder of the right name wins.
        path = min(paths, key=lambda path: "fashion" not in str(path).lower())
        arrays[key] = array = _read_idx(path)
        count = 60_000 if path.name.startswith("train") else 10_000
        if "labels" in key:
            right = len(array) == count and (np.bincount(array) == count // 10).all()
        else:  # of 255; MNIST's mean is 33, KMNIST's 49
            right = len(array) == count and abs(array.mean() - 73) < 1
        if not right:
            raise ValueError(f"{path} holds something other than Fashion-MNIST's {path.name}.")
    return _fashion("fashion_mnist", arrays)


def _read_idx(path: Path) -> np.ndarray:
    """What is in a file of MNIST's format, which torchvision reads only where it is unpacked."""
    try:
        raw = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
        # 4 bytes, the last of them the number of dimensions; 4 for each dimension; the values.
        shape = np.frombuffer(raw, ">i4", raw[3] or 1, offset=4)  # a single number is none
        return np.frombuffer(raw, np.uint8, offset=4 + 4 * len(shape)).reshape(shape)
    except (EOFError, IndexError, ValueError, gzip.BadGzipFile, zlib.error) as error:
        raise ValueError(f"{path} is damaged ({error}): download it again.") from error


def _fashion(name: str, arrays: Mapping[str, np.ndarray]) -> ImageData:
    tensors = {}
    for key in _FASHION_FILES:
        tensor = torch.tensor(arrays[key])
        tensors[key] = tensor.long() if "labels" in key else tensor.view(-1, 1, 28, 28)
    return ImageData(name, **tensors, classes=_FASHION_CLASSES, mean=(0.2860,), std=(0.3530,))


def balanced_subset(data: ImageData, train: int, test: int) -> ImageData:
    """The first `train` and `test` images of each class, in the order of the full set."""
    parts = {}
    for split, count in [("train", train), ("test", test)]:
        images, labels = data.split(split)
        of_class = [(labels == label).nonzero()[:count, 0] for label in range(len(data.classes))]
        keep = torch.cat(of_class).sort().values
        parts |= {f"{split}_images": images[keep], f"{split}_labels": labels[keep]}
    return replace(data, name=data.name.removesuffix("_small") + "_small", **parts)


# --- batches ------------------------------------------------------------------------------------


class _ImageSet(Dataset):
    """One split of `data` as a map-style dataset of ``(normalised image, label)``."""

    def __init__(self, data: ImageData, split: str, device: torch.device | None = None) -> None:
        self.data = data
        self.images, self.labels = (tensor.to(device) for tensor in data.split(split))

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
        # Not images[indices]: for small images that takes several times as long on a CPU.
        images = self.images.index_select(0, indices)
        return self.data.normalise(images), self.labels.index_select(0, indices)


def dataloader(
    data: ImageData | Sequence[Dataset],
    split: str = "train",
    *,
    batch_size: int = 64,
    seed: int = 0,
    workers: int = 0,
    pin_memory: bool = False,
    rank: int = 0,
    world_size: int = 1,
) -> DataLoader:
    """Batches of one split on the CPU; ``"train"`` is shuffled again each epoch, ``"test"`` never.

    `data` is an `ImageData`, or a pair ``(train_set, test_set)`` of map-style data sets.

    The order depends on `seed` and on the epoch given to ``batches.sampler.set_epoch(epoch)``,
    and on nothing else. Of that one order, rank r of n reads every n-th image from the r-th on.
    For training, each rank gets equally many: up to n - 1 images are read twice. Test images are
    each read once, by one rank.

    What `workers` draw at random depends on `seed`, the rank, and the epoch and batch at which they
    are started: a resumed run draws numbers of its own.

    Raises
    ------
    ValueError
        If the split is empty or cannot be indexed, or a number cannot be.
    """
    dataset = _dataset(data, split)
    sampler = _sampler(split, dataset, seed, rank, world_size)
    return DataLoader(
        dataset,
        batch_size,
        sampler=sampler,
        num_workers=workers,
        # An `_ImageSet` has made the batch, a tuple: nothing to collate.
        collate_fn=tuple if isinstance(dataset, _ImageSet) else None,
        # Each epoch begins with a random number for the workers. From the global generator, it
        # would change what dropout draws afterwards.
        generator=getattr(sampler, "for_workers", torch.Generator().manual_seed(seed + rank)),
        pin_memory=pin_memory,
        persistent_workers=workers > 0,
    )


def _dataset(data: ImageData | Sequence[Dataset], split: str) -> Dataset:
    if isinstance(data, ImageData):
        return _ImageSet(data, split)
    kinds = [type(d) for d in data] if isinstance(data, tuple | list) else [type(data)]
    if len(kinds) != 2 or any(issubclass(kind, IterableDataset) for kind in kinds):
        raise ValueError(
            f"data is {' and '.join(k.__name__ for k in kinds)}: give an ImageData or a pair "
            "(train_set, test_set) with an index. Chapter 10 shows how to shard an IterableDataset."
        )
    return data[("train", "test").index(split)]


class DeviceBatches:
    """The same batches as `dataloader`, from a split that is kept on `device` as ``uint8``.

    Indexing and normalising happen there, so an epoch copies nothing but the order.
    """

    def __init__(
        self,
        data: ImageData,
        split: str = "train",
        *,
        device: torch.device,
        batch_size: int = 64,
        seed: int = 0,
    ) -> None:
        self.dataset = _ImageSet(data, split, device)
        self.batch_size = batch_size
        self.sampler = _sampler(split, self.dataset, seed, rank=0, world_size=1)

    def __len__(self) -> int:
        return -(-len(self.sampler) // self.batch_size)

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        order = torch.from_numpy(np.fromiter(self.sampler, np.int64))
        indices = order.to(self.dataset.images.device).split(self.batch_size)
        return map(self.dataset.batch, indices)


class _ShuffledSampler(DistributedSampler):
    """`DistributedSampler` that can begin an epoch in the middle, as a resumed run must."""

    start = 0

    def __init__(self, dataset: Dataset, world_size: int, rank: int, seed: int) -> None:
        super().__init__(dataset, world_size, rank, shuffle=True, seed=seed)
        self.for_workers = torch.Generator().manual_seed(seed + rank)  # gives them their seeds

    def set_epoch(self, epoch: int, start: int = 0) -> None:
        """Choose the epoch's order, and how many of this rank's images are left out of it."""
        super().set_epoch(epoch)
        self.start = start
        place = epoch * len(self) + start
        self.for_workers.manual_seed(self.seed + self.rank + self.num_replicas * place)

    def __iter__(self) -> Iterator[int]:
        return islice(super().__iter__(), self.start, None)


def _sampler(
    split: str, dataset: Dataset, seed: int, rank: int, world_size: int
) -> _ShuffledSampler | range:
    count = len(dataset)  # pyrefly: ignore[bad-argument-type] - a map-style one has a length
    if count == 0:
        raise ValueError(f"The {split} split is empty: there is nothing to train on or evaluate.")
    if not 0 <= rank < world_size:
        raise ValueError(f"rank={rank}, world_size={world_size}: ranks are 0 to world_size - 1.")
    if split == "train":
        return _ShuffledSampler(dataset, world_size, rank, seed)
    # DistributedSampler would repeat images to give each rank as many, and count them twice.
    return range(rank, count, world_size)
