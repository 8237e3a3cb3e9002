"""SKILL.md: its commands run and answer as it says, and the pages that it names are there."""

import json
import os
import re
import shlex
import subprocess
import sys

import pytest
import torch
from running import ROOT

SKILL = (ROOT / "book/SKILL.md").read_text("utf-8")


@pytest.mark.timeout(1200)  # ten times what its commands take together
def test_each_command_runs_and_the_log_s_answer_has_the_fields_that_are_named(tmp_path):
    log = "RuntimeError: mat1 and mat2 shapes cannot be multiplied (32x784 and 100x10)\n"
    (tmp_path / "log.txt").write_text(log)
    torch.save({"module.weight": torch.ones(2)}, tmp_path / "found.pt")
    (tmp_path / "train.py").write_text("import torch; print(torch.cuda.device_count())")
    printed = {}
    path = f"{os.path.dirname(sys.executable)}:{os.environ['PATH']}"  # a command's python is ours
    env = os.environ | {"PATH": path}
    for line in re.findall(r"^\$ (torchclinic .*)$", SKILL, re.M):
        command = [sys.executable, "-m", *shlex.split(line)]
        run = subprocess.run(
            command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=120
        )
        assert run.returncode in ((0, 1) if "doctor" in line else (0,)), run.stderr
        printed[line.split()[1]] = run.stdout
    assert printed.keys() == {"explain", "inspect", "fix", "doctor", "simulate"}
    [match] = json.loads(printed["explain"])["matches"]
    assert {"id", "title", "line", "text", "rank", "cause", "fix", "url"} <= match.keys()
    assert "module." in printed["inspect"]
    assert printed["simulate"] == "2\n"
    assert list(torch.load(tmp_path / "plain.pt")) == ["weight"]


def test_each_file_that_it_names_is_there():
    named = re.findall(r"`((?:book|notebooks)/[^`]+)`", SKILL)
    assert len(named) > 9
    assert [name for name in named if not list(ROOT.glob(name))] == []
