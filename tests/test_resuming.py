"""A run that was killed goes on as if nothing had happened, or says in what it cannot."""

import fcntl
import os
import random
import re
import resource
import shutil
import signal
import socket
import subprocess
import sys
import zipfile
from dataclasses import replace

import numpy as np
import pytest
import torch
from running import alive, limited
from torch import nn
from torch.utils._pytree import tree_leaves, tree_leaves_with_path, tree_structure
from torch.utils.data import Subset, TensorDataset

from torchclinic.writing import LOCK, sole_use
from torchladder import checkpoint
from torchladder.checkpoint import files_in
from torchladder.data import balanced_subset, load_dataset
from torchladder.launching import LaunchError, launch
from torchladder.training import train

BATCH, STEPS = 32, 7  # 210 images: seven steps an epoch, the last of 18 images
ON_TWO_RANKS = {"world_size": 2, "rung": "ddp", "batch_size": BATCH // 2}


def small_data(count=21):
    return balanced_subset(load_dataset(), count, 5)


def brighter(net, inputs):
    """As augmentations change images: by random numbers of Python's and of NumPy's."""
    return inputs[0] * (1 + random.random() * np.random.rand())  # noqa: NPY002


def new_net(hidden=16):
    torch.manual_seed(0)
    net = nn.Sequential(
        nn.Flatten(), nn.Linear(784, hidden), nn.BatchNorm1d(hidden), nn.ReLU(), nn.Dropout(0.5),
        nn.Linear(hidden, 10),
    )  # fmt: skip
    net.register_forward_pre_hook(brighter)
    return net


def tanh_net():
    net = new_net()
    net[3] = nn.Tanh()
    return net


def trained(folder, *, die_after=None, net=new_net, data=None, rank_to_die=0, **options):
    """Train, or be killed after so many steps of this process."""
    random.seed(0)
    np.random.seed(0)  # noqa: NPY002
    model, steps = net(), []

    def count(module, inputs):
        if module.training:
            steps.append(len(inputs[0]))
        mine = int(os.environ.get("RANK", 0)) == rank_to_die
        if mine and die_after is not None and len(steps) > die_after:
            os.kill(os.getpid(), signal.SIGKILL)

    model.register_forward_pre_hook(count)
    options = {"batch_size": BATCH, "epochs": 3, "checkpoint_every": 3} | options
    train(model, data or small_data(), checkpoint_dir=folder, **options)
    return steps


def end_of(folder):
    """The newest file without what is measured in seconds, and how often the run was saved."""
    saved = torch.load(files_in(folder)[-1], weights_only=True)
    del saved["number"]
    measured = ("seconds", "images_per_second", "peak_memory")
    saved["history"] = [
        {key: value for key, value in epoch.items() if key not in measured}
        for epoch in saved["history"]
    ]
    return saved


def assert_equal(one, other):
    """Bit for bit, all the way down."""
    assert tree_structure(one) == tree_structure(other)
    for (path, leaf), also in zip(tree_leaves_with_path(one), tree_leaves(other), strict=True):
        assert type(leaf) is type(also), path
        equal = torch.equal(leaf, also) if isinstance(leaf, torch.Tensor) else leaf == also
        assert equal, path


def launched(folder, **options):
    launch(trained, folder, **{"world_size": 1, "show": "none"} | options)


def killed(folder, die_after, **options):
    with pytest.raises(LaunchError, match="killed by SIGKILL"):
        launched(folder, die_after=die_after, **options)


# --- as if nothing had happened -----------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kills", "options"),
    [
        ([STEPS], {"checkpoint_every": None}),  # between two epochs
        ([2, 1, STEPS + 1], {"workers": 1}),  # before the first save, and twice after it
        pytest.param([STEPS + 5], {"precision": "fp16-mixed"}, marks=pytest.mark.long),
        ([STEPS + 5], {**ON_TWO_RANKS, "rank_to_die": 1}),
    ],
)
def test_a_killed_run_ends_like_one_that_was_not_bit_for_bit(tmp_path, kills, options):
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    launched(whole, **options)
    for die_after in kills:
        killed(broken, die_after, **options)
    launched(broken, **options)
    assert_equal(end_of(whole), end_of(broken))
    assert end_of(whole)["step"] == 3 * STEPS


def test_a_finished_run_is_given_back_as_it_was(tmp_path, capsys):
    model, other = new_net(), new_net()
    options = {"epochs": 2, "checkpoint_dir": tmp_path}
    history = train(model, small_data(), **options)
    assert train(other, small_data(), **options) == history
    assert_equal(model.state_dict(), other.state_dict())
    assert capsys.readouterr().err == "resumed from step_00000008.pt after epoch 2, step 8\n"


