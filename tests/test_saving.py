"""No crash while saving, at whatever instant, costs the last good file."""

import contextlib
import errno
import os
import pickle
import re
import time
import zipfile
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
from running import NO_CHECKSUMS, full_disk
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from torchclinic.writing import LEFTOVER
from torchladder import checkpoint, training
from torchladder.checkpoint import files_in
from torchladder.data import balanced_subset, load_dataset
from torchladder.launching import LaunchError, launch
from torchladder.models import MLP


def parts_of(model):
    return {"model": model, "optimizer": torch.optim.SGD(model.parameters(), lr=0.1)}


def linear():
    return parts_of(nn.Linear(2, 1))


def test_a_full_disk_costs_only_the_new_file(tmp_path, monkeypatch):
    def no_space(descriptor):
        raise OSError(errno.ENOSPC, "No space left on device")

    parts = parts_of(nn.Linear(1000, 100))
    before = checkpoint.save(tmp_path, parts, step=1, best=True)
    with full_disk(), pytest.raises(OSError, match="File too large; not saved, and earl") as raised:
        checkpoint.save(tmp_path, parts, step=2, best=True)
    assert raised.value.errno == errno.EFBIG
    assert raised.value.filename == str(tmp_path / "step_00000002.pt")
    monkeypatch.setattr(os, "fsync", no_space)  # full only when the file is flushed
    with pytest.raises(OSError, match=r"No space left on device; not saved.*step_00000002.pt"):
        checkpoint.save(tmp_path, parts, step=2)
    assert sorted(os.listdir(tmp_path)) == ["best.pt", before.name]
    assert torch.load(tmp_path / "best.pt")["step"] == 1
    assert checkpoint.load(tmp_path, parts)["step"] == 1


# --- what is in a checkpoint --------------------------------------------------------------------


def test_the_names_in_the_file_are_those_of_the_model_itself(tmp_path):
    model, other = nn.Linear(2, 1), nn.Linear(2, 1)
    wrapped = torch.compile(nn.DataParallel(model))
    path = checkpoint.save(tmp_path, parts_of(wrapped), step=3, epoch=1)
    saved = torch.load(path, weights_only=True)
    assert list(saved["model"]) == ["weight", "bias"]
    assert list(saved) == [
        "model", "optimizer", "epoch", "batch", "step", "rng", "run", "classes", "versions",
        "number",
    ]  # fmt: skip
    assert saved["versions"]["torch"] == torch.__version__
    checkpoint.load(path, parts_of(torch.compile(other)))
    assert torch.equal(other.weight, model.weight.cpu())  # DataParallel moved it, if there is a GPU


def test_tied_weights_of_a_gpu_are_written_once(tmp_path, monkeypatch):
    """Here `cpu` copies, as it does from a GPU. Two names of one tensor stay one."""
    model = nn.ModuleDict({"input": nn.Linear(300, 300), "output": nn.Linear(300, 300)})
    model["output"].weight = model["input"].weight
    monkeypatch.setattr(torch.Tensor, "cpu", lambda tensor: tensor.clone())
    path = checkpoint.save(tmp_path, {"model": model}, step=1)
    saved = torch.load(path)["model"]
    assert saved["input.weight"].data_ptr() == saved["output.weight"].data_ptr()
    assert path.stat().st_size < 1.3 * 300 * 300 * 4


def test_the_generator_of_a_mac_is_saved_too(tmp_path, monkeypatch):
    states = [torch.tensor([7], dtype=torch.uint8)]
    parts, others = linear(), linear()  # an optimizer imports torch._dynamo, which looks at MPS
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: True)
    monkeypatch.setattr(torch.mps, "get_rng_state", lambda: states[-1])
    monkeypatch.setattr(torch.mps, "set_rng_state", states.append)
    checkpoint.load(checkpoint.save(tmp_path, parts, step=1), others)
    assert [int(state) for state in states] == [7, 7]


