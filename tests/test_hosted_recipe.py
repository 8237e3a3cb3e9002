"""The program of the page on Kaggle goes on from an attached output that it may not change."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from PIL import Image

PAGE = Path(__file__).parents[1] / "book" / "hosted.md"


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
    ends = []
    # The first session is over after two of four epochs; its output is the next one's input.
    for epochs, working in (2, "input/run"), (4, "second"), (4, "whole"):
        (tmp_path / working).mkdir()
        text = program.replace("/kaggle/input", str(tmp_path / "input")).replace(
            ", 60, 8", ", 4, 8"
        )
        text = text.replace("/kaggle/working", str(tmp_path / working))
        text = text.replace("range(first, EPOCHS)", f"range(first, {epochs})")
        (tmp_path / "train.py").write_text(text)
        torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
        done = subprocess.run(
            [*torchrun, "--nproc-per-node=2", "train.py"], cwd=tmp_path, capture_output=True,
            text=True, timeout=200, env=os.environ | {"OMP_NUM_THREADS": "1"},
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        # Before PyTorch 2.12, gloo's announcements come first.
        goes_on = next(line for line in done.stdout.splitlines() if line.startswith("epoch "))
        ends.append((goes_on, *sorted(os.listdir(tmp_path / working))))
        if working == "second":
            (tmp_path / "input/run").rename(tmp_path / "first")
    assert ends[1][0] == f"epoch 3 of 4, from {tmp_path}/input/run/epoch_0002.pt"
    assert ends[1][1:] == ends[2][1:] == ("epoch_0003.pt", "epoch_0004.pt")
    assert sorted(os.listdir(tmp_path / "first")) == ["epoch_0001.pt", "epoch_0002.pt"]
    one, other = (torch.load(tmp_path / w / "epoch_0004.pt")["net"] for w in ("second", "whole"))
    assert all(torch.equal(one[key], other[key]) for key in one)
