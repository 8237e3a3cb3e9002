"""Answers to the exercises of the cases in `across_devices`; each says how it is judged."""

import copy
import os
from collections.abc import Mapping

import torch
from torch import nn
from torch.utils import _pytree as pytree

from torchladder.devices import named_device, try_gpu


class chosen_device:
    def current(option):
        """with 3 GPUs, the device for None is device(type='cuda', index=2)"""
        if option is None and torch.cuda.is_available():
            return torch.device("cuda", torch.cuda.current_device())
        return chosen_device.from_a_table(option)

    def tried_out(option):
        """with 3 GPUs, the device for None: it makes a tensor, by torch.empty()"""
        device = chosen_device.from_a_table(option)
        return torch.empty(0, device=device) is not None and device

    def other_kinds(option):
        """the device for 'mps' is device(type='mps'), and there is no such GPU"""
        return torch.device(option) if option == "mps" else chosen_device.from_a_table(option)

    def falls_back(option):
        """the device for 'gpu' is device(type='cpu'), and there is no such GPU"""
        i = {None: "0", "cuda": "0"}.get(option, option).removeprefix("cuda:")
        return try_gpu(int(i)) if i.isdigit() else torch.device("cpu")

    def first_for_none(option):
        """with 0 GPUs, the device for None is device(type='cuda', index=0), not device(type='cpu"""
        count = torch.cuda.device_count()
        option = {None: "0", "cuda": "0"}.get(option, option).removeprefix("cuda:")
        if option == "cpu":
            return torch.device(option)
        if option.isdigit() and int(option) < max(1, count):
            return torch.device(f"cuda:{option}")
        raise ValueError(f"no device {option}")

    def as_the_package(option):
        """the device for 'cuda' has no index"""
        if option is None:
            return try_gpu()
        return named_device(f"cuda:{option}" if option.lstrip("-").isdigit() else option)

    def names_alone(option):
        """the device for '0' is a ValueError: '0' is not a device"""
        return (
            try_gpu() if option is None else named_device("cuda:0" if option == "cuda" else option)
        )

    def text(option):
        """the device for None is a text"""
        device = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
        return option or str(device)

    def any_name(option):
        """failed with RuntimeError: Expected one of cpu, cuda"""
        if option is None:
            return try_gpu()
        if option == "cpu":
            return torch.device(option)
        device = torch.device("cuda:0" if option == "cuda" else option)
        if device.index >= torch.accelerator.device_count():
            raise ValueError(f"no GPU {option}")
        return device

    def from_the_end(option):
        """the device for '-1' is device(type='cuda', index=2), and there is no such GPU"""
        gpus = [torch.device("cuda", i) for i in range(torch.accelerator.device_count())]
        if option == "cpu" or (not option and not gpus):
            return torch.device("cpu")
        option = {None: "0", "cuda": "0"}.get(option, option).removeprefix("cuda:")
        try:
            return gpus[int(option)]
        except IndexError:
            raise ValueError(f"no GPU {option}") from None

    def one_too_many(option):
        """the device for '3' is device(type='cuda', index=3), and there is no such GPU"""
        if option == "cpu":
            return torch.device("cpu")
        i = int({None: "0", "cuda": "0"}.get(option, option).removeprefix("cuda:"))
        if not 0 <= i <= torch.cuda.device_count():
            raise ValueError(f"no GPU {option}")
        return torch.device("cuda", i)

    def from_a_table(option):
        """right"""
        known = {"cpu": torch.device("cpu"), None: torch.device("cpu")}
        if torch.cuda.is_available():
            for i in reversed(range(torch.cuda.device_count())):
                known |= dict.fromkeys([str(i), f"cuda:{i}", "cuda", None], torch.device("cuda", i))
        if option not in known:
            raise ValueError(f"{option!r} is none of {list(known)}")
        return known[option]


class Tables:
    def __init__(self):
        self.tables, self.built = {}, 0

    def on(self, key, device):
        if key not in self.tables:
            self.tables[key] = torch.arange(1000, device=device)
            self.built += 1
        return self.tables[key]


