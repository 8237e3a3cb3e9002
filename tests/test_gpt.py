"""`rungs/gpt.py` computes the same on every rung, and goes on from any moment on any other."""

import contextlib
import errno
import gc
import io
import json
import logging
import os
import re
import resource
import runpy
import shutil
import signal
import socket
import subprocess
import sys
from types import SimpleNamespace
from unittest import mock

import numpy as np
import pytest
import torch
from PIL import Image
from running import ROOT, limited, pretend
from safetensors.torch import load_file
from test_rungs import few_images, run_here, run_on_ranks
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from torchclinic.writing import sole_use
from torchladder.launching import launch

long = pytest.mark.long
PROGRAM = ROOT / "rungs" / "gpt.py"
KINDS = {"none": 1, "ddp": 2, "fsdp": 3, "hsdp": 4}  # three do not divide its 16 rows
SMALL = ["--layers", 2, "--width", 16, "--kv-heads", 2, "--context", 16, "--steps", 20]
SMALL += ["--batch", 24, "--warm-up", 5, "--save-every", 10, "--log-every", 2, "--peak", 1]


@pytest.fixture(scope="module")
def gpt():
    return SimpleNamespace(**runpy.run_path(str(PROGRAM), run_name="read"))


@pytest.fixture(autouse=True)
def usual_signals():
    usual = {n: signal.getsignal(n) for n in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)}
    level = logging.getLogger().level
    yield
    logging.getLogger().setLevel(level)
    for number, handler in usual.items():
        signal.signal(number, handler)


@pytest.fixture(scope="module")
def tokens(tmp_path_factory):
    """A text of 8 letters, each of which mostly follows the one before."""
    chance = np.random.default_rng(0)
    steps = np.where(chance.random(12_000) < 0.8, 1, chance.integers(0, 8, 12_000))
    path = tmp_path_factory.mktemp("data") / "tokens.npy"
    np.save(path, (np.cumsum(steps) % 8).astype(np.uint8))
    return path


def run(out, tokens, *options, parallel="none", ranks=None, program=PROGRAM):
    ranks = ranks or KINDS[parallel]
    options = ["--out", out, "--data", tokens, "--parallel", parallel, *SMALL, *options]
    options += ["--export", out / "weights.safetensors"]
    options += ["--shard", 2] * (parallel == "hsdp")
    on_ranks = ranks > 1
    done = run_on_ranks(program, *options, nproc=ranks) if on_ranks else run_here(program, *options)
    assert done.returncode == 0, done.stderr
    return done


def losses(out):
    rows = list(map(json.loads, (out / "log.jsonl").read_text().splitlines()))
    return {row["step"]: (row["loss"], row["validation"]) for row in rows}


@pytest.fixture(scope="module")
def whole(tokens, tmp_path_factory):
    """A run of one process that nothing has stopped."""
    run(out := tmp_path_factory.mktemp("whole") / "out", tokens)
    return out


@pytest.mark.slow
@pytest.mark.parametrize(
    ("parallel", "ranks", "options"),
    [
        ("none", 1, ["--micro", 7]),  # the last part of a batch of 24 is smaller
        ("ddp", 4, ["--micro", 4]),
        ("hsdp", 4, ["--micro", 3]),
        ("fsdp", 2, ["--recompute"]),
    ],
)
def test_every_rung_number_of_ranks_and_accumulation_learns_the_same(
    whole, tokens, tmp_path, parallel, ranks, options
):
    run(tmp_path / "out", tokens, *options, parallel=parallel, ranks=ranks)
    one, other = losses(whole), losses(tmp_path / "out")
    assert one.keys() == other.keys() == set(range(2, 21, 2))
    for step in one:
        assert other[step] == pytest.approx(one[step], rel=2e-5), step


