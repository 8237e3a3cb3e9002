"""The standalone programs in ``rungs/``, run as a reader runs them."""

import contextlib
import difflib
import functools
import gc
import io
import os
import re
import runpy
import stat
import subprocess
import sys
import warnings
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from running import ROOT

from torchladder import data, models
from torchladder.launching import launch

ELASTIC = ROOT / "rungs" / "4_ddp_elastic.py"  # across two hosts: tools/test_two_hosts.py
FSDP_ELASTIC = ROOT / "rungs" / "5_fsdp_elastic.py"  # with several ranks: test_fsdp_elastic.py
FAST = ROOT / "rungs" / "4_ddp_fast.py"  # with two processes: test_fast_ddp.py
LONGER = {ELASTIC: 170, FSDP_ELASTIC: 205, FAST: 230}  # lines; the others at most 145
PROGRAMS = sorted(set((ROOT / "rungs").glob("[0-9]_*.py")) - set(LONGER))
NAMES = [program.name for program in PROGRAMS]
# What a rung adds to the one below, in lines: the ladder's promise.
ADDED = {
    ("1_cpu.py", "2_gpu.py"): 6,
    ("2_gpu.py", "2_gpu_amp.py"): 12,
    ("2_gpu.py", "3_dp.py"): 3,
    ("3_dp.py", "4_ddp.py"): 28,
    ("4_ddp.py", "5_fsdp.py"): 17,
    ("5_fsdp.py", "6_hsdp.py"): 9,
    ("4_ddp.py", "4_ddp_elastic.py"): 40,
    ("4_ddp.py", "4_ddp_fast.py"): 120,
    ("5_fsdp.py", "5_fsdp_elastic.py"): 69,
}
RANKED = [path.name for path in [*PROGRAMS, *LONGER] if "init_process_group" in path.read_text()]
BY_TORCHRUN = sorted(set(RANKED) - {FAST.name})
RESUMING = [name for name in RANKED if '"--checkpoint"' in (ROOT / "rungs" / name).read_text()]
WITHOUT_GPUS = {"CUDA_VISIBLE_DEVICES": ""}
# torchrun's --run-path --start-method=fork: ranks that need not import torch again.
FORKED = {"PET_RUN_PATH": "1", "PET_START_METHOD": "fork"} if sys.platform == "linux" else {}


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


def run_on_ranks(program, *options, nproc=2):
    """As `run`, or a program elsewhere, in processes that have torch; what became of rank 0."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    port = str(store.port)

    def one_rank():
        dist.destroy_process_group()  # the program joins its own, in a store of its own
        os.environ["MASTER_PORT"] = port
        gc.disable()  # a DDP reducer that is freed after its group hangs or aborts (pytorch#179291)
        done = run_here(program, *options, env={})
        gc.freeze()
        return done

    with mock.patch.dict(os.environ, WITHOUT_GPUS):
        return launch(one_rank, world_size=nproc, timeout=600, show="none")[0]


def needed(name, folder):
    """The options without which a program does not run, or not in a test's time."""
    if name == FAST.name:
        return ["--no-compile", "--workers", 0]
    return ["--checkpoint", folder / f"of_{name}"] if name in RESUMING else []


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
    """Each program's output and saved file after one epoch on the bundled set."""
    folder = tmp_path_factory.mktemp("rungs")
    results = {}
    for name in NAMES:
        path = folder / f"{name}.pt"
        options = ["--data", data.BUNDLED, "--epochs", 1, "--lr", 0.1, "--save", path]
        # Those that need neither torchrun nor to be the first: without importing torch again.
        start = run if name in ("1_cpu.py", *BY_TORCHRUN) else run_here
        if name == "2_gpu_amp.py":  # float16 is slow on most CPUs
            options[1:2] = [few_images(folder, 2000), "--amp", "bf16"]
        done = start(name, *options)
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
    assert float(accuracy_printed(done)) > (50 if name == "2_gpu_amp.py" else 72)
    state = torch.load(path, weights_only=True)
    assert [path.name for path in path.parent.glob(f"{name}*")] == [path.name]
    model = models.LeNet()
    # The same layers, in one Sequential there and in two here.
    model.load_state_dict(dict(zip(model.state_dict(), state.values(), strict=True)))
    fashion = data.load_dataset()
    with torch.inference_mode():
        right = model(fashion.normalise(fashion.test_images)).argmax(1) == fashion.test_labels
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
    done = run_on_ranks(name, *options, *needed(name, tmp_path))
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


