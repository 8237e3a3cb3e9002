"""The standalone programs in ``rungs/``, run as a reader runs them."""

import contextlib
import difflib
import gc
import io
import json
import os
import re
import runpy
import stat
import subprocess
import sys
import tomllib
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from running import FORKED, ROOT, ran
from torch.optim import SGD

from torchladder import data, models
from torchladder.launching import launch

with (ROOT / "rungs" / "ladder.toml").open("rb") as file:
    NAMES = [rung["program"] for rung in tomllib.load(file)["rung"]]
RANKED = NAMES[3:]
# What a rung adds to the one below, in lines: the ladder's promise.
ADDED = dict(zip(pairwise(NAMES), (6, 3, 29, 17, 8), strict=True))
WITHOUT_GPUS = {"CUDA_VISIBLE_DEVICES": ""}


def run(name, *options, nproc=2, env=WITHOUT_GPUS | FORKED):
    # Of rank 0 alone: several may write at once.
    start = ["-m", "torch.distributed.run", "--standalone", "--local-ranks-filter=0"]
    start += [f"--nproc-per-node={nproc}"]
    command = [sys.executable, *start * (name in RANKED), ROOT / "rungs" / name]
    # One thread: on a machine with other work, two that wait for each other are far slower.
    env = os.environ | {"OMP_NUM_THREADS": "1"} | env
    done = subprocess.run(
        [*command, *map(str, options)], capture_output=True, text=True, timeout=600, env=env
    )
    # Until PyTorch 2.12, gloo announces every connection on the standard output.
    done.stdout = re.sub(r"\[Gloo\] Rank .*\n", "", done.stdout)
    return done


ONLY_RANK = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1"}
ONLY_RANK |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}


def run_here(name, *options, env=ONLY_RANK):
    """As `run`, but in this process, where torch is imported; the upper rungs as the only rank."""
    program = ROOT / "rungs" / name
    arguments, code, message = [str(program), *map(str, options)], 0, ""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    with (
        mock.patch.object(sys, "argv", arguments),
        mock.patch.dict(os.environ, env if name in RANKED else {}),
        mock.patch("torch.cuda.is_available", return_value=False),
        mock.patch("torch.cuda.device_count", return_value=0),
        mock.patch("faulthandler.enable"),  # by @record: the StringIO below is no file
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


def run_on_ranks(program, *options, nproc=2, last=()):
    """As `run`, or a program elsewhere, in processes that have torch; what became of rank 0.

    The last rank has options of its own beside.
    """
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    port = str(store.port)

    def one_rank():
        own = last if dist.get_rank() == nproc - 1 else ()
        dist.destroy_process_group()  # the program joins its own, in a store of its own
        os.environ["MASTER_PORT"] = port
        gc.disable()  # a DDP reducer that is freed after its group hangs or aborts (pytorch#179291)
        done = run_here(program, *options, *own, env={})
        gc.freeze()
        return done

    with mock.patch.dict(os.environ, WITHOUT_GPUS):
        return launch(one_rank, world_size=nproc, timeout=600, show="none")[0]


def few_images(folder, count, tests=None):
    with np.load(data.BUNDLED) as arrays:
        counts = {key: tests or count if key.startswith("test") else count for key in arrays}
        np.savez(folder / "few.npz", **{key: arrays[key][:n] for key, n in counts.items()})
    return folder / "few.npz"


def accuracy_printed(done):
    """In percent, of the last epoch."""
    return re.search(r"test ([\d.]+)%, [\d,]+ images/s\n$", done.stdout)[1]


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """Each program's output and saved file after one epoch on a part of the bundled set."""
    folder = tmp_path_factory.mktemp("rungs")
    few = few_images(folder, 4000, 1000)
    results = {}
    for name in NAMES:
        path = folder / f"{name}.pt"
        options = ["--data", few, "--epochs", 1, "--batch-size", 32, "--lr", 0.1, "--save", path]
        # As a reader starts them, without and with torchrun; others need not import torch again.
        start = run if name in ("1_cpu.py", "4_ddp.py") else run_here
        done = (run_on_ranks if name in RANKED[1:] else start)(name, *options)
        results[name] = done, path
    return results


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_one_epoch_gives_a_useful_model_whose_file_predicts_as_printed(trained, name):
    done, path = trained[name]
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    *where, epoch = done.stdout.splitlines()
    assert where == ["training on cpu"] * (name != "1_cpu.py")
    assert re.fullmatch(r"epoch 1: loss \d\.\d{3}, test [\d.]+%, [\d,]+ images/s", epoch)
    assert float(accuracy_printed(done)) > 60
    state = torch.load(path, weights_only=True)
    assert [path.name for path in path.parent.glob(f"{name}*")] == [path.name]
    model = models.LeNet()
    # The same layers, in one Sequential there and in two here.
    model.load_state_dict(dict(zip(model.state_dict(), state.values(), strict=True)))
    fashion = data.load_dataset()
    with torch.inference_mode():
        scores = model(fashion.normalise(fashion.test_images[:1000]))
        right = scores.argmax(1) == fashion.test_labels[:1000]
    assert accuracy_printed(done) == f"{100 * right.float().mean():.2f}"


@pytest.mark.slow
def test_all_programs_save_the_same_keys_and_rungs_that_compute_alike_the_same_numbers(trained):
    states = {name: torch.load(path) for name, (_, path) in trained.items()}
    first = states["1_cpu.py"]
    assert all(list(state) == list(first) for state in states.values())
    for name in ("2_gpu.py", "3_dp.py"):  # rung 4 has another order of the images
        assert all(torch.equal(first[key], states[name][key]) for key in first)
    for name in ("5_fsdp.py", "6_hsdp.py"):  # of two ranks: a sum of two numbers has no other order
        assert all(torch.equal(states["4_ddp.py"][key], states[name][key]) for key in first)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "tests"), [*((name, 1) for name in RANKED), ("5_fsdp.py", 33)])
