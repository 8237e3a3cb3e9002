"""Run the benchmarks: ``make bench``, which takes minutes, or ``benchmarks/run.py --full``.

The full ones write ``results.json`` and the site's tables of it. The others have fewer and smaller
runs: they are printed beside the stored ones, and the site does not show them. Leave the machine
alone meanwhile.
"""

import argparse
import dataclasses
import datetime
import importlib
import json
import os
import platform
from pathlib import Path

import torch
from results import Result, measured_on, table

from torchclinic.machine import cpu_name

RESULTS = Path(__file__).with_name("results.json")
TABLES = Path(__file__).with_name("tables")
# For each, measure(full) of the module of that name gives a list of results.
GROUPS = ("launching", "loading", "loop", "rungs", "checkpoints", "kills")


def machine():
    """What the results were measured on."""
    gpus = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    return {
        "date": datetime.date.today().isoformat(),
        "CPU": f"{cpu_name()}, {os.cpu_count()} cores",
        "GPUs": ", ".join(gpus) or "none",
        "PyTorch": torch.__version__,
        "Python": platform.python_version(),
        "system": f"{platform.system()} {platform.release().split('-')[0]}",
    }


def measured(name, full):
    """A group as ``results.json`` holds it."""
    module = importlib.import_module(name)
    return {"machine": machine(), "results": list(map(dataclasses.asdict, module.measure(full)))}


def show(group, stored):
    """Print a group, each result beside the stored one of the same name."""
    before = {row["what"]: row["ratio"] for row in stored.get("results", [])}
    for result in (Result(**row) for row in group["results"]):
        print(f"{result}{f', stored {before[result.what]:.2f}' if result.what in before else ''}")


def write_tables():
    """What the page includes: a table for each group in ``results.json``, and the machines."""
    TABLES.mkdir(exist_ok=True)
    groups = json.loads(RESULTS.read_text())
    texts = {name: table(group["results"]) for name, group in groups.items()}
    machines = measured_on([group["machine"] for group in groups.values()])
    for name, text in {**texts, "machines": machines}.items():
        (TABLES / f"{name}.md").write_text(f"{text}\n", encoding="utf-8")


def main(names, full):
    """Run the groups of these names, and keep what the file says of the others."""
    kept = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    print("; ".join(f"{name} {value}" for name, value in machine().items()))
    for place, name in enumerate(names, start=1):
        print(f"\n{name} ({place} of {len(names)})", flush=True)
        group = measured(name, full)
        show(group, kept.get(name, {}))
        if full:
            kept[name] = group
            ordered = {name: kept[name] for name in GROUPS if name in kept}
            RESULTS.write_text(json.dumps(ordered, indent=1) + "\n")
            write_tables()


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--full", action="store_true", help="more and larger runs, and store them")
    parser.add_argument("groups", nargs="*", help=f"of {', '.join(GROUPS)}; all if none is named")
    chosen = parser.parse_args()
    if unknown := set(chosen.groups) - set(GROUPS):
        parser.error(f"no benchmark {', '.join(unknown)}: choose from {', '.join(GROUPS)}")
    main(chosen.groups or GROUPS, full=chosen.full)
