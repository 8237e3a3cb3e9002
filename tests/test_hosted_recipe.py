"""What the pages on Kaggle tell readers to copy works where they copy it to."""

import json
import os
import re
import shutil

import pytest
import torch
from PIL import Image
from running import ROOT
from test_rungs import run_on_ranks

(RECIPE,) = re.findall(
    r"```python\n(import os\n.*?)```", (ROOT / "book/hosted.md").read_text(), re.S
)
CELLS = json.loads((ROOT / "notebooks/both_gpus.ipynb").read_text())["cells"]
TWO_CELLS, _ = ("".join(c["source"][1:]) for c in CELLS if c["source"][0].startswith("%%writefile"))


def run(text, folder, *, fp16, nproc=2):
    """What it prints, computing as on a T4 or not; on each rank dropout draws something else."""
    text = re.sub("fp16 = gpus and .*", "fp16 = gpus = True", text) if fp16 else text
    text = text.replace(" loss =", f" assert torch.is_autocast_enabled('cpu') is {fp16}; loss =")
    draw = f'torch.save(torch.dropout(torch.ones(64), 0.5, True), f"{folder}/{{rank}}.mask")'
    (folder / "train.py").write_text(re.sub(r"( in batches:\n)", rf"\1        {draw}\n", text))
    done = run_on_ranks(folder / "train.py", nproc=nproc)
    assert done.returncode == 0, done.stderr
    assert len({str(torch.load(folder / f"{rank}.mask")) for rank in range(nproc)}) == nproc
    return done.stdout.splitlines()


@pytest.mark.slow
@pytest.mark.parametrize("fp16", [False, True])
def test_the_two_cells_train(fp16, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert float(run(TWO_CELLS, tmp_path, fp16=fp16)[-1].split()[-1]) < 0.2


@pytest.mark.slow
def test_a_second_session_goes_on_where_the_first_one_stopped_also_on_one_gpu_of_another_kind(
    tmp_path,
):
    program = RECIPE.replace("(224)", "(32)").replace("BATCH = 128", "BATCH = 4")
    program += "print(len(batches))\n"
    for flower in ("input/set/flowers/train/rose", "input/set/flowers/train/tulip"):
        (tmp_path / flower).mkdir(parents=True)
        for i in range(4):
            picture = Image.new("RGB", (40, 40), (60 * i, 0, len(flower)))
            picture.save(tmp_path / flower / f"{i}.png")
    program = program.replace("/kaggle/input", f"{tmp_path}/input").replace(", 60, 8", ", 3, 8")
    begins, whole, second = [], tmp_path / "whole", tmp_path / "second"
    for working, nproc in ((whole, 2), (second, 2), (tmp_path / "alone", 1)):
        working.mkdir()
        text = program.replace("/kaggle/working", str(working))
        said = run(text, tmp_path, fp16=nproc == 2, nproc=nproc)
        assert said[-1] == "2"  # steps in an epoch, on as many GPUs as there are
        begins.append(said[0])
        if working == whole:  # as if it had ended after two epochs; its output is the next's input
            assert sorted(os.listdir(whole)) == ["epoch_0002.pt", "epoch_0003.pt"]
            shutil.move(whole / "epoch_0002.pt", tmp_path / "input")
    found = f"{tmp_path}/input/epoch_0002.pt"
    assert begins == ["epoch 1 of 3, from None", *[f"epoch 3 of 3, from {found}"] * 2]
    assert os.listdir(second) == ["epoch_0003.pt"]
    one, other = (torch.load(folder / "epoch_0003.pt") for folder in (whole, second))
    assert "scaler" in one
    torch.testing.assert_close(one, other, rtol=0, atol=0)
