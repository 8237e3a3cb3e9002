"""What the first cell of a chapter for Kaggle says of the session."""

from pathlib import Path

import kaggle_session as kaggle
import numpy as np
import pytest
import torch

from torchladder import data

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def session(monkeypatch, tmp_path):
    """A working folder, and a machine with the GPUs that the test names."""
    (tmp_path / "bin").mkdir()
    (tmp_path / "working").mkdir()
    monkeypatch.chdir(tmp_path / "working")
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))

    def with_gpus(*names):
        program = tmp_path / "bin" / "nvidia-smi"
        lines = "".join(f"echo '{name}'\n" for name in names)
        program.write_text(f"#!/bin/sh\n{lines}")
        program.chmod(0o755)

    return with_gpus


def test_two_t4s_are_ready_in_a_few_lines(session, capsys):
    session("Tesla T4", "Tesla T4")
    kaggle.check_session(two_gpus=True)
    lines = capsys.readouterr().out.splitlines()
    assert lines[1].startswith("Python 3.")
    assert lines[2].endswith("Tesla T4, Tesla T4")
    assert lines[3].startswith("Ready")
    assert len(lines) == 4


@pytest.mark.parametrize(
    ("gpus", "two_gpus", "said"),
    [
        ([], False, "no accelerator"),
        (["Tesla P100-PCIE-16GB"], False, "P100"),
        (["Tesla T4"], True, "one GPU"),
        (["Tesla T4"], False, ""),
    ],
)
def test_a_wrong_accelerator_is_a_line_that_says_what_to_click(
    session, capsys, gpus, two_gpus, said
):
    if gpus:
        session(*gpus)
    kaggle.check_session(two_gpus=two_gpus)
    notes = [line for line in capsys.readouterr().out.splitlines() if line.startswith("NOTE")]
    assert len(notes) == bool(said)
    assert all(said in note and "Accelerator > GPU T4 x2" in note for note in notes)


def test_a_driver_that_does_not_answer_is_no_gpu(session, tmp_path):
    session()
    (tmp_path / "bin" / "nvidia-smi").write_text(
        "#!/bin/sh\necho 'No devices were found'; exit 6\n"
    )
    assert kaggle.gpu_names() == []


def test_a_file_that_hides_the_package_from_children_is_named(session, capsys):
    Path("torchladder.py").touch()
    kaggle.check_session()
    assert "torchladder.py hides the package from programs" in capsys.readouterr().out


def test_an_old_torch_stops_the_chapter(session, monkeypatch):
    monkeypatch.setattr(torch, "__version__", "2.9.1+cu126")
    with pytest.raises(
        kaggle.SessionError, match=r"torch 2\.9\.1\+cu126 is too old: 2\.10 .*lates"
    ):
        kaggle.check_session()


def test_missing_libraries_stop_the_chapter_together(session, monkeypatch):
    monkeypatch.setattr(kaggle, "NEEDED", ("torch", "safetensorz", "cloudpicklez"))
    with pytest.raises(kaggle.SessionError, match=r"!pip install safetensorz cloudpicklez"):
        kaggle.check_session()


@pytest.fixture
def nothing_attached(session, monkeypatch, tmp_path):
    for name in ("home", "debian", "kaggle"):
        (tmp_path / name).mkdir()
    monkeypatch.setattr(data.Path, "home", lambda: tmp_path / "home")
    monkeypatch.setattr(data, "DEBIAN", tmp_path / "debian")
    monkeypatch.setattr(data, "KAGGLE", tmp_path / "kaggle")
    monkeypatch.setattr(data, "BUNDLED", tmp_path / "not carried")
    monkeypatch.delenv("TORCHLADDER_DATA", raising=False)


@pytest.mark.slow
def test_no_data_and_no_internet_stop_a_chapter_that_needs_them(nothing_attached, monkeypatch):
    def unreachable(folder, download):
        raise OSError("[Errno -3] Temporary failure in name resolution")

    monkeypatch.setattr("torchvision.datasets.FashionMNIST", unreachable)
    with pytest.raises(kaggle.SessionError) as caught:
        kaggle.check_session(needs_data=True)
    for part in ("Add Input > Datasets > zalando-research/fashionmnist", "Turn on internet", "-3"):
        assert part in str(caught.value)
    assert caught.value._render_traceback_() == [f"STOP: {caught.value}"]
    kaggle.check_session()  # the other chapters run


def test_with_internet_what_is_not_attached_is_downloaded(nothing_attached, monkeypatch, capsys):
    asked = []

    def load(name="fashion_mnist_small", *, download=False):
        asked.append((name, download))
        if len(asked) == 1:
            raise FileNotFoundError("nowhere")
        return "the set"

    monkeypatch.setattr(data, "load", load)
    kaggle.check_session(needs_data=True)
    assert asked[1:] == [("fashion_mnist", True), ("fashion_mnist_small", False)]
    assert "not attached; downloading it (31 MB)\ndata: the set\n" in capsys.readouterr().out


def test_damaged_data_are_named_without_a_traceback(nothing_attached, tmp_path):
    for name in data.FASHION_SHA256:
        (tmp_path / "kaggle" / name).write_bytes(b"<!DOCTYPE html>")
    with pytest.raises(kaggle.SessionError, match="train-images-idx3-ubyte is not Fashion-MNIST's"):
        kaggle.check_session(needs_data=True)


def test_programs_and_their_data_are_laid_into_the_working_folder(session, monkeypatch, tmp_path):
    monkeypatch.setattr(kaggle, "__file__", str(ROOT / "kaggle_session.py"))
    Path("rungs").mkdir()
    Path("rungs/1_cpu.py").write_text("# mine")
    kaggle.check_session(needs_data=True, rungs=True)
    assert Path("rungs/1_cpu.py").read_text() == "# mine"
    assert Path("rungs/4_ddp.py").read_bytes() == (ROOT / "rungs" / "4_ddp.py").read_bytes()
    with np.load("rungs/fashion_mnist_small.npz") as ours, np.load(data.BUNDLED) as bundled:
        assert all(np.array_equal(ours[name], bundled[name]) for name in bundled.files)
