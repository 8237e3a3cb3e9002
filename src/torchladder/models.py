"""The book's models: three for images, and GPT-2."""

import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint


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


class GPT2Block(nn.Module):
    """Attention, then an MLP; each is added to its input."""

    def __init__(self, hidden: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm_1, self.norm_2 = nn.LayerNorm(hidden), nn.LayerNorm(hidden)
        self.qkv, self.out = nn.Linear(hidden, 3 * hidden), nn.Linear(hidden, hidden)
        up, down = nn.Linear(hidden, 4 * hidden), nn.Linear(4 * hidden, hidden)
        self.mlp = nn.Sequential(up, nn.GELU("tanh"), down)

    def forward(self, x: Tensor) -> Tensor:
        heads = self.qkv(self.norm_1(x)).unflatten(2, (3, self.heads, -1))
        q, k, v = heads.permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        return x + self.mlp(self.norm_2(x))


class GPT2(nn.Module):
    """GPT-2 without dropout; by default the small one, of 124 million parameters."""

    def __init__(
        self,
        layers: int = 12,
        hidden: int = 768,
        heads: int = 12,
        sequence: int = 1024,
        vocabulary: int = 50_257,
    ) -> None:
        super().__init__()
        self.words = nn.Embedding(vocabulary, hidden)
        self.places = nn.Embedding(sequence, hidden)
        self.blocks = nn.ModuleList(GPT2Block(hidden, heads) for _ in range(layers))
        self.norm = nn.LayerNorm(hidden)
        nn.init.normal_(self.words.weight, std=0.02)

    def loss(self, x: Tensor, targets: Tensor) -> Tensor:
        logits = (x @ self.words.weight.T).float()
        return F.cross_entropy(logits, targets, reduction="sum")

    def forward(self, rows: Tensor, again: bool = False, parts: int = 1) -> Tensor:
        """The mean loss when each token of `rows` is predicted from those before it.

        `again` computes the activations of each block twice, `parts` divides the loss.
        """
        tokens, targets = rows[:, :-1], rows[:, 1:].flatten()
        x = self.words(tokens) + self.places.weight[: tokens.shape[1]]
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if again else block(x)
        x = self.norm(x).flatten(0, 1)
        if parts == 1:
            return self.loss(x, targets) / len(targets)
        total = x.new_zeros(())
        for some, theirs in zip(x.chunk(parts), targets.chunk(parts), strict=True):
            total = total + checkpoint(self.loss, some, theirs, use_reentrant=False)
        return total / len(targets)


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