def test_ranks_with_unequal_shares_of_test_images_end_and_count_each_once(name, tests, tmp_path):
    """33 in batches of 16 are two batches on one rank and would be one on the other, 1 is none."""
    options = ["--data", few_images(tmp_path, 33, tests), "--epochs", 1, "--batch-size", 16]
    done = run_on_ranks(name, *options)
    assert done.returncode == 0, done.stderr
    right = float(accuracy_printed(done)) * tests / 100
    assert right == pytest.approx(round(right), abs=0.01)


@pytest.mark.slow
def test_rung_6_on_a_mesh_of_2_x_2_trains_as_rung_5_on_four_ranks(tmp_path):
    few, states = few_images(tmp_path, 400), []
    for name, options in [("5_fsdp.py", []), ("6_hsdp.py", ["--replicas", 2])]:
        options += ["--data", few, "--epochs", 1, "--batch-size", 8, "--save", tmp_path / "a.pt"]
        done = run_on_ranks(name, *options, nproc=4)
        assert done.returncode == 0, done.stderr
        states.append(torch.load(tmp_path / "a.pt"))
    torch.testing.assert_close(*states, rtol=0, atol=1e-4)


def refused(name, *options):
    """What a program says that does not start for its options."""
    done = run_here(name, "--data", data.BUNDLED, *options)
    assert (done.returncode, done.stdout) == (2, ""), (name, options)
    program, _, sentence = done.stderr.partition(": error: ")
    assert (program, sentence.count("\n")) == (name, 1), done.stderr
    return sentence.removesuffix("\n")


def test_all_programs_check_and_save_in_the_same_lines():
    """So what follows tries one of them where these lines decide."""
    for first, last in [
        ("    try:\n        what = ", "    torch.manual_seed(0)\n"),
        ("        if not nn.utils.get_total_norm", "        rate ="),
        ("        try:\n            with tempfile", "The weights are in"),
        ("\n\nif __name__", "main()\n"),
    ]:
        texts = [(ROOT / "rungs" / name).read_text().partition(first)[2] for name in NAMES]
        assert len({text.partition(last)[0] for text in texts}) == 1
        assert all(last in text for text in texts)


