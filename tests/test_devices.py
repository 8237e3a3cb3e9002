"""Which devices there are, mostly on machines that are only pretended, and what is on which."""

import os
import platform
import threading
from collections import UserDict
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import pytest
import running
import torch

# The first optimizer imports it, which sets an environment variable in the middle of a test.
import torch._dynamo
from running import pretend
from torch import nn

from torchclinic import machine
from torchclinic.machine import cpu_memory, device_table, why_no_cuda
from torchclinic.where import find_mismatch, held_tensors, where_is
from torchladder.devices import named_device, try_all_gpus, try_gpu, two_gpus
from torchladder.launching import launch

CPU, META, MPS = torch.device("cpu"), torch.device("meta"), torch.device("mps")
CUDA0, CUDA1 = torch.device("cuda:0"), torch.device("cuda:1")


@pytest.fixture
def no_gpu(monkeypatch):
    pretend(monkeypatch, torch.cuda, is_available=False, device_count=0)
    pretend(monkeypatch, torch.mps, device_count=0)
    pretend(monkeypatch, torch.backends.mps, is_available=False)


# --- choosing -----------------------------------------------------------------------------------


def test_without_a_gpu_it_is_the_cpu(no_gpu):
    assert try_gpu() == try_gpu(3) == named_device("cpu") == CPU
    assert try_all_gpus() == [CPU]


@pytest.mark.parametrize("kind", ["mps", "xpu"])
def test_a_gpu_of_another_maker_is_a_gpu(monkeypatch, kind):
    one = {"current_accelerator": torch.device(kind), "device_count": 1}
    pretend(monkeypatch, torch.accelerator, **one)
    assert [try_gpu(), try_gpu(1)] == [torch.device(kind, 0), CPU]
    assert try_all_gpus() == [torch.device(kind, 0)]


def refused(name) -> str:
    with pytest.raises(ValueError) as caught:  # noqa: PT011 - every caller compares the whole text
        named_device(name)
    return str(caught.value)


def test_a_device_that_is_not_here_is_refused_with_a_reason(no_gpu, monkeypatch):
    assert refused("cuda:1") == f"No GPU for 'cuda:1': {why_no_cuda()}"
    for name in ("mps", "xpu", "hpu", "vulkan", "mtia:1"):
        assert refused(name) == f"No {name!r} on this machine. Use 'cpu'."
    pretend(monkeypatch, torch.xpu, is_available=True, device_count=2)
    assert named_device("xpu:1") == torch.device("xpu:1")
    assert refused("xpu:2") == "No 'xpu:2' on this machine. Use 'cpu'."
    with pytest.raises(ValueError, match=r"^GPUs are counted from 0, so there is no GPU -1\.$"):
        try_gpu(-1)


def on_two_gpus():
    torch.cuda._initialized, torch.cuda._cached_device_count = True, 1
    two_gpus()
    assert [try_gpu(), try_gpu(1)] == try_all_gpus() == [CUDA0, CUDA1]
    assert [try_gpu(2), named_device("meta"), named_device(CUDA1)] == [CPU, META, CUDA1]
    there, total = torch.ones(2, device=CUDA1), torch.tensor(0.0)
    with pytest.raises(RuntimeError, match="at least two devices, cuda:1 and cpu!"):
        total += there.sum()
    there *= torch.tensor(2.0)
    apart = device_table()
    torch.cuda.can_device_access_peer = lambda i, j: i != j
    torch.cuda.is_bf16_supported = lambda **_: torch.cuda.current_device() == 1
    return apart, device_table()


@pytest.mark.slow
def test_a_program_that_has_used_its_only_real_gpu_has_two_and_the_table_shows_them():
    [(apart, peers)] = launch(on_two_gpus, world_size=1, backend="gloo")
    columns = ["device", "name", "memory", "free", "capability", "bf16", "reaches directly"]
    last = ["cuda:1", "Tesla T4 (simulated)", "15.8 GB", "15.8 GB", "7.5", "emulated"]
    assert (apart.header, apart.rows[2]) == (columns[:-1], last)
    assert (peers.header, [row[-2:] for row in peers.rows[1:]]) == (
        columns,
        [["no", "cuda:1"], ["native", "cuda:0"]],
    ), "each GPU is asked"


