"""A run that was killed goes on as if nothing had happened, or says in what it cannot."""

import os
import random
import re
import signal
import subprocess
import sys
import zipfile
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from torchladder.data import ImageData, ImageSet, balanced_subset, flip_and_crop, load
from torchladder.launching import LaunchError, launch
from torchladder.resuming import checkpoints_in, resume, save_checkpoint, why_damaged
from torchladder.training import train

long = pytest.mark.long
BATCH, STEPS = 32, 7  # 210 images: seven steps an epoch, the last of 18 images


class Flipped(ImageData):
    """Turns about half of the images over, at random, as an augmentation does."""

    def normalise(self, images):
        flips = torch.rand(len(images), 1, 1, 1, device=images.device) < 0.5
        return super().normalise(torch.where(flips, images.flip(-1), images))


def small_data(count=21, kind=Flipped):
    part = balanced_subset(load(), count, 5)
    return kind(**vars(part))


def new_net(hidden=16):
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Flatten(), nn.Linear(784, hidden), nn.BatchNorm1d(hidden), nn.ReLU(), nn.Dropout(0.5),
        nn.Linear(hidden, 10),
    )  # fmt: skip


def trained(folder, *, die_after=None, net=new_net, data=None, rank_to_die=0, **options):
    """Train, or be killed after so many steps of this process."""
    random.seed(0)
    np.random.seed(0)  # noqa: NPY002
    model, steps = net(), []

    def count(module, inputs):
        if module.training:
            steps.append(1)
        mine = int(os.environ.get("RANK", 0)) == rank_to_die
        if mine and die_after is not None and len(steps) > die_after:
            os.kill(os.getpid(), signal.SIGKILL)

    model.register_forward_pre_hook(count)
    options = {"batch_size": BATCH, "epochs": 3, "checkpoint_every": 3} | options
    train(model, data or small_data(), checkpoint_dir=folder, progress=False, **options)
    return len(steps)


def end_of(folder):
    """The newest file without what is measured in seconds."""
    checkpoint = torch.load(checkpoints_in(folder)[-1], weights_only=True)
    measured = ("seconds", "images_per_second", "peak_memory")
    checkpoint["history"] = [
        {key: value for key, value in epoch.items() if key not in measured}
        for epoch in checkpoint["history"]
    ]
    return checkpoint


def assert_equal(one, other, name="checkpoint"):
    """Bit for bit, all the way down."""
    assert type(one) is type(other), name
    if isinstance(one, torch.Tensor):
        assert torch.equal(one, other), name
    elif isinstance(one, dict):
        assert one.keys() == other.keys(), name
        for key in one:
            assert_equal(one[key], other[key], f"{name}[{key!r}]")
    elif isinstance(one, list | tuple):
        assert len(one) == len(other), name
        for i, pair in enumerate(zip(one, other, strict=True)):
            assert_equal(*pair, f"{name}[{i}]")
    else:
        assert one == other, name


def killed(folder, die_after, *, world_size=1, **options):
    with pytest.raises(LaunchError, match="killed by SIGKILL"):
        launch(trained, folder, die_after=die_after, world_size=world_size, show="none", **options)


# --- as if nothing had happened -----------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kills", "options"),
    [
        ([STEPS], {}),  # between two epochs
        pytest.param([STEPS + 5], {}, marks=long),  # in the middle of one, after the save at step 9
        pytest.param([STEPS + 5], {"checkpoint_every": 1}, marks=long),  # right after a save
        # back to the epoch's beginning
        pytest.param([STEPS + 5], {"checkpoint_every": None}, marks=long),
        ([2, 1, STEPS + 1], {}),  # before the first save, and twice after it
        pytest.param([STEPS + 5], {"on_device": True}, marks=long),
        pytest.param([STEPS + 5], {"amp": "fp16"}, marks=long),
        ([STEPS + 5, 4], {"workers": 1, "data": small_data(kind=ImageData)}),
    ],
)
def test_a_killed_run_ends_like_one_that_was_not_bit_for_bit(tmp_path, kills, options):
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    launch(trained, whole, world_size=1, **options)
    for die_after in kills:
        killed(broken, die_after, **options)
    launch(trained, broken, world_size=1, show="none", **options)
    assert_equal(end_of(whole), end_of(broken))
    assert end_of(whole)["step"] == 3 * STEPS


