"""The devices module, mostly on machines that are only pretended."""

from __future__ import annotations

import copy
import os
import platform
from collections import UserDict
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

# The first optimizer imports it, which sets an environment variable in the middle of a test.
import torch._dynamo
from torch import nn
from torch._subclasses import fake_tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from torchclinic import machine
from torchclinic.machine import Device, DeviceTable, cpu_memory, device_table, why_no_cuda
from torchclinic.where import find_mismatch, named_tensors, where_is
from torchladder.devices import named_device, try_all_gpus, try_gpu

CPU, META = torch.device("cpu"), torch.device("meta")
CUDA0, CUDA1 = torch.device("cuda:0"), torch.device("cuda:1")


@pytest.fixture(autouse=True)
def _fake_tensors_need_no_gpu(monkeypatch):
    """Older versions of torch ask for memory on the real GPU of a fake tensor's number."""
    monkeypatch.setattr(fake_tensor, "init_gpu_context", lambda device: None, raising=False)


@pytest.fixture
def no_gpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    monkeypatch.setattr(torch.mps, "device_count", lambda: 0)
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: False)


@pytest.fixture
def two_t4s(monkeypatch):
    """Two GPUs like Kaggle's: capability 7.5, bfloat16 emulated, each reaching the other."""
    current = [0]

    class Current:
        def __init__(self, i):
            self.i = i

        def __enter__(self):
            current.append(self.i)

        def __exit__(self, *_):
            current.pop()

    pretended = {
        "is_available": lambda: True,
        "device_count": lambda: 2,
        "get_device_properties": lambda i: SimpleNamespace(name="Tesla T4", major=7, minor=5),
        "mem_get_info": lambda i: ((15 - i) * 10**9, 16 * 10**9),
        "is_bf16_supported": lambda including_emulation=True: including_emulation,
        "can_device_access_peer": lambda i, j: i != j,
        "device": Current,
    }
    for name, value in pretended.items():
        monkeypatch.setattr(torch.cuda, name, value)
    return current


@pytest.fixture
def mps(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.mps, "device_count", lambda: 1)
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: True)
    monkeypatch.setattr(torch.backends.mps, "is_macos_or_newer", lambda *_: True)
    monkeypatch.setattr(torch.mps, "recommended_max_memory", lambda: 12 * 10**9)
    monkeypatch.setattr(torch.mps, "driver_allocated_memory", lambda: 2 * 10**9)


# --- choosing -----------------------------------------------------------------------------------


def test_without_a_gpu_try_gpu_gives_the_cpu(no_gpu):
    assert try_gpu() == try_gpu(3) == CPU
    assert try_all_gpus() == [CPU]


def test_with_two_gpus_try_gpu_gives_the_one_asked_for(two_t4s):
    assert (try_gpu(), try_gpu(1)) == (CUDA0, CUDA1)
    assert try_all_gpus() == [CUDA0, CUDA1]


def test_a_gpu_beyond_the_last_falls_back_to_the_cpu(two_t4s):
    assert try_gpu(10) == CPU


def test_an_apple_gpu_is_a_gpu(mps):
    assert try_gpu() == torch.device("mps")
    assert try_gpu(1) == CPU
    assert try_all_gpus() == [torch.device("mps")]


def test_a_negative_index_is_refused():
    with pytest.raises(ValueError, match=r"^GPUs are counted from 0, so there is no GPU -1\.$"):
        try_gpu(-1)


@pytest.mark.parametrize("name", ["cpu", torch.device("cpu"), "meta"])
def test_a_named_device_that_exists_is_given_as_it_is(no_gpu, name):
    assert named_device(name) == torch.device(name)


@pytest.mark.parametrize("name", ["cuda", "cuda:0", "cuda:1"])
def test_a_named_gpu_that_exists_is_given_as_it_is(two_t4s, name):
    assert named_device(name) == torch.device(name)


def test_a_named_mps_is_given_where_there_is_one(mps):
    assert named_device("mps") == torch.device("mps")


def message_of(call, *args) -> str:
    with pytest.raises(ValueError) as caught:  # noqa: PT011 - every caller compares the whole text
        call(*args)
    return str(caught.value)


@pytest.mark.parametrize("name", ["gpu", "cuda1", "CUDA", ""])
def test_a_name_that_is_no_device_is_refused_with_examples(name):
    expected = f"{name!r} is not a device. Write 'cpu', 'cuda', 'cuda:1' or 'mps'."
    assert message_of(named_device, name) == expected


