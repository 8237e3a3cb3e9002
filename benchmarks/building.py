"""How long the site takes to build: from nothing, and after the text of one chapter changed."""

import json
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median

from results import Result

ROOT = Path(__file__).parents[1]
CHAPTER = "notebooks/05_rung_1_cpu.ipynb"
LIMITS = {"From nothing": 60, "After one chapter's text changed": 10}  # seconds
RUNS = 3


def copy_to(folder):
    """The repository's files as they are now, where a build cannot disturb them."""
    names = subprocess.check_output(["git", "ls-files", "-z"], cwd=ROOT, text=True)
    for name in filter(None, names.split("\0")):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, folder / name)


def build(folder):
    """Seconds of what ``make book`` does."""
    jupyter_book = Path(sys.executable).with_name("jupyter-book")
    start = time.perf_counter()
    subprocess.run(
        [jupyter_book, "build", folder, "-W", "-n", "--keep-going", "--quiet"],
        check=True,
        capture_output=True,
    )
    return time.perf_counter() - start


def add_a_word(notebook):
    content = json.loads(notebook.read_text(encoding="utf-8"))
    texts = [cell for cell in content["cells"] if cell["cell_type"] == "markdown"]
    texts[-1]["source"] = ["".join(texts[-1]["source"]) + " More."]
    notebook.write_text(json.dumps(content), encoding="utf-8")


def measure(full=True):
    """In turns; this takes minutes, so the quick run leaves it out."""
    seconds = {name: [] for name in LIMITS}
    for _ in range(RUNS):
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            copy_to(folder)
            for times in seconds.values():
                times.append(build(folder))
                add_a_word(folder / CHAPTER)
    return [
        Result.of_runs(
            f"{name}: the site's build, as a share of {LIMITS[name]} s",
            [time / LIMITS[name] for time in times],
            1,
            at_most=True,
            detail=f"{median(times):.1f} s",
        )
        for name, times in seconds.items()
    ]
