"""Chapter 12's FSDP by hand with sizes that ranks cannot share evenly, and files of shards.

What the chapter shows, it shows by cells that assert: training as DDP does, saving and loading on
another number of ranks, a killed save.
"""

from pathlib import Path

import nbformat
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed import checkpoint as dcp
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from torchclinic.checkpoint_files import CheckpointError, fix_checkpoint, inspect_checkpoint
from torchladder.launching import launch

CHAPTER = Path(__file__).parent.parent / "notebooks" / "12_rung_5_fsdp.ipynb"

pytestmark = pytest.mark.slow


def on_ranks(function, *args, world_size=2):
    options = {"world_size": world_size, "backend": "gloo", "timeout": 100, "show": "none"}
    return launch(function, *args, **options)


def build():
    torch.manual_seed(0)
    layers = nn.Linear(12, 7), nn.Tanh(), nn.Linear(7, 5), nn.Tanh(), nn.Linear(5, 3)
    return nn.Sequential(*layers).double()


def loss(net):
    """Of this rank's share of a batch of 24."""
    x = torch.randn(24, 12, generator=torch.Generator().manual_seed(0)).double()
    return net(x[dist.get_rank() :: dist.get_world_size()]).square().mean()


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


def test_inspect_and_fix_say_what_a_folder_of_shards_and_one_ranks_shards_are(tmp_path):
    folder, alone = tmp_path / "step_3", tmp_path / "rank0.pt"

    def save():
        mesh = dist.init_device_mesh("cpu", (dist.get_world_size(),))
        state = {"model": fully_shard(build(), mesh=mesh).state_dict()}
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
