"""What has this machine, and why does PyTorch see no GPU?"""

import os
import platform
import re
from pathlib import Path

import torch

from torchclinic.tables import Table, in_bytes

ROOT = Path("/")  # of the files in which Linux tells about itself


def why_no_cuda() -> str:
    """One sentence on why ``torch.cuda.is_available()`` is False, and what to do."""
    if not torch.backends.cuda.is_built():
        return "this build of torch has no CUDA support; install one that has (pytorch.org)."
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None and not visible.replace("-1", "").strip():
        return f"CUDA_VISIBLE_DEVICES={visible!r} hides every GPU; unset it and start again."
    try:
        torch.cuda.init()  # unlike is_available(), it raises the reason
    except RuntimeError as error:
        return str(error).splitlines()[0].rstrip(".") + "."
    return "torch found no usable GPU; run nvidia-smi to see whether the driver does."


# --- the device table ---------------------------------------------------------------------------


def device_table() -> Table:
    """Every device of this machine, the CPU first.

    Asking a GPU for its free memory starts CUDA on it, which takes a few hundred MB there.
    ``bf16`` is *native* where the hardware computes in bfloat16, *emulated* where PyTorch only
    converts back and forth (slower than float16: a T4, for example), else *no*. Which GPUs each
    *reaches directly* is told where some do.
    """
    header = ["device", "name", "memory", "free", "capability", "bf16", "reaches directly"]
    rows = [_cpu()]
    if torch.cuda.is_available():
        rows += [_cuda(i) for i in range(torch.cuda.device_count())]
    elif torch.backends.mps.is_available():
        rows.append(_mps())
    columns = 7 if any(row[6] for row in rows) else 6
    return Table(header[:columns], [[cell or "–" for cell in row[:columns]] for row in rows])


def cpu_name() -> str:
    """The CPU's model, as far as the operating system tells."""
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists() and (found := re.search(r"model name\s*: (.+)", cpuinfo.read_text())):
        return found[1].strip()
    return platform.processor() or platform.machine()


def cpu_memory() -> tuple[int | None, int | None]:
    """Total and free bytes of the CPU's memory; `None` where the system does not say.

    On Linux, memory that only keeps copies of files is free. A container's or a Slurm job's own
    limit may be lower.
    """
    meminfo = ROOT / "proc/meminfo"
    if not meminfo.exists():
        if not hasattr(os, "sysconf"):  # Windows
            return None, None
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"), None
    kib = dict(re.findall(r"(\w+): +(\d+) kB", meminfo.read_text()))
    return 1024 * int(kib["MemTotal"]), 1024 * int(kib["MemAvailable"])


def _cpu() -> list[str]:
    native = torch.backends.mkldnn.is_available() and torch.ops.mkldnn._is_mkldnn_bf16_supported()
    memory = map(in_bytes, cpu_memory())
    name = f"{cpu_name()} ({os.cpu_count()} cores)"
    return ["cpu", name, *memory, "", "native" if native else "emulated", ""]


def _cuda(i: int) -> list[str]:
    properties = torch.cuda.get_device_properties(i)
    free, total = torch.cuda.mem_get_info(i)
    with torch.cuda.device(i):
        native = torch.cuda.is_bf16_supported(including_emulation=False)
        emulated = torch.cuda.is_bf16_supported()
    bf16 = "native" if native else "emulated" if emulated else "no"
    others = [j for j in range(torch.cuda.device_count()) if j != i]
    peers = [f"cuda:{j}" for j in others if torch.cuda.can_device_access_peer(i, j)]
    row = [f"cuda:{i}", properties.name, in_bytes(total), in_bytes(free)]
    return [*row, f"{properties.major}.{properties.minor}", bf16, ", ".join(peers)]


def _mps() -> list[str]:
    total = torch.mps.recommended_max_memory()
    free = total - torch.mps.driver_allocated_memory()
    bf16 = "native" if torch.backends.mps.is_macos_or_newer(14, 0) else "no"
    return ["mps", "Apple GPU", in_bytes(total), in_bytes(free), "", bf16, ""]
