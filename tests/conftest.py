import os

import pytest
import torch

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


def pytest_collection_modifyitems(items):
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    for item in items:
        if item.get_closest_marker("multigpu") and gpus < 2:
            item.add_marker(pytest.mark.skip(reason="needs two CUDA GPUs: make simulated"))
        elif item.get_closest_marker("gpu") and not gpus:
            item.add_marker(pytest.mark.skip(reason="needs a CUDA GPU: make simulated"))
        if item.name in LAUNCHED:
            item.add_marker(pytest.mark.slow)
        if not any(map(item.get_closest_marker, ("slow", "long", "gpu", "multigpu", "timeout"))):
            item.add_marker(pytest.mark.timeout(300))  # others: see pyproject.toml
