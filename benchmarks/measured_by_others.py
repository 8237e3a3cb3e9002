"""What others have measured on GPUs, and what the calculators say of the same runs.

``measured_by_others.csv`` has a row for each measurement, with its source. Nothing in it is
guessed: what a source does not say is empty. Rows of stas00/ml-engineering are from its text, by
Stas Bekman and others, CC BY-SA 4.0; of the other sources, numbers and names alone are taken.

- `measured`: for memory what was read, ``allocated``, ``active``, ``reserved``, or
  ``nvidia-smi``, and after a colon which part of it. `link`: a preset of book/will_it_fit.md.
- `vocabulary`: of the loss; 0 for a model without logits. `samples`: all that a time was for.
- `base`: the row of fewer GPUs that a speed-up is against. `mfu`: percent, as the source says.
- `aside`: a sixth of each kind, those whose id has the lowest SHA-256. They were chosen before a
  formula was changed. The fits of links to speed-ups leave them out; the links of A100 and H100
  were chosen by whole tables of all-reduces, with six of them.
- `left_out`: why the calculators cannot answer, or which better source the row contradicts.

Run it, and it prints the errors by kind.
"""

from __future__ import annotations

import csv
import re
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from statistics import geometric_mean, median

from torchclinic import will_it_fit
from torchclinic.will_it_fit import all_reduce_seconds, memory_per_gpu, speed_up, transformer

PAGE = Path(__file__).parents[1] / "book" / "will_it_fit.md"
UNITS = {"GiB": 2**30, "MiB": 2**20, "GB": 1e9, "MB": 1e6, "us": 1e-6, "ms": 1e-3, "s": 1}
CONTEXT, RESERVED = map(geometric_mean, (will_it_fit.CONTEXT, will_it_fit.RESERVED))
SIZES = ("layers", "hidden", "heads", "sequence", "vocabulary")
LINKS = {"pcie3": "PCIe", "pcie4": "PCIe", "roce": "machines", "eth100": "machines"}
LINKS |= dict.fromkeys(("a100", "h100", "v100", "bridge"), "NVLink")


def read() -> dict[str, dict]:
    """The rows by their ids; numbers are numbers, and what is missing is ``""``."""
    with Path(__file__).with_suffix(".csv").open(newline="") as file:
        rows = [{key: number(text) for key, text in row.items()} for row in csv.DictReader(file)]
    return {row["id"]: row for row in rows}


def number(text: str) -> float | str:
    try:
        return float(text)
    except ValueError:
        return text


def preset(link: str) -> tuple[float, float]:
    """Seconds a message and bytes a second, as the page's calculator has them."""
    numbers = rf'value: {link},.*latency: "(.*?)", (?:far_)?bandwidth: "(.*?)"'
    found = re.search(numbers, PAGE.read_text())
    return float(found[1]) * 1e-6, float(found[2]) * 1e9


def reached(row: dict) -> float:
    """The share of the peak that the page has for a kind of model and a family of cards."""
    family = row["gpu"].split()[0]
    found = re.search(rf'text: {family} .*reached: "(.*?)", conv: "(.*?)"', PAGE.read_text())
    return float(found[1 if row["layers"] else 2]) / 100


def sizes_of(row: dict, **options) -> will_it_fit.Transformer:
    precision = row["precision"]
    if row["rung"] == "fsdp" and precision.endswith("mixed"):
        precision = "bf16"
    sizes = {key: int(row[key]) for key in SIZES}
    if row["mlp"]:  # only the rows of Llama have it
        sizes |= {"kv_heads": int(row["kv_heads"]), "mlp": int(row["mlp"]), "block": "llama"}
        sizes["tied"] = transformer(**sizes).parameters == row["parameters"]
    fused = row["attention"] == "fused"
    return transformer(**sizes, precision=precision, fused_attention=fused, **options)


def memory(row: dict) -> float:
    """Bytes on one GPU, as the row has read them."""
    read, _, part = row["measured"].partition(": ")
    options = {"optimizer": row["optimizer"].partition("-")[0]} if row["optimizer"] else {}
    if row["layers"]:
        kept = {"all": [True], "none": [False], "half": [True, False]}[row["checkpointing"]]
        found = [sizes_of(row, checkpointing=again) for again in kept]
        options["activation_bytes"] = sum(each.activation_bytes for each in found) / len(found)
        options |= {"largest_block": found[0].largest_block, "root": found[0].root}
        options["batch"] = row["batch"] or 1
    if row["rung"] == "fsdp":
        options["gpus"] = int(row["gpus"])
    options |= {"rung": row["rung"], "precision": row["precision"]}
    result = memory_per_gpu(row["parameters"], **options)
    if row["optimizer"].endswith("-loop"):
        result = replace(result, step=0.0)
    states = result.parameters + result.gradients + result.optimizer
    found = states if part == "states" else getattr(result, part or "total")
    if part or read in ("allocated", "active"):
        return found + (CONTEXT if read == "nvidia-smi" else 0)
    return found * RESERVED + (CONTEXT if read == "nvidia-smi" else 0)


