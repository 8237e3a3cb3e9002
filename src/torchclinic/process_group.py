"""The process group that the environment describes: torchrun's, or that of a launcher like it."""

from __future__ import annotations

import os
import re

GROUP = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
# What a rank says when another one is gone; the last words are NCCL's, the others gloo's.
PEER_IS_GONE = re.compile("Connection (closed|reset) by peer|Broken pipe|remote process exited")


def join_group(backend: str | None = None) -> None:
    """Join the process group that the environment describes (torchrun's, or `launch`'s).

    The rank's GPU becomes the current device. The backend is NCCL if every machine has a GPU for
    each of its ranks, else gloo, in which case the ranks share what GPUs there are. A ValueError
    names the variables of that environment that are missing.
    """
    import torch
    import torch.distributed as dist

    if missing := [name for name in GROUP if name not in os.environ]:
        raise ValueError(
            f"{', '.join(missing)} not set: a rank knows its group by {', '.join(GROUP)}. "
            "Start the program with torchrun, which sets them all, or its function with launch."
        )
    local_rank, local_size = int(os.environ["LOCAL_RANK"]), int(os.environ["LOCAL_WORLD_SIZE"])
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if gpus:
        torch.cuda.set_device(local_rank % gpus)
    dist.set_debug_level_from_env()  # read when torch was imported: in the fork server, long ago
    if not backend:  # all ranks must choose the same, and their machines may differ
        store, rank, world_size = next(dist.rendezvous("env://"))
        store.set(f"GPU {rank}", str(gpus >= local_size))
        own = store.multi_get([f"GPU {r}" for r in range(world_size)])
        backend = "nccl" if set(own) == {b"True"} else "gloo"
    device = torch.device("cuda", local_rank) if backend == "nccl" else None
    dist.init_process_group(backend, device_id=device)
    dist.barrier()  # or a rank might be done and gone while another still connects to it
