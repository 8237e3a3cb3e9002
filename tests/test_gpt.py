"""`rungs/gpt.py` computes the same on every rung, and goes on from any moment on any other."""

import json
import os
import random
import re
import runpy
import shutil
import signal
import socket
import subprocess
import sys
import threading
from types import SimpleNamespace
from unittest import mock

import numpy as np
import pytest
import torch
from PIL import Image
from running import ROOT, wait_until
from safetensors.torch import load_file
from test_rungs import run_here, run_on_ranks
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from torchclinic.writing import sole_use
from torchladder.launching import LaunchError, launch

long = pytest.mark.long
PROGRAM = ROOT / "rungs" / "gpt.py"
KINDS = {"none": 1, "ddp": 2, "fsdp": 2, "hsdp": 4}
SMALL = ["--layers", 2, "--width", 16, "--kv-heads", 2, "--context", 16, "--steps", 20]
SMALL += ["--batch", 24, "--warm-up", 5, "--save-every", 10, "--log-every", 2, "--peak", 1]


@pytest.fixture(scope="module")
def gpt():
    return SimpleNamespace(**runpy.run_path(str(PROGRAM), run_name="read"))


@pytest.fixture(autouse=True)
def usual_signals():
    usual = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    yield
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
        pytest.param("ddp", 2, [], marks=long),
        pytest.param("fsdp", 4, ["--micro", 3], marks=long),
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
def test_a_run_killed_at_any_moment_ends_like_the_unbroken_one_bit_for_bit(
    tokens, tmp_path, parallel, ranks
):
    how = {"parallel": parallel, "ranks": ranks}
    more = ["--dropout", 0.2, "--save-every", 3]
    run(tmp_path / "whole", tokens, *more, **how)
    chance, program = random.Random(0), tmp_path / "killed.py"
    for rows in (1, 3, 5):  # of the log; then at some moment
        words = {"log": str(tmp_path / "out" / "log.jsonl"), "program": str(PROGRAM), "rows": rows}
        program.write_text(KILLED.format(**words, seconds=chance.uniform(0, 0.1)))
        with pytest.raises(LaunchError, match="killed by SIGKILL"):
            run(tmp_path / "out", tokens, *more, program=program, **how)
    run(tmp_path / "out", tokens, *more, **how)
    assert_equal(tmp_path / "whole", tmp_path / "out")
    assert len(list((tmp_path / "out").glob("step-*"))) == 2


KILLED = """import os, pathlib, runpy, signal, threading, time

def kill():
    log = pathlib.Path({log!r})
    while not log.exists() or log.read_text().count("\\n") < {rows}:
        time.sleep(0.001)
    time.sleep({seconds})
    os.kill(os.getpid(), signal.SIGKILL)

if os.environ["RANK"] == "1":
    threading.Thread(target=kill, daemon=True).start()
runpy.run_path({program!r}, run_name="__main__")
"""


def assert_equal(out, other):
    one, other = (load_file(folder / "weights.safetensors") for folder in (out, other))
    assert one.keys() == other.keys()
    for name in one:
        assert torch.equal(one[name], other[name]), name


def test_sigterm_saves_and_the_same_command_goes_on(whole, tokens, tmp_path):
    out, rows = tmp_path / "out", []

    def look():
        while not rows:
            rows.extend((out / "log.jsonl").read_text() if (out / "log.jsonl").exists() else "")
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=look).start()
    options = ["--out", out, "--data", tokens, *SMALL]
    done = run_here(PROGRAM, *options)
    assert done.returncode == 1
    step = int(re.search(r"saved after step (\d+); the same command goes on", done.stderr)[1])
    assert 2 <= step < 20
    assert f"from step {step}\n" in run(out, tokens).stdout
    assert_equal(out, whole)


