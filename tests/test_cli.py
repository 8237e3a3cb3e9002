"""The command does what the notebooks do, and answers bad input with one sentence."""

import os
import re
import shutil
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch

from torchladder import cli, data, devices
from torchladder.data import load, loader
from torchladder.models import LeNet
from torchladder.training import evaluate


def run(*arguments):
    return subprocess.run(
        [sys.executable, "-m", "torchladder", *arguments],
        capture_output=True,
        text=True,
        timeout=120,
    )


def test_train_saves_a_model_that_is_as_good_as_it_says(tmp_path):
    path = tmp_path / "lenet.pt"
    done = run("train", "--rung", "cpu", "--epochs", "2", "--save", str(path))
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("LeNet on cpu, fashion_mnist_small: 12,000 train")
    assert done.stdout.endswith(f"saved {path}\n")
    assert os.listdir(tmp_path) == ["lenet.pt"]
    model = LeNet()
    model.load_state_dict(torch.load(path))
    accuracy = evaluate(model, loader(load(), "test")).accuracy
    assert accuracy > 0.75
    assert f"{accuracy:.1%}" in done.stdout


@pytest.mark.parametrize("model", ["mlp", "linear-conv"])
def test_every_model_trains(model, capsys):
    with pytest.raises(SystemExit) as ended:
        cli.main(
            ["train", "--model", model, "--epochs", "1", "--batch-size", "1000", "--lr", "0.01",
             "--width", "0.01"]
        )  # fmt: skip
    assert ended.value.code == 0
    assert "images/s" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--epochs", "0"], "epochs=0: train for at least one."),
        (["--rung", "tpu"], "No rung 'tpu'"),
        (["--rung", "gpu", "--device", "cuda:7"], "No GPU for 'cuda:7'"),
        (["--device", "gpu1"], "'gpu1' is not a device"),
        (["--data", "mnist"], "No data set 'mnist'"),
        (["--data", "fashion_mnist", "--folder", "/no/such/folder"], "is not a folder"),
        (["--save", "/no/such/folder/x.pt"], "name a file in a folder that can be written"),
        (["--model", "linear-conv", "--width", "0"], "width=0.0"),
    ],
)
def test_bad_input_gets_one_sentence(arguments, message, capsys):
    with pytest.raises(SystemExit) as ended:
        cli.main(["train", *arguments])
    out, err = capsys.readouterr()
    assert ended.value.code == 2
    assert out.count("\n") <= 1
    assert err.count("\n") == 1
    assert message in err


def test_bad_input_ends_the_command_without_a_traceback():
    done = run("train", "--rung", "tpu")
    assert (done.returncode, done.stdout) == (2, "")
    assert re.fullmatch(r"torchladder train: No rung 'tpu'.*\n", done.stderr)


def test_a_wrong_option_shows_the_usage():
    done = run("train", "--no-such-option")
    assert done.returncode == 2
    assert "usage: torchladder" in done.stderr
    assert "Traceback" not in done.stderr


def test_an_interrupt_is_not_a_traceback(capsys, monkeypatch):
    def interrupt(options):
        raise KeyboardInterrupt

    monkeypatch.setattr(cli, "_train", interrupt)
    with pytest.raises(SystemExit) as ended:
        cli.main(["train"])
    assert ended.value.code == 130
    assert capsys.readouterr().err == "torchladder train: interrupted\n"


def test_a_failed_save_leaves_the_old_file(tmp_path, monkeypatch, capsys):
    path = tmp_path / "model.pt"
    path.write_bytes(b"the last good one")

    def disk_full(state, file):
        file.write_bytes(b"half")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(torch, "save", disk_full)
    with pytest.raises(SystemExit) as ended:
        cli.main(["train", "--epochs", "1", "--model", "mlp", "--save", str(path)])
    assert ended.value.code == 2
    assert path.read_bytes() == b"the last good one"
    assert os.listdir(tmp_path) == ["model.pt"]
    assert "No space left on device" in capsys.readouterr().err


def test_two_ranks_train_and_only_the_first_prints_and_saves(tmp_path, capsys):
    path = tmp_path / "lenet.pt"
    with pytest.raises(SystemExit) as ended:
        cli.main(["train", "--rung", "ddp", "--nproc", "2", "--epochs", "1", "--save", str(path)])
    out = capsys.readouterr().out
    assert ended.value.code == 0
    assert out.startswith("LeNet on 2 ranks (gloo), fashion_mnist_small")
    assert out.count("test accuracy") == 1
    LeNet().load_state_dict(torch.load(path))


