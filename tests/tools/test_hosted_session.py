"""What the first cell of a notebook says of the session, on Kaggle, on Colab and elsewhere."""

from pathlib import Path

import numpy as np
import pytest
import torch
from running import ROOT

from tools import hosted_session
from torchladder import data

VARIABLES = {
    "Kaggle": {"KAGGLE_KERNEL_RUN_TYPE": "Interactive", "COLAB_RELEASE_TAG": "of its base image"},
    "Colab": {"COLAB_RELEASE_TAG": "release-colab"},
    "a Jupyter of your own": {},
}
CLICKS = {
    "Kaggle": "Settings > Accelerator > GPU T4 x2",
    "Colab": "Runtime > Change runtime type > T4 GPU",
    "a Jupyter of your own": "a machine with an NVIDIA GPU",
}


@pytest.fixture(params=VARIABLES)
def host(request, monkeypatch):
    """Its name, with the variables by which it is known."""
    for name in ("KAGGLE_KERNEL_RUN_TYPE", "COLAB_RELEASE_TAG"):
        monkeypatch.delenv(name, raising=False)
    for name, value in VARIABLES[request.param].items():
        monkeypatch.setenv(name, value)
    return request.param


@pytest.fixture
def session(monkeypatch, tmp_path):
    """A working folder, and a function that gives the machine a driver with GPUs."""
    monkeypatch.setenv("KAGGLE_KERNEL_RUN_TYPE", "Interactive")
    (tmp_path / "bin").mkdir()
    (tmp_path / "working").mkdir()
    monkeypatch.chdir(tmp_path / "working")
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))

    def with_gpus(*names, status=0):
        program = tmp_path / "bin" / "nvidia-smi"
        lines = "".join(f"echo '{name}'\n" for name in names)
        program.write_text(f"#!/bin/sh\n{lines}exit {status}")
        program.chmod(0o755)

    return with_gpus


def test_the_host_is_named_where_its_files_stay_and_how_to_get_a_gpu(session, host, capsys):
    session("No devices were found", status=6)
    hosted_session.check_session()
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].endswith(f" on {host}")
    kept = {"Kaggle": "kept by", "Colab": "gone when the runtime ends"}.get(host, "kept")
    assert f"files: in {Path.cwd()}, {kept}" in lines[3]
    assert lines[4].startswith(f"NOTE: no GPU; all cells run on the CPU. For a GPU: {CLICKS[host]}")
    assert lines[5] == "Ready: run the cells below."


def test_a_wrong_accelerator_is_said(session, capsys):
    t4 = "Tesla T4"
    for gpus, two_gpus, said in [
        ([t4, t4], True, []),
        ([t4], True, ["one GPU", "Accelerator > GPU T4 x2"]),
        ([t4], False, []),
    ]:
        session(*gpus)
        hosted_session.check_session(two_gpus=two_gpus)
        found = [line for line in capsys.readouterr().out.splitlines() if line[:4] == "NOTE"]
        assert len(found) == bool(said)
        assert all(words in found[0] for words in said)


def test_an_old_torch_stops_the_notebook(session, monkeypatch):
    monkeypatch.setattr(torch, "__version__", "2.9.1+cu126")
    with pytest.raises(hosted_session.SessionError) as caught:
        hosted_session.check_session()
    message = str(caught.value)
    assert message.startswith("torch 2.9.1+cu126 is too old: 2.10 or later is needed. ")
    assert 'run !pip install "torch==2.10.*" "torchvision==0.25.*" and restart' in message


def test_what_is_not_attached_is_downloaded(session, capsys, monkeypatch):
    asked = []

    def load(name="fashion_mnist_small", *, download=False):
        asked.append((name, download))
        if len(asked) == 1:
            raise FileNotFoundError("nowhere")
        return "the set"

    monkeypatch.setattr(data, "load_dataset", load)
    hosted_session.check_session(needs_data=True)
    assert asked[1:] == [("fashion_mnist", True), ("fashion_mnist_small", False)]
    assert "not here; downloading it (31 MB)\ndata: the set\n" in capsys.readouterr().out


def test_no_data_and_no_internet_stop_a_notebook_that_needs_them(session, host, monkeypatch):
    def load(*_, download=False):
        raise OSError("no name resolution") if download else FileNotFoundError("nowhere")

    monkeypatch.setattr(data, "load_dataset", load)
    with pytest.raises(hosted_session.SessionError) as caught:
        hosted_session.check_session(needs_data=True)
    attach = [f"Add Input > Datasets > {hosted_session.DATA_SET}", "Turn on internet"]
    for part in [*(attach if host == "Kaggle" else ["TORCHLADDER_DATA"]), "resolution)"]:
        assert part in str(caught.value)
    assert caught.value._render_traceback_() == [f"STOP: {caught.value}"]
    hosted_session.check_session()  # the other notebooks run


def test_programs_and_their_data_are_laid_into_the_working_folder(session, monkeypatch):
    monkeypatch.setattr(hosted_session, "__file__", str(ROOT / "hosted_session.py"))
    Path("rungs").mkdir()
    Path("rungs/1_cpu.py").write_text("# mine")
    hosted_session.check_session(needs_data=True, rungs=True)
    assert Path("rungs/1_cpu.py").read_text() == "# mine"
    assert Path("rungs/4_ddp.py").read_bytes() == (ROOT / "rungs" / "4_ddp.py").read_bytes()
    with np.load("rungs/fashion_mnist_small.npz") as ours, np.load(data.BUNDLED) as bundled:
        assert all(np.array_equal(ours[name], bundled[name]) for name in bundled.files)
