"""How long it takes to run a trivial function in two ranks: `launch` and its peers.

Each peer is tried in fresh Python processes, which first execute the import cell of the chapter on
DDP. The first call in such a process is kept apart from the later ones.
"""

import gc
import json
import os
import re
import socket
import subprocess
import sys
import time
from pathlib import Path
from statistics import median

from benchmarks.results import Result

CHAPTER = Path(__file__).resolve().parent.parent / "notebooks" / "09_rung_4_distributed.ipynb"
ROUNDS, LATER = 6, 2  # six first launches: enough for the range of their median


def work():
    import torch
    import torch.distributed as dist

    total = torch.ones(1)
    dist.all_reduce(total)
    return total.item()


# --- the peers: each calls work() once in two ranks that form a gloo group ----------------------


def launch():
    from torchladder.launching import launch

    assert launch(work) == [2.0, 2.0]


def mp_spawn():
    import torch.multiprocessing as mp

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    mp.spawn(_spawned, (port,), nprocs=2)


def _spawned(rank, port):
    address = f"tcp://127.0.0.1:{port}"
    _work_and_leave(init_method=address, rank=rank, world_size=2)


def _work_and_leave(**group):
    import torch.distributed as dist

    dist.init_process_group("gloo", **group)
    assert work() == 2.0
    dist.barrier()
    gc.collect()
    dist.destroy_process_group()


def torchrun():
    options = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, *options, "-m", "benchmarks.launching", "rank"]
    subprocess.run(command, check=True, env=environment, capture_output=True)


def accelerate():
    from accelerate import notebook_launcher

    notebook_launcher(_accelerated, num_processes=2)


def _accelerated():
    from accelerate import PartialState

    PartialState(cpu=True)
    assert work() == 2.0


PEERS = {
    "torch.multiprocessing.spawn": mp_spawn,
    "torchrun `--standalone`": torchrun,  # the site would make one dash of two
    "accelerate's notebook_launcher (fork)": accelerate,
}


# --- measuring ----------------------------------------------------------------------------------


def times(name):
    """Seconds of the first call and of `LATER` others, after the chapter's import cell."""
    import nbformat

    notebook = nbformat.read(CHAPTER, as_version=4)
    cell = next(cell.source for cell in notebook.cells if cell.cell_type == "code")
    call = PEERS.get(name, launch)
    if call != launch:  # they have no fork server to start
        cell = re.sub(r".*\bwarm_up\(\).*", "", cell)
    exec(cell, {})
    seconds = []
    for _ in range(1 + LATER):
        start = time.perf_counter()
        call()
        seconds.append(time.perf_counter() - start)
    return seconds


def measure():
    """The results: each peer against `launch`, in the same run."""
    first, later = {}, {}
    for _ in range(ROUNDS):
        for name in ("launch", *PEERS):
            seconds = in_new_process(name)
            first.setdefault(name, []).append(seconds[0])
            later.setdefault(name, []).extend(seconds[1:])
    results = []
    for name in PEERS:
        what = f"A later launch: how many times faster than {name}"
        detail = f"{median(later['launch']):.2g} s against {median(later[name]):.2g} s"
        pairs = list(zip(later[name], later["launch"], strict=True))
        results.append(Result.of_pairs(what, pairs, detail=detail))
    what = "The first launch after the import cell, as a share of that of mp.spawn"
    sides = first["launch"], first["torch.multiprocessing.spawn"]
    detail = "{:.2g} s against {:.2g} s".format(*map(median, sides))
    results.append(Result.of_pairs(what, list(zip(*sides, strict=True)), detail=detail))
    return results


def in_new_process(name):
    """The `times` of a peer; this file is the main module, so that ranks need not import it."""
    command = [sys.executable, "-m", "benchmarks.launching", name]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return json.loads(done.stdout.splitlines()[-1])


if __name__ == "__main__":
    if sys.argv[1] == "rank":
        _work_and_leave()
    else:
        print(json.dumps(times(sys.argv[1])))