def test_rung_6_says_which_numbers_of_copies_its_processes_do_not_allow():
    for replicas in (0, -1, 3):
        done = run_here("6_hsdp.py", "--data", data.BUNDLED, "--replicas", replicas)
        said = f"--replicas {replicas}: must divide 1, the number of processes.\n"
        assert (done.returncode, done.stdout, done.stderr) == (1, "", said)


def test_bad_input_gets_one_sentence_and_a_failing_exit(tmp_path):
    numbers = "--epochs, --batch-size and --lr must be above 0."
    sentence = "neither Fashion-MNIST's .npz nor the folder of torchvision's FashionMNIST ("
    cases = [("--data", at, f"--data {at}: {sentence}") for at in ("no", __file__, tmp_path)]
    cases += [("--epochs", 0, numbers), ("--batch-size", -1, numbers)]
    cases += [("--lr", lr, numbers) for lr in ("0", "-1")]
    for path in ("", tmp_path, "no/a.pt", f"{__file__}/a.pt", "/dev/null", "a" * 300):
        cases += [("--save", path, f"Cannot write {Path(path).resolve()}: name a file")]
    for name in (*NAMES, *RESUMING, FAST.name):
        for option, value, sentence in cases if name in ("1_cpu.py", "4_ddp.py") else cases[:3]:
            options = [*needed(name, tmp_path), f"{option}={value}"]
            done = run_here(name, "--data", data.BUNDLED, *options)
            assert (done.returncode, done.stdout) == (1, ""), (name, option, value)
            assert done.stderr.startswith(sentence)
            # Not NumPy's advice, nor torchvision's.
            assert (done.stderr.count("\n"), re.search("trust|download", done.stderr)) == (1, None)
    assert Path("/dev/null").is_char_device()
    assert list(tmp_path.iterdir()) == []


def test_a_run_that_diverged_stops_and_leaves_the_good_file_alone(tmp_path):
    few, good = few_images(tmp_path, 64), tmp_path / "good.pt"
    for name in (*NAMES, *RESUMING):
        good.write_bytes(b"good")
        options = ["--data", few, "--epochs", 1, "--lr", 1e30, "--save", good]
        done = run_here(name, *options, *needed(name, tmp_path))
        assert done.returncode == 1, name
        # With 64 images in one batch the loss is taken before the only step.
        sentence = r"epoch 1: loss 2\.\d+, norm of weights (nan|inf)\. Lower --lr\.\n"
        assert re.fullmatch(sentence, done.stderr)
        assert good.read_bytes() == b"good"
        files = {path.name for path in tmp_path.rglob("*") if path.is_file()}
        assert files == {"few.npz", "good.pt"}


def test_saving_touches_only_its_target_through_a_link_and_under_a_name_of_its_own(tmp_path):
    few, own = few_images(tmp_path, 64), tmp_path / "a.pt.tmp"
    own.write_text("my notes")
    (tmp_path / "link.pt").symlink_to("a.pt")
    replace, temporary = os.replace, []

    def replaced(new, old):
        temporary.append((os.fspath(new), Path(old)))
        replace(new, old)

    options = ["--data", few, "--epochs", 1, "--save", tmp_path / "link.pt"]
    with mock.patch("os.replace", replaced):  # two runs at once must not write into one file
        assert [run_here("1_cpu.py", *options).returncode for _ in range(2)] == [0, 0]
    (first, target), (second, _) = temporary
    assert first != second
    assert target == tmp_path / "a.pt"
    assert own.read_text() == "my notes"
    assert (tmp_path / "link.pt").is_symlink()
    os.umask(mask := os.umask(0))
    assert stat.S_IMODE(target.stat().st_mode) == 0o666 & ~mask
    assert len(list(tmp_path.iterdir())) == 4


