"""No crash while saving, at whatever instant, costs the last good file."""

import contextlib
import errno
import os
import resource
import time
import zipfile
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from torchladder import resuming
from torchladder.launching import LaunchError, launch
from torchladder.resuming import checkpoints_in, resume, save_checkpoint, why_damaged

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"


def parts_of(model):
    return {"model": model, "optimizer": torch.optim.SGD(model.parameters(), lr=0.1)}


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
    assert why_damaged(path) is None
    other = nn.Linear(2, 1)
    resume(path, parts_of(torch.compile(other)))
    assert torch.equal(other.weight, model.weight)


def test_tied_weights_of_a_gpu_are_written_once(tmp_path, monkeypatch):
    """Here `cpu` copies, as it does from a GPU. Two names of one tensor stay one."""
    model = nn.ModuleDict({"input": nn.Linear(300, 300), "output": nn.Linear(300, 300)})
    model["output"].weight = model["input"].weight
    monkeypatch.setattr(torch.Tensor, "cpu", lambda tensor: tensor.clone())
    path = save_checkpoint(tmp_path, {"model": model}, step=1)
    saved = torch.load(path)["model"]
    assert saved["input.weight"].data_ptr() == saved["output.weight"].data_ptr()
    assert path.stat().st_size < 1.3 * 300 * 300 * 4


def test_the_generator_of_a_mac_is_saved_too(monkeypatch):
    states = [torch.tensor([7], dtype=torch.uint8)]
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: True)
    monkeypatch.setattr(torch.mps, "get_rng_state", lambda: states[-1])
    monkeypatch.setattr(torch.mps, "set_rng_state", states.append)
    resuming.set_rng_state(resuming.rng_state())
    assert len(states) == 2
    assert states[0] is states[1]


@pytest.mark.parametrize(
    ("more", "where"),
    [
        ({"note": Path("a path")}, r"checkpoint\['note'\] is of type pathlib\.\w+,"),
        ({"seen": {"best": [0.1, np.float64(0.2)]}}, r"\['seen'\]\['best'\]\[1\] .*numpy.float64"),
        ({"key": lambda: 1}, r"\['key'\] is of type builtins.function"),
        ({"table": {Path("x"): 1}}, r"\['table'\] is of type builtins.dict"),
        ({"of_each_rank": {"note": Path("x")}}, r"\['note'\]\[0\] is of type pathlib"),
    ],
)
def test_what_could_not_be_loaded_is_not_saved_and_its_place_is_named(tmp_path, more, where):
    with pytest.raises(ValueError, match=rf"{where}.*weights_only=True; not saved") as raised:
        save_checkpoint(tmp_path, parts_of(nn.Linear(2, 1)), step=1, **more)
    assert "\x1b" not in str(raised.value)
    assert not os.listdir(tmp_path)


def test_what_could_not_be_loaded_is_found_inside_a_part(tmp_path):
    parts = parts_of(nn.Linear(2, 1))
    parts["optimizer"].param_groups[0]["lr"] = np.float64(0.1)
    with pytest.raises(ValueError, match=r"\['optimizer'\]\['param_groups'\]\[0\]\['lr'\] is of"):
        save_checkpoint(tmp_path, parts, step=1)


@pytest.mark.parametrize(
    ("parts", "more", "name"),
    [
        ({"model": nn.Linear(2, 1)}, {"model": "lenet"}, "model"),
        ({"run": nn.Linear(2, 1)}, {}, "run"),
        ({"step": nn.Linear(2, 1)}, {}, "step"),
        ({"model": nn.Linear(2, 1)}, {"rng": 5}, "rng"),
        ({"model": nn.Linear(2, 1)}, {"of_each_rank": {"rng": 5}}, "rng"),
        ({"model": nn.Linear(2, 1)}, {"of_each_rank": {"model": 5}}, "model"),
        ({"model": nn.Linear(2, 1)}, {"of_each_rank": {"note": 5}, "note": 6}, "note"),
    ],
)
def test_two_things_of_one_name_are_refused_before_anything_is_written(tmp_path, parts, more, name):
    with pytest.raises(ValueError, match=f"'{name}' in the checkpoint; not saved"):
        save_checkpoint(tmp_path / "new", parts, step=1, **more)
    assert not os.listdir(tmp_path)


def test_checksums_are_written_though_torch_was_told_to_leave_them_out(tmp_path):
    torch.serialization.set_crc32_options(False)
    try:
        path = save_checkpoint(tmp_path, parts_of(nn.Linear(2, 1)), step=1)
        with pytest.raises(ValueError, match="not saved"):
            save_checkpoint(tmp_path, {}, step=2, note=Path("x"))
        assert torch.serialization.get_crc32_options() is False
    finally:
        torch.serialization.set_crc32_options(True)
    assert all(entry.CRC for entry in zipfile.ZipFile(path).infolist())


