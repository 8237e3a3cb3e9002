"""Which devices does this machine have, what can each do, and which one is everything on?

In this order: choosing a device by number or name, a table of the devices, the tensors of a model,
its inputs and its optimizer with the device of each, and the line that started CUDA.
"""

from __future__ import annotations

import os
import platform
import re
import sys
import threading
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, fields, is_dataclass
from functools import wraps
from pathlib import Path
from types import FrameType

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.hooks import RemovableHandle

from torchladder.frames import caller, calls_down_to
from torchladder.models import evaluation_mode
from torchladder.tables import Table, in_bytes

ROOT = Path("/")  # of the files in which Linux tells about itself

# --- which devices ------------------------------------------------------------------------------


def gpu_count() -> int:
    """How many GPUs PyTorch can use: CUDA's (or ROCm's), else 1 for Apple's MPS, else 0."""
    if torch.cuda.is_available():
        return torch.cuda.device_count()
    return int(torch.backends.mps.is_available())


def try_gpu(i: int = 0) -> torch.device:
    """The i-th GPU if this machine has one, else the CPU.

    Parameters
    ----------
    i : int
        Index as PyTorch counts, after ``CUDA_VISIBLE_DEVICES`` has renumbered.

    Raises
    ------
    ValueError
        If `i` is negative.
    """
    if i < 0:
        raise ValueError(f"GPUs are counted from 0, so there is no GPU {i}.")
    if i >= gpu_count():
        return torch.device("cpu")
    return torch.device("cuda", i) if torch.cuda.is_available() else torch.device("mps")


def try_all_gpus() -> list[torch.device]:
    """Every GPU of this machine, or ``[device(type='cpu')]`` if it has none."""
    return [try_gpu(i) for i in range(gpu_count())] or [torch.device("cpu")]


def named_device(name: str | torch.device) -> torch.device:
    """The device called `name`, as PyTorch spells it; unlike `try_gpu`, no fallback.

    Raises
    ------
    ValueError
        If it is not a device's name, or this machine has no such device.
    """
    try:
        device = torch.device(name)
    except RuntimeError:
        raise ValueError(
            f"{name!r} is not a device. Write 'cpu', 'cuda', 'cuda:1' or 'mps'."
        ) from None
    if device.type == "cuda":
        if not torch.cuda.is_available():
            raise ValueError(f"No GPU for {name!r}: {why_no_cuda()}")
        count = torch.cuda.device_count()
        if (device.index or 0) >= count:
            there = " and ".join(str(i) for i in range(count)) if count < 3 else f"0 to {count - 1}"
            raise ValueError(
                f"No GPU {device.index} here: this machine shows {count} ({there}). "
                "CUDA_VISIBLE_DEVICES limits and renumbers what PyTorch sees."
            )
    elif device.type == "mps" and not torch.backends.mps.is_available():
        raise ValueError("No 'mps' here: it needs a Mac with an Apple GPU. Use 'cpu'.")
    elif device.type not in ("cpu", "meta", "mps"):
        here = torch.accelerator.current_accelerator(check_available=True)
        count = torch.accelerator.device_count() if here and here.type == device.type else 0
        if (device.index or 0) >= count:
            raise ValueError(f"No {str(device)!r} on this machine. Use 'cpu'.")
    return device


def why_no_cuda() -> str:
    """One sentence on why ``torch.cuda.is_available()`` is False, and what to do."""
    if not torch.backends.cuda.is_built():
        return "this build of torch has no CUDA support; install one that has (pytorch.org)."
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None and not visible.replace("-1", "").strip():
        return f"CUDA_VISIBLE_DEVICES={visible!r} hides every GPU; unset it and start again."
    if not Path("/proc/driver/nvidia").exists():
        return "no NVIDIA driver is loaded on this machine; without a GPU, use the CPU."
    return "torch found no usable GPU; run nvidia-smi to see whether the driver does."


# --- the device table ---------------------------------------------------------------------------


@dataclass(frozen=True)
class Device:
    """What one device is and can do; memory in bytes, `None` where the system does not say."""

    device: torch.device
    name: str
    memory_total: int | None
    memory_free: int | None
    capability: str | None
    bf16: str
    peers: tuple[torch.device, ...] = ()


