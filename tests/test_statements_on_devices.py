"""Statements on devices, placement and errors in PyTorch 2.10 and later, on two CUDA GPUs or more.

Each test says one thing that is true on real GPUs; its mark names the source. Words of errors
are CUDA's: those of the binaries of torch 2.15 (libtorch_*.so, libc10_cuda.so), and of reports.
Written without a look at the simulation, which they judge: make simulated.
"""

import copy
import gc
import io
import multiprocessing
import os
import pickle
import re
import subprocess
import sys
from functools import partial

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import torch.nn.functional as F
from torch import nn
from torch.nn.utils.rnn import pack_padded_sequence
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader

from torchladder.launching import launch

gpu, multigpu = pytest.mark.gpu, pytest.mark.multigpu
GPUS = torch.cuda.device_count()
VISIBLE = os.environ.get("CUDA_VISIBLE_DEVICES") or ",".join(map(str, range(GPUS)))
SAME = "Expected all tensors to be on the same device, but "


@pytest.fixture(autouse=True)
def on_gpus_and_with_global_state_restored(request):
    if not torch.cuda.is_available():
        pytest.skip("no GPU")
    if request.node.get_closest_marker("multigpu") and GPUS < 2:
        pytest.skip("one GPU only")
    with torch.random.fork_rng(devices=range(GPUS)):
        torch.manual_seed(0)
        yield
        torch.set_default_device(None)
        torch.cuda.set_device(0)


def says(words, kind=RuntimeError):
    return pytest.raises(kind, match=re.escape(words))


def child(code, **env):
    """What a new Python prints when it runs the code with these environment variables."""
    command, env = [sys.executable, "-c", code], {**os.environ, **env}
    return subprocess.check_output(command, env=env, text=True, timeout=180).split()


def in_ranks(function):
    """A test that runs function(rank, world, folder) in two processes with a GPU each, on NCCL."""

    def test(tmp_path):
        def ranked():
            function(dist.get_rank(), dist.get_world_size(), str(tmp_path))

        launch(ranked, backend="nccl", timeout=240)

    return test


# Devices and indices.


@gpu("torch.device: c10::Device::operator==; test_cuda_multigpu.py test_grad_scaling_device_as_key")
def test_device_cuda_without_an_index_is_not_equal_to_cuda_0():
    assert torch.device("cuda") != torch.device("cuda:0") == torch.device("cuda", 0)
    assert hash(torch.device("cuda:0")) == hash(torch.ones(1, device="cuda:0").device)


@multigpu("test/test_cuda_multigpu.py test_cuda_set_device, test_tensor_device")
def test_cuda_without_an_index_means_the_current_device():
    with torch.cuda.device(1):
        assert torch.ones(1, device="cuda").device == torch.ones(1).cuda().device
        assert torch.ones(1).to("cuda").get_device() == torch.cuda.current_device() == 1
    assert torch.ones(1).cuda().get_device() == 0 == torch.cuda.current_device()


@multigpu("test/test_cuda_multigpu.py test_autogpu; docs notes/cuda.html")
def test_the_current_device_does_not_decide_where_an_operation_runs():
    x = torch.ones(2, device="cuda:0")
    with torch.cuda.device(1):
        assert (x + x).get_device() == x.new_zeros(1).get_device() == 0
        assert torch.zeros_like(x).get_device() == 0
        assert x.cuda().get_device() == 1


@multigpu("test/test_cuda.py test_multi_device_context_manager; docs accelerator.html")
def test_the_accelerator_is_cuda_and_shares_its_current_device():
    assert torch.accelerator.current_accelerator().type == "cuda"
    assert torch.accelerator.device_count() == torch.cuda.device_count()
    with torch.accelerator.device_index(1):
        assert torch.cuda.current_device() == torch.accelerator.current_device_index() == 1
    assert torch.cuda.current_device() == 0


# Factories and the default device.


@multigpu("docs torch.set_default_device; test/test_utils.py TestDeviceUtils")
def test_a_device_as_a_context_places_factories_and_modules():
    with torch.device("cuda:1"):
        assert torch.ones(1).get_device() == nn.Linear(1, 1).weight.get_device() == 1
        assert torch.ones(1, device="cpu").is_cpu
    assert torch.ones(1).is_cpu


