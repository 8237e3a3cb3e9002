"""The models have the sizes and the properties that the book says they have."""

import pytest
import torch
from torch import nn

from torchladder.models import GPT2, MLP, LeNet, LinearConvNet, count_parameters


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


def test_gpt_2_has_its_size_and_saving_memory_changes_neither_loss_nor_gradients():
    with torch.device("meta"):
        assert count_parameters(GPT2()) == 124_439_808
    torch.manual_seed(0)
    model = GPT2(layers=2, hidden=32, heads=4, sequence=8, vocabulary=50)
    rows, found = torch.randint(50, (3, 9)), []
    for how in ({}, {"again": True}, {"parts": 5}, {"again": True, "parts": 2}):
        model.zero_grad()
        loss = model(rows, **how)
        loss.backward()
        gradients = [p.grad.flatten() for p in model.parameters()]
        found.append(torch.cat([loss.detach().flatten(), *gradients]))
        assert torch.allclose(found[-1], found[0], rtol=0, atol=1e-6)
    logits = []
    model.loss = lambda x, targets: logits.append(x) or x.sum()  # a token sees none after it
    model(rows)
    rows[:, 5] += 1
    model(rows % 50)
    before, after = (x.view(3, 8, 32) for x in logits)
    assert torch.equal(before[:, :5], after[:, :5])
    assert not torch.equal(before[:, 5:], after[:, 5:])
