"""The three models have the sizes and the properties that the book says they have."""

import pytest
import torch
from torch import nn

from torchladder.models import MLP, LeNet, LinearConvNet, count_parameters


def test_models_take_both_image_sizes_and_refuse_others():
    assert MLP()(torch.zeros(2, 20)).shape == (2, 10)
    for shape in [(1, 28, 28), (3, 32, 32), (1, 32, 32), (3, 28, 28)]:
        images = torch.zeros(2, *shape)
        assert LeNet(shape)(images).shape == (2, 10)
        assert LinearConvNet(shape, classes=7, width=1 / 32)(images).shape == (2, 7)
    with pytest.raises(ValueError, match=r"shape \(1, 27, 27\): expected"):
        LeNet((1, 27, 27))


def test_parameters_are_counted_but_for_frozen_ones():
    with torch.device("meta"):
        model = LinearConvNet()
    assert count_parameters(model) == 800_940_490
    model.features.requires_grad_(False)
    model.classifier[1].requires_grad_(False)
    assert count_parameters(model) == 512_714


def test_without_its_pooling_the_linear_net_is_one_affine_map():
    layers = LinearConvNet((1, 28, 28), width=1 / 64)
    features = nn.Sequential(*(m for m in layers.features if isinstance(m, nn.Conv2d))).double()
    x, y = torch.randn(2, 1, 1, 28, 28, dtype=torch.float64)
    zero = features(torch.zeros_like(x))
    combined = features(2 * x - 3 * y) - zero
    assert torch.allclose(combined, 2 * (features(x) - zero) - 3 * (features(y) - zero), atol=1e-12)
