"""Save tensors and a model, then use two GPUs by name. Start: python tensors_and_gpus.py."""

import tempfile
from pathlib import Path

import torch
from torch import nn

folder = Path(tempfile.mkdtemp())


def gpu(i):
    """The GPU that somebody has named: no silent CPU in its place."""
    count = torch.cuda.device_count()
    if i >= count:
        raise SystemExit(f"No GPU {i} here: there are {count}, counted from 0.")
    return torch.device("cuda", i)


torch.manual_seed(0)
net, x = nn.Sequential(nn.Linear(20, 256), nn.ReLU(), nn.Linear(256, 10)), torch.randn(2, 20)
torch.save(net.state_dict(), folder / "mlp.pt")
clone = nn.Sequential(nn.Linear(20, 256), nn.ReLU(), nn.Linear(256, 10))
clone.load_state_dict(torch.load(folder / "mlp.pt", map_location="cpu"))
torch.testing.assert_close(clone(x), net(x))  # says where and by how much, if not
print("the clone computes the same")

X = torch.ones(2, 3, device=gpu(0))
Y = torch.full((2, 3), 0.5, device=gpu(1))
Z = X.to(gpu(1))  # a copy: X stays on GPU 0
print("X:", X.device, " Z:", Z.device, " Y + Z:", (Y + Z).device, (Y + Z)[0].tolist())

net = nn.Linear(3, 1).to(gpu(0))
print("net(X):", net(X).device)