@pytest.mark.slow
@pytest.mark.parametrize("name", ["2_gpu_amp.py", FAST.name])
def test_fp16_with_its_gradient_scaler_trains_on_the_cpu_and_skipped_steps_move_no_rate(
    name, tmp_path
):
    """PyTorch warns of a schedule that steps before the optimizer ever did.

    Gradients that are clipped while they are scaled are far too small to learn from.
    """
    scaler = functools.partial(torch.amp.GradScaler, init_scale=2.0**30)
    options = ["--data", few_images(tmp_path, 200), "--epochs", 6, "--batch-size", 16]
    with mock.patch("torch.amp.GradScaler", scaler), warnings.catch_warnings():
        warnings.simplefilter("error")
        done = run_here(name, *options, *needed(name, tmp_path), "--amp", "fp16", "--lr", 0.1)
    assert done.returncode == 0, done.stderr
    assert float(accuracy_printed(done)) > 40


def test_the_upper_rungs_need_torchrun_and_a_gpu_for_each_process_apples_cannot_send(tmp_path):
    options = ["--data", few_images(tmp_path, 64), "--epochs", 1]
    start = "Start it with torchrun, a process per GPU ("
    cases = [("cpu", "0", start, ""), ("cuda", "2", start, ""), ("cuda", "1", "takes 7", "")]
    cases += [("mps", "2", "", "training on cpu\nepoch 1: ")]
    for name in RANKED:
        assert "torchrun --" in (ROOT / "rungs" / name).read_text()[:300]
        for kind, processes, error, output in cases:
            env = ONLY_RANK | {"LOCAL_RANK": "7", "LOCAL_WORLD_SIZE": processes}
            device = torch.device(kind)
            with (
                mock.patch("torch.accelerator.current_accelerator", return_value=device),
                mock.patch("torch.accelerator.device_count", return_value=1),
                mock.patch("torch.accelerator.set_device_index", lambda i: sys.exit(f"takes {i}")),
            ):
                done = run_here(name, *options, *needed(name, tmp_path), env=env)
            assert done.stderr.startswith(error)
            assert done.stdout.startswith(output)
            assert (done.stderr == "") == (done.returncode == 0) == (error == "")


@pytest.mark.parametrize("name", RANKED)
def test_every_epoch_reads_the_same_images_in_another_order(name, tmp_path):
    options = ["--data", few_images(tmp_path, 64), "--epochs", 2, "--batch-size", 64]
    with mock.patch("torch.nn.functional.cross_entropy", wraps=F.cross_entropy) as loss:
        assert run_here(name, *options, *needed(name, tmp_path)).returncode == 0
    first, second = (call.args[1].tolist() for call in loss.call_args_list)
    assert sorted(first) == sorted(second)
    assert first != second