def test_a_gpu_too_many_is_refused_and_those_there_are_named(two_t4s, monkeypatch):
    rest = "CUDA_VISIBLE_DEVICES limits and renumbers what PyTorch sees."
    expected = f"No GPU 5 here: this machine shows 2, counted from 0. {rest}"
    assert message_of(named_device, "cuda:5") == expected
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    assert (
        message_of(named_device, "cuda:1")
        == f"No GPU 1 here: this machine shows 1, counted from 0. {rest}"
    )
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 8)
    expected = f"No GPU 8 here: this machine shows 8, counted from 0. {rest}"
    assert message_of(named_device, "cuda:8") == expected


def test_a_gpu_on_a_machine_without_one_is_refused_with_the_reason(no_gpu):
    assert message_of(named_device, "cuda:1") == f"No GPU for 'cuda:1': {why_no_cuda()}"


def test_mps_on_a_machine_without_one_is_refused(no_gpu):
    assert message_of(named_device, "mps") == "No 'mps' on this machine. Use 'cpu'."


@pytest.mark.parametrize("name", ["xpu", "hpu", "vulkan", "mtia:1"])
def test_any_other_device_that_is_not_here_is_refused(name):
    assert message_of(named_device, name) == f"No {name!r} on this machine. Use 'cpu'."


def test_another_makers_accelerator_is_given_where_there_is_one(no_gpu, monkeypatch):
    monkeypatch.setattr(torch.xpu, "is_available", lambda: True)
    monkeypatch.setattr(torch.xpu, "device_count", lambda: 2)
    assert named_device("xpu:1") == torch.device("xpu:1")
    assert message_of(named_device, "xpu:2") == "No 'xpu:2' on this machine. Use 'cpu'."


# --- why there is no CUDA -----------------------------------------------------------------------


@pytest.fixture
def cuda_build(no_gpu, monkeypatch):
    monkeypatch.setattr(torch.backends.cuda, "is_built", lambda: True)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)


def driver_files(monkeypatch, exist: bool) -> None:
    real = Path.exists
    driver = "/proc/driver/nvidia"
    monkeypatch.setattr(Path, "exists", lambda p: exist if str(p) == driver else real(p))


def test_a_build_for_cpus_is_named_as_the_reason(cuda_build, monkeypatch):
    monkeypatch.setattr(torch.backends.cuda, "is_built", lambda: False)
    expected = "this build of torch has no CUDA support; install one that has (pytorch.org)."
    assert why_no_cuda() == expected


@pytest.mark.parametrize("value", ["", " ", "-1"])
def test_hidden_gpus_are_named_as_the_reason(cuda_build, monkeypatch, value):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", value)
    expected = f"CUDA_VISIBLE_DEVICES={value!r} hides every GPU; unset it and start again."
    assert why_no_cuda() == expected


def test_a_missing_driver_is_named_as_the_reason(cuda_build, monkeypatch):
    driver_files(monkeypatch, exist=False)
    expected = "no NVIDIA driver is loaded on this machine; without a GPU, use the CPU."
    assert why_no_cuda() == expected


def test_with_a_driver_and_no_gpu_the_reader_is_sent_to_nvidia_smi(cuda_build, monkeypatch):
    driver_files(monkeypatch, exist=True)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    expected = "torch found no usable GPU; run nvidia-smi to see whether the driver does."
    assert why_no_cuda() == expected


# --- the device table ---------------------------------------------------------------------------


def test_without_a_gpu_the_table_is_the_cpu(no_gpu):
    (cpu,) = device_table()
    assert cpu.device == CPU
    assert f"({os.cpu_count()} cores)" in cpu.name
    assert cpu.capability is None
    assert cpu.bf16 in {"native", "emulated"}
    assert cpu.memory_total is None or cpu.memory_total >= cpu.memory_free > 0


def linux_with_24_gb(root, **files):
    """The files in which Linux tells of memory; of 24 GiB, 19 can be had and 17 are unused."""
    meminfo = "MemTotal:       25165824 kB\nMemFree:  17825792 kB\nMemAvailable: 19922944 kB\n"
    for path, text in {"proc/meminfo": meminfo, **files}.items():
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).write_text(text)