@pytest.mark.slow
def test_the_test_would_notice_a_lost_random_state(tmp_path, monkeypatch):
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    trained(whole)
    trained(broken, epochs=3)
    file = checkpoints_in(broken)[-2]
    for later in checkpoints_in(broken)[-1:]:
        later.unlink()
    monkeypatch.setattr("torchladder.resuming.set_rng_state", lambda state: None)
    trained(broken, resume=file)
    with pytest.raises(AssertionError, match=r"checkpoint\['model'\]"):
        assert_equal(end_of(whole), end_of(broken))


@pytest.mark.slow
def test_two_ranks_go_on_bit_for_bit_when_one_was_killed(tmp_path):
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    options = {"world_size": 2, "rung": "ddp", "batch_size": BATCH // 2}
    launch(trained, whole, **options)
    killed(broken, STEPS + 5, rank_to_die=1, **options)
    launch(trained, broken, **options)
    assert_equal(end_of(whole), end_of(broken))


def test_what_was_seen_before_the_break_is_not_read_again(tmp_path, monkeypatch):
    read, plain = [], ImageSet.__getitems__
    monkeypatch.setattr(
        ImageSet, "__getitems__", lambda self, ids: (read.append(len(ids)), plain(self, ids))[1]
    )
    trained(tmp_path, epochs=1)
    before = len(read)
    checkpoints_in(tmp_path)[-1].unlink()
    assert trained(tmp_path, epochs=1) == 1  # step 6 was saved; the seventh is left
    assert read[before] == 18
    assert end_of(tmp_path)["history"][0]["epoch"] == 1


def test_a_finished_run_is_given_back_as_it_was(tmp_path, capsys):
    model = new_net()
    options = {"epochs": 2, "checkpoint_dir": tmp_path, "progress": False}
    history = train(model, small_data(), **options)
    other = new_net()
    assert train(other, small_data(), **options) == history
    assert_equal(model.state_dict(), other.state_dict())
    assert capsys.readouterr().err == "resumed from step_00000008.pt after epoch 2, step 8\n"


def test_without_a_folder_nothing_is_saved(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    train(new_net(), small_data(), epochs=1, progress=False)
    assert not os.listdir(tmp_path)


@pytest.mark.slow
def test_ranks_that_train_models_of_their_own_save_them(tmp_path):
    def run():
        folder = tmp_path / os.environ["RANK"]
        epochs = 1 + int(os.environ["RANK"])  # they do not even save equally often
        train(new_net(), small_data(), epochs=epochs, checkpoint_dir=folder, progress=False)

    launch(run, timeout=300)
    assert [end_of(tmp_path / name)["epoch"] for name in "01"] == [1, 2]


# --- other ranks, other settings ----------------------------------------------------------------


@pytest.mark.slow
def test_from_two_ranks_to_one_and_back(tmp_path, capfd):
    ddp = {"world_size": 2, "rung": "ddp", "batch_size": BATCH // 2}
    data = small_data(kind=ImageData)
    launch(trained, tmp_path / "whole", world_size=1, data=data)
    killed(tmp_path / "moved", STEPS + 5, data=data, **ddp)
    capfd.readouterr()
    killed(tmp_path / "moved", 4, data=data)
    launch(trained, tmp_path / "moved", data=data, **ddp)
    whole, moved = end_of(tmp_path / "whole"), end_of(tmp_path / "moved")
    assert whole["step"] == moved["step"] == 3 * STEPS
    assert whole["optimizer"]["param_groups"] == moved["optimizer"]["param_groups"]
    assert whole["model"].keys() == moved["model"].keys()
    assert (len(whole["rng"]), len(moved["rng"])) == (1, 2)
    said = capfd.readouterr().out
    assert "resumed from step_00000015.pt in epoch 3, step 15; changed: ranks 1 -> 2, so" in said


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [pytest.param(1, marks=long), 2])
def test_without_chance_another_number_of_ranks_learns_the_same(tmp_path, ranks):
    """No dropout, no batch norm, no transforms, 64 bits: only the order of sums differs."""
    ddp = {"world_size": 2, "rung": "ddp", "batch_size": BATCH // 2}
    here = {"world_size": 1}
    first, second = (ddp, here) if ranks == 2 else (here, ddp)
    options = {"net": linear_net, "data": small_data(kind=ImageData)}
    launch(trained, tmp_path / "whole", world_size=1, **options)
    killed(tmp_path / "moved", STEPS + 5, **first, **options)
    launch(trained, tmp_path / "moved", show="none", **second, **options)
    whole, moved = end_of(tmp_path / "whole"), end_of(tmp_path / "moved")
    for name, tensor in whole["model"].items():
        torch.testing.assert_close(moved["model"][name], tensor, rtol=1e-9, atol=1e-12)
    for one, other in zip(whole["history"], moved["history"], strict=True):
        assert other == pytest.approx(one, rel=1e-5)


def linear_net():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Flatten(), nn.Linear(784, 10)).double()
    model.register_forward_pre_hook(lambda module, inputs: (inputs[0].double(),))
    return model


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"seed": 1}, "seed was 0, now 1"),
        ({"lr": 0.1}, "lr was 0.05, now 0.1"),
        ({"epochs": 5}, "epochs was 1, now 5"),
        ({"batch_size": 16}, "batch_size x ranks was 32, now 16"),
        ({"amp": "bf16"}, "amp was None, now bf16"),
        (
            {"augment": flip_and_crop, "data": small_data(kind=ImageData)},
            "augment was None, now <function flip_and_crop>",
        ),
        ({"data": small_data(20)}, "data was .* 210 train .*, now .* 200 train"),
        (
            {"net": lambda: new_net(8)},
            r"model's 1.weight was \(16, 784\) float32, now \(8, 784\) float32; .*; and 4 more",
        ),
        (
            {"net": lambda: new_net().double(), "data": small_data()},
            r"model's 1.weight was \(16, 784\) float32, now \(16, 784\) float64",
        ),
        (
            {"net": lambda: nn.Sequential(nn.Flatten(), nn.Linear(784, 10))},
            r"model's 1.weight was \(16, 784\) float32, now \(10, 784\) float32",
        ),
    ],
)
def test_another_run_is_refused_with_both_values(tmp_path, options, message):
    trained(tmp_path, epochs=1)
    before = {path: path.read_bytes() for path in tmp_path.iterdir()}
    with pytest.raises(ValueError, match=rf"step_00000007.pt is of another run: .*{message}"):
        trained(tmp_path, **{"epochs": 1} | options)
    assert before == {path: path.read_bytes() for path in tmp_path.iterdir()}


