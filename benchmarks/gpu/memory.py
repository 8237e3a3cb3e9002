"""The peak of a training step against the book's calculator: chapter 16 on a GPU.

    python benchmarks/gpu/memory.py            # needs a GPU
    python benchmarks/gpu/memory.py --small    # a rehearsal on the CPU

The calculator, `torchladder.estimating`, gives two bounds from the number of parameters, the
optimizer and the bytes that a step saves for its backward pass; the GPU's allocator tells the peak.
"""

from __future__ import annotations

import sys
from functools import partial

import torch
import torch.nn.functional as F
from measurement import Sheet, main
from torch import nn
from torch.autograd.graph import saved_tensors_hooks

from torchladder import estimating, measuring, models

OPTIMIZERS = {
    "sgd": partial(torch.optim.SGD, lr=0.01),
    "momentum": partial(torch.optim.SGD, lr=0.01, momentum=0.9),
    "adam": partial(torch.optim.AdamW, lr=1e-4),
}


class Attention(nn.Module):
    """A block of a GPT: attention and an MLP, each added to its input."""

    def __init__(self, hidden: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm_1, self.norm_2 = nn.LayerNorm(hidden), nn.LayerNorm(hidden)
        self.qkv, self.out = nn.Linear(hidden, 3 * hidden), nn.Linear(hidden, hidden)
        up, down = nn.Linear(hidden, 4 * hidden), nn.Linear(4 * hidden, hidden)
        self.mlp = nn.Sequential(up, nn.GELU(), down)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows, length, hidden = x.shape
        qkv = self.qkv(self.norm_1(x)).view(rows, length, 3, self.heads, -1)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(rows, length, hidden))
        return x + self.mlp(self.norm_2(x))


class GPT(nn.Module):
    """As `estimating.transformer` counts it: an MLP four times as wide, tied embeddings."""

    def __init__(self, *, layers: int, hidden: int, heads: int, sequence: int, vocabulary: int):
        super().__init__()
        self.words = nn.Embedding(vocabulary, hidden)
        self.places = nn.Embedding(sequence, hidden)
        self.blocks = nn.Sequential(*(Attention(hidden, heads) for _ in range(layers)))
        self.norm = nn.LayerNorm(hidden)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.blocks(self.words(tokens) + self.places.weight)
        return self.norm(x) @ self.words.weight.T


def storages(tensors) -> dict[int, int]:
    """Bytes of each storage, by its address."""
    found = (tensor.untyped_storage() for tensor in tensors)
    return {storage._cdata: storage.nbytes() for storage in found}


def saved_bytes(net: nn.Module, forward) -> int:
    """Bytes that ``forward()`` saves for the backward pass, besides the parameters."""
    saved = {}

    def keep(tensor):
        saved.update(storages([tensor]))
        return tensor

    with saved_tensors_hooks(keep, lambda tensor: tensor):
        forward()
    own = storages(net.parameters())
    return sum(size for address, size in saved.items() if address not in own)


def peak(net, inputs, optimizer: str, device, *, amp: bool = False, formula=None) -> dict:
    """The two bounds and the peak; `formula` are bytes a sample that stand for what is saved."""
    net, inputs = net.to(device), inputs.to(device)
    sgd = OPTIMIZERS[optimizer](net.parameters())

    def loss():
        with torch.autocast(device.type, torch.bfloat16, enabled=amp):
            return net(inputs).float().square().mean()

    saved = saved_bytes(net, loss)
    before = measuring.peak_memory(device)
    for _ in range(2):  # the first step makes the optimizer's state
        measuring.reset_peak_memory(device)
        loss().backward()
        sgd.step()
        sgd.zero_grad()
    parameters = models.count_parameters(net)
    precision = "amp" if amp else "fp32"
    options = {"optimizer": optimizer, "precision": precision}
    if amp:  # what the hooks see includes the cast weights
        saved -= 2 * parameters
    guess = estimating.memory_per_gpu(parameters, activation_bytes=saved, **options)
    facts = {"parameters": parameters, "saved_bytes": saved}
    if formula is not None:
        facts["saved_by_formula"] = formula * len(inputs)
    facts |= {"at_least": guess.at_least, "total": guess.total}
    found = measuring.peak_memory(device)
    # On the CPU there is only the peak of the whole process, which says nothing of this step.
    return facts | {"peak_bytes": found, "peak_before": before}


def measure(sheet: Sheet, device: torch.device) -> None:
    if sheet.small:
        gpt = {"layers": 2, "hidden": 32, "heads": 2, "sequence": 16, "vocabulary": 64}
        batch, part, rows = 4, 64, 2
    else:
        gpt = {"layers": 12, "hidden": 768, "heads": 12, "sequence": 1024, "vocabulary": 50257}
        batch, part, rows = 64, 4, 4
    for optimizer in OPTIMIZERS:

        def conv(optimizer=optimizer):
            net = models.LinearConvNet(width=1 / part)
            return peak(net, torch.randn(batch, 3, 32, 32), optimizer, device)

        sheet.take(f"the posts' network, 1/{part}, {optimizer}", conv)
    for amp in (False, True):

        def transformer(amp=amp):
            tokens = torch.randint(gpt["vocabulary"], (rows, gpt["sequence"]))
            told = estimating.transformer(**gpt, precision="amp" if amp else "fp32")
            options = {"amp": amp, "formula": told.activation_bytes}
            return peak(GPT(**gpt), tokens, "adam", device, **options)

        kind = "autocast in bf16" if amp else "float32"
        sheet.take(
            f"a GPT of {gpt['layers']} layers, {gpt['hidden']} wide, adam, {kind}", transformer
        )


if __name__ == "__main__":
    sys.exit(main("memory", measure))
