"""The code on the pages and of the chapters' programs, run as a reader runs it who copies it.

A page's blocks run from top to bottom in one namespace, in processes of their own with a limit: on
two ranks with two simulated T4s where the page says so. What readers put in is a model with what
breaks such code: batch norm, a weight that two layers share, a buffer that no state dict holds.
"""

import json
import os
import re
import shlex
import signal
import subprocess
import sys
from functools import cache

import pytest
from running import FORKED, ROOT, SIMULATE, ran, without_gloo

from torchclinic import cli

PAGES = {
    path.relative_to(ROOT).as_posix(): path.read_text(encoding="utf-8")
    for path in [ROOT / "README.md", ROOT / "index.md", *sorted(ROOT.glob("book/*.md"))]
}
BLOCK = re.compile(r"^```(\w+)\n(.*?)^```$(?:\n+```text\n(.*?)^```$)?", re.M | re.S)
TORCHRUN = [*SIMULATE, "2", "torchrun", "--standalone", "--nproc-per-node=2"]

YOURS = """
import torch
from torch import nn

class Tied(nn.Sequential):
    def __init__(self, width):
        super().__init__(nn.Linear(width, width), nn.BatchNorm1d(width), nn.Linear(width, width))
        self[2].weight = self[0].weight
        self.register_buffer("shift", torch.arange(float(width)), persistent=False)

    def forward(self, x):
        return super().forward(x) + 0.01 * self.shift

class Yours(nn.Sequential):
    def __init__(self, first, *others):
        super().__init__(first, Tied(first.out_features), *others)
"""

# What the cheat sheet leaves to its reader.
SHEETS = """
import os, tempfile
from types import SimpleNamespace
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(6, 6)
        self.blocks = nn.ModuleList([Tied(6), Tied(6)])
        self.last = nn.Linear(6, 6)
        self.last.weight = self.first.weight
        self.register_buffer("shift", torch.arange(6.0), persistent=False)

    def forward(self, images):
        x = self.first(images.flatten(1)) + self.shift
        for block in self.blocks:
            x = block(x)
        return self.last(x)

torch.manual_seed(0)
args = SimpleNamespace(replicas=2)
train, epoch, batch = TensorDataset(torch.randn(16, 1, 2, 3), torch.arange(16) % 6), 1, 2
images, labels = train[:4]
model = Net()
optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
schedule = torch.optim.lr_scheduler.LinearLR(optimizer)
scaler = torch.amp.GradScaler("cpu", enabled=False)
"""
LOADED = """
def right(net, state):
    new = Net()
    assert new.load_state_dict(state) and new.last.weight is new.first.weight
    assert net.last.weight is net.first.weight
    for one, other in zip(net.buffers(), new.buffers(), strict=True):
        torch.testing.assert_close(one.cpu(), other)

right(model, torch.load("model.pt", map_location="cpu"))
right(sharded, torch.load("whole.pt", map_location="cpu"))
sharded(images).sum().backward()
torch.manual_seed(0)
whole, first = torch.load("whole.pt"), Net().state_dict()
assert all(torch.equal(whole[name], first[name]) for name in first)
assert {*parts, "epoch", "batch", "rng", "gpu_rng"} == {*torch.load("run.pt")}
dist.barrier()
dist.destroy_process_group()
"""
ALONE, T4S, RANKS = [sys.executable], [*SIMULATE, "2", sys.executable], TORCHRUN
# By page: how it is run, what its reader has before, what is true after it, the files it shows.
RUNS = {
    "book/cheat_sheet.md": (RANKS, YOURS + SHEETS, LOADED, []),
    "book/for_teachers.md": (ALONE, "", "assert callable(mean_of_all)", ["exam.py"]),
    "book/hosted.md": (
        T4S,
        "",
        "assert not torch.cuda.is_bf16_supported(including_emulation=False)",
        [],
    ),
    "book/several_sessions.md": ([], "", "", []),  # its program: in test_programs_to_copy.py
    "book/splitting_a_model.md": (ALONE, "", "", []),
    "book/test_without_gpu.md": (ALONE, "", "", ["model.py", "test_model.py"]),
    "book/will_it_fit.md": (ALONE, "", "", []),
}
RUNNER = """
import contextlib, io, json
import torch.distributed as dist

page = json.load(open("page.json"))
exec(page["before"], names := {"__name__": "__main__"})
for number, (code, said) in enumerate(page["blocks"]):
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        exec(compile(code, f"block {number}", "exec"), names)
    assert said is None or said == printed.getvalue(), printed.getvalue()
    if dist.is_initialized():
        dist.barrier()  # each block may be of another day
exec(page["after"], names)
"""


