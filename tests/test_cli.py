"""The command answers bad input with one sentence, a bug with its traceback."""

import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from torchclinic import cli
from torchladder import data, devices


def run(*arguments, **options):
    command = [sys.executable, "-m", "torchclinic", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=600, **options)


def answer(capsys, *arguments):
    """Exit status and what is printed when the command runs in this process."""
    with pytest.raises(SystemExit) as ended:
        cli.main(arguments)
    return ended.value.code, *capsys.readouterr()


# --- bad input ----------------------------------------------------------------------------------

BAD_INPUT = {
    "inspect ''": "path is empty",
    "inspect nosuch.pt": "nosuch.pt",
    "inspect a_file": "a_file",
    "fix '' -o x.pt": "path is empty",
    "fix nosuch.pt -o x.pt": "nosuch.pt",
    "fix a_file -o x.pt --for nosuch:Net": "--for nosuch:Net: ModuleNotFoundError",
    "doctor --json x.json": "--json goes with --distributed, under torchrun",
    "doctor --timeout 5": "--timeout goes with --distributed, under torchrun",
    "doctor --program .": "--program goes with --distributed, under torchrun",
    "doctor --distributed --json ''": "--json is empty",
    "doctor --distributed --program ''": "--program is empty",
}


@pytest.mark.parametrize("command", BAD_INPUT)
def test_bad_input_gets_one_sentence(command, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    Path("a_file").write_bytes(b"not a checkpoint")
    status, out, err = answer(capsys, *shlex.split(command))
    assert status == 2
    assert out.count("\n") <= 1
    assert re.fullmatch(r"torchladder (inspect|fix|doctor): .*\n", err)
    assert BAD_INPUT[command] in err


@pytest.mark.slow
def test_bad_input_ends_the_command_without_a_traceback():
    done = run("inspect", "nosuch.pt")
    assert (done.returncode, done.stdout) == (2, "")
    assert re.fullmatch(r"torchclinic inspect: .*nosuch.pt.*\n", done.stderr)


@pytest.mark.slow
@pytest.mark.parametrize("command", ["inspect x.pt", "doctor", "explain -"])
def test_a_reader_who_has_left_ends_the_command_quietly(command, tmp_path):
    torch.save({"w": torch.zeros(1)}, tmp_path / "x.pt")
    for buffered in ({}, {"PYTHONUNBUFFERED": "1"}):
        reads, writes = os.pipe()
        os.close(reads)
        done = subprocess.run(
            [sys.executable, "-m", "torchclinic", *command.split()],
            input=b"KeyError: 'x'", stdout=writes, stderr=subprocess.PIPE, cwd=tmp_path,
            timeout=60, env={**without_buffering_set(), **buffered},
        )  # fmt: skip
        os.close(writes)
        assert (done.returncode, done.stderr) == (141, b"")


@pytest.mark.slow
def test_fix_says_that_the_file_is_written_if_its_report_cannot_be(tmp_path):
    torch.save({"w": torch.zeros(1)}, tmp_path / "x.pt")
    for buffered in ({}, {"PYTHONUNBUFFERED": "1"}):
        with open("/dev/full", "w") as full:
            done = subprocess.run(
                [sys.executable, "-m", "torchclinic", "fix", "x.pt", "-o", "y.pt"],
                stdout=full, stderr=subprocess.PIPE, text=True, cwd=tmp_path, timeout=60,
                env={**without_buffering_set(), **buffered},
            )  # fmt: skip
        why = "No space left on device"
        sentence = f"torchclinic fix: y.pt is written, but the report cannot be printed: {why}\n"
        assert (done.returncode, done.stderr) == (2, sentence)
        assert torch.load(tmp_path / "y.pt").keys() == {"w"}


def without_buffering_set():
    return {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}


@pytest.mark.slow
def test_names_and_terminals_may_be_of_any_encoding(tmp_path):
    torch.save({"w": torch.zeros(1)}, tmp_path / "モデル.pt")
    ascii_only = {**os.environ, "LC_ALL": "C", "PYTHONUTF8": "0"}
    done = run("inspect", "モデル.pt", cwd=tmp_path, env=ascii_only)
    assert (done.returncode, done.stderr) == (0, "")
    assert "A plain state dict" in done.stdout
    done = run("doctor", cwd=tmp_path, env=ascii_only)
    assert "Traceback" not in done.stderr


def copy_of_the_package(folder):
    """The environment in which Python imports the package from a copy in `folder`."""
    shutil.copytree(os.path.dirname(devices.__file__), folder / "torchladder")
    return os.environ | {"PYTHONPATH": str(folder)}


@pytest.mark.slow
def test_a_bug_shows_its_traceback_though_it_is_a_value_error(tmp_path):
    environment = copy_of_the_package(tmp_path)
    source = tmp_path / "torchladder" / "errors.py"
    bug = "\n\ndef catalogue():\n    first, second = [1, 2, 3]\n"
    source.write_text(source.read_text(encoding="utf-8") + bug, encoding="utf-8")
    done = run("explain", "log.txt", cwd=tmp_path, env=environment)
    assert done.returncode == 1
    assert "Traceback" in done.stderr
    assert "ValueError: too many values to unpack" in done.stderr


@pytest.mark.slow
def test_a_whole_model_is_fixed_though_its_class_is_not_here(tmp_path):
    code = "import torch\nclass Net(torch.nn.Linear): pass\ntorch.save(Net(2, 1), 'whole.pt')"
    subprocess.run([sys.executable, "-c", code], cwd=tmp_path, check=True)
    done = run("fix", "whole.pt", "-o", "plain.pt", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert torch.load(tmp_path / "plain.pt").keys() == {"weight", "bias"}


def test_an_interrupt_is_not_a_traceback(capsys, monkeypatch):
    def interrupt(options):
        raise KeyboardInterrupt

    monkeypatch.setattr(cli, "_doctor", interrupt)
    assert answer(capsys, "doctor") == (130, "", "torchclinic doctor: interrupted\n")


# --- doctor -------------------------------------------------------------------------------------


@pytest.mark.slow
def test_doctor_shows_versions_devices_and_data():
    done = run("doctor")
    assert f"torch {torch.__version__}" in done.stdout
    assert "cpu" in done.stdout
    assert "fashion_mnist_small: 12,000 train" in done.stdout
    assert ("No problem found." in done.stdout) == (done.returncode == 0)


def test_doctor_fails_when_there_is_a_problem(monkeypatch, capsys):
    monkeypatch.setattr(cli, "find_problems", lambda: ["The GPU is on fire."])
    status, out, _ = answer(capsys, "doctor")
    assert status == 1
    assert "PROBLEM  The GPU is on fire." in out


def test_an_unsafe_torch_is_a_problem(monkeypatch):
    monkeypatch.setattr(torch, "__version__", "2.9.1+cu128")
    assert any("CVE-2026-24747" in problem for problem in cli.find_problems())


def test_a_driver_that_pytorch_cannot_use_is_a_problem(monkeypatch):
    monkeypatch.setattr(shutil, "which", lambda name: "/usr/bin/nvidia-smi")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.setattr(torch.backends.cuda, "is_built", lambda: True)
    assert any("hides every GPU; unset it" in problem for problem in cli.find_problems())


def test_too_little_shared_memory_is_a_problem(monkeypatch):
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=64e6))
    assert any("/dev/shm has 64 MB left" in problem for problem in cli.find_problems())


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


@pytest.mark.slow
def test_importing_the_package_is_almost_free():
    program = (
        "import sys, time, torch; before = set(sys.modules); start = time.perf_counter();"
        "import torchladder, torchladder.devices;"
        "heavy = {'matplotlib', 'torchvision', 'tqdm'} & (set(sys.modules) - before);"
        "print(heavy or 'light')"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=600
    )
    assert done.stdout == "light\n", done.stderr


@pytest.mark.slow
def test_the_source_works_without_installed_metadata_or_data(tmp_path):
    environment = copy_of_the_package(tmp_path)
    shutil.rmtree(tmp_path / "torchladder" / "bundled")
    program = (
        "import torchladder, torchladder.training as t;"
        "print(torchladder.__version__, torchladder.__file__)"
    )
    done = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True, text=True, timeout=600, cwd=tmp_path, env=environment,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert str(tmp_path) in done.stdout