def test_the_reason_for_no_cuda_is_the_build_what_hides_the_gpus_or_the_driver(no_gpu, monkeypatch):
    def no_driver():
        raise RuntimeError("Found no NVIDIA driver.\nMore on it")

    pretend(monkeypatch, torch.cuda, init=None)
    pretend(monkeypatch, torch.backends.cuda, is_built=True)
    for value in ("", " ", "-1"):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", value)
        expected = f"CUDA_VISIBLE_DEVICES={value!r} hides every GPU; unset it and start again."
        assert why_no_cuda() == expected
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    assert why_no_cuda().startswith("torch found no usable GPU; run nvidia-smi")
    monkeypatch.setattr(torch.cuda, "init", no_driver)
    assert why_no_cuda() == "Found no NVIDIA driver."
    pretend(monkeypatch, torch.backends.cuda, is_built=False)
    assert why_no_cuda().startswith("this build of torch has no CUDA support;")


# --- the device table ---------------------------------------------------------------------------


def test_without_a_gpu_the_table_is_the_cpu(no_gpu):
    [[device, name, *_, capability, bf16]] = device_table().rows
    assert (device, capability) == ("cpu", "–")
    assert f"({os.cpu_count()} cores)" in name
    assert bf16 in {"native", "emulated"}
    total, free = cpu_memory()
    assert total is None or total >= free > 0


def test_an_apple_gpu_can_be_named_and_is_in_the_table(monkeypatch):
    memory = {"recommended_max_memory": 12 * 10**9, "driver_allocated_memory": 2 * 10**9}
    pretend(monkeypatch, torch.mps, device_count=1, **memory)
    pretend(monkeypatch, torch.cuda, is_available=False)
    pretend(monkeypatch, torch.backends.mps, is_available=True, is_macos_or_newer=True)
    assert named_device("mps") == MPS
    expected = ["mps", "Apple GPU", "12.0 GB", "10.0 GB", "–", "native"]
    assert device_table().rows[1] == expected
    pretend(monkeypatch, torch.backends.mps, is_macos_or_newer=False)
    assert device_table().rows[1][-1] == "no"


def test_a_system_that_does_not_say_leaves_dashes(no_gpu, monkeypatch, tmp_path):
    monkeypatch.setattr(machine, "ROOT", tmp_path)
    monkeypatch.delattr(os, "sysconf", raising=False)
    real = Path.exists
    monkeypatch.setattr(Path, "exists", lambda p: str(p) != "/proc/cpuinfo" and real(p))
    monkeypatch.setattr(platform, "processor", lambda: "")
    monkeypatch.setattr(platform, "machine", lambda: "riscv64")
    [[_, name, *memory, capability, _]] = device_table().rows
    assert name.startswith("riscv64 (")
    assert [*memory, capability] == ["–"] * 3


def test_memory_that_keeps_copies_of_files_is_free(tmp_path, monkeypatch):
    monkeypatch.setattr(machine, "ROOT", tmp_path)
    (tmp_path / "proc").mkdir()
    meminfo = "MemTotal:       25165824 kB\nMemFree:  17825792 kB\nMemAvailable: 19922944 kB\n"
    (tmp_path / "proc/meminfo").write_text(meminfo)
    assert cpu_memory() == (24 * 2**30, 19 * 2**30)


# --- where is everything? -----------------------------------------------------------------------


class Normalise(nn.Module):
    """One buffer, one tensor kept as a plain attribute."""

    def __init__(self):
        super().__init__()
        self.register_buffer("std", torch.ones(4))
        self.mean = torch.zeros(4)

    def forward(self, x):
        return (x - self.mean) / self.std


@dataclass
class Batch:
    images: torch.Tensor
    labels: list


def meta(*shape):
    return torch.zeros(*shape, device="meta")


def test_what_is_in_one_place_is_one_line():
    assert repr(where_is(nn.Linear(4, 3), torch.zeros(8, 4))) == "all 3 tensors on cpu (188 B)"
    eye = torch.eye(4).to_sparse()  # 2 x 4 indices of 8 bytes, 4 values of 4
    assert repr(where_is(eye)) == "all 1 tensors on cpu (80 B)"
    nothing = (nn.ReLU(), "text", None, [3], Batch)
    assert repr(where_is()) == repr(where_is(*nothing)) == "no tensors found"
    lstm = nn.LSTM(2, 2)  # which keeps its parameters in a list, too
    assert [len(names) for names in where_is(lstm).devices.values()] == [4]


