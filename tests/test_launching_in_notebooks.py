"""`launch` in a live kernel: functions of a cell, and errors that name the cell."""

import linecache
from types import SimpleNamespace

import pytest
from jupyter_client.manager import start_new_kernel
from running import alive, wait_until

from torchclinic.frames import cell_sources

pytestmark = pytest.mark.slow
HANG = 600  # seconds; ends what hangs, and says nothing about what is merely slow
IMPORTS = (
    "import os, time, torch, torch.distributed as dist; from torchladder.launching import launch"
)


@pytest.fixture(scope="module")
def kernel():
    """A live kernel and its client; `launch` was imported in it."""
    manager, client = start_new_kernel(kernel_name="python3")
    run_cell(client, IMPORTS)
    yield manager, client
    client.stop_channels()
    manager.shutdown_kernel(now=True)


def run_cell(client, source, on_print=lambda text: None):
    """What a cell prints, and the message of its error if it fails."""
    printed = []

    def hook(message):
        if message["msg_type"] == "stream":
            printed.append(message["content"]["text"])
            on_print(printed[-1])

    options = {"output_hook": hook, "timeout": HANG, "stop_on_error": False}
    reply = client.execute_interactive(source, **options)["content"]
    return "".join(printed), f"{reply['ename']}: {reply['evalue']}" if "ename" in reply else None


def test_functions_of_a_cell_run_after_a_large_product_and_an_error_names_cell_and_line(kernel):
    _, client = kernel
    run_cell(client, "_ = torch.randn(1500, 1500) @ torch.randn(1500, 1500)")
    work = "def work():\n    print('from', helper())\n    return 1 / helper()\nprint(len(In) - 1)"
    number, _ = run_cell(client, f"def helper():\n    return dist.get_rank()\n\n{work}")
    assert run_cell(client, "print(launch(helper))") == ("[0, 1]\n", None)
    printed, error = run_cell(client, "launch(work, show='all')")
    assert printed == "from 0\n[rank 1] from 1\n"
    assert error.startswith("LaunchError: rank 0 of 2 failed with ZeroDivisionError: division by")
    assert f'File "Cell In[{int(number)}]", line 6, in work\n    return 1 / helper()' in error


def test_an_interrupt_of_a_running_cell_ends_its_ranks_and_nothing_else(kernel):
    manager, client = kernel

    def interrupt(rank):
        assert alive(int(rank))
        manager.interrupt_kernel()

    waiting = "launch(lambda: (print(os.getpid(), flush=True), time.sleep(6000)))"
    rank, error = run_cell(client, waiting, interrupt)
    assert error.startswith("KeyboardInterrupt")
    wait_until(lambda: not alive(int(rank)), HANG)
    assert run_cell(client, "print(launch(dist.get_rank))") == ("[0, 1]\n", None)


def test_an_ipython_before_8_names_a_cell_by_its_file(monkeypatch):
    file = "/tmp/ipykernel_120/3190.py"
    monkeypatch.setattr("IPython.get_ipython", lambda: SimpleNamespace(compile=object()))
    monkeypatch.setitem(linecache.cache, file, (1, None, ["x\n"], file))
    assert cell_sources()[file] == (file, ["x\n"])
