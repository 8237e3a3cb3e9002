"""What the benchmarks of loading compare does the same; only then do their times say anything."""

import loading
import posts_epoch
import pytest
import torch

from torchladder.data import load_dataset
from torchladder.models import LeNet


@pytest.mark.parametrize("workers", [0, 2])
def test_batches_are_those_of_torchvisions_transforms_to_the_bit(workers):
    loading.assert_same_batches(load_dataset(), 20, workers)


@pytest.mark.slow
def test_each_change_to_the_posts_loop_keeps_its_losses():
    data = posts_epoch.posts_data(640)
    seconds = posts_epoch.rounds(LeNet, data, runs=1)
    results = posts_epoch.chain("LeNet", 640, seconds)
    assert [result.what for result in results[:-1]] == [f"LeNet: {name}" for name in seconds][1:]
    product = torch.tensor([result.ratio for result in results[:-1]]).prod()
    assert results[-1].ratio == pytest.approx(product.item(), rel=1e-3)
