"""No crash while saving, at whatever instant, costs the last good file."""

import contextlib
import errno
import os
import resource
import time
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from torchladder.checkpoints import resume, save_checkpoint
from torchladder.checkpoints.resuming import damage
from torchladder.checkpoints.saving import checkpoints_in
from torchladder.launching import LaunchError, launch

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"


def parts_of(model):
    return {"model": model, "optimizer": torch.optim.SGD(model.parameters(), lr=0.1)}


def test_a_read_only_folder_is_noticed_before_the_training(tmp_path, monkeypatch):
    from torchladder.data import load
    from torchladder.models import MLP
    from torchladder.training import train

    tmp_path.chmod(0o500)
    if os.access(tmp_path, os.W_OK):  # root may write everywhere
        monkeypatch.setattr(os, "access", lambda *_: False)
    with pytest.raises(PermissionError, match="cannot be written: name another folder"):
        train(MLP(784), load(), checkpoint_dir=tmp_path, progress=False)


def test_a_full_disk_costs_only_the_new_file(tmp_path):
    model = nn.Linear(1000, 100)
    before = save_checkpoint(tmp_path, parts_of(model), step=1, best=True)
    with full_disk(), pytest.raises(OSError, match="File too large; not saved, and earl") as raised:
        save_checkpoint(tmp_path, parts_of(model), step=2, best=True)
    assert raised.value.errno == errno.EFBIG
    assert raised.value.filename == str(tmp_path / "step_00000002.pt")
    assert sorted(os.listdir(tmp_path)) == ["best.pt", before.name]
    assert resume(tmp_path, parts_of(model))["step"] == 1


