"""The three models have the sizes and the properties that the book says they have."""

import pytest
import torch
from torch import nn

from torchladder.models import MLP, LeNet, LinearConvNet, count_parameters


def test_the_mlp_is_the_20_256_10_one():
    model = MLP()
    assert model(torch.zeros(2, 20)).shape == (2, 10)
    assert count_parameters(model) == 20 * 256 + 256 + 256 * 10 + 10
    assert list(model.state_dict()) == [
        "hidden.weight", "hidden.bias", "output.weight", "output.bias",
    ]  # fmt: skip


@pytest.mark.parametrize("shape", [(1, 28, 28), (3, 32, 32), (1, 32, 32), (3, 28, 28)])
def test_models_take_both_image_sizes(shape):
    images = torch.zeros(2, *shape)
    assert LeNet(shape)(images).shape == (2, 10)
    assert LinearConvNet(shape, classes=7, width=1 / 32)(images).shape == (2, 7)


def test_the_whole_linear_net_has_800_million_parameters_two_thirds_in_one_layer():
    with torch.device("meta"):
        model = LinearConvNet()
    total = count_parameters(model)
    assert total == 800_940_490
    assert 0.65 < model.classifier[1].weight.numel() / total < 0.67
    widths = [m.out_channels for m in model.features if isinstance(m, nn.Conv2d)]
    assert widths == [32, 64, 512, 1024, 2048, 4096]
    assert [m.out_features for m in model.classifier if isinstance(m, nn.Linear)] == [8000, 64, 10]


def test_a_sixteenth_of_the_width_fits_a_laptop():
    assert count_parameters(LinearConvNet(width=1 / 16)) == 3_129_790


def test_without_its_pooling_the_linear_net_is_one_affine_map():
    layers = LinearConvNet((1, 28, 28), width=1 / 64)
    features = nn.Sequential(*(m for m in layers.features if isinstance(m, nn.Conv2d))).double()
    x, y = torch.randn(2, 1, 1, 28, 28, dtype=torch.float64)
    zero = features(torch.zeros_like(x))
    combined = features(2 * x - 3 * y) - zero
    assert torch.allclose(combined, 2 * (features(x) - zero) - 3 * (features(y) - zero), atol=1e-12)


def test_sizes_that_cannot_work_are_refused():
    with pytest.raises(ValueError, match=r"shape \(1, 27, 27\): expected"):
        LeNet((1, 27, 27))
    with pytest.raises(ValueError, match="width=0"):
        LinearConvNet(width=0)
    with pytest.raises(ValueError, match="at least 8"):
        LinearConvNet((3, 4, 4))


def test_frozen_parameters_are_not_counted():
    model = MLP()
    model.hidden.requires_grad_(False)
    assert count_parameters(model) == 2570
