"""What only a GPU shows, of more than one module; the rest stands beside each module's tests."""

import os
from functools import partial

import pytest
import torch
import torch.distributed as dist
from running import ran
from test_training_on_ranks import part_of_the_data, trained
from torch import nn

from torchclinic.checkpoint_files import inspect_checkpoint, load_into
from torchladder.data import DeviceBatches, dataloader, load_dataset
from torchladder.launching import launch
from torchladder.models import LeNet
from torchladder.training import train

pytestmark = pytest.mark.gpu
assert_close = partial(torch.testing.assert_close, check_device=False)


def test_batches_arrive_whole_by_every_way_to_the_gpu():
    data = load_dataset()
    pinned = dataloader(data, "test", batch_size=300, pin_memory=True)
    kept = DeviceBatches(data, "test", device=torch.device("cuda"), batch_size=300)
    for (images, labels), (there, answers) in zip(pinned, kept, strict=True):
        assert images.is_pinned()
        copy = images.to("cuda", non_blocking=True)
        assert copy.device == there.device == answers.device
        torch.testing.assert_close(copy.cpu(), images, rtol=0, atol=0)
        torch.testing.assert_close(there.cpu(), images, rtol=1e-6, atol=1e-6)
        assert torch.equal(answers.cpu(), labels)


@pytest.mark.parametrize(
    ("world_size", "options"),
    [
        (1, {"rung": "gpu"}),
        (1, {"rung": "dp"}),
        (1, {"rung": "ddp", "backend": "nccl"}),
        (2, {"rung": "ddp", "backend": "gloo"}),
        pytest.param(2, {"rung": "ddp", "backend": "nccl"}, marks=pytest.mark.multigpu),
    ],
    ids=str,
)
def test_every_rung_computes_on_gpus_what_the_cpu_computes(world_size, options):
    expected, numbers = trained(batch_size=128)
    if options["rung"] == "ddp":
        batch_size = 128 // world_size
        results = launch(trained, world_size=world_size, batch_size=batch_size, **options)
    else:
        results = [trained(batch_size=128, **options)]
    for state, same in results:
        assert_close(state, expected, rtol=1e-6, atol=1e-9)
        assert same[-1] == pytest.approx(numbers[-1], rel=1e-4)


@pytest.mark.parametrize(("world_size", "backend"), [(1, "nccl"), (2, "gloo")])
def test_ranks_use_the_gpu_after_cuda_has_started_in_the_caller(world_size, backend):
    x = torch.ones(2, device="cuda")

    def work():
        y = torch.ones(2, device="cuda") * x.cuda()
        dist.all_reduce(y)
        return y, dist.get_backend()

    for y, used in launch(work, world_size=world_size, backend=backend):
        assert (y.device.type, y.tolist(), used) == ("cpu", [world_size] * 2, backend)


def test_a_file_saved_on_the_gpu_opens_without_one(tmp_path):
    net = LeNet().cuda()
    torch.save(nn.DataParallel(net).state_dict(), tmp_path / "gpu.pt")
    torch.save(net(torch.ones(1, 1, 28, 28, device="cuda")).cpu(), tmp_path / "logits.pt")
    assert "cuda:0" in str(inspect_checkpoint(tmp_path / "gpu.pt"))
    program = """
import torch
from torchclinic.checkpoint_files import load_into
from torchladder.models import LeNet
assert not torch.cuda.is_available()
try:
    torch.load("gpu.pt")
except RuntimeError as error:
    print(error)
net = LeNet()
load_into(net, "gpu.pt")
logits = net(torch.ones(1, 1, 28, 28))
torch.testing.assert_close(logits, torch.load("logits.pt"), rtol=1e-3, atol=1e-3)
"""
    options = {"cwd": tmp_path, "env": os.environ | {"CUDA_VISIBLE_DEVICES": ""}}
    printed = ran("python", "-c", program, **options)
    assert printed.startswith("Attempting to deserialize object on a CUDA device but ")
    load_into(net, tmp_path / "gpu.pt")
    assert next(net.parameters()).is_cuda


def test_a_run_on_the_gpu_goes_on_without_one(tmp_path):
    options = {"epochs": 1, "checkpoint_dir": tmp_path}
    net, other = LeNet(), LeNet()
    train(net, part_of_the_data(101), rung="gpu", **options)
    assert len(train(other, part_of_the_data(101), **options)) == 1  # what was trained, given back
    assert_close(other.state_dict(), net.state_dict(), rtol=0, atol=0)
