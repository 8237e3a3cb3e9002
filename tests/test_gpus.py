"""What only a GPU shows, of more than one module; the rest stands beside each module's tests."""

import os
import subprocess
import sys

import pytest
import torch
from test_training_on_ranks import part_of_the_data, trained
from torch import nn
from torch.nn import functional as F

from torchclinic.checkpoints import inspect_checkpoint, load_into
from torchladder.data import DeviceBatches, dataloader, load_dataset
from torchladder.launching import launch
from torchladder.models import LeNet
from torchladder.training import train

pytestmark = pytest.mark.gpu


def assert_close(state, expected, **tolerance):
    assert state.keys() == expected.keys()
    for name, tensor in expected.items():
        torch.testing.assert_close(state[name].cpu(), tensor.cpu(), msg=name, **tolerance)


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


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_mixed_precision_computes_in_the_type_that_was_asked_for(dtype):
    net = LeNet().cuda()
    images, labels = torch.randn(64, 1, 28, 28, device="cuda"), torch.zeros(64).long().cuda()
    with torch.autocast("cuda", dtype):
        logits = net(images)
        loss = F.cross_entropy(logits, labels)
    assert (logits.dtype, loss.dtype) == (dtype, torch.float32)
    loss.backward()
    assert {parameter.grad.dtype for parameter in net.parameters()} == {torch.float32}


def test_one_gpu_computes_what_the_cpu_computes():
    expected, numbers = trained(batch_size=64)
    state, same = trained(batch_size=64, rung="gpu")
    assert_close(state, expected, rtol=1e-6, atol=1e-9)
    assert same[-1] == pytest.approx(numbers[-1], rel=1e-4)


def test_data_parallel_computes_what_one_gpu_computes():
    expected, _ = trained(batch_size=64, rung="gpu")
    state, _ = trained(batch_size=64, rung="dp")
    assert_close(state, expected, rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize(
    ("world_size", "backend"),
    [(1, "nccl"), (2, "gloo"), pytest.param(2, "nccl", marks=pytest.mark.multigpu)],
)
def test_ranks_compute_what_one_gpu_computes(world_size, backend):
    expected, numbers = trained(batch_size=128, rung="gpu")
    options = {
        "batch_size": 128 // world_size,
        "rung": "ddp",
        "world_size": world_size,
        "backend": backend,
    }
    for state, same in launch(trained, **options):
        assert_close(state, expected, rtol=1e-6, atol=1e-9)
        assert same[-1] == pytest.approx(numbers[-1], rel=1e-4)


def test_a_file_saved_on_the_gpu_opens_without_one(tmp_path):
    net = LeNet().cuda()
    torch.save(nn.DataParallel(net).state_dict(), tmp_path / "gpu.pt")
    torch.save(net(torch.ones(1, 1, 28, 28, device="cuda")).cpu(), tmp_path / "logits.pt")
    assert "cuda:0" in str(inspect_checkpoint(tmp_path / "gpu.pt"))
    program = """
import torch
from torchclinic.checkpoints import load_into
from torchladder.models import LeNet
assert not torch.cuda.is_available()
try:
    torch.load("gpu.pt")
except RuntimeError as error:
    print(error)
net = LeNet()
load_into(net, "gpu.pt")
torch.testing.assert_close(
    net(torch.ones(1, 1, 28, 28)), torch.load("logits.pt"), rtol=1e-3, atol=1e-3
)
"""
    environment = os.environ | {"CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(
        [sys.executable, "-c", program],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("Attempting to deserialize object on a CUDA device but ")
    load_into(net, tmp_path / "gpu.pt")
    assert next(net.parameters()).is_cuda


def test_a_run_on_the_gpu_goes_on_without_one(tmp_path):
    options = {"epochs": 1, "checkpoint_dir": tmp_path}
    data, net = part_of_the_data(101), LeNet()
    train(net, data, rung="gpu", **options)
    other = LeNet()
    assert len(train(other, data, **options)) == 1  # what was trained, given back
    assert_close(other.state_dict(), net.state_dict(), rtol=0, atol=0)


def test_too_much_is_refused_in_pytorchs_words_and_the_gpu_stays_usable():
    with pytest.raises(torch.OutOfMemoryError, match=r"^CUDA out of memory\. Tried to allocate "):
        torch.empty(2**43, device="cuda")
    assert torch.ones(2, device="cuda").sum().item() == 2


@pytest.mark.multigpu
def test_data_parallel_splits_a_batch_over_two_gpus():
    places = []
    net = LeNet().cuda()
    net.register_forward_hook(lambda module, inputs, logits: places.append(inputs[0].device.index))
    images = torch.randn(64, 1, 28, 28, device="cuda")
    logits = nn.DataParallel(net)(images)
    assert sorted(places) == list(range(torch.cuda.device_count()))
    torch.testing.assert_close(logits, net(images), rtol=1e-3, atol=1e-3)
