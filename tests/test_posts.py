"""What book/where_it_comes_from.md says of the five posts happens, on simulated GPUs.

Of each post, only the lines are here that are needed to see it.
"""

import json
import os
import re
import subprocess
import sys

import pytest
from running import FORKED, ROOT, SIMULATE, ran, without_gloo

PAGE = (ROOT / "book" / "where_it_comes_from.md").read_text()
CORRECTED = re.findall(r"`torchclinic (simulate [^`]+)` prints[^`]*```text\n(.*?)\n```", PAGE, re.S)

# What the lines need, in words of our own but for what they are about.
SETTING = """
import torch
from collections import OrderedDict
from torch import nn

def try_gpu(i=0):
    return torch.device("cuda", i) if torch.cuda.device_count() >= i + 1 else torch.device("cpu")

class Masked(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer, self.mask = nn.Linear(3, 3), torch.ones(3)
    def forward(self, x):
        return self.layer(x) * self.mask

class Inner(nn.Module):
    def __init__(self):
        super().__init__()
        self.my_module = nn.Linear(3, 3)

def own_load(model, check, keys):
    state, new = model.state_dict(), OrderedDict()
    for i in range(len(check) - 2):
        new[keys(state)[i]] = check[keys(check)[i]]
    new["myFc.weight"] = torch.zeros(1)
    return model.load_state_dict(new)

X, Y = torch.ones(2, 3, device="cuda:0"), torch.ones(2, 3, device="cuda:1")
Z, linear, masked = X.cuda(1), nn.Linear(3, 1).cuda(), Masked().cuda()
wrapped = nn.DataParallel(nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3)).cuda())
inner = nn.DataParallel(Inner().cuda()).state_dict()
"""
TRY = """
import json, sys
for line in json.load(sys.stdin):
    try:
        print(json.dumps(str(eval(line))))
    except Exception as error:
        print(json.dumps("ERROR " + str(error)))
"""
# On how many GPUs, the line of a post, and what comes of it.
ROWS = [row.split("\t") for row in (ROOT / "tests/posts.tsv").read_text().splitlines()]

# The DDP program of the fourth post, where it is not as one would write it today.
DDP = """
import argparse, os, torch
from torch import nn
from torch.utils.data.distributed import DistributedSampler
parser = argparse.ArgumentParser()
parser.add_argument("--local_rank", type=int)
args = parser.parse_args()
torch.distributed.init_process_group("nccl", world_size=2, rank=args.local_rank)
torch.cuda.set_device(args.local_rank)
model = nn.parallel.DistributedDataParallel(nn.Linear(3, 1).cuda(), device_ids=[args.local_rank])
sampler, orders = DistributedSampler(range(64)), set()
for i in range(2):
    sampler.set_epoch(10)
    orders.add(tuple(sampler))
name = next(iter(model.state_dict()))
print(f"{len(orders)} order, {name}, on {next(model.parameters()).device}\\n", end="")
torch.distributed.destroy_process_group()
"""


def simulated(count, *command, **options):
    command = [*SIMULATE, str(count), *command]
    options = {"capture_output": True, "text": True, "timeout": 300} | options
    options["env"] = os.environ | FORKED
    return subprocess.run(command, **options)


@pytest.mark.slow
@pytest.mark.parametrize("gpus", ["2", "4"])
def test_each_line_of_a_post_does_what_the_page_says(gpus):
    rows = [(line, said) for count, line, said in ROWS if count == gpus]
    command = [sys.executable, "-c", SETTING + TRY]
    done = simulated(gpus, *command, input=json.dumps([line for line, _ in rows]))
    answers = [json.loads(line) for line in done.stdout.splitlines()]
    for (line, said), answer in zip(rows, answers, strict=True):
        if answer.startswith("ERROR "):
            assert said in answer
            assert said.partition(': "')[0] in PAGE
        else:
            assert said == answer or said in answer.split(">")[0], line


@pytest.mark.slow
def test_the_old_ddp_program_fails_twice_and_then_has_one_order(tmp_path):
    program = tmp_path / "train.py"
    program.write_text(DDP)
    old = ["python", "-m", "torch.distributed.launch", "--nproc_per_node=2"]
    now = ["torchrun", "--standalone", "--nproc-per-node=2"]
    for start, said in [
        (old, "unrecognized arguments: --local-rank"),
        (now, "`rank` must be an integer. None"),
    ]:
        assert said in simulated(3, *start, str(program)).stderr
        assert said in PAGE
    program.write_text(DDP.replace("type=int", "default=int(os.environ['LOCAL_RANK'])"))
    done = simulated(3, *now, str(program))
    said = [f"1 order, module.weight, on cuda:{rank}" for rank in (0, 1)]
    assert sorted(without_gloo(done.stdout).splitlines()) == said, done.stderr


@pytest.mark.slow
@pytest.mark.parametrize(("command", "printed"), CORRECTED)
def test_a_corrected_program_prints_what_the_page_says(command, printed):
    words = command.split()[1:]
    options = {"cwd": ROOT / "book" / "posts", "env": os.environ | FORKED}
    out = ran(*SIMULATE, *words, **options)
    assert sorted(out.splitlines()) == sorted(printed.splitlines())


def test_each_of_the_five_has_a_corrected_program_and_the_lines_are_counted():
    assert len(CORRECTED) == PAGE.count("{dropdown}") == 5
    all_of_them, right, listed = re.search(
        r"Of (\d+) .*?, (\d+) are right.*other (\d+),", PAGE, re.S
    ).groups()
    rows = len(re.findall(r"^\| (?!line|---)", PAGE, re.M))
    assert rows == int(listed) == int(all_of_them) - int(right)