def test_free_memory_is_what_can_be_had_cached_files_included(tmp_path, monkeypatch):
    monkeypatch.setattr(machine, "ROOT", tmp_path)
    linux_with_24_gb(tmp_path)
    assert cpu_memory() == (24 * 2**30, 19 * 2**30)


JOB = "sys/fs/cgroup/slurm/job_1"  # the process is in a step of this job
CONTAINER = "sys/fs/cgroup/memory"  # of the older version; its own path is not to be seen in it


@pytest.mark.parametrize(
    "files",
    [
        {
            "proc/self/cgroup": "0::/slurm/job_1/step_0\n",
            f"{JOB}/memory.max": f"{8 * 2**30}\n",
            f"{JOB}/memory.current": f"{5 * 2**30}\n",
            f"{JOB}/memory.stat": f"file 9\ninactive_file {2**30}\n",
            f"{JOB}/step_0/memory.max": "max\n",
            f"{JOB}/step_0/memory.current": "7\n",
        },
        {
            "proc/self/cgroup": "9:cpu:/\n4:memory:/docker/1234\n0::/\n",
            f"{CONTAINER}/memory.limit_in_bytes": f"{8 * 2**30}\n",
            f"{CONTAINER}/memory.usage_in_bytes": f"{5 * 2**30}\n",
            f"{CONTAINER}/memory.stat": f"inactive_file 0\ntotal_inactive_file {2**30}\n",
        },
    ],
    ids=["a Slurm job, version 2", "a container, version 1"],
)
def test_a_limit_on_memory_is_all_there_is(tmp_path, monkeypatch, files):
    monkeypatch.setattr(machine, "ROOT", tmp_path)
    linux_with_24_gb(tmp_path, **files)
    assert cpu_memory() == (8 * 2**30, 4 * 2**30)


def test_the_table_of_two_t4s_says_emulated_and_names_peers(two_t4s):
    table = device_table()
    assert [d.device for d in table] == [CPU, CUDA0, CUDA1]
    assert table[2] == Device(
        CUDA1, "Tesla T4", 16 * 10**9, 14 * 10**9, "7.5", "emulated", (CUDA0,)
    )
    assert table[1].peers == (CUDA1,)
    assert two_t4s == [0], "the current device is put back"


def test_bf16_is_asked_of_each_gpu_in_turn(two_t4s, monkeypatch):
    monkeypatch.setattr(
        torch.cuda, "is_bf16_supported", lambda including_emulation=True: two_t4s[-1] == 1
    )
    assert [d.bf16 for d in device_table()[1:]] == ["no", "native"]


def test_the_table_prints_a_line_a_device(two_t4s):
    header, _, *rows = repr(device_table()).splitlines()
    columns = ["device", "name", "memory", "free", "capability", "bf16", "reaches", "directly"]
    assert header.split() == columns
    assert len(rows) == 3
    last = ["cuda:1", "Tesla", "T4", "16.0", "GB", "14.0", "GB", "7.5", "emulated", "cuda:0"]
    assert rows[2].split() == last


def test_gpus_that_do_not_reach_each_other_get_no_column_for_it(two_t4s, monkeypatch):
    monkeypatch.setattr(torch.cuda, "can_device_access_peer", lambda i, j: False)
    assert "reaches" not in repr(device_table())


def test_the_table_is_html_in_a_notebook(two_t4s):
    html = device_table()._repr_html_()
    assert html.count("<tr>") == 4
    assert "Tesla T4" in html


def test_an_apple_gpu_is_in_the_table(mps, monkeypatch):
    gpu = device_table()[1]
    assert gpu == Device(torch.device("mps"), "Apple GPU", 12 * 10**9, 10 * 10**9, None, "native")
    monkeypatch.setattr(torch.backends.mps, "is_macos_or_newer", lambda *_: False)
    assert device_table()[1].bf16 == "no"


def test_a_system_that_does_not_say_leaves_dashes(no_gpu, monkeypatch, tmp_path):
    monkeypatch.setattr(machine, "ROOT", tmp_path)
    monkeypatch.delattr(os, "sysconf", raising=False)
    real = Path.exists
    monkeypatch.setattr(Path, "exists", lambda p: str(p) != "/proc/cpuinfo" and real(p))
    monkeypatch.setattr(platform, "processor", lambda: "")
    monkeypatch.setattr(platform, "machine", lambda: "riscv64")
    (cpu,) = device_table()
    assert cpu.memory_total is None
    assert cpu.memory_free is None
    assert cpu.name.startswith("riscv64 (")
    assert repr(DeviceTable([cpu])).count("–") == 3


