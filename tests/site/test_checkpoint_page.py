"""The page for broken checkpoints: what it shows is what the commands print."""

import re
import shlex

import pytest
import torch
from running import ROOT
from torch import nn

from torchclinic import cli

PAGE = (ROOT / "book/broken_checkpoint.md").read_text(encoding="utf-8")
SHOWN = re.compile(r"```console\n\$ torchclinic ([^\n]*)\n```\n\n```text\n(.*?)```", re.S)


def test_the_commands_of_the_page_print_what_it_shows(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    model = nn.Sequential(nn.Linear(784, 128), nn.ReLU(), nn.Linear(128, 10))
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(2, 784)).sum().backward()
    optimizer.step()
    weights = {f"module.{name}": tensor for name, tensor in model.state_dict().items()}
    torch.save({"model": weights, "optimizer": optimizer.state_dict(), "epoch": 3}, "ddp.pt")
    (tmp_path / "cut.pt").write_bytes((tmp_path / "ddp.pt").read_bytes()[:300_000])
    shown = SHOWN.findall(PAGE)
    assert len(shown) == 3
    for command, output in shown:
        with pytest.raises(SystemExit):
            cli.main(shlex.split(command))
        said = capsys.readouterr()
        assert said.out + said.err == output, command
    model.load_state_dict(torch.load("plain.pt"))
