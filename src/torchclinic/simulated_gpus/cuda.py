"""`torch.cuda` and `torch.accelerator`: PyTorch's own Python, over answers in place of a driver."""

import os
import sys
import time
import types
import warnings
from typing import Any

import torch
from torch.profiler import ProfilerActivity

from torchclinic.simulated_gpus.placing import (
    ALL,
    GPUS,
    KEPT,
    checked,
    current,
    device_at,
    generators,
    here,
)

SEED = 67280421310721  # CUDA's own before anybody sets one
WITHOUT_EFFECT = ["_cuda_ipc_collect", "_cuda_sleep", "_cuda_record_memory_history"]
WITHOUT_EFFECT += ["_cuda_resetAccumulatedMemoryStats", "_accelerator_resetAccumulatedStats"]
WITHOUT_EFFECT += ["_cuda_emptyHostCache", "_accelerator_emptyHostCache"]
COUNTS = ("num_alloc_retries", "num_ooms", "num_sync_all_streams", "num_device_alloc")
COUNTS += ("num_device_free", "max_split_size")
settled: list[bool] = []  # whether CUDA has been used
SLOW = "These GPUs are simulated: the time is the CPU's, and says nothing about a GPU."


def nothing(*_: Any, **__: Any) -> None:
    pass


def wait(*_: Any) -> None:
    warnings.warn(SLOW, stacklevel=3)  # whoever waits for a GPU mostly holds a watch


def wait_unless_pytorch(*_: Any) -> None:
    caller = sys._getframe(1).f_globals.get("__name__", "")
    if not caller.startswith("torch."):  # which waits to save
        wait()


class Stream:
    """Everything in it has happened when the next line runs."""

    device_type = 1  # CUDA's

    def __init__(self, device=None, priority=0, stream_id=None, device_index=None, **_):
        if device_index is None:
            device_index = torch.cuda._utils._get_device_index(device, optional=True)
        self.device_index, self.priority = checked(device_index), priority
        self.stream_id = self.cuda_stream = id(self) if stream_id is None else stream_id
        self.device = device_at(device_index)

    def __eq__(self, other):
        return isinstance(other, Stream) and hash(self) == hash(other)

    def __hash__(self):
        return hash((self.device_index, self.stream_id))

    def __enter__(self):
        self._inside = torch.cuda.stream(self)
        self._inside.__enter__()
        return self

    def __exit__(self, *error):
        self._inside.__exit__(*error)

    def record_event(self, event=None):
        event = event or Event()
        event.record(self)
        return event

    def query(self):
        return True

    def is_capturing(self):
        return False

    wait_event = wait_stream = nothing
    synchronize = wait_unless_pytorch


class Event:
    """The CPU's time when it was recorded."""

    def __init__(self, device=None, enable_timing=False, **_):
        self.enable_timing, self.recorded, self.device = enable_timing, None, None

    def record(self, stream=None):
        self.recorded = time.perf_counter()
        self.device = (stream or torch.cuda.current_stream()).device

    def query(self):
        return True

    wait = nothing
    synchronize = wait_unless_pytorch

    def elapsed_time(self, end_event):
        if not (self.enable_timing and end_event.enable_timing):
            raise ValueError("Both events must be created with argument 'enable_timing=True'.")
        warnings.warn(SLOW, stacklevel=2)
        return 1000 * (end_event.recorded - self.recorded)


class Generator(torch.Generator):
    """A generator that can be a GPU's: its state is a seed and how much has been drawn."""

    def __new__(cls, device="cpu"):
        device = torch.device(device)
        made = super().__new__(cls, "cpu" if device.type == "cuda" else device)
        if device.type == "cuda":
            index = current() if device.index is None else device.index
            made.place, made.seed_and_offset = torch.device("cuda", checked(index)), [SEED, 0]
            generators[made._cdata] = made
        return made

    def __init__(self, device="cpu"):
        pass

    @property
    def device(self):
        return getattr(self, "place", None) or super().device

    def manual_seed(self, seed):
        if not hasattr(self, "place"):
            return super().manual_seed(seed)
        self.seed_and_offset = [int(seed), 0]
        return self

    def seed(self):
        self.manual_seed(new := super().seed())
        return new

    def initial_seed(self):
        return self.seed_and_offset[0] if hasattr(self, "place") else super().initial_seed()

    def get_offset(self):
        return self.seed_and_offset[1]

    def set_offset(self, offset):
        self.seed_and_offset[1] = offset

    def get_state(self):
        if not hasattr(self, "place"):
            return super().get_state()
        return torch.tensor(self.seed_and_offset, device="cpu").view(torch.uint8)

    def set_state(self, state):
        if not hasattr(self, "place"):
            return super().set_state(state)
        if state.numel() != 16:
            raise RuntimeError("RNG state is wrong size")
        self.seed_and_offset = state.view(torch.int64).tolist()
        return self


