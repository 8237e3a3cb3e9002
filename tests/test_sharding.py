"""FSDP and sharded checkpoints, as chapter 17 tells of them; two real processes over gloo."""

import os
import signal
import time
from pathlib import Path

import nbformat
import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from torch import nn
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_state_dict,
)
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel

from torchclinic.checkpoints import CheckpointError, fix_checkpoint, inspect_checkpoint
from torchladder.launching import LaunchError, launch

CHAPTER = Path(__file__).parent.parent / "notebooks" / "17_rung_5_fsdp.ipynb"
WHOLE = StateDictOptions(full_state_dict=True, cpu_offload=True)
BROADCAST = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)

pytestmark = [
    pytest.mark.slow,
    # dcp outside of a process group says that it takes that for a single process.
    pytest.mark.filterwarnings("ignore:torch.distributed is disabled"),
    pytest.mark.filterwarnings("ignore:TypedStorage is deprecated"),
]


def on_ranks(function, *args, world_size=2, **options):
    return launch(function, *args, world_size=world_size, timeout=100, show="none", **options)


def device():
    return torch.device("cuda" if dist.get_backend() == "nccl" else "cpu")


def build():
    """Sizes that two ranks cannot share evenly, and a shared seed."""
    torch.manual_seed(0)
    layers = nn.Linear(12, 7), nn.Tanh(), nn.Linear(7, 5), nn.Tanh(), nn.Linear(5, 3)
    return nn.Sequential(*layers).double()


def sharded(net, **options):
    mesh = dist.init_device_mesh(device().type, (dist.get_world_size(),))
    for layer in net:
        if list(layer.parameters()):
            fully_shard(layer, mesh=mesh, **options)
    return fully_shard(net, mesh=mesh, **options)


def loss(net, batch, part=slice(None)):
    """Of this rank's share of a batch of 24."""
    x = torch.randn(24, 12, generator=torch.Generator().manual_seed(batch)).double()
    mine = slice(dist.get_rank(), None, dist.get_world_size())
    return net(x[mine][part].to(device())).square().mean()


def train(net, optimizer, batches):
    for batch in batches:
        optimizer.zero_grad()
        loss(net, batch).backward()
        optimizer.step()


def whole(net):
    tensors = [getattr(p, "full_tensor", lambda p=p: p)() for p in net.parameters()]
    return torch.cat([tensor.detach().flatten().cpu() for tensor in tensors])


def five_steps(wrap):
    net = wrap(build().to(device()))
    train(net, torch.optim.Adam(net.parameters(), lr=0.01), range(5))
    return whole(net)


def gradients(net):
    return torch.cat([p.grad.full_tensor().flatten() for p in net.parameters()])


def gradients_by_ddp():
    ddp = DistributedDataParallel(build())
    loss(ddp, 0).backward()
    return [p.grad.flatten() for p in ddp.parameters()]


def gradients_by_hand():
    """By the classes that the chapter shows."""
    names = {"F": F, "dist": dist, "nn": nn, "torch": torch}
    for cell in nbformat.read(CHAPTER, as_version=4).cells:
        shown = cell.source.startswith(("class Shard:", "class FSDPByHand", "def keep_my_part"))
        if shown and "keep_my_part" not in names:  # the second is an exercise's solution
            exec(cell.source, names)
    by_hand = names["FSDPByHand"]
    net = nn.Sequential(*[by_hand(a) if list(a.parameters()) else a for a in build()])
    loss(net, 0).backward()
    return [p.grad for p in net.parameters()]


@pytest.mark.parametrize("world_size", [2, 3])
def test_the_chapters_fsdp_by_hand_gives_the_gradients_of_ddp(world_size):
    parts = zip(*on_ranks(gradients_by_hand, world_size=world_size, backend="gloo"), strict=True)
    tensors = iter(on_ranks(gradients_by_ddp, world_size=world_size, backend="gloo")[0])
    for layer in map(torch.cat, parts):
        expected = torch.cat([next(tensors), next(tensors)])  # weight and bias
        torch.testing.assert_close(layer[: len(expected)], expected, rtol=0, atol=1e-12)
        assert not layer[len(expected) :].any()  # what was added to make the parts equal


def test_fully_shard_trains_as_ddp_does_to_the_last_bit_on_two_ranks():
    fsdp = on_ranks(five_steps, sharded, backend="gloo")
    ddp = on_ranks(five_steps, DistributedDataParallel, backend="gloo")
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(fsdp, ddp, strict=True))


@pytest.mark.multigpu
def test_fully_shard_trains_as_ddp_does_on_two_gpus():
    fsdp, ddp = on_ranks(five_steps, sharded), on_ranks(five_steps, DistributedDataParallel)
    torch.testing.assert_close(fsdp[0], ddp[0], rtol=0, atol=1e-9)
    assert torch.equal(fsdp[0], fsdp[1])


