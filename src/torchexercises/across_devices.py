"""The hidden cases of the exercises on tensors and devices: chapters 03 and 04."""

import copy
from collections import namedtuple
from collections.abc import Iterator
from contextlib import contextmanager
from unittest import mock

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from torchclinic.where import where_is
from torchexercises import Wrong, exercise, expect
from torchladder.devices import simulated_gpus


@contextmanager
def _machine_with(gpus: int) -> Iterator[None]:
    """PyTorch says that there are so many GPUs, wherever it is asked."""
    cuda = torch.device("cuda")

    def current(check_available: bool = False) -> torch.device | None:
        return cuda if gpus or not check_available else None

    says = {"device_count": lambda: gpus, "is_available": lambda: gpus > 0}
    in_cuda = mock.patch.multiple(torch.cuda, **says, current_device=lambda: gpus - 1)
    with in_cuda, mock.patch.multiple(torch.accelerator, **says, current_accelerator=current):
        yield


class _NoTensors(TorchFunctionMode):
    """Notes what makes tensors, and makes them on meta."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = []

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if "device" in kwargs:
            self.calls.append(func.__name__)
            kwargs["device"] = "meta"
        return func(*args, **kwargs)


@exercise("03", minutes=15, hint="torch.device() takes any GPU's name. How many are there?")
def chosen_device(chosen_device) -> None:
    wanted = {None: 0, "cpu": None, "cuda": 0, "gpu": -1, "mps": -1, "xpu:0": -1, "": -1}
    wanted |= {f"{prefix}{i}": i for i in (0, 1, 2, 3, -1) for prefix in ("", "cuda:")}
    for gpus in (3, 1, 0):
        with _machine_with(gpus):
            for option, i in wanted.items():
                falls_back = option in (None, "cpu")
                here = i is not None and 0 <= i < gpus
                right = torch.device("cuda", i) if here else torch.device("cpu")
                what = f"with {gpus} GPUs, the device for {option!r}"
                try:
                    with _NoTensors() as made:
                        got = chosen_device(option)
                    if made.calls:
                        raise Wrong(f"{what}: it makes a tensor, by torch.{made.calls[0]}()")
                except ValueError as error:
                    if here or falls_back:
                        raise Wrong(f"{what} is a ValueError: {error}") from None
                    continue
                if not here and not falls_back:
                    raise Wrong(f"{what} is {got!r}, and there is no such GPU")
                mistakes = {"has no index": torch.device("cuda"), "is a text": str(right)}
                expect(what, got, right, mistakes)


@exercise("03", minutes=10, hint="Which device does a tensor on 'cuda' have? Are the two equal?")
def table_per_device(TablePerDevice) -> None:
    with simulated_gpus():
        usual = torch.zeros(1, device="cuda").device
        tables, kept = TablePerDevice(), {}
        for place, right in (
            ("cuda", "cuda:0"), (usual, "cuda:0"), (torch.device("cuda"), "cuda:0"), ("cpu", "cpu"),
            ("cuda:1", "cuda:1"), ("cuda:0", "cuda:0"), (torch.device("cpu"), "cpu"),
            (torch.device("meta"), "meta"), ("cuda:1", "cuda:1"),
        ):  # fmt: skip
            with mock.patch("torch.arange", side_effect=torch.arange) as made:
                table = tables.table_on(place)
            on = getattr(table, "device", None)
            if str(on) not in (right, f"{right}:0"):  # the CPU is cpu:0, too
                raise Wrong(f"the device of table_on({place!r}) is {on}, not {right}")
            known = right in kept
            if kept.setdefault(right, table) is not table:
                raise Wrong(f"table_on({place!r}) is not the table that {right} had already")
            expect(f"`built` after table_on({place!r})", tables.built, len(kept))
            if known and any(1000 in call.args for call in made.call_args_list):
                raise Wrong(f"table_on({place!r}) makes a whole table, though there is one")
        other = TablePerDevice()
        other.table_on("cuda")
        shared = {"is 0: it has the tables of another object": 0}
        expect("`built` of a second object", other.built, 1, shared)
    expect("the table on the CPU", TablePerDevice().table_on("cpu"), torch.arange(1000))


@exercise("03", minutes=10, hint="int() the fields before you compare them.")
def idle_gpu_only(idle_gpu_only) -> None:
    wrong = {
        "is the number of its line": "3",
        "is that of least utilisation": "5",
        "is that with most memory in use": "6",
        "is that whose memory comes first as a text": "4",
        "is a number, and an environment holds texts": 7,
    }
    first = {"is the first of those that use least memory": "0"}
    for text, idle, mistakes in (
        ("4, 1000, 50\n6, 14210, 60\n5, 300, 0\n7, 8, 20\n", "7", wrong),
        ("0, 10, 80\n12, 10, 9\n2, 10, 10", "12", first),
        ("3, 0, 100\n", "3", {}),
    ):
        given = {"PATH": "/bin", "CUDA_VISIBLE_DEVICES": "9", "CUDA_CACHE_PATH": "/c", "SEED": "1"}
        given["CUDA_DEVICE_ORDER"] = "FASTEST_FIRST"
        before = dict(given)
        found = idle_gpu_only(text, given)
        if not isinstance(found, dict):
            raise Wrong(f"what is returned is {found!r}, not a dict")
        expect("the environment that you were given, afterwards,", given, before)
        mistakes = mistakes | {"is the one that was set before": "9"}
        what = f"of the lines {text.splitlines()}, CUDA_VISIBLE_DEVICES"
        expect(what, found.get("CUDA_VISIBLE_DEVICES"), idle, mistakes)
        expect("CUDA_DEVICE_ORDER", found.get("CUDA_DEVICE_ORDER"), "PCI_BUS_ID")
        for name in ("PATH", "SEED"):
            expect(f"the program's {name}", found.get(name), given[name])
        expect("the list of the environment's names", sorted(found), sorted(given))


Pair = namedtuple("Pair", ["left", "right"])


@exercise("04", minutes=15, hint="A named tuple takes its values one by one. A text is a sequence.")
def move(move) -> None:
    module = nn.Linear(1, 1)
    makers = {
        "a tensor": lambda x: x,
        "a list": lambda x: [x, 2, None, "cat"],
        "a tuple of one": lambda x: (x,),
        "a named tuple in a list": lambda x: [Pair(x, "cat"), Pair(None, x)],
        "tuples in a list in a dict": lambda x: {"a": [(x, x), (1.5, x)], "b": True, 3: x},
        "lists in a named tuple": lambda x: Pair([x, {"a": x}], (x,)),
        "a module beside a tensor": lambda x: [x, module],
        "what is empty": lambda x: {"a": [], "b": (), "c": {}, "d": ""},
    }
    for what, make in makers.items():
        for device in ("meta", "cpu"):
            x = torch.arange(3, dtype=torch.int16)
            given, right = make(x), make(x.to(device))
            before = repr(given)
            found = move(given, device)
            if module.weight.is_meta:
                raise Wrong("a module in the batch is moved, too: it is no tensor")
            if repr(given) != before:
                raise Wrong(f"{what}: the batch that you were given is changed")
            if repr(found) == before != repr(right):
                raise Wrong(f"{what}: what is returned is still on the CPU")
            if repr(found) != repr(right):
                raise Wrong(f"{what}, to {device}: {found!r}, not {right!r}")


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
