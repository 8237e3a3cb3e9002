"""The hidden cases of the exercises on devices and the tensors on them: chapters 03 and 04."""

import copy

import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

from torchclinic.where import where_is
from torchexercises import Wrong, case, exercise, expect, unchanged
from torchladder.devices import two_gpus


@exercise("03", 10, hint="Take one index after the other. When do you stop, when give up?")
def visible_gpus(visible_gpus) -> None:
    for value, gpus, right, mistakes in (
        ("0,1", 2, [0, 1], {}), ("3", 4, [3], {}),
        ("2,0", 4, [2, 0], {"is sorted: the order of the list counts": [0, 2]}),
        (None, 3, [0, 1, 2], {"is that of an empty list: not set hides none": []}),
        ("", 2, [], {"is that of no list: an empty one hides all": [0, 1]}), ("-1", 2, [], {}),
        ("0,-1,1", 2, [0], {"goes on after the negative index": [0, 1]}),
        ("0,7,1", 2, [0], {"goes on after an index that is not there": [0, 1]}),
        ("0,2,1", 2, [0], {"has GPU 2 of two, counted from 0": [0, 2, 1]}),
        ("1,1", 2, [], {"has the GPU that is there twice": [1]}), ("10,2", 12, [10, 2], {}),
    ):  # fmt: skip
        expect(
            f"for {value!r} and {gpus} GPUs, the list", visible_gpus(value, gpus), right, mistakes
        )


@exercise("04", 10, hint="Chapter 04's table: what moves with .to and is not saved?")
def moving_table(Positions) -> None:
    two_gpus()
    model, x = Positions(), torch.rand(3, 4)
    trained = {"has the table: an optimizer would take it": ["layer.bias", "layer.weight", "table"]}
    names = ["layer.bias", "layer.weight"]
    expect("the list of parameters", sorted(n for n, _ in model.named_parameters()), names, trained)
    saved = {"has the table: an older checkpoint lacks that key": [*names, "table"]}
    expect("the state dict", sorted(model.state_dict()), names, saved)
    model.load_state_dict({"layer.weight": torch.ones(2, 4), "layer.bias": torch.ones(2)})
    right = (x + torch.arange(4.0)).sum(1, keepdim=True).expand(3, 2) + 1
    without = {"lacks the positions": right - 6}
    expect("the output on the CPU", unchanged(model, "x")(x).detach(), right, without)
    whole = nn.Sequential(model).to("cuda:1")
    for name in where_is(whole).odd:
        raise Wrong(f"if a model that it is a part of moves, {name[2:]} is still on the CPU")
    with case("the model and its input on cuda:1"):
        found = whole(x.to("cuda:1"))  # fails if it makes a tensor on the CPU
    expect("the output on cuda:1", found.detach(), right.to("cuda:1"))


@exercise("04", 10, hint="named_buffers() has buffers that the state dict lacks.")
def left_behind(left_behind) -> None:
    def net(first, second, bias, buffer):
        model = nn.Sequential(nn.Linear(2, 2, device=first), nn.BatchNorm1d(2, device=second))
        model[0].bias = nn.Parameter(torch.zeros(2, device=bias))
        model.register_buffer("mask", torch.ones(2, device=buffer), persistent=False)
        return model

    two_gpus()
    # Three levels, with modules that have no parameters between the two devices.
    last = nn.Sequential(nn.ReLU(), nn.Linear(2, 2, device="cuda:1"))
    first = nn.Linear(2, 2, device="cuda:0")
    deep = nn.Sequential(first, nn.ReLU(), nn.Sequential(nn.ReLU(), last))
    of_1 = [f"1.{name}" for name in sorted(nn.BatchNorm1d(2).state_dict())]
    for model, right in (  # the first tells the buffers that are saved from those that are not
        (net("cpu", "cuda:0", "cpu", "cuda:0").requires_grad_(False), [*of_1, "mask"]),
        (net("cuda:0", "cuda:0", "cuda:0", "cuda"), []),
        (net("cuda:1", "cuda:0", "cuda:1", "cuda:1"), of_1),
        (net("cuda:0", "cuda:0", "cpu", "cpu"), ["0.bias", "mask"]),
        (deep, ["2.1.1.bias", "2.1.1.weight"]),
        (nn.BatchNorm1d(2, affine=False), []),
    ):
        parameters = {name for name, _ in model.named_parameters()}
        mistakes = {
            "is not sorted": ["mask", "0.bias"],
            "lacks `mask`, which is not in the state dict": [n for n in right if n != "mask"],
            "lacks the buffers": [n for n in right if n in parameters],
            "lacks what is on another GPU": [n for n in right if not n.startswith("1.")],
            "lacks what is three levels deep": [n for n in right if n.count(".") < 3],
        }
        expect("what is returned", left_behind(model), right, mistakes)


@exercise("04", 15, hint="Which tensors does the loop make or receive? There are five.")
def train(train) -> None:
    two_gpus()
    batches = [(torch.rand(n, 2), torch.tensor([0, 1, 1, 0])[:n]) for n in (4, 4, 2)]
    net, train = nn.Linear(2, 2), unchanged(train, "_ batches")
    by_hand, losses = copy.deepcopy(net), []
    optimizer = torch.optim.SGD(by_hand.parameters(), lr=0.1)
    for x, y in batches:
        loss = nn.functional.cross_entropy(by_hand(x - 0.5), y, torch.tensor([1.0, 3.0]))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    total = {"is the sum of all batches' losses": sum(losses), "is the last batch's": losses[-1]}
    for device in ("cpu", "cuda:1"):
        there = copy.deepcopy(net)
        with case(f"the device {device}"):
            found = train(there, batches, device)
        _both_are_there(there, found, device)
        expect(f"the loss on {device}", found, sum(losses) / 3, total)
        expect(f"the weight on {device}", there.weight, by_hand.weight.to(device))

    def steps_the_models_own(optimizer, args, kwargs):
        theirs = [p for group in optimizer.param_groups for p in group["params"]]
        if any(mine is not p for mine, p in zip(net.parameters(), theirs, strict=False)):
            label = "on meta, the optimizer steps the old parameters: move first, then make it"
            raise Wrong(label)

    hook = register_optimizer_step_pre_hook(steps_the_models_own)
    found = train(net, batches, "meta")
    hook.remove()
    _both_are_there(net, found, "meta")


def _both_are_there(net: nn.Linear, loss: torch.Tensor, device: str) -> None:
    for what, tensor in {"loss that is returned": loss, "model itself": net.weight}.items():
        if tensor.device != torch.device(device):
            raise Wrong(f"on {device}, all runs, but the {what} is on {tensor.device}")