def test_the_device_with_most_bytes_comes_first_and_the_others_are_odd():
    placement = where_is(torch.zeros(1), torch.zeros(1), meta(100))
    assert list(placement.devices) == [META, CPU]
    assert placement.odd == {"input 0": CPU, "input 1": CPU}
    many = where_is(torch.zeros(99), [meta(1) for _ in range(12)])
    lines = repr(many).splitlines()
    assert len(many.odd) == 12
    assert lines[0] == "cpu: 1 tensor, 396 B"
    assert lines[-2:] == ["  input 1[9] is on meta", "  ... and 2 more"]


def test_what_is_not_with_the_first_models_parameters_is_odd_however_large_it_is():
    model, batch = nn.Linear(4, 2), torch.zeros(1000, 4)
    optimizer = torch.optim.Adam(model.parameters())
    model(batch).sum().backward()
    optimizer.step()
    model.to("meta")
    loss_fn = nn.CrossEntropyLoss(weight=torch.zeros(100))  # a module, with no parameters
    placement = where_is(loss_fn, model, batch, optimizer)
    states = [f"Adam.state[{i}]['{key}']" for i in (0, 1) for key in ("exp_avg", "exp_avg_sq")]
    assert list(placement.odd) == ["weight", "input 0", *states]
    assert list(placement.devices) == [META, CPU]
    assert "not on meta:\n  weight is on cpu\n  input 0 is on cpu\n" in repr(placement)


def test_a_parameter_that_is_lazy_or_sparse_says_where_it_is():
    lazy = nn.Sequential(nn.LazyLinear(3), nn.Linear(3, 3, device="meta"))
    placement = where_is(lazy)
    assert list(placement.devices) == [META, CPU]
    assert placement.odd == {"0.weight": CPU, "0.bias": CPU}
    assert list(where_is(nn.LazyLinear(3), meta(9)).devices) == [CPU, META]
    kinds = [held.kind for held in held_tensors(most=9, like="of no shape yet")]
    assert kinds == ["float32 of no shape yet on cpu"]
    sparse = nn.ParameterList([torch.eye(4).to_sparse()])
    assert repr(where_is(sparse)) == "all 1 tensors on cpu (80 B)"


def test_inputs_of_any_shape_are_looked_into():
    batch = {"image": torch.zeros(2), "boxes": [torch.zeros(1), (meta(1),)]}
    placement = where_is(torch.zeros(3), batch)
    assert placement.devices[CPU] == ["input 0", "input 1['image']", "input 1['boxes'][0]"]
    assert placement.odd == {"input 1['boxes'][1][0]": META}
    batch = UserDict(ids=torch.zeros(2), mask=meta(1))  # like BatchEncoding
    assert where_is(batch).odd == {"input 0['mask']": META}
    assert where_is(Batch(torch.zeros(2), [meta(1)])).odd == {"input 0.labels[0]": META}
    batch = {"x": torch.zeros(2), "all": []}
    batch["all"] += [batch, batch["x"]]  # it holds itself
    assert list(where_is(batch).devices.values()) == [["input 0['x']", "input 0['all'][1]"]]


def test_what_to_leaves_behind_in_a_list_of_modules_is_marked():
    model = nn.Sequential(nn.Linear(4, 4, device="meta"))
    model.extra = [nn.BatchNorm1d(1)]
    names = ["weight", "bias", "running_mean", "running_var", "num_batches_tracked"]
    assert list(where_is(model).odd) == [f"extra (plain attribute)[0].{name}" for name in names]


# --- the first mismatch -------------------------------------------------------------------------


class Parent(nn.Module):
    def __init__(self):
        super().__init__()
        self.child = nn.Linear(4, 4)

    def forward(self, x, *, shift):
        return torch.add(self.child(x), other=shift)


def mismatches():
    two_gpus()
    last = nn.Sequential(nn.Linear(3, 2, device="cuda:1"))
    model = nn.Sequential(nn.Linear(4, 3, device="cuda:0"), last)
    there = torch.zeros(8, 4, device="cuda:0")
    return find_mismatch(model, there), find_mismatch(Parent(), torch.zeros(4), shift=there)


@pytest.mark.slow
def test_a_layer_on_another_of_two_gpus_is_named_and_an_argument_on_another_device():
    [(layer, argument)] = launch(mismatches, world_size=1, backend="gloo")
    assert (layer.module, layer.module_type, layer.operation) == ("1.0", "Linear", "linear")
    assert layer.tensors == {"argument 0": CUDA0, "1.0.weight": CUDA1, "1.0.bias": CUDA1}
    assert (argument.module_type, argument.operation) == ("Parent", "add")  # after its submodule
    assert argument.tensors == {"argument 0": CPU, "argument other": CUDA0}


