"""The cells of chapter 14 that people copy, on what that page does not show."""

import json
import re
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from kinds_of_files import Counting, one_rank, safetensors_file, state
from safetensors.torch import load_file  # noqa: F401 - for the cells, as the next two
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DataParallel, DistributedDataParallel  # noqa: F401
from torch.optim.swa_utils import AveragedModel

CELLS = json.loads(Path("notebooks/14_checkpoints_across_rungs.ipynb").read_text())["cells"]


def defined(name, **known):
    """A function as its cell defines it."""
    (cell,) = (c for c in CELLS if f"def {name}(" in "".join(c["source"]))
    code = re.split(r"\n\n\n(?=size = |wrapped = )", "".join(cell["source"]))[0]
    exec(code, names := globals() | known)
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


def test_a_model_that_is_wrapped_already_is_refused():
    model = nn.Linear(2, 1)
    saved, part = model.state_dict(), nn.Sequential(torch.compile(model))
    for wrapped in (torch.compile(model), part):
        with pytest.raises(ValueError, match="load first, then wrap"):
            defined("stripped")(saved, wrapped)


def test_two_models_in_one_state_dict_are_refused():
    model = nn.Linear(2, 1)
    both = model.state_dict() | {f"_orig_mod.{k}": t for k, t in model.state_dict().items()}
    with pytest.raises(ValueError, match="two models"):
        defined("stripped")(both, model)


def test_a_compiled_part_and_an_average_become_portable_and_tied_weights_stay_so():
    model = nn.Sequential(nn.Linear(2, 2), torch.compile(nn.Linear(2, 2)))
    model[1].weight = model[0].weight
    found = defined("portable", plain=defined("plain"))(AveragedModel(model))
    assert list(found) == ["0.weight", "0.bias", "1.weight", "1.bias"]
    assert found["0.weight"] is found["1.weight"]


def test_a_rank_does_not_save_its_own_rows_alone_as_the_whole_model():
    with one_rank():
        model = fully_shard(nn.Linear(2, 1), mesh=dist.init_device_mesh("cpu", (1,)))
        with pytest.raises(ValueError, match="its own rows"):
            defined("portable", plain=defined("plain"))(model)
