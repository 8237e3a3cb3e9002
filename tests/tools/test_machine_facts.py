"""A machine is known by what it has, and not by whose it is."""

from types import SimpleNamespace

import machine_facts
import pytest


@pytest.mark.parametrize(
    ("gpus", "name"),
    [
        (["Tesla T4", "Tesla T4"], "2xT4"),
        (["NVIDIA H200"], "1xH200"),
        (["NVIDIA A100-SXM4-40GB"] * 8, "8xA100"),
        (["NVIDIA GeForce RTX 4090", "Tesla P100-PCIE-16GB"], "1xRTX4090+1xP100"),
    ],
)
def test_a_machine_is_called_by_its_gpus(monkeypatch, gpus, name):
    fake = SimpleNamespace(device_count=lambda: len(gpus), get_device_name=gpus.__getitem__)
    monkeypatch.setattr("torch.cuda", fake)
    assert machine_facts.machine_name() == name