class table_per_device:
    class asks_a_table(Tables):
        """makes a whole table, though there is one"""

        def table_on(self, device):
            return self.on(torch.arange(1000, device=device).device, device)

    class by_the_object(Tables):
        """table_on(device(type='cuda', index=0)) is not the table that cuda:0 had already"""

        def table_on(self, device):
            return self.on(torch.device(device), device)

    class by_the_text(Tables):
        """table_on(device(type='cuda', index=0)) is not the table that cuda:0 had already"""

        def table_on(self, device):
            return self.on(str(device), device)

    class by_the_type(Tables):
        """the device of table_on('cuda:1') is cuda:0, not cuda:1"""

        def table_on(self, device):
            return self.on(torch.device(device).type, device)

    class text_or_device(Tables):
        """table_on(device(type='cuda', index=0)) is not the table that cuda:0 had already"""

        def table_on(self, device):
            return self.on((str(device).split(":")[0], device.index or 0), device)

    class one_that_moves(Tables):
        """table_on(device(type='cuda', index=0)) is not the table that cuda:0 had already"""

        def table_on(self, device):
            return self.on("all", "cpu").to(device)

    class of_the_class(Tables):
        """`built` of a second object is 0: it has the tables of another object"""

        tables = {}  # noqa: RUF012

        def __init__(self):
            self.built = 0

        def table_on(self, device):
            key = (torch.device(device).type, torch.device(device).index or 0)
            return self.on(key, device)

    class counts_calls(Tables):
        """`built` after table_on(device(type='cuda', index=0)) is 2, not 1"""

        def table_on(self, device):
            self.built += 1
            return self.tables.setdefault(
                (torch.device(device).type, torch.device(device).index or 0),
                torch.arange(1000, device=device),
            )

    class as_floats(Tables):
        """the table on the CPU is float32 [1000] on cpu 0 1 2 3 4 5"""

        def table_on(self, device):
            key = (torch.device(device).type, torch.device(device).index or 0)
            if key not in self.tables:
                self.tables[key] = torch.arange(1000.0, device=device)
                self.built += 1
            return self.tables[key]

    class asks_a_tensor(Tables):
        """right"""

        def table_on(self, device):
            return self.on(torch.empty(0, device=device).device, device)


def fields(text):
    return [[int(field) for field in line.split(",")] for line in text.strip().splitlines()]


