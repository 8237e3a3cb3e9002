"""`launch` in a live kernel: functions of a cell, and errors that name the cell."""

import os
import time

import nbformat
import pytest
from jupyter_client.manager import start_new_kernel
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError


def run_cells(*sources):
    """The cells' outputs from a live kernel, as text."""
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(s) for s in sources])
    NotebookClient(notebook, timeout=120, kernel_name="python3").execute()
    return ["".join(o.get("text", "") for o in cell.outputs) for cell in notebook.cells]


def test_functions_of_a_cell_run_after_a_large_product_in_the_kernel():
    outputs = run_cells(
        "import torch, torch.distributed as dist\n"
        "from torchladder.launching import launch\n"
        "_ = torch.randn(1500, 1500) @ torch.randn(1500, 1500)",
        "def helper():\n    return dist.get_rank()\n\n"
        "def work():\n    print('hello from', helper())\n    return helper() * 10",
        "print(launch(work, show='all'))",
        "print(launch(work, show='none'))",
    )
    assert outputs[2] == "hello from 0\n[rank 1] hello from 1\n[0, 10]\n"
    assert outputs[3] == "[0, 10]\n"


def test_an_error_names_the_cell_and_shows_its_line():
    with pytest.raises(CellExecutionError) as caught:
        run_cells(
            "import torch.distributed as dist\nfrom torchladder.launching import launch",
            "def work():\n    return 1 / dist.get_rank()",
            "launch(work)",
        )
    assert caught.value.ename == "LaunchError"
    assert (
        'File "Cell In[2]", line 2, in work\n    return 1 / dist.get_rank()' in caught.value.evalue
    )


IMPORTS = """
import os, time, torch.distributed as dist
from torchladder.launching import launch
"""


@pytest.fixture
def kernels():
    """Two live kernels, each with its client."""
    started = [start_new_kernel(kernel_name="python3") for _ in range(2)]
    yield started
    for manager, client in started:
        client.stop_channels()
        manager.shutdown_kernel(now=True)


def next_message(client, kind):
    """The content of the next message of this kind."""
    while True:
        message = client.get_iopub_msg(timeout=60)
        if message["msg_type"] == kind:
            return message["content"]


def runs(pid):
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def test_an_interrupt_of_a_running_cell_ends_its_ranks_and_nothing_else(kernels):
    (manager, client), _ = kernels
    client.execute(IMPORTS + "launch(lambda: (print(os.getpid(), flush=True), time.sleep(100)))")
    rank = int(next_message(client, "stream")["text"])
    assert runs(rank)
    start = time.monotonic()
    manager.interrupt_kernel()
    assert next_message(client, "error")["ename"] == "KeyboardInterrupt"
    while runs(rank) and time.monotonic() - start < 5:
        time.sleep(0.05)
    assert not runs(rank)
    client.get_shell_msg(timeout=60)  # until then the kernel refuses what is sent
    client.execute("print(launch(dist.get_rank))")
    assert next_message(client, "stream")["text"] == "[0, 1]\n"


def test_two_kernels_launch_at_once(kernels):
    for _, client in kernels:
        client.execute(IMPORTS + "print([launch(dist.get_rank) for _ in range(5)])")
    for _, client in kernels:
        assert next_message(client, "stream")["text"] == f"{[[0, 1]] * 5}\n"