@multigpu("docs torch.set_default_device (its example)")
def test_a_default_device_without_an_index_follows_the_current_device():
    torch.set_default_device("cuda")
    assert torch.get_default_device() == torch.device("cuda:0") == torch.tensor([1]).device
    torch.cuda.set_device(1)
    assert torch.get_default_device() == torch.device("cuda:1") == torch.tensor([1]).device


@gpu("github.com/pytorch/pytorch/issues/44714; torch/utils/data/sampler.py RandomSampler")
def test_a_shuffling_loader_breaks_under_a_default_device():
    torch.set_default_device("cuda")
    with says("Expected a 'cuda' device type for generator but found 'cpu'"):
        next(iter(DataLoader(range(4), shuffle=True)))


@multigpu("docs torch.tensor: if device is None and data is a tensor, the device of data is used")
def test_torch_tensor_of_a_cuda_tensor_stays_on_its_gpu():
    x = torch.ones(2, device="cuda:1")
    with pytest.warns(UserWarning, match="To copy construct from a tensor"):
        assert torch.tensor(x).device == x.device
    assert torch.as_tensor(x) is x


# Moves.


@multigpu("test/test_cuda_multigpu.py test_copy_device")
def test_a_move_to_the_device_it_is_on_returns_the_tensor_itself():
    x = torch.ones(1, device="cuda:1")
    assert x.to("cuda:1") is x is x.cuda(1)
    assert x.to("cuda:1", copy=True) is not x


@gpu("test/test_cuda.py test_to_non_blocking")
def test_a_non_blocking_copy_to_the_cpu_is_pinned():
    x = torch.ones(8, device="cuda")
    assert x.to("cpu", non_blocking=True).is_pinned()
    assert not x.to("cpu").is_pinned()
    torch.cuda.synchronize()


@multigpu("torch/_tensor.py __deepcopy__, __reduce_ex__")
def test_deepcopy_and_pickle_keep_the_gpu():
    x = torch.ones(1, device="cuda:1")
    assert copy.deepcopy(x).device == pickle.loads(pickle.dumps(x)).device == x.device


@gpu("test/test_sparse.py test_to_sparse..., test_cuda_empty")
def test_a_sparse_tensor_moves_with_its_indices_and_values():
    x = torch.eye(2).to_sparse().cuda()
    assert x.is_cuda
    assert x.indices().is_cuda
    assert x.values().is_cuda


# What is refused.

h, c = torch.ones, partial(torch.ones, device="cuda")
zero = partial(torch.tensor, [0])
FOUND = SAME + "found at least two devices, cuda:0 and cpu!"
ORDINAL = "CUDA error: invalid device ordinal"
TYPES = "Input type (torch.cuda.FloatTensor) and weight type (torch.FloatTensor) should be the same"
STATE = "Input and hidden tensors are not at the same device, found input tensor at cuda:0 and"
INDEX = "indices should be either on cpu or on the same device as the indexed tensor (cpu)"
LENGTHS = "'lengths' argument should be a 1D CPU int64 tensor, but got 1D cuda:0 Long tensor"
PINNED = "cannot pin 'torch.cuda.FloatTensor' only dense CPU tensors can be pinned"
NUMPY = "can't convert cuda:0 device type tensor to numpy. Use Tensor.cpu() to copy the tensor to "
NUMPY += "host memory first."
STORAGE = (
    'Attempted to set the storage of a tensor on device "cpu" to a storage on different device '
)
STORAGE += '"cuda:0".  This is no longer allowed; the devices must match.'
GRAD = "attempting to assign a gradient with device type 'cpu' to a tensor with"
UNSAFE = "torch.nn.functional.binary_cross_entropy and torch.nn.BCELoss are unsafe to autocast."
GENERATOR = "Expected a 'cpu' device type for generator but found 'cuda'"


def in_half(function):
    return torch.autocast("cuda")(function)


def got(name, one, other, method):
    where = f"(when checking argument in method wrapper_CUDA_{method})"
    return SAME + f"got {name} is on {one}, different from other tensors on {other} {where}"