def test_what_could_not_be_loaded_later_is_not_saved_and_is_named(tmp_path):
    numpys = linear()
    numpys["optimizer"].param_groups[0]["lr"] = np.float64(0.1)
    path, number = r"GLOBAL pathlib\.", r"GLOBAL numpy\."
    for parts, more, said in [
        (linear(), {"note": Path("a path")}, path),
        (linear(), {"seen": {"best": [0.1, np.float64(0.2)]}}, number),
        (numpys, {}, number),
    ]:
        with pytest.raises(ValueError, match=r"with weights_only=True; not saved") as caught:
            checkpoint.save(tmp_path, parts, step=1, **more)
        assert re.search(said, str(caught.value.__cause__))
    assert not os.listdir(tmp_path)


def test_what_killed_saves_left_half_written_goes_with_the_next_save(tmp_path):
    left = tmp_path / f".step_00000001.pt.0a1b2c3d{LEFTOVER}"
    other = tmp_path / f".weights.pt.0a1b2c3d{LEFTOVER}"
    for path in (left, other):
        path.write_text("half")
    checkpoint.save(tmp_path, linear(), step=2)
    assert (left.exists(), other.exists()) == (False, True)


def test_two_things_of_one_name_are_refused_before_anything_is_written(tmp_path):
    model = nn.Linear(2, 1)
    for parts, more, name in [
        ({"model": model}, {"model": "lenet"}, "model"),
        ({"model": model}, {"rng": 5}, "rng"),
        ({"model": model}, {"of_each_rank": {"note": 5}, "note": 6}, "note"),
    ]:
        with pytest.raises(ValueError, match=f"'{name}' in the checkpoint; not saved"):
            checkpoint.save(tmp_path / "new", parts, step=1, **more)
    for numbers in ({"step": -1}, {"step": 1, "keep": 0}):
        with pytest.raises(ValueError, match="keep at least 1 file; steps count from 0"):
            checkpoint.save(tmp_path / "new", {"model": model}, **numbers)
    assert not os.listdir(tmp_path)


def test_checksums_are_written_though_torch_was_told_to_leave_them_out(tmp_path):
    with NO_CHECKSUMS:
        path = checkpoint.save(tmp_path, linear(), step=1)
        assert torch.serialization.get_crc32_options() is False
    assert all(entry.CRC for entry in zipfile.ZipFile(path).infolist())


def test_the_files_saved_last_stay_and_damaged_ones_are_not_touched(tmp_path, monkeypatch):
    there, unlink = [], Path.unlink

    def noted_unlink(path, **options):
        there.append(sorted(p.name for p in tmp_path.glob("*.pt")))
        unlink(path, **options)

    monkeypatch.setattr(Path, "unlink", noted_unlink)
    (tmp_path / "step_9999999999.pt").write_text("damaged")
    (tmp_path / "step_00000001.pt.txt").write_text("not ours")
    for step in (99_999_998, 99_999_999, 100_000_000):
        checkpoint.save(tmp_path, linear(), step=step, keep=2, best=step == 99_999_998)
    # The old file goes only when the new one is there.
    assert [
        "best.pt", "step_100000000.pt", "step_99999998.pt", "step_99999999.pt",
        "step_9999999999.pt",
    ] in there  # fmt: skip
    assert [path.name for path in files_in(tmp_path)] == [
        "step_99999999.pt", "step_100000000.pt", "step_9999999999.pt"
    ]  # fmt: skip
    assert torch.load(tmp_path / "best.pt")["step"] == 99_999_998
    assert (tmp_path / "step_00000001.pt.txt").exists()
    assert checkpoint.load(tmp_path, linear())["step"] == 100_000_000


