"""Train on all GPUs with DataParallel, and load the file anywhere."""

import tempfile
from pathlib import Path

import torch
from torch import nn
from torch.nn.modules.utils import consume_prefix_in_state_dict_if_present

device = torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")
file = Path(tempfile.mkdtemp(), "model.pt")


def build():
    return nn.Sequential(nn.Conv2d(3, 6, 5), nn.ReLU(), nn.Flatten(), nn.Linear(6 * 28 * 28, 10))


net = build().to(device)  # before the first call
parallel = nn.DataParallel(net)  # all GPUs that there are: no list of numbers
images, labels = torch.randn(8, 3, 32, 32, device=device), torch.arange(8, device=device)
loss = nn.functional.cross_entropy(parallel(images), labels)
loss.backward()

torch.save(net.state_dict(), file)  # not the wrapper's
alone = build()
print("saved from net:", alone.load_state_dict(torch.load(file, map_location="cpu")))

torch.save(parallel.state_dict(), file)  # a file that somebody else has written so
state = torch.load(file, map_location="cpu")
print("first key:", next(iter(state)))
consume_prefix_in_state_dict_if_present(state, "module.")  # at the beginning of keys only
print("without the prefix:", alone.load_state_dict(state))
