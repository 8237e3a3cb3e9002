"""Is this session fit for the chapter? The first cell of a chapter made for Kaggle asks.

Such a notebook carries this module beside the package. `check_session` says what the session has
and, for each thing that is wrong, what to click; `expect` finds a first cell that belongs to
another version of the chapter. Nothing but the standard library is imported until it is needed, so
that this works where the rest does not.
"""

from __future__ import annotations

import platform
import shutil
import subprocess
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import torchladder

DATA_SET = "zalando-research/fashionmnist"
ACCELERATOR = "Settings > Accelerator > GPU T4 x2"
ATTACH = f"Add Input > Datasets > {DATA_SET}"
INTERNET = "Settings > Turn on internet (needs a phone number verified)"
NEEDED = ("numpy", "torch", "torchvision", "matplotlib", "safetensors", "tqdm", "cloudpickle")


class SessionError(Exception):
    """The chapter cannot run here; the message says why and what to click."""

    def _render_traceback_(self) -> list[str]:
        # IPython shows this in place of a traceback, which would repeat the source being carried.
        return [f"STOP: {self}"]


def check_session(*, needs_data: bool = False, two_gpus: bool = False, rungs: bool = False) -> None:
    """Print what this session has, a line for what is missing, and make ready what a chapter uses.

    Parameters
    ----------
    needs_data : bool
        The chapter loads Fashion-MNIST: find it attached, else download it.
    two_gpus : bool
        The chapter uses two GPUs where there are two.
    rungs : bool
        The chapter speaks of the programs in ``rungs/``: lay them into the working folder.

    Raises
    ------
    SessionError
        If the chapter cannot run: torch is too old, a library is missing, or there are no data.
        What a chapter can do without, such as a GPU, is a printed line.
    """
    stops = list(_too_old())
    if stops:
        raise SessionError(" ".join(stops))
    import torch

    names = gpu_names()
    carried = getattr(torchladder, "carried", None)
    print(f"torchladder {torchladder.__version__} ({carried[:12] if carried else 'installed'})")
    print(f"Python {platform.python_version()}, torch {torch.__version__}")
    print("GPUs:", ", ".join(names) if names else "none")
    for line in _worth_knowing(names, two_gpus):
        print("NOTE:", line)
    data = _fashion_mnist() if needs_data else None
    if rungs:
        _lay_rungs(data)
    print("Ready: run the cells below.")


def expect(sha256: str) -> None:
    """Stop unless the first cell that was run belongs to the notebook that calls this.

    Parameters
    ----------
    sha256 : str
        The first digits of the SHA-256 of what the notebook carries.
    """
    carried = getattr(torchladder, "carried", None)
    if carried is None:
        raise SessionError(
            f"this torchladder is from {Path(torchladder.__file__).parent}, not from this "
            "notebook. Restart the session (Run > Restart & clear cell outputs), then run the "
            "notebook's first cell before all others."
        )
    if not carried.startswith(sha256):
        raise SessionError(
            f"the first cell carries version {carried[:12]}, and the chapter was written for "
            f"{sha256}. Download the notebook again, File > Import notebook, and run it from the "
            "top in a new session; do not copy cells from one notebook to another."
        )


def gpu_names() -> list[str]:
    """What ``nvidia-smi`` lists; unlike PyTorch's answer, it does not start CUDA."""
    if not shutil.which("nvidia-smi"):
        return []
    query = ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"]
    done = subprocess.run(query, capture_output=True, text=True)
    return done.stdout.splitlines() if done.returncode == 0 else []


def _too_old() -> Iterator[str]:
    latest = "Choose Settings > Environment > Always use latest environment, and restart."
    missing = [name for name in NEEDED if not find_spec(name)]
    if missing:
        names = " ".join(missing)
        yield f"not installed: {names}. {latest} Or, with internet on: !pip install {names}"
    if "torch" in missing:
        return
    import torch

    if tuple(map(int, torch.__version__.split(".")[:2])) < torchladder.OLDEST_TORCH:
        yield f"torch {torch.__version__} is too old: 2.10 or later is needed. {latest}"


def _worth_knowing(names: list[str], two_gpus: bool) -> Iterator[str]:
    if not names:
        yield f"no accelerator; all cells run on the CPU. For two GPUs: {ACCELERATOR}."
    elif any("P100" in name for name in names):
        yield (
            "a P100 is one GPU, not two, and new versions of PyTorch cannot compute on it. "
            f"Choose {ACCELERATOR}."
        )
    elif two_gpus and len(names) == 1:
        yield f"one GPU, and this chapter uses two where there are two: {ACCELERATOR}."
    here = [path for path in (Path("torchladder"), Path("torchladder.py")) if path.exists()]
    if here:
        yield (
            f"{here[0].resolve()} hides the package from programs started here. Rename it, and "
            "restart the session."
        )


def _fashion_mnist() -> object:
    """The small set, taken from the full one: attached, else downloaded, else a `SessionError`."""
    from torchladder import data

    try:
        small = data.load()
    except ValueError as error:  # what is attached is damaged
        raise SessionError(str(error)) from error
    except FileNotFoundError:
        print("Fashion-MNIST is not attached; downloading it (31 MB)")
        try:
            data.load("fashion_mnist", download=True)
        except OSError as error:
            reason = str(error.__cause__ or error).strip().splitlines()[-1]
            raise SessionError(
                "the chapter needs Fashion-MNIST, which is neither attached nor can it be "
                f"downloaded. Either {ATTACH}, or {INTERNET}. Then run this cell again. ({reason})"
            ) from error
        small = data.load()
    print(f"data: {small}")
    return small


def _lay_rungs(data) -> None:
    """The book's four programs in ``./rungs``, and beside them the data that they can be given."""
    carried = Path(__file__).with_name("rungs")
    Path("rungs").mkdir(exist_ok=True)
    for program in sorted(carried.glob("*.py")):
        if not Path("rungs", program.name).exists():  # yours, if you have changed one
            shutil.copyfile(program, Path("rungs", program.name))
    if data and not Path("rungs/fashion_mnist_small.npz").exists():
        import numpy as np

        arrays = {
            f"{split}_{kind}": tensor.squeeze().numpy().astype(np.uint8)
            for split in ("train", "test")
            for kind, tensor in zip(("images", "labels"), data.split(split), strict=True)
        }
        np.savez("rungs/fashion_mnist_small.npz", **arrays)
