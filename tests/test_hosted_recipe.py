"""What the pages on Kaggle tell readers to copy works where they copy it to."""

import os
import re
import shutil
import sys
from pathlib import Path

import nbformat
import pytest
import torch
from nbclient import NotebookClient
from nbformat.v4 import new_code_cell, new_notebook
from PIL import Image
from running import ROOT, ran

PAGE = ROOT / "book" / "hosted.md"
EARLIER = """
import torch

x = torch.ones(1500, 1500, device="cuda" if torch.cuda.is_available() else "cpu")
print((x @ x)[0, 0].item())
"""


@pytest.mark.slow
def test_cells_pasted_into_an_empty_notebook_train_in_two_processes(tmp_path, monkeypatch):
    """After a cell has computed, on the GPU if there is one; ``nvidia-smi`` is asked meanwhile."""
    page = nbformat.read(ROOT / "notebooks" / "both_gpus.ipynb", as_version=4)
    _set_up, *pasted = [cell.source for cell in page.cells if cell.cell_type == "code"]
    text = "\n".join(cell.source for cell in page.cells if cell.cell_type == "markdown")
    watched = re.search(r"^!\(sleep.*", text, re.M)[0].replace("30", "1")
    smi = tmp_path / "nvidia-smi"
    smi.write_text("#!/bin/sh\necho asked meanwhile\n")
    smi.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{Path(sys.executable).parent}:{os.environ['PATH']}")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    if torch.cuda.device_count() < 2:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    notebook = new_notebook(cells=[new_code_cell(c) for c in (EARLIER, *pasted, watched)])
    where = {"metadata": {"path": str(tmp_path)}}
    NotebookClient(notebook, timeout=600, kernel_name="python3", resources=where).execute()
    printed = ["".join(out.get("text", "") for out in cell.outputs) for cell in notebook.cells]
    for said in (printed[2], printed[4]):
        assert re.search(
            r"^on (cpu|cuda:0), one of 2 processes\s+epoch 0: loss 0\.\d\d", said, re.M
        )
    assert "98% right" in printed[3]
    assert "asked meanwhile\r\n" in printed[4].partition("epoch 2")[0]


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
        torchrun = ["python", "-m", "torch.distributed.run", "--standalone"]
        env = os.environ | {"OMP_NUM_THREADS": "1"}
        lines = ran(*torchrun, "--nproc-per-node=2", "train.py", cwd=tmp_path, env=env).splitlines()
        # Before PyTorch 2.12, gloo's announcements come first.
        begins.append(next(line for line in lines if line.startswith("epoch ")))
        if working == whole:  # as if it had ended after two epochs; its output is the next's input
            assert sorted(os.listdir(whole)) == ["epoch_0002.pt", "epoch_0003.pt"]
            shutil.move(whole / "epoch_0002.pt", tmp_path / "input")
    found = f"{tmp_path}/input/epoch_0002.pt"
    assert begins == ["epoch 1 of 3, from None", f"epoch 3 of 3, from {found}"]
    assert os.listdir(second) == ["epoch_0003.pt"]
    one, other = (torch.load(folder / "epoch_0003.pt")["net"] for folder in (whole, second))
    assert all(torch.equal(one[key], other[key]) for key in one)