def test_bad_input_gets_one_sentence_and_a_failing_exit(tmp_path):
    few = few_images(tmp_path, 64)
    (tmp_path / "link.npz").symlink_to(few)
    before = few.read_bytes()
    cases = [("--data", at, "no Fashion-MNIST there (") for at in ("no", __file__, tmp_path)]
    for path in (".", "no/a.pt", f"{__file__}/a.pt", "/dev/null", "a" * 300):
        cases += [("--save", path, "name a file in a folder that can be written (")]
    cases += [("--epochs", value, "must be from 1 to 999") for value in ("0", "1000")]
    cases += [("--batch-size", value, "must be from 1 to 12000") for value in ("0", "12001")]
    cases += [("--lr", value, "must be from 1e-09 to 99") for value in ("0.0", "nan", "inf")]
    cases += [("--workers", "-1", "must be from 0 to 99")]
    for option, value, reason in cases:
        sentence = refused("1_cpu.py", f"{option}={value}")
        assert sentence.startswith(f"{option} {value}: {reason}")
        assert not re.search("trust|download", sentence)  # NumPy's advice, and torchvision's
    said = refused("1_cpu.py", "--data", tmp_path / "link.npz", "--save", few)
    assert said.endswith("(this is the data)")
    for replicas in (0, -1, 3):
        said = f"--replicas {replicas}: must divide 1, the number of processes"
        assert refused("6_hsdp.py", "--replicas", replicas) == said
    with mock.patch.dict(ONLY_RANK):
        del ONLY_RANK["LOCAL_RANK"]
        assert all(refused(name).startswith("start it with torchrun") for name in RANKED)
    assert Path("/dev/null").is_char_device()
    assert few.read_bytes() == before


def test_images_may_have_a_channel_or_be_flat_and_what_is_no_fashion_mnist_is_refused(tmp_path):
    few, bytes_alone = few_images(tmp_path, 64), "images are bytes, labels 0 to 9, one for each"
    read = runpy.run_path(str(ROOT / "rungs/1_cpu.py"))["read"]
    with np.load(few) as arrays:
        arrays = dict(arrays)
    images, labels = arrays["train_images"], arrays["train_labels"]
    as_is = read(few, "train")
    flat = {"train_images": images.reshape(64, -1), "train_labels": labels[:, None]}
    np.savez(few, **(arrays | flat))
    assert all(map(torch.equal, read(few, "train").tensors, as_is.tensors))
    for changed, reason in (
        ({"train_images": images / 255}, bytes_alone),
        ({"train_labels": labels + 1}, bytes_alone),
        ({"train_images": images[:0], "train_labels": labels[:0]}, bytes_alone),
        ({"train_labels": labels[:9]}, bytes_alone),
        ({"train_images": images[:, :27]}, "shape "),
    ):
        np.savez(few, **(arrays | changed))
        with pytest.raises((ValueError, AssertionError, RuntimeError), match=reason):
            read(few, "train")
    data_set = SimpleNamespace(data=torch.zeros(4, 28, 28).byte(), targets=torch.arange(7, 11))
    with mock.patch("torchvision.datasets.FashionMNIST", return_value=data_set):
        assert refused("1_cpu.py", "--data", tmp_path).endswith(f"({bytes_alone})")
    np.savez(few, x=1)
    assert "'train_images is not a file in the archive" in refused("1_cpu.py", "--data", few)


def test_a_full_disk_is_found_before_the_first_step(tmp_path):
    full = mock.Mock(return_value=mock.Mock(write=mock.Mock(side_effect=OSError(28, "Full"))))
    with mock.patch("tempfile.TemporaryFile", full):
        said = refused("1_cpu.py", "--save", tmp_path / "a.pt")
    assert said.endswith(" can be written ([Errno 28] Full)")
    full.assert_called_with(dir=tmp_path)


