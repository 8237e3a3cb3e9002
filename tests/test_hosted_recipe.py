"""What the pages on Kaggle tell readers to copy works where they copy it to."""

import os
import re
import shutil

import pytest
import torch
from PIL import Image
from running import ROOT
from test_rungs import run_on_ranks

PAGE = ROOT / "book" / "hosted.md"


@pytest.mark.slow
def test_a_second_session_goes_on_where_the_first_one_stopped(tmp_path):
    (program,) = re.findall(r"```python\n(import os\n.*?)```", PAGE.read_text(), re.S)
    program = program.replace("(224)", "(32)").replace("batch_size=64", "batch_size=2")
    for flower in ("input/set/flowers/train/rose", "input/set/flowers/train/tulip"):
        (tmp_path / flower).mkdir(parents=True)
        for i in range(4):
            Image.new("RGB", (40, 40), (60 * i, 0, len(flower))).save(
                tmp_path / flower / f"{i}.png"
            )
    program = program.replace("/kaggle/input", f"{tmp_path}/input").replace(", 60, 8", ", 3, 8")
    begins, whole, second = [], tmp_path / "whole", tmp_path / "second"
    for working in (whole, second):
        working.mkdir()
        (tmp_path / "train.py").write_text(program.replace("/kaggle/working", str(working)))
        done = run_on_ranks(tmp_path / "train.py")
        assert done.returncode == 0, done.stderr
        begins.append(done.stdout.splitlines()[0])
        if working == whole:  # as if it had ended after two epochs; its output is the next's input
            assert sorted(os.listdir(whole)) == ["epoch_0002.pt", "epoch_0003.pt"]
            shutil.move(whole / "epoch_0002.pt", tmp_path / "input")
    found = f"{tmp_path}/input/epoch_0002.pt"
    assert begins == ["epoch 1 of 3, from None", f"epoch 3 of 3, from {found}"]
    assert os.listdir(second) == ["epoch_0003.pt"]
    one, other = (torch.load(folder / "epoch_0003.pt")["net"] for folder in (whole, second))
    assert all(torch.equal(one[key], other[key]) for key in one)
