"""Files that other programs wrote are told, also where these programs are not there."""

import re
from pathlib import Path

import pytest
from torch import nn

from torchclinic.checkpoint_files import (
    CheckpointError,
    fix_checkpoint,
    inspect_checkpoint,
    load_into,
)

MADE_BY = Path(__file__).parent / "made_by"
ROWS = re.findall(r"^\| `(.+?)` \|.*\| `(.+?)` \|$", (MADE_BY / "README.md").read_text(), re.M)
WEIGHTS = {"fabric_inside.pt", "ema_pytorch.pt"}
WEIGHTS |= {
    "deepspeed_zero1/global_step1/mp_rank_00_model_states.pt"
}  # the others have to be unpacked or joined first


@pytest.mark.parametrize(("name", "words"), ROWS)
def test_a_file_of_another_program_is_told(name, words, tmp_path):
    try:
        said = repr(inspect_checkpoint(MADE_BY / name))
    except CheckpointError as error:
        said = str(error)
    assert words in " ".join(said.split())
    if name in WEIGHTS:
        fix_checkpoint(MADE_BY / name, tmp_path / "fixed.pt")
    else:
        refused = pytest.raises(CheckpointError, match=re.escape(words))
        with refused:
            fix_checkpoint(MADE_BY / name, tmp_path / "fixed.pt")
        with refused:
            load_into(nn.Linear(2, 1), MADE_BY / name, strict=False)


def test_the_list_has_every_file():
    files = [str(path.relative_to(MADE_BY)) for path in MADE_BY.rglob("*.*") if path.is_file()]
    rows = tuple(name.removesuffix("adapter_model.safetensors") for name, _ in ROWS)
    assert [file for file in files if not file.startswith((*rows, "README"))] == []
