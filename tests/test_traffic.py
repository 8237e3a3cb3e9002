"""The counter of collectives, on real process groups."""

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from torchladder.launching import LaunchError, launch
from torchladder.traffic import Traffic


def on_a_mesh():
    mesh = dist.init_device_mesh("cpu", (2, 2), mesh_dim_names=("copy", "shard"))
    whole = distribute_tensor(torch.ones(6, 5), mesh, [Replicate(), Shard(0)])
    with Traffic(mesh) as traffic:
        whole.redistribute(placements=[Replicate(), Replicate()])
        for _ in range(2):
            dist.all_reduce(torch.ones(3, dtype=torch.float64), group=mesh.get_group("copy"))
    return dict(traffic.calls), dict(traffic.bytes)


def test_calls_and_bytes_of_the_whole_are_counted_for_each_dimension():
    calls, sizes = launch(on_a_mesh, world_size=4, show="none")[3]
    assert calls == {("shard", "all-gather"): 1, ("copy", "all-reduce"): 2}
    assert sizes == {("shard", "all-gather"): 6 * 5 * 4, ("copy", "all-reduce"): 2 * 3 * 8}


def broadcast():
    with Traffic(dist.init_device_mesh("cpu", (2,), mesh_dim_names=("gpu",))):
        dist.broadcast(torch.ones(1), src=0)


def test_what_it_does_not_count_is_an_error():
    with pytest.raises(LaunchError, match="broadcast_ is not counted"):
        launch(broadcast, world_size=2)
