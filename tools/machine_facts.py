"""What readers may want to know of the machine that outputs come from."""

import os
import platform
import re
import subprocess
from contextlib import suppress
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
MAKERS = {"nvidia", "tesla", "quadro", "geforce", "amd", "instinct", "radeon"}


def machine_facts() -> dict:
    """The hardware and the software; nothing that tells whose machine it is."""
    import torch
    import torchvision

    from torchclinic.machine import cpu_name

    cuda = torch.cuda.is_available()
    gpus = [torch.cuda.get_device_properties(i) for i in range(torch.cuda.device_count())]
    return {
        "machine": machine_name([gpu.name for gpu in gpus]),
        "gpus": [f"{gpu.name}, {gpu.total_memory / 2**30:.1f} GiB" for gpu in gpus],
        "driver": _first_line("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"),
        "cuda": torch.version.cuda if cuda else None,
        "torch": str(torch.__version__),
        "torchvision": torchvision.__version__,
        "python": platform.python_version(),
        "cpu": cpu_name(),
        "cores": os.cpu_count(),
        "system": platform.system(),
    }


def machine_name(gpus: list[str]) -> str:
    """What a run with these GPUs may be called: ``cpu``, ``1xH200``, ``2xT4`` ..."""
    models = [model_of(gpu) for gpu in gpus]
    return "+".join(f"{models.count(model)}x{model}" for model in dict.fromkeys(models)) or "cpu"


def model_of(gpu: str) -> str:
    """A GPU's model in one word: ``NVIDIA A100-SXM4-40GB`` is an A100, ``Tesla T4`` a T4."""
    words = [word for word in re.findall(r"\w+", gpu) if word.lower() not in MAKERS]
    numbered = next((i for i, word in enumerate(words) if re.search(r"\d", word)), len(words))
    return "".join(words[: numbered + 1])


def commit() -> str | None:
    """The commit that is run, with a + if files differ; a packed tree has it in a file."""
    if packed := [f for f in ROOT.glob("dist/offline/commit") if not (ROOT / ".git").exists()]:
        return packed[0].read_text(encoding="utf-8").strip()
    changed = _first_line("git", "-C", str(ROOT), "status", "--porcelain", "--", ".", ":!book/runs")
    head = _first_line("git", "-C", str(ROOT), "rev-parse", "HEAD")
    return head and head + "+" * bool(changed)


def _first_line(*command: str) -> str | None:
    with suppress(OSError, subprocess.CalledProcessError):
        told = subprocess.check_output(command, text=True, stderr=subprocess.DEVNULL, timeout=60)
        return told.splitlines()[0] if told else None
    return None
