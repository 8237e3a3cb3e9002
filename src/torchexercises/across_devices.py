"""The hidden cases of the exercises on tensors and devices: chapter 04."""

import copy

import torch
from torch import nn

from torchclinic.where import where_is
from torchexercises import Wrong, exercise, expect
from torchladder.devices import simulated_gpus


@exercise("04", minutes=10, hint="Chapter 04's table: what moves with .to and is not saved?")
def moving_table(Positions) -> None:
    model, x = Positions(), torch.rand(3, 4)
    trained = {"has the table: an optimizer would take it": ["layer.bias", "layer.weight", "table"]}
    names = ["layer.bias", "layer.weight"]
    expect("the list of parameters", sorted(n for n, _ in model.named_parameters()), names, trained)
    saved = {"has the table: an older checkpoint lacks that key": [*names, "table"]}
    expect("the state dict", sorted(model.state_dict()), names, saved)
    for factor in (1.0, 2.0):
        state = {"layer.weight": torch.full((2, 4), factor), "layer.bias": torch.ones(2)}
        model.load_state_dict(state)
        right = (factor * (x + torch.arange(4.0))).sum(1, keepdim=True).expand(3, 2) + 1
        without = {"lacks the positions": right - 6 * factor}
        kept = x.clone()
        expect("the output on the CPU", model(x), right, without)
        expect("the input, afterwards,", x, kept)
    whole = nn.Sequential(model).to("meta")
    for name in where_is(whole).odd:
        raise Wrong(f"if a model that it is a part of moves, {name[2:]} is still on the CPU")
    whole(x.to("meta"))  # fails if it makes a tensor on the CPU


@exercise("04", minutes=10, hint="named_buffers() has buffers that the state dict lacks.")
def left_behind(left_behind) -> None:
    def net(first, second, bias, buffer):
        model = nn.Sequential(nn.Linear(2, 2, device=first), nn.BatchNorm1d(2, device=second))
        model[0].bias = nn.Parameter(torch.zeros(2, device=bias))
        model.register_buffer("mask", torch.ones(2, device=buffer), persistent=False)
        return model

    buffers = nn.BatchNorm1d(2, affine=False, device="meta")
    buffers.register_buffer("mask", torch.ones(2))
    of_1 = [f"1.{name}" for name in sorted(nn.BatchNorm1d(2).state_dict())]
    with simulated_gpus():
        for model, right in (
            (net("cuda:0", "cuda:0", "cuda:0", "cuda"), []),
            (net("cpu", "cpu", "cuda:0", "cpu"), ["0.bias"]),
            (net("cuda:1", "cuda:0", "cuda:1", "cuda:1"), of_1),
            (net("cuda:0", "cuda:0", "cpu", "cpu"), ["0.bias", "mask"]),
            (nn.ReLU(), []),
            (buffers, []),
            (net("cpu", "cuda:0", "cpu", "cuda:0").requires_grad_(False), [*of_1, "mask"]),
            (nn.Sequential(nn.ReLU(), net("cpu", "cpu", "cpu", "meta")), ["1.mask"]),
        ):
            parameters = {name for name, _ in model.named_parameters()}
            mistakes = {
                "is not sorted": ["mask", "0.bias"],
                "lacks `mask`, which is not in the state dict": [n for n in right if n != "mask"],
                "lacks the buffers": [n for n in right if n in parameters],
                "lacks what is on another GPU": [n for n in right if not n.startswith("1.")],
            }
            expect("what is returned", left_behind(model), right, mistakes)


@exercise("04", minutes=15, hint="Which tensors does the loop make or receive? There are five.")
def train(train) -> None:
    batches = [(torch.rand(n, 2), torch.tensor([0, 1, 1, 0])[:n]) for n in (4, 4, 2)]
    kept = copy.deepcopy(batches)
    net = nn.Linear(2, 2)
    model, losses = copy.deepcopy(net), []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for x, y in batches:
        of_each = -model(x - 0.5).log_softmax(1)[range(len(y)), y]
        losses.append(((1.0 + 2 * y) * of_each).sum() / (1.0 + 2 * y).sum())
        losses[-1].backward()
        optimizer.step()
        optimizer.zero_grad()
    sum_of_all = torch.stack(losses).sum().item()
    mistakes = {
        "is the sum of all batches' losses": sum_of_all,
        "is the last batch's": losses[-1].item(),
        "is the last batch's, divided by their number": losses[-1].item() / 3,
        "is the mean over the samples, not over the batches": sum(
            loss.item() * n / 10 for loss, n in zip(losses, (4, 4, 2), strict=True)
        ),
    }
    on_cpu = copy.deepcopy(net)
    loss = train(on_cpu, batches, "cpu")
    expect("the loss on the CPU", loss, sum_of_all / 3, mistakes)
    found = train(net, batches, "meta")
    if not found.is_meta:
        raise Wrong(f"on meta, all runs, but the loss that is returned is on {found.device}")
    if not net.weight.is_meta:
        raise Wrong("on meta, all runs, but the model itself is still on the CPU")
    expect("the weight on the CPU", on_cpu.weight.detach(), model.weight.detach())
    if loss.requires_grad:
        raise Wrong("the loss that is returned keeps the graphs of all batches")
    expect("the batches, afterwards,", batches, kept)