CHIP = {"multi_processor_count": 40, "warp_size": 32, "max_threads_per_multi_processor": 1024}
CHIP |= {"regs_per_multiprocessor": 65536, "shared_memory_per_block": 49152}
CHIP |= {"L2_cache_size": 4 << 20, "is_integrated": 0, "is_multi_gpu_board": 0, "gcnArchName": ""}


class Properties(types.SimpleNamespace):
    """What `get_device_properties` returns."""


# --- devices ------------------------------------------------------------------------------------


def set_device(index: int) -> None:
    if index >= 0:
        here.index = checked(index)


def exchange_device(index: int) -> int:
    before = current()
    set_device(index)
    return before


def properties(index: int) -> Properties:
    gpu = GPUS[checked(index)]
    major, minor = gpu.capability
    own = {"name": gpu.name, "total_memory": gpu.memory, "uuid": gpu.uuid}
    return Properties(major=major, minor=minor, **own, **CHIP)


def count() -> int:
    """What CUDA's first call fixes: the GPUs are those that are visible now."""
    if not settled:
        settled.append(True)
        visible = torch.cuda._parse_visible_devices()[: torch.cuda._device_count_nvml()]
        GPUS[:] = [ALL[int(index)] for index in visible]
        for index, gpu in enumerate(GPUS):
            gpu.generator.place = torch.device("cuda", index)
            generators[gpu.generator._cdata] = gpu.generator
    return len(GPUS)


def start() -> None:
    if not count():
        raise RuntimeError("No CUDA GPUs are available")
    torch.cuda.default_generators = tuple(gpu.generator for gpu in GPUS)
    torch.cuda._get_device_properties = properties


# --- memory -------------------------------------------------------------------------------------


def memory_stats(index: int) -> dict:
    gpu = GPUS[checked(index)]
    kinds = ("allocated_bytes", "active_bytes", "requested_bytes", "reserved_bytes")
    kinds += ("inactive_split_bytes", "allocation", "segment", "active", "inactive_split")
    empty = {"current": 0, "peak": 0, "allocated": 0, "freed": 0}
    pools = ("all", "large_pool", "small_pool")
    stats: dict[str, Any] = {kind: {pool: dict(empty) for pool in pools} for kind in kinds}
    for kind in kinds[:3]:
        stats[kind]["all"] |= {"current": gpu.allocated(), "peak": gpu.peak}
    stats["reserved_bytes"]["all"] |= {"current": gpu.kept, "peak": gpu.kept}
    stats["allocation"]["all"] |= {"current": len(gpu.used)}
    stats |= {"oversize_allocations": dict(empty), "oversize_segments": dict(empty)}
    return stats | dict.fromkeys(COUNTS, 0)


def reset_peak(index: int) -> None:
    if not torch.cuda.is_initialized():
        raise RuntimeError("Invalid device argument ")
    GPUS[checked(index)].peak = GPUS[index].allocated()