def test_bad_input_is_one_sentence_on_a_rank_too(capsys):
    with pytest.raises(SystemExit) as ended:
        cli.main(["train", "--rung", "ddp", "--epochs", "0"])
    assert ended.value.code == 2
    assert re.fullmatch(
        r"torchladder train: rank \d of 2 failed with ValueError: epochs=0: .*\n",
        capsys.readouterr().err,
    )


# --- doctor -------------------------------------------------------------------------------------


def test_doctor_shows_versions_devices_and_data():
    done = run("doctor")
    assert f"torch {torch.__version__}" in done.stdout
    assert "cpu" in done.stdout
    assert "fashion_mnist_small: 12,000 train" in done.stdout
    assert ("No problem found." in done.stdout) == (done.returncode == 0)


def test_doctor_fails_when_there_is_a_problem(monkeypatch, capsys):
    monkeypatch.setattr(cli, "find_problems", lambda: ["The GPU is on fire."])
    with pytest.raises(SystemExit) as ended:
        cli.main(["doctor"])
    assert ended.value.code == 1
    assert "PROBLEM  The GPU is on fire." in capsys.readouterr().out


def test_an_unsafe_torch_is_a_problem(monkeypatch):
    monkeypatch.setattr(torch, "__version__", "2.9.1+cu128")
    assert any("CVE-2026-24747" in problem for problem in cli.find_problems())


def test_a_driver_that_pytorch_cannot_use_is_a_problem(monkeypatch):
    monkeypatch.setattr(shutil, "which", lambda name: "/usr/bin/nvidia-smi")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.setattr(torch.backends.cuda, "is_built", lambda: True)
    assert any("hides every GPU; unset it" in problem for problem in cli.find_problems())


def test_too_many_threads_and_too_little_shared_memory_are_problems(monkeypatch):
    monkeypatch.setattr(torch, "get_num_threads", lambda: 999)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=64e6))
    problems = " ".join(cli.find_problems())
    assert "999 threads" in problems
    assert "/dev/shm has 64 MB left" in problems


def test_a_gpu_this_torch_is_not_built_for_is_a_problem(monkeypatch):
    def no_kernel(*args, **kwargs):
        raise RuntimeError("CUDA error: no kernel image is available for execution on the device\n")

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda i: "Tesla P100-PCIE-16GB")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda i: (6, 0))
    monkeypatch.setattr(torch.cuda, "get_arch_list", lambda: ["sm_75", "sm_80"])
    monkeypatch.setattr(torch, "ones", no_kernel)
    (problem,) = [p for p in cli.find_problems() if "P100" in p]
    assert "sm_60) cannot compute: CUDA error: no kernel image" in problem
    assert "built for sm_75, sm_80" in problem


def test_a_data_set_that_is_not_there_says_where_it_was_sought(monkeypatch, tmp_path):
    monkeypatch.setattr(data.Path, "home", lambda: tmp_path)
    monkeypatch.setattr(data, "KAGGLE", tmp_path)
    monkeypatch.delenv("TORCHLADDER_DATA", raising=False)
    lines = list(cli.data_sets_here())
    assert len(lines) == 3
    assert lines[2].startswith("cifar10: CIFAR-10 not found: looked in")


def test_importing_the_package_is_almost_free():
    program = (
        "import sys, time, torch; before = set(sys.modules); start = time.perf_counter();"
        "import torchladder, torchladder.devices;"
        "heavy = {'matplotlib', 'torchvision', 'tqdm'} & (set(sys.modules) - before);"
        "print(heavy or 'light')"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=60
    )
    assert done.stdout == "light\n", done.stderr


def test_the_source_works_without_installed_metadata_or_data(tmp_path):
    shutil.copytree(os.path.dirname(devices.__file__), tmp_path / "torchladder")
    shutil.rmtree(tmp_path / "torchladder" / "bundled")
    program = (
        "import torchladder, torchladder.training as t;"
        "print(torchladder.__version__, torchladder.__file__)"
    )
    done = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        text=True,
        timeout=60,
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(tmp_path)},
    )
    assert done.returncode == 0, done.stderr
    assert str(tmp_path) in done.stdout