# --- other ranks, other settings ----------------------------------------------------------------


def linear_net():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Flatten(), nn.Linear(784, 10)).double()
    model.register_forward_pre_hook(lambda module, inputs: (inputs[0].double(),))
    return model


@pytest.mark.slow
def test_without_chance_another_number_of_ranks_learns_the_same(tmp_path, capfd):
    """No dropout, no batch norm, no transforms, 64 bits: only the order of sums differs."""
    launched(tmp_path / "whole", net=linear_net)
    killed(tmp_path / "moved", STEPS + 5, net=linear_net, **ON_TWO_RANKS)
    capfd.readouterr()
    launched(tmp_path / "moved", net=linear_net, show="rank0")
    whole, moved = end_of(tmp_path / "whole"), end_of(tmp_path / "moved")
    assert whole["step"] == moved["step"] == 3 * STEPS
    assert len(moved["rng"]) == 1
    assert whole["optimizer"]["param_groups"] == moved["optimizer"]["param_groups"]
    torch.testing.assert_close(moved["model"], whole["model"], rtol=1e-9, atol=1e-12)
    for one, other in zip(whole["history"], moved["history"], strict=True):
        assert other == pytest.approx(one, rel=1e-5)
    change = "world_size 2 -> 1, so the numbers are not those of an unbroken run"
    assert f"in epoch 2, step 12; changed: {change}" in capfd.readouterr().out


def test_another_run_is_refused_with_both_values(tmp_path):
    trained(tmp_path, epochs=1)
    before = {path: path.read_bytes() for path in tmp_path.iterdir()}
    zeros = torch.zeros_like(small_data().train_labels)
    net = r"model's 1.weight was \(16, 784\) float32, now"
    for options, message in [
        (
            {"epochs": 5, "lr": 0.1, "seed": 1},
            "epochs was 1, now 5; lr was 0.05, now 0.1; seed was 0, now 1",
        ),
        (
            {"precision": "bf16-mixed", "batch_size": 16},
            "precision was fp32, now bf16-mixed; batch_size x world_size was 32, now 16",
        ),
        ({"data": small_data(20)}, "data was .* 210 train .*, now .* 200 train"),
        ({"data": replace(small_data(), train_labels=zeros)}, "data was .*, checksum .*, now"),
        ({"net": tanh_net}, "model was Sequential of .* ReLU, now .* Tanh"),
        ({"net": lambda: new_net(8)}, rf"{net} \(8, 784\) float32; .*; and 4 more"),
        ({"net": lambda: new_net().double()}, rf"{net} \(16, 784\) float64"),
    ]:
        with pytest.raises(ValueError, match=rf"step_00000007.pt is of another run: .*{message}"):
            trained(tmp_path, **{"epochs": 1} | options)
    assert before == {path: path.read_bytes() for path in tmp_path.iterdir()}