@pytest.mark.slow
@pytest.mark.parametrize(
    "before", ["ddp", *(pytest.param(name, marks=long) for name in ("none", "fsdp", "hsdp"))]
)
def test_a_checkpoint_of_every_rung_goes_on_on_every_other(whole, tokens, tmp_path, before):
    run(tmp_path / before, tokens, parallel=before)
    for after in KINDS:
        moved = shutil.copytree(tmp_path / before, tmp_path / f"{before} to {after}")
        shutil.rmtree(moved / "step-00000020")  # back to the middle
        done = run(moved, tokens, parallel=after)
        assert "from step 10\n" in done.stdout
        assert losses(moved)[20] == pytest.approx(losses(whole)[20], rel=2e-5), after


@pytest.mark.slow
@pytest.mark.parametrize(("parallel", "ranks"), [("ddp", 3), ("fsdp", 2)])
def test_a_run_that_was_killed_ends_like_the_unbroken_one_bit_for_bit(
    tokens, tmp_path, parallel, ranks
):
    """In a save; the shard that is damaged is one that the other ranks do not read."""
    how = {"parallel": parallel, "ranks": ranks}
    run(whole := tmp_path / "whole", tokens, "--dropout", 0.2, "--save-every", 5, **how)
    out = shutil.copytree(whole, tmp_path / "out")
    if parallel == "ddp":
        (out / "step-00000020/.metadata").unlink()
    else:
        shard = out / "step-00000020/__1_0.distcp"
        data = bytearray(shard.read_bytes())
        data[len(data) // 2 : len(data) // 2 + 400] = bytes(400)
        shard.write_bytes(data)
    done = run(out, tokens, "--dropout", 0.2, "--save-every", 5, **how)
    assert "from step 15\n" in done.stdout
    assert_equal(whole, out)
    assert losses(out) == losses(whole)  # step 16's is of step 15, before the kill, too
    assert len(list(out.glob("step-????????"))) == 2


def assert_equal(out, other):
    one, other = (load_file(folder / "weights.safetensors") for folder in (out, other))
    assert one.keys() == other.keys()
    for name in one:
        assert torch.equal(one[name], other[name]), name


@pytest.mark.slow
def test_sigterm_to_one_rank_saves_on_all_and_the_same_command_goes_on(whole, tokens, tmp_path):
    out, program, then = tmp_path / "out", tmp_path / "gpt.py", "            stop = torch.tensor"
    text = PROGRAM.read_text()
    assert text.count(then) == 1
    told = "            if step == 7 and args.rank: os.kill(os.getpid(), signal.SIGTERM)\n"
    program.write_text(text.replace(then, told + then))
    options = ["--out", out, "--data", tokens, "--parallel", "ddp", *SMALL]
    done = run_on_ranks(program, *options)
    assert done.returncode == 1
    assert "saved after step 7; the same command goes on" in done.stderr
    assert "from step 7\n" in run(out, tokens).stdout
    for step, both in losses(whole).items():  # means over the same steps
        assert losses(out)[step] == pytest.approx(both, rel=2e-5)
    assert len((out / "log.jsonl").read_text().splitlines()) == 10


def test_signals_are_noted_while_it_trains_but_for_those_of_nohup(gpt):
    numbers, before = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP), mock.Mock()
    for number in numbers:
        signal.signal(number, before)
    with gpt.signals_noted() as told:
        for number in numbers:
            os.kill(os.getpid(), number)
        assert len(told) == 3
    assert [signal.getsignal(number) for number in numbers] == [before] * 3
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    with gpt.signals_noted() as told:
        os.kill(os.getpid(), signal.SIGHUP)
    assert told == []


def test_what_is_said_to_a_terminal_that_is_gone_ends_nothing(gpt):
    with mock.patch("builtins.print", side_effect=OSError(errno.EIO, "gone")):
        gpt.say("step 1")
    with mock.patch("sys.stdout", io.TextIOWrapper(io.BytesIO(), "ascii")):
        gpt.say("data was größe.npy")