def blocks(page, *languages):
    found = BLOCK.findall(PAGES[page])
    return [(code, said) for language, code, said in found if language in languages]


def within(seconds, *command, cwd, fails=False, env=FORKED):
    """What a command prints in time (errors, too, if it fails); all that it starts ends here."""
    options = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    options["env"] = os.environ | env
    with subprocess.Popen(command, cwd=cwd, start_new_session=True, **options) as process:
        try:
            out, error = process.communicate(timeout=seconds)
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
    assert (process.returncode != 0) == fails, out + error
    return out + error if fails else without_gloo(out)


def test_no_page_has_code_that_is_not_run():
    assert [page for page in PAGES if blocks(page, "python")] == [*RUNS]


@pytest.mark.slow
@pytest.mark.parametrize("page", [page for page, (start, *_) in RUNS.items() if start])
def test_a_page_can_be_copied_from_top_to_bottom(page, tmp_path):
    start, before, after, files = RUNS[page]
    code = blocks(page, "python")
    for name, (text, _said) in zip(files, code, strict=bool(files)):
        (tmp_path / name).write_text(text)
    told = {"before": before, "after": after, "blocks": [(c, said or None) for c, said in code]}
    (tmp_path / "page.json").write_text(json.dumps(told))
    (tmp_path / "run.py").write_text(RUNNER)
    within(300, *start, "run.py", cwd=tmp_path)


def commands():
    """This project's and torchrun's, with their pages: in blocks, and whole ones in sentences."""
    ours = r"(?:\.venv/bin/)?((?:torchclinic|torchrun|make|python (?:-m tools|rungs|gpt)).*)$"
    for page, text in PAGES.items():
        lines = []
        text = text.replace("\\\n", " ")
        for block in re.findall(r"^```(?:console|sh)?\n(.*?)^```$", text, re.M | re.S):
            before = r"\$ " if "$ " in block else ""  # in a block with prompts, the rest is output
            lines += re.findall(rf"^{before}(?:[A-Z_]+=\S+ )*{ours}", block, re.M)
        lines += re.findall(r"`(torchclinic \w+ [^`]+|make [^`]+)`", text)
        for line in lines:
            yield page, shlex.split(line.partition("2>&1")[0], comments=True)


def known(command, *words):
    """Whether a command has these options; what it would do is another test's."""
    if command == "torchclinic":
        return bool(cli._parser().parse_args(words))
    if command == "make":
        targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.M))
        return {word for word in words if "=" not in word} <= targets
    if command == "torchrun":
        from torch.distributed.run import parse_args

        asked = parse_args(words)
        script = [asked.training_script, *asked.training_script_args]
        return not asked.module or known(*script)
    listed = help_of(*words[: 2 if words[0] == "-m" else 1])
    return all(word in listed for word in words if word.startswith("--"))


@cache
def help_of(*program):
    return ran(
        "python",
        *("rungs/gpt.py" if word == "gpt.py" else word for word in program),
        "--help",
        cwd=ROOT,
    )


@pytest.mark.slow
def test_every_command_of_a_page_has_the_options_that_it_is_given():
    found = list(commands())
    assert {page for page, _ in found} >= {"README.md", "book/cheat_sheet.md", "book/setup.md"}
    for page, words in found:
        try:
            assert known(*words), (page, words)
        except SystemExit as error:  # of argparse
            raise AssertionError(page, words) from error