def test_a_run_goes_on_only_as_it_began_and_in_a_folder_of_its_own(whole, tokens, tmp_path):
    cases = [
        ([whole, "--lr", 0.1], "lr was 0.003, now 0.1. Go on as it began, or name a new folder"),
        ([whole, "--steps", 30], "steps was 20, now 30"),
        ([whole, "--seed", 1], "seed was 0, now 1"),
        ([tokens.parent], "holds no run of this program: name a new folder"),
        ([tmp_path, "--parallel", "ddp"], "start none with python, the others with torchrun"),
        ([tmp_path, "--width", 20], "--width must be a multiple of 2 x --heads 4"),
        ([tmp_path, "--heads", 1], "--heads must be a multiple of --kv-heads 2"),
        ([tmp_path, "--batch", 0], "--batch must be at least 1"),
        ([tmp_path, "--data", PROGRAM], "no .npy of more than --context numbers from 0 in one dim"),
        ([tmp_path, "--context", 5000], "--batch 24: the data has 1 sequences"),
    ]
    before = sorted(whole.rglob("*"))
    for (out, *options), sentence in cases:
        done = run_here(PROGRAM, "--out", out, "--data", tokens, *SMALL, *options)
        assert done.returncode == 1
        assert sentence in done.stderr.splitlines()[-1], sentence
        assert "pickle" not in done.stderr
    assert sorted(whole.rglob("*")) == before
    assert not list(tmp_path.iterdir())
    few = ["--out", tmp_path / "few", "--data", tokens, *SMALL, "--vocabulary", 7]
    assert "--vocabulary 7: the data has the id 7" in run_here(PROGRAM, *few).stderr


@pytest.mark.slow
def test_two_runs_in_one_folder_never_mix_whichever_is_first(tokens, tmp_path):
    """The lock is the one of `torchladder.training.train`."""
    options = ["--out", tmp_path, "--data", tokens, *SMALL]
    with sole_use(tmp_path):
        done = run_here(PROGRAM, *options)
        assert f"process {os.getpid()} on {socket.gethostname()}, since 2" in done.stderr
        assert "is writing there. End it first, or name a new folder" in done.stderr
    assert not list(tmp_path.iterdir())
    ours = [sys.executable, PROGRAM, *map(str, [*options, "--steps", 10**6])]
    with subprocess.Popen(ours, stderr=subprocess.DEVNULL, stdout=subprocess.DEVNULL) as first:
        try:
            wait_until((tmp_path / "settings.json").exists, limit=500)
            with pytest.raises(BlockingIOError, match=f"ss {first.pid} on"), sole_use(tmp_path):
                pass
            assert "is writing there" in run_here(PROGRAM, *options, "--steps", 10**6).stderr
        finally:
            first.kill()
    with sole_use(tmp_path):
        pass


def test_a_run_that_diverges_saves_nothing_and_a_file_of_the_users_stays(tokens, tmp_path):
    options = ["--out", tmp_path / "out", "--data", tokens, *SMALL, "--save-every", 2]
    done = run_here(PROGRAM, *options, "--lr", 1e38, "--log-every", 20)
    assert "it diverged, and is not saved. Try a lower --lr" in done.stderr
    assert not list((tmp_path / "out").glob("step-*"))
    done = run_here(PROGRAM, *options, "--lr", 1e38, "--draw", tmp_path / "a.txt")
    assert "--draw: no checkpoint in --out" in done.stderr
    options[1] = tmp_path / "new"
    notes = tmp_path / "new" / "step-00000002" / "notes.txt"
    with mock.patch("torch.distributed.checkpoint.async_save", noting(notes)):
        assert run_here(PROGRAM, *options).returncode == 0
    left = sorted(path.name for path in (tmp_path / "new").glob("step-*"))
    assert left == ["step-00000002", "step-00000018", "step-00000020"]
    assert [path.name for path in notes.parent.iterdir()] == ["notes.txt"]


def noting(notes):
    """`async_save` that lets somebody put a file into the first checkpoint's folder."""
    save = torch.distributed.checkpoint.async_save

    def noted(state, checkpoint_id, **options):
        if checkpoint_id == notes.parent:
            notes.parent.mkdir()
            notes.write_text("mine")
        return save(state, checkpoint_id=checkpoint_id, **options)

    return noted


def new_model(gpt, **options):
    args = {name: default for name, (default, _) in gpt.OPTIONS.items()}
    args |= {"vocabulary": 26, "kv_heads": 4, "precision": "fp32", "parallel": "none"}
    args["device"] = torch.device("cpu")
    args = SimpleNamespace(**args | options)
    model = gpt.GPT(args)
    model.initialize(0)
    return model, args