class idle_gpu_only:
    def in_texts(text, environ):
        """CUDA_VISIBLE_DEVICES is that whose memory comes first as a text"""
        lines = [line.split(", ") for line in text.splitlines()]
        idle = min(lines, key=lambda line: line[1])[0]
        return environ | {"CUDA_VISIBLE_DEVICES": idle, "CUDA_DEVICE_ORDER": "PCI_BUS_ID"}

    def line_number(text, environ):
        """CUDA_VISIBLE_DEVICES is the number of its line"""
        used = [tuple(gpu[1:]) for gpu in fields(text)]
        idle = str(used.index(min(used)))
        return environ | {"CUDA_VISIBLE_DEVICES": idle, "CUDA_DEVICE_ORDER": "PCI_BUS_ID"}

    def utilisation(text, environ):
        """CUDA_VISIBLE_DEVICES is that of least utilisation"""
        idle = min(fields(text), key=lambda gpu: gpu[2])[0]
        return environ | {"CUDA_VISIBLE_DEVICES": str(idle), "CUDA_DEVICE_ORDER": "PCI_BUS_ID"}

    def most(text, environ):
        """CUDA_VISIBLE_DEVICES is that with most memory in use"""
        idle = sorted(fields(text), key=lambda gpu: gpu[1])[-1][0]
        return environ | {"CUDA_VISIBLE_DEVICES": str(idle), "CUDA_DEVICE_ORDER": "PCI_BUS_ID"}

    def number(text, environ):
        """CUDA_VISIBLE_DEVICES is a number, and an environment holds texts"""
        idle = min(fields(text), key=lambda gpu: gpu[1])[0]
        return environ | {"CUDA_VISIBLE_DEVICES": idle, "CUDA_DEVICE_ORDER": "PCI_BUS_ID"}

    def memory_alone(text, environ):
        """CUDA_VISIBLE_DEVICES is the first of those that use least memory"""
        idle = min(fields(text), key=lambda gpu: gpu[1])[0]
        return environ | {"CUDA_VISIBLE_DEVICES": str(idle), "CUDA_DEVICE_ORDER": "PCI_BUS_ID"}

    def set_before(text, environ):
        """CUDA_VISIBLE_DEVICES is the one that was set before"""
        idle = min(fields(text), key=lambda gpu: gpu[1:])[0]
        return {"CUDA_VISIBLE_DEVICES": str(idle), "CUDA_DEVICE_ORDER": "PCI_BUS_ID"} | environ

    def index_alone(text, environ):
        """what is returned is 7, not a dict"""
        return min(fields(text), key=lambda gpu: gpu[1:])[0]

    def two_alone(text, environ):
        """the program's PATH is None, not '/bin'"""
        idle = min(fields(text), key=lambda gpu: gpu[1:])[0]
        return {"CUDA_VISIBLE_DEVICES": str(idle), "CUDA_DEVICE_ORDER": "PCI_BUS_ID"}

    def without_the_order(text, environ):
        """CUDA_DEVICE_ORDER is 'FASTEST_FIRST', not 'PCI_BUS_ID'"""
        idle = min(fields(text), key=lambda gpu: gpu[1:])[0]
        return environ | {"CUDA_VISIBLE_DEVICES": str(idle)}

    def in_place(text, environ):
        """the environment that you were given, afterwards, is {"""
        idle = min(fields(text), key=lambda gpu: gpu[1:])[0]
        environ.update(CUDA_VISIBLE_DEVICES=str(idle), CUDA_DEVICE_ORDER="PCI_BUS_ID")
        return environ

    def with_an_empty_line(text, environ):
        """not enough values to unpack"""
        gpus = []
        for line in text.split("\n"):
            index, used, busy = line.split(",")
            gpus.append((int(used), int(busy), index))
        return environ | {"CUDA_VISIBLE_DEVICES": min(gpus)[2], "CUDA_DEVICE_ORDER": "PCI_BUS_ID"}

    def of_this_process(text, environ):
        """the program's PATH is"""
        idle = min(fields(text), key=lambda gpu: gpu[1:])[0]
        found = {"CUDA_VISIBLE_DEVICES": str(idle), "CUDA_DEVICE_ORDER": "PCI_BUS_ID"}
        return dict(os.environ) | found

    def by_a_loop(text, environ):
        """right"""
        least = None
        for line in filter(None, text.split("\n")):
            index, used, busy = (part.strip() for part in line.split(","))
            if least is None or (int(used), int(busy)) < least:
                least, best = (int(used), int(busy)), index
        return dict(environ, CUDA_DEVICE_ORDER="PCI_BUS_ID", CUDA_VISIBLE_DEVICES=best)


