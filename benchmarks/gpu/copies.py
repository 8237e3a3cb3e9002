"""How fast are copies to the GPU and back, from ordinary and from pinned memory?

    python benchmarks/gpu/copies.py            # needs a GPU
    python benchmarks/gpu/copies.py --small    # a rehearsal on the CPU

The bus has a peak that follows from its generation and width, as `nvidia-smi` tells them.
"""

from __future__ import annotations

import subprocess
import sys
from functools import partial

import torch
from measurement import Sheet, main

from torchladder import measuring

# Of a lane in one direction, in bytes a second, after the line's coding.
PCIE_LANE = {3: 0.985e9, 4: 1.969e9, 5: 3.938e9, 6: 7.563e9}


def bus() -> dict:
    """Generation and width of the GPU's PCIe link, and its peak in bytes a second."""
    query = "pcie.link.gen.current,pcie.link.gen.max,pcie.link.width.current,pcie.link.width.max"
    command = ["nvidia-smi", f"--query-gpu={query}", "--format=csv,noheader,nounits", "--id=0"]
    told = subprocess.check_output(command, text=True, timeout=60)
    return bus_from(told)


def bus_from(told: str) -> dict:
    """The same, from the words of `nvidia-smi`; "[N/A]" where it does not know."""
    names = ("generation", "most_generation", "lanes", "most_lanes")
    numbers = [int(word) if word.strip().isdigit() else None for word in told.split(",")]
    facts = dict(zip(names, numbers, strict=True))
    # A link that has nothing to do may report a lower generation than it uses when it works.
    lane, lanes = PCIE_LANE.get(facts["most_generation"]), facts["most_lanes"]
    return facts | {"bytes_per_second": lane * lanes if lane and lanes else None}


def copied(nbytes: int, device: torch.device, *, pinned: bool, to_gpu: bool) -> dict:
    """Bytes a second of copies in a row."""
    here = torch.zeros(nbytes, dtype=torch.uint8, pin_memory=pinned)
    there = torch.zeros(nbytes, dtype=torch.uint8, device=device)
    source, target = (here, there) if to_gpu else (there, here)
    times = max(1, min(50, 2**28 // nbytes))

    def copies():
        for _ in range(times):
            target.copy_(source, non_blocking=pinned)

    timing = measuring.measure(copies, device=device, repeats=9)
    return {"bytes": nbytes, "bytes_per_second": timing.rates(times * nbytes)}


def pinning(nbytes: int) -> dict:
    """Bytes a second at which ordinary memory becomes pinned memory: a copy, too."""
    block = torch.zeros(nbytes, dtype=torch.uint8)
    timing = measuring.measure(block.pin_memory, repeats=5)
    return {"bytes": nbytes, "bytes_per_second": timing.rates(nbytes)}


def on_the_device(nbytes: int, device: torch.device) -> dict:
    """The same within the GPU's memory; each byte is read and written."""
    a, b = (torch.zeros(nbytes, dtype=torch.uint8, device=device) for _ in range(2))
    timing = measuring.measure(lambda: b.copy_(a), device=device, repeats=9)
    return {"bytes": nbytes, "bytes_per_second": timing.rates(2 * nbytes)}


def measure(sheet: Sheet, device: torch.device) -> None:
    cuda = device.type == "cuda"
    if cuda:
        sheet.take("bus", bus)
    sizes = (2**12, 2**16, 2**20, 2**24, 2**28) if cuda else (2**12, 2**16)
    for nbytes in sizes:
        for pinned in (False, True) if cuda else (False,):
            for to_gpu in (True, False):
                memory = "pinned" if pinned else "ordinary"
                way = "to the GPU" if to_gpu else "from the GPU"
                name = f"{nbytes:,} bytes {way}, {memory} memory"
                row = partial(copied, nbytes, device, pinned=pinned, to_gpu=to_gpu)
                sheet.take(name, row)
    if cuda:
        sheet.take("making memory pinned", partial(pinning, sizes[-1]))
    sheet.take("within the device", partial(on_the_device, 2**30 if cuda else 2**16, device))


if __name__ == "__main__":
    sys.exit(main("copies", measure))