# --- where is everything? -----------------------------------------------------------------------


class Normalise(nn.Module):
    """One buffer, one tensor kept as a plain attribute."""

    def __init__(self):
        super().__init__()
        self.register_buffer("std", torch.ones(4))
        self.mean = torch.zeros(4)

    def forward(self, x):
        return (x - self.mean) / self.std


def test_everything_in_one_place_is_one_line():
    assert repr(where_is(nn.Linear(4, 3), torch.zeros(8, 4))) == "all 3 tensors on cpu (188 B)"


def test_the_odd_ones_out_are_named():
    model = nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 2, device="meta"))
    placement = where_is(model, torch.zeros(8, 4))
    assert placement.devices == {
        CPU: ["0.weight", "0.bias", "input 0"],
        META: ["1.weight", "1.bias"],
    }
    assert placement.odd == {"1.weight": META, "1.bias": META}
    assert repr(placement) == (
        "cpu: 3 tensors, 188 B\n"
        "meta: 2 tensors, 32 B\n"
        "not on cpu:\n"
        "  1.weight is on meta\n"
        "  1.bias is on meta"
    )


def test_the_device_with_most_bytes_comes_first():
    small, large = torch.zeros(1), torch.zeros(100, device="meta")
    assert list(where_is(small, small, large).devices) == [META, CPU]


@dataclass
class Batch:
    images: torch.Tensor
    labels: list


def test_inputs_of_any_shape_are_looked_into():
    batch = UserDict(ids=torch.zeros(2), mask=torch.zeros(1, device="meta"))  # like BatchEncoding
    assert where_is(batch).odd == {"input 0['mask']": META}
    batch = Batch(torch.zeros(2), [torch.zeros(1, device="meta")])
    assert where_is(batch).odd == {"input 0.labels[0]": META}
    assert repr(where_is(Batch)) == "no tensors found"


def test_what_holds_itself_is_looked_into_once():
    batch = {"x": torch.zeros(2), "all": []}
    batch["all"] += [batch, batch["x"]]
    assert list(where_is(batch).devices.values()) == [["input 0['x']", "input 0['all'][1]"]]


def test_a_sparse_tensor_counts_what_it_stores():
    eye = torch.eye(4).to_sparse()  # 2 x 4 indices of 8 bytes, 4 values of 4
    assert repr(where_is(eye)) == "all 1 tensors on cpu (80 B)"


def test_nested_inputs_are_found_and_named_by_their_place():
    batch = {"image": torch.zeros(2), "boxes": [torch.zeros(1), (torch.zeros(1, device="meta"),)]}
    placement = where_is(torch.zeros(3), batch)
    assert placement.odd == {"input 1['boxes'][1][0]": META}
    assert placement.devices[CPU] == ["input 0", "input 1['image']", "input 1['boxes'][0]"]


def test_what_holds_no_tensor_is_no_mistake():
    assert repr(where_is()) == repr(where_is(nn.ReLU(), "text", None, [3])) == "no tensors found"


def test_a_plain_attribute_is_found_and_marked():
    model = nn.Sequential(Normalise(), nn.Linear(4, 1)).to("meta")
    assert where_is(model).odd == {"0.mean (plain attribute)": CPU}
    assert where_is(Normalise().to("meta")).odd == {"mean (plain attribute)": CPU}


def test_modules_in_a_plain_list_are_found_and_marked():
    model = nn.Sequential(nn.Linear(4, 4, device="meta"))
    model.extra = [nn.BatchNorm1d(1)]
    assert list(where_is(model).odd) == [
        f"extra (plain attribute)[0].{name}"
        for name in ["weight", "bias", "running_mean", "running_var", "num_batches_tracked"]
    ]


def test_parameters_an_rnn_lists_twice_are_counted_once():
    model = nn.LSTM(2, 2)
    assert len(list(named_tensors(model))) == len(list(model.parameters()))


def test_the_state_of_an_optimizer_is_found():
    model = nn.Linear(2, 1)
    optimizer = torch.optim.Adam(model.parameters())
    assert repr(where_is(optimizer)) == "no tensors found"
    optimizer.state[model.weight] = {"step": 1, "exp_avg": torch.zeros(1, 2, device="meta")}
    assert where_is(model, optimizer).odd == {"Adam.state[0]['exp_avg']": META}