def test_another_optimizer_and_missing_keys_are_named(tmp_path):
    net = nn.Linear(2, 2)
    sgd = torch.optim.SGD(net.parameters())
    save_checkpoint(tmp_path, {"model": net, "optimizer": sgd}, step=1)
    adam = {"model": net, "optimizer": torch.optim.Adam(net.parameters())}
    with pytest.raises(ValueError, match="optimizer was SGD, now Adam"):
        resume(tmp_path, adam)
    with pytest.raises(ValueError, match=r"model's bias was \(2,\) float32, now not there"):
        resume(tmp_path, {"model": nn.Linear(2, 2, bias=False), "optimizer": sgd})
    with pytest.raises(ValueError, match="optimizer was SGD, now not there"):
        resume(tmp_path, {"model": net})
    with pytest.raises(ValueError, match="ema's weight was not there, now"):
        resume(tmp_path, {"model": net, "optimizer": sgd, "ema": net})
    with pytest.raises(ValueError, match="scaler was not there, now GradScaler"):
        resume(tmp_path, {"model": net, "optimizer": sgd, "scaler": torch.amp.GradScaler("cpu")})


@pytest.mark.slow
def test_a_run_whose_workers_augment_is_told_that_their_random_numbers_begin_anew(tmp_path, capsys):
    for workers, told in [(0, False), (1, True)]:
        options = {"augment": partial(flip_and_crop, padding=1), "workers": workers}
        options |= {"data": small_data(kind=ImageData), "epochs": 1}
        trained(tmp_path / str(workers), **options)
        checkpoints_in(tmp_path / str(workers))[-1].unlink()
        trained(tmp_path / str(workers), **options)
        said = capsys.readouterr().err
        assert "resumed from step_00000006.pt" in said
        assert ("in workers draws other numbers" in said) == told
        assert ("not those of an unbroken run" in said) == told


def test_a_file_with_weights_alone_is_not_a_run(tmp_path):
    torch.save(new_net().state_dict(), tmp_path / "weights.pt")
    with pytest.raises(ValueError, match=r"weights.pt holds no training run; load_into"):
        resume(tmp_path / "weights.pt", {"model": new_net()})


