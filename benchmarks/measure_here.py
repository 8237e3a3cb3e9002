"""Measure this machine's GPUs as rows of measured_by_others.csv; some minutes.

    python -m benchmarks.measure_here --peak 65 --link pcie3 > rows.csv

A step of GPT-2 in two sizes, with Adam and autocast: its time, and the most memory that it needs.
With two GPUs or more, all-reduces and DDP, too. Nothing else may run on the GPUs. It also prints
what the calculators say of the same. Without a GPU it measures tiny sizes on two processes, and its
rows say that they are no GPU's.
"""

import argparse
import csv
import datetime
import io
import subprocess
import sys
from collections.abc import Iterator
from functools import partial

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from benchmarks import measured_by_others as table
from torchclinic.machine import cpu_name
from torchladder.launching import launch
from torchladder.measuring import measure, measure_across_ranks, peak_memory, reset_peak_memory
from torchladder.training import get_device, parallelize

CUDA = torch.cuda.is_available()
ALONE = "gpu" if CUDA else "cpu"
BATCHES = {"GPT-2 small": 4, "GPT-2 medium": 2} if CUDA else {"tiny": 2, "tiny, batch 4": 4}
LAYERS = {"GPT-2 small": (12, 768, 12, 1024, 50257), "GPT-2 medium": (24, 1024, 16, 1024, 50257)}
BYTES = [2**20, 25 * 2**20, 256 * 2**20] if CUDA else [2**10, 2**20]


class GPT(nn.Module):
    """GPT-2 of PyTorch's own layers: with dropout, and one table of embeddings."""

    def __init__(self, layers: int, hidden: int, heads: int, sequence: int, vocabulary: int):
        super().__init__()
        self.words, self.places = nn.Embedding(vocabulary, hidden), nn.Embedding(sequence, hidden)
        options = {"activation": "gelu", "batch_first": True, "norm_first": True}
        block = nn.TransformerEncoderLayer(hidden, heads, 4 * hidden, **options)
        last = nn.LayerNorm(hidden)
        self.blocks = nn.TransformerEncoder(block, layers, last, enable_nested_tensor=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(tokens.shape[1], tokens.device)
        x = self.blocks(self.words(tokens) + self.places.weight, mask, is_causal=True)
        return F.linear(x, self.words.weight)


def prepare(name: str, rung: str):
    """One step on the same tokens each time, and what a row says of it."""
    device, batch = get_device(rung), BATCHES[name]
    sizes = dict(zip(table.SIZES, LAYERS.get(name, (2, 32, 2, 16, 100)), strict=True))
    model = parallelize(GPT(**sizes).to(device), rung)
    optimizer = torch.optim.AdamW(model.parameters())
    tokens = torch.randint(sizes["vocabulary"], (batch, sizes["sequence"]), device=device)
    # A T4 emulates bf16, slowly. Of float16, time and memory need no scaler.
    bf16 = not CUDA or torch.cuda.is_bf16_supported(including_emulation=False)

    def step() -> None:
        with torch.autocast(device.type, torch.bfloat16 if bf16 else torch.float16):
            loss = F.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

    parameters = sum(parameter.numel() for parameter in model.parameters())
    row = {"model": name, "parameters": parameters, "rung": rung, "nodes": 1, "batch": batch}
    row |= {"precision": "bf16-mixed" if bf16 else "fp16-mixed", "optimizer": "adam"} | sizes
    row |= {"attention": "fused", "checkpointing": "none", "compile": "no", "accumulation": 1}
    return device, step, row


def throughput(row: dict, gpus: int, seconds: float) -> dict:
    rate = gpus * row["batch"] * row["sequence"] / seconds
    read = {"measured": "throughput", "value": f"{rate:.6g}", "unit": "tokens/s"}
    return row | {"kind": "speed", "gpus": gpus} | read


def one_gpu(name: str) -> Iterator[dict]:
    reset_peak_memory(get_device(ALONE))
    device, step, row = prepare(name, ALONE)
    yield throughput(row, 1, measure(step, device=device).median)
    if CUDA:
        gpu = f"--id=GPU-{torch.cuda.get_device_properties(device).uuid}"
        query = ["nvidia-smi", gpu, "--query-gpu=memory.used", "--format=csv,noheader,nounits"]
        read = {"allocated": peak_memory(device), "reserved": torch.cuda.max_memory_reserved()}
        read["nvidia-smi"] = 2**20 * int(subprocess.check_output(query, text=True))
        for measured, value in read.items():
            value = {"measured": measured, "value": round(value / 2**20), "unit": "MiB"}
            yield row | {"kind": "memory", "gpus": 1} | value


def all_ranks(name: str) -> list[dict]:
    """The same on every rank: all-reduces, and a step of DDP."""
    device, step, row = prepare(name, "ddp")
    sent = {n: partial(dist.all_reduce, torch.zeros(n // 4, device=device)) for n in BYTES}
    times = measure_across_ranks(sent | {"step": step}, device=device)
    gpus, seconds = dist.get_world_size(), times.pop("step").median
    found = [throughput(row, gpus, seconds) | {"base": "here-1"}]
    for size, time in times.items():
        read = {"measured": "time (torch)", "value": f"{1e6 * time.median:.6g}", "unit": "us"}
        found.append({"kind": "all-reduce", "gpus": gpus, "nodes": 1, "bytes": size} | read)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--peak", default="", help="TFLOP/s in 16 bits, dense, of the data sheet")
    parser.add_argument("--link", default="", choices=["", *table.LINKS], help="between the GPUs")
    options = parser.parse_args()
    found = []
    for name in BATCHES:
        found += one_gpu(name)
        torch.cuda.empty_cache()
    if (ranks := torch.cuda.device_count() if CUDA else 2) > 1:
        found += launch(all_ranks, next(iter(BATCHES)), world_size=ranks)[0]
    same = {"gpu": torch.cuda.get_device_name() if CUDA else cpu_name(), "peak": options.peak}
    same["source"] = f"measured {datetime.date.today()} with torch {torch.__version__}"
    text = io.StringIO()
    fields = table.CSV.read_text(encoding="utf-8").partition("\n")[0].split(",")
    writer = csv.DictWriter(text, fields, lineterminator="\n")
    writer.writeheader()
    for place, row in enumerate(found, 1):
        row |= same | {"id": f"here-{place}", "link": options.link * (row["gpus"] > 1)}
        why = "link not stated" if row["gpus"] > 1 and not options.link else ""
        writer.writerow(row | {"left_out": why if CUDA else "no GPU"})
    print(text.getvalue(), end="")
    rows = table.read(text.getvalue().splitlines())
    for kind, row, *both in table.pairs(rows):
        said, got = table.amounts(kind, both)
        print(f"{row['id']}, {kind}: calculated {said}, measured {got}", file=sys.stderr)
    if not CUDA:
        print("No GPU here: these rows say nothing about one.", file=sys.stderr)


if __name__ == "__main__":
    main()
