"""Where is everything, where do two devices meet, and who holds the memory?"""

import gc
import re
import sys
import threading
import traceback
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from contextlib import nullcontext, suppress
from dataclasses import dataclass, fields, is_dataclass
from types import FrameType, ModuleType

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.overrides import TorchFunctionMode
from torch.utils.hooks import RemovableHandle

from torchclinic.modules import evaluation_mode
from torchclinic.tables import in_bytes

COUNTER = re.compile(r"\.state\[\d+\]\['step'\]$")  # of an optimizer's steps, by its name here


def _named_tensors(*things: object) -> Iterator[tuple[str, Tensor]]:
    """Every tensor in models, optimizers and (nested) inputs, with a name a reader can find.

    A model gives its parameters, its buffers and, marked as such, tensors kept as plain
    attributes: those are what ``model.to(device)`` leaves behind.
    """
    inputs = 0
    for thing in things:
        if isinstance(thing, nn.Module):
            yield from _of_model(thing)
        elif isinstance(thing, torch.optim.Optimizer):
            for i, state in enumerate(thing.state.values()):
                yield from _nested(f"{type(thing).__name__}.state[{i}]", state)
        else:
            yield from _nested(f"input {inputs}", thing)
            inputs += 1


def _of_model(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    registered = [*model.named_parameters(), *model.named_buffers()]
    yield from registered
    # Most attributes lead to registered tensors again: `_parameters`, say, or an RNN's own list.
    known = {id(tensor) for _, tensor in registered}
    for path, module in model.named_modules():
        for key, value in vars(module).items():
            label = f"{path}.{key} (plain attribute)".removeprefix(".")
            yield from (pair for pair in _nested(label, value) if id(pair[1]) not in known)


def _nested(name: str, value: object, around: tuple = ()) -> Iterator[tuple[str, Tensor]]:
    """The tensors in `value`; `around` are the containers that it is in, which it may hold."""
    if isinstance(value, Tensor):
        yield name, value
    elif not any(value is container for container in around):
        for step, item in _items(value):
            yield from _nested(name + step, item, (*around, value))


def _items(value: object) -> list[tuple[str, object]]:
    """What a container holds, and how to get there."""
    if isinstance(value, Mapping):
        return [(f"[{key!r}]", item) for key, item in value.items()]
    if isinstance(value, list | tuple):
        return [(f"[{i}]", item) for i, item in enumerate(value)]
    if isinstance(value, nn.Module):  # in a plain list, say, where `to` does not look
        return [(f".{key}", t) for key, t in [*value.named_parameters(), *value.named_buffers()]]
    if is_dataclass(value) and not isinstance(value, type):
        return [(f".{field.name}", getattr(value, field.name, None)) for field in fields(value)]
    return []


def _bytes(tensor: Tensor) -> int:
    sparse = tensor.layout is torch.sparse_coo
    parts = [tensor._indices(), tensor._values()] if sparse else [tensor]
    return sum(part.nbytes for part in parts)


class Placement:
    """Which tensor is on which device; see `where_is`.

    Attributes
    ----------
    devices : dict[torch.device, list[str]]
        Names of the tensors on each device: first the device with most bytes of the first model's
        parameters, or with most bytes of all if there is no such model.
    odd : dict[str, torch.device]
        The tensors that are not on that first device and should be.
    """

    def __init__(
        self, tensors: Iterable[tuple[str, Tensor]], home: torch.device | None = None
    ) -> None:
        names: dict[torch.device, list[str]] = {}
        self._bytes, self._counters = Counter(), []
        for name, tensor in tensors:
            names.setdefault(tensor.device, []).append(name)
            self._bytes[tensor.device] += _bytes(tensor)
            if COUNTER.search(name) and tensor.device.type == "cpu":
                self._counters.append(name)
        ordered = sorted(self._bytes, key=lambda device: (device != home, -self._bytes[device]))
        self.devices = {device: names[device] for device in ordered}
        others = [(d, name) for d in list(self.devices)[1:] for name in self.devices[d]]
        self.odd = {name: device for device, name in others if name not in self._counters}

    def __repr__(self) -> str:
        if not self.devices:
            return "no tensors found"
        first, *others = self.devices
        if not others:
            count = len(self.devices[first])
            return f"all {count} tensors on {first} ({in_bytes(self._bytes[first])})"
        lines = [
            f"{device}: {len(names)} tensors, {in_bytes(self._bytes[device])}"
            for device, names in self.devices.items()
        ]
        if count := len(self._counters):
            lines.append(f"the optimizer's step counters, which belong on cpu: {count}")
        if self.odd:
            lines.append(f"not on {first}:")
        lines += [f"  {name} is on {device}" for name, device in list(self.odd.items())[:10]]
        if len(self.odd) > 10:
            lines.append(f"  ... and {len(self.odd) - 10} more")
        return "\n".join(lines).replace(" 1 tensors", " 1 tensor")


def where_is(*things: object) -> Placement:
    """Every device found in models, optimizers and inputs, and the odd ones out by name.

    An input is a tensor, or a list, tuple, mapping or dataclass that holds tensors at any depth.
    Odd is what is not where the first model has most of its parameters; without a model, what is
    not where most bytes are. Adam and others count their steps on the CPU; those are not odd.

    Examples
    --------
    >>> model = nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 2, device="meta"))
    >>> where_is(model, torch.zeros(8, 4))
    cpu: 3 tensors, 188 B
    meta: 2 tensors, 32 B
    not on cpu:
      1.weight is on meta
      1.bias is on meta
    """
    held = Counter()
    for thing in things:
        if isinstance(thing, nn.Module) and not held:
            for weight in thing.parameters():
                held[weight.device] += _bytes(weight)
    return Placement(_named_tensors(*things), max(held, key=held.__getitem__, default=None))


@dataclass(frozen=True)
class Mismatch:
    """The first place in a forward pass where two devices meet; see `find_mismatch`."""

    module: str
    module_type: str
    operation: str
    tensors: dict[str, torch.device]
    error: str

    def __repr__(self) -> str:
        where = f"{self.module!r} ({self.module_type})" if self.module else self.module_type
        found = "\n".join(f"  {name} is on {device}" for name, device in self.tensors.items())
        return f"{self.operation} in {where} mixes devices:\n{found}"


def find_mismatch(model: nn.Module, *inputs: object, **keywords: object) -> Mismatch | None:
    """Run ``model(*inputs, **keywords)`` and name the first module in which two devices meet.

    PyTorch's own error names the two devices but neither the layer nor the tensors. The pass runs
    without gradients and in evaluation mode (so running statistics stay as they were); every
    module's own mode is put back. Compiled modules run uncompiled. Without a GPU, simulate one:
    :func:`torchclinic.simulated_gpus.simulate_gpus`. (On ``"meta"``, PyTorch lets some mixtures
    pass.)

    None means that the pass went through. An error that has another reason is raised as it is.

    Examples
    --------
    >>> model = nn.Sequential(nn.Linear(4, 3), nn.ReLU(), nn.Linear(3, 2, device="meta"))
    >>> find_mismatch(model, torch.zeros(8, 4))
    linear in '2' (Linear) mixes devices:
      argument 0 is on cpu
      2.weight is on meta
      2.bias is on meta
    """
    watch = _DeviceWatch(model)
    # A compiled module takes no torch-function mode with state of its own. Only where something is
    # compiled has torch._dynamo been imported, and it takes seconds to import.
    compiled = "torch._dynamo" in sys.modules
    hooks = [hook for name, module in model.named_modules() for hook in watch.hooks(name, module)]
    try:
        with (
            torch.compiler.set_stance("force_eager") if compiled else nullcontext(),
            evaluation_mode(model),
            torch.no_grad(),
            watch,
        ):
            model(*inputs, **keywords)
        return None
    except Exception:
        if watch.found is None:
            raise
        return watch.found
    finally:
        for hook in hooks:
            hook.remove()


class _DeviceWatch(TorchFunctionMode):
    """Remembers the operation that failed on tensors of more than one device.

    The operation runs first, because PyTorch allows some mixtures: a 0-dim CPU tensor or a CPU
    index with a GPU tensor, for example.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.names = {id(tensor): name for name, tensor in _named_tensors(model)}
        self.modules: list[tuple[str, nn.Module]] = []  # being called, the innermost last
        self.found: Mismatch | None = None

    def hooks(self, name: str, module: nn.Module) -> list[RemovableHandle]:
        def enter(*_) -> None:
            self.modules.append((name, module))

        def leave(*_) -> None:
            self.modules.pop()

        after = module.register_forward_hook(leave, always_call=True)
        return [module.register_forward_pre_hook(enter), after]

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        try:
            return func(*args, **kwargs)
        except Exception as error:
            tensors = {}
            for label, value in [*enumerate(args), *kwargs.items()]:
                for name, tensor in _nested(f"argument {label}", value):
                    tensors[self.names.get(id(tensor), name)] = tensor.device
            if len(set(tensors.values())) > 1:
                path, module = self.modules[-1]
                operation = getattr(func, "__name__", str(func)).strip("_")
                self.found = Mismatch(path, type(module).__name__, operation, tensors, str(error))
            raise


# --- who holds the memory? ----------------------------------------------------------------------

STEPS, HOLDERS = 6, 50  # from a tensor to a name, and how many objects are followed in each
REGISTERED = re.compile(r"\._(?:parameters|buffers|modules)\['(\w+)'\]")  # attributes, to a reader


@dataclass(frozen=True)
class Held:
    """Tensors alike that Python holds; see `held_tensors`.

    Attributes
    ----------
    count, bytes : int
        How many they are, and how much memory: a view holds all of what it is a view of.
    kind : str
        Data type, shape and device, and the operation whose graph they hold, if they hold one.
    holder : str
        How one of them is reached: from a variable or a module, else from an object of a type.
    """

    count: int
    bytes: int
    kind: str
    holder: str

    def __repr__(self) -> str:
        return f"{in_bytes(self.bytes)} in {self.count} x {self.kind}: {self.holder}"


def held_tensors(most: int = 10, like: str = "") -> list[Held]:
    """The tensors that Python holds in any thread, alike ones as a group, the largest groups first.

    Call it twice, some steps or requests apart: what has grown is the leak. `like` narrows the
    list to kinds with these words: ``"graph"``, ``"cuda:1"``, a shape. What a graph has saved is
    held by C++ and not listed; the tensors that hold a graph are.

    Examples
    --------
    >>> weight = torch.ones(100_000, requires_grad=True)
    >>> losses = [weight * 2 for _ in range(100)]
    >>> held_tensors(most=1)
    [40.0 MB in 100 x float32 [100000] on cpu with a graph of MulBackward0: losses[...] in <module>]
    """
    gc.collect()
    groups: dict[str, list[Tensor]] = {}
    for tensor in gc.get_objects():
        if issubclass(type(tensor), Tensor):  # isinstance would ask a proxy, which may do anything
            groups.setdefault(_kind(tensor), []).append(tensor)
    del tensor
    groups = {kind: tensors for kind, tensors in groups.items() if like in kind}
    size = {kind: _memory(tensors) for kind, tensors in groups.items()}
    others = sys._current_frames()
    del others[threading.get_ident()]
    tops = [sys._getframe(1), *others.values()]  # the caller's names before other threads'
    frames = [frame for top in tops for frame, _ in traceback.walk_stack(top)]
    held = []
    for kind in sorted(groups, key=size.__getitem__, reverse=True)[:most]:
        tensors = groups[kind]
        held.append(Held(len(tensors), size[kind], kind, _holder(tensors, frames)))
    return held


def _kind(tensor: Tensor) -> str:
    dtype, graph = str(tensor.dtype).removeprefix("torch."), tensor.grad_fn
    shape = "of no shape yet" if is_lazy(tensor) else list(tensor.shape)
    text = f"{dtype} {shape} on {tensor.device}"
    return f"{text} with a graph of {graph.name()}" if graph else text


def _memory(tensors: list[Tensor]) -> int:
    storages = {}
    for tensor in tensors:
        with suppress(RuntimeError, ValueError):  # sparse, lazy ones, or subclasses, have none
            storage = tensor.untyped_storage()
            storages[storage.data_ptr()] = storage.nbytes()
    storages.pop(0, None)  # on meta
    return sum(storages.values())


def _holder(tensors: list[Tensor], frames: list[FrameType]) -> str:
    """How one of the `tensors` is reached: breadth first, from holder to holder."""
    things = tensors[-HOLDERS:]
    paths = {id(thing): "" for thing in things}
    for _ in range(STEPS):
        by_id, found = {id(thing): thing for thing in things}, []
        for frame in frames:
            for name, value in list(frame.f_locals.items()):
                if id(value) in by_id:
                    path = REGISTERED.sub(r".\1", paths[id(value)])
                    return f"{name}{path} in {frame.f_code.co_name}"
        our_ids = {id(ours) for ours in (tensors, things, by_id, *frames)}
        for holder in gc.get_referrers(*things):
            held = next(filter(by_id.__contains__, map(id, gc.get_referents(holder))), None)
            if held is None or id(holder) in our_ids or id(holder) in paths:
                continue
            paths[id(holder)] = _step(holder, by_id[held], paths[held])
            if isinstance(holder, ModuleType | type):
                return f"{holder.__name__}{paths[id(holder)]}"
            found.append(holder)
        if not found:
            break
        things = found[:HOLDERS]
    if isinstance(things[0], Tensor):
        return "C++, as a parameter's grad, a view's base or in a graph"
    return type(things[0]).__name__ + REGISTERED.sub(r".\1", paths[id(things[0])])


def _step(holder: object, thing: object, path: str) -> str:
    """The way from `holder` to `thing`, and on along `path`."""
    if isinstance(holder, list | tuple | set):
        return f"[...]{path}"
    names = holder if isinstance(holder, dict) else getattr(holder, "__dict__", {})
    name = next((key for key, value in list(names.items()) if value is thing), None)
    if names is holder:
        return f"[{name!r}]{path}" if isinstance(name, str | int) else f"[...]{path}"
    if isinstance(holder, type) or names is thing:
        return re.sub(r"^\['(\w+)'\]", r".\1", path)  # an attribute, as the reader writes it
    return f".{name}{path}" if name else path
