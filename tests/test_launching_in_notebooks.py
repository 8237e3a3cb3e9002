"""`launch` in a live kernel: functions of a cell, and errors that name the cell."""

import linecache
import os
import time
from types import SimpleNamespace

import pytest
from jupyter_client.manager import start_new_kernel

from torchclinic.frames import cell_sources

pytestmark = pytest.mark.slow
HANG = 600  # seconds; ends what hangs, and says nothing about what is merely slow

IMPORTS = """
import os, time, torch, torch.distributed as dist
from torchladder.launching import launch
"""


@pytest.fixture(scope="module")
def kernels():
    """Two live kernels, each with its client, in which `launch` was imported."""
    started = [start_new_kernel(kernel_name="python3") for _ in range(2)]
    for _, client in started:
        client.execute(IMPORTS)
    for _, client in started:
        client.get_shell_msg(timeout=HANG)
    yield started
    for manager, client in started:
        client.stop_channels()
        manager.shutdown_kernel(now=True)


def run_cell(client, source):
    """What a cell prints, and the content of its error message if it fails."""
    printed, error = [], None
    request = client.execute(source, stop_on_error=False)  # else the next may be refused
    while True:
        message = client.get_iopub_msg(timeout=HANG)
        if message["parent_header"].get("msg_id") != request:
            continue
        if message["msg_type"] == "stream":
            printed.append(message["content"]["text"])
        elif message["msg_type"] == "error":
            error = message["content"]
        elif message["content"].get("execution_state") == "idle":
            client.get_shell_msg(timeout=HANG)
            return "".join(printed), error


def next_message(client, kind):
    """The content of the next message of this kind."""
    while True:
        message = client.get_iopub_msg(timeout=HANG)
        if message["msg_type"] == kind:
            return message["content"]


def test_functions_of_a_cell_run_after_a_large_product_in_the_kernel(kernels):
    _, client = kernels[0]
    run_cell(client, "_ = torch.randn(1500, 1500) @ torch.randn(1500, 1500)")
    run_cell(
        client,
        "def helper():\n    return dist.get_rank()\n\n"
        "def work():\n    print('hello from', helper())\n    return helper() * 10",
    )
    printed, _ = run_cell(client, "print(launch(work, show='all'))")
    assert printed == "hello from 0\n[rank 1] hello from 1\n[0, 10]\n"
    assert run_cell(client, "print(launch(work, show='none'))") == ("[0, 10]\n", None)


def test_an_error_names_the_cell_and_shows_its_line(kernels):
    _, client = kernels[0]
    number, _ = run_cell(client, "def work():\n    return 1 / dist.get_rank()\nprint(len(In) - 1)")
    _, error = run_cell(client, "launch(work)")
    assert error["ename"] == "LaunchError"
    place = f'File "Cell In[{int(number)}]", line 2, in work\n    return 1 / dist.get_rank()'
    assert place in error["evalue"]


def runs(pid):
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def test_an_interrupt_of_a_running_cell_ends_its_ranks_and_nothing_else(kernels):
    (manager, client), _ = kernels
    waiting = "launch(lambda: (print(os.getpid(), flush=True), time.sleep(6000)))"
    client.execute(waiting, stop_on_error=False)
    rank = int(next_message(client, "stream")["text"])
    assert runs(rank)
    start = time.monotonic()
    manager.interrupt_kernel()
    assert next_message(client, "error")["ename"] == "KeyboardInterrupt"
    while runs(rank) and time.monotonic() - start < HANG:
        time.sleep(0.05)
    assert not runs(rank)
    client.get_shell_msg(timeout=HANG)
    assert run_cell(client, "print(launch(dist.get_rank))") == ("[0, 1]\n", None)


def test_two_kernels_launch_at_once(kernels):
    for _, client in kernels:
        client.execute("print([launch(dist.get_rank) for _ in range(5)])")
    for _, client in kernels:
        assert next_message(client, "stream")["text"] == f"{[[0, 1]] * 5}\n"
        client.get_shell_msg(timeout=HANG)


def test_an_ipython_before_8_names_a_cell_by_its_file(monkeypatch):
    file = "/tmp/ipykernel_120/3190.py"
    monkeypatch.setattr("IPython.get_ipython", lambda: SimpleNamespace(compile=object()))
    monkeypatch.setitem(linecache.cache, file, (1, None, ["x\n"], file))
    assert cell_sources()[file] == (file, ["x\n"])