@contextlib.contextmanager
def full_disk():
    """Any file that grows beyond 100 kB meets an error of the system, as on a full disk."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


def test_a_disk_that_is_full_only_when_the_file_is_flushed(tmp_path, monkeypatch):
    def no_space(descriptor):
        raise OSError(errno.ENOSPC, "No space left on device")

    save_checkpoint(tmp_path, parts_of(nn.Linear(2, 2)), step=1)
    monkeypatch.setattr(os, "fsync", no_space)
    with pytest.raises(OSError, match=r"No space left on device; not saved.*step_00000002.pt"):
        save_checkpoint(tmp_path, parts_of(nn.Linear(2, 2)), step=2)
    assert os.listdir(tmp_path) == ["step_00000001.pt"]


# --- what is in a checkpoint --------------------------------------------------------------------


@pytest.mark.parametrize("wrap", [nn.DataParallel, torch.compile, "both"])
def test_the_names_in_the_file_are_those_of_the_model_itself(tmp_path, wrap):
    model = nn.Linear(2, 1)
    wrapped = torch.compile(nn.DataParallel(model)) if wrap == "both" else wrap(model)
    path = save_checkpoint(tmp_path, parts_of(wrapped), step=3, epoch=1)
    checkpoint = torch.load(path, weights_only=True)
    assert list(checkpoint["model"]) == ["weight", "bias"]
    assert list(checkpoint) == [
        "model", "optimizer", "epoch", "batch", "step", "rng", "run", "classes", "versions"
    ]  # fmt: skip
    assert checkpoint["versions"]["torch"] == torch.__version__
    assert damage(path) is None
    other = nn.Linear(2, 1)
    resume(path, parts_of(torch.compile(other)))
    assert torch.equal(other.weight, model.weight)


def test_what_could_not_be_loaded_is_not_saved(tmp_path):
    with pytest.raises(ValueError, match=r"would not load with weights_only=True; not saved"):
        save_checkpoint(tmp_path, parts_of(nn.Linear(2, 1)), step=1, note=Path("a path"))
    assert not os.listdir(tmp_path)


def test_the_newest_files_stay_and_later_ones_are_not_touched(tmp_path):
    (tmp_path / "step_99999999.pt").write_text("damaged")
    (tmp_path / "step_00000001.pt.txt").write_text("not ours")
    for step in range(1, 6):
        save_checkpoint(tmp_path, parts_of(nn.Linear(2, 1)), step=step, keep=2, best=step == 2)
    assert sorted(os.listdir(tmp_path)) == [
        "best.pt", "step_00000001.pt.txt", "step_00000004.pt", "step_00000005.pt",
        "step_99999999.pt",
    ]  # fmt: skip
    assert torch.load(tmp_path / "best.pt")["step"] == 2
    with pytest.raises(ValueError, match="keep=0: at least the newest"):
        save_checkpoint(tmp_path, parts_of(nn.Linear(2, 1)), step=6, keep=0)


def test_the_old_file_goes_only_when_the_new_one_is_there(tmp_path, monkeypatch):
    there, unlink = [], Path.unlink

    def noted_unlink(path, **options):
        there.append(sorted(p.name for p in tmp_path.iterdir()))
        unlink(path, **options)

    save_checkpoint(tmp_path, parts_of(nn.Linear(2, 1)), step=1)
    monkeypatch.setattr(Path, "unlink", noted_unlink)
    save_checkpoint(tmp_path, parts_of(nn.Linear(2, 1)), step=2, keep=1)
    assert there == [["step_00000001.pt", "step_00000002.pt"]]
    assert [path.name for path in checkpoints_in(tmp_path)] == ["step_00000002.pt"]


def test_the_best_epoch_is_kept_beside_the_newest(tmp_path, monkeypatch):
    from torchladder import training
    from torchladder.data import balanced_subset, load
    from torchladder.models import MLP

    accuracies = iter([0.5, 0.7, 0.6, 0.7])
    tested = lambda *_, **__: training.Metrics(1.0, next(accuracies), 50)  # noqa: E731
    monkeypatch.setattr(training, "evaluate", tested)
    data = balanced_subset(load(), 10, 5)
    training.train(MLP(784), data, epochs=4, checkpoint_dir=tmp_path, progress=False)
    assert torch.load(tmp_path / "best.pt")["epoch"] == 2
    assert len(checkpoints_in(tmp_path)) == 3


# --- ranks --------------------------------------------------------------------------------------


def save_on_ranks(folder, limited=False):
    rank = torch.distributed.get_rank()
    torch.manual_seed(rank)
    model = DistributedDataParallel(nn.Linear(1000, 100))
    with full_disk() if limited and rank == 0 else contextlib.nullcontext():
        try:
            save_checkpoint(folder, parts_of(model), step=1, of_each_rank={"note": rank})
        except OSError as error:
            return type(error).__name__, str(error)
    return None


def test_rank_0_writes_for_all_ranks(tmp_path):
    assert launch(save_on_ranks, tmp_path, timeout=60) == [None, None]
    checkpoint = torch.load(tmp_path / "step_00000001.pt", weights_only=True)
    assert list(checkpoint["model"]) == ["weight", "bias"]
    assert checkpoint["note"] == [0, 1]
    for rank, state in enumerate(checkpoint["rng"]):
        torch.manual_seed(rank)
        nn.Linear(1000, 100)
        assert torch.equal(state["torch"], torch.get_rng_state())


def test_when_rank_0_cannot_save_all_ranks_leave_with_its_error(tmp_path):
    start = time.monotonic()
    one, other = launch(save_on_ranks, tmp_path, limited=True, timeout=60)
    assert one == other
    assert "File too large; not saved, and earlier checkpoints are as they were" in one[1]
    assert time.monotonic() - start < 50
    assert not os.listdir(tmp_path)


def test_any_error_of_rank_0_reaches_the_others(tmp_path):
    class Odd(Exception):
        def __init__(self, one, two):
            super().__init__("odd")

    class Part:
        def state_dict(self):
            raise Odd(1, 2)

    def run():
        model = DistributedDataParallel(nn.Linear(2, 2))
        save_checkpoint(tmp_path, {"model": model, "part": Part()}, step=1)

    with pytest.raises(LaunchError, match="RuntimeError: Odd: odd"):
        launch(run, timeout=60)


# --- kills --------------------------------------------------------------------------------------


def test_kills_at_random_instants_lose_nothing(monkeypatch):
    """20 of them; as many as TORCHLADDER_KILLS says, such as 200, if it is set."""
    monkeypatch.syspath_prepend(BENCHMARKS)
    from kills import kills

    count = int(os.environ.get("TORCHLADDER_KILLS", 20))
    result = kills(count)
    print(f"{result['kills']} kills, {result['lost']} lost")
    assert (result["kills"], result["lost"]) == (count, 0)
    assert result["files checked"] >= count
    assert result["half-written files"] > count / 10  # else the kills came at the wrong time