def throughput(row: dict) -> float:
    """Samples a second of all GPUs."""
    value, unit = row["value"], row["unit"]
    if unit.startswith("tokens/s"):
        return value / row["sequence"] * (row["gpus"] if unit.endswith("GPU") else 1)
    if unit == "it/s":
        return value * row["batch"] * row["gpus"]
    return value if unit == "samples/s" else row["samples"] / (value * UNITS[unit])


def efficiency(row: dict, rate: float) -> float:
    """Of this many GPUs, each of which computes `rate` samples a second on its own."""
    if row["gpus"] == 1:
        return 1.0
    computing = row["batch"] * row["accumulation"] / rate
    size = will_it_fit.PRECISIONS[row["precision"]]
    each = (2 * size.cast + size.gradient) / 3 if row["rung"] == "fsdp" else size.gradient
    given = computing, each * row["parameters"], int(row["gpus"]), *preset(row["link"])
    return speed_up(*given, rung=row["rung"]) / row["gpus"]


def work(row: dict) -> float:
    """FLOPs to train on one sample, as MFU counts them: what is computed again is not in it."""
    return row["flops"] or sizes_of(row).flops


def ratios() -> Iterator[tuple[str, dict, float]]:
    """Kind, row, and predicted divided by measured; for all-reduces and speed, of the times."""
    rows = read()
    for row in rows.values():
        # "half" is checkpointing of single operations, every second product: no formula has it.
        if row["left_out"] or row["kind"] == "context":
            continue
        if row["kind"] == "memory" and row["checkpointing"] == "half":
            continue
        if row["kind"] == "memory":
            yield "memory", row, memory(row) / (row["value"] * UNITS[row["unit"]])
        elif row["kind"] == "all-reduce":
            measured = row["value"] * 1e-6
            if row["unit"] == "GB/s":  # of the bus, as nccl-tests counts
                measured = 2 * (1 - 1 / row["gpus"]) * row["bytes"] / (row["value"] * 1e9)
            given = row["bytes"], int(row["gpus"]), *preset(row["link"])
            kind = "all-reduce" if row["bytes"] >= 2**20 else "all-reduce below 1 MiB"
            yield kind, row, all_reduce_seconds(*given) / measured
        else:
            yield from speeds(row, rows)


def speeds(row: dict, rows: dict) -> Iterator[tuple[str, dict, float]]:
    if row["base"] and row["link"]:
        base = rows[row["base"]]
        rate = throughput(base) / base["gpus"]
        gain = throughput(row) / throughput(base)
        said = efficiency(row, rate) / efficiency(base, rate) * row["gpus"] / base["gpus"]
        yield f"speed-up over {LINKS[row['link']]}", row, said / gain
    if row["peak"] and (row["layers"] or row["flops"]):
        share = work(row) * throughput(row) / row["gpus"] / (row["peak"] * 1e12)
        if row["mfu"]:
            yield "FLOPs", row, share / (row["mfu"] / 100)
        if not row["base"] and row["precision"] != "fp32":  # the page has the peaks of 16 bits
            again = {"all": 4 / 3, "half": 7 / 6}.get(row["checkpointing"], 1)
            yield "share of the peak", row, share * again / reached(row)


def spread(found: list[float], within: float = 0.2) -> tuple[int, float, float]:
    """How many, their median error, and the share that is not further away than `within`."""
    away = [max(ratio, 1 / ratio) - 1 for ratio in found]
    return len(away), median(away), sum(error <= within for error in away) / len(away)


def main() -> None:
    found = defaultdict(list)
    for kind, row, ratio in ratios():
        found[kind, row["aside"] or "no"].append(ratio)
    for (kind, aside), each in sorted(found.items()):
        number, away, share = spread(each)
        text = f"{kind:24} aside: {aside:4}{number:4} rows, median ratio {median(each):.2f}"
        print(f"{text}, median error {away:.1%}, within 20 %: {share:.0%}")


if __name__ == "__main__":
    main()
