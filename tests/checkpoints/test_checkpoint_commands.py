"""``torchclinic inspect`` and ``torchclinic fix``."""

import os
import sys

import pytest
import torch
from checkpoint_files import plain, saved
from torch import nn
from torch.nn.parallel import DataParallel

from torchclinic import cli


def command(capsys, *arguments):
    with pytest.raises(SystemExit) as ended:
        cli.main([str(argument) for argument in arguments])
    return ended.value.code, capsys.readouterr()


def test_inspect_prints_the_report(tmp_path, capsys):
    code, printed = command(capsys, "inspect", plain(tmp_path), "--verify")
    assert code == 0
    assert "checksums   right, of 11 storages" in printed.out


def test_inspect_verify_fails_if_a_number_is_not_finite(tmp_path, capsys):
    path = saved(tmp_path, {"w": torch.tensor([1.0, float("nan")])})
    for arguments, status in ([path], 0), ([path, "--verify"], 1):
        code, printed = command(capsys, "inspect", *arguments)
        assert code == status
        assert "not finite  NaN or inf in 1 of 1 tensors: w (1)" in printed.out


def test_fix_takes_a_model_from_the_current_folder(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    (tmp_path / "my_models.py").write_text(
        "import torch\n"
        "def net():\n    return torch.nn.Linear(2, 1)\n"
        "def needs_numbers():\n    assert torch.ones(1).item() == 1\n    return net()\n"
        "def fails(width):\n    pass\n"
        "seven = lambda: 7\n"
    )
    saved(tmp_path, {"net": DataParallel(nn.Linear(2, 1)).state_dict()})
    for name in ("net", "needs_numbers"):
        code, printed = command(capsys, "fix", "x.pt", "-o", "y.pt", "--for", f"my_models:{name}")
        assert code == 0, printed.err
        assert list(torch.load("y.pt")) == ["weight", "bias"]
    for name, message in {
        "my_models:fails": "missing 1 required positional argument: 'width'",
        "my_models:none": "no attribute 'none'",
        "no_such_module:net": "No module named 'no_such_module'",
        "my_models:seven": "made a int, not a torch.nn.Module",
        "my_models": "Give module:Model",
    }.items():
        code, printed = command(capsys, "fix", "x.pt", "-o", "z.pt", "--for", name)
        assert code == 2
        assert message in printed.err
        assert printed.err.count("\n") == 1
    assert not (tmp_path / "z.pt").exists()


@pytest.mark.parametrize(
    "code", ["import sys; sys.exit(3)", "import argparse; argparse.ArgumentParser().parse_args()"]
)
def test_a_script_that_ends_the_program_when_it_is_imported(code, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr(sys, "argv", ["torchladder", "fix", "x.pt"])
    monkeypatch.delitem(sys.modules, "scr", raising=False)
    (tmp_path / "scr.py").write_text(code)
    code, printed = command(capsys, "fix", plain(tmp_path), "-o", "y.pt", "--for", "scr:Net")
    assert code == 2
    assert "--for scr:Net: importing scr ran its top-level code, which ended" in printed.err
    assert "under if __name__ == '__main__'." in printed.err
    assert not (tmp_path / "y.pt").exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["inspect", "no.pt"], "No such file or directory: 'no.pt'"),
        (["fix", "no.pt", "-o", "y.pt"], "No such file or directory: 'no.pt'"),
        (["fix", "x.pt", "-o", "x.pt"], "x.pt is the source"),
        (["fix", "x.pt", "-o", "y.pt", "--key", "ema"], "no weights under 'ema'"),
        (["fix", "x.pt", "-o", "y.pt", "--for", ""], "--for : ValueError: Empty module name"),
        (["fix", "x.pt", "-o", "y.pt", "--partial"], "--partial goes with --for"),
    ],
)
def test_bad_input_is_one_sentence(arguments, message, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    before = plain(tmp_path).read_bytes()
    code, printed = command(capsys, *arguments)
    assert code == 2
    assert message in printed.err
    assert printed.err.count("\n") == 1
    assert os.listdir() == ["x.pt"]
    assert (tmp_path / "x.pt").read_bytes() == before


@pytest.mark.parametrize("name", ["inspect", "fix"])
def test_help_fits_a_terminal_and_has_an_example(name, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    code, printed = command(capsys, name, "--help")
    assert code == 0
    assert name == "inspect" or "Example: torchclinic fix" in printed.out
    assert all(len(line) <= 80 for line in printed.out.splitlines())
    monkeypatch.undo()
