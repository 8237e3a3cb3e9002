"""The standalone programs in ``rungs/``, run as a reader runs them."""

import ast
import contextlib
import difflib
import io
import os
import re
import runpy
import subprocess
import sys
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
import torch
import torch.distributed as dist

from torchladder import data, models

ROOT = Path(__file__).resolve().parent.parent
PROGRAMS = sorted((ROOT / "rungs").glob("[0-9]_*.py"))
NAMES = [program.name for program in PROGRAMS]
ON_CPU = {name: ["--device", "cpu"] for name in ("2_gpu.py", "3_dp.py", "4_ddp.py")}
TORCHRUN = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]


def run(name, *options):
    by_torchrun = TORCHRUN if name == "4_ddp.py" else []
    # One thread: on a machine with other work, two that wait for each other are far slower.
    done = subprocess.run(
        [sys.executable, *by_torchrun, ROOT / "rungs" / name, *map(str, options)],
        capture_output=True,
        text=True,
        timeout=300,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )
    # Until PyTorch 2.12, gloo announces every connection on the standard output.
    done.stdout = re.sub(r"^\[Gloo\] .*\n", "", done.stdout, flags=re.MULTILINE)
    return done


ONLY_RANK = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1"}
ONLY_RANK |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}


def run_here(name, *options, torchrun=False):
    """As `run`, but in this process, where torch is imported; with `torchrun`, as the only rank."""
    program = ROOT / "rungs" / name
    arguments, code, message = [str(program), *map(str, options)], 0, ""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    with (
        mock.patch.object(sys, "argv", arguments),
        mock.patch.dict(os.environ, ONLY_RANK if torchrun else {}),
        contextlib.redirect_stdout(io.StringIO()) as out,
        contextlib.redirect_stderr(io.StringIO()) as err,
    ):
        try:
            runpy.run_path(str(program), run_name="__main__")
        except SystemExit as ended:
            # As the interpreter does with a text: to the standard error, and status 1.
            code, message = (1, f"{ended}\n") if isinstance(ended.code, str) else (ended.code, "")
        finally:
            torch.set_num_threads(threads)
            if dist.is_initialized():
                dist.destroy_process_group()
    return subprocess.CompletedProcess(arguments, code, out.getvalue(), err.getvalue() + message)


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """Each program's output and saved file after one epoch on the bundled set."""
    folder = tmp_path_factory.mktemp("rungs")
    results = {}
    for name in NAMES:
        path = folder / f"{name}.pt"
        options = ["--data", data.BUNDLED, "--epochs", 1, "--lr", 0.1, "--save", path]
        # The two that need neither torchrun nor to be the first: without importing torch again.
        start = run_here if name in ("2_gpu.py", "3_dp.py") else run
        done = start(name, *ON_CPU.get(name, []), *options)
        results[name] = done, path
    return results


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_one_epoch_gives_a_useful_model(trained, name):
    done, _ = trained[name]
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    first, last = done.stdout.splitlines()
    assert re.fullmatch(r"epoch 1: loss \d\.\d{3}, test [\d.]+%, [\d,]+ images/s", first)
    assert float(re.fullmatch(r"test accuracy: ([\d.]+)%", last)[1]) > 72


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_the_saved_file_is_a_state_dict_that_predicts_as_printed(trained, name):
    done, path = trained[name]
    state = torch.load(path, weights_only=True)
    assert [path.name for path in path.parent.glob(f"{name}*")] == [path.name]
    assert {tensor.device.type for tensor in state.values()} == {"cpu"}
    model = models.LeNet()
    # The same layers, in one Sequential there and in two here.
    model.load_state_dict(dict(zip(model.state_dict(), state.values(), strict=True)))
    fashion = data.load()
    with torch.inference_mode():
        right = model(fashion.normalise(fashion.test_images)).argmax(1) == fashion.test_labels
    assert f"test accuracy: {right.float().mean():.2%}" in done.stdout


@pytest.mark.slow
def test_all_programs_save_the_same_keys_and_the_first_three_the_same_numbers(trained):
    first, *others = [torch.load(path) for _, path in trained.values()]
    for other in others:
        assert list(first) == list(other)
    for other in others[:2]:  # rung 4 has another order of the images
        assert all(torch.equal(first[key], other[key]) for key in first)


def test_rung_4_alone_says_how_to_start_it():
    done = run_here("4_ddp.py", "--data", data.BUNDLED, "--device", "cpu")
    assert done.returncode == 1
    start = "torchrun --standalone --nproc-per-node=2 rungs/4_ddp.py"
    assert done.stderr == f"Start this with: {start}\n"


