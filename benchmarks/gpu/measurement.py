"""A file of measurements: on what machine, when, with which software, and a row a measurement.

The file is written after each row, so that a program that is stopped leaves what it has. Started
again on the same machine, with the same code, it measures only the rows that are missing.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from statistics import median

import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "src"), str(ROOT / "tools")]

from machine_facts import commit, machine_facts, write_json

from torchladder import devices, measuring


class Sheet:
    """``<folder>/<name>.json``; a small one is a rehearsal, whose numbers mean nothing."""

    def __init__(self, name: str, folder: Path, *, small: bool = False) -> None:
        self.file = folder / f"{name}.json"
        self.small = small
        self.content = {"measurement": name, "rehearsal": small}
        self.content |= {"machine": machine_facts() | commit(), "rows": {}}
        earlier = json.loads(self.file.read_text("utf-8")) if self.file.exists() else {}
        if self._origin(earlier) == self._origin(self.content):
            self.content["rows"] = earlier["rows"]
        folder.mkdir(parents=True, exist_ok=True)

    @staticmethod
    def _origin(content: dict) -> tuple:
        facts = content.get("machine", {})
        names = ("machine", "gpus", "torch", "commit", "clean")
        return content.get("rehearsal"), *(facts.get(name) for name in names)

    def __contains__(self, row: str) -> bool:
        return row in self.content["rows"] and "failed" not in self.content["rows"][row]

    def add(self, row: str, **values) -> None:
        """Put `values` into the row of this name, and write the file."""
        old = self.content["rows"].get(row, {})
        old.pop("failed", None)
        self.content["rows"][row] = old | values
        write_json(self.content, self.file)
        print(f"{self.content['measurement']}, {row}: {in_short(values)}", flush=True)

    def take(self, row: str, measure: Callable[[], dict]) -> None:
        """Add what ``measure()`` returns, or why it failed; nothing if the row is there."""
        if row in self:
            return
        try:
            self.add(row, **measure())
        except Exception as error:  # the other rows are worth having
            message = str(error).strip().splitlines()
            self.add(row, failed=f"{type(error).__name__}: {message[0] if message else ''}")
        if torch.cuda.is_available():
            torch.cuda.empty_cache()

    @property
    def failed(self) -> list[str]:
        return [row for row, values in self.content["rows"].items() if "failed" in values]


def in_short(values: dict) -> str:
    """The values of a row in one line, samples as their median."""
    parts = []
    for name, value in values.items():
        if isinstance(value, list) and value and all(isinstance(v, float | int) for v in value):
            value = f"{median(value):.4g} (median of {len(value)})"
        parts.append(f"{name} {value:.4g}" if isinstance(value, float) else f"{name} {value}")
    return ", ".join(parts)


def flops_of(build: Callable[[], nn.Module], shape: tuple, batch: int) -> int:
    """Of a training step with `batch` samples of this shape, counted without computing."""
    with torch.device("meta"), FlopCounterMode(display=False) as counter:
        build()(torch.empty(batch, *shape)).sum().backward()
    return counter.get_total_flops()


def matrix_product_rate(device: torch.device, kind: str, n: int) -> list[float]:
    """FLOPs a second of an n x n matrix product in "float32", "tf32" or "bfloat16", five times."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high" if kind == "tf32" else "highest")
    try:
        dtype = torch.bfloat16 if kind == "bfloat16" else torch.float32
        a, b = (torch.randn(n, n, device=device, dtype=dtype) for _ in range(2))
        times = 10 if device.type == "cuda" else 1  # long enough to hide the time to ask

        def products():
            for _ in range(times):
                a @ b

        return measuring.measure(products, device=device).rates(times * 2 * n**3)
    finally:
        torch.set_float32_matmul_precision(before)


def main(name: str, measure: Callable[[Sheet, torch.device], None]) -> int:
    """The command line of each measurement; 1 if a row failed."""
    parser = argparse.ArgumentParser(description=f"Measure: {name}.")
    parser.add_argument("--folder", type=Path, default=ROOT / "runs" / "measured")
    parser.add_argument("--small", action="store_true", help="rehearse with sizes for a CPU")
    options = parser.parse_args()
    device = devices.try_gpu()
    if device.type == "cpu" and not options.small:
        parser.error("there is no GPU here that PyTorch can use; --small rehearses on the CPU")
    sheet = Sheet(name, options.folder, small=options.small)
    # What was compiled before would make compiling look free: begin with an empty cache.
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as cache:
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = cache
        measure(sheet, device)
    if sheet.failed:
        print(f"failed: {', '.join(sheet.failed)}")
    return 1 if sheet.failed else 0