def test_a_run_goes_on_only_as_it_began_and_in_a_folder_of_its_own(gpt, whole, tokens, tmp_path):
    base, other = whole / "weights.safetensors", tokens.with_name("other.npy")
    (notes := tmp_path.with_name("notes") / "settings.json").parent.mkdir(exist_ok=True)
    notes.write_text('{"editor.tabSize": 4}')
    np.save(other, np.load(tokens)[::-1])
    np.save(high := tokens.with_name("high.npy"), np.append(np.load(tokens), 5 * 10**12))
    cases = [
        ([whole, "--lr", 0.1], "lr was 0.003, now 0.1. Go on with options, data, base and gpt"),
        ([whole, "--data", other], "checksum was "),
        ([notes.parent], "no settings.json of this program. Take it from a backup, or name a n"),
        ([tmp_path, "--parallel", "ddp"], "--parallel ddp: start none with python, the others"),
        ([tmp_path, "--width", 20], "--width must be a multiple of 2 x --heads 4"),
        ([tmp_path, "--heads", 1], "--heads must be a multiple of --kv-heads 2"),
        ([tmp_path, "--lr", "nan"], "--lr must be at least 1e-12, not nan, and below 2**31"),
        ([tmp_path, "--warm-up", 2**31], "--warm-up must be at least 1, not 2147483648, and below"),
        ([tmp_path, "--dropout", 1], "--dropout must be below 1, not 1.0"),
        ([tmp_path, "--data", gpt.CLOTHES], "--context of pictures must be 196"),
        ([tmp_path, "--lr", "fast"], "argument --lr: invalid float value: 'fast'. --help lists"),
        ([tmp_path, "--lora", 4], "--lora changes weights: name their file as --base"),
        ([tmp_path, "--base", PROGRAM], "--export of this program has not written it"),
        ([tmp_path, "--base", base, "--layers", 1], "--base: layers must be as in"),
        ([tmp_path, "--export", PROGRAM], "gpt.py is --base or no file of this program: name anot"),
        ([tmp_path, "--export", base, "--base", base], "weights.safetensors is --base or no file"),
        ([PROGRAM], "rungs/gpt.py: File exists. Name a writable folder"),
        ([tmp_path, "--data", "no"], "--data no (FileNotFoundError): no .npy of more than --conte"),
        ([tmp_path, "--data", PROGRAM], "no .npy of more than --context whole numbers from 0 in"),
        ([tmp_path, "--data", high], "ids must be below 10,000,000"),
        ([tmp_path, "--context", 5000], "--batch 24: the data has 1 sequences"),
    ]
    before = [sorted(whole.rglob("*")), [notes]]
    for (out, *options), sentence in cases:
        done = run_here(PROGRAM, "--out", out, "--data", tokens, *SMALL, *options)
        assert done.returncode == 1
        assert sentence in done.stderr.splitlines()[-1], sentence
    assert [sorted(whole.rglob("*")), [*notes.parent.iterdir()]] == before
    assert not list(tmp_path.iterdir())
    few = ["--out", tmp_path / "few", "--data", tokens, *SMALL, "--vocabulary", 7]
    assert "--vocabulary 7: the data has the id 7" in run_here(PROGRAM, *few).stderr
    # It had not begun: the corrected command does.
    assert run_here(PROGRAM, *few[:-1], 9, "--steps", 2).returncode == 0


def test_with_the_folder_alone_a_run_goes_on_with_all_its_options(tokens, tmp_path):
    more = ["--micro", 7, "--recompute", "--log-every", 3]
    run(tmp_path, tokens, *more)
    begun = json.loads((tmp_path / "settings.json").read_text())
    shutil.rmtree(tmp_path / "step-00000020")
    done = run_here(PROGRAM, "--out", tmp_path)
    assert [*losses(tmp_path)] == [3, 6, 9, 12, 15, 18, 20]
    assert json.loads((tmp_path / "settings.json").read_text()) == begun
    done = run_here(PROGRAM, "--out", tmp_path, "--micro", 5, "--no-recompute")
    assert done.stdout.splitlines()[0] == "micro was 7, now 5; recompute was True, now False"
    begun["parallel"] = "fsdp"
    (tmp_path / "settings.json").write_text(json.dumps(begun))
    assert "parallel was fsdp, now none\n" in run_here(PROGRAM, "--out", tmp_path).stdout
    (tmp_path / "settings.json").write_text("{")
    done = run_here(PROGRAM, "--out", tmp_path, "--data", tokens, *SMALL)
    assert "no settings.json of this program. Take it from a backup, or name" in done.stderr


