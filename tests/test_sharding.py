"""What chapters 12 and 13 say of FSDP and only say, with sizes that ranks cannot share evenly.

What it shows, it shows by cells that assert: training as DDP does, saving and loading on another
number of ranks, a killed save.
"""

from pathlib import Path

import nbformat
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    set_model_state_dict,
)
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from torchclinic.checkpoint_files import CheckpointError, fix_checkpoint, inspect_checkpoint
from torchladder.launching import launch

CHAPTER = Path(__file__).parent.parent / "notebooks" / "12_rung_5_fsdp.ipynb"
WHOLE = StateDictOptions(full_state_dict=True, cpu_offload=True)
BROADCAST = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)

pytestmark = pytest.mark.slow


def on_ranks(function, *args, world_size=2):
    options = {"world_size": world_size, "backend": "gloo", "timeout": 100, "show": "none"}
    return launch(function, *args, **options)


def build():
    torch.manual_seed(0)
    layers = nn.Linear(12, 7), nn.Tanh(), nn.Linear(7, 5), nn.Tanh(), nn.Linear(5, 3)
    return nn.Sequential(*layers).double()


def sharded(net, **options):
    mesh = dist.init_device_mesh("cpu", (dist.get_world_size(),))
    for layer in net:
        if list(layer.parameters()):
            fully_shard(layer, mesh=mesh, **options)
    return fully_shard(net, mesh=mesh, **options)


def loss(net, part=slice(None)):
    """Of this rank's share of a batch of 24."""
    x = torch.randn(24, 12, generator=torch.Generator().manual_seed(0)).double()
    return net(x[dist.get_rank() :: dist.get_world_size()][part]).square().mean()


def whole(tensors):
    return torch.cat([tensor.full_tensor().detach().flatten() for tensor in tensors])


def gradients():
    """Of each layer, by DDP and by the classes that the chapter shows."""
    ddp = DistributedDataParallel(build())
    loss(ddp).backward()
    layers = [layer for layer in ddp.module if list(layer.parameters())]
    by_ddp = [torch.cat([p.grad.flatten() for p in layer.parameters()]) for layer in layers]
    names = {"F": F, "dist": dist, "nn": nn, "torch": torch}
    for cell in nbformat.read(CHAPTER, as_version=4).cells:
        shown = cell.source.startswith(("class Shard:", "class FSDPByHand", "def keep_my_part"))
        if shown and "keep_my_part" not in names:  # the second is an exercise's solution
            exec(cell.source, names)
    by_hand = names["FSDPByHand"]
    net = nn.Sequential(*[by_hand(a) if list(a.parameters()) else a for a in build()])
    loss(net).backward()
    return by_ddp, [p.grad for p in net.parameters()]


def test_the_chapters_fsdp_by_hand_gives_the_gradients_of_ddp_where_ranks_share_unevenly():
    (by_ddp, *_), by_hand = zip(*on_ranks(gradients, world_size=3), strict=True)
    for expected, *parts in zip(by_ddp, *by_hand, strict=True):
        layer = torch.cat(parts)
        torch.testing.assert_close(layer[: len(expected)], expected, rtol=0, atol=1e-12)
        assert not layer[len(expected) :].any(), "what was added to make the parts equal"


def test_accumulation_and_state_dicts_are_as_the_chapter_says():
    def said():
        net = sharded(build())
        for part, last in [(slice(0, 6), False), (slice(6, 12), True)]:
            net.set_requires_gradient_sync(last)
            (loss(net, part) / 2).backward()
        accumulated = whole(p.grad for p in net.parameters())
        net.zero_grad()
        loss(net).backward()
        at_once = whole(p.grad for p in net.parameters())
        torch.testing.assert_close(accumulated, at_once, rtol=0, atol=1e-12)

        for p in net.parameters():
            nn.init.zeros_(p)
        state = build().state_dict() if dist.get_rank() == 0 else {}
        set_model_state_dict(net, state, options=BROADCAST)
        expected = torch.cat([p.detach().flatten() for p in build().parameters()])
        assert torch.equal(whole(net.parameters()), expected)
        return list(get_model_state_dict(net, options=WHOLE))

    assert on_ranks(said) == [list(build().state_dict()), []]


def test_inspect_and_fix_say_what_a_folder_of_shards_and_one_ranks_shards_are(tmp_path):
    folder, alone = tmp_path / "step_3", tmp_path / "rank0.pt"

    def save():
        state = {"model": sharded(build()).state_dict()}
        dcp.save(state, checkpoint_id=folder)
        if dist.get_rank() == 0:
            torch.save(state, alone)

    on_ranks(save)
    with pytest.raises(CheckpointError, match=r"torch\.distributed\.checkpoint") as caught:
        inspect_checkpoint(folder)
    assert f"dcp_to_torch {folder} whole.pt" in str(caught.value)
    (advice,) = inspect_checkpoint(alone).advice
    assert "'0.weight' is a DTensor: the file holds one rank's shards only" in advice
    assert "get_model_state_dict" in advice
    with pytest.raises(CheckpointError) as caught:
        fix_checkpoint(alone, tmp_path / "fixed.pt")
    assert str(caught.value) == advice


def test_a_checkpoint_of_two_copies_in_two_shards_loads_on_one_rank(tmp_path):
    def save():
        mesh = dist.init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
        dcp.save(fully_shard(build(), mesh=mesh).state_dict(), checkpoint_id=tmp_path / "step")

    on_ranks(save, world_size=4)
    state = {key: torch.zeros_like(tensor) for key, tensor in build().state_dict().items()}
    dcp.load(state, checkpoint_id=tmp_path / "step")
    assert all(torch.equal(state[key], tensor) for key, tensor in build().state_dict().items())
