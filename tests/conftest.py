import itertools
import os
import re
import signal
import subprocess
import sys

import pytest
import torch
from running import ROOT

# Also for the children that tests start: bars and colours are for people.
os.environ["TQDM_DISABLE"] = "1"

# Examples in docstrings that start processes, and are slow therefore.
LAUNCHED = {"torchladder.launching.launch", "torchladder.measuring.measure_across_ranks"}


@pytest.fixture(autouse=True)
def _same_numbers_in_every_order():
    """Each test starts from the same random state and leaves the environment as it was."""
    torch.manual_seed(0)
    before = dict(os.environ)
    yield
    ours = {"PYTEST_CURRENT_TEST", "TORCHINDUCTOR_CACHE_DIR"}  # set by pytest and by torch
    changed = {k for k in before.keys() | os.environ.keys() if before.get(k) != os.environ.get(k)}
    assert changed <= ours, f"the test changed the environment: {changed - ours}"


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item, call):
    """A test that stops at a page that a fork has removed is skipped."""
    report = yield
    if call.excinfo and not call.excinfo.errisinstance(AssertionError):
        named = r"\b((?:book|notebooks)/[\w/]+)\.(?:html|md|ipynb)\b"
        for page in re.findall(named, str(call.excinfo.value)):
            if not any(ROOT.glob(f"{page}.[im]*")):
                report.outcome = "skipped"
                report.longrepr = (*item.location[:2], f"{page} is not in this book")
    return report


def pytest_collection_modifyitems(items):
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    for item in items:
        if item.get_closest_marker("multigpu") and gpus < 2:
            item.add_marker(pytest.mark.skip(reason=f"needs two CUDA GPUs; here: {gpus}"))
        elif item.get_closest_marker("gpu") and not gpus:
            item.add_marker(pytest.mark.skip(reason="needs a CUDA GPU"))
        elif item.name == "torchclinic.cuda_start.who_starts_cuda" and gpus:
            item.add_marker(pytest.mark.skip(reason="its example is of a machine without a GPU"))
        if item.name in LAUNCHED:
            item.add_marker(pytest.mark.slow)
        if not any(map(item.get_closest_marker, ("slow", "long", "gpu", "multigpu", "timeout"))):
            item.add_marker(pytest.mark.timeout(60))  # others: see pyproject.toml


HANG = """
import os, sys, threading, time
from pathlib import Path
import torch
import torch.distributed as dist
from torch._C import _distributed_c10d as c10d

def train(rank, another_order):
    numbers = torch.ones(3)
    dist.all_reduce(numbers)
    if another_order:
        calls = [dist.all_reduce, lambda tensor, **how: dist.broadcast(tensor, 0, **how)]
        works = [call(numbers.clone(), async_op=True) for call in calls[:: 1 - 2 * rank]]
        works[0].wait()
    elif rank == 0:
        dist.all_reduce(numbers)  # line 16
    else:
        dist.barrier()  # line 18

another_order, rank = sys.argv[1] == "order", int(os.fork() == 0)
dist.init_process_group("gloo", store=dist.FileStore("store", 2), rank=rank, world_size=2)
threading.Thread(target=train, args=(rank, another_order), daemon=True).start()
while c10d._dump_fr_trace_json().count(b"record_id") < 2 + another_order:
    time.sleep(0.05)
Path(f"trace_{rank}.json").write_bytes(c10d._dump_fr_trace_json())
Path(f"trace_{rank}").write_bytes(c10d._dump_fr_trace())
os.write(1, b"written\\n")  # in one piece: both write here
sys.stdin.read()  # until both have written
os._exit(0)
"""


@pytest.fixture(scope="session", params=["branch", "order"])
def hang(request, tmp_path_factory):
    """What two hanging ranks disagree in, and the folder with their dumps, `trace_0` and JSON."""
    folder = tmp_path_factory.mktemp("hang")
    (folder / "train.py").write_text(HANG)
    environment = os.environ | {"TORCH_FR_BUFFER_SIZE": "100"}
    ranks = subprocess.Popen(
        [sys.executable, "train.py", request.param], cwd=folder, env=environment,
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True,
    )  # fmt: skip
    try:
        said = (line for line in ranks.stdout if b"written" in line)  # until 2.12 gloo says more
        assert len([*itertools.islice(said, 2)]) == 2
    finally:
        os.killpg(ranks.pid, signal.SIGKILL)
        ranks.communicate()
    return request.param, folder