def test_a_copy_without_hidden_files_or_with_a_link_is_not_begun_again(whole, tokens, tmp_path):
    out = shutil.copytree(whole, tmp_path / "out")
    options = ["--out", out, "--data", tokens, *SMALL]
    for file in out.glob("step-*/.metadata"):
        file.unlink()  # killed in the first save
    assert "from step 0\n" in run_here(PROGRAM, *options, "--seed", 1).stdout
    (out / "step-00000030").symlink_to("step-00000010")  # it would be emptied, later
    assert " is a link. Copy what it leads to" in run_here(PROGRAM, *options).stderr
    (out / "step-00000030").unlink()
    for file in [*out.rglob(".*")]:
        file.unlink()
    for _ in range(2):
        said = run_here(PROGRAM, *options).stderr
        assert "has .metadata. Copy it again, with hidden files, or name a new" in said


def test_the_help_says_of_each_option_what_it_is_and_whether_it_is_fixed(gpt, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["gpt.py", "--help"])
    with pytest.raises(SystemExit):
        gpt.parse()
    told = " ".join(capsys.readouterr().out.split())
    assert "--clip CLIP highest norm of the gradients (1.0; fixed once a run has begun) --" in told
    assert "--log-every LOG_EVERY steps between two lines and validations (50) --" in told


def test_rows_of_the_log_that_are_cut_or_computed_again_are_left_out(gpt, tmp_path):
    log, rows = tmp_path / "log.jsonl", ['{"step": 2, "loss": 1.0}\n', '{"step": 4, "loss": 1.0}\n']
    log.write_text("".join(rows) + '{"step": 2, "lo')
    gpt.cut_log(SimpleNamespace(out=tmp_path), 2)
    assert log.read_text() == rows[0]


def usual(gpt, **options):
    """The options of a run, but for these."""
    args = {name: default for name, (default, *_) in gpt.OPTIONS.items()}
    args |= {"kv_heads": 4, "shape": {}, "base": None, "export": None, "ranks": 1, "alone": True}
    args |= {"parallel": "none", "precision": "fp32"}
    return SimpleNamespace(**args | options)


def test_pictures_that_cannot_be_right_are_refused_in_one_sentence(gpt, tmp_path):
    clothes = {name: array[:40] for name, array in np.load(gpt.CLOTHES).items()}
    for wrong in (
        {"train_images": clothes["train_images"] / 255},
        {"test_labels": clothes["test_labels"] + 9},
        {"test_images": clothes["test_images"][:0], "test_labels": np.arange(0)},
    ):
        np.savez(data := tmp_path / "data.npz", **clothes)
        assert gpt.read_and_check(usual(gpt, data=data)) is None
        np.savez(data, **(clothes | wrong))
        said = gpt.read_and_check(usual(gpt, data=data))
        assert re.search(r"no .npy of .* nor .npz of uint8 pictures", said)


def test_data_and_a_base_are_known_by_their_numbers(gpt, tokens, tmp_path):
    text = np.load(tokens)
    text[-100] ^= 1  # held out
    np.save(other := tmp_path / "other.npy", text)
    bases = [tmp_path / name for name in "ab"]
    for base in bases:
        base.write_bytes(bytes(50_500) + base.name.encode() + bytes(40_000))
    sums = set()
    for data, base in [(tokens, None), (other, None), *((tokens, base) for base in bases)]:
        args = usual(gpt, data=data, context=16, base=base, shape={"lora": 0} if base else {})
        assert gpt.read_and_check(args) is None
        sums.add(args.checksum)
    assert len(sums) == 4


def test_what_damaged_a_checkpoint_is_said_without_the_advice_that_follows(gpt):
    error = RuntimeError("Weights only load failed. In PyTorch 2.6, we changed the default")
    assert gpt.reason_of(error) == "RuntimeError: Weights only load failed"