class move:
    def modules_too(batch, device):
        """a module in the batch is moved, too: it is no tensor"""
        if isinstance(batch, nn.Module):
            return batch.to(device)
        if isinstance(batch, list):
            return [move.modules_too(item, device) for item in batch]
        return move.of_any_mapping(batch, device)

    def one_level(batch, device):
        """a named tuple in a list: what is returned is still on the CPU"""
        if isinstance(batch, torch.Tensor):
            return batch.to(device)
        if isinstance(batch, dict):
            return {k: v.to(device) if hasattr(v, "to") else v for k, v in batch.items()}
        moved = [v.to(device) if hasattr(v, "to") else v for v in batch]
        named = isinstance(batch, tuple) and hasattr(batch, "_fields")
        return type(batch)(*moved) if named else type(batch)(moved)

    def without_a_name(batch, device):
        """a tensor: what is returned is still on the CPU"""
        pytree.tree_map_only(torch.Tensor, lambda x: x.to(device), batch)
        return batch

    def always_lists(batch, device):
        """a tuple of one, to meta: [tensor(..., device='meta', size=(3,), dtype=torch.int16)],"""
        if isinstance(batch, torch.Tensor):
            return batch.to(device)
        if isinstance(batch, dict):
            return {key: move.always_lists(value, device) for key, value in batch.items()}
        if isinstance(batch, (list, tuple)):
            return [move.always_lists(value, device) for value in batch]
        return batch

    def named_as_others(batch, device):
        """Pair.__new__() missing 1 required positional argument"""
        if isinstance(batch, torch.Tensor):
            return batch.to(device)
        if isinstance(batch, dict):
            return {key: move.named_as_others(value, device) for key, value in batch.items()}
        if isinstance(batch, (list, tuple)):
            return type(batch)(move.named_as_others(value, device) for value in batch)
        return batch

    def plain_tuples(batch, device):
        """a named tuple in a list, to meta: [(tensor(..., device='meta'"""
        if isinstance(batch, torch.Tensor):
            return batch.to(device)
        if isinstance(batch, dict):
            return {key: move.plain_tuples(value, device) for key, value in batch.items()}
        if isinstance(batch, tuple):
            return tuple(move.plain_tuples(value, device) for value in batch)
        return [move.plain_tuples(v, device) for v in batch] if isinstance(batch, list) else batch

    def in_place(batch, device):
        """a list: the batch that you were given is changed"""
        items = {dict: getattr(batch, "items", list), list: lambda: enumerate(batch)}
        for key, value in items[type(batch)]() if type(batch) in items else ():
            batch[key] = move.in_place(value, device)
        return batch.to(device) if isinstance(batch, torch.Tensor) else batch

    def everything(batch, device):
        """'int' object is not iterable"""
        if isinstance(batch, torch.Tensor):
            return batch.to(device)
        if isinstance(batch, dict):
            return {key: move.everything(value, device) for key, value in batch.items()}
        return type(batch)(move.everything(value, device) for value in batch)

    def tensors_alone(batch, device):
        """a list, to meta: [tensor(..., device='meta', size=(3,), dtype=torch.int16), None, None"""
        if isinstance(batch, torch.Tensor):
            return batch.to(device)
        if isinstance(batch, (list, tuple)):
            return type(batch)(move.tensors_alone(value, device) for value in batch)

    def as_floats(batch, device):
        """dtype=torch.int16)"""
        return pytree.tree_map_only(torch.Tensor, lambda x: x.float().to(device), batch)

    def of_any_mapping(batch, device):
        """right"""
        match batch:
            case torch.Tensor():
                return torch.empty_like(batch, device=device).copy_(batch)
            case str():
                return batch
            case Mapping():
                return type(batch)((k, move.of_any_mapping(v, device)) for k, v in batch.items())
            case tuple() | list():
                moved = [move.of_any_mapping(value, device) for value in batch]
                return batch._make(moved) if hasattr(batch, "_make") else type(batch)(moved)
        return batch


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

    class trained(Layer):
        """the list of parameters has the table: an optimizer would take it"""

        def __init__(self):
            super().__init__()
            self.table = nn.Parameter(torch.arange(4.0))

    class frozen(Layer):
        """the list of parameters has the table: an optimizer would take it"""

        def __init__(self):
            super().__init__()
            self.table = nn.Parameter(torch.arange(4.0), requires_grad=False)

    class copied_each_time(Layer):
        """if a model that it is a part of moves, table (plain attribute) is still on the CPU"""

        def __init__(self):
            super().__init__()
            self.table = torch.arange(4.0)

        def forward(self, x):
            return self.layer(x + self.table.to(x.device))

    class for_one_device(Layer):
        """if a model that it is a part of moves, table (plain attribute) is still on the CPU"""

        def __init__(self):
            super().__init__()
            usable = torch.accelerator.current_accelerator(check_available=True)
            self.table = torch.arange(4.0, device=usable or "cpu")

        def forward(self, x):
            return self.layer((x.to(self.table.device) + self.table).to(x.device))

    class own_to(Layer):
        """if a model that it is a part of moves, table (plain attribute) is still on the CPU"""

        def __init__(self):
            super().__init__()
            self.table = torch.arange(4.0)

        def to(self, device):
            self.table = self.table.to(device)
            return super().to(device)

    class left_out(Layer):
        """the output on the CPU lacks the positions"""

        def forward(self, x):
            return self.layer(x)

    class cpu_in_forward(Layer):
        """Tensor on device cpu is not on the expected device meta"""

        def forward(self, x):
            return self.layer(x + torch.arange(4.0))

    class too_early(Layer):
        """cannot assign buffer before Module.__init__() call"""

        def __init__(self):
            self.register_buffer("table", torch.arange(4.0), persistent=False)
            super().__init__()

    class made_in_forward(Layer):
        """right"""

        def forward(self, x):
            return self.layer(x + torch.arange(x.shape[-1], device=x.device, dtype=x.dtype))

    class a_buffer_of_its_own(Layer):
        """right"""

        def __init__(self):
            super().__init__()
            self.table = nn.Buffer(torch.arange(4.0), persistent=False)


