"""Run the benchmarks, or those named, and write ``results.json`` and the site's tables of it.

``make bench`` takes half an hour, ``make bench GROUPS=kills`` one. Leave the machine alone
meanwhile; ``git diff benchmarks/tables`` then shows what has changed.
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

from benchmarks.results import table
from torchclinic.machine import cpu_name

RESULTS = Path(__file__).with_name("results.json")
TABLES = Path(__file__).with_name("tables")
# For each, measure() of the module of that name gives a list of results.
GROUPS = ("loop", "rungs", "checkpoints", "kills")


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


def write_tables():
    """What the page includes: a table for each group in ``results.json``, and the machines."""
    groups = json.loads(RESULTS.read_text())
    texts = {name: table(group["results"]) for name, group in groups.items()}
    machines = [map(" ".join, group["machine"].items()) for group in groups.values()]
    texts["machines"] = "\n".join(sorted({f"- {'; '.join(facts)}" for facts in machines}))
    for name, text in texts.items():
        (TABLES / f"{name}.md").write_text(f"{text}\n", encoding="utf-8")


def main(names):
    """Run the groups of these names, and keep what the file says of the others."""
    groups = json.loads(RESULTS.read_text())
    for name in names:
        results = [
            dataclasses.asdict(one)
            for one in importlib.import_module(f"benchmarks.{name}").measure()
        ]
        groups[name] = {"machine": machine(), "results": results}
        print(f"\n{name}\n{table(results)}", flush=True)
        RESULTS.write_text(json.dumps(groups, indent=1) + "\n")
        write_tables()


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    parser = argparse.ArgumentParser(description=__doc__)
    # A default of "all": Python 3.11 refuses an empty list, since it is none of the choices.
    parser.add_argument("groups", nargs="*", default="all", choices=[*GROUPS, "all"])
    named = parser.parse_args().groups
    main(GROUPS if "all" in named else named)
