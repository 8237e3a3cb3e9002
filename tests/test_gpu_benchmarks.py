"""The programs of ``benchmarks/gpu`` count right, train, and lose no row that they have measured.

What only CUDA can do is replaced by a stand-in: whether it is fast, only a GPU can tell.
"""

import json
import sys
from types import SimpleNamespace
from unittest import mock

import copies
import measurement
import pytest
import speed_ladder
import torch
from measurement import Sheet, flops_of
from speed_ladder import Batches, Net, Settings, Training, one_run, triangle

from torchladder.data import balanced_subset, load

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def fashion():
    return balanced_subset(load(), 64, 20)


@pytest.fixture(autouse=True)
def _facts(monkeypatch):
    """Facts of this machine without a subprocess."""
    monkeypatch.setattr(measurement, "machine_facts", lambda: {"machine": "cpu", "torch": "2"})
    monkeypatch.setattr(measurement, "commit", lambda: {"commit": "abc", "clean": True})


# --- the file of rows ---------------------------------------------------------------------------


def test_rows_are_written_as_they_come_and_a_failed_one_does_not_stop_the_others(tmp_path):
    sheet = Sheet("copies", tmp_path)
    sheet.take("good", lambda: {"seconds": [1.0, 3.0, 2.0]})
    sheet.take("bad", lambda: 1 / 0)
    sheet.take("last", lambda: {"seconds": [1.0]})
    content = json.loads((tmp_path / "copies.json").read_text())
    assert content["machine"] == {"machine": "cpu", "torch": "2", "commit": "abc", "clean": True}
    assert list(content["rows"]) == ["good", "bad", "last"]
    assert content["rows"]["bad"] == {"failed": "ZeroDivisionError: division by zero"}
    assert sheet.failed == ["bad"]


def test_a_second_run_measures_only_what_is_missing_or_failed(tmp_path):
    first = Sheet("copies", tmp_path)
    first.take("good", lambda: {"seconds": 1})
    first.take("bad", lambda: 1 / 0)
    second = Sheet("copies", tmp_path)
    second.take("good", lambda: {"seconds": 2})
    second.take("bad", lambda: {"seconds": 2})
    assert second.content["rows"] == {"good": {"seconds": 1}, "bad": {"seconds": 2}}
    assert second.failed == []


def test_rows_of_other_code_or_of_a_rehearsal_are_not_taken_over(tmp_path, monkeypatch):
    Sheet("copies", tmp_path, small=True).take("a", lambda: {"seconds": 1})
    assert "a" not in Sheet("copies", tmp_path)
    assert "a" in Sheet("copies", tmp_path, small=True)
    monkeypatch.setattr(measurement, "commit", lambda: {"commit": "def", "clean": True})
    assert "a" not in Sheet("copies", tmp_path, small=True)


