"""The lines of chapter 16 that people copy, on what that page does not show."""

import json
import os
import random
import re
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
import torch
from running import ROOT
from torch import nn

CELLS = json.loads((ROOT / "notebooks/16_resume.ipynb").read_text())["cells"]
SOURCES = ["".join(cell["source"]) for cell in CELLS]


def write(state, path):
    (source,) = (source for source in SOURCES if "def write(" in source)
    exec(source, names := {"os": os, "Path": Path, "torch": torch})
    names["write"](state, path)


class OnTheWay:
    """Calls a function while it is saved."""

    def __init__(self, function):
        self.function = function

    def __reduce__(self):
        self.function()
        return nn.Identity, ()


def test_another_process_may_save_under_the_same_name_at_the_same_time(tmp_path):
    path = tmp_path / "last.pt"

    def other():
        with mock.patch("os.getpid", return_value=-1):
            write({"value": 1}, path)

    write({"value": 2, "other": OnTheWay(other)}, path)
    assert torch.load(path, weights_only=False)["value"] == 2
    assert os.listdir(tmp_path) == ["last.pt"]


def test_a_save_that_fails_leaves_the_old_file_and_no_other(tmp_path):
    path = tmp_path / "last.pt"
    write({"value": 1}, path)
    with pytest.raises(ZeroDivisionError):
        write({"value": 2, "fails": OnTheWay(lambda: 1 / 0)}, path)
    assert torch.load(path)["value"] == 1
    assert os.listdir(tmp_path) == ["last.pt"]


def test_the_bytes_are_on_the_disk_before_the_name_and_the_name_before_the_end(tmp_path):
    done = []
    replace, fsync = os.replace, os.fsync

    def note_sync(fd):
        done.append(
            f"fsync of {os.fstat(fd).st_size}"
            if os.path.isfile(f"/proc/self/fd/{fd}")
            else "fsync of the folder"
        )
        fsync(fd)

    def note_move(old, new):
        done.append(f"move of {os.stat(old).st_size}")
        replace(old, new)

    with mock.patch("os.fsync", note_sync), mock.patch("os.replace", note_move):
        write({"value": torch.ones(9)}, tmp_path / "last.pt")
    size = (tmp_path / "last.pt").stat().st_size
    assert done == [f"fsync of {size}", f"move of {size}", "fsync of the folder"]


def test_every_random_state_that_the_page_names_can_be_loaded_again(tmp_path):
    (text,) = (source for source in SOURCES if "**random state**" in source)
    states = re.findall(r"`([\w.]+(?:state\(\)|\.state))`", text)
    assert len(states) == 3, states
    here = [code for code in states if "mps" not in code]
    names = {"random": random, "np": np, "rng": np.random.default_rng(0), "torch": torch}
    saved = {code: eval(code, names) for code in here}
    torch.save(saved, tmp_path / "states.pt")
    assert torch.load(tmp_path / "states.pt") == saved