def test_a_folder_that_is_not_there_is_an_empty_one(tmp_path):
    assert resume(tmp_path, {"model": nn.Linear(2, 2)}) is None
    assert resume(tmp_path / "nosuch", {"model": nn.Linear(2, 2)}) is None


def test_a_file_that_is_not_there_or_cannot_be_read_is_an_error_of_the_system(tmp_path):
    loop = tmp_path / "loop.pt"
    loop.symlink_to(loop)
    for name, error in [("nosuch.pt", FileNotFoundError), ("loop.pt", OSError)]:
        with pytest.raises(error, match=name):
            resume(tmp_path / name, {"model": nn.Linear(2, 2)})


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        (
            {"resume": "never"},
            ValueError,
            "holds step_00000007.pt of an earlier run: name an empty",
        ),
        ({"resume": "always"}, FileNotFoundError, "resume='always': choose 'auto', 'never' or a"),
        ({"checkpoint_every": 0}, ValueError, "checkpoint_every=0: save every so many"),
    ],
)
def test_bad_arguments_are_named(tmp_path, options, error, message):
    trained(tmp_path, epochs=1)
    with pytest.raises(error, match=message):
        trained(tmp_path, **options)


def test_a_read_only_folder_is_noticed_before_the_training(tmp_path, monkeypatch):
    tmp_path.chmod(0o500)
    if os.access(tmp_path, os.W_OK):  # root may write everywhere
        monkeypatch.setattr(os, "access", lambda *_: False)
    with pytest.raises(PermissionError, match="cannot be written: name another folder"):
        train(new_net(), small_data(), checkpoint_dir=tmp_path, progress=False)


def test_a_file_in_the_folders_place_is_noticed_before_the_training(tmp_path):
    file = tmp_path / "notes.txt"
    file.write_text("kept")
    with pytest.raises(NotADirectoryError, match=r"notes.txt' is a file: name a folder"):
        train(new_net(), small_data(), checkpoint_dir=file, progress=False)
    assert file.read_text() == "kept"
    with pytest.raises(NotADirectoryError, match="checkpoint_dir='/dev/null' is a file: name a"):
        train(new_net(), small_data(), checkpoint_dir="/dev/null", progress=False)
    with pytest.raises(ValueError, match="checkpoint_dir='': name a folder"):
        train(new_net(), small_data(), checkpoint_dir="", progress=False)


def test_saving_needs_a_folder():
    with pytest.raises(ValueError, match="checkpoint_dir=None: name the folder"):
        train(new_net(), small_data(), checkpoint_every=3)
    with pytest.raises(FileNotFoundError, match=r"resume='nosuch.pt': choose"):
        train(new_net(), small_data(), resume="nosuch.pt")


def test_going_back_to_an_earlier_file(tmp_path, capsys):
    trained(tmp_path, epochs=1)
    assert trained(tmp_path, epochs=1, resume=tmp_path / "step_00000003.pt") == 4
    assert "resumed from step_00000003.pt in epoch 1, step 3\n" in capsys.readouterr().err


def test_versions_and_settings_that_changed_are_told(tmp_path, capsys):
    parts = {"model": nn.Linear(2, 2)}
    path = save_checkpoint(tmp_path, parts, step=1234, epoch=2)
    checkpoint = torch.load(path)
    checkpoint["versions"]["torch"] = "2.0"
    torch.save(checkpoint, path)
    resume(path, parts)
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


def truncated(path):
    path.write_bytes(path.read_bytes()[:-100])


def empty(path):
    path.write_bytes(b"")


@pytest.mark.slow
@pytest.mark.parametrize("spoil", [zeroed, truncated, empty])
def test_a_damaged_newest_file_is_named_left_alone_and_passed_over(tmp_path, capsys, spoil):
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    for folder in (whole, broken):
        trained(folder)
    newest = checkpoints_in(broken)[-1]
    spoil(newest)
    spoilt = newest.read_bytes()
    if spoil is zeroed:
        torch.load(newest, weights_only=True)  # torch notices nothing
    with pytest.raises(ValueError, match=r"No checkpoint in .* is whole"):
        resume(newest, {"model": new_net()})
    assert newest.read_bytes() == spoilt
    capsys.readouterr()
    trained(broken)
    said = capsys.readouterr().err.splitlines()
    assert re.fullmatch(
        r"step_00000021.pt is damaged \(.+\) and left as it is: trying the one before", said[0]
    )
    assert said[1] == "resumed from step_00000018.pt in epoch 3, step 18"
    assert_equal(end_of(whole), end_of(broken))


