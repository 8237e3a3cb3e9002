"""The counter of collectives; chapters 20 and 21 compare what it counts with formulas."""

import pytest
import torch
import torch.distributed as dist

from torchladder.launching import LaunchError, launch
from torchladder.traffic import Traffic


def broadcast():
    with Traffic(dist.init_device_mesh("cpu", (2,), mesh_dim_names=("gpu",))):
        dist.broadcast(torch.ones(1), src=0)


def test_what_it_does_not_count_is_an_error():
    with pytest.raises(LaunchError, match="broadcast_ is not counted"):
        launch(broadcast, world_size=2)
