"""Train on several GPUs. Start: torchrun --standalone --nproc-per-node=3 FILE."""

import os
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
torch.cuda.set_device(device)
dist.init_process_group(device_id=device)  # torchrun has told each process its rank
rank = dist.get_rank()

torch.manual_seed(0)  # your data here: downloaded once, before the start
train_set = TensorDataset(torch.rand(240, 3, 8, 8), torch.arange(240) % 10)
sampler = DistributedSampler(train_set)
batches = DataLoader(train_set, batch_size=16, sampler=sampler)  # for each process
layers = nn.Flatten(), nn.Linear(192, 32), nn.ReLU(), nn.Linear(32, 10)  # an activation between
model = DistributedDataParallel(nn.Sequential(*layers).to(device), device_ids=[device.index])
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)

orders = []
for epoch in range(2):
    sampler.set_epoch(epoch)  # the loop's variable: a new order each time
    orders.append(list(sampler))
    for images, labels in batches:
        loss = nn.functional.cross_entropy(model(images.to(device)), labels.to(device))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

if rank == 0:  # of all machines; the model, not the wrapper
    file = Path(tempfile.mkdtemp(), "model.pt")
    torch.save(model.module.state_dict(), file)
    print("first key:", next(iter(torch.load(file, map_location="cpu"))))
    print(
        "images per step:", 16 * dist.get_world_size(), " in a new order:", orders[0] != orders[1]
    )
print(f"rank {rank} is on {device}\n", end="")
dist.destroy_process_group()