CPU, GPU = ("cpu", "cuda:0"), ("cuda:0", "cpu")
REFUSED = {  # what is done: how, and the error's words
    # TensorIterator.cpp compute_types; c10::impl::common_device_check_failure; Convolution.cpp;
    # RNN.h; TensorAdvancedIndexingUtils.h check_indices_on_cpu_or_selfdevice; PackedSequence.cpp;
    # words as in github.com/ClownsharkBatwing/RES4LYF/pull/223
    "add": (lambda: h(2) + c(2), FOUND),
    "add to a CUDA scalar": (lambda: h(2) + c(()), FOUND),
    "out=": (lambda: torch.add(c(2), 1, out=h(2)), FOUND),
    "mse_loss": (lambda: F.mse_loss(c(2), h(2)), FOUND),
    "where": (lambda: torch.where(c(2) > 0, h(2), c(2)), SAME),
    "equal": (lambda: torch.equal(h(2), c(2)), SAME),
    "matmul": (lambda: c(2, 2) @ h(2, 2), got("mat2", *CPU, "mm")),
    "cat": (lambda: torch.cat([c(2), h(2)]), got("tensors", *CPU, "cat")),
    "linear, CPU model": (lambda: nn.Linear(2, 2)(c(1, 2)), got("mat1", *GPU, "addmm")),
    "linear, CPU input": (lambda: nn.Linear(2, 2).cuda()(h(1, 2)), got("mat1", *CPU, "addmm")),
    "embedding": (lambda: nn.Embedding(2, 2).cuda()(zero()), got("index", *CPU, "_index_select")),
    "gather": (lambda: c(2).gather(0, zero()), got("index", *CPU, "gather")),
    "loss": (lambda: F.cross_entropy(c(1, 2), zero()), got("target", *CPU, "nll_loss_forward")),
    "convolution": (lambda: nn.Conv1d(1, 1, 1)(c(1, 1, 1)), TYPES),
    "its bias": (lambda: F.conv1d(c(1, 1, 1), c(1, 1, 1), h(1)), TYPES.replace("weight", "bias")),
    "LSTM": (lambda: nn.LSTM(1, 1).cuda()(c(1, 1, 1), (h(1, 1, 1), h(1, 1, 1))), STATE),
    "indexing": (lambda: h(2)[zero(device="cuda")], INDEX),
    "lengths": (lambda: pack_padded_sequence(c(1, 1, 1), c(1).long()), LENGTHS),
    # github.com/meta-pytorch/tritonparse/issues/176 (torch.AcceleratorError)
    "a tensor on a GPU that is not there": (lambda: h(1, device=f"cuda:{GPUS}"), ORDINAL),
    "to make it current": (lambda: torch.cuda.set_device(GPUS), ORDINAL),
    # ATen/native/Memory.cpp _pin_memory; reported with a DataLoader's pin_memory
    "to pin what is on a GPU": (lambda: c(1).pin_memory(), PINNED),
    # torch/csrc/utils/tensor_numpy.cpp tensor_to_numpy
    "Tensor.numpy": (lambda: c(1).numpy(), NUMPY, TypeError),
    "np.asarray": (lambda: np.asarray(c(1)), NUMPY, TypeError),
    # ATen/native/Resize.h checkSetStorage; test_torch.py test_tensor_set_errors_multigpu
    "a storage on another device": (lambda: h(1).set_(c(1).untyped_storage()), STORAGE),
    # python_variable.cpp THPVariable_set_grad; github.com/kohya-ss/musubi-tuner/issues/791
    "a gradient on another device": (lambda: setattr(c(1, requires_grad=True), "grad", h(1)), GRAD),
    # ATen/autocast_mode.cpp; docs amp.html (prefer binary_cross_entropy_with_logits)
    "BCE under autocast": (lambda: in_half(F.binary_cross_entropy)(c(2) / 2, c(2) / 2), UNSAFE),
    # ATen/core/Generator.h check_generator
    "a CUDA generator for the CPU": (
        lambda: torch.rand(1, generator=torch.Generator("cuda")),
        GENERATOR,
    ),
}


@gpu("above each row")
@pytest.mark.parametrize("case", REFUSED)
def test_is_refused_in_the_words(case):
    do, words, *kind = REFUSED[case]
    with says(words, *kind):
        do()


@multigpu("ATen/TensorIterator.cpp compute_types: only CPU scalars are let through")
def test_mixing_two_gpus_is_an_error_even_with_a_scalar():
    for y in (torch.ones(2, device="cuda:1"), torch.ones((), device="cuda:1")):
        with says(SAME + "found at least two devices, cuda:0 and cuda:1!"):
            torch.ones(2, device="cuda:0") + y