def stepped_adam(**options) -> tuple[nn.Module, torch.optim.Optimizer]:
    """On a GPU that is not there: two parameters, and an Adam that has made one step."""
    with FakeTensorMode():
        model = nn.Linear(4, 2, device="cuda:0")
        optimizer = torch.optim.Adam(model.parameters(), **options)
        for parameter in model.parameters():
            parameter.grad = torch.ones_like(parameter)
        optimizer.step()
    return model, optimizer


def test_the_step_counters_of_a_healthy_adam_are_not_odd():
    placement = where_is(*stepped_adam())
    assert placement.odd == {}
    assert repr(placement) == (
        "cuda:0: 6 tensors, 120 B\n"
        "cpu: 2 tensors, 8 B\n"
        "the optimizer's step counters, which belong on cpu: 2"
    )


def test_state_left_behind_by_adam_is_odd_beside_its_counters():
    model, optimizer = stepped_adam()
    with FakeTensorMode():
        optimizer.state[model.weight]["exp_avg"] = torch.zeros(2, 4)
    placement = where_is(model, optimizer)
    assert placement.odd == {"Adam.state[0]['exp_avg']": CPU}
    assert repr(placement).splitlines()[-2:] == [
        "not on cuda:0:",
        "  Adam.state[0]['exp_avg'] is on cpu",
    ]


@pytest.mark.parametrize("option", ["fused", "capturable"])
def test_a_counter_on_the_cpu_is_odd_where_the_optimizer_wants_it_on_the_gpu(option):
    model, optimizer = stepped_adam()
    optimizer.param_groups[0][option] = True
    assert set(where_is(model, optimizer).odd.values()) == {CPU}
    assert len(where_is(model, optimizer).odd) == 2


def test_more_than_ten_odd_ones_are_cut():
    placement = where_is(torch.zeros(99), [torch.zeros(1, device="meta") for _ in range(12)])
    lines = repr(placement).splitlines()
    assert len(placement.odd) == 12
    assert lines[-2:] == ["  input 1[9] is on meta", "  ... and 2 more"]


def test_one_tensor_is_not_counted_in_the_plural():
    placement = where_is(torch.zeros(9), torch.zeros(1, device="meta"))
    assert repr(placement).splitlines()[:2] == ["cpu: 1 tensor, 36 B", "meta: 1 tensor, 4 B"]


# --- the first mismatch -------------------------------------------------------------------------


def test_a_pass_that_goes_through_has_no_mismatch():
    model = nn.Sequential(nn.Linear(4, 3), nn.ReLU())
    assert find_mismatch(model, torch.zeros(8, 4)) is None


def test_the_layer_left_behind_is_named():
    model = nn.Sequential(nn.Linear(4, 3), nn.ReLU(), nn.Linear(3, 2, device="meta"))
    found = find_mismatch(model, torch.zeros(8, 4))
    assert (found.module, found.module_type, found.operation) == ("2", "Linear", "linear")
    assert found.tensors == {"argument 0": CPU, "2.weight": META, "2.bias": META}
    assert "device" in found.error
    assert repr(found) == (
        "linear in '2' (Linear) mixes devices:\n"
        "  argument 0 is on cpu\n"
        "  2.weight is on meta\n"
        "  2.bias is on meta"
    )


def test_two_gpus_are_told_apart():
    with FakeTensorMode():
        model = nn.Sequential(
            nn.Linear(4, 3, device="cuda:0"), nn.Sequential(nn.Linear(3, 2, device="cuda:1"))
        )
        found = find_mismatch(model, torch.zeros(8, 4, device="cuda:0"))
    assert found.module == "1.0"
    assert found.tensors == {"argument 0": CUDA0, "1.0.weight": CUDA1, "1.0.bias": CUDA1}


def test_a_plain_attribute_left_behind_is_named():
    with FakeTensorMode():
        model = nn.Sequential(Normalise())
        model[0].std = torch.ones(4, device="cuda:0")
        found = find_mismatch(model, torch.zeros(8, 4, device="cuda:0"))
    assert found.module == "0"
    assert found.tensors == {"argument 0": CUDA0, "0.mean (plain attribute)": CPU}


