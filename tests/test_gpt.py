"""`rungs/gpt.py` computes the same on every rung, and goes on from any moment on any other."""

import contextlib
import errno
import itertools
import json
import logging
import math
import os
import random
import re
import runpy
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import numpy as np
import pytest
import torch
from PIL import Image
from running import ROOT, wait_until
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from test_rungs import WITHOUT_GPUS, run_here, run_on_ranks
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from torchclinic.writing import sole_use
from torchladder.launching import LaunchError, launch

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
    usual = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
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
    for rows in (1, 5):  # of the log; then at some moment
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

killer = threading.Thread(target=kill, daemon=True)
if os.environ["RANK"] == "1":
    killer.start()
runpy.run_path({program!r}, run_name="__main__")
if killer.is_alive():
    killer.join()  # a fast machine may have trained to the end by then
"""


def assert_equal(out, other):
    one, other = (load_file(folder / "weights.safetensors") for folder in (out, other))
    assert one.keys() == other.keys()
    for name in one:
        assert torch.equal(one[name], other[name]), name


def test_sigterm_saves_and_the_same_command_goes_on(whole, tokens, tmp_path):
    out, steps, clip = tmp_path / "out", itertools.count(1), torch.nn.utils.clip_grad_norm_

    def told(*given):
        if next(steps) == 7:
            os.kill(os.getpid(), signal.SIGTERM)
        return clip(*given)

    with mock.patch("torch.nn.utils.clip_grad_norm_", told):
        done = run_here(PROGRAM, "--out", out, "--data", tokens, *SMALL)
    assert done.returncode == 1
    assert "saved after step 7; the same command goes on" in done.stderr
    assert "from step 7\n" in run(out, tokens).stdout
    assert_equal(out, whole)
    for step, both in losses(whole).items():  # means over the same steps
        assert losses(out)[step] == pytest.approx(both, rel=1e-6)
    assert len((out / "log.jsonl").read_text().splitlines()) == 10


def test_signals_end_the_drawing(tokens, tmp_path):
    numbers, seen = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP), []
    usual, multinomial = [signal.getsignal(number) for number in numbers], torch.multinomial

    def look(*given, **options):
        seen.append([signal.getsignal(number) for number in numbers])
        return multinomial(*given, **options)

    with mock.patch("torch.multinomial", look):
        run(tmp_path, tokens, "--steps", 1)
    usual[1] = signal.SIG_DFL if usual[1] == signal.default_int_handler else usual[1]
    assert seen[0] == usual


def test_a_run_goes_on_only_as_it_began_and_in_a_folder_of_its_own(whole, tokens, tmp_path):
    base, other = whole / "weights.safetensors", tokens.with_name("other.npy")
    np.save(other, np.load(tokens)[::-1])
    cases = [
        ([whole, "--lr", 0.1], "lr was 0.003, now 0.1. Go on with the options, --data and --"),
        ([whole, "--steps", 30], "steps was 20, now 30"),
        ([whole, "--seed", 1], "seed was 0, now 1"),
        ([whole, "--data", other], "checksum was "),
        ([tokens.parent], "holds no run of this program: name a new folder"),
        ([tmp_path, "--parallel", "ddp"], "start none with python, the others with torchrun"),
        ([tmp_path, "--width", 20], "--width must be a multiple of 2 x --heads 4"),
        ([tmp_path, "--heads", 1], "--heads must be a multiple of --kv-heads 2"),
        ([tmp_path, "--batch", 0], "--batch must be from 1 to 1000000000, not 0"),
        ([tmp_path, "--lr", "nan"], "--lr must be from 1e-12 to 1e+38, not nan"),
        ([tmp_path, "--clip", -1], "--clip must be from 1e-12 to inf, not -1.0"),
        ([tmp_path, "--lr", "fast"], "argument --lr: invalid float value: 'fast'. --help lists"),
        ([tmp_path, "--lora", 4], "--lora changes weights: name their file as --base"),
        ([tmp_path, "--base", PROGRAM], "--export of this program has not written it"),
        ([tmp_path, "--data", tmp_path], "(no such file): no .npy of more than"),
        ([PROGRAM], "rungs/gpt.py: File exists. Name a writable folder"),
        ([tmp_path / "out", "--export", tokens.parent], "name a .safetensors file that is new or"),
        (
            [tmp_path / "out", "--export", tmp_path / f"{'a' * 240}.safetensors"],
            "File name too long",
        ),
        ([tmp_path, "--base", base, "--layers", 1], "--base: layers must be as in"),
        ([tmp_path, "--base", base, "--heads", 2], "--base: heads must be as in"),
        ([tmp_path, "--context", 0], "--context must be from 1 to 1000000000, not 0"),
        ([tmp_path, "--data", PROGRAM], "no .npy of more than --context whole numbers from 0 in"),
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
    # It had not begun: the corrected command does.
    assert run_here(PROGRAM, *few[:-1], 9, "--steps", 2).returncode == 0


def test_a_folder_with_other_settings_is_left_as_it_is(tokens, tmp_path):
    mine = {"settings.json": '{"editor.tabSize": 4}', "log.jsonl": "mine\n", "drawing.txt": "mine"}
    for name, text in mine.items():
        (tmp_path / name).write_text(text)
    done = run_here(PROGRAM, "--out", tmp_path, "--data", tokens, *SMALL)
    assert "holds no run of this program: name a new folder" in done.stderr
    assert {path.name: path.read_text() for path in tmp_path.iterdir()} == mine


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
    for harm in (lambda path: path.write_text("{"), lambda path: path.unlink()):
        harm(tmp_path / "settings.json")
        done = run_here(PROGRAM, "--out", tmp_path, "--data", tokens, *SMALL)
        assert "settings.json is missing or damaged. Take it from a backup, or: " in done.stderr


@pytest.fixture
def begin(gpt, tokens, tmp_path, monkeypatch):
    """What `find_start` finds for a run with these options, which then ends."""

    def start(*options):
        given = ["gpt.py", "--out", tmp_path / "out", "--data", tokens, *SMALL, *options]
        monkeypatch.setattr(sys, "argv", list(map(str, given)))
        args = gpt.parse()
        args.lock, args.ranks = None, 1
        gpt.read_and_check(args)
        found = gpt.find_start(args)
        if args.lock:
            args.lock.close()
        return found

    return start


def checkpoint(out, *names):
    (step := out / "step-00000010").mkdir()
    for name in names:
        (step / name).touch()


def test_a_copy_without_hidden_files_is_not_begun_again(begin, tmp_path, capsys):
    begin()
    checkpoint(tmp_path / "out", "__0_0.distcp")  # killed in the first save
    assert "seed was 0, now 1; step-00000010 has no .metadata. Go on" in begin("--seed", 1)
    assert begin() == []
    assert capsys.readouterr().out == "step-00000010 has no .metadata\n"
    (tmp_path / "out" / ".run.lock").unlink()
    for _ in range(2):
        assert "has no .metadata. Copy it again, with hidden files, or name a new" in begin()


def exported(file, layers="3"):
    """A file with the options that `--export` writes."""
    options = {"layers": layers, "heads": "4", "kv_heads": "4", "tied": "false"}
    save_file({"a": torch.ones(1)}, file, options | {"width": "64", "vocabulary": "8"})


@pytest.mark.timeout(60)
@pytest.mark.parametrize("name", ["settings.json", "log.jsonl", ".run.lock"])
def test_a_pipe_or_a_link_in_its_folder_is_no_run(begin, name, tmp_path):
    begin()
    checkpoint(out := tmp_path / "out", ".metadata")
    (out / name).unlink(missing_ok=True)
    os.mkfifo(out / name)
    assert begin().endswith(f"{name} is a link, a pipe or a device. Name a new folder")
    (out / name).unlink()
    (out / name).symlink_to("/dev/zero")
    assert "is a link" in begin()
    (out / name).unlink()
    (out / "step-00000020").symlink_to("step-00000010")  # it would be emptied, later
    assert "step-00000020 is a link" in begin()


def test_codes_of_terminals_in_a_path_are_not_said(gpt, capsys):
    gpt.say("a\nb\x1b[31m")
    assert capsys.readouterr().out == "a?b?[31m\n"
    with pytest.raises(SystemExit, match=r"c\?d"):
        gpt.leave("c\x9bd")


@pytest.mark.parametrize(("kind", "layers"), [(torch.int8, "1"), (torch.float32, "3000")])
def test_a_base_of_another_dtype_or_without_its_layers_is_refused(kind, layers, tokens, tmp_path):
    options = {"layers": layers, "heads": "4", "kv_heads": "4", "tied": "false", "width": "64"}
    weights = {"a": torch.ones(1, dtype=kind), "b": torch.ones(1)}
    save_file(weights, tmp_path / "base", options | {"vocabulary": "256"})
    given = ["--out", tmp_path / "out", "--base", tmp_path / "base", "--data", tokens]
    done = run_here(PROGRAM, *given, "--context", 16, "--batch", 8, "--lora", 1)
    assert f"base: no weights of {layers} layers in F32, F16 or BF16 alone\n" in done.stderr


def test_export_replaces_only_what_it_wrote(begin, tmp_path):
    names = ["pipe", "foreign", "text", "base", "new", "own"]
    pipe, foreign, text, base, new, own = (tmp_path / f"{name}.safetensors" for name in names)
    os.mkfifo(pipe)
    save_file({"a": torch.ones(1)}, foreign)
    text.write_text("mine")
    exported(base)
    exported(own)
    begin()
    checkpoint(tmp_path / "out", ".metadata")
    step = tmp_path / "out" / "step-00000010"
    for path in (pipe, foreign, text, base, step / ".metadata", step / "new.safetensors"):
        shape = ["--layers", 3, "--width", 64, "--kv-heads", 4]
        assert "that --export wrote: not --base" in begin("--export", path, "--base", base, *shape)
    assert [*step.iterdir()] == [step / ".metadata"]
    for path in (new, own):
        assert begin("--export", path) == [10]


@pytest.mark.parametrize("layers", ["[1]", "3.0", "[" * 10**5, "x"])
def test_a_base_with_options_of_another_kind_is_none(gpt, tmp_path, layers):
    exported(tmp_path / "base", layers)
    assert gpt.read_base(tmp_path / "base") == (None, {})


def test_a_path_that_is_no_utf8_can_be_a_base_and_be_said(gpt, tmp_path, monkeypatch, capsys):
    exported(base := tmp_path / os.fsdecode(b"\xff.safetensors"))
    assert gpt.read_base(base)[1]["layers"] == 3
    monkeypatch.setattr(sys, "argv", ["gpt.py", "--out"])
    with pytest.raises(SystemExit):
        runpy.run_path(str(PROGRAM), run_name="__main__")
    gpt.say("\udcff")
    assert capsys.readouterr().out == "\\udcff\n"
    monkeypatch.setattr(sys, "stdout", None)  # closed, as by >&-
    with pytest.raises(SystemExit):
        runpy.run_path(str(PROGRAM), run_name="__main__")


def test_a_run_that_came_and_went_while_another_waited_is_seen(gpt, begin, tmp_path, monkeypatch):
    def late(args):
        monkeypatch.setitem(gpt.find_start.__globals__, "hold", hold)
        assert begin("--seed", 7) == []
        checkpoint(tmp_path / "out", "__0_0.distcp", ".metadata")
        return hold(args)

    hold = gpt.hold
    monkeypatch.setitem(gpt.find_start.__globals__, "hold", late)
    assert "seed was 7, now 0. Go on with the" in begin()
    assert json.loads((tmp_path / "out" / "settings.json").read_text())["seed"] == 7


def test_the_help_says_of_each_option_what_it_is_and_whether_it_is_fixed(gpt, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["gpt.py", "--help"])
    with pytest.raises(SystemExit):
        gpt.parse()
    told = " ".join(capsys.readouterr().out.split())
    assert "--clip CLIP highest norm of the gradients (1.0; fixed once a run has begun) --" in told
    assert "--log-every LOG_EVERY steps between two lines and validations (50) --" in told


def test_what_is_of_no_option_s_type_in_the_settings_is_not_taken(gpt, tmp_path, monkeypatch):
    for text, taken in {
        "[1]": {},
        "[" * 10**5: {},
        '{"micro": [1], "lr": 0.1}': {"lr": 0.1},
    }.items():
        (tmp_path / "settings.json").write_text(text)
        assert gpt.settings_of(tmp_path) == taken
    (tmp_path / "settings.json").write_text('{"parallel": "dpp", "precision": "fp", "lr": 0.1}')
    monkeypatch.setattr(sys, "argv", ["gpt.py", "--out", str(tmp_path)])
    args = gpt.parse()
    assert (args.parallel, args.precision, args.lr) == ("none", "auto", 0.1)


def test_rows_of_the_log_that_are_damaged_are_left_out(gpt, tmp_path):
    log, rows = tmp_path / "log.jsonl", ['{"step": 2, "loss": 1.0}\n', '{"step": 4, "loss": 1.0}\n']
    log.write_bytes(b'\0\xff}\n{"step": "x"}\n' + "".join(rows).encode() + b'{"step": 2, "lo')
    gpt.cut_log(SimpleNamespace(out=tmp_path), 2)
    assert log.read_text() == rows[0]


def usual(gpt, **options):
    """The options of a run, but for these."""
    args = {name: default for name, (default, _) in gpt.OPTIONS.items()}
    return SimpleNamespace(
        **args | {"kv_heads": 4, "shape": {}, "base": None, "ranks": 1} | options
    )


def test_data_that_cannot_be_right_is_refused_in_one_sentence(gpt, tokens, tmp_path):
    clothes = {name: array[:40] for name, array in np.load(gpt.CLOTHES).items()}
    np.savez(right := tmp_path / "right.npz", **clothes)
    changed = {
        "float": {"train_images": clothes["train_images"] / 255},
        "label": {"test_labels": clothes["test_labels"] + 9},
        "empty": {"test_images": clothes["test_images"][:0], "test_labels": np.arange(0)},
    }
    for name, arrays in changed.items():
        np.savez(tmp_path / f"{name}.npz", **(clothes | arrays))
    (tmp_path / "cut.npz").write_bytes(right.read_bytes()[:3000])
    black = {"train_images": np.zeros((20_000, 28, 28), np.uint8), "train_labels": np.zeros(20_000)}
    np.savez_compressed(tmp_path / "bomb.npz", **clothes | black)
    shutil.copy(tokens, tmp_path / "npy.npz")
    os.mkfifo(tmp_path / "pipe.npz")
    assert len(gpt.read_and_check(usual(gpt, data=right))) == 2
    for name in [*changed, "cut", "bomb", "npy", "pipe"]:
        said = gpt.read_and_check(usual(gpt, data=tmp_path / f"{name}.npz"))
        assert re.search(r"no .npy of .* nor .npz of uint8 pictures", said)
    assert "pipe.npz (no such file): no .npy" in said


@pytest.mark.parametrize("high", [5 * 10**12, 2**64 - 1])
@pytest.mark.parametrize("place", [100, -100])  # -100 is held out
def test_an_id_that_is_too_high_is_said_before_training_wherever_it_is(
    gpt, tokens, tmp_path, place, high
):
    ids = np.load(tokens).astype(np.uint64)
    ids[place] = high
    np.save(tmp_path / "high.npy", ids)
    for vocabulary, said in {0: "ids must be below 10,000,000", 8: f"has the id {high}"}.items():
        args = usual(gpt, vocabulary=vocabulary, data=tmp_path / "high.npy", context=16)
        assert said in gpt.read_and_check(args)


def test_a_base_of_the_same_shape_is_known_by_its_numbers(gpt, tokens, tmp_path):
    sums = set()
    for other in (b"\0", b"\1"):
        (tmp_path / "base").write_bytes(bytes(50_500) + other + bytes(40_000))
        args = usual(gpt, base=tmp_path / "base", shape={"lora": 0}, data=tokens, context=16)
        gpt.read_and_check(args)
        sums.add(args.checksum)
    assert len(sums) == 2


def gathered(every, mine):
    """`all_gather_object` of one rank."""
    every[0] = mine


def test_what_damaged_a_checkpoint_is_said_without_the_advice_that_follows(gpt):
    error = RuntimeError("Weights only load failed. In PyTorch 2.6, we changed the default")
    assert gpt.reason_of(error) == "RuntimeError: Weights only load failed"


def test_a_full_disk_is_said_with_the_folder(gpt, tmp_path, monkeypatch):
    full = mock.Mock(side_effect=OSError(errno.ENOSPC, "No space left on device"))  # no file's name
    stand_ins = {"find_start": full, "dist": mock.Mock(all_gather_object=gathered)}
    stand_ins["read_and_check"] = lambda args: (None, None)
    for name, stand_in in stand_ins.items():
        monkeypatch.setitem(gpt.run.__globals__, name, stand_in)
    sentence = f"{tmp_path}: No space left on device. Name a writable folder"
    with pytest.raises(SystemExit, match=re.escape(sentence)):
        gpt.run(usual(gpt, vocabulary=26, rank=0, out=tmp_path, weights=None))


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


def test_a_checksum_sees_what_has_moved_and_is_that_of_its_parts(gpt):
    one = torch.randn(6, 5)
    other, places = one.clone(), [0, 1, 2, 4, 3, 5]
    parts = gpt.sum_of(one[:4], 0) + gpt.sum_of(one[4:], 20)
    assert gpt.sum_of(one, 0) == parts != gpt.sum_of(one[places], 0)
    bits = other.view(torch.int32)
    bits[0, 0], bits[0, 1] = bits[0, 0] + 1, bits[0, 1] - 1
    assert gpt.sum_of(other, 0) != parts


def test_a_checkpoint_of_another_step_or_run_is_none_of_this_run(whole, tokens, tmp_path):
    out, other = shutil.copytree(whole, tmp_path / "out"), tmp_path / "other"
    run(other, tokens, "--seed", 1)
    shutil.copytree(out / "step-00000010", out / "step-00000019")
    shutil.rmtree(out / "step-00000020")
    shutil.copytree(other / "step-00000020", out / "step-00000020")
    stdout = run(out, tokens).stdout
    assert stdout.count("ValueError: it is another run's, or another step's): it is") == 2
    assert "from step 10\n" in stdout
    assert_equal(out, whole)


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


@pytest.mark.slow
def test_ranks_agree_on_which_checkpoint_is_damaged(tokens, tmp_path):
    """A shard that one rank alone reads."""
    run(tmp_path / "whole", tokens, parallel="fsdp")
    out = shutil.copytree(tmp_path / "whole", tmp_path / "out")
    shard = out / "step-00000020" / "__1_0.distcp"
    data = bytearray(shard.read_bytes())
    data[len(data) // 2 : len(data) // 2 + 400] = bytes(400)
    shard.write_bytes(data)
    assert "from step 10\n" in run(out, tokens, parallel="fsdp").stdout
    assert_equal(out, tmp_path / "whole")


def test_a_lock_of_another_host_holds_as_long_as_it_lives(gpt, tmp_path):
    lock = tmp_path / ".run.lock"
    lock.write_text("process 1 on elsewhere, since 2026-01-01 00:00:00")
    args = SimpleNamespace(out=tmp_path)
    said = r"1 on elsewhere, since 2026-01-01 00:00:00, last heard of \d+ s ago"
    assert re.search(said, gpt.hold(args))
    os.utime(lock, (1e9, 1e9))
    assert gpt.hold(args) is None
    wait_until(lambda: time.time() - lock.stat().st_mtime < 600)
    assert f"process {os.getpid()} on" in gpt.hold(SimpleNamespace(out=tmp_path))
    args.lock.close()
    lock.write_text("my own notes")
    assert gpt.hold(args) == "its .run.lock is not of this program"
    assert lock.read_text() == "my own notes"


@pytest.mark.slow
def test_rank_0_says_what_is_wrong_though_another_is_there_first(tmp_path):
    """torchrun ends all ranks when the first has ended."""
    late = f"[ $RANK = 0 ] && sleep 2; exec '{sys.executable}' '{PROGRAM}' --lr -1 --out x"
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += ["--nproc-per-node=2", "--no-python", "bash", "-c", late]
    done = subprocess.run(command, capture_output=True, text=True, timeout=500, cwd=tmp_path)
    assert done.stderr.count("--lr must be from 1e-12 to 1e+38, not -1.0") == 1


def test_the_first_rank_of_a_host_says_what_is_wrong_there_alone(tmp_path):
    env = os.environ | {"RANK": "3", "LOCAL_RANK": "0"}  # rank 0, on another host, would wait
    command = [sys.executable, PROGRAM, "--lr", "-1", "--out", "x"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, env=env)
    assert done.stderr == "--lr must be from 1e-12 to 1e+38, not -1.0\n"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("second", "said"),
    [
        ("--lr 0.1 --micro 5", "process 1 has other values of lr, micro than process 0. Give all"),
        ("--data other.npy", "process 1 has other values of checksum than process 0. Give all"),
        ("--data none.npy", "process 1: --data none.npy (no such file): no .npy of more than"),
        ("--out b", "process 1: b/.run.lock, which process 0 made, is not there. Name a folder"),
    ],
)
def test_hosts_that_are_not_in_the_same_run_are_told_before_training(
    tokens, tmp_path, second, said
):
    """A rank is a host here: it has options of its own."""
    text = PROGRAM.read_text()
    (program := tmp_path / "gpt.py").write_text(
        impatient := text.replace("HIDDEN = 60", "HIDDEN = 1")
    )
    assert impatient != text
    np.save(tmp_path / "other.npy", np.load(tokens)[::-1])
    options = ["--out", "a", "--data", tokens, *SMALL]
    own = f"[ $RANK = 1 ] && own='{second}'; exec '{sys.executable}' '{program}' $* $own"
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += ["--nproc-per-node=2", "--no-python", "bash", "-c", own, "_", *map(str, options)]
    env = os.environ | WITHOUT_GPUS | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=500, cwd=tmp_path, env=env
    )
    assert said in done.stderr
    assert "from step 0" not in done.stdout
    assert not list(tmp_path.glob("*/step-*"))


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGHUP, signal.SIGKILL])
def test_ranks_whose_torchrun_is_ended_save_and_end(tokens, tmp_path, number):
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    options = ["--out", tmp_path, "--data", tokens, *SMALL, "--steps", 10**6]
    command += map(str, [PROGRAM, *options])
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    quiet["env"] = os.environ | WITHOUT_GPUS  # there may be only one
    with subprocess.Popen(command, start_new_session=True, **quiet) as torchrun:
        try:
            wait_until((tmp_path / "log.jsonl").exists, limit=500)
            wait_until(lambda: (tmp_path / "log.jsonl").read_text(), limit=500)
            os.kill(torchrun.pid, number)
            wait_until(lambda: not (tmp_path / ".run.lock").read_text(), limit=500)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(torchrun.pid, signal.SIGKILL)
    assert list(tmp_path.glob("step-*/.metadata"))


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


@pytest.mark.parametrize("nohup", [False, True])
def test_a_terminal_that_is_closed_saves_first_and_nohup_trains_on(tokens, tmp_path, nohup):
    options = ["--out", tmp_path, "--data", tokens, *SMALL, "--steps", 10**6]
    log, command = tmp_path / "log.jsonl", [sys.executable, PROGRAM, *map(str, options)]
    terminal, program = os.openpty()
    how = {"stdin": program, "stdout": program, "stderr": program, "start_new_session": True}
    heard = signal.SIG_IGN if nohup else signal.SIG_DFL
    how["preexec_fn"] = lambda: signal.signal(signal.SIGHUP, heard)
    with subprocess.Popen(command, **how) as training:
        try:
            os.close(program)
            wait_until(lambda: log.exists() and log.read_text(), limit=200)
            os.close(terminal)
            training.send_signal(signal.SIGHUP)
            if nohup:
                lines = log.read_text().count("\n")
                wait_until(lambda: log.read_text().count("\n") > lines + 2)
                assert training.poll() is None
            else:
                assert training.wait(200) == 1
                assert list(tmp_path.glob("step-*/.metadata"))
        finally:
            training.kill()


@pytest.mark.slow
def test_adapters_learn_alone_are_saved_alone_and_merge_into_the_weights(whole, tokens, tmp_path):
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


def test_what_cannot_be_written_in_the_end_is_written_elsewhere(gpt, tmp_path, capsys):
    (tmp_path / "no folder").write_text("")
    found = gpt.write_somewhere(tmp_path / "no folder" / "a.txt", lambda path: path.write_text("b"))
    assert found.read_text() == "b"
    assert "cannot be written" in capsys.readouterr().out
    shutil.rmtree(found.parent)
    before = os.umask(0o027)
    try:
        gpt.write(tmp_path / "new.txt", lambda path: path.write_text("b"))
    finally:
        os.umask(before)
    assert (tmp_path / "new.txt").stat().st_mode & 0o777 == 0o640


def test_weights_that_can_be_written_nowhere_are_told_in_one_sentence(tokens, tmp_path):
    full = SafetensorError("I/O error: No space left on device (os error 28)")
    with mock.patch("safetensors.torch.save_file", side_effect=full):
        options = ["--out", tmp_path / "out", "--data", tokens, *SMALL, "--steps", 1]
        done = run_here(PROGRAM, *options, "--export", tmp_path / "weights.safetensors")
    said = "SafetensorError: I/O error: No space left on device (os error 28). Is the disk full"
    assert said in done.stderr
    assert "written to" not in done.stdout


def test_a_run_whose_export_is_elsewhere_ends_with_a_status(tokens, tmp_path):
    def save(weights, path, **options):
        if tmp_path in path.parents:
            raise OSError(errno.ENOSPC, "No space left on device")
        path.write_text("weights")

    with mock.patch("safetensors.torch.save_file", save):
        options = ["--out", tmp_path / "out", "--data", tokens, *SMALL, "--steps", 1]
        done = run_here(PROGRAM, *options, "--export", new := tmp_path / "new.safetensors")
    assert (done.returncode, done.stderr) == (1, f"--export {new} is as it was\n")
    elsewhere = Path(re.search("written to (.+)", done.stdout)[1])
    assert elsewhere.read_text() == "weights"
    shutil.rmtree(elsewhere.parent)


@pytest.mark.slow
def test_two_runs_in_one_folder_never_mix_whichever_is_first(tokens, tmp_path):
    """The lock is the one of `torchladder.training.train`."""
    options = ["--out", tmp_path, "--data", tokens, *SMALL]
    with sole_use(tmp_path):
        done = run_here(PROGRAM, *options)
        assert f"process {os.getpid()} on {socket.gethostname()}, since 2" in done.stderr
        assert "is writing there. Name a new folder, or end it first" in done.stderr
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


def test_more_processes_than_gpus_are_told_in_one_sentence(tmp_path):
    env = os.environ | {"RANK": "0", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "3", "WORLD_SIZE": "3"}
    command = [sys.executable, "-m", "torchclinic", "simulate", "--with-real-gpu", "2"]
    command += [sys.executable, PROGRAM, "--out", "out"]
    env |= {"CUDA_VISIBLE_DEVICES": "0,1"}
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=300, cwd=tmp_path, env=env
    )
    assert done.returncode == 1
    said = "3 processes on a host that has 2 GPU(s): --nproc-per-node=2"
    assert said in done.stderr
    assert "Traceback" not in done.stderr


def test_a_base_that_has_diverged_is_refused(gpt):
    base = mock.Mock(get_tensor=lambda name: torch.full((26, 64), math.nan))
    model, _ = new_model(gpt)
    with pytest.raises(SystemExit, match=r"--base: embedding.weight has numbers that are not fin"):
        model.initialize(0, base)


def test_a_run_that_diverges_saves_nothing_and_a_file_of_the_users_stays(tokens, tmp_path):
    options = ["--out", tmp_path / "out", "--data", tokens, *SMALL, "--save-every", 2]
    done = run_here(PROGRAM, *options, "--lr", 1e38, "--log-every", 20)
    assert "it diverged, and is not saved. Try a lower --lr" in done.stderr
    assert not list((tmp_path / "out").glob("step-*"))
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
    args = {"vocabulary": 26, "precision": "fp32", "parallel": "none"}
    args |= {"device": torch.device("cpu"), "weights": None}
    args = usual(gpt, **args | options)
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
    train, held_out, _ = gpt.read_sequences(args)
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
        model, args = new_model(program, parallel="hsdp", ranks=2, shard=1)
        copy = program.parallelize(model, args).embedding.weight
        assert copy.to_local().shape == copy.shape  # nobody else has a share of it
        model, args = new_model(program, parallel="fsdp", ranks=2)
        return program.generate(program.parallelize(model, args), first, **sure)

    whole = gpt.generate(new_model(gpt)[0], first, **sure)
    assert len(whole.unique()) > 5
    assert all(torch.equal(part, whole) for part in launch(drawn, backend="gloo", timeout=300))


@pytest.mark.slow
def test_the_drawing_is_a_sheet_of_each_class_and_can_be_made_again(gpt, tmp_path):
    options = ["--out", tmp_path / "out", "--layers", 1, "--width", 16, "--steps", 2, "--peak", 1]
    assert run_here(PROGRAM, *options).returncode == 0
    sheet = (drawing := tmp_path / "out" / "drawing.png").read_bytes()
    assert Image.open(drawing).size == (4 * 10 * 14, 4 * 8 * 14)
    drawing.unlink()
    assert run_here(PROGRAM, *options).returncode == 0
    assert drawing.read_bytes() == sheet