class DeviceTable(list[Device]):
    """A list of `Device` that prints as a table."""

    def _table(self) -> Table:
        columns = {
            "device": [d.device for d in self],
            "name": [d.name for d in self],
            "memory": [in_bytes(d.memory_total) for d in self],
            "free": [in_bytes(d.memory_free) for d in self],
            "capability": [d.capability or "–" for d in self],
            "bf16": [d.bf16 for d in self],
        }
        if any(d.peers for d in self):
            columns["reaches directly"] = [", ".join(map(str, d.peers)) or "–" for d in self]
        return Table(list(columns), zip(*columns.values(), strict=True))

    def __repr__(self) -> str:
        return repr(self._table())

    def _repr_html_(self) -> str:
        return self._table()._repr_html_()


def device_table() -> DeviceTable:
    """Every device of this machine, the CPU first.

    Asking a GPU for its free memory starts CUDA on it, which takes a few hundred MB there.
    ``bf16`` is *native* where the hardware computes in bfloat16, *emulated* where PyTorch only
    converts back and forth (slower than float16: a T4, for example), else *no*.
    """
    table = DeviceTable([_cpu()])
    if torch.cuda.is_available():
        table += [_cuda(i) for i in range(torch.cuda.device_count())]
    elif torch.backends.mps.is_available():
        table.append(_mps())
    return table


def cpu_name() -> str:
    """The CPU's model, as far as the operating system tells."""
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists() and (found := re.search(r"model name\s*: (.+)", cpuinfo.read_text())):
        return found[1].strip()
    return platform.processor() or platform.machine()


def cpu_memory() -> tuple[int | None, int | None]:
    """Total and free bytes of the CPU's memory; `None` where the system does not say.

    On Linux, memory that only keeps copies of files is free, and both numbers heed the limits of
    control groups: a container's, or a Slurm job's.
    """
    meminfo = ROOT / "proc/meminfo"
    if not meminfo.exists():
        if not hasattr(os, "sysconf"):  # Windows
            return None, None
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"), None
    kib = dict(re.findall(r"(\w+): +(\d+) kB", meminfo.read_text()))
    total, free = (1024 * int(kib[name]) for name in ("MemTotal", "MemAvailable"))
    for limit, left in _memory_limits():
        total, free = min(total, limit), min(free, left)
    return total, free


def _memory_limits() -> Iterator[tuple[int, int]]:
    """The limit of each control group around this process, and what is left of it, in bytes."""
    names = [("memory.max", "memory.current")]  # of version 2, then of version 1
    names += [("memory.limit_in_bytes", "memory.usage_in_bytes")]
    groups = ROOT / "proc/self/cgroup"
    for line in groups.read_text().splitlines() if groups.exists() else []:
        _, controllers, path = line.split(":", 2)
        if controllers not in ("", "memory"):
            continue
        top = ROOT / "sys/fs/cgroup" / controllers
        group = top / path.strip("/")
        for folder in [group, *(g for g in group.parents if g.is_relative_to(top))]:
            for limit, used in names:
                with suppress(OSError, ValueError):  # no such file or folder; no limit: "max"
                    limit, used = (int((folder / name).read_text()) for name in (limit, used))
                    cached = re.findall(
                        r"inactive_file (\d+)", (folder / "memory.stat").read_text()
                    )
                    yield limit, limit - used + max(map(int, cached))


def _cpu() -> Device:
    native = torch.backends.mkldnn.is_available() and torch.ops.mkldnn._is_mkldnn_bf16_supported()
    name = f"{cpu_name()} ({os.cpu_count()} cores)"
    bf16 = "native" if native else "emulated"
    return Device(torch.device("cpu"), name, *cpu_memory(), None, bf16)


def _cuda(i: int) -> Device:
    properties = torch.cuda.get_device_properties(i)
    capability = f"{properties.major}.{properties.minor}"
    free, total = torch.cuda.mem_get_info(i)
    with torch.cuda.device(i):
        native = torch.cuda.is_bf16_supported(including_emulation=False)
        emulated = torch.cuda.is_bf16_supported()
    bf16 = "native" if native else "emulated" if emulated else "no"
    others = [j for j in range(torch.cuda.device_count()) if j != i]
    peers = [torch.device("cuda", j) for j in others if torch.cuda.can_device_access_peer(i, j)]
    device = torch.device("cuda", i)
    return Device(device, properties.name, total, free, capability, bf16, tuple(peers))


