"""The book's three models, from 7,946 parameters to 0.80 billion."""

import torch.nn.functional as F
from torch import Tensor, nn


class MLP(nn.Module):
    """Two linear layers with a ReLU between them; by default 20 inputs, 256 hidden, 10 outputs."""

    def __init__(self, inputs: int = 20, hidden: int = 256, outputs: int = 10) -> None:
        super().__init__()
        self.hidden = nn.Linear(inputs, hidden)
        self.output = nn.Linear(hidden, outputs)

    def forward(self, x: Tensor) -> Tensor:
        return self.output(F.relu(self.hidden(x.flatten(1))))


class LeNet(nn.Module):
    """LeNet-5 with ReLU and max pooling, for 28x28 or 32x32 images.

    Parameters
    ----------
    shape : (int, int, int)
        Channels, height and width of an image: ``(1, 28, 28)`` or ``(3, 32, 32)``, say.
    classes : int

    Notes
    -----
    LeCun, Bottou, Bengio and Haffner, *Gradient-based learning applied to document recognition*,
    1998, https://doi.org/10.1109/5.726791. The original reads 32x32; 28x28 images are padded
    by 2, as there.
    """

    def __init__(self, shape: tuple[int, int, int] = (1, 28, 28), classes: int = 10) -> None:
        super().__init__()
        channels, *size = shape
        if size not in ([28, 28], [32, 32]):
            raise ValueError(f"Images of shape {tuple(shape)}: expected (channels, 28, 28) or 32.")
        padding = 2 if size == [28, 28] else 0
        self.features = nn.Sequential(
            nn.Conv2d(channels, 6, 5, padding=padding), nn.ReLU(), nn.MaxPool2d(2),
            nn.Conv2d(6, 16, 5), nn.ReLU(), nn.MaxPool2d(2),
        )  # fmt: skip
        self.classifier = nn.Sequential(
            nn.Flatten(), nn.Linear(400, 120), nn.ReLU(), nn.Linear(120, 84), nn.ReLU(),
            nn.Linear(84, classes),
        )  # fmt: skip

    def forward(self, x: Tensor) -> Tensor:
        return self.classifier(self.features(x))


class LinearConvNet(nn.Module):
    """The convolutional net of many multi-GPU tutorials, at any `width`. Not a good network.

    At ``width=1`` it has 0.80 billion parameters for 3x32x32 images (3.2 GB in float32), two
    thirds of them in the one linear layer from 65,536 to 8,000. There is no activation between
    any two layers: but for the three max poolings, the whole is one linear map, and the six
    convolutions and three linear layers could be far fewer. It is kept because it is a fine load
    for a GPU, and a bad one for gradient exchange.

    Parameters
    ----------
    shape : (int, int, int)
        Channels, height and width of an image; height and width at least 8.
    classes : int
    width : float
        Factor on every hidden size; 1/16 runs on a laptop (3.1 million parameters).
    """

    def __init__(
        self, shape: tuple[int, int, int] = (3, 32, 32), classes: int = 10, width: float = 1.0
    ) -> None:
        super().__init__()
        channels, height, _ = shape
        a, b, c, d, e, f, g, h = (
            max(1, round(size * width)) for size in (32, 64, 512, 1024, 2048, 4096, 8000, 64)
        )
        conv = {"kernel_size": 5, "padding": 2}
        self.features = nn.Sequential(
            nn.Conv2d(channels, a, **conv), nn.Conv2d(a, b, **conv), nn.Conv2d(b, c, **conv),
            nn.MaxPool2d(2), nn.Conv2d(c, d, **conv), nn.MaxPool2d(2),
            nn.Conv2d(d, e, **conv), nn.Conv2d(e, f, **conv), nn.MaxPool2d(2),
        )  # fmt: skip
        self.classifier = nn.Sequential(
            nn.Flatten(), nn.Linear(f * (height // 8) ** 2, g), nn.Linear(g, h),
            nn.Linear(h, classes),
        )  # fmt: skip

    def forward(self, x: Tensor) -> Tensor:
        return self.classifier(self.features(x))


def count_parameters(model: nn.Module) -> int:
    """How many numbers `model` learns.

    Examples
    --------
    >>> count_parameters(MLP())
    7946
    >>> import torch
    >>> with torch.device("meta"):  # shapes without numbers: no memory needed
    ...     count_parameters(LinearConvNet())
    800940490
    """
    return sum(p.numel() for p in model.parameters() if p.requires_grad)
