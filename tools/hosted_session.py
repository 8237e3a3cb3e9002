"""Is this session fit for the notebook? Its first cell asks, on Kaggle, on Colab or elsewhere.

Such a notebook carries this module beside the packages. `check_session` says what the session has
and, for each thing that is wrong, what to click.
"""

import os
import platform
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

from torchclinic import OLDEST_TORCH, __version__

DATA_SET = "zalando-research/fashionmnist"
# PyPI's wheels of 2.10 are of CUDA 12.8, as those that Kaggle and Colab come with.
INSTALL_TORCH = '!pip install "torch==2.10.*" "torchvision==0.25.*"'


@dataclass(frozen=True)
class Host:
    """Where a notebook runs: what is kept there, and the menus' names; by default, elsewhere."""

    name: str = "a Jupyter of your own"
    keeps: str = "kept"  # what becomes of files beside the notebook
    gpu: str = "a machine with an NVIDIA GPU and its driver"  # what to do for one
    two_gpus: str = "a machine with two, such as Kaggle's"
    # What to do for data if nothing can be downloaded.
    data: str = "Go online, or name the files' folder: os.environ['TORCHLADDER_DATA'] = 'a folder'"


ON_KAGGLE = Host(
    name="Kaggle",
    keeps="kept by Save Version > Save & Run All",
    gpu="Settings > Accelerator > GPU T4 x2",
    two_gpus="Settings > Accelerator > GPU T4 x2",
    data=f"Either Add Input > Datasets > {DATA_SET}, or Settings > Turn on internet (needs a "
    "phone number verified)",
)
ON_COLAB = Host(
    name="Colab",
    keeps="gone when the runtime ends; download them under Files",
    gpu="Runtime > Change runtime type > T4 GPU",
    two_gpus="Colab lends one; Kaggle lends two, free of charge",
    data="Colab has internet, so try again in a minute; or upload the files under Files, on the "
    "left, and name their folder: os.environ['TORCHLADDER_DATA'] = '/content'",
)


def host() -> Host:
    """Kaggle, Colab or elsewhere, by what each sets in the environment."""
    # Kaggle first: its image is made from Colab's, and COLAB_RELEASE_TAG is set there, too
    # (https://github.com/Kaggle/kagglehub/pull/230).
    if "KAGGLE_KERNEL_RUN_TYPE" in os.environ or Path("/kaggle/working").is_dir():
        return ON_KAGGLE
    return ON_COLAB if "COLAB_RELEASE_TAG" in os.environ else Host()


class SessionError(Exception):
    """The notebook cannot run here; the message says why and what to click."""

    def _render_traceback_(self) -> list[str]:
        # IPython shows this in place of a traceback, which would repeat the source being carried.
        return [f"STOP: {self}"]


def check_session(*, needs_data: bool = False, two_gpus: bool = False, rungs: bool = False) -> None:
    """Print what this session has, a line for what is missing, and make ready what is used.

    Parameters
    ----------
    needs_data : bool
        The notebook loads Fashion-MNIST: find it, else download it.
    two_gpus : bool
        The notebook uses two GPUs where there are two.
    rungs : bool
        The notebook speaks of the programs in ``rungs/``: lay them into the working folder.

    Raises
    ------
    SessionError
        If it cannot run: torch is too old, or there are no data.
        What it can do without, such as a GPU, is a printed line.
    """
    import torch

    here, names = host(), gpu_names()
    if tuple(map(int, torch.__version__.split(".")[:2])) < OLDEST_TORCH:
        raise SessionError(
            f"torch {torch.__version__} is too old: 2.10 or later is needed. Choose the latest "
            f"environment in the settings, or, with internet, run {INSTALL_TORCH} and restart."
        )
    print(f"torchladder {__version__} on {here.name}")
    print(f"Python {platform.python_version()}, torch {torch.__version__}, {os.cpu_count()} CPUs")
    print("GPUs:", ", ".join(names) if names else "none")
    print(f"files: in {Path.cwd()}, {here.keeps}")
    if note := worth_knowing(here, names, two_gpus):
        print("NOTE:", note)
    data = find_fashion_mnist(here) if needs_data else None
    if rungs:
        lay_rungs(data)
    print("Ready: run the cells below.")


def gpu_names() -> list[str]:
    """What ``nvidia-smi`` lists; unlike PyTorch's answer, it does not start CUDA."""
    if not shutil.which("nvidia-smi"):
        return []
    query = ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"]
    done = subprocess.run(query, capture_output=True, text=True)
    return done.stdout.splitlines() if done.returncode == 0 else []


def worth_knowing(here: Host, names: list[str], two_gpus: bool) -> str:
    """What to do for GPUs, if they are not those of which the notebook makes use."""
    if not names:
        return f"no GPU; all cells run on the CPU. For a GPU: {here.gpu}."
    if two_gpus and len(names) == 1:
        return (
            "one GPU, and this notebook uses two where there are two; with one, its processes "
            f"compute on the CPU. For two GPUs: {here.two_gpus}."
        )
    return ""


def find_fashion_mnist(here: Host) -> object:
    """The small set, taken from the full one: found, else downloaded, else a `SessionError`."""
    from torchladder import data

    try:
        small = data.load_dataset()
    except ValueError as error:  # what is attached is damaged
        raise SessionError(str(error)) from error
    except FileNotFoundError:
        print("Fashion-MNIST is not here; downloading it (31 MB)")
        try:
            data.load_dataset("fashion_mnist", download=True)
        except (OSError, RuntimeError) as error:  # torchvision's
            reason = str(error.__cause__ or error).strip().splitlines()[-1]
            raise SessionError(
                "this notebook needs Fashion-MNIST, which is not here and cannot be downloaded. "
                f"{here.data}. Then run this cell again. ({reason})"
            ) from error
        small = data.load_dataset()
    print(f"data: {small}")
    return small


def lay_rungs(data) -> None:
    """The book's programs in ``./rungs``, and beside them the data that they can be given."""
    Path("rungs").mkdir(exist_ok=True)
    for program in Path(__file__).with_name("rungs").glob("*.py"):
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