@pytest.mark.parametrize("name", ["1_cpu.py", "6_hsdp.py"])
def test_weights_that_cannot_be_written_where_they_belong_are_kept_and_it_is_said_where(
    name, tmp_path, monkeypatch
):
    (home := tmp_path / "home").mkdir()
    few = few_images(tmp_path, 64)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    options = ["--data", few, "--epochs", 1, "--save", home / "a.pt"]
    with mock.patch("os.replace", side_effect=PermissionError(13, "Denied")):
        done = run_here(name, *options)
    said = rf"{name}: error: --save {home}/a.pt: \[Errno 13\] Denied. The weights are in (.*)\n"
    assert done.returncode == 2
    assert len(torch.load(re.fullmatch(said, done.stderr)[1])) == 10
    assert list(home.iterdir()) == []


def test_of_several_ranks_the_first_alone_says_what_is_wrong():
    waits = mock.patch("time.sleep", side_effect=TimeoutError)  # until torchrun ends it
    for name in RANKED:
        with waits, pytest.raises(TimeoutError):
            run_here(name, "--data", data.BUNDLED, "--lr=-1", env=ONLY_RANK | {"RANK": "1"})


@pytest.mark.parametrize("name", ["1_cpu.py", "5_fsdp.py"])
def test_a_run_that_diverged_stops_and_leaves_the_good_file_alone(name, tmp_path):
    few, good = few_images(tmp_path, 64), tmp_path / "good.pt"
    good.write_bytes(b"good")
    with mock.patch("torch.optim.SGD", lambda *args, **others: SGD(args[0], 1e30, **others)):
        done = run_here(name, "--data", few, "--epochs", 1, "--save", good)
    # With 64 images in one batch the loss is taken before the only step.
    sentence = rf"{name}: error: epoch 1: loss 2\.\d+, weights not finite\. Lower --lr\.\n"
    assert done.returncode == 2
    assert re.fullmatch(sentence, done.stderr)
    assert good.read_bytes() == b"good"
    assert {path.name for path in tmp_path.iterdir()} == {"few.npz", "good.pt"}


def test_saving_touches_only_its_target_through_a_link_and_keeps_its_mode(tmp_path):
    few, target, own = few_images(tmp_path, 64), tmp_path / "a.pt", tmp_path / "new"
    own.write_text("my notes")  # the name under which it is written, in a folder of its own
    (tmp_path / "link.pt").symlink_to("a.pt")
    options = ["--data", few, "--epochs", 1, "--save", tmp_path / "link.pt"]
    os.umask(mask := os.umask(0))
    for mode in (0o666 & ~mask, 0o600):
        assert run_here("1_cpu.py", *options).returncode == 0
        assert stat.S_IMODE(target.stat().st_mode) == mode
        target.chmod(0o600)
    assert (tmp_path / "link.pt").is_symlink()
    assert own.read_text() == "my notes"
    assert len(list(tmp_path.iterdir())) == 4


@pytest.mark.slow
def test_workers_that_import_the_file_again_change_nothing(tmp_path):
    """As by default on macOS, Windows and, from Python 3.14 on, Linux."""
    start = "import multiprocessing, runpy, sys; multiprocessing.set_start_method('spawn');"
    start += "del sys.argv[0]; runpy.run_path(sys.argv[0], run_name='__main__')"
    options = ["--data", few_images(tmp_path, 64), "--epochs", "2", "--batch-size", "16", "--save"]
    plain, worked = tmp_path / "0.pt", tmp_path / "2.pt"
    assert run_here("1_cpu.py", *options, plain).returncode == 0
    program = [ROOT / "rungs/1_cpu.py", *options, worked, "--workers", "1"]
    ran("python", "-c", start, *program, env=os.environ | WITHOUT_GPUS)
    expected, found = torch.load(plain), torch.load(worked)
    assert all(torch.equal(expected[key], found[key]) for key in expected)


@pytest.mark.parametrize("name", RANKED)
def test_each_process_takes_its_own_gpu_before_it_joins_the_group(name, tmp_path):
    calls = mock.Mock()
    calls.join.side_effect = SystemExit("joined")
    env = ONLY_RANK | {"LOCAL_RANK": "7"}
    options = ["--data", few_images(tmp_path, 64), "--epochs", 1]
    assert "torchrun --" in (ROOT / "rungs" / name).read_text()[:300]
    with (
        mock.patch("torch.accelerator.current_accelerator") as kind,
        mock.patch("torch.accelerator.set_device_index", calls.take),
    ):
        kind.return_value = torch.device("cuda")
        with mock.patch("torch.distributed.init_process_group", calls.join):
            run_here(name, *options, env=env)
        kind.return_value = torch.device("mps")  # Apple's: its tensors cannot be sent
        assert run_here(name, *options, env=env).stdout.startswith("training on cpu\nepoch 1: ")
    gpu = torch.device("cuda", 7)
    assert calls.mock_calls == [mock.call.take(7), mock.call.join(device_id=gpu)]


