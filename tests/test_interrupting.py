"""Whenever `launch` is interrupted, and however often, no rank is left nor what one has started."""

import os
import random
import signal
import subprocess
import sys
import time
import uuid
from contextlib import contextmanager
from pathlib import Path

import pytest
from running import state, wait_until

HANG = 300  # seconds; ends what hangs, and says nothing about what is merely slow
CALLER = """
import os, signal, subprocess, sys, time
from multiprocessing.context import ForkServerProcess
import torch.distributed as dist
from torchladder.launching import launch

inside = False

def interrupt(*_):
    if inside:
        raise KeyboardInterrupt

def interrupted(method):  # once, when it has done its work
    def call(self):
        setattr(ForkServerProcess, method.__name__, method)
        method(self)
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(1)
    setattr(ForkServerProcess, method.__name__, call)

def work(seconds):
    subprocess.Popen(["sleep", "6000"])
    dist.barrier()
    if dist.get_rank() == 0:
        print("at work")
    if seconds < 0:
        os.kill(os.getpid(), signal.SIGSTOP)
    time.sleep(seconds)
    1 / (dist.get_rank() - 1)

print("no guard", flush=True)  # whoever imports this script says so, too
signal.signal(signal.SIGINT, interrupt)
while line := sys.stdin.readline():
    world_size, seconds, name = line.split()
    if name != "None":
        interrupted(getattr(ForkServerProcess, name))
    outcome = "returned"
    try:
        inside = True
        launch(work, float(seconds), world_size=int(world_size))
    except BaseException as error:
        inside = False
        outcome = type(error).__name__
    print(outcome, flush=True)
"""


class Caller:
    """A process that launches when told to; it and all that it starts are known by a variable."""

    def __init__(self, folder):
        self.mark = f"CALLER_{uuid.uuid4().hex}=".encode()
        (folder / "script.py").write_text(CALLER)
        self.process = subprocess.Popen(
            [sys.executable, folder / "script.py"],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
            env=os.environ | {self.mark[:-1].decode(): ""}, start_new_session=True,
        )  # fmt: skip

    def launch(self, world_size, seconds, interrupted=None):
        self.process.stdin.write(f"{world_size} {seconds} {interrupted}\n")
        self.process.stdin.flush()

    def said(self):
        return self.process.stdout.readline().strip()

    def processes(self):
        """All with the mark, also those that the caller knows nothing of."""
        return {pid for pid in os.listdir("/proc") if pid.isdigit() and self._started(pid)}

    def _started(self, pid):
        try:
            return self.mark in Path(f"/proc/{pid}/environ").read_bytes()
        except OSError:  # ended just now, or another user's
            return False


@contextmanager
def running_caller(folder):
    """A caller that has launched once, and the processes that are there between launches."""
    caller = Caller(folder)
    with caller.process:
        try:
            caller.launch(1, 0)  # rank 0 divides by -1
            said = [caller.said() for _ in range(3)]
            assert said == ["no guard", "at work", "returned"]
            yield caller, caller.processes()
        finally:
            caller.process.kill()


@pytest.mark.slow
def test_no_rank_is_left_when_a_script_without_a_guard_is_interrupted_or_killed(tmp_path):
    def stopped():
        return [*map(state, caller.processes())].count("T")

    with running_caller(tmp_path) as (caller, idle):
        for method in ("start", "kill"):
            caller.launch(4, 6000, method)
            if method == "kill":
                assert caller.said() == "at work"
                caller.process.send_signal(signal.SIGINT)
            assert caller.said() == "KeyboardInterrupt"
            wait_until(lambda: caller.processes() <= idle, HANG)  # of which one may just be ending
        caller.launch(2, -1)  # ranks that no longer run Python
        wait_until(lambda: stopped() == 2, HANG)
    wait_until(lambda: not caller.processes(), HANG)


@pytest.mark.long
@pytest.mark.timeout(3600)
def test_a_hundred_interrupted_launches_leave_no_rank(tmp_path):
    seed = random.randrange(10**6)
    chance = random.Random(seed)
    sizes = [3] * 75 + [8] * 20 + [32] * 5
    chance.shuffle(sizes)
    with running_caller(tmp_path) as (caller, idle):
        for number, world_size in enumerate(sizes):
            seconds, start = chance.choice([0, 1, 6000]), chance.uniform(0, world_size)
            pauses = [chance.expovariate(10) for _ in range(chance.randint(0, 2))]
            send = chance.choice([os.kill, os.killpg])  # a terminal's Ctrl-C goes to the group
            print(f"seed {seed}, launch {number}: {world_size} ranks of {seconds} s,", end=" ")
            print(f"{send.__name__} after {start:.2f} s and {pauses}")
            caller.launch(world_size, seconds)
            for pause in [start, *pauses]:
                time.sleep(pause)
                send(caller.process.pid, signal.SIGINT)
            while caller.said() == "at work":
                pass
            wait_until(lambda: caller.processes() <= idle, HANG)