@pytest.mark.gpu
def test_weights_built_on_the_cpu_move_to_the_gpu_as_they_are_sharded():
    def devices():
        net = sharded(build())
        loss(net, 0).backward()
        return {str(p.to_local().device) for p in net.parameters()}

    assert on_ranks(devices, world_size=1) == [{"cuda:0"}]


def what_the_chapter_says():
    """Several small experiments in one launch; each entry is a test's."""
    said = {}
    net = sharded(build())
    said["kept"] = sum(p.to_local().numel() for p in net.parameters())
    said["keys"] = list(net.state_dict()) == list(build().state_dict())

    for part, last in [(slice(0, 6), False), (slice(6, 12), True)]:
        net.set_requires_gradient_sync(last)
        (loss(net, 0, part) / 2).backward()
    said["accumulated"] = gradients(net)
    net.zero_grad()
    loss(net, 0).backward()
    said["at once"] = gradients(net)
    norm = nn.utils.clip_grad_norm_(net.parameters(), 0.001).full_tensor()
    said["norm"], said["clipped"] = norm.item(), gradients(net).norm().item()

    half = sharded(build().float(), mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16))
    half[0].register_forward_pre_hook(lambda m, _: said.update(computed=m.weight.dtype))
    half(torch.ones(2, 12)).sum().backward()
    said["kept as"] = half[0].weight.dtype

    state = build().state_dict() if dist.get_rank() == 0 else {}
    net = sharded(build())
    for p in net.parameters():
        nn.init.zeros_(p)
    set_model_state_dict(net, state, options=BROADCAST)
    said["broadcast"] = whole(net)
    said["on this rank"] = list(get_model_state_dict(net, options=WHOLE))
    return said


@pytest.fixture(scope="module")
def said():
    return on_ranks(what_the_chapter_says, backend="gloo")


def test_each_rank_keeps_its_rows_of_each_parameter_under_the_same_keys(said):
    first, second = (rank["kept"] for rank in said)  # of 7, 5 and 3 rows
    assert first == 4 * (12 + 1) + 3 * (7 + 1) + 2 * (5 + 1)
    assert first + second == sum(p.numel() for p in build().parameters())
    assert said[0]["keys"]


def test_accumulated_gradients_are_those_of_the_whole_batch(said):
    for rank in said:
        torch.testing.assert_close(rank["accumulated"], rank["at once"], rtol=0, atol=1e-12)


def test_clipping_uses_the_norm_over_all_ranks(said):
    for rank in said:
        assert rank["norm"] == pytest.approx(rank["at once"].norm().item())
        assert rank["clipped"] == pytest.approx(0.001, rel=1e-2)


def test_mixed_precision_computes_in_bfloat16_and_keeps_float32(said):
    assert (said[0]["computed"], said[0]["kept as"]) == (torch.bfloat16, torch.float32)


def test_rank_0s_ordinary_state_dict_is_given_to_all_and_gathered_again_on_rank_0(said):
    expected = torch.cat([p.detach().flatten() for p in build().parameters()])
    assert all(torch.equal(rank["broadcast"], expected) for rank in said)
    assert said[0]["on this rank"] == list(build().state_dict())
    assert said[1]["on this rank"] == []


# --- sharded checkpoints ------------------------------------------------------------------------


def made():
    net = sharded(build())
    return net, torch.optim.Adam(net.parameters(), lr=0.01)


def save_both_ways(folder):
    net, optimizer = made()
    train(net, optimizer, range(3))
    model, optim = get_state_dict(net, optimizer)
    state = {"model": model, "optim": optim}
    dcp.save(state, checkpoint_id=folder / "step_3")
    # Its thread has collectives of its own: in the same group they would meet those of the steps.
    own = dist.new_group(backend="gloo")
    writing = dcp.async_save(state, checkpoint_id=folder / "async", process_group=own)
    saved = whole(net)
    train(net, optimizer, range(3, 5))  # while it writes
    writing.result()
    if dist.get_rank() == 0:
        torch.save({"model": net.state_dict()}, folder / "rank0.pt")
    return saved, whole(net)


def load_and_go_on(folder):
    net, optimizer = made()
    model, optim = get_state_dict(net, optimizer)
    dcp.load({"model": model, "optim": optim}, checkpoint_id=folder)
    set_state_dict(net, optimizer, model_state_dict=model, optim_state_dict=optim)
    loaded = whole(net)
    momenta = torch.cat([s["exp_avg"].full_tensor().flatten() for s in optimizer.state.values()])
    train(net, optimizer, range(3, 5))
    return loaded, momenta, whole(net)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    """A folder with the checkpoints, the weights in them, and those two steps later."""
    folder = tmp_path_factory.mktemp("sharded")
    return folder, *on_ranks(save_both_ways, folder, backend="gloo")[0]


def one_file(folder):
    dcp_to_torch_save(folder, folder.with_suffix(".pt"))
    return torch.load(folder.with_suffix(".pt"), weights_only=True)