def _mps() -> Device:
    total = torch.mps.recommended_max_memory()
    free = total - torch.mps.driver_allocated_memory()
    bf16 = "native" if torch.backends.mps.is_macos_or_newer(14, 0) else "no"
    return Device(torch.device("mps"), "Apple GPU", total, free, None, bf16)


# --- where is everything? -----------------------------------------------------------------------


def named_tensors(*things: object) -> Iterator[tuple[str, Tensor]]:
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
            for name, tensor in _nested(label, value):
                if id(tensor) not in known:
                    yield name, tensor


def _nested(name: str, value: object, around: tuple = ()) -> Iterator[tuple[str, Tensor]]:
    """The tensors in `value`; `around` are the containers that it is in, which it may hold."""
    if isinstance(value, Tensor):
        yield name, value
    elif any(value is container for container in around):
        return
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield from _nested(f"{name}[{key!r}]", item, (*around, value))
    elif isinstance(value, list | tuple):
        for i, item in enumerate(value):
            yield from _nested(f"{name}[{i}]", item, (*around, value))
    elif is_dataclass(value) and not isinstance(value, type):
        for field in fields(value):
            yield from _nested(
                f"{name}.{field.name}", getattr(value, field.name, None), (*around, value)
            )
    elif isinstance(value, nn.Module):  # in a plain list, say, where `to` does not look
        for key, tensor in [*value.named_parameters(), *value.named_buffers()]:
            yield f"{name}.{key}", tensor


class Placement:
    """Which tensor is on which device; see `where_is`.

    Attributes
    ----------
    devices : dict[torch.device, list[str]]
        Names of the tensors on each device, the device with most bytes first.
    odd : dict[str, torch.device]
        The tensors that are not on that first device and should be.
    """

    def __init__(self, tensors: Iterable[tuple[str, Tensor]], counters: Iterable[int] = ()) -> None:
        names: dict[torch.device, list[str]] = {}
        size: Counter[torch.device] = Counter()
        counters, self._counters = set(counters), []
        for name, tensor in tensors:
            names.setdefault(tensor.device, []).append(name)
            parts = [tensor]
            if tensor.layout is torch.sparse_coo:
                parts = [tensor._indices(), tensor._values()]
            size[tensor.device] += sum(part.nbytes for part in parts)
            if id(tensor) in counters:
                self._counters.append(name)
        self._bytes = size
        self.devices = {device: names[device] for device, _ in size.most_common()}
        others = list(self.devices)[1:]
        odd = {name: device for device in others for name in self.devices[device]}
        self.odd = {name: device for name, device in odd.items() if name not in self._counters}

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
        if self._counters:
            lines.append(
                f"the optimizer's step counters, which belong on cpu: {len(self._counters)}"
            )
        if self.odd:
            lines.append(f"not on {first}:")
        lines += [f"  {name} is on {device}" for name, device in list(self.odd.items())[:10]]
        if len(self.odd) > 10:
            lines.append(f"  ... and {len(self.odd) - 10} more")
        return "\n".join(lines).replace(" 1 tensors", " 1 tensor")