@pytest.mark.parametrize("name", RANKED)
def test_a_rank_that_fails_leaves_its_error_for_torchrun_to_show(name, tmp_path):
    env = ONLY_RANK | {"TORCHELASTIC_ERROR_FILE": f"{tmp_path}/error.json"}
    with (
        mock.patch("torch.optim.SGD", side_effect=ValueError("of this rank")),
        pytest.raises(ValueError, match="of this rank"),
    ):
        run_here(name, "--data", few_images(tmp_path, 64), env=env)
    error = json.loads((tmp_path / "error.json").read_text())["message"]["message"]
    assert error == "ValueError: of this rank"


@pytest.mark.parametrize("name", ["5_fsdp.py", "6_hsdp.py"])
def test_layers_run_in_bf16_where_there_is_any_and_weights_are_gathered_to_be_saved(name, tmp_path):
    options = ["--data", few_images(tmp_path, 64), "--epochs", 1]
    gathers = "torch.distributed.checkpoint.state_dict.get_model_state_dict"
    with (
        mock.patch("torch.cuda.is_bf16_supported", return_value=True),
        mock.patch("torch.nn.functional.linear", wraps=F.linear) as linear,
        mock.patch("torch.nn.functional.cross_entropy", wraps=F.cross_entropy) as loss,
        mock.patch(gathers, side_effect=AssertionError),
    ):
        assert run_here(name, *options).returncode == 0
    assert {x.dtype for call in linear.call_args_list for x in call.args} == {torch.bfloat16}
    assert loss.call_args.args[0].dtype == torch.float32


@pytest.mark.parametrize("name", RANKED)
def test_every_epoch_reads_the_same_images_in_another_order(name, tmp_path):
    options = ["--data", few_images(tmp_path, 64), "--epochs", 2, "--batch-size", 64]
    with mock.patch("torch.nn.functional.cross_entropy", wraps=F.cross_entropy) as loss:
        assert run_here(name, *options).returncode == 0
    first, second = (call.args[1].tolist() for call in loss.call_args_list)
    assert sorted(first) == sorted(second)
    assert first != second


@pytest.mark.gpu
@pytest.mark.parametrize("name", NAMES[1:])
def test_a_program_for_gpus_trains_on_them(name, tmp_path):
    path = tmp_path / "lenet.pt"
    options = ["--data", few_images(tmp_path, 2000, 500), "--epochs", 1, "--lr", 0.1]
    ranks = torch.cuda.device_count() if name in RANKED else 1  # as many steps on any number
    options += ["--batch-size", 32 // ranks, "--save", path]
    done = run(name, *options, nproc=torch.cuda.device_count(), env={})
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("training on cuda")
    assert float(accuracy_printed(done)) > 45
    assert {tensor.device.type for tensor in torch.load(path).values()} == {"cpu"}


@pytest.mark.parametrize("name", NAMES)
def test_a_program_is_short_and_stands_alone(name):
    source = (ROOT / "rungs" / name).read_text()
    assert len(source.splitlines()) <= 156
    imported = set(re.findall(r"^ *(?:import|from) (\w+)", source, re.MULTILINE))
    assert imported - set(sys.stdlib_module_names) == {"numpy", "torch", "torchvision"}


@pytest.mark.parametrize(("below", "this"), ADDED, ids=lambda name: name)
def test_a_rung_adds_few_lines_to_the_one_below(below, this):
    lines = [(ROOT / "rungs" / name).read_text().splitlines() for name in (below, this)]
    added = [line for line in difflib.ndiff(*lines) if line.startswith("+ ")]
    assert 1 < len(added) <= ADDED[below, this]