def test_what_only_has_the_name_of_a_checkpoint_is_kept_under_another(tmp_path, capsys):
    (tmp_path / "step_00000001.pt").mkdir()
    (tmp_path / "step_00000002.pt").symlink_to("nowhere")
    torch.save({"mine": 1, "number": 9}, tmp_path / "step_00000003.pt")
    (tmp_path / "best.pt").write_text("mine too")
    (tmp_path / "best.pt.aside-1").write_text("of an earlier time")
    for step in (1, 2, 3):
        checkpoint.save(tmp_path, linear(), step=step, best=step == 3)
    assert checkpoint.load(tmp_path, linear())["step"] == 3
    said = "step_00000001.pt was no whole checkpoint of this run: it is step_00000001.pt.aside-1"
    assert said in capsys.readouterr().err
    assert (tmp_path / "step_00000001.pt.aside-1").is_dir()
    assert os.readlink(tmp_path / "step_00000002.pt.aside-1") == "nowhere"
    assert torch.load(tmp_path / "step_00000003.pt.aside-1") == {"mine": 1, "number": 9}
    assert (tmp_path / "best.pt.aside-1").read_text() == "of an earlier time"
    assert (tmp_path / "best.pt.aside-2").read_text() == "mine too"


class Touch:
    def __reduce__(self):
        return open, ("ran", "w")


