"""Simulated GPUs: which processes see them, who is refused, and what is said of speed.

What they do, once there: `test_statements_on_devices.py`, under `make simulated`.
"""

import os
import subprocess
import sys

import pytest
import torch
from running import FORKED, SIMULATE, pretend, ran

from torchclinic import UserError, simulated_gpus
from torchclinic.simulated_gpus.cuda import SLOW

SETTINGS = simulated_gpus.describe(2)

STARTED = """
import subprocess, sys, threading
import torch

def gpus(*_):
    made = [torch.ones(1, device=f"cuda:{i}") for i in range(torch.cuda.device_count())]
    return [there.device.index for there in made]

if __name__ == "__main__":
    import torchvision, torchclinic
    for _ in range(2):
        torchclinic.simulate_gpus(4, name="A100")
    said = {"itself": gpus()}
    loader = torch.utils.data.DataLoader(
        [0], num_workers=1, collate_fn=gpus, multiprocessing_context="forkserver"
    )
    said["forkserver"] = next(iter(loader))
    thread = threading.Thread(target=lambda: said.update(thread=gpus()))
    thread.start()
    thread.join()
    assert set(map(tuple, said.values())) == {(0, 1)}, said
    program = "import torch; print(torch.cuda.device_count(), torch.cuda.get_device_name(1))"
    print(subprocess.check_output([sys.executable, "-c", program], text=True).strip())
"""


@pytest.mark.slow
def test_every_process_and_thread_that_a_notebook_starts_sees_them(tmp_path):
    (tmp_path / "started.py").write_text(STARTED)
    options = {"cwd": tmp_path, "env": os.environ | {"CUDA_VISIBLE_DEVICES": "3,1"}}
    assert ran("python", "started.py", **options) == "2 A100 (simulated)\n"


@pytest.mark.slow
def test_the_users_own_sitecustomize_runs_and_a_program_without_torch_runs_as_ever(tmp_path):
    (tmp_path / "sitecustomize.py").write_text("print('mine')")
    program = "import sys; print(len(sys.argv), 'torch' in sys.modules)"
    env = os.environ | {"PYTHONPATH": str(tmp_path)}
    said = ran(*SIMULATE, "1", "python", "-c", program, "a b", env=env)
    assert said.splitlines()[-2:] == ["mine", "2 False"]


INSIDE = """
import os, warnings
import torch
import torch.distributed as dist
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
from torch.distributed.fsdp import fully_shard
from torch._subclasses.fake_tensor import FakeTensorMode

with FakeTensorMode():  # by which DTensor learns the shapes of results
    assert torch.empty_strided((2,), (1,), device="cuda:1").uniform_().device.index == 1
assert not torch.cuda.is_current_stream_capturing()  # PyTorch 2.10's optimizers ask
mine = torch.device("cuda", int(os.environ["RANK"]))
torch.cuda.set_device(mine)
dist.init_process_group("nccl", device_id=mine)
with warnings.catch_warnings(action="error"):
    dist.barrier()  # which would ask for a device, if it knew none
net = torch.nn.Linear(2, 2, device="meta")  # only the group can say where it belongs
fully_shard(net)
whole = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
state = {} if dist.get_rank() else {"weight": torch.ones(2, 2), "bias": torch.ones(2)}
set_model_state_dict(net, state, options=whole)
seen = net(torch.ones(1, 2, device="cuda")).tolist()
print(end="" if dist.get_rank() else f"{seen}\\n")
dist.destroy_process_group()
"""


@pytest.mark.slow
def test_what_pytorch_does_inside_itself_finds_the_gpu_too(tmp_path):
    (tmp_path / "inside.py").write_text(INSIDE)
    torchrun = "torchrun", "--standalone", "--nproc-per-node=2", "inside.py"
    options = {"cwd": tmp_path, "env": os.environ | FORKED}
    assert "[[3.0, 3.0]]" in ran(*SIMULATE, "2", *torchrun, **options).splitlines()


LIMITED = """
import torch, warnings
from torch.profiler import profile, supported_activities
held = torch.zeros(1_600_000, device="cuda")
try:
    torch.zeros(1_600_000, device="cuda")
except torch.OutOfMemoryError as error:
    print(error)
print(torch.cuda.memory_allocated(), torch.cuda.mem_get_info(1))
del held
torch.zeros(1_600_000, device="cuda")
print(torch.cuda.memory_allocated(), torch.cuda.max_memory_allocated())
start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
start.record(), end.record()
with warnings.catch_warnings(record=True) as said:
    start.elapsed_time(end)
    end.synchronize()
    torch.cuda.current_stream().synchronize()
    torch.cuda.synchronize()
    torch.accelerator.synchronize()
print(*(warning.message for warning in said), sep="\\n")
with profile(activities=supported_activities(), acc_events=True) as profiled:
    torch.ones(3, 3, device="cuda") @ torch.ones(3, 3, device="cuda")
print(*{event.key for event in profiled.key_averages()} & {"aten::mm"}, len(supported_activities()))
"""


@pytest.mark.slow
def test_memory_has_its_limit_who_measures_time_is_warned_and_a_profile_has_the_cpus_operations():
    command = [*SIMULATE, "--memory", "8e6", "2", sys.executable, "-c", LIMITED]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    full, *lines, profiled = done.stdout.splitlines()
    memory, warned = lines[:2], lines[2:]
    assert full.startswith(
        "CUDA out of memory. Tried to allocate 6.10 MiB. GPU 0 has a total capacity of 7.63 MiB "
        "of which 1.53 MiB is free."
    )
    assert memory == ["6400000 (5902848, 8000000)", "0 6400000"]
    assert warned == [SLOW] * 5
    assert profiled == "aten::mm 2"
    assert "Failed" not in done.stderr


def test_a_real_gpu_an_older_pytorch_windows_and_other_gpus_are_refused(monkeypatch):
    gpus = torch.cuda.device_count()
    pretend(monkeypatch, torch.cuda, is_available=True)
    with pytest.raises(UserError, match="This machine has a real GPU"):
        simulated_gpus.install(SETTINGS)
    monkeypatch.setattr(torch, "__version__", "2.9.1+cpu")
    with pytest.raises(UserError, match=r"for torch 2\.10 and newer, not 2\.9\.1\+cpu"):
        simulated_gpus.install(SETTINGS)
    monkeypatch.setenv(simulated_gpus.VARIABLE, simulated_gpus.describe(16))
    with pytest.raises(UserError, match="Other GPUs are simulated here already"):
        simulated_gpus.simulate_gpus(2)
    with pytest.raises(UserError, match="give a number from 1 to 16"):
        simulated_gpus.describe(17)
    with pytest.raises(UserError, match=r"no compute capability: give two numbers, as \(8, 0\)"):
        simulated_gpus.describe(2, capability=8.0)
    with pytest.raises(UserError, match="No GPU has inf bytes"):
        simulated_gpus.describe(2, memory=float("inf"))
    monkeypatch.setattr(sys, "platform", "win32")
    with pytest.raises(UserError, match="use WSL"):
        simulated_gpus.describe(2)
    assert torch.cuda.device_count() == gpus