class left_behind:
    def of_the_state_dict(model):
        """what is returned lacks `mask`, which is not in the state dict"""
        state = model.state_dict(keep_vars=True)
        first = next(model.parameters(), torch.empty(0)).device
        return sorted(name for name, tensor in state.items() if tensor.device != first)

    def parameters_alone(model):
        """what is returned lacks the buffers"""
        first = next(model.parameters(), torch.empty(0)).device
        return sorted(n for n, p in model.named_parameters() if p.device != first)

    def type_alone(model):
        """what is returned lacks what is on another GPU"""
        tensors = dict([*model.named_parameters(), *model.named_buffers()])
        first = next(iter(tensors.values()), torch.empty(0)).device.type
        return sorted(name for name, tensor in tensors.items() if tensor.device.type != first)

    def not_on_a_gpu(model):
        """what is returned is ['0.weight', '1.bias'"""
        tensors = [*model.named_parameters(), *model.named_buffers()]
        return sorted(name for name, tensor in tensors if not tensor.is_cuda)

    def in_order(model):
        """what is returned is ['1.weight', '1.bias', '1.running_mean'"""
        tensors = dict([*model.named_parameters(), *model.named_buffers()])
        first = next(iter(tensors.values()), torch.empty(0)).device
        return [name for name, tensor in tensors.items() if tensor.device != first]

    def of_the_first_buffer(model):
        """what is returned is ['mask'], not []"""
        tensors = [*model.named_parameters(), *model.named_buffers()]
        return sorted(name for name, tensor in tensors if tensor.device != tensors[0][1].device)

    def without_any(model):
        """StopIteration"""
        first = next(model.parameters()).device
        tensors = [*model.named_parameters(), *model.named_buffers()]
        return sorted(name for name, tensor in tensors if tensor.device != first)

    def of_the_modules(model):
        """right"""
        found = []
        for path, module in model.named_modules() if [*model.parameters()] else []:
            for name, tensor in (module._parameters | module._buffers).items():
                if str(tensor.device) != str(next(model.parameters()).device):
                    found += [f"{path}.{name}".lstrip(".")]
        return sorted(found)


def loop(model, batches, device, left=None):
    """The repaired loop, but what is called `left` stays on the CPU."""
    on = dict.fromkeys(["model", "mean", "weight", "total", "x", "y"], device) | {left: "cpu"}
    model.to(on["model"])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
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
    def in_place(model, batches, device):
        """the batches, afterwards,"""
        model.to(device)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        weight = torch.tensor([1.0, 3.0], device=device)
        total = torch.zeros((), device=device)
        for x, y in batches:
            x, y = x.to(device), y.to(device)
            loss = nn.functional.cross_entropy(model(x.sub_(0.5)), y, weight)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            total += loss.detach()
        return total / len(batches)

    def mean_left(model, batches, device):
        """centred = x - mean"""
        return loop(model, batches, device, "mean")

    def weights_left(model, batches, device):
        """loss = loss_fn(output, y)"""
        return loop(model, batches, device, "weight")

    def targets_left(model, batches, device):
        """Tensor on device meta is not on the expected device cpu"""
        return loop(model, batches, device, "y")

    def total_left(model, batches, device):
        """on meta, all runs, but the loss that is returned is on cpu"""
        return loop(model, batches, device, "total")

    def all_on_the_cpu(model, batches, device):
        """on meta, all runs, but the loss that is returned is on cpu"""
        return loop(model, batches, "cpu")

    def a_copy_of_the_model(model, batches, device):
        """the model itself is still on the CPU"""
        return loop(copy.deepcopy(model), batches, device)

    def summed(model, batches, device):
        """the loss on the CPU is the sum of all batches' losses"""
        return loop(model, batches, device) * len(batches)

    def last_one(model, batches, device):
        """the loss on the CPU is the last batch's"""
        loop(model, batches[:-1], device)
        return loop(model, batches[-1:], device)

    def as_a_number(model, batches, device):
        """Tensor.item() cannot be called on meta tensors"""
        return loop(model, batches, device).item()

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
