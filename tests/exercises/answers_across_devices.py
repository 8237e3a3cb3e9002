"""Answers to the exercises of the cases in `across_devices`; each says how it is judged."""

import torch
from torch import nn


class visible_gpus:
    def all_that_are_there(value, gpus):
        """goes on after the negative index"""
        if value is None:
            return list(range(gpus))
        found = [int(index) for index in value.split(",") if index]
        return [index for index in found if 0 <= index < gpus]

    def in_order(value, gpus):
        """is sorted: the order of the list counts"""
        return sorted(int(index) for index in value.split(","))

    def once(value, gpus):
        """has the GPU that is there twice"""
        found = []
        for index in range(gpus) if value is None else map(int, filter(None, value.split(","))):
            if not 0 <= index < gpus:
                break
            if index not in found:
                found.append(index)
        return found

    def not_set_is_empty(value, gpus):
        """is that of an empty list: not set hides none"""
        return [int(index) for index in (value or "").split(",") if index]

    def one_by_one(value, gpus):
        """right"""
        found = []
        for index in value.split(",") if value else range(gpus if value is None else 0):
            if int(index) in found:
                return []
            if not 0 <= int(index) < gpus:
                return found
            found.append(int(index))
        return found


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 2)

    def forward(self, x):
        return self.layer(x + self.table)


class moving_table:
    class saved(Layer):
        """the state dict has the table: an older checkpoint lacks that key"""

        def __init__(self):
            super().__init__()
            self.register_buffer("table", torch.arange(4.0))

    class copied_each_time(Layer):
        """if a model that it is a part of moves, table (plain attribute) is still on the CPU"""

        def __init__(self):
            super().__init__()
            self.table = torch.arange(4.0)

        def forward(self, x):
            return self.layer(x + self.table.to(x.device))

    class cpu_in_forward(Layer):
        """Expected all tensors to be on the same device"""

        def forward(self, x):
            return self.layer(x + torch.arange(4.0))

    class made_in_forward(Layer):
        """right"""

        def forward(self, x):
            return self.layer(x + torch.arange(x.shape[-1], device=x.device, dtype=x.dtype))


class left_behind:
    def of_the_state_dict(model):
        """what is returned lacks `mask`, which is not in the state dict"""
        state = model.state_dict(keep_vars=True)
        first = next(model.parameters(), torch.empty(0)).device
        return sorted(name for name, tensor in state.items() if tensor.device != first)

    def first_levels(model):
        """what is returned lacks what is three levels deep"""
        first, found = next(model.parameters(), torch.empty(0)).device, []
        for path, module in [("", model), *model.named_children()]:
            for name, tensor in (module._parameters | module._buffers).items():
                if tensor is not None and tensor.device != first:
                    found += [f"{path}.{name}".lstrip(".")]
        return sorted(found) if [*model.parameters()] else []

    def of_the_modules(model):
        """right"""
        found = []
        for path, module in model.named_modules() if [*model.parameters()] else []:
            for name, tensor in (module._parameters | module._buffers).items():
                if str(tensor.device) != str(next(model.parameters()).device):
                    found += [f"{path}.{name}".lstrip(".")]
        return sorted(found)


def loop(model, batches, device, left=None, optimizer=None):
    """The repaired loop, but what is called `left` stays on the CPU."""
    on = dict.fromkeys(["model", "mean", "weight", "total", "x", "y"], device) | {left: "cpu"}
    model.to(on["model"])
    optimizer = optimizer or torch.optim.SGD(model.parameters(), lr=0.1)
    mean = torch.tensor([0.5, 0.5], device=on["mean"])
    loss_fn = nn.CrossEntropyLoss(weight=torch.tensor([1.0, 3.0], device=on["weight"]))
    total = torch.zeros((), device=on["total"])
    for x, y in batches:
        x, y = x.to(on["x"]), y.to(on["y"])
        centred = x - mean
        output = model(centred)
        loss = loss_fn(output, y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        total += loss.detach()
    return total / len(batches)


class train:
    def made_first(model, batches, device):
        """on meta, the optimizer steps the old parameters: move first, then make it"""
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        return loop(model, batches, device, optimizer=optimizer)

    def total_left(model, batches, device):
        """Expected all tensors to be on the same device"""
        return loop(model, batches, device, "total")

    def loss_brought_back(model, batches, device):
        """on cuda:1, all runs, but the loss that is returned is on cpu"""
        return loop(model, batches, device).cpu()

    def set_as_default(model, batches, device):
        """right"""
        model.to(device)
        with torch.device(device):
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            loss_fn, losses = nn.CrossEntropyLoss(weight=torch.tensor([1.0, 3.0])), []
            for x, y in batches:
                x = x.to(device).sub(0.5)
                losses.append(loss_fn(model(x), y.to(device)))
                optimizer.zero_grad()
                losses[-1].backward()
                optimizer.step()
            return torch.stack(losses).detach().mean()