@pytest.mark.slow
def test_with_batch_norm_the_accuracy_printed_is_that_of_the_saved_model(tmp_path):
    """Each rank's averages are of its own images; all must test with those that are saved."""
    convolution, program = "nn.Conv2d(1, 6, 5, padding=2),", tmp_path / "changed.py"
    with np.load(few_images(tmp_path, 1000)) as arrays:
        images, labels = (torch.from_numpy(arrays[f"test_{key}"]) for key in ("images", "labels"))
    for name in BY_TORCHRUN:
        source = (ROOT / "rungs" / name).read_text()
        assert convolution in source
        source = source.replace(convolution, f"{convolution} nn.BatchNorm2d(6),")
        program.write_text(source)
        options = ["--data", tmp_path / "few.npz", "--epochs", 1, "--save", tmp_path / "a.pt"]
        options += [*needed(name, tmp_path), "--batch-size", 16]
        done = run_on_ranks(program, *options)
        assert done.returncode == 0, done.stderr
        names = {}
        exec(source.partition("\nparser = ")[0], names)
        model = names["LeNet"]().eval()
        model.load_state_dict(torch.load(tmp_path / "a.pt"))
        with torch.inference_mode():
            right = model(images.unsqueeze(1)).argmax(1) == labels
        assert accuracy_printed(done) == f"{100 * right.float().mean():.2f}", name


@pytest.mark.parametrize("name", RESUMING)
def test_a_program_goes_on_only_as_it_began_and_removes_only_what_it_wrote(name, tmp_path):
    few, foreign = few_images(tmp_path, 64), ("1.txt", "2024-results/a", "7/b")
    _, folder = needed(name, tmp_path)
    folder = folder if "fsdp" in name else tmp_path  # each rank's rows, or one file in a folder
    others = [folder / path for path in (*foreign, "epoch_0/.metadata", "epoch_9/.metadata")]
    for path in others:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
    options = ["--data", few, *needed(name, tmp_path), "--epochs", 2]
    assert run_here(name, *options).returncode == 0
    assert all(path.exists() for path in others)
    own = {path for path in folder.rglob("*") if path.is_file()} - {few, *others}
    assert len({path.relative_to(folder).parts[0] for path in own}) == 1  # of the last epoch
    changes = [("--epochs", 3, 2, 3), ("--batch-size", 32, 64, 32), ("--lr", 0.1, 0.05, 0.1)]
    for option, value, then, now in [*changes, ("--data", few_images(folder / "7", 32), 64, 32)]:
        done = run_here(name, *options, option, value)
        assert f"{option} was {then}, now {now}. Go on as it began, or" in done.stderr
        assert (done.returncode, done.stderr.count("\n")) == (1, 1)
    with mock.patch("torch.distributed.get_world_size", return_value=7):
        seven = run_here(name, *options)
    assert seven.stderr == "--batch-size 64 cannot be dealt out to 7 processes.\n"
    for path in own:
        path.write_bytes(path.read_bytes()[:-900])
    assert ": not a whole one of this program" in run_here(name, *options).stderr


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("name", "options"),
    [(name, []) for name in NAMES[1:]] + [("2_gpu_amp.py", ["--amp", "bf16"])],
)
def test_a_program_for_gpus_trains_on_them(name, options, tmp_path):
    path = tmp_path / "lenet.pt"
    options = ["--data", data.BUNDLED, "--epochs", 2, "--save", path, *options]
    done = run(name, *options, nproc=torch.cuda.device_count(), env={})
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("training on cuda")
    assert float(accuracy_printed(done)) > 75
    assert {tensor.device.type for tensor in torch.load(path).values()} == {"cpu"}


@pytest.mark.parametrize("program", [*PROGRAMS, *LONGER], ids=lambda path: path.name)
def test_a_program_is_short_and_stands_alone(program):
    source = program.read_text()
    assert len(source.splitlines()) <= LONGER.get(program, 147)
    imported = set(re.findall(r"^ *(?:import|from) (\w+)", source, re.MULTILINE))
    assert imported - set(sys.stdlib_module_names) == {"numpy", "torch", "torchvision"}


@pytest.mark.parametrize(("below", "this"), ADDED, ids=lambda name: name)
def test_a_rung_adds_few_lines_to_the_one_below(below, this):
    lines = [(ROOT / "rungs" / name).read_text().splitlines() for name in (below, this)]
    added = [line for line in difflib.ndiff(*lines) if line.startswith("+ ")]
    assert 1 < len(added) <= ADDED[below, this]
