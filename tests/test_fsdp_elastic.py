"""The programs that resume, in real processes; across two hosts: tools/test_two_hosts.py."""

import re
import shutil

import pytest
import torch
from running import ROOT
from test_rungs import RESUMING, few_images, needed, run_here, run_on_ranks

from torchladder.launching import LaunchError

STEP = "        images, labels = images.to(device), labels.to(device)\n        loss"
KILL = "        schedule.last_epoch == 12 and rank == 1 and os.kill(os.getpid(), 9)\n"  # in epoch 3
DROPOUT = "nn.Linear(400, 120), nn.ReLU(), nn.Dropout(0.3),"


def assert_same_to(tolerance, *paths):
    torch.testing.assert_close(*map(torch.load, paths), rtol=0, atol=tolerance)


@pytest.fixture(params=RESUMING)
def train(request, tmp_path):
    name, few = request.param, few_images(tmp_path, 480)
    source = (ROOT / "rungs" / name).read_text()

    def train(save, checkpoint, ranks, *, dropout=False, kill=False):
        text = source.replace("nn.Linear(400, 120), nn.ReLU(),", DROPOUT) if dropout else source
        program = tmp_path / f"{save}.py"
        program.write_text(text.replace(STEP, KILL + STEP) if kill else text)
        assert (program.read_text() != source) == (dropout or kill)
        (tmp_path / checkpoint).mkdir(exist_ok=True)
        options = ["--data", few, "--epochs", 4, "--batch-size", 96, "--lr", 0.1]
        options += ["--save", tmp_path / save, *needed(name, tmp_path / checkpoint)]
        if ranks == 1:
            return run_here(name, *options)
        return run_on_ranks(program, *options, nproc=ranks)

    return train


@pytest.mark.slow
def test_after_the_loss_of_a_rank_as_many_end_to_the_bit_as_if_nothing_was_lost(train, tmp_path):
    """With dropout: each rank must get its own random numbers back."""
    assert train("whole", "1", 2, dropout=True).returncode == 0
    with pytest.raises(LaunchError, match="rank 1 of 2 was killed by SIGKILL"):
        train("never", "2", 2, dropout=True, kill=True)
    assert len(list((tmp_path / "2").iterdir())) == 1
    resumed = train("resumed", "2", 2, dropout=True)
    assert re.findall(r"epoch (\d)", resumed.stdout) == ["3", "4"], resumed.stderr
    assert_same_to(0, tmp_path / "whole", tmp_path / "resumed")


@pytest.mark.slow
def test_fewer_or_more_ranks_go_on_and_end_within_a_ten_thousandth(train, tmp_path):
    assert train("whole", "1", 1).returncode == 0
    with pytest.raises(LaunchError, match="rank 1 of 2 was killed by SIGKILL"):
        train("never", "2", 2, kill=True)
    for ranks in (1, 3):
        shutil.copytree(tmp_path / "2", tmp_path / f"on_{ranks}")
        resumed = train(f"by_{ranks}", f"on_{ranks}", ranks)
        assert re.findall(r"epoch (\d)", resumed.stdout) == ["3", "4"], resumed.stderr
        assert_same_to(1e-4, tmp_path / "whole", tmp_path / f"by_{ranks}")
        assert len(list((tmp_path / f"on_{ranks}").glob("*/__*.distcp"))) in (0, ranks)