def test_a_mismatch_in_the_model_itself_names_its_class():
    with FakeTensorMode():
        found = find_mismatch(Normalise(), torch.zeros(8, 4, device="cuda:0"))
    assert found.module == ""
    assert repr(found).startswith("sub in Normalise mixes devices:")


def test_after_a_submodule_the_mismatch_is_the_parents():
    class Parent(nn.Module):
        def __init__(self):
            super().__init__()
            self.child = nn.Linear(4, 4)

        def forward(self, x, *, shift):
            return torch.add(self.child(x), other=shift)

    with FakeTensorMode():
        found = find_mismatch(Parent(), torch.zeros(4), shift=torch.zeros(4, device="cuda:1"))
    assert (found.module_type, found.operation) == ("Parent", "add")
    assert found.tensors == {"argument 0": CPU, "argument other": CUDA1}


class Blur(nn.Module):
    """A convolution with a kernel that `to` leaves behind, since it is a plain attribute."""

    def __init__(self):
        super().__init__()
        self.first = nn.Conv2d(1, 1, 3)
        self.kernel = torch.ones(1, 1, 3, 3)

    def forward(self, x):
        return nn.functional.conv2d(self.first(x), self.kernel)


def test_a_model_on_meta_shows_what_to_leaves_behind():
    found = find_mismatch(nn.Sequential(Blur()).to("meta"), torch.zeros(1, 1, 8, 8, device="meta"))
    assert (found.module, found.operation) == ("0", "conv2d")
    assert found.tensors == {"argument 0": META, "0.kernel (plain attribute)": CPU}
    assert "found at least two devices, meta and cpu" in found.error


# PyTorch runs each of these between meta and the CPU, and refuses it between a GPU and the CPU.
UNCHECKED = {
    "conv2d": (nn.Conv2d(1, 1, 3), torch.zeros(1, 1, 8, 8)),
    "linear": (nn.Linear(4, 2, bias=False), torch.zeros(2, 4)),
    "embedding": (nn.Embedding(5, 2), torch.zeros(3, dtype=torch.long)),
}


@pytest.mark.parametrize("operation", UNCHECKED)
@pytest.mark.parametrize("forgotten", ["model", "input"])
def test_a_mixture_with_meta_is_found_where_pytorch_lets_it_pass(operation, forgotten):
    model, x = UNCHECKED[operation]
    moved = (copy.deepcopy(model).to("meta"), x) if forgotten == "input" else (model, x.to("meta"))
    found = find_mismatch(*moved)
    assert found.operation == operation
    assert set(found.tensors.values()) == {CPU, META}


class Mixed(nn.Module):
    """What a GPU may mix with the CPU: an index, one number, the lengths of sequences, a copy."""

    def __init__(self):
        super().__init__()
        self.rnn = nn.LSTM(4, 3)

    def forward(self, x):
        x = x[torch.tensor([0, 1])] * torch.tensor(2.0)
        x[torch.tensor([0])] = torch.tensor(1.0)
        x.copy_(torch.zeros(2, 2, 4)).expand_as(torch.zeros(2, 2, 4))
        packed = nn.utils.rnn.pack_padded_sequence(x, torch.tensor([2, 1]))
        return nn.utils.rnn.PackedSequence(self.rnn(packed)[0].data, packed.batch_sizes)


def test_what_a_gpu_may_mix_with_the_cpu_is_no_mismatch_on_meta():
    assert find_mismatch(Mixed().to("meta"), torch.zeros(8, 2, 4, device="meta")) is None


@pytest.mark.gpu
def test_what_a_gpu_may_mix_with_the_cpu_is_no_mismatch_on_a_gpu():
    assert find_mismatch(Mixed().to("cuda"), torch.zeros(8, 2, 4, device="cuda")) is None


def test_what_pytorch_allows_to_mix_is_no_mismatch():
    class Scale(nn.Module):
        def forward(self, x):
            return x[torch.tensor([0, 1])] * torch.tensor(2.0)

    with FakeTensorMode():
        assert find_mismatch(Scale(), torch.zeros(8, 4, device="cuda:0")) is None


class Retry(nn.Module):
    """Survives a mismatch of its own."""

    def __init__(self):
        super().__init__()
        self.left_behind = nn.Linear(4, 4, device="meta")
        self.spare = nn.Linear(4, 4)

    def forward(self, x):
        try:
            return self.left_behind(x)
        except RuntimeError:
            return self.spare(x)