def test_nothing_in_a_file_runs(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    path = checkpoint.save("folder", linear(), step=1)
    torch.save(torch.load(path) | {"more": Touch()}, path)
    with pytest.raises(pickle.UnpicklingError, match=r"GLOBAL .*open"):
        checkpoint.load(path, linear())
    assert not Path("ran").exists()


def test_another_models_checkpoints_in_the_folder_are_kept_without_settings(tmp_path):
    old = checkpoint.save(tmp_path, linear(), step=1, best=True)
    for step, model in enumerate((nn.Linear(3, 1), nn.Identity(), nn.Bilinear(1, 2, 1)), 1):
        for _ in range(2):
            checkpoint.save(tmp_path, {"model": model}, step=step, keep=1, best=True)
    assert len(list(tmp_path.glob("best.pt*"))) == 4
    assert torch.load(f"{old}.aside-1")["model"]["weight"].shape == (1, 2)
    assert torch.load(old)["model"]["weight"].shape == (1, 3)
    assert len(files_in(tmp_path)) == 3


def test_a_checkpoint_of_another_run_that_was_brought_here_is_kept(tmp_path):
    other = checkpoint.save(tmp_path / "other", linear(), step=999, run={"lr": 9})
    home = tmp_path / "home"
    for step in (1, 2, 3):
        checkpoint.save(home, linear(), step=step, run={"lr": 1})
    other.rename(home / other.name)
    for step in (4, 5, 6, 7):
        checkpoint.save(home, linear(), step=step, run={"lr": 1})
    assert torch.load(home / other.name)["run"] == {"lr": 9}
    names = [f"step_{step:08d}.pt" for step in (5, 6, 7, 999)]
    assert sorted(os.listdir(home)) == names
    assert checkpoint.load(home, linear(), run={"lr": 1})["step"] == 7


def test_the_best_epoch_is_kept_beside_the_newest(tmp_path, monkeypatch):
    accuracies = iter([0.5, 0.7, 0.6, 0.7])
    tested = lambda *_, **__: training.Metrics(1.0, next(accuracies), 50)  # noqa: E731
    monkeypatch.setattr(training, "evaluate", tested)
    data = balanced_subset(load_dataset(), 10, 5)
    training.train(MLP(784), data, epochs=4, checkpoint_dir=tmp_path)
    assert torch.load(tmp_path / "best.pt")["epoch"] == 2
    assert len(files_in(tmp_path)) == 3


def test_the_seconds_of_an_epoch_are_its_steps_alone_however_often_it_saves(tmp_path, monkeypatch):
    now, save = [0.0], checkpoint.save

    def takes(seconds, work=lambda *_, **__: None):
        def slow(*arguments, **options):
            now[0] += seconds
            return work(*arguments, **options)

        return slow

    monkeypatch.setattr(training, "perf_counter", lambda: now[0])
    monkeypatch.setattr(checkpoint, "save", takes(100.0, save))
    data = balanced_subset(load_dataset(), 14, 5)  # 140 images: seven steps of 20
    options = {"batch_size": 20, "checkpoint_dir": tmp_path, "on_step": takes(1.0)}
    history = training.train(MLP(784), data, epochs=2, checkpoint_every=2, **options)
    assert now[0] == 2 * (7 + 4 * 100)
    assert [(epoch.seconds, epoch.images_per_second) for epoch in history] == [(7, 20)] * 2


# --- ranks --------------------------------------------------------------------------------------


@pytest.mark.slow
def test_rank_0_writes_one_file_for_all_ranks_and_they_go_on_from_it(tmp_path):
    def run():
        rank = dist.get_rank()
        torch.manual_seed(rank)
        net = nn.Linear(2, 2)
        nn.init.constant_(net.weight, rank)  # ranks that reduce by hand
        ddp = DistributedDataParallel(nn.Linear(2, 2))
        parts = {"model": net, "ddp": ddp}
        for step in range(3):
            time.sleep(0.5 * rank)
            checkpoint.save(tmp_path, parts, step=step, of_each_rank={"note": rank})
        expected = torch.rand(3)
        saved = checkpoint.load(tmp_path, parts)
        assert torch.equal(torch.rand(3), expected)
        return list(saved["ddp"]), saved["note"], net.weight.sum().item()

    assert launch(run, timeout=300) == [(["weight", "bias"], [0, 1], 0.0)] * 2
    assert len(files_in(tmp_path)) == 3


@pytest.mark.slow
def test_a_rank_that_saves_alone_is_told_so_and_does_not_wait_for_ever(tmp_path):
    def run():
        checkpoint._GIVE_UP_AFTER = 1
        if dist.get_rank() == 0:
            checkpoint.save(tmp_path, {"model": nn.Linear(2, 2)}, step=1)
        dist.all_reduce(torch.ones(1000))  # of gradients, say: it must not meet the saving

    with pytest.raises(LaunchError, match=r"TimeoutError: .* rank 0 has waited 1 s for rank 1\."):
        launch(run, timeout=300)
    assert not os.listdir(tmp_path)


@pytest.mark.slow
def test_ranks_that_would_save_different_files_lose_none_of_them(tmp_path):
    def run():
        folder, parts = tmp_path / str(dist.get_rank()), {"model": nn.Linear(2, 2)}
        with pytest.raises(ValueError, match=r"The ranks differ: checkpoint\.save to"):
            checkpoint.save(folder, parts, step=1)
        return checkpoint.save(folder, parts, step=1, no_dist=True)

    for path in launch(run, timeout=300):
        assert len(torch.load(path)["rng"]) == 1


@pytest.mark.slow
def test_when_rank_0_cannot_save_all_ranks_leave_with_its_error(tmp_path):
    class Part:
        def state_dict(self):
            raise dist.DistError("odd")  # of no module that every process must have

    def sharded():
        from torch.distributed.tensor import Shard, distribute_tensor, init_device_mesh

        net, mesh = nn.Linear(2, 2), init_device_mesh("cpu", (2,))
        net.weight = nn.Parameter(distribute_tensor(net.weight, mesh, [Shard(0)]))
        return net

    def run():
        said = []
        for part in (nn.Linear(1000, 100), sharded(), Part()):
            with full_disk() if dist.get_rank() == 0 else contextlib.nullcontext():
                try:
                    checkpoint.save(tmp_path, {"part": part}, step=1)
                except Exception as error:
                    said.append(f"{type(error).__name__}: {error}")
        return said

    one, other = launch(run, timeout=300)
    assert one == other
    assert "File too large; not saved, and earlier checkpoints are as they were" in one[0]
    assert "A tensor is sharded (a DTensor)" in one[1]
    assert one[2] == "RuntimeError: DistError: odd"
    assert not os.listdir(tmp_path)


# --- kills --------------------------------------------------------------------------------------


@pytest.mark.long
def test_kills_at_random_instants_lose_nothing():
    """20 of them, again until three have cut a file off: how many do depends on the machine."""
    from benchmarks.kills import kills

    total = Counter()
    for seed in range(20):
        total.update(kills(20, seed=seed))
        if total["half-written files"] >= 3:
            break
    print(total)
    assert total["lost"] == 0
    assert total["files checked"] >= total["kills"]
    assert total["half-written files"] > 0  # else the kills came at the wrong time
