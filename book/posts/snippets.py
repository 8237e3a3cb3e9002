"""DDP, then inference. Start: torchrun --standalone --nproc-per-node=2 snippets.py."""

import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

local_rank = int(os.environ["LOCAL_RANK"])  # torchrun sets it; it is not 0 everywhere
device = torch.device("cuda", local_rank)
torch.cuda.set_device(device)
dist.init_process_group(device_id=device)  # torchrun has told each process its rank

net = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 2)).to(device)
model = DistributedDataParallel(net, device_ids=[local_rank])  # the other defaults are right
model(torch.randn(6, 4, device=device)).sum().backward()

# A file with the wrapper's keys, loaded into the plain model.
prefixed = model.state_dict()
net.load_state_dict({key.removeprefix("module."): value for key, value in prefixed.items()})

net.eval()
with torch.inference_mode():  # no graph
    out = net(torch.randn(1, 4, device=device))
print(
    f"rank {dist.get_rank()} answers on {out.device}, with a graph: {out.requires_grad}\n", end=""
)
dist.destroy_process_group()
