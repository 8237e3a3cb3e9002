"""`launch` in a live kernel; chapters show functions of a cell, and errors that name the cell."""

import linecache
from types import SimpleNamespace

import pytest
from jupyter_client.manager import start_new_kernel
from running import alive, wait_until

from torchclinic.frames import cell_sources

HANG = 600  # seconds; ends what hangs, and says nothing about what is merely slow
BEGIN = """
import os, time, torch, torch.distributed as dist
from torchladder.launching import launch
_ = torch.randn(1500, 1500) @ torch.randn(1500, 1500)  # starts OpenMP's threads
"""


@pytest.mark.slow
def test_an_interrupt_of_a_running_cell_ends_its_ranks_and_nothing_else():
    manager, client = start_new_kernel(kernel_name="python3")
    printed = []

    def hook(message):
        if message["msg_type"] == "stream":
            printed.append(message["content"]["text"])
            if len(printed) == 1:
                assert alive(int(printed[0]))
                manager.interrupt_kernel()

    def run_cell(source):
        options = {"output_hook": hook, "timeout": HANG, "stop_on_error": False}
        return client.execute_interactive(source, **options)["content"].get("ename")

    try:
        assert run_cell(BEGIN) is None
        waiting = "launch(lambda: (print(os.getpid(), flush=True), time.sleep(6000)))"
        assert run_cell(waiting) == "KeyboardInterrupt"
        wait_until(lambda: not alive(int(printed[0])), HANG)
        assert run_cell("print(launch(dist.get_rank))") is None
        assert printed[1:] == ["[0, 1]\n"]
    finally:
        client.stop_channels()
        manager.shutdown_kernel(now=True)


def test_an_ipython_before_8_names_a_cell_by_its_file(monkeypatch):
    file = "/tmp/ipykernel_120/3190.py"
    monkeypatch.setattr("IPython.get_ipython", lambda: SimpleNamespace(compile=object()))
    monkeypatch.setitem(linecache.cache, file, (1, None, ["x\n"], file))
    assert cell_sources()[file] == (file, ["x\n"])