def test_a_wrong_checksum_is_named(tmp_path):
    path = save_checkpoint(tmp_path, {"model": nn.Linear(2000, 2)}, step=1)
    assert why_damaged(path) is None
    zeroed(path)
    assert why_damaged(path) == "the checksum of archive/data/0 is not that of its content"


def test_a_file_without_checksums_is_taken_as_it_is(tmp_path, capsys):
    parts = {"model": nn.Linear(2, 2)}
    path = save_checkpoint(tmp_path, parts, step=1)
    checkpoint = torch.load(path)
    torch.serialization.set_crc32_options(False)
    try:
        torch.save(checkpoint, path)
    finally:
        torch.serialization.set_crc32_options(True)
    assert resume(tmp_path, parts)["step"] == 1
    assert "damaged" not in capsys.readouterr().err


@pytest.mark.slow
def test_a_flipped_bit_costs_at_most_the_newest_file(tmp_path):
    """300 flips, one at a time; as many as TORCHLADDER_FLIPS says, such as 4000, if it is set."""
    net = nn.Linear(8, 8)
    for step in (1, 2):
        nn.init.constant_(net.weight, step)
        newest = save_checkpoint(tmp_path, {"model": net}, step=step)
    content = newest.read_bytes()
    bits = random.Random(0).sample(
        range(8 * len(content)), int(os.environ.get("TORCHLADDER_FLIPS", 300))
    )
    resumed_from = []
    for bit in bits:
        flipped = bytearray(content)
        flipped[bit // 8] ^= 1 << bit % 8
        newest.write_bytes(flipped)
        step = resume(tmp_path, {"model": net})["step"]
        assert (net.weight == step).all(), f"bit {bit}"
        resumed_from.append(step)
    assert set(resumed_from) == {1, 2}  # some bits mean nothing: those of dates, say


# --- torchrun -----------------------------------------------------------------------------------


@long
def test_torchrun_starts_killed_ranks_again_and_they_go_on(tmp_path):
    script = tmp_path / "killed_once.py"
    script.write_text(
        "import os, signal, sys\n"
        "from torchladder import data, launching, models, training\n"
        "add_batch, steps = training.add_batch, []\n"
        "def count(*args):\n"
        "    steps.append(1)\n"
        "    first = os.environ['TORCHELASTIC_RESTART_COUNT'] == '0'\n"
        "    if first and os.environ['RANK'] == '1' and len(steps) == 9:\n"
        "        os.kill(os.getpid(), signal.SIGKILL)\n"
        "    add_batch(*args)\n"
        "training.add_batch = count\n"
        "launching.join_group()\n"
        "options = {'rung': 'ddp', 'epochs': 1, 'batch_size': 500, 'checkpoint_every': 4}\n"
        "model, images = models.MLP(784), data.load()\n"
        "print(training.train(model, images, checkpoint_dir=sys.argv[1], **options))\n"
    )
    folder = tmp_path / "checkpoints"
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += ["--nproc-per-node=2", "--max-restarts=2", str(script), str(folder)]
    # Else a rank may meet the other's address of before in the store (pytorch#135712).
    environment = os.environ | {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=900, env=environment)
    assert done.returncode == 0, done.stderr
    assert "resumed from step_00000008.pt in epoch 1, step 8\n" in done.stderr
    assert done.stdout.count("test accuracy") == 2  # each rank's, of the last attempt alone
    assert end_of(folder)["step"] == 12
    assert Path(folder, "best.pt").exists()


@pytest.mark.gpu
@pytest.mark.parametrize("options", [{}, {"amp": "fp16"}, {"on_device": True}])
def test_a_gpu_goes_on_with_its_own_random_numbers(tmp_path, options):
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    for folder in (whole, broken):
        trained(folder, rung="gpu", **options)
    checkpoints_in(broken)[-1].unlink()
    torch.cuda.manual_seed(5)
    trained(broken, rung="gpu", **options)
    one, other = end_of(whole), end_of(broken)
    assert_equal(one["rng"], other["rng"])
    for name, tensor in one["model"].items():
        assert tensor.device.type == "cpu"
        torch.testing.assert_close(tensor, other["model"][name], rtol=1e-3, atol=1e-3)