def where_is(*things: object) -> Placement:
    """Every device found in models, optimizers and inputs, and the odd ones out by name.

    An input is a tensor, or a list, tuple, mapping or dataclass that holds tensors at any depth.
    Adam and others count their steps on the CPU, unless they are fused or capturable; those
    counters are not odd.

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
    optimizers = [thing for thing in things if isinstance(thing, torch.optim.Optimizer)]
    counters = [id(step) for optimizer in optimizers for step in _cpu_counters(optimizer)]
    return Placement(named_tensors(*things), counters=counters)


def _cpu_counters(optimizer: torch.optim.Optimizer) -> Iterator[Tensor]:
    for group in optimizer.param_groups:
        if not (group.get("fused") or group.get("capturable")):
            for parameter in group["params"]:
                step = optimizer.state.get(parameter, {}).get("step")
                if isinstance(step, Tensor) and step.device.type == "cpu":
                    yield step


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
    module's own mode is put back. Compiled modules run uncompiled. Without a GPU, move a copy of
    the model and its input to ``"meta"``: what ``to`` leaves behind is then on the CPU.

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
    tensors = named_tensors(model, *inputs, *keywords.values())
    # Some operations cannot run under a dispatch mode: flex_attention, for example.
    check = _MetaCheck() if any(t.is_meta for _, t in tensors) else nullcontext()
    # A compiled module takes no torch-function mode with state of its own. Only where something is
    # compiled has torch._dynamo been imported, and it takes seconds to import.
    compiled = "torch._dynamo" in sys.modules
    hooks = [hook for name, module in model.named_modules() for hook in watch.hooks(name, module)]
    try:
        with (
            torch.compiler.set_stance("force_eager") if compiled else nullcontext(),
            evaluation_mode(model),
            torch.no_grad(),
            check,
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
        self.names = {id(tensor): name for name, tensor in named_tensors(model)}
        self.modules: list[tuple[str, nn.Module]] = []  # being called, the innermost last
        self.found: Mismatch | None = None

    def hooks(self, name: str, module: nn.Module) -> list[RemovableHandle]:
        def enter(*_) -> None:
            self.modules.append((name, module))

        def leave(*_) -> None:
            self.modules.pop()

        after = module.register_forward_hook(leave, always_call=True)
        return [module.register_forward_pre_hook(enter), after]

    def __torch_function__(self, function, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        try:
            return function(*args, **kwargs)
        except Exception as error:
            tensors = {}
            for label, value in [*enumerate(args), *kwargs.items()]:
                for name, tensor in _nested(f"argument {label}", value):
                    tensors[self.names.get(id(tensor), name)] = tensor.device
            if len(set(tensors.values())) > 1:
                path, module = self.modules[-1]
                operation = getattr(function, "__name__", str(function)).strip("_")
                self.found = Mismatch(path, type(module).__name__, operation, tensors, str(error))
            raise


class _MetaCheck(TorchDispatchMode):
    """Raises where tensors on meta meet others, in the operations in which PyTorch does not.

    A convolution, a matrix product or an embedding of meta and CPU tensors runs without an error.
    Between a GPU and the CPU it would not, and meta stands for a GPU here.
    """

    supports_higher_order_operators = True
    # These take an index or the lengths of sequences from the CPU, or copy across devices.
    MIXING = frozenset(
        ["index", "index_put", "index_put_", "_unsafe_index", "copy", "copy_", "_ctc_loss",
         "_pack_padded_sequence"]
    )  # fmt: skip

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if getattr(function, "overloadpacket", function).__name__ not in self.MIXING:
            tensors = [tensor for _, tensor in _nested("", [*args, *kwargs.values()])]
            devices = {str(t.device): None for t in tensors if t.dim() or t.device.type != "cpu"}
            if len(devices) > 1 and "meta" in devices:
                raise RuntimeError(
                    "Expected all tensors to be on the same device, but found at least two "
                    f"devices, {' and '.join(devices)}!"
                )
        return function(*args, **kwargs)


# --- which line started CUDA? -------------------------------------------------------------------

# The calls after which PyTorch refuses CUDA in a forked process, each looked up by this name
# whenever it is needed. `_lazy_init` itself has copies: torch.cuda.memory and torch.cuda.random
# import it by name, as may any library, and C++ (`tensor.cuda()`, `torch.ones(2, device="cuda")`)
# asks torch.cuda for it. All run the same function, which asks `_is_in_bad_fork` right before it
# starts CUDA, in every build. Not covered: what reaches the driver without any of these.
_SPOIL_FORKS = (
    (torch.cuda, "_is_in_bad_fork", "started"),
    (torch._C, "_cuda_getDeviceCount", "asked"),
    (torch._C, "_cuda_getArchFlags", "asked"),
)

BEFORE = """\
Before the block, CUDA had been started or asked about the GPUs: a forked process cannot use it.
Restart the kernel (or the script), and put the earlier lines into the block too."""
ASKED = """\
This asked CUDA about the GPUs; a process forked later cannot use CUDA:
{calls}
With PYTORCH_NVML_BASED_CUDA_CHECK=1 in the environment by then, torch.cuda.is_available() asks
NVIDIA's NVML instead, and leaves forks alone."""
STARTED = """\
This started CUDA; a process forked later cannot use it:
{calls}"""
TRIED = """\
This tried to start CUDA:
{calls}"""
NOTHING = "As far as PyTorch knows, nothing in the block started CUDA or asked about the GPUs."

_watching: list[tuple[CudaStart, FrameType | None]] = []  # one for each block that is running
_originals: list[tuple[object, str, Callable]] = []  # to be put back when the last block is left
_lock = threading.Lock()