def empty_cache() -> None:
    for gpu in GPUS:
        gpu.kept = -(-gpu.allocated() // KEPT) * KEPT


def set_fraction(fraction: float, index: int) -> None:
    GPUS[checked(index)].fraction = fraction


def memory_info(index: int) -> tuple[int, int]:
    gpu = GPUS[checked(index)]
    return gpu.memory - max(gpu.kept, KEPT), gpu.memory  # CUDA itself always takes some


# --- streams ------------------------------------------------------------------------------------


def current_stream(index: int) -> tuple[int, int, int]:
    return getattr(here, "streams", {}).get(index, 0), index, 1


def set_stream(stream_id: int, device_index: int, device_type: int = 1) -> None:
    here.streams = {**getattr(here, "streams", {}), device_index: stream_id}
    set_device(device_index)


# --- all of them --------------------------------------------------------------------------------


def simulate_cuda() -> None:
    c, cuda, forked = torch._C, torch.cuda, []
    # In Python 3.11, a child waits for ever if a thread of gloo's is entering or leaving the
    # interpreter as it is forked, and here each message of gloo's has an object of Python's.
    os.register_at_fork(
        before=lambda: time.sleep(0.01), after_in_child=lambda: forked.append(cuda._initialized)
    )
    cuda._is_in_bad_fork = c._cuda_isInBadFork = lambda: any(forked)
    cuda._is_compiled = lambda: True
    cuda._cudart = types.SimpleNamespace(cudaMemGetInfo=memory_info)
    cuda._CudaDeviceProperties = c._CudaDeviceProperties = Properties
    cuda._exchange_device = cuda._maybe_exchange_device = exchange_device
    cuda._raw_device_count_nvml = lambda: len(ALL)
    for kind in ("_cuda_", "_accelerator_"):
        for name in ("exchangeDevice", "maybeExchangeDevice"):
            setattr(c, kind + name, exchange_device)
        setattr(c, f"{kind}emptyCache", empty_cache)
    for name in WITHOUT_EFFECT:
        setattr(c, name, nothing)
    answers = {
        "_cuda_init": start,
        "_cuda_getDeviceCount": count,
        "_cuda_getDevice": current,
        "_cuda_setDevice": set_device,
        "_cuda_hasPrimaryContext": lambda index: cuda.is_initialized(),
        "_cuda_canDeviceAccessPeer": lambda one, other: False,
        "_cuda_getArchFlags": lambda: "sm_{}{}".format(*ALL[0].capability),
        "_cuda_getCompiledVersion": lambda: 12080,
        "_cuda_synchronize": wait,
        "_cuda_isCurrentStreamCapturing": lambda: False,
        "_cuda_getCurrentStream": current_stream,
        "_cuda_getCurrentRawStream": lambda index: current_stream(index)[0],
        "_cuda_getDefaultStream": lambda index: (0, index, 1),
        "_cuda_setStream": set_stream,
        "_cuda_memoryStats": memory_stats,
        "_cuda_resetPeakMemoryStats": reset_peak,
        "_cuda_setMemoryFraction": set_fraction,
        "_cuda_memorySnapshot": lambda *_: {"segments": [], "device_traces": []},
        "_get_accelerator": lambda *_: torch.device("cuda"),
        "_accelerator_getAccelerator": lambda: torch.device("cuda"),
        "_accelerator_getDeviceIndex": current,
        "_accelerator_setDeviceIndex": set_device,
        "_accelerator_isAllocatorInitialized": lambda: True,
        "_accelerator_getDeviceStats": memory_stats,
        "_accelerator_getMemoryInfo": memory_info,
        "_accelerator_resetPeakStats": reset_peak,
        "_accelerator_synchronizeDevice": wait,
        "_accelerator_getStream": lambda index: cuda.current_stream(index),
        "_accelerator_setStream": lambda stream: cuda.set_stream(stream),
    }
    for name, answer in answers.items():
        setattr(c, name, answer)
    cuda.graphs._cuda_isCurrentStreamCapturing = c._cuda_isCurrentStreamCapturing
    for module in (cuda, cuda.streams, torch):
        module.Stream, module.Event = Stream, Event
    torch.Generator = Generator
    # Without CUPTI the profiler asks for a CUDA event at each operation, and prints what failed.
    both_kinds = torch.autograd._supported_activities() | {ProfilerActivity.CUDA}
    for module in (torch.autograd, torch.autograd.profiler):
        module._supported_activities = lambda: both_kinds
    for gpu in ALL:
        gpu.generator = Generator("cpu")
        gpu.generator.seed_and_offset = [SEED, 0]
    torch.backends.cuda.is_built = lambda: True
    torch.backends.cudnn.is_acceptable = lambda tensor: False
