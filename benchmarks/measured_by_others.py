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
  were chosen by whole tables of all-reduces, with six of them, that of MI300X by its row. The
  link "geforce" has none aside.
- `left_out`: why the calculators cannot answer, or which better source the row contradicts.

The page book/are_the_numbers_right.md shows the errors by kind, and all rows.
"""

import csv
import re
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from statistics import geometric_mean, median

from torchclinic import will_it_fit
from torchclinic.will_it_fit import all_reduce_seconds, memory_per_gpu, speed_up, transformer

CSV, PAGE = Path(__file__).with_suffix(".csv"), Path(__file__).parents[1] / "book/will_it_fit.md"
UNITS = {"GiB": 2**30, "MiB": 2**20, "GB": 1e9, "MB": 1e6, "us": 1e-6, "ms": 1e-3, "s": 1}
CONTEXT, RESERVED = map(geometric_mean, (will_it_fit.CONTEXT, will_it_fit.RESERVED))
SIZES = ("layers", "hidden", "heads", "sequence", "vocabulary")
LINKS = {"pcie3": "PCIe", "pcie4": "PCIe", "geforce": "PCIe"}
LINKS |= dict.fromkeys(("roce", "eth100"), "machines")
LINKS |= dict.fromkeys(("a100", "h100", "b200", "v100", "bridge"), "NVLink")
NEEDED = {
    "memory": ("parameters", "precision", "rung"),
    "all-reduce": ("bytes", "gpus", "link"),
    "speed": ("gpus", "rung"),
    "context": (),
}
UNIT = {"memory": ("GB", 1e9), "all-reduce": ("ms", 1e-3), "speed-up": ("times", 1.0)}
SHARE = "%", 0.01
PANELS = {  # of the figure: kinds, with colours of `torchladder.showing`
    "Memory": {"memory": "gpu"},
    "All-reduce": {"all-reduce": "gpu", "all-reduce below 1 MiB": "dp"},
    "Speed-up": {f"speed-up over {link}": color for link, color in
                 {"PCIe": "dp", "NVLink": "ddp", "machines": "hsdp"}.items()},
    "Share of peak": {"share of the peak": "gpu"},
}  # fmt: skip


def read(lines: Iterable[str] | None = None) -> dict[str, dict]:
    """The rows by their ids; numbers are numbers, and what is missing is ``""``."""
    lines = csv.DictReader(lines or CSV.read_text(encoding="utf-8").splitlines())
    return {row["id"]: {key: number(text) for key, text in row.items()} for row in lines}


def check(rows: dict[str, dict]) -> None:
    """Refuse a row that lacks what its number needs to be compared, or to be found again."""
    for name, row in rows.items():
        needed = () if row["left_out"] else NEEDED.get(row["kind"], ())
        missing = ["known kind"] * (row["kind"] not in NEEDED)
        missing += [
            field for field in ("source", "measured", "value", "unit", *needed) if row[field] == ""
        ]
        if missing:
            raise ValueError(
                f"Row {name} has no {' and no '.join(missing)}: fill it in, or say in left_out "
                f"why the calculators cannot answer. Kinds: {', '.join(NEEDED)}."
            )
        if row["base"] and row["base"] not in rows:
            raise ValueError(f"Row {name}: its base, {row['base']}, is no row of this table.")


def addresses(row: dict) -> list[str]:
    """Where its numbers stand: a file at its commit, an issue, an article."""
    found = []
    for source in row["source"].split("; "):
        path, _, commit = source.partition(" (")[0].partition("@")
        owner, name, file = f"{path}//".split("/", 2)
        blob = f"github.com/{owner}/{name}/blob/{commit}/{file.strip('/')}"
        found.append(f"https://{blob if commit else path}")
    return found


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


def family(row: dict) -> str:
    """Of cards that have a share of the peak of their own."""
    return re.match(r"RTX \d+|\w*", row["gpu"])[0]


def reached(row: dict) -> float:
    """The share of the peak that the page has for a kind of model and a family of cards."""
    found = re.search(rf'text: {family(row)} .*reached: "(.*?)", conv: "(.*?)"', PAGE.read_text())
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
    name, _, backward = row["optimizer"].removesuffix("-loop").partition(" in ")
    options = {"optimizer": name} if name else {}
    if backward:
        options["held"] = "one-gradient"
    if row["layers"]:
        again = {"all": True, "operations": "selective"}.get(row["checkpointing"], False)
        found = sizes_of(row, checkpointing=again)
        options["activation_bytes"] = found.activation_bytes
        options |= {key: getattr(found, key) for key in ("largest_block", "root", "largest")}
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


def pairs(rows: dict[str, dict]) -> Iterator[tuple[str, dict, float, float]]:
    """Kind, row, what the calculators predict and what was measured, both in the same unit."""
    for row in rows.values():
        if row["left_out"] or row["kind"] == "context":
            continue
        if row["kind"] == "memory":
            yield "memory", row, memory(row), row["value"] * UNITS[row["unit"]]
        elif row["kind"] == "all-reduce":
            measured = row["value"] * 1e-6
            if row["unit"] == "GB/s":  # of the bus, as nccl-tests counts
                measured = 2 * (1 - 1 / row["gpus"]) * row["bytes"] / (row["value"] * 1e9)
            given = row["bytes"], int(row["gpus"]), *preset(row["link"])
            kind = "all-reduce" if row["bytes"] >= 2**20 else "all-reduce below 1 MiB"
            yield kind, row, all_reduce_seconds(*given), measured
        else:
            yield from speeds(row, rows)


def speeds(row: dict, rows: dict) -> Iterator[tuple[str, dict, float, float]]:
    if row["base"] and row["link"]:
        base = rows[row["base"]]
        rate = throughput(base) / base["gpus"]
        said = efficiency(row, rate) / efficiency(base, rate) * row["gpus"] / base["gpus"]
        yield f"speed-up over {LINKS[row['link']]}", row, said, throughput(row) / throughput(base)
    if row["peak"] and (row["layers"] or row["flops"]):
        share = work(row) * throughput(row) / row["gpus"] / (row["peak"] * 1e12)
        if row["mfu"]:
            yield "FLOPs", row, share, row["mfu"] / 100
        if not row["base"] and row["precision"] != "fp32":  # the page has the peaks of 16 bits
            again = {"all": 4 / 3, "half": 7 / 6}.get(row["checkpointing"], 1)
            yield "share of the peak", row, reached(row), share * again


def spread(found: Iterable[float], within: float = 0.2) -> tuple[int, float, float]:
    """How many, their median error, and the share that is not further away than `within`."""
    away = [max(ratio, 1 / ratio) - 1 for ratio in found]
    return len(away), median(away), sum(error <= within for error in away) / len(away)


def of(kind: str, rows: dict | None = None) -> list[tuple[dict, float, float]]:
    """Row, predicted and measured of a kind, or of all kinds whose names begin like this."""
    found = list(pairs(rows or read()))
    same = [each[1:] for each in found if each[0] == kind]
    return same or [each[1:] for each in found if each[0].startswith(kind)]


def figure():
    """Predicted against measured: a panel a quantity, a dot a row, a cross a row aside."""
    from torchladder import showing

    fig, axes = showing.figure(height=5.2, nrows=2, ncols=2)
    for ax, (title, kinds) in zip(axes.flat, PANELS.items(), strict=True):
        unit, size = unit_of(next(iter(kinds)))
        for place, (kind, color) in enumerate(kinds.items()):
            style = {"color": showing.COLORS[color], "s": 14, "linewidths": 1, "alpha": 0.7}
            for aside, marker in {"": "o", "yes": "x"}.items():
                points = [(measured / size, said / size)
                          for row, said, measured in of(kind) if row["aside"] == aside]  # fmt: skip
                ax.scatter(*zip(*points, strict=True), marker=marker, **style)
            if len(kinds) > 1:
                name = kind.replace("speed-up over ", "").replace("all-reduce", "").strip()
                x, y = 0.5, 0.06 + 0.11 * place
                ax.plot(x, y, "o", color=style["color"], markersize=5, transform=ax.transAxes)
                text = name or "from 1 MiB"
                ax.text(x + 0.04, y, text, transform=ax.transAxes, va="center", fontsize=8)
        values = [value / size for kind in kinds for row in of(kind) for value in row[1:]]
        ends = min(values) / 1.5, max(values) * 1.5
        low, high = [end / 1.2 for end in ends], [end * 1.2 for end in ends]
        ax.fill_between(ends, low, high, color=showing.COLORS["ink"], alpha=0.15, linewidth=0)
        ax.plot(ends, ends, color=showing.COLORS["ink"], linewidth=0.8)
        ax.set(xscale="log", yscale="log", xlim=ends, ylim=ends, xlabel="measured")
        ax.set_ylabel("predicted" if ax in axes[:, 0] else "")
        ax.set_title(f"{title}, {unit}", loc="left", fontsize=10, fontweight="bold")
        for axis in (ax.xaxis, ax.yaxis):
            axis.set_major_formatter("{x:g}")
            axis.set_minor_formatter("")
    return fig


def amounts(kind: str, values: Iterable[float]) -> list[str]:
    unit, size = unit_of(kind)
    return [f"{value / size:.3g} {unit}" for value in values]


def unit_of(kind: str) -> tuple[str, float]:
    return next((unit for name, unit in UNIT.items() if kind.startswith(name)), SHARE)
