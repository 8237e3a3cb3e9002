"""``torchclinic inspect`` and ``torchclinic fix``."""

import os
import sys

import pytest
import torch
from checkpoint_files import plain, saved
from torch import nn
from torch.nn.parallel import DataParallel

from torchclinic import cli


@pytest.fixture
def command(tmp_path, capsys, monkeypatch):
    """Runs a command in an empty folder: its exit status, what it printed, its one-line error."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))

    def run(*arguments):
        with pytest.raises(SystemExit) as ended:
            cli.main([str(argument) for argument in arguments])
        printed = capsys.readouterr()
        assert printed.err.count("\n") == (ended.value.code == 2)
        return ended.value.code, printed.out, printed.err

    return run


def test_inspect_prints_the_report_and_fails_if_a_number_is_not_finite(tmp_path, command):
    code, out, _ = command("inspect", plain(tmp_path), "--verify")
    assert code == 0
    assert "checksums   right, of 11 storages" in out
    path = saved(tmp_path, {"w": torch.tensor([1.0, float("nan")])})
    for arguments, status in ([path], 0), ([path, "--verify"], 1):
        code, out, _ = command("inspect", *arguments)
        assert code == status
        assert "not finite  NaN or inf in 1 of 1 tensors: w (1)" in out


def test_fix_takes_a_model_from_the_current_folder(tmp_path, command):
    (tmp_path / "my_models.py").write_text(
        "import torch\n"
        "def net():\n    return torch.nn.Linear(2, 1)\n"
        "def needs_numbers():\n    assert torch.ones(1).item() == 1\n    return net()\n"
        "def fails(width):\n    pass\n"
        "seven = lambda: 7\n"
    )
    (tmp_path / "exits.py").write_text("import sys; sys.exit(3)")
    saved(tmp_path, {"net": DataParallel(nn.Linear(2, 1)).state_dict()})
    for name in ("net", "needs_numbers"):
        code, _, err = command("fix", "x.pt", "-o", "y.pt", "--for", f"my_models:{name}")
        assert code == 0, err
        assert list(torch.load("y.pt")) == ["weight", "bias"]
    ended = "--for exits:Net: importing exits ran its top-level code, which ended the program. "
    ended += "Put that code under if __name__ == '__main__'."
    for name, message in {
        "my_models:fails": "missing 1 required positional argument: 'width'",
        "my_models:none": "no attribute 'none'",
        "no_such_module:net": "No module named 'no_such_module'",
        "my_models:seven": "made a int, not a torch.nn.Module",
        "my_models": "Give module:Model",
        "": "--for : ValueError: Empty module name",
        "exits:Net": ended,
    }.items():
        code, _, err = command("fix", "x.pt", "-o", "z.pt", "--for", name)
        assert code == 2
        assert message in err.splitlines()[-1]
    assert not (tmp_path / "z.pt").exists()


def test_bad_input_is_one_sentence(tmp_path, command):
    before = plain(tmp_path).read_bytes()
    for arguments, message in {
        "inspect no.pt": "No such file or directory: 'no.pt'",
        "fix no.pt -o y.pt": "No such file or directory: 'no.pt'",
        "fix x.pt -o x.pt": "x.pt is the source",
        "fix x.pt -o y.pt --key ema": "no weights under 'ema'",
        "fix x.pt -o y.pt --partial": "--partial goes with --for",
    }.items():
        code, _, err = command(*arguments.split())
        assert code == 2
        assert message in err
    assert os.listdir() == ["x.pt"]
    assert (tmp_path / "x.pt").read_bytes() == before