def test_steps_are_ordered_as_numbers_not_as_names(tmp_path):
    steps = [99_999_998, 99_999_999, 100_000_000, 1_000_000_000]
    for step in steps:
        save_checkpoint(tmp_path, parts_of(nn.Linear(2, 1)), step=step)
    kept = [path.name for path in checkpoints_in(tmp_path)]
    assert kept == ["step_99999999.pt", "step_100000000.pt", "step_1000000000.pt"]
    assert resume(tmp_path, parts_of(nn.Linear(2, 1)))["step"] == steps[-1]
    with pytest.raises(ValueError, match="step=-1: "):
        save_checkpoint(tmp_path, parts_of(nn.Linear(2, 1)), step=-1)


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
    rank = dist.get_rank()
    torch.manual_seed(rank)
    model = DistributedDataParallel(nn.Linear(1000, 100))
    with full_disk() if limited and rank == 0 else contextlib.nullcontext():
        try:
            save_checkpoint(folder, parts_of(model), step=1, of_each_rank={"note": rank})
        except OSError as error:
            return type(error).__name__, str(error)
    return None


@pytest.mark.slow
def test_rank_0_writes_for_all_ranks(tmp_path):
    assert launch(save_on_ranks, tmp_path, timeout=300) == [None, None]
    checkpoint = torch.load(tmp_path / "step_00000001.pt", weights_only=True)
    assert list(checkpoint["model"]) == ["weight", "bias"]
    assert checkpoint["note"] == [0, 1]
    for rank, state in enumerate(checkpoint["rng"]):
        torch.manual_seed(rank)
        nn.Linear(1000, 100)
        assert torch.equal(state["torch"], torch.get_rng_state())


@pytest.mark.slow
def test_ranks_that_reduce_by_hand_save_one_file_together_and_resume_together(tmp_path):
    def run():
        net = nn.Linear(2, 2)
        nn.init.constant_(net.weight, dist.get_rank())
        torch.manual_seed(dist.get_rank())
        save_checkpoint(tmp_path, {"model": net}, step=1, of_each_rank={"rank": dist.get_rank()})
        expected = torch.rand(3)
        saved = resume(tmp_path, {"model": net})
        return saved["rank"], net.weight.sum().item(), torch.equal(torch.rand(3), expected)

    assert launch(run, timeout=300) == [([0, 1], 0.0, True)] * 2


@pytest.mark.slow
def test_a_rank_that_saves_alone_is_told_so_and_does_not_wait_for_ever(tmp_path):
    def run(**options):
        resuming.GIVE_UP_AFTER = 2
        if dist.get_rank() == 0:
            save_checkpoint(tmp_path, {"model": nn.Linear(2, 2)}, step=1, **options)
        dist.all_reduce(torch.ones(1000))  # of gradients, say: it must not meet the saving

    with pytest.raises(LaunchError, match=r"TimeoutError: .* rank 0 has waited 2 s for rank 1\."):
        launch(run, timeout=300)
    assert not os.listdir(tmp_path)
    launch(run, no_dist=True, timeout=300)
    assert len(torch.load(tmp_path / "step_00000001.pt")["rng"]) == 1


@pytest.mark.slow
def test_ranks_that_are_far_apart_wait_for_each_other_and_leave_no_keys_behind(tmp_path):
    def run():
        keys = []
        for step in range(3):
            if step == 1 and dist.get_rank() == 1:
                time.sleep(1)
            save_checkpoint(tmp_path, {"model": nn.Linear(2, 2)}, step=step)
            dist.barrier()
            keys.append(dist.distributed_c10d._get_default_store().num_keys())
            dist.barrier()
        return keys[2] - keys[1]

    assert launch(run, timeout=300) == [0, 0]
    assert len(checkpoints_in(tmp_path)) == 3


@pytest.mark.slow
def test_ranks_that_would_save_different_files_lose_none_of_them(tmp_path):
    def run(**options):
        folder = tmp_path / str(dist.get_rank())
        save_checkpoint(folder, {"model": nn.Linear(2, 2)}, step=1, **options)

    with pytest.raises(LaunchError, match="ValueError: The ranks differ: save_checkpoint to"):
        launch(run, timeout=300)
    launch(run, no_dist=True, timeout=300)
    assert all(len(checkpoints_in(tmp_path / name)) == 1 for name in "01")


@pytest.mark.slow
def test_a_piece_of_a_sharded_tensor_is_not_taken_for_the_whole(tmp_path):
    def run():
        from torch.distributed.tensor import Shard, distribute_tensor, init_device_mesh

        mesh = init_device_mesh("cpu", (2,))
        net = nn.Linear(2, 2)
        net.weight = nn.Parameter(distribute_tensor(net.weight, mesh, [Shard(0)]))
        save_checkpoint(tmp_path, {"model": net}, step=1)

    with pytest.raises(LaunchError, match="DTensor"):
        launch(run, timeout=300)
    assert not os.listdir(tmp_path)


@pytest.mark.slow
def test_when_rank_0_cannot_save_all_ranks_leave_with_its_error(tmp_path):
    one, other = launch(save_on_ranks, tmp_path, limited=True, timeout=300)
    assert one == other
    assert "File too large; not saved, and earlier checkpoints are as they were" in one[1]
    assert not os.listdir(tmp_path)


@pytest.mark.slow
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
        launch(run, timeout=300)


# --- kills --------------------------------------------------------------------------------------


@pytest.mark.long
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
