"""Files of shards: what chapter 12 saves is not a checkpoint that the clinic reads.

What the chapter shows, it shows by cells that assert: FSDP by hand computes as DDP does, saving and
loading on another number of ranks, a killed save.
"""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import checkpoint as dcp
from torch.distributed.fsdp import fully_shard

from torchclinic.checkpoint_files import CheckpointError, fix_checkpoint, inspect_checkpoint
from torchladder.launching import launch


@pytest.mark.slow
def test_inspect_and_fix_say_what_a_folder_of_shards_and_one_ranks_shards_are(tmp_path):
    folder, alone = tmp_path / "step_3", tmp_path / "rank0.pt"

    def save():
        mesh = dist.init_device_mesh("cpu", (dist.get_world_size(),))
        state = {"model": fully_shard(nn.Sequential(nn.Linear(12, 7)), mesh=mesh).state_dict()}
        dcp.save(state, checkpoint_id=folder)
        if dist.get_rank() == 0:
            torch.save(state, alone)

    launch(save, backend="gloo", timeout=100, show="none")
    with pytest.raises(CheckpointError, match=r"torch\.distributed\.checkpoint") as caught:
        inspect_checkpoint(folder)
    assert f"dcp_to_torch {folder} whole.pt" in str(caught.value)
    (advice,) = inspect_checkpoint(alone).advice
    assert "'0.weight' is a DTensor: the file holds one rank's shards only" in advice
    assert "get_model_state_dict" in advice
    with pytest.raises(CheckpointError) as caught:
        fix_checkpoint(alone, tmp_path / "fixed.pt")
    assert str(caught.value) == advice
