"""The cells of chapter 14 that people copy, on what that page does not show."""

import json
from pathlib import Path

import pytest
import torch
from kinds_of_files import Counting, safetensors_file, state
from safetensors.torch import load_file
from torch import nn

CELLS = json.loads(Path("notebooks/14_checkpoints_across_rungs.ipynb").read_text())["cells"]


def defined(name):
    """A function as its cell defines it."""
    (cell,) = (c for c in CELLS if f"def {name}(" in "".join(c["source"]))
    code = "".join(cell["source"]).partition("\n\n\nsize = ")[0]
    names = {"torch": torch, "json": json, "Path": Path, "load_file": load_file}
    exec(code, names)
    return names[name]


def test_a_folder_with_one_file_has_no_index(tmp_path):
    safetensors_file(tmp_path)
    assert defined("load_sharded")(tmp_path, torch.float32).keys() == state().keys()


def test_extra_state_is_not_converted():
    found = defined("converted")(Counting(7).state_dict(), torch.bfloat16)
    assert found["_extra_state"] == {"seen": 7}
    assert found["weight"].dtype == torch.bfloat16


def test_a_whole_training_file_is_no_state_dict():
    model = nn.Linear(2, 1)
    saved = {"state_dict": model.state_dict(), "epoch": 1}
    with pytest.raises(ValueError, match=r"Take one of \['state_dict'\]"):
        defined("stripped")(saved, model)
    extra = Counting(7)
    assert defined("stripped")(extra.state_dict(), extra).keys() == extra.state_dict().keys()