def test_tensors_of_the_same_sizes_are_other_data(tmp_path):
    one, two = (TensorDataset(torch.eye(8), torch.arange(8) // n % 2) for n in (1, 4))
    parts = Subset(one, range(4)), Subset(one, range(4, 8))
    for i, (old, new) in enumerate([(one, two), parts]):
        options = {"epochs": 1, "batch_size": 2, "checkpoint_dir": tmp_path / f"{i}"}
        train(nn.Linear(8, 2), (old, old), **options)
        with pytest.raises(ValueError, match=r"data was .*, checksum .*, now "):
            train(nn.Linear(8, 2), (new, old), **options)


def test_another_optimizer_and_missing_keys_are_named(tmp_path):
    net = nn.Linear(2, 2)
    sgd, adam = torch.optim.SGD(net.parameters()), torch.optim.Adam(net.parameters())
    checkpoint.save(tmp_path, {"model": net, "optimizer": sgd}, step=1)
    parts, scaler = {"model": net, "optimizer": sgd}, torch.amp.GradScaler("cpu")
    for other, message in [
        (parts | {"optimizer": adam}, "optimizer was SGD, now Adam"),
        (parts | {"model": nn.Linear(2, 2, bias=False)}, r"bias was \(2,\) float32, now not there"),
        (parts | {"scaler": scaler}, "scaler was not there, now GradScaler"),
    ]:
        with pytest.raises(ValueError, match=message):
            checkpoint.load(tmp_path, other)
    torch.save(net.state_dict(), tmp_path / "weights.pt")
    with pytest.raises(ValueError, match=r"weights.pt holds no training run; load_into"):
        checkpoint.load(tmp_path / "weights.pt", {"model": net})


def test_a_state_that_does_not_fit_leaves_the_model_as_it_was(tmp_path):
    def parts(model, *groups):
        return {"model": model, "optimizer": torch.optim.SGD([{"params": [p]} for p in groups])}

    saved, model = nn.Linear(2, 2), nn.Linear(2, 2)
    checkpoint.save(tmp_path, parts(saved, saved.weight), step=1)
    before = model.weight.clone()
    with pytest.raises(ValueError, match="different number of parameter groups"):
        checkpoint.load(tmp_path, parts(model, model.weight, model.bias))
    assert torch.equal(model.weight, before)


def test_after_a_return_to_an_earlier_file_the_folder_goes_on_from_there(tmp_path):
    model = {"model": nn.Linear(2, 2)}
    paths = [checkpoint.save(tmp_path, model, step=step) for step in (4, 8, 12)]
    checkpoint.load(paths[0], model)
    checkpoint.save(tmp_path, model, step=6)
    shutil.copytree(tmp_path, tmp_path / "copy", copy_function=shutil.copyfile)  # with new dates
    for folder in (tmp_path, tmp_path / "copy"):
        assert checkpoint.load(folder, model)["step"] == 6
        assert [int(path.stem[5:]) for path in files_in(folder)] == [8, 12, 6]


def test_a_folder_that_is_not_there_is_an_empty_one_and_a_file_is_an_error(tmp_path):
    parts = {"model": nn.Linear(2, 2)}
    assert checkpoint.load(tmp_path, parts) is None
    assert checkpoint.load(tmp_path / "nosuch", parts) is None
    with pytest.raises(FileNotFoundError, match=r"nosuch\.pt"):
        checkpoint.load(tmp_path / "nosuch.pt", parts)


def test_versions_that_changed_are_told(tmp_path, capsys):
    parts = {"model": nn.Linear(2, 2)}
    path = checkpoint.save(tmp_path, parts, step=1234, epoch=2)
    saved = torch.load(path)
    saved["versions"]["torch"] = "2.0"
    torch.save(saved, path)
    checkpoint.load(path, parts)
    assert re.fullmatch(
        r"resumed from step_00001234.pt after epoch 2, step 1,234; changed: torch 2.0 -> "
        r"2\.\d+.*, so the numbers are not those of an unbroken run\n",
        capsys.readouterr().err,
    )


# --- damaged files ------------------------------------------------------------------------------


def zeroed(path):
    """As a disk may leave it after a power failure: zeros in the middle of the largest tensor."""
    with zipfile.ZipFile(path) as archive:
        middle = max(archive.infolist(), key=lambda entry: entry.file_size).header_offset + 1000
    content = path.read_bytes()
    path.write_bytes(content[:middle] + bytes(4096) + content[middle + 4096 :])


@pytest.mark.slow
def test_a_damaged_newest_file_is_named_left_alone_and_passed_over(tmp_path, capsys):
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    trained(whole)
    shutil.copytree(whole, broken)
    newest = files_in(broken)[-1]
    zeroed(newest)
    spoilt = newest.read_bytes()
    torch.load(newest, weights_only=True)  # torch notices nothing
    with pytest.raises(ValueError, match=r"No checkpoint in .* is whole"):
        checkpoint.load(newest, {"model": new_net()})
    capsys.readouterr()
    trained(broken)
    damaged, resumed, renamed = capsys.readouterr().err.splitlines()
    why = r"the checksum of archive/data/\d+ is not that of its content"
    left = "and left as it is: trying the one before"
    assert re.fullmatch(rf"step_00000021.pt is damaged \({why}\) {left}", damaged)
    assert resumed == "resumed from step_00000018.pt in epoch 3, step 18"
    aside = f"{newest.name}.aside-1"
    assert renamed == f"{newest.name} was no whole checkpoint of this run: it is {aside} now"
    assert (broken / aside).read_bytes() == spoilt
    assert_equal(end_of(whole), end_of(broken))


def test_where_all_steps_are_damaged_a_copy_of_the_best_can_be_taken(tmp_path):
    parts = {"model": nn.Linear(2, 1)}
    whole = checkpoint.save(tmp_path, parts, step=1, best=True)
    whole.write_bytes(whole.read_bytes()[:-100])  # cut off
    checkpoint.save(tmp_path, parts, step=2).write_bytes(b"")
    with pytest.raises(ValueError, match=r"move them away, copy best\.pt to step_00000000\.pt"):
        checkpoint.load(tmp_path, parts)
    shutil.copy(tmp_path / "best.pt", tmp_path / "step_00000000.pt")
    assert checkpoint.load(tmp_path, parts)["step"] == 1


# --- two runs -----------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_second_run_is_told_who_has_the_folder_and_the_first_goes_on(tmp_path):
    def first(folder):
        trained(folder, on_step=lambda state: state.step == 2 and second(folder))

    def second(folder):
        others = [{"world_size": 1}, ON_TWO_RANKS]
        for options in others:
            with pytest.raises(LaunchError) as raised:
                launched(folder, **options)
            for part in (rf"process {os.getpid()} on {socket.gethostname()}, since 2", str(folder)):
                assert part in str(raised.value)
        assert not files_in(folder)

    first(tmp_path)
    assert torch.load(files_in(tmp_path)[-1])["epoch"] == 3
    assert not (tmp_path / LOCK).exists()


def test_a_lock_that_a_full_disk_refuses_is_named_and_not_left(tmp_path):
    with (
        limited(resource.RLIMIT_FSIZE, 0),
        pytest.raises(OSError, match="File too large") as caught,
        sole_use(tmp_path),
    ):
        pass
    assert caught.value.filename == str(tmp_path / LOCK)
    assert os.listdir(tmp_path) == []


@pytest.mark.slow
def test_a_killed_runs_folder_is_free_though_its_workers_live(tmp_path):
    """A worker that is stopped does not notice that its run is gone."""
    program = f"""if True:
        import os, signal, sys, time
        from torchclinic.writing import sole_use
        with sole_use({str(tmp_path)!r}):
            if not os.fork():
                print(os.getpid(), flush=True)  # once it runs, it has let go
            time.sleep(600)
    """
    holder = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True)
    child = int(holder.stdout.readline())
    try:
        with pytest.raises(BlockingIOError, match=f"process {holder.pid} on "), sole_use(tmp_path):
            pass
        holder.kill()
        holder.wait(60)
        assert alive(child)
        with sole_use(tmp_path):
            assert str(os.getpid()) in (tmp_path / LOCK).read_text()
    finally:
        holder.kill()
        holder.stdout.close()
        os.kill(child, signal.SIGKILL)
    assert not list(tmp_path.iterdir())


def test_a_file_of_the_users_that_has_the_locks_name_is_left_alone(tmp_path):
    mine = tmp_path / "mine.txt"
    mine.write_text("precious")
    (lock := tmp_path / LOCK).symlink_to(mine)
    refused = pytest.raises(OSError, match=r"no lock of a run; move it away.*\.run\.lock")
    for make in (lambda: shutil.copy(mine, lock), lambda: os.mkfifo(lock), lock.mkdir):
        with refused, sole_use(tmp_path):
            pass
        assert mine.read_text() == "precious"
        lock.unlink()
        make()
    lock.rmdir()
    of_a_run = f"process {os.getpid()} on {socket.gethostname()}, since 2026-01-02 03:04:05"
    for text in (b"\xff\xfe\xff", b"process notes: wash, rinse", f"{of_a_run}\nmine".encode()):
        lock.write_bytes(text)
        with refused, sole_use(tmp_path):
            pass
        assert lock.read_bytes() == text
    lock.write_text(of_a_run)  # of one that was killed
    with sole_use(tmp_path):
        pass
    assert not lock.exists()


def test_a_lock_that_is_held_and_says_nothing_of_a_run_is_not_printed(tmp_path):
    with open(tmp_path / LOCK, "wb") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        for text in (b"\xff\xfe\xff", b"\x1b[2J"):
            lock.write(text)
            lock.flush()
            with pytest.raises(BlockingIOError, match="it has just begun"), sole_use(tmp_path):
                pass


@pytest.mark.gpu
@pytest.mark.parametrize("precision", ["fp32", "fp16-mixed"])
def test_a_gpu_goes_on_with_its_own_random_numbers(tmp_path, precision):
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    for folder in (whole, broken):
        trained(folder, rung="gpu", precision=precision)
    files_in(broken)[-1].unlink()
    torch.cuda.manual_seed(5)
    trained(broken, rung="gpu", precision=precision)
    one, other = end_of(whole), end_of(broken)
    assert_equal(one["rng"], other["rng"])
    for name, tensor in one["model"].items():
        assert tensor.device.type == "cpu"
        torch.testing.assert_close(tensor, other["model"][name], rtol=1e-3, atol=1e-3)