def damage(folder, kind):
    shard = max(folder.glob("*.distcp"))
    if kind == "flipped":  # one bit of a number
        data = bytearray(shard.read_bytes())
        numbers = load_file(folder.parent / "weights.safetensors")["norm.weight"].numpy()
        at = data.index(numbers.tobytes())
        data[at + 2] ^= 64
        shard.write_bytes(data)
    elif kind == "missing":
        shard.unlink()
    else:
        os.truncate(folder / kind, 0)


@pytest.mark.parametrize("kind", ["flipped", "missing", ".metadata"])
def test_a_damaged_checkpoint_is_set_aside_and_the_one_before_goes_on(
    whole, tokens, tmp_path, caplog, kind
):
    out = shutil.copytree(whole, tmp_path / "out")
    damage(out / "step-00000020", kind)
    stdout = run(out, tokens).stdout
    assert "metadata is not found" not in caplog.text  # with tracebacks, by dcp
    assert re.match(
        r".*/step-00000020 is damaged \(\w+: .*\): it is step-00000020.damaged-", stdout
    )
    assert "from step 10\n" in stdout
    assert_equal(out, whole)
    assert losses(out) == losses(whole)
    assert len(list(out.glob("step-00000020.damaged-*/*"))) > 0


def test_if_no_checkpoint_is_whole_nothing_is_moved(whole, tokens, tmp_path):
    out = shutil.copytree(whole, tmp_path / "out")
    for step in ("step-00000010", "step-00000020"):
        damage(out / step, "missing")
    before = sorted(out.rglob("*"))
    done = run_here(PROGRAM, "--out", out)
    assert re.search(
        "no checkpoint is whole .step-00000020: .*; step-00000010: .*Take", done.stderr
    )
    assert sorted(out.rglob("*")) == before


def test_two_runs_in_one_folder_never_mix_whichever_is_first(gpt, tokens, tmp_path):
    """The lock is the one of `torchladder.training.train`."""
    options = ["--out", tmp_path, "--data", tokens, *SMALL]
    with sole_use(tmp_path):
        done = run_here(PROGRAM, *options)
        assert f"process {os.getpid()} on {socket.gethostname()}, since 2" in done.stderr
        assert "is writing there. End it first, or name a new folder" in done.stderr
    assert not list(tmp_path.iterdir())
    args = SimpleNamespace(out=tmp_path)
    assert gpt.hold(args) is None
    with pytest.raises(BlockingIOError, match=f"ss {os.getpid()} on"), sole_use(tmp_path):
        pass
    assert "is writing there" in run_here(PROGRAM, *options).stderr
    args.lock.close()  # as at the end of a process
    assert run_here(PROGRAM, *options, "--steps", 2).returncode == 0


@pytest.mark.parametrize(
    ("rank", "local_rank", "met", "waits"),
    [(0, 0, True, 0), (2, 0, True, 5), (2, 0, False, 0), (3, 1, False, 30)],
)
def test_one_rank_says_what_is_wrong_and_the_others_wait_to_be_ended(
    gpt, monkeypatch, rank, local_rank, met, waits
):
    """Of all once they have met; before, of each host: rank 0 might wait for it."""
    monkeypatch.setenv("RANK", str(rank))
    monkeypatch.setenv("LOCAL_RANK", str(local_rank))
    monkeypatch.setattr("torch.distributed.is_initialized", lambda: met)
    monkeypatch.setattr("time.sleep", (slept := mock.Mock()))
    with pytest.raises(SystemExit) as left:
        gpt.leave("it is wrong")
    assert left.value.code == (1 if waits else "it is wrong")
    assert slept.mock_calls == ([mock.call(waits)] if waits else [])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("second", "said"),
    [
        ("--lr 0.1 --micro 5", "process 1 has other values of lr, micro than process 0. Give all"),
        ("--data other.npy", "process 1 has other values of checksum than process 0. Give all"),
        ("--data none.npy", "process 1: --data none.npy (FileNotFoundError): no .npy of"),
        ("--out b", "process 1: b/.run.lock, which process 0 made, is not there. Name a folder"),
    ],
)
def test_hosts_that_are_not_in_the_same_run_are_told_before_training(
    tokens, tmp_path, monkeypatch, second, said
):
    """A rank is a host here: it has options of its own."""
    text = PROGRAM.read_text()
    impatient = text.replace("HIDDEN = 60", "HIDDEN = 0").replace("time.sleep(5 if", "(5 if")
    (program := tmp_path / "gpt.py").write_text(impatient)
    monkeypatch.chdir(tmp_path)
    np.save("other.npy", np.load(tokens)[::-1])
    options = ["--out", "a", "--data", tokens, *SMALL]
    done = run_on_ranks(program, *options, last=second.split())
    assert said in done.stderr
    assert "from step 0" not in done.stdout
    assert not list(tmp_path.glob("*/step-*"))


