"""A model and its data on one device, whichever there is. Start: python which_device.py."""

import itertools

import torch
from torch import nn

device = torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")


class Masked(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(3, 3)
        self.register_buffer("mask", torch.tensor([1.0, 0.0, 1.0]))  # moves with the model

    def forward(self, x):
        return self.layer(x) * self.mask


def places(model):
    """Where all parameters and buffers are, not the first parameter alone."""
    tensors = itertools.chain(model.parameters(), model.buffers())
    return sorted({str(tensor.device) for tensor in tensors})


model = Masked().to(device)
data, target = torch.ones(2, 3).to(device), torch.zeros(2, 3).to(device)  # each needs the =
loss = nn.functional.l1_loss(model(data), target)
print("model:", *places(model), " data:", data.device, " loss:", loss.device)

# To use several GPUs, wrap the model. On the CPU, use `model` itself.
if torch.cuda.device_count() > 1:
    print("outputs of DataParallel:", nn.DataParallel(model)(data).device)
model.cpu()
print("on the CPU again:", *places(model), model(data.cpu()).device)