@multigpu("test/test_torch.py, test_binary_ufuncs.py test_cuda_tensor_pow_scalar_tensor")
def test_a_zero_dimensional_cpu_tensor_may_meet_a_gpu_tensor():
    x = torch.tensor(2.0) * torch.ones(2, device="cuda:1")
    assert x.get_device() == 1
    assert x.tolist() == [2, 2]


@multigpu("test/test_indexing.py test_cpu_indices")
def test_a_cpu_index_may_index_a_cuda_tensor():
    x = torch.arange(4.0, device="cuda:1")
    x[torch.tensor([0])] = 5
    assert x[torch.tensor([0, 3])].tolist() == [5, 3]
    assert x[torch.tensor([0])].get_device() == 1


# Gradients.


@multigpu("test/test_cuda_multigpu.py test_streaming_backwards_device_transfer; test_autograd.py")
def test_a_gradient_lies_where_its_leaf_does_and_sums_over_gpus():
    x = torch.ones(1, requires_grad=True)
    (x.to("cuda:0").sum() + 2 * x.to("cuda:1").sum().to("cuda:0")).backward()
    assert x.grad.is_cpu
    assert x.grad.item() == 3


@multigpu("torch/nn/utils/clip_grad.py _get_total_norm (on the first gradient's device)")
def test_clip_grad_norm_works_over_gpus():
    xs = [torch.ones(1, device=f"cuda:{i}", requires_grad=True) for i in (1, 0)]
    for x, grad in zip(xs, (3.0, 4.0), strict=True):
        x.grad = torch.full_like(x, grad)
    norm = nn.utils.clip_grad_norm_(xs, 1.0)
    assert norm.get_device() == 1
    assert norm.item() == pytest.approx(5)
    assert [x.grad.item() for x in xs] == pytest.approx([0.6, 0.8], rel=1e-4)


@gpu("docs torch.utils.checkpoint: preserve_rng_state=True stashes the device's RNG state")
def test_checkpoint_redraws_the_same_dropout_on_the_gpu():
    x = torch.ones(64, device="cuda", requires_grad=True)
    out = checkpoint(F.dropout, x, use_reentrant=False)
    out.sum().backward()
    assert torch.equal(x.grad, out)
    assert 0 < out.count_nonzero() < 64


# Modules and optimizers.


@gpu("docs nn.Module.to_empty; test/nn/test_module... test_to_empty")
def test_to_empty_brings_a_meta_module_to_the_gpu():
    model = nn.Linear(1, 1, device="meta")
    with says("Cannot copy out of meta tensor; no data!", NotImplementedError):
        model.to("cuda")
    assert model.to_empty(device="cuda").weight.is_cuda


@gpu("docs nn.Module.load_state_dict (assign)")
def test_load_state_dict_copies_into_the_modules_device_unless_it_assigns():
    model, saved = nn.Linear(1, 1, device="cuda"), nn.Linear(1, 1).state_dict()
    model.load_state_dict(saved)
    assert model.weight.is_cuda
    model.load_state_dict(saved, assign=True)
    assert model.weight.is_cpu


@gpu("module.py _apply keeps parameters; docs torch.optim (constructing it)")
def test_an_optimizer_made_before_the_move_still_trains_the_model():
    model = nn.Linear(1, 1)
    sgd = torch.optim.SGD(model.parameters(), lr=1.0)
    before = model.cuda().weight.detach().clone()
    model(torch.ones(1, 1, device="cuda")).sum().backward()
    sgd.step()
    torch.testing.assert_close(model.weight.detach(), before - 1)


@gpu("torch/optim; ATen foreach utils (_group_tensors_by_device_and_dtype)")
def test_an_optimizers_state_does_not_move_with_the_model():
    x = nn.Parameter(torch.ones(1))
    adam = torch.optim.Adam([x])
    x.grad = torch.ones(1)
    adam.step()
    x.grad = None
    x.data = x.data.cuda()
    x.grad = torch.ones_like(x)
    words = "Tensors of the same index must be on the same device|" + SAME
    with pytest.raises(RuntimeError, match=words):
        adam.step()


# Saving and loading.