@pytest.mark.parametrize("options", [{}, {"kv_heads": 2}, {"kv_heads": 1, "tied": True}])
def test_with_a_cache_a_token_gets_the_scores_that_it_gets_without(gpt, options):
    model, _ = new_model(gpt, **options)
    tokens, caches = torch.randint(26, (2, 20)), [[] for _ in model.blocks]
    with torch.inference_mode():
        whole = model.eval()(tokens)
        parts = [model(part, caches) for part in tokens.split([5, *[1] * 15], dim=1)]
    torch.testing.assert_close(torch.cat(parts, dim=1), whole, rtol=1e-4, atol=1e-5)
    heads = options.get("kv_heads", 4)
    assert [tuple(key.shape) for key, _ in caches] == [(2, heads, 20, 16)] * 3


def test_no_score_depends_on_a_later_token_and_learning_beats_guessing(gpt):
    model, args = new_model(gpt, layers=2, width=32, batch=16, steps=60, data=gpt.CLOTHES)
    train, held_out = gpt.read_sequences(args)
    assert (train.shape, held_out.shape, args.vocabulary) == ((12_000, 197), (2_000, 197), 26)
    assert train[:, 1:].max() < gpt.GREYS <= train[:, 0].min()  # no grey is a class
    tokens = torch.from_numpy(held_out[:64].astype(int))
    other = torch.cat([tokens[:, :100], tokens[:, 100:].flip(0)], dim=1)
    with torch.inference_mode():
        assert torch.equal(model(tokens)[:, :100], model(other)[:, :100])
        assert gpt.loss_of(model, tokens, args) > 3
    optimizer = torch.optim.AdamW(model.parameters(), 3e-3)
    for batch in gpt.batches(train, args, 0, 0, 1):
        gpt.loss_of(model, batch, args).backward()
        optimizer.step()
        optimizer.zero_grad()
    with torch.inference_mode():
        assert gpt.loss_of(model, tokens, args) < 2.2


def test_each_pair_is_turned_by_its_own_angle(gpt):
    """As complex numbers times e^(i * place / 10,000^(k/n)), https://arxiv.org/abs/2104.09864."""
    x, place = torch.randn(2, 5, 8, dtype=torch.float64), torch.arange(5)
    angles = place[:, None] / 10_000 ** (torch.arange(4) / 4)
    turned = torch.complex(x[..., :4], x[..., 4:]) * torch.exp(1j * angles)
    right = torch.cat([turned.real, turned.imag], dim=-1)
    torch.testing.assert_close(gpt.rotated(x, place), right, rtol=1e-5, atol=1e-5)


def test_the_flops_are_those_that_pytorch_counts(gpt):
    # PyTorch 2.10 does not count a CPU's fused attention.
    for options in ({}, {"recompute": True, "kv_heads": 2}):
        model, args = new_model(gpt, **options)
        tokens = torch.randint(26, (2, 197))
        with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counted:
            gpt.loss_of(model, tokens, args).backward()
        needed, computed = gpt.flops_of(args, model)
        assert counted.get_total_flops() == computed * 2 * 196
        assert (computed > needed) == bool(options)


@pytest.mark.slow
def test_a_sharded_model_draws_what_a_whole_one_draws(gpt):
    first, sure = torch.arange(10)[:, None], {"count": 20, "ids": 26, "temperature": 1e-4}

    def drawn():
        program = SimpleNamespace(**runpy.run_path(str(PROGRAM), run_name="read"))
        model, args = new_model(program, parallel="fsdp", ranks=2)
        return program.generate(program.parallelize(model, args), first, **sure)

    whole = gpt.generate(new_model(gpt)[0], first, **sure)
    assert len(whole.unique()) > 5
    assert all(torch.equal(part, whole) for part in launch(drawn, timeout=300))


@pytest.mark.slow
def test_the_drawing_is_a_sheet_of_each_class_and_can_be_made_again(gpt, tmp_path):
    options = ["--out", tmp_path / "out", "--layers", 1, "--width", 16, "--steps", 2, "--peak", 1]
    assert run_here(PROGRAM, *options).returncode == 0
    sheet = (tmp_path / "out" / "drawing.png").read_bytes()
    assert run_here(PROGRAM, *options, "--draw", tmp_path / "again.png").returncode == 0
    assert (tmp_path / "again.png").read_bytes() == sheet
    assert Image.open(tmp_path / "again.png").size == (4 * 10 * 14, 4 * 8 * 14)