def test_what_is_compiled_is_looked_at_without_compiling_it():
    assert find_mismatch(torch.compile(Normalise()), torch.zeros(8, 4)) is None
    found = find_mismatch(torch.compile(Normalise().to("meta")), meta(8, 4))
    assert found.tensors == {"argument 0": META, "_orig_mod.mean (plain attribute)": CPU}
    model = nn.Sequential(torch.compile(Normalise()), nn.Linear(4, 2, device="meta"))
    assert find_mismatch(model, torch.zeros(8, 4)).module == "1"


def test_the_model_is_left_as_it_was_however_it_ends():
    whole = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))
    whole[1].eval()
    whole[1].register_forward_hook(lambda *_: None)
    state = {key: value.clone() for key, value in whole.state_dict().items()}
    broken = nn.Sequential(*whole[:2], nn.Linear(4, 2, device="meta"))
    assert find_mismatch(whole, torch.randn(8, 4) + 5) is None
    assert find_mismatch(broken, torch.randn(8, 4) + 5) is not None
    with pytest.raises(RuntimeError, match="cannot be multiplied"):  # which has another reason
        find_mismatch(whole, torch.zeros(8, 5))
    assert [m.training for m in whole.modules()] == [True, True, False, True]
    hooks = [len(m._forward_hooks) + len(m._forward_pre_hooks) for m in whole.modules()]
    assert hooks == [0, 0, 1, 0], "only the one that was there before"
    whole[1].train()
    assert find_mismatch(whole, torch.randn(8, 4) + 5) is None
    assert all(torch.equal(state[key], value) for key, value in whole.state_dict().items())


# --- with real GPUs -----------------------------------------------------------------------------


@pytest.mark.gpu
def test_a_real_gpu_is_chosen_and_described():
    assert torch.zeros(1, device=try_gpu()).device == CUDA0
    assert len(try_all_gpus()) == torch.cuda.device_count()
    device, name, *_, bf16 = device_table().rows[1][:6]
    assert (device, name) == ("cuda:0", torch.cuda.get_device_name(0))
    native = torch.cuda.get_device_capability(0) >= (8, 0)
    assert bf16 == "native" if native else bf16 in {"emulated", "no"}


# --- who holds the memory? ----------------------------------------------------------------------


class Server:
    def __init__(self):
        self.model, self.answers = nn.Linear(3, 1234), []

    def answer(self):
        self.answers.append(self.model(torch.ones(2, 3)))


def held(shape):
    return {h.kind.partition(" with ")[2]: h for h in held_tensors(like=shape)}


def test_a_server_whose_answers_hold_their_graphs_in_another_thread_is_named():
    server = Server()
    with ThreadPoolExecutor(1) as pool:
        counts = []
        for _ in range(2):
            for _ in range(7):
                pool.submit(server.answer).result()
            found = held("[2, 1234]")["a graph of AddmmBackward0"]
            counts.append((found.count, found.bytes))
    assert counts == [(7, 7 * 2 * 1234 * 4), (14, 14 * 2 * 1234 * 4)]
    assert found.holder.startswith("server.answers[...] in test_a_server_whose")
    assert held("[1234, 3]")[""].holder.startswith("server.model.weight in ")


def test_what_a_waiting_thread_a_module_a_view_or_only_c_holds_is_found():
    stop, there = threading.Event(), threading.Event()

    def wait():
        kept = {"batch": (torch.ones(2345),)}
        there.set()
        stop.wait(60)
        kept.clear()

    thread = threading.Thread(target=wait)
    thread.start()
    try:
        assert there.wait(60)
        assert held("[2345]")[""].holder == "kept['batch'][...] in wait"
    finally:
        stop.set()
        thread.join()
    assert not held("[2345]")
    running.kept = torch.ones(100, 3456)[0]
    assert (held("[3456]")[""].holder, held("[3456]")[""].bytes) == ("running.kept", 1382400)
    del running.kept
    parameter = nn.Parameter(torch.ones(4567))
    parameter.grad = torch.ones(1, 4567)[0]
    assert held("[1, 4567]")[""].holder.startswith("C++")