class CudaStart:
    """What started CUDA in a block; prints as an answer. See `who_starts_cuda`.

    Attributes
    ----------
    before : bool
        Whether a process forked before the block could not have used CUDA.
    asked : list[traceback.FrameSummary]
        The calls, the outermost first, down to the first that asked CUDA about the GPUs without
        starting it; empty if none did.
    started : list[traceback.FrameSummary]
        The same for the first that started CUDA, or tried to.
    """

    def __init__(self, before: bool) -> None:
        self.before = before
        self.asked: list[traceback.FrameSummary] = []
        self.started: list[traceback.FrameSummary] = []
        self._initialized = False

    def __repr__(self) -> str:
        parts = [
            (self.before, BEFORE, []),
            (self.asked, ASKED, self.asked),
            (self.started, STARTED if self._initialized else TRIED, self.started),
        ]
        texts = [
            text.format(calls="".join(traceback.StackSummary.from_list(calls).format()).rstrip())
            for found, text, calls in parts
            if found
        ]
        return "\n\n".join(texts) or NOTHING


@contextmanager
def who_starts_cuda() -> Iterator[CudaStart]:
    """Find the import or line in a ``with`` block after which a forked process cannot use CUDA.

    That process fails with "Cannot re-initialize CUDA in forked subprocess". Two kinds of call lead
    to it. One starts CUDA: ``model.cuda()``, for example. The other only asks about the GPUs, as
    ``torch.cuda.is_available()`` does; ``torch.cuda.is_initialized()`` is still False after it.
    Many libraries ask when they are imported.

    The call may come from another thread, and the block may end in an exception. Where there is no
    GPU, the attempt to start CUDA is found. Nothing is started on entry, but a process is forked
    that ends at once: only there does PyTorch tell what happened before the block.

    What starts CUDA's driver from C++ alone is not found: ``pin_memory``, ``torch.cuda.Stream()``,
    the first ``backward()`` of a CUDA build even on the CPU, or another library, such as CuPy.
    PyTorch does not note it either, so that the forked process fails with other words, if it does.

    Yields
    ------
    CudaStart
        To be printed after the block. For each kind it holds the first such call, with those that
        led to it: from the line in the block down through libraries. The standard library and most
        of PyTorch are left out. Cells of a notebook have their labels.

    Examples
    --------
    On a machine without a GPU, CUDA cannot start, and the line is found all the same:

    >>> from contextlib import suppress
    >>> def weights():
    ...     return torch.zeros(3, device="cuda")
    >>> with who_starts_cuda() as found, suppress(AssertionError, RuntimeError):
    ...     model = weights()
    >>> [call.line for call in found.started]
    ['model = weights()', 'return torch.zeros(3, device="cuda")']
    """
    before = torch.cuda.is_initialized() or _forks_are_spoiled()
    found = CudaStart(before)
    watch = (found, caller(sys._getframe(1)))
    try:
        with _lock:
            _watching.append(watch)
            if not _originals:
                _watch_calls()
        yield found
    finally:
        with _lock:
            _watching[:] = [other for other in _watching if other is not watch]
            while _originals and not _watching:
                setattr(*_originals.pop())
        found._initialized = torch.cuda.is_initialized()


def _watch_calls() -> None:
    for owner, name, kind in _SPOIL_FORKS:
        if hasattr(owner, name):  # a build without CUDA has only the first
            _originals.append((owner, name, getattr(owner, name)))
            setattr(owner, name, _noting(getattr(owner, name), kind))


def _noting(function: Callable, kind: str) -> Callable:
    @wraps(function)
    def noted(*args, **kwargs):
        call = sys._getframe(1)
        # `manual_seed` and others ask `_is_in_bad_fork` too, and start nothing.
        if kind == "asked" or call.f_code.co_name == "_lazy_init":
            for found, block in list(_watching):
                if not found.started and not getattr(found, kind):
                    setattr(found, kind, calls_down_to(call, block))
        return function(*args, **kwargs)

    return noted


def _forks_are_spoiled() -> bool:
    """Whether a process forked now could not use CUDA: PyTorch tells it only in that process."""
    if not torch.backends.cuda.is_built() or not hasattr(os, "fork"):
        return False
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # Python 3.12 warns of forks where there are threads
            process = os.fork()
        if not process:
            spoiled = False
            try:
                spoiled = torch.cuda._is_in_bad_fork()
            finally:
                os._exit(spoiled)
        return os.waitstatus_to_exitcode(os.waitpid(process, 0)[1]) == 1
    except OSError:  # no process to spare, or something else waited for it: then nobody knows
        return False