@multigpu("docs torch.load; test/test_cuda_multigpu.py test_multigpu_serialization_remap(_dict)")
@pytest.mark.parametrize(
    ("map_location", "lands_on"),
    [
        (None, "cuda:1"),
        ("cpu", "cpu"),
        ({"cuda:1": "cuda:0"}, "cuda:0"),
        (lambda storage, location: storage.cuda(0), "cuda:0"),
    ],
)
def test_map_location_says_where_a_saved_cuda_1_tensor_lands(map_location, lands_on):
    file = io.BytesIO()
    torch.save(torch.ones(1, device="cuda:1"), file)
    file.seek(0)
    assert str(torch.load(file, map_location=map_location).device) == lands_on


# DataParallel and its functions.


class Where(nn.Module):
    """Says on which GPU each sample was seen."""

    def forward(self, x):
        return torch.full((len(x),), float(x.get_device()), device=x.device)


@multigpu("docs nn.DataParallel (its input may be on the CPU); torch.chunk")
@pytest.mark.parametrize(("batch", "seen"), [(5, [0, 0, 0, 1, 1]), (1, [0])])
def test_data_parallel_chunks_the_batch_over_the_gpus(batch, seen):
    model = nn.DataParallel(Where(), device_ids=[0, 1])
    assert model(torch.ones(batch)).tolist() == seen


@multigpu("docs nn.DataParallel; test/distributed/test_data_parallel.py test_data_parallel")
def test_data_parallel_sums_the_replicas_gradients_into_the_module():
    model = nn.DataParallel(nn.Linear(1, 1).cuda(), [0, 1])
    model(torch.tensor([[1.0], [3.0]])).sum().backward()
    assert model.module.weight.grad.get_device() == 0
    assert model.module.weight.grad.item() == 4


@multigpu("docs nn.DataParallel, first warning (the replica on device[0] shares storage)")
def test_data_parallel_keeps_the_first_replicas_batch_norm_buffers():
    model = nn.DataParallel(nn.BatchNorm1d(1, momentum=1.0).cuda(), [0, 1])
    model(torch.tensor([[0.0], [2.0], [10.0], [20.0]]))
    assert model.module.running_mean.item() == 1
    assert model.module.num_batches_tracked.item() == 1


@multigpu("torch/nn/parallel/scatter_gather.py, _functions.py; test_cuda_multigpu.py test_gather")
def test_the_parallel_functions_split_copy_and_gather_over_gpus():
    chunks = nn.parallel.scatter(torch.arange(3.0), [0, 1])
    assert [(c.get_device(), c.tolist()) for c in chunks] == [(0, [0, 1]), (1, [2])]
    assert nn.parallel.gather(chunks, "cpu").tolist() == [0, 1, 2]
    with says("Gather function not implemented for CPU tensors", AssertionError):
        nn.parallel.gather([torch.ones(1), torch.ones(1)], 0)
    copies = nn.parallel.comm.broadcast(torch.ones(1, device="cuda:0"), [0, 1])
    replicas = nn.parallel.replicate(nn.Linear(1, 1).cuda(), [0, 1])
    for i in (0, 1):
        assert copies[i].get_device() == replicas[i].weight.get_device() == i


# Processes: ranks on NCCL.


@multigpu("docs notes/ddp.html; test/distributed/test_c10d_nccl.py")
@in_ranks
def test_ddp_gradients_are_those_of_one_process(rank, world, folder):
    torch.manual_seed(0)
    alone, x = nn.Linear(3, 2).cuda(), torch.randn(2 * world, 3).cuda()
    model = nn.parallel.DistributedDataParallel(copy.deepcopy(alone), device_ids=[rank])
    alone(x).square().mean().backward()
    model(x[2 * rank : 2 * rank + 2]).square().mean().backward()
    torch.testing.assert_close(model.module.weight.grad, alone.weight.grad)


@multigpu("ProcessGroup.hpp getBackend; github.com/zai-org/CogVLM/issues/328")
@in_ranks
def test_an_nccl_group_has_no_backend_for_a_cpu_tensor(rank, world, folder):
    with says("No backend type associated with device type cpu"):
        dist.all_reduce(torch.ones(1))


@multigpu("docs torch.distributed (all_gather_object, scatter, reduce_scatter_tensor)")
@in_ranks
def test_nccl_gathers_objects_scatters_and_reduce_scatters(rank, world, folder):
    objects = [None] * world
    dist.all_gather_object(objects, {"rank": rank})
    assert objects == [{"rank": i} for i in range(world)]
    out, parts = torch.zeros(1).cuda(), [torch.full((1,), 5.0 + i).cuda() for i in range(world)]
    dist.scatter(out, parts if rank == 0 else None, src=0)
    assert out.item() == 5 + rank
    assert out.get_device() == rank
    dist.reduce_scatter_tensor(out, torch.arange(float(world)).cuda())
    assert out.item() == rank * world