def test_a_mismatch_the_model_survives_is_not_reported():
    assert find_mismatch(Retry(), torch.zeros(8, 4)) is None


def test_after_a_survived_mismatch_the_right_module_is_named():
    model = nn.Sequential(Retry(), nn.Linear(4, 2, device="meta"))
    assert find_mismatch(model, torch.zeros(8, 4)).module == "1"


def test_a_compiled_model_is_looked_at_without_compiling_it():
    compiled = torch.compile(Normalise())
    assert find_mismatch(compiled, torch.zeros(8, 4)) is None
    found = find_mismatch(torch.compile(Normalise().to("meta")), torch.zeros(8, 4, device="meta"))
    assert found.tensors == {"argument 0": META, "_orig_mod.mean (plain attribute)": CPU}


def test_a_compiled_part_of_a_model_is_looked_at_without_compiling_it():
    model = nn.Sequential(torch.compile(Normalise()), nn.Linear(4, 2, device="meta"))
    assert find_mismatch(model, torch.zeros(8, 4)).module == "1"


def test_an_unrelated_error_is_raised_as_it_is():
    with pytest.raises(RuntimeError, match="cannot be multiplied"):
        find_mismatch(nn.Linear(4, 3), torch.zeros(8, 5))


def test_the_model_is_left_as_it_was():
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 2, device="meta"))
    model[1].eval()
    model[1].register_forward_hook(lambda *_: None)
    modes = [m.training for m in model.modules()]
    state = {key: value.clone() for key, value in model.state_dict().items()}
    assert find_mismatch(model, torch.randn(8, 4)) is not None
    assert [m.training for m in model.modules()] == modes
    hooks = [len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules()]
    assert hooks == [0, 0, 1, 0], "only the one that was there before"
    assert all(torch.equal(state[k], v) for k, v in model[:2].state_dict().items())


def test_running_statistics_stay_when_the_pass_goes_through():
    model = nn.BatchNorm1d(4)
    assert find_mismatch(model, torch.randn(8, 4) + 5) is None
    assert model.training
    assert model.num_batches_tracked == 0
    assert torch.equal(model.running_mean, torch.zeros(4))


def test_modes_and_hooks_are_restored_after_an_unrelated_error():
    model = nn.Linear(4, 3)
    with pytest.raises(RuntimeError):
        find_mismatch(model, torch.zeros(8, 5))
    assert model.training
    assert not model._forward_hooks
    assert not model._forward_pre_hooks


# --- with real GPUs -----------------------------------------------------------------------------


@pytest.mark.gpu
def test_a_tensor_goes_to_the_gpu_try_gpu_names():
    assert torch.zeros(1, device=try_gpu()).device == CUDA0
    assert len(try_all_gpus()) == torch.cuda.device_count()
    assert try_gpu(torch.cuda.device_count()) == CPU


@pytest.mark.gpu
def test_the_table_describes_the_real_gpu():
    gpu = device_table()[1]
    assert gpu.device == CUDA0
    assert gpu.name == torch.cuda.get_device_name(0)
    assert 0 < gpu.memory_free <= gpu.memory_total
    native = torch.cuda.get_device_capability(0) >= (8, 0)
    assert gpu.bf16 == "native" if native else gpu.bf16 in {"emulated", "no"}


@pytest.mark.gpu
def test_a_model_left_on_the_cpu_is_found_out_on_a_real_gpu():
    model = nn.Sequential(nn.Linear(4, 3), nn.ReLU(), nn.Linear(3, 2)).to("cuda")
    x = torch.zeros(8, 4, device="cuda")
    assert find_mismatch(model, x) is None
    model[2].to("cpu")
    found = find_mismatch(model, x)
    assert found.module == "2"
    assert found.tensors == {"argument 0": CUDA0, "2.weight": CPU, "2.bias": CPU}
    assert "Expected all tensors to be on the same device" in found.error
    assert where_is(model, x).odd == {"2.weight": CPU, "2.bias": CPU}


@pytest.mark.multigpu
def test_two_real_gpus_are_told_apart():
    model = nn.Sequential(nn.Linear(4, 3, device="cuda:0"), nn.Linear(3, 2, device="cuda:1"))
    found = find_mismatch(model, torch.zeros(8, 4, device="cuda:0"))
    assert found.tensors == {"argument 0": CUDA0, "1.weight": CUDA1, "1.bias": CUDA1}
