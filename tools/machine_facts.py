"""What readers may want to know of the machine that outputs come from, and of the code that ran."""

from __future__ import annotations

import contextlib
import datetime
import json
import os
import platform
import re
import subprocess
from importlib.metadata import version
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def machine_name() -> str:
    """What a run on this machine may be called: ``cpu``, ``mps``, ``1xH200``, ``2xT4`` ..."""
    import torch

    gpus = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    models = list(map(model_of, gpus))
    if gpus:
        return "+".join(f"{models.count(model)}x{model}" for model in dict.fromkeys(models))
    return "mps" if torch.backends.mps.is_available() else "cpu"


def model_of(gpu: str) -> str:
    """A GPU's model in one word: ``NVIDIA A100-SXM4-40GB`` is an A100, ``Tesla T4`` a T4."""
    makers = {"nvidia", "tesla", "quadro", "geforce", "amd", "instinct", "radeon"}
    words = [word for word in re.findall(r"\w+", gpu) if word.lower() not in makers]
    numbered = next((i for i, word in enumerate(words) if re.search(r"\d", word)), len(words))
    return "".join(words[: numbered + 1])


def machine_facts() -> dict:
    """The hardware, the software and the date; nothing that tells whose machine it is."""
    import torch

    import torchladder
    from torchladder.devices import cpu_name

    cuda = torch.cuda.is_available()
    properties = map(torch.cuda.get_device_properties, range(torch.cuda.device_count()))
    nccl = cuda and torch.distributed.is_nccl_available() and torch.cuda.nccl.version()
    return {
        "machine": machine_name(),
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "gpus": [f"{gpu.name}, {gpu.total_memory / 2**30:.1f} GiB" for gpu in properties],
        "driver": _driver() if cuda else None,
        "cuda": torch.version.cuda if cuda else None,
        "nccl": ".".join(map(str, nccl)) if nccl else None,
        "torch": torch.__version__,
        "torchvision": version("torchvision"),
        "torchladder": torchladder.__version__,
        "python": platform.python_version(),
        "cpu": cpu_name(),
        "cores": os.cpu_count(),
        "system": _system(),
    }


def _driver() -> str | None:
    ask = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    with contextlib.suppress(OSError, subprocess.CalledProcessError):
        return subprocess.check_output(ask, text=True).split()[0]
    return None


def _system() -> str:
    with contextlib.suppress(OSError):
        return platform.freedesktop_os_release()["PRETTY_NAME"]
    return f"{platform.system()} {platform.release()}"


def commit() -> dict:
    """The commit that is run, and whether anything but ``runs/`` differs from it."""
    try:
        if Path(git("rev-parse", "--show-toplevel")).resolve() != ROOT:
            raise OSError("the repository is another one's")
        changes = git("status", "--porcelain", "--", ".", ":!runs")
        return {"commit": git("rev-parse", "HEAD"), "clean": not changes}
    except (OSError, subprocess.CalledProcessError):
        packed = ROOT / "commit.json"  # a copy without a history may bring this along
        if packed.exists():
            return json.loads(packed.read_text(encoding="utf-8"))
        return {"commit": None, "clean": None}


def git(*arguments: str) -> str:
    command = ["git", "-C", str(ROOT), *arguments]
    return subprocess.check_output(command, text=True, stderr=subprocess.DEVNULL).strip()


def write_json(value: dict, path: Path) -> None:
    """Write `value` to `path`: all of it, or nothing."""
    write_text(json.dumps(value, indent=1, ensure_ascii=False) + "\n", path)


def write_text(text: str, path: Path) -> None:
    temporary = path.with_suffix(".tmp")
    temporary.write_text(text, encoding="utf-8")
    os.replace(temporary, path)
