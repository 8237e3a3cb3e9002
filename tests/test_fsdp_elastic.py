"""``rungs/5_fsdp_elastic.py`` in real processes; across two hosts: tools/test_two_hosts.py."""

import re
import shutil
from unittest import mock

import pytest
import torch
from test_rungs import FSDP_ELASTIC, few_images, run_here, run_on_ranks

from torchladder.launching import LaunchError

STEP = "        images, labels = images.to(device), labels.to(device)\n        loss"
KILL = "        epoch == 3 and rank == 1 and os.kill(os.getpid(), 9)\n"  # before its first step
DROPOUT = "nn.Linear(400, 120), nn.ReLU(), nn.Dropout(0.3),"


def same_to(tolerance, one, other):
    one, other = torch.load(one), torch.load(other)
    return all(torch.allclose(one[key], other[key], rtol=0, atol=tolerance) for key in one)


@pytest.fixture
def train(tmp_path):
    source = FSDP_ELASTIC.read_text()
    few = few_images(tmp_path, 480)

    def train(save, checkpoint, ranks, *, dropout=False, kill=False, epochs=4, batch=96):
        text = source.replace("nn.Linear(400, 120), nn.ReLU(),", DROPOUT) if dropout else source
        program = tmp_path / f"{save}.py"
        program.write_text(text.replace(STEP, KILL + STEP) if kill else text)
        assert (program.read_text() != source) == (dropout or kill)
        options = ["--data", few, "--epochs", epochs, "--batch-size", batch, "--lr", 0.1]
        options += ["--save", tmp_path / save, "--checkpoint", tmp_path / checkpoint]
        if ranks == 1:
            return run_here(FSDP_ELASTIC.name, *options)
        return run_on_ranks(program, *options, nproc=ranks)

    return train


@pytest.mark.slow
def test_after_the_loss_of_a_rank_as_many_end_to_the_bit_as_if_nothing_was_lost(train, tmp_path):
    """With dropout: each rank must get its own random numbers back."""
    assert train("whole", "1", 2, dropout=True).returncode == 0
    with pytest.raises(LaunchError, match="rank 1 of 2 was killed by SIGKILL"):
        train("never", "2", 2, dropout=True, kill=True)
    assert [folder.name for folder in (tmp_path / "2").iterdir()] == ["2"]
    resumed = train("resumed", "2", 2, dropout=True)
    assert re.findall(r"epoch (\d)", resumed.stdout) == ["3", "4"], resumed.stderr
    assert same_to(0, tmp_path / "whole", tmp_path / "resumed")


@pytest.mark.slow
def test_fewer_or_more_ranks_go_on_and_end_within_a_ten_thousandth(train, tmp_path):
    assert train("whole", "1", 1).returncode == 0
    with pytest.raises(LaunchError, match="rank 1 of 2 was killed by SIGKILL"):
        train("never", "2", 2, kill=True)
    for ranks in (1, 3):
        shutil.copytree(tmp_path / "2", tmp_path / f"on_{ranks}")
        resumed = train(f"by_{ranks}", f"on_{ranks}", ranks)
        assert re.findall(r"epoch (\d)", resumed.stdout) == ["3", "4"], resumed.stderr
        assert same_to(1e-4, tmp_path / "whole", tmp_path / f"by_{ranks}")
        assert len(list((tmp_path / f"on_{ranks}" / "4").glob("__*.distcp"))) == ranks


def test_it_says_which_checkpoint_batch_or_folder_is_not_for_it(train, tmp_path):
    assert train("a", "own", 1, epochs=1).returncode == 0
    saved = tmp_path / "own" / "1"
    for checkpoint, options, sentence in [
        ("own", {"epochs": 2}, f"--checkpoint {saved}: of other --epochs, --batch-size or --data."),
        ("own", {"batch": 48}, f"--checkpoint {saved}: of other --epochs, --batch-size or --data."),
        ("a.py", {}, f"Cannot write {tmp_path / 'a.py'}: name a folder all hosts share."),
    ]:
        assert train("a", checkpoint, 1, **{"epochs": 1} | options).stderr == f"{sentence}\n"
    with mock.patch("torch.distributed.get_world_size", return_value=7):
        seven = train("a", "own", 1, epochs=1)
    assert seven.stderr == "--batch-size 96 cannot be dealt out to 7 processes.\n"
    (saved / "__0_0.distcp").unlink()  # as on a disk of another host
    assert "not a whole one of this program, or not on a disk" in train("a", "own", 1).stderr