def test_a_rank_whose_torchrun_is_killed_while_it_imports_ends(tmp_path):
    late = "import os, time; print(os.getpid(), flush=True); time.sleep(1000)"
    (tmp_path / "numpy.py").write_text(late)  # the first import that takes long
    env = os.environ | {"PYTHONPATH": str(tmp_path), "TORCHELASTIC_RUN_ID": "here"}
    command = ["bash", "-c", f"'{sys.executable}' '{PROGRAM}' --out x & wait"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, env=env, cwd=tmp_path) as torchrun:
        rank = int(torchrun.stdout.readline())
        try:
            torchrun.kill()
            torchrun.communicate(timeout=200)  # until the rank has closed it
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.kill(rank, signal.SIGKILL)


@pytest.mark.slow
def test_adapters_learn_alone_are_saved_alone_and_merge(gpt, whole, tokens, tmp_path):
    new = dict(new_model(gpt, lora=2)[0].named_parameters())
    assert {name for name in new if not new[name].any()} == {n for n in new if "lora_b" in n}
    base = whole / "weights.safetensors"
    how = ["--base", base, "--lora", 2, "--lr", 0.03, "--decay", 0]
    run(tmp_path / "one", tokens, *how)
    run(tmp_path / "fsdp", tokens, *how, parallel="fsdp")
    before, one = load_file(base), load_file(tmp_path / "one" / "weights.safetensors")
    other = load_file(tmp_path / "fsdp" / "weights.safetensors")
    assert before.keys() == one.keys() == other.keys()
    layers = ("qkv.weight", "out.weight", "gate_up.weight", "down.weight")
    for name in one:
        torch.testing.assert_close(other[name], one[name], rtol=1e-4, atol=1e-6)
        assert torch.equal(one[name], before[name]) != name.endswith(layers), name
    ranks = [torch.linalg.matrix_rank(one[n] - before[n], rtol=1e-3) for n in one if "qkv" in n]
    assert ranks == [2, 2]
    step = tmp_path / "one" / "step-00000020"
    saved = torch.distributed.checkpoint.FileSystemReader(step).read_metadata().state_dict_metadata
    names = {name for name in saved if name.startswith("model.")}
    assert len(names) == 16
    assert all(".lora_" in name for name in names)
    # As a base of its own, the merged file computes what the adapters did.
    merged = ["--base", tmp_path / "one" / "weights.safetensors", "--lr", 1e-12]
    run(tmp_path / "merged", tokens, *merged)
    again, learned = losses(tmp_path / "merged")[2][1], losses(tmp_path / "one")[20][1]
    assert again == pytest.approx(learned, rel=1e-5)


def test_weights_that_cannot_be_written_are_told_in_one_sentence(whole, tokens, tmp_path):
    out = shutil.copytree(whole, tmp_path / "out")
    with limited(resource.RLIMIT_FSIZE, 20_000):
        done = run_here(PROGRAM, "--out", out, "--export", tmp_path / "new.safetensors")
    assert "OSError: [Errno 27] File too large. Can --out be written, is the disk" in done.stderr
    assert [*tmp_path.iterdir()] == [out]  # no part of it
    gc.collect()  # closes the lock, as the end of a process does
    assert run(out, tokens).returncode == 0  # it is in the last checkpoint