@pytest.mark.parametrize(
    ("name", "options", "sentence"),
    [
        *[
            (name, ["--data", "no/such"], "--data no/such: no Fashion-MNIST there (")
            for name in NAMES
        ],
        ("1_cpu.py", ["--data", __file__], f"--data {__file__}: no Fashion-MNIST there ("),
        (
            "1_cpu.py",
            ["--data", data.BUNDLED, "--epochs", 0],
            "--epochs and --batch-size start at 1.",
        ),
        (
            "1_cpu.py",
            ["--data", data.BUNDLED, "--save", "no/a.pt"],
            "the folder no does not exist.",
        ),
    ],
)
def test_bad_input_gets_one_sentence_and_a_failing_exit(name, options, sentence):
    done = run_here(name, *ON_CPU.get(name, []), *options, torchrun=name == "4_ddp.py")
    assert done.returncode == 1
    assert sentence in done.stderr
    assert done.stderr.count("\n") == 1
    assert done.stdout == ""


@pytest.mark.slow
@pytest.mark.parametrize("name", ON_CPU)
def test_fp16_with_its_gradient_scaler_trains_on_the_cpu_too(name, tmp_path):
    options = ["--data", few_images(tmp_path, 200), "--epochs", 5, "--amp", "fp16"]
    options += ["--batch-size", 16, "--lr", 0.1]
    done = run_here(name, *ON_CPU[name], *options, torchrun=name == "4_ddp.py")
    assert done.returncode == 0, done.stderr
    assert float(done.stdout.split()[-1].rstrip("%")) > 40


def few_images(folder, count):
    with np.load(data.BUNDLED) as arrays:
        np.savez(folder / "few.npz", **{key: arrays[key][:count] for key in arrays.files})
    return folder / "few.npz"


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
@pytest.mark.parametrize("name", ON_CPU)
def test_a_program_for_gpus_says_that_there_is_none(name):
    done = run_here(name, "--data", data.BUNDLED)
    assert done.returncode == 1
    assert done.stderr == "PyTorch finds no CUDA GPU here. Try --device cpu.\n"


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("name", "amp"),
    [(name, amp) for name in ON_CPU for amp in [None, "fp16"]]
    + [("2_gpu.py", "bf16"), ("4_ddp.py", "bf16")],
)
def test_a_program_for_gpus_trains_on_them(name, amp, tmp_path):
    path = tmp_path / "lenet.pt"
    options = ["--amp", amp] if amp else []
    done = run(name, "--data", data.BUNDLED, "--epochs", 2, "--save", path, *options)
    assert done.returncode == 0, done.stderr
    assert float(done.stdout.split()[-1].rstrip("%")) > 75
    assert {tensor.device.type for tensor in torch.load(path).values()} == {"cpu"}


@pytest.mark.multigpu
def test_the_upper_rungs_on_two_gpus_train_as_rung_2_does_on_one(tmp_path):
    accuracies, keys = [], []
    for name in ("2_gpu.py", "3_dp.py", "4_ddp.py"):
        path, batch = tmp_path / f"{name}.pt", 32 if name == "4_ddp.py" else 64
        options = ["--data", data.BUNDLED, "--epochs", 2, "--batch-size", batch, "--save", path]
        done = run(name, *options)
        assert done.returncode == 0, done.stderr
        accuracies.append(float(done.stdout.split()[-1].rstrip("%")))
        keys.append(list(torch.load(path)))
    assert keys[0] == keys[1] == keys[2]
    assert accuracies == pytest.approx([accuracies[0]] * 3, abs=3)


def test_rung_3_refuses_the_precision_that_does_not_reach_the_replicas():
    done = run_here("3_dp.py", "--data", data.BUNDLED, "--amp", "bf16")
    assert done.returncode == 2
    assert "invalid choice: 'bf16'" in done.stderr


@pytest.mark.parametrize("program", PROGRAMS, ids=NAMES)
def test_a_program_is_short_and_stands_alone(program):
    source = program.read_text()
    assert len(source.splitlines()) < (130 if program.name == "4_ddp.py" else 100)
    imported = {
        name.split(".")[0]
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Import | ast.ImportFrom)
        for name in (
            [node.module] if isinstance(node, ast.ImportFrom) else [n.name for n in node.names]
        )
    }
    assert imported - set(sys.stdlib_module_names) == {"numpy", "torch", "torchvision"}


@pytest.mark.parametrize("rung", range(1, len(PROGRAMS)))
def test_a_rung_keeps_the_lines_of_the_one_below_in_their_order(rung):
    below, this = (PROGRAMS[i].read_text().splitlines() for i in (rung - 1, rung))
    matcher = difflib.SequenceMatcher(None, below, this, autojunk=False)
    kept = sum(block.size for block in matcher.get_matching_blocks())
    assert kept >= 0.8 * len(below)