def test_without_a_gpu_only_a_rehearsal_runs(monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(measurement.devices, "try_gpu", lambda: CPU)
    monkeypatch.setattr(sys, "argv", ["copies.py", "--folder", str(tmp_path / "none")])
    with pytest.raises(SystemExit):
        measurement.main("copies", copies.measure)
    assert "--small rehearses on the CPU" in capsys.readouterr().err
    assert not (tmp_path / "none").exists()


# --- the ladder ---------------------------------------------------------------------------------


def test_each_row_of_the_ladder_changes_something_and_undoes_nothing():
    changed = [set(change) for _, change, _ in speed_ladder.LADDER[1:]]
    assert all(changed)
    loaders = [change.get("loader") for _, change, _ in speed_ladder.LADDER]
    assert [name for name in loaders if name] == ["pinned", "device"]
    others = [name for change in changed for name in change if name != "loader"]
    assert len(others) == len(set(others))


def test_the_flops_of_the_net_are_those_counted_by_hand():
    convolutions = [  # height x width x inputs x outputs, of 3x3 filters
        28**2 * 1 * 4, 28**2 * 4 * 8, 14**2 * 8 * 8, 14**2 * 8 * 16, 7**2 * 16 * 16,
        7**2 * 16 * 16, 3**2 * 16 * 16,
    ]  # fmt: skip
    forward = 2 * 9 * sum(convolutions) + 2 * 16 * 10
    first = 2 * 9 * convolutions[0]  # needs no gradient of its input
    assert flops_of(lambda: Net(4), (1, 28, 28), 2) == 2 * (3 * forward - first)


def test_the_learning_rate_rises_and_falls_to_nothing():
    assert [triangle(at) for at in (0.0, 0.1, 0.2, 0.6, 1.0)] == pytest.approx([0, 0.5, 1, 0.5, 0])


@pytest.mark.parametrize("loader", ["as in the posts", "pinned", "device"])
def test_every_way_to_load_gives_each_image_once_and_normalised(fashion, loader):
    batches = Batches(fashion, Settings(loader=loader, batch=128), CPU)
    images, labels = map(torch.cat, zip(*batches, strict=True))
    assert len(batches) == 5
    assert torch.equal(labels.bincount(), torch.full((10,), 64))
    assert images.dtype == torch.float32
    assert abs(images.mean().item()) < 0.1
    assert abs(images.std().item() - 1) < 0.1


def test_the_net_learns_and_a_run_ends_at_the_target(fashion):
    settings = Settings(loader="device", batch=64, channels_last=True, fused=True)
    training = Training(Net(4), settings, CPU)
    batches = Batches(fashion, settings, CPU)
    tests = fashion.normalise(fashion.test_images), fashion.test_labels
    found = one_run(training, batches, tests, epochs=4, target=0.5, seed=0)
    assert found["accuracy"] >= 0.5
    assert found["seconds"] > 0
    never = one_run(training, batches, tests, epochs=1, target=1.0, seed=0)
    assert (never["seconds"], never["epochs"]) == (None, 1)


def test_a_training_that_is_set_back_repeats_itself(fashion):
    settings = Settings(loader="device", batch=64)
    training, losses = Training(Net(4), settings, CPU), []
    images, labels = fashion.normalise(fashion.train_images[:64]), fashion.train_labels[:64]
    for _ in range(2):
        training.set_back(seed=1)
        losses.append([training.step(images, labels).item() for _ in range(3)])
    assert losses[0] == losses[1]
    assert losses[0][0] > losses[0][2]


def test_a_graph_is_recorded_once_and_reads_each_batch_from_the_same_memory(fashion):
    training = Training(Net(4), Settings(fused=True, graph=True), CPU)
    images, labels = fashion.normalise(fashion.train_images[:64]), fashion.train_labels[:64]
    training.device = SimpleNamespace(type="cuda")
    counted = mock.Mock(return_value=torch.zeros(()))
    with mock.patch.multiple(
        torch.cuda, Stream=mock.DEFAULT, current_stream=mock.DEFAULT, CUDAGraph=mock.DEFAULT,
        stream=mock.MagicMock(), graph=mock.MagicMock(),
    ) as stand_in, mock.patch.object(training, "compute", counted):  # fmt: skip
        training.step(images, labels)
        training.step(images + 1, labels)
    assert counted.call_count == 3 + 1  # three to warm up, one that is recorded
    assert stand_in["CUDAGraph"].return_value.replay.call_count == 2
    static, _ = training.recorded[1]
    assert torch.equal(static, images + 1)
    training.set_lr(0.5)
    assert training.optimizer.param_groups[0]["lr"].item() == pytest.approx(0.025)


# --- copies -------------------------------------------------------------------------------------


def test_the_peak_of_the_bus_follows_from_what_nvidia_smi_says():
    facts = copies.bus_from("1, 5, 16, 16\n")
    assert (facts["most_generation"], facts["most_lanes"]) == (5, 16)
    assert facts["bytes_per_second"] == pytest.approx(63e9, rel=0.01)
    assert copies.bus_from("[N/A], [N/A], [N/A], [N/A]\n")["bytes_per_second"] is None