@multigpu("docs distributed.fsdp.fully_shard; test/distributed/_composable/fsdp")
@in_ranks
def test_fully_shard_shards_on_dim_0_and_trains_as_one_process_does(rank, world, folder):
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import DTensor

    torch.manual_seed(0)
    alone, x = nn.Linear(3, 4).cuda(), torch.randn(2 * world, 3).cuda()
    model = fully_shard(copy.deepcopy(alone))
    alone(x).square().mean().backward()
    model(x[2 * rank : 2 * rank + 2]).square().mean().backward()
    assert isinstance(model.weight, DTensor)
    assert model.weight.shape == (4, 3)
    assert model.weight.to_local().shape == (4 // world, 3)
    assert model.weight.to_local().get_device() == rank
    torch.testing.assert_close(model.weight.grad.full_tensor(), alone.weight.grad)


@multigpu("docs distributed.tensor, distributed.checkpoint (load-time resharding)")
@in_ranks
def test_a_dtensor_lies_on_its_ranks_gpu_and_dcp_loads_it_resharded(rank, world, folder):
    import torch.distributed.checkpoint as dcp
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    mesh = init_device_mesh("cuda", (world,))
    assert mesh.device_type == "cuda"
    assert mesh.get_local_rank() == rank
    x = distribute_tensor(torch.arange(4.0), mesh, [Shard(0)])
    assert x.to_local().get_device() == rank
    assert x.to_local()[0].item() == 2 * rank
    assert x.full_tensor().tolist() == [0, 1, 2, 3]
    dcp.save({"x": x}, checkpoint_id=folder)
    y = distribute_tensor(torch.zeros(4), mesh, [Replicate()])
    dcp.load({"x": y}, checkpoint_id=folder)
    assert y.to_local().tolist() == [0, 1, 2, 3]
    assert y.to_local().get_device() == rank


# Processes: workers, forks, and what is visible.


def _zeros(_=None):
    return torch.zeros(1, device="cuda").item()


FORK = (
    "Cannot re-initialize CUDA in forked subprocess. To use CUDA with multiprocessing, "
    "you must use the 'spawn' start method"
)


@gpu("torch/cuda/__init__.py _lazy_init; docs notes/multiprocessing.html")
def test_cuda_cannot_be_used_in_a_fork_of_a_process_that_used_it():
    _zeros()
    with multiprocessing.get_context("fork").Pool(1) as pool, says(FORK):
        pool.map_async(_zeros, [0]).get(timeout=120)


@gpu("docs torch.utils.data (pin_memory); test/test_dataloader.py TestDictDataLoader")
def test_a_loader_with_workers_can_pin_its_batches():
    data = [{"x": torch.ones(1)} for _ in range(4)]
    for batch in DataLoader(data, batch_size=2, num_workers=2, pin_memory=True, timeout=120):
        assert batch["x"].is_cpu
        assert batch["x"].is_pinned()


def _add_one(queue, done):
    x = queue.get()
    x.add_(1)
    torch.cuda.synchronize()
    del x
    done.set()


@gpu("test/test_multiprocessing.py test_cuda_simple; docs notes/multiprocessing.html")
def test_a_cuda_tensor_sent_to_a_spawned_process_shares_its_memory():
    context, x = mp.get_context("spawn"), torch.zeros(2, device="cuda")
    queue, done = context.SimpleQueue(), context.Event()
    process = context.Process(target=_add_one, args=(queue, done), daemon=True)
    process.start()
    queue.put(x)
    assert done.wait(120)
    assert x.tolist() == [1, 1]
    process.join(60)


@multigpu("docs CUDA environment variables (CUDA_VISIBLE_DEVICES); torch/cuda/__init__.py")
def test_visible_devices_chooses_and_orders_the_gpus():
    first, second = VISIBLE.split(",")[:2]
    code = "import torch as t; print(*[t.cuda.get_device_properties(i).uuid for i in (0, 1)])"
    uuids = [str(torch.cuda.get_device_properties(i).uuid) for i in (1, 0)]
    assert child(code, CUDA_VISIBLE_DEVICES=f"{second},{first}") == uuids


@gpu("c10/cuda/CUDAFunctions.cpp device_count_ensure_non_zero")
def test_no_visible_devices_means_no_cuda():
    code = "import torch\nprint(torch.cuda.is_available(), torch.cuda.device_count())\n"
    code += "try: torch.ones(1).cuda()\nexcept RuntimeError as error: print(error)"
    said = " ".join(child(code, CUDA_VISIBLE_DEVICES=""))
    assert said == "False 0 No CUDA GPUs are available"


@multigpu("torch/cuda/__init__.py device_count (cached once CUDA is initialized); CUDA guide")
def test_visible_devices_set_after_the_first_use_has_no_effect():
    code = "import os, torch\ntorch.ones(1).cuda(); before = torch.cuda.device_count()\n"
    code += "os.environ['CUDA_VISIBLE_DEVICES'] = '0'; torch.ones(1).cuda(1)\n"
    code += "print(before, torch.cuda.device_count())"
    assert child(code, CUDA_VISIBLE_DEVICES=VISIBLE) == [str(GPUS)] * 2


# Memory.


@multigpu("c10/cuda/CUDACachingAllocator.cpp (kMinBlockSize); test/test_cuda.py test_memory_stats")
def test_allocated_memory_is_counted_in_512_bytes_for_each_gpu_and_falls_after_del():
    gc.collect()
    before = [torch.cuda.memory_allocated(i) for i in (0, 1)]
    x, y = torch.empty(1, device="cuda:1"), torch.empty(129, device="cuda:1")
    assert torch.cuda.memory_allocated(1) - before[1] == 512 + 1024
    assert torch.cuda.memory_allocated(0) == before[0]
    del x, y
    assert torch.cuda.memory_allocated(1) == before[1]


@gpu("docs torch.cuda.max_memory_allocated, reset_peak_memory_stats; test_cuda_multigpu.py")
def test_the_peak_of_memory_stays_until_it_is_reset():
    gc.collect()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    torch.empty(2**20, dtype=torch.uint8, device="cuda")
    assert torch.cuda.max_memory_allocated() == before + 2**20
    torch.cuda.reset_peak_memory_stats()
    assert torch.cuda.max_memory_allocated() == before == torch.cuda.memory_allocated()


@gpu("docs torch.amp: CPU op-specific behavior, whose list for float32 has no softmax")
def test_autocast_of_the_cpu_leaves_a_softmax_there_in_bfloat16():
    scores = torch.ones(2, 2, dtype=torch.bfloat16)
    with torch.autocast("cpu", torch.bfloat16), torch.autocast("cuda", torch.bfloat16):
        assert scores.softmax(-1).dtype == torch.bfloat16
        assert scores.cuda().softmax(-1).dtype == torch.float32


@gpu("torch/autograd/graph.py GradientEdge; torch.distributed.pipelining's backward pass")
def test_a_backward_pass_may_begin_at_an_edge_of_the_graph():
    x = torch.ones(2, device="cuda", requires_grad=True)
    edge = torch.autograd.graph.get_gradient_edge(2 * x)
    torch.autograd.backward([edge], [torch.ones(2, device="cuda")])
    assert x.grad.tolist() == [2, 2]


@gpu("an H200 with torch 2.11")
def test_a_peak_is_not_reset_before_cuda_has_started():
    code = """
import torch
from torchladder.measuring import reset_peak_memory
try:
    torch.cuda.reset_peak_memory_stats(0)
except RuntimeError as error:
    print(error)
reset_peak_memory(torch.device("cuda", 0))
"""
    assert child(code) == ["Invalid", "device", "argument"]


@gpu("test/test_cuda_multigpu.py test_mem_get_info")
def test_mem_get_info_sees_what_is_reserved():
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info()
    x = torch.empty(64 * 2**20, dtype=torch.uint8, device="cuda")
    assert torch.cuda.mem_get_info()[0] < free < total == torch.cuda.mem_get_info()[1]
    del x


@gpu("test/test_cuda.py test_out_of_memory")
def test_asking_for_far_too_much_is_out_of_memory_and_harms_nothing():
    words = "CUDA out of memory. Tried to allocate 800000000.00 GiB. GPU 0 has a total capacity of"
    with says(words, torch.OutOfMemoryError):
        torch.empty(800000000 * 2**30, dtype=torch.int8, device="cuda")
    assert torch.cuda.OutOfMemoryError is torch.OutOfMemoryError
    assert torch.ones(2, device="cuda").sum().item() == 2


@gpu("test/test_cuda.py test_set_per_process_memory_fraction")
def test_a_process_may_be_held_to_a_fraction_of_the_memory():
    total = torch.cuda.get_device_properties(0).total_memory
    torch.cuda.empty_cache()
    try:
        torch.cuda.set_per_process_memory_fraction(0.1, 0)
        with says("CUDA out of memory. ", torch.OutOfMemoryError):
            torch.empty(total // 5, dtype=torch.int8, device="cuda")
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0, 0)


# Streams and events.


@multigpu("test/test_cuda_multigpu.py test_stream_context")
def test_a_stream_as_a_context_makes_its_gpu_current():
    stream = torch.cuda.Stream(device=1)
    with torch.cuda.stream(stream):
        assert torch.cuda.current_stream() == stream
        assert torch.cuda.current_device() == 1
    assert torch.cuda.current_stream() == torch.cuda.default_stream(0)


@gpu("test/test_cuda.py test_record_stream; docs Tensor.record_stream")
def test_work_on_a_side_stream_is_seen_after_waiting_for_it():
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        x = torch.ones(4, device="cuda")
    torch.cuda.current_stream().wait_stream(side)
    assert x.record_stream(torch.cuda.current_stream()) is None
    assert x.sum().item() == 4


# Random numbers.


@multigpu("torch/cuda/random.py manual_seed_all; docs torch.manual_seed (seeds all devices)")
def test_manual_seed_all_gives_each_gpu_the_same_numbers():
    for seed in (torch.cuda.manual_seed_all, torch.manual_seed):
        seed(7)
        assert torch.cuda.initial_seed() == 7
        assert torch.rand(4, device="cuda:0").tolist() == torch.rand(4, device="cuda:1").tolist()


@gpu("docs notes/randomness.html (no reproducibility between CPU and GPU, even with equal seeds)")
def test_the_cpu_and_the_gpu_draw_from_streams_of_their_own():
    torch.manual_seed(0)
    host, state = torch.rand(4), torch.get_rng_state()
    assert torch.rand(4, device="cuda").tolist() != host.tolist()
    assert torch.equal(torch.get_rng_state(), state)


# Mixed precision.


@gpu("docs amp.html (CUDA ops that can autocast); testing/_internal/autocast_test_lists.py")
@pytest.mark.parametrize("half", [torch.float16, torch.bfloat16])
def test_autocast_runs_products_in_half_and_softmax_sums_and_losses_in_float32(half):
    x = torch.ones(2, 2, device="cuda")
    with torch.autocast("cuda", dtype=half):
        y = x @ x
        assert y.dtype == nn.Linear(2, 2, device="cuda")(x).dtype == half
        assert y.softmax(0).dtype == y.sum().dtype == torch.float32
        assert F.mse_loss(y, y).dtype == torch.float32
        assert F.cross_entropy(y, torch.zeros(2, dtype=torch.long, device="cuda")).dtype == x.dtype


@gpu("docs torch.autocast (dtype), torch.get_autocast_dtype")
def test_autocast_for_cuda_is_float16_by_default_and_leaves_the_cpu_alone():
    with torch.autocast("cuda"):
        assert torch.get_autocast_dtype("cuda") == torch.float16
        assert torch.is_autocast_enabled("cuda")
        assert not torch.is_autocast_enabled("cpu")
        assert (torch.ones(2, 2) @ torch.ones(2, 2)).dtype == torch.float32


@gpu("docs torch.amp.GradScaler (backoff_factor=0.5); test/test_cuda.py test_grad_scaling_...")
def test_grad_scaler_skips_the_step_and_halves_its_scale_on_an_infinite_gradient():
    weight = nn.Parameter(torch.ones(1, device="cuda"))
    sgd, scaler = torch.optim.SGD([weight], lr=1.0), torch.amp.GradScaler("cuda", init_scale=8.0)
    scaler.scale(weight * torch.inf).backward()
    scaler.step(sgd)
    scaler.update()
    assert weight.item() == 1
    assert scaler.get_scale() == 4
    sgd.zero_grad()
    scaler.scale(weight * 0.5).backward()
    scaler.step(sgd)
    assert weight.item() == 0.5