@pytest.mark.parametrize("world_size", [1, 4])
def test_what_two_ranks_saved_any_number_loads_and_goes_on_alike(checkpoint, world_size):
    folder, saved, later = checkpoint
    optim = one_file(folder / "step_3")["optim"]["state"]
    momenta = torch.cat([optim[key]["exp_avg"].flatten() for key in build().state_dict()])
    for loaded, loaded_momenta, went_on in on_ranks(
        load_and_go_on, folder / "step_3", world_size=world_size
    ):
        assert torch.equal(loaded, saved)
        assert torch.equal(loaded_momenta.cpu(), momenta)
        torch.testing.assert_close(went_on, later, rtol=0, atol=1e-10)


def test_a_save_in_the_background_writes_the_state_of_the_moment_it_was_called(checkpoint):
    one, other = (one_file(checkpoint[0] / name) for name in ("step_3", "async"))
    torch.testing.assert_close(other["model"], one["model"], rtol=0, atol=0)
    torch.testing.assert_close(other["optim"]["state"], one["optim"]["state"], rtol=0, atol=0)


def test_the_shards_become_one_file_that_plain_models_and_inspect_read(checkpoint):
    folder, saved, _ = checkpoint
    net = build()
    net.load_state_dict(one_file(folder / "step_3")["model"])
    assert torch.equal(torch.cat([p.detach().flatten() for p in net.parameters()]), saved)
    found = inspect_checkpoint(folder / "step_3.pt")
    assert (found.weights_at, found.imports) == ("model", [])
    assert list(found.keys) == list(net.state_dict())
    assert found.contents["optim"] == "optimizer state"


def test_inspect_says_what_the_folder_is_and_how_to_make_one_file_of_it(checkpoint):
    folder = checkpoint[0] / "step_3"
    with pytest.raises(CheckpointError, match=r"torch\.distributed\.checkpoint") as caught:
        inspect_checkpoint(folder)
    assert f"dcp_to_torch {folder} whole.pt" in str(caught.value)


def test_inspect_says_of_a_file_that_rank_0_saved_alone_that_the_other_shards_are_lost(checkpoint):
    path = checkpoint[0] / "rank0.pt"
    (advice,) = inspect_checkpoint(path).advice
    assert "'0.weight' is a DTensor: the file holds one rank's shards only" in advice
    assert "get_model_state_dict" in advice
    with pytest.raises(CheckpointError) as caught:
        fix_checkpoint(path, path.with_name("fixed.pt"))
    assert str(caught.value) == advice


class Killed(dcp.FileSystemWriter):
    """Rank 1 is killed when rank 0 has written its shard."""

    def __init__(self, folder):
        super().__init__(folder)
        self.other, self.start = Path(folder) / "__0_0.distcp", time.time_ns()

    def write_data(self, plan, planner):
        if dist.get_rank() == 1:
            while not self.other.exists() or self.other.stat().st_mtime_ns < self.start:
                time.sleep(0.01)
            time.sleep(0.2)
            os.kill(os.getpid(), signal.SIGKILL)
        return super().write_data(plan, planner)


def save_and_be_killed(folder, into):
    net = sharded(build())
    dcp.save({"model": net.state_dict()}, checkpoint_id=folder / "step_1")
    for p in net.parameters():
        nn.init.constant_(p, 7.0)
    dist.barrier()
    dcp.save({"model": net.state_dict()}, storage_writer=Killed(folder / into))


def load_plain(folder):
    state = {"model": build().state_dict()}
    dcp.load(state, checkpoint_id=folder)
    return state["model"]["0.weight"]


def test_a_killed_save_into_a_new_folder_leaves_the_old_checkpoint_whole(tmp_path):
    with pytest.raises(LaunchError, match="rank 1 of 2 was killed by SIGKILL"):
        on_ranks(save_and_be_killed, tmp_path, "step_2", backend="gloo")
    assert [path.parent.name for path in tmp_path.glob("*/.metadata")] == ["step_1"]
    assert torch.equal(load_plain(tmp_path / "step_1"), build()[0].weight)
    with pytest.raises(dcp.api.CheckpointException):
        load_plain(tmp_path / "step_2")


def test_a_killed_save_over_an_old_checkpoint_mixes_both_without_an_error(tmp_path):
    with pytest.raises(LaunchError, match="rank 1 of 2 was killed by SIGKILL"):
        on_ranks(save_and_be_killed, tmp_path, "step_1", backend="gloo")
    weight = load_plain(tmp_path / "step_1")
    assert weight[:4].eq(7).all()
    assert torch.equal(weight[4:], build()[0].weight[4:])


# --- faults -------------------------------------------------------------------------------------


def test_an_optimizer_made_before_sharding_trains_nothing():
    def change():
        net = build()
        optimizer = torch.optim.Adam(net.parameters())
        sharded(net)
        before = whole(net)
        train(net, optimizer, range(2))
        return torch.equal(before, whole(net))

    assert on_ranks(change) == [True, True]
