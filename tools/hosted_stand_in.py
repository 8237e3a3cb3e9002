"""Run every self-contained notebook as Kaggle or Colab would.

    python tools/hosted_stand_in.py kaggle [notebook ...]
    python tools/hosted_stand_in.py colab [notebook ...]

Neither Kaggle nor Colab, but what of them can be had: their working folder with nothing of ours in
it, their variables and versions, an environment without torchladder, an empty home, no network but
the machine's own, no GPU. The full Fashion-MNIST is attached as Kaggle does, or lies where a
download leaves it. It needs Linux, the right to make namespaces (``unshare`` and ``ip``, as root),
and Debian's ``dataset-fashion-mnist``.

Environments are made in ``.venv-kaggle`` and ``.venv-colab`` at the first run, 7 GB each: by
Kaggle's or Colab's version of Python if it is on PATH, else by this one.
"""

from __future__ import annotations

import gzip
import os
import shutil
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import hosted_notebooks

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "_build" / "hosted_stand_in"
DEBIAN = Path("/usr/share/datasets/fashion-mnist")
OTHERS = ["accelerate", "matplotlib", "safetensors", "tqdm", "cloudpickle", "ipykernel", "nbclient"]


@dataclass(frozen=True)
class Stage:
    """What a notebook finds; `place` is where the data lie below `root`."""

    root: str
    working: str
    place: str
    variables: dict[str, str]
    python: str
    packages: tuple[str, ...]


KAGGLE = Stage(
    root="/kaggle",
    working="/kaggle/working",
    place="input/datasets/zalando-research/fashionmnist",
    variables={"KAGGLE_KERNEL_RUN_TYPE": "Batch", "COLAB_RELEASE_TAG": "release-colab_stand-in"},
    # Kaggle's image of June 2026: https://github.com/Kaggle/kaggle-cli/issues/1151
    python="python3.12",
    packages=("torch==2.10.*", "torchvision==0.25.*", "numpy==2.0.2", *OTHERS),
)
COLAB = Stage(
    root="/content",
    working="/content",
    place=".home/.cache/torchladder/FashionMNIST/raw",
    variables={"COLAB_RELEASE_TAG": "release-colab_stand-in", "PYTHONPATH": "/env/python"},
    # Colab's of 2026-08-19, pip-freeze.gpu.txt of https://github.com/googlecolab/backend-info
    python="python3.13",
    packages=(
        *("torch==2.11.*", "torchvision==0.26.*", "numpy==2.1.3", "matplotlib==3.10.0"),
        *("ipython==7.34.0", "ipykernel==6.17.1", "jupyter_client==7.4.9", "traitlets==5.7.1"),
        *("accelerate==1.14.0", "safetensors==0.8.0", "tqdm==4.67.3", "cloudpickle==3.1.2"),
        "nbclient==0.10.4",
    ),
)
STAGES = {"kaggle": KAGGLE, "colab": COLAB}

# Runs in namespaces of its own, so nothing of it is left: only loopback, a root and a home with
# nothing else in it, no data set of Debian's. Then a kernel runs the notebook, as nbclient's
# `raises-exception` says.
SESSION = """
ip link set lo up
mount --bind "$1" "$2"
mount -t tmpfs none "$3"
cd "$4"
shift 4
exec "$@"
"""
RUN = """
import sys, nbformat
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError

notebook = nbformat.read(sys.argv[1], as_version=4)
client = NotebookClient(notebook, timeout=300, kernel_name="python3")
try:
    client.execute()
except CellExecutionError as error:
    sys.exit(str(error)[-3000:])
finally:
    nbformat.write(notebook, sys.argv[2])
"""


def main(name: str, names: list[str]) -> None:
    if os.geteuid() or not DEBIAN.is_dir():
        sys.exit("Needs root, for namespaces, and: apt install dataset-fashion-mnist")
    stage, python = STAGES[name], environment(name)
    made = not Path(stage.root).exists()
    Path(stage.root).mkdir(exist_ok=True)  # only a place to mount a temporary folder on
    failed = []
    try:
        with tempfile.TemporaryDirectory(prefix=f"torchladder-{name}-") as folder:
            notebooks = hosted_notebooks.write_notebooks(Path(folder, "notebooks"))
            for notebook in notebooks:
                if not names or {notebook.stem, notebook.stem[:2]} & set(names):
                    root = Path(folder, notebook.stem)
                    if not session(stage, python, notebook, RESULTS / name, root):
                        failed.append(notebook.stem)
    finally:
        if made:
            Path(stage.root).rmdir()
    print(f"The notebooks as they ran are in {RESULTS / name}")
    sys.exit(f"failed: {', '.join(failed)}" if failed else 0)


def session(stage: Stage, python: Path, notebook: Path, results: Path, root: Path) -> bool:
    """Run one notebook in a folder that it takes for the root; True if no cell failed unasked."""
    for within in (stage.working, f"{stage.root}/.home"):
        (root / os.path.relpath(within, stage.root)).mkdir(parents=True, exist_ok=True)
    (root / stage.place).mkdir(parents=True)
    for path in DEBIAN.glob("*.gz"):
        (root / stage.place / path.stem).write_bytes(gzip.decompress(path.read_bytes()))
    results.mkdir(parents=True, exist_ok=True)
    variables = {
        "PATH": f"{python.parent}:/usr/bin:/bin:/usr/sbin:/sbin",
        "HOME": f"{stage.root}/.home",
        "LANG": "C.UTF-8",
        "TQDM_DISABLE": "1",
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1"),
    } | stage.variables
    alone = ["unshare", "--net", "--mount", "sh", "-ec", SESSION, "sh"]
    shown = [root, stage.root, DEBIAN.parent, stage.working]
    start = time.perf_counter()
    done = subprocess.run(
        [*alone, *shown, python, "-c", RUN, notebook, results / notebook.name],
        env=variables, capture_output=True, text=True, timeout=900,
    )  # fmt: skip
    verdict = "FAILED" if done.returncode else "ok"
    print(f"{verdict:7}{notebook.stem:32}{time.perf_counter() - start:.0f} s", flush=True)
    if done.returncode:
        print(done.stdout[-3000:], done.stderr[-3000:], sep="\n", flush=True)
    shutil.rmtree(root)
    return done.returncode == 0


def environment(name: str) -> Path:
    """The Python of the environment, which is made if it is not there."""
    stage, folder = STAGES[name], ROOT / f".venv-{name}"
    python = folder / "bin" / "python"
    if not (folder / "installed").exists():
        with suppress(OSError, subprocess.CalledProcessError):  # pyenv's names need not run
            subprocess.run([stage.python, "-m", "venv", folder], check=True)
        if not python.exists():
            subprocess.run([sys.executable, "-m", "venv", folder], check=True)
        subprocess.run([python, "-m", "pip", "install", "-q", *stage.packages], check=True)
        (folder / "installed").touch()
    return python


if __name__ == "__main__":
    if len(sys.argv) < 2 or sys.argv[1] not in STAGES:
        sys.exit(f"Which one? {' or '.join(STAGES)}")
    main(sys.argv[1], sys.argv[2:])
