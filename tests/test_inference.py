"""Chapter 17's own cells, executed here, hold where the chapter does not look."""

import copy
import json
import queue
import threading
import time
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from torchladder.models import LeNet

NOTEBOOK = Path(__file__).parents[1] / "notebooks" / "17_inference.ipynb"
pytestmark = pytest.mark.timeout(60)  # the slowest takes under three seconds


@pytest.fixture(scope="module")
def chapter():
    names = {"copy": copy, "queue": queue, "threading": threading, "torch": torch}
    names |= {"Future": Future, "ThreadPoolExecutor": ThreadPoolExecutor}
    for cell in json.loads(NOTEBOOK.read_text())["cells"]:
        source = "".join(cell["source"])
        if source.startswith(("def predict(", "def finish(", "class Batcher")):
            exec(source, names)
    return SimpleNamespace(**names)


class Act(nn.Module):
    def __init__(self, act):
        super().__init__()
        self.act = act

    def forward(self, x):
        self.x = x  # not safe to share
        self.act(x)
        return self.x


def test_the_order_is_kept_and_a_free_device_takes_what_a_slow_one_does_not(chapter):
    done, first = {}, []

    def act(x):
        me = threading.get_ident()
        done[me] = done.get(me, 0) + 1
        first.append(me)
        time.sleep(0.3 if me == first[0] else 0.005)

    inputs, model = torch.arange(40.0).view(20, 2), Act(act)
    assert torch.equal(chapter.predict(model, inputs.split(1), ["cpu", "cpu"]), inputs)
    assert min(done.values()) <= 3
    assert sum(done.values()) == 20
    assert model.training
    assert not hasattr(model, "x")


def test_an_error_names_batch_and_device_keeps_its_cause_and_stops_the_others(chapter):
    calls, lost = [], KeyError("lost")

    def act(x):
        calls.append(x)
        time.sleep(0.01)
        if x.item() == 3:
            raise lost

    threads = threading.active_count()
    batches = torch.arange(1000.0).view(-1, 1).split(1)
    with pytest.raises(RuntimeError, match=r"^Batch 3 failed on cpu: KeyError: 'lost'$") as caught:
        chapter.predict(Act(act), batches, ["cpu", "cpu"])
    assert caught.value.__cause__ is lost
    assert len(calls) < 20
    assert threading.active_count() == threads


def test_a_batcher_lives_on_after_a_failure_and_answers_nobody_who_has_given_up(chapter):
    def act(batch):
        time.sleep(0.005)
        if batch.isnan().any():
            raise OverflowError

    batcher = chapter.Batcher(Act(act), like=torch.zeros(2), most=4)
    with ThreadPoolExecutor(8) as pool:
        for x in torch.arange(400.0).view(-1, 2):
            future = batcher.submit(x)
            pool.submit(future.cancel)
    failed = batcher.submit(torch.full((2,), torch.nan))
    assert isinstance(failed.exception(10), OverflowError)
    last = batcher.submit(torch.ones(2))
    batcher.close()
    assert torch.equal(last.result(0), torch.ones(2))
    with pytest.raises(ValueError, match="an input is"):
        batcher.submit(torch.zeros(3))
    with pytest.raises(RuntimeError, match="closed"):
        batcher.submit(torch.zeros(2))


@pytest.mark.gpu
def test_a_gpu_and_the_cpu_work_together_in_order(chapter):
    model, inputs = LeNet().eval(), torch.randn(100, 1, 28, 28)
    outputs = chapter.predict(model, inputs.split(4), ["cuda:0", "cpu"])
    assert next(model.parameters()).device == outputs.device == torch.device("cpu")
    with torch.no_grad():
        torch.testing.assert_close(outputs, model(inputs), rtol=1e-3, atol=1e-3)