def test_the_first_step_is_not_in_the_speed(tokens, tmp_path):
    """It compiles, and starts the GPU: here 100 s of a clock of our own, each other one 1 s."""
    clip, now, seconds = torch.nn.utils.clip_grad_norm_, [0], [100]

    def step(*given):
        now[0] += seconds.pop() if seconds else 1
        return clip(*given)

    with (
        mock.patch("torch.nn.utils.clip_grad_norm_", step),
        mock.patch("time.perf_counter", side_effect=lambda: now[0]),
    ):
        run(tmp_path / "out", tokens, "--steps", 4)
    rows = map(json.loads, (tmp_path / "out" / "log.jsonl").open())
    assert [row["tokens_per_second"] for row in rows] == [24 * 16, 24 * 16]


@pytest.mark.gpu
def test_the_peak_of_a_slow_gpu_is_measured_without_a_large_product(gpt):
    """Which takes hours in fp16 on a simulated one."""
    slow = SimpleNamespace(device=torch.device("cuda"), precision="fp16")
    with (
        mock.patch("time.perf_counter", side_effect=range(99)),  # a second for each product
        mock.patch("torch.randn", return_value=torch.ones(1, 1, device="cuda")),
    ):
        assert gpt.measure_peak(slow) == 2 * 512**3


def test_more_processes_than_gpus_are_told_in_one_sentence(gpt, monkeypatch):
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "3")
    pretend(monkeypatch, torch.accelerator, current_accelerator=torch.device("cuda"))
    pretend(monkeypatch, torch.accelerator, device_count=2)
    with pytest.raises(SystemExit, match=r"3 .* host that has 2 GPU\(s\): --nproc-per-node=2"):
        gpt.join(SimpleNamespace())


def test_a_run_that_diverges_saves_nothing_and_a_file_of_the_users_stays(tokens, tmp_path):
    options = ["--out", tmp_path / "out", "--data", tokens, *SMALL, "--save-every", 2]
    done = run_here(PROGRAM, *options, "--lr", 2e9, "--log-every", 20)
    assert "it diverged, and is not saved. Try a lower --lr" in done.stderr
    assert not list((tmp_path / "out").glob("step-*"))
    # The scaler of fp16 keeps the weights finite for ever.
    fp16 = ["--precision", "fp16", "--lr", 1000, "--warm-up", 1, "--clip", 1e9, "--log-every", 5]
    done = run_here(PROGRAM, "--out", tmp_path / "fp16", "--data", tokens, *SMALL, *fp16)
    assert "it diverged, and is not saved. Try a lower --lr" in done.stderr
    options[1] = tmp_path / "new"
    notes = tmp_path / "new" / "step-00000002" / "notes.txt"
    with mock.patch("torch.distributed.checkpoint.async_save", noting(notes, found := [])):
        assert run_here(PROGRAM, *options).returncode == 0
    assert found == [0] + 9 * [1]  # the one before, which is whole, until the new one is
    left = sorted(path.name for path in (tmp_path / "new").glob("step-*"))
    assert left == ["step-00000002", "step-00000018", "step-00000020"]
    assert [path.name for path in notes.parent.iterdir()] == ["notes.txt"]


def noting(notes, found):
    """`async_save` that counts whole ones, and lets somebody put a file into the first."""
    save = torch.distributed.checkpoint.async_save

    def noted(state, checkpoint_id, **options):
        found.append(len(list(checkpoint_id.parent.glob("*/.metadata"))))
        if checkpoint_id == notes.parent:
            notes.parent.mkdir()
            notes.write_text("mine")
        return save(state, checkpoint_id=checkpoint_id, **options)

    return noted


def new_model(gpt, **options):
    args = {"vocabulary": 26, "device": torch.device("cpu"), "weights": None}
    args = usual(gpt, **args | options)
    model = gpt.GPT(args)
    model.initialize(0)
    return model, args


