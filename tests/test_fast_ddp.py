"""The capstone of the ladder, ``rungs/4_ddp_fast.py``, on two processes."""

import json
import re

import pytest
import torch
from test_rungs import FAST, few_images, run_here, run_on_ranks

from torchladder import data

pytestmark = pytest.mark.slow


def test_it_trains_says_what_it_waits_for_and_traces_both_ranks(tmp_path):
    options = ["--no-compile", "--epochs", 1, "--workers", 1, "--lr", 0.1, "--report", 40]
    options += ["--data", data.BUNDLED, "--bucket-mb", 0.1, "--trace", tmp_path]
    done = run_on_ranks(FAST.name, *options)
    assert done.returncode == 0, done.stderr
    times = r"data [\d.]+, forward [\d.]+, backward [\d.]+, update [\d.]+ ms per step"
    assert re.findall(rf"step (\d+): {times}, peak [\d,]+ MiB", done.stdout) == ["40", "80"]
    loss, accuracy = re.search(r"epoch 1: loss (\S+), test ([\d.]+)%", done.stdout).groups()
    assert float(loss) < 1.5
    assert float(accuracy) > 65
    for rank in (0, 1):
        events = json.loads((tmp_path / f"rank{rank}.json").read_text())["traceEvents"]
        assert sum(event["name"] == "gloo:all_reduce" for event in events) == 4  # in two steps


def test_two_small_batches_per_step_are_one_of_twice_the_size(tmp_path):
    few, states = few_images(tmp_path, 320), []
    for size, parts in ((32, 1), (16, 2)):
        options = ["--batch-size", size, "--accumulate", parts, "--save", tmp_path / "a.pt"]
        exact = ["--no-compile", "--amp", "no", "--epochs", 1, "--workers", 0, "--warm-up", 2]
        done = run_on_ranks(FAST.name, "--data", few, *options, *exact)
        assert done.returncode == 0, done.stderr
        states.append(torch.load(tmp_path / "a.pt"))
    torch.testing.assert_close(*states, rtol=0, atol=1e-5)


@pytest.mark.long
def test_compiled_it_trains_too(tmp_path):
    options = ["--epochs", 1, "--batch-size", 20, "--workers", 0]
    done = run_on_ranks(FAST.name, "--data", few_images(tmp_path, 400), *options)
    assert done.returncode == 0, done.stderr
    assert re.search(r"\nepoch 1: loss 2\.\d+, test", done.stdout)


def test_bad_input_gets_a_sentence():
    for option, value, sentence in (
        ("--warm-up", 0, "Numbers must be above 0 (of --workers: not below).\n"),
        ("--trace", "no/such", "Cannot write "),
        ("--batch-size", 13_000, f"{data.BUNDLED}: fewer images than one step takes.\n"),
    ):
        done = run_here(FAST.name, "--data", data.BUNDLED, "--workers", 0, option, value)
        assert sentence in done.stderr