@pytest.mark.parametrize("options", [{}, {"kv_heads": 2}, {"kv_heads": 1}])
def test_with_a_cache_a_token_gets_the_scores_that_it_gets_without(gpt, options):
    model, _ = new_model(gpt, **options)
    tokens, caches = torch.randint(26, (2, 20)), [[] for _ in model.blocks]
    with torch.inference_mode():
        whole = model.eval()(tokens)
        parts = [model(part, caches) for part in tokens.split([5, *[1] * 15], dim=1)]
    torch.testing.assert_close(torch.cat(parts, dim=1), whole, rtol=1e-4, atol=1e-5)
    heads = options.get("kv_heads", 4)
    assert [tuple(key.shape) for key, _ in caches] == [(2, heads, 20, 16)] * 3


def test_no_score_depends_on_a_later_token_and_no_grey_is_a_class(gpt):
    model, args = new_model(gpt, data=gpt.CLOTHES)
    train, held_out, highest = gpt.read_pictures(args)
    assert (train.shape, held_out.shape, highest) == ((12_000, 197), (2_000, 197), 25)
    assert train[:, 1:].max() < gpt.GREYS <= train[:, 0].min()
    tokens = torch.from_numpy(held_out[:4].astype(int))
    other = torch.cat([tokens[:, :100], tokens[:, 100:].flip(0)], dim=1)
    with torch.inference_mode():
        assert torch.equal(model(tokens)[:, :100], model(other)[:, :100])


def test_learning_beats_guessing(whole):
    by_step = losses(whole)
    assert by_step[20][1] < 1.7 < 2 < by_step[2][1]


def test_each_pair_is_turned_by_its_own_angle(gpt):
    """As complex numbers times e^(i * place / 10,000^(k/n)), https://arxiv.org/abs/2104.09864."""
    x, place = torch.randn(2, 5, 8, dtype=torch.float64), torch.arange(5)
    angles = place[:, None] / 10_000 ** (torch.arange(4) / 4)
    turned = torch.complex(x[..., :4], x[..., 4:]) * torch.exp(1j * angles)
    right = torch.cat([turned.real, turned.imag], dim=-1)
    torch.testing.assert_close(gpt.rotated(x, place), right, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("options", [{}, {"kv_heads": 2}])
def test_the_flops_are_those_that_pytorch_counts(gpt, options):
    # PyTorch 2.10 does not count a CPU's fused attention.
    model, args = new_model(gpt, **options)
    tokens = torch.randint(26, (2, 197))
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counted:
        gpt.loss_of(model, tokens, args).backward()
    assert counted.get_total_flops() == gpt.flops_of(args, model) * 2 * 196


@pytest.mark.slow
def test_a_sharded_model_draws_what_a_whole_one_draws(gpt):
    first, sure = torch.arange(10)[:, None], {"count": 20, "ids": 26, "temperature": 1e-4}

    def drawn():
        program = SimpleNamespace(**runpy.run_path(str(PROGRAM), run_name="read"))
        model, args = new_model(program, parallel="hsdp", ranks=2, shard=1)
        copy = program.parallelize(model, args).embedding.weight
        assert copy.to_local().shape == copy.shape  # nobody else has a share of it
        model, args = new_model(program, parallel="fsdp", ranks=2)
        return program.generate(program.parallelize(model, args), first, **sure)

    whole = gpt.generate(new_model(gpt)[0], first, **sure)
    assert len(whole.unique()) > 5
    assert all(torch.equal(part, whole) for part in launch(drawn, backend="gloo", timeout=300))


@pytest.mark.slow
def test_the_drawing_is_a_sheet_of_each_class_and_can_be_made_again(tmp_path):
    options = ["--layers", 1, "--width", 16, "--steps", 2, "--peak", 1]
    options += ["--out", tmp_path / "out", "--data", few_images(tmp_path, 64)]
    assert run_here(PROGRAM, *options).returncode == 0
    sheet = (drawing := tmp_path / "out" / "drawing.png").read_bytes()
    assert Image.open(drawing).size == (4 * 10 * 14, 4 * 8 * 14)
    drawing.unlink()
    assert run_here(PROGRAM, *options).returncode == 0
    assert drawing.read_bytes() == sheet
