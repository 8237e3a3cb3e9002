"""`predict`: what a plain loop gives, in its order, from any number of devices."""

import copy
import os
import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from itertools import count

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from torchladder.data import ImageSet, balanced_subset, load, loader
from torchladder.inference import predict
from torchladder.models import LeNet

TWO = ["cpu", "cpu"]
pytestmark = pytest.mark.timeout(30)  # the slowest test takes under three


def lasting_threads() -> set[threading.Thread]:
    return {each for each in threading.enumerate() if not each.daemon}  # tqdm starts a daemon


def images(count=50):
    return torch.randn(count, 1, 28, 28)


def plain_loop(model, inputs, batch_size):
    model = copy.deepcopy(model).eval()
    with torch.inference_mode():
        return torch.cat([model(batch) for batch in inputs.split(batch_size)])


class Echo(nn.Module):
    """Gives its inputs back; sleeps, fails or does something else when they hold a value."""

    def __init__(self, act=lambda x: x):
        super().__init__()
        self.act = act

    def forward(self, x):
        return self.act(x)


# --- what comes out -----------------------------------------------------------------------------


@pytest.mark.parametrize("devices", [None, "cpu", ["cpu"], TWO, [torch.device("cpu")] * 3])
def test_outputs_are_those_of_a_plain_loop_bit_for_bit(devices):
    if devices is None and torch.cuda.is_available():
        pytest.skip("on a GPU, see below")
    model, inputs = LeNet(), images()
    outputs = predict(model, inputs, devices=devices, batch_size=8)
    assert torch.equal(outputs, plain_loop(model, inputs, 8))


def test_the_order_is_kept_when_one_thread_is_slow():
    slow = threading.Event()

    def sleep_once(x):
        if not slow.is_set():
            slow.set()
            time.sleep(0.3)
        return x

    inputs = torch.arange(40.0).view(20, 2)
    threads = set()

    def act(x):
        threads.add(threading.get_ident())
        return sleep_once(x)

    assert torch.equal(predict(Echo(act), inputs, devices=TWO, batch_size=1), inputs)
    assert len(threads) == 2


def test_a_free_device_takes_the_batches_that_a_slow_one_does_not():
    done, first = {}, []

    def act(x):
        me = threading.get_ident()
        done[me] = done.get(me, 0) + 1
        first.append(me)
        time.sleep(0.3 if me == first[0] else 0.005)
        return x

    predict(Echo(act), torch.zeros(20, 1), devices=TWO, batch_size=1)
    assert min(done.values()) <= 3
    assert sum(done.values()) == 20


def test_every_kind_of_data_gives_the_same():
    data = balanced_subset(load(), 1, 5)
    inputs = data.normalise(data.test_images)
    model = LeNet()
    expected = plain_loop(model, inputs, 16)
    pairs = TensorDataset(inputs, data.test_labels)

    class Stream(IterableDataset):
        def __iter__(self):
            return iter(inputs)

    kinds = [
        inputs, pairs, ImageSet(data, "test"), Stream(), DataLoader(pairs, 16),
        loader(data, "test", batch_size=16), inputs.split(16), (b for b in inputs.split(16)),
    ]  # fmt: skip
    for kind in kinds:
        outputs = predict(model, kind, devices=TWO, batch_size=16)
        torch.testing.assert_close(outputs, expected, rtol=0, atol=0)


def test_a_generator_is_read_by_one_thread_at_a_time():
    def batches():
        for number in range(50):
            time.sleep(0.001)
            yield torch.full((2, 1), float(number))

    outputs = predict(Echo(), batches(), devices=["cpu"] * 4)
    assert torch.equal(outputs[::2, 0], torch.arange(50.0))


def test_outputs_can_be_trained_on():
    outputs = predict(LeNet(), images(4), devices=TWO, batch_size=2)
    assert not outputs.is_inference()
    weight = torch.ones(10, requires_grad=True)
    (outputs * weight).sum().backward()
    assert torch.equal(weight.grad, outputs.sum(0))


def test_the_callers_autocast_holds_in_the_threads():
    model, inputs = LeNet(), images(4)
    with torch.autocast("cpu", torch.bfloat16):
        outputs = predict(model, inputs, devices=TWO, batch_size=2)
    assert outputs.dtype == torch.bfloat16
    assert predict(model, inputs, devices=TWO).dtype == torch.float32


def test_a_model_that_writes_each_output_into_the_same_memory():
    class Reuses(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("out", torch.zeros(2, 3))

        def forward(self, x):
            return self.out.copy_(x)

    inputs = torch.arange(24.0).view(8, 3)
    assert torch.equal(predict(Reuses(), inputs, devices=TWO, batch_size=2), inputs)


# --- what stays as it was -----------------------------------------------------------------------


def test_the_model_keeps_its_modes_its_weights_and_its_device():
    model = nn.Sequential(nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2), nn.Dropout(), nn.Flatten())
    model.train()
    model[1].eval()  # frozen on purpose
    before = copy.deepcopy(model.state_dict())
    first = predict(model, images(6), devices=TWO, batch_size=3)
    assert [module.training for module in model] == [True, False, True, True]
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())
    assert all(p.requires_grad and p.device.type == "cpu" for p in model.parameters())
    torch.manual_seed(7)
    assert torch.equal(predict(model[2], torch.ones(4, 3)), torch.ones(4, 3))  # no dropout
    assert first.shape == (6, 2 * 26 * 26)


def test_the_model_stays_as_it_was_after_an_error():
    def fail(x):
        raise KeyError("lost")

    model = nn.Sequential(nn.Dropout(), Echo(fail)).train()
    with pytest.raises(RuntimeError, match="lost"):
        predict(model, torch.zeros(4, 1), devices=TWO, batch_size=1)
    assert all(module.training for module in model.modules())


def test_replicas_share_the_weights_that_are_on_their_device_already():
    model, seen = nn.Linear(3, 3), set()
    spy = nn.Sequential(model, Echo())
    model.register_forward_hook(lambda module, *_: seen.add(module.weight.data_ptr()))
    predict(spy, torch.zeros(6, 3), devices=TWO, batch_size=1)
    assert seen == {model.weight.data_ptr()}


def test_tied_weights_and_recurrent_layers_work():
    tied = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    tied[1].weight = tied[0].weight
    lstm = nn.LSTM(4, 4, batch_first=True)

    class Last(nn.Module):
        def __init__(self):
            super().__init__()
            self.tied, self.lstm = tied, lstm

        def forward(self, x):
            return self.tied(self.lstm(x)[0][:, -1])

    inputs = torch.randn(9, 5, 4)
    assert torch.equal(predict(Last(), inputs, devices=TWO, batch_size=2),
                       plain_loop(Last(), inputs, 2))  # fmt: skip


def test_a_model_that_kept_a_tensor_with_its_graph_in_training():
    class Attention(nn.Module):
        def __init__(self):
            super().__init__()
            self.scores = nn.Linear(3, 3)

        def forward(self, x):
            self.last = self.scores(x).softmax(-1)
            return self.last

    model, inputs = Attention(), torch.randn(6, 3)
    kept = model(inputs[:2])
    outputs = predict(model, inputs, devices=TWO, batch_size=2)
    with torch.inference_mode():
        assert torch.equal(outputs, model.scores(inputs).softmax(-1))
    assert model.last is kept
    kept.sum().backward()  # its graph is still there


@pytest.mark.slow  # torch.compile
def test_wrappers_are_taken_off():
    model, inputs = LeNet(), images(6)
    expected = plain_loop(model, inputs, 2)
    wrapped = torch.compile(nn.DataParallel(model), backend="eager")
    assert torch.equal(predict(wrapped, inputs, devices=TWO, batch_size=2), expected)


# --- threads ------------------------------------------------------------------------------------


class Remembers(nn.Module):
    """Not safe to share: between the two lines another thread may write `self.x`."""

    def forward(self, x):
        self.x = x
        time.sleep(0.002)
        return self.x


def test_a_module_that_writes_to_self_is_safe_in_predict():
    inputs = torch.arange(60.0).view(60, 1)
    model = Remembers()
    assert torch.equal(predict(model, inputs, devices=["cpu"] * 4, batch_size=1), inputs)
    assert not hasattr(model, "x")


def test_several_threads_may_predict_with_one_model_that_is_in_training_mode():
    model = nn.Sequential(nn.Flatten(), nn.Linear(784, 32), nn.BatchNorm1d(32), nn.Dropout())
    model.train()
    parts = [images(24) for _ in range(4)]
    expected = [plain_loop(model, part, 4) for part in parts]
    with ThreadPoolExecutor(4) as pool:
        for _ in range(3):
            found = pool.map(lambda part: predict(model, part, devices=TWO, batch_size=4), parts)
            assert all(map(torch.equal, found, expected))
    assert all(module.training for module in model.modules())


# --- bad input and faults -----------------------------------------------------------------------


def test_a_gpu_that_is_not_there_is_named():
    missing = f"cuda:{torch.cuda.device_count() + 7}" if torch.cuda.is_available() else "cuda:7"
    with pytest.raises(ValueError, match="No GPU") as caught:
        predict(LeNet(), images(2), devices=["cpu", missing])
    assert "7" in str(caught.value)


@pytest.mark.parametrize(("devices", "message"), [([], "empty"), ("gpu", "'gpu' is not a device")])
def test_devices_that_are_none(devices, message):
    with pytest.raises(ValueError, match=message):
        predict(LeNet(), images(2), devices=devices)


@pytest.mark.parametrize("data", [torch.empty(0, 1, 28, 28), [], TensorDataset(torch.empty(0, 1))])
def test_empty_data_says_so(data):
    with pytest.raises(ValueError, match="nothing to predict"):
        predict(LeNet(), data, devices=TWO)


def test_a_batch_holds_at_least_one_input():
    with pytest.raises(ValueError, match="batch_size=0"):
        predict(LeNet(), images(2), batch_size=0)


@pytest.mark.parametrize(
    ("act", "found"),
    [
        (lambda x: (x, x), "one tensor; got tuple"),
        (lambda x: {"logits": x}, "one tensor; got dict"),
        (lambda x: x.mean(), r"a row for each of 2 inputs; got \(\)"),
        (lambda x: x[:1], r"a row for each of 2 inputs; got \(1, 3\)"),
    ],
)
def test_outputs_that_are_not_a_tensor_with_a_row_for_each_input(act, found):
    with pytest.raises(RuntimeError, match=found):
        predict(Echo(act), torch.zeros(4, 3), devices=["cpu"], batch_size=2)


def test_a_batch_that_is_no_tensor():
    with pytest.raises(RuntimeError, match=r"Batch 0 failed on cpu: TypeError: .* got dict"):
        predict(Echo(), [{"images": torch.zeros(2)}], devices=["cpu"])


def test_a_model_that_cannot_be_copied_says_so():
    model = nn.Linear(2, 2)
    model.lock = threading.Lock()
    with pytest.raises(RuntimeError, match=r"cannot be copied to cpu: TypeError: .*lock"):
        predict(model, torch.zeros(4, 2), devices=TWO)
    with pytest.raises(RuntimeError, match=r"cannot be copied to cpu: .*[Mm]eta"):
        predict(nn.Linear(2, 2, device="meta"), torch.zeros(4, 2), devices="cpu")


def failing_on(value, error):
    def act(x):
        if (x == value).any():
            raise error
        return x

    return Echo(act)


def test_an_error_names_batch_and_device_and_keeps_its_cause():
    original = KeyError("lost")
    with pytest.raises(RuntimeError, match=r"^Batch 5 failed on cpu: KeyError: 'lost'$") as caught:
        predict(failing_on(10, original), torch.arange(40.0).view(40, 1), devices=TWO, batch_size=2)
    assert caught.value.__cause__ is original


def test_after_an_error_the_other_threads_stop():
    calls = []

    def act(x):
        calls.append(x)
        if x.item() == 3:
            raise KeyError("lost")
        time.sleep(0.01)
        return x

    threads = lasting_threads()
    with pytest.raises(RuntimeError, match="Batch 3"):
        predict(Echo(act), torch.arange(1000.0).view(1000, 1), devices=TWO, batch_size=1)
    assert len(calls) < 20
    assert lasting_threads() == threads


def test_out_of_memory_names_batch_and_device_and_what_to_do():
    full = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB.")
    with pytest.raises(RuntimeError, match=r"Batch 1 failed on cpu: Lower batch_size") as caught:
        predict(failing_on(4, full), torch.arange(8.0).view(8, 1), devices=TWO, batch_size=4)
    assert "Tried to allocate 20.00 GiB" in str(caught.value)


def test_data_that_cannot_be_read_name_the_batch():
    def batches():
        yield torch.zeros(2, 1)
        raise OSError("disk gone")

    with pytest.raises(RuntimeError, match="Batch 1 could not be read: OSError: disk gone"):
        predict(Echo(), batches(), devices=TWO)


@pytest.fixture
def _ctrl_c():
    """Ctrl-C as in a terminal: where `make test &` was typed in a script, it is ignored."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("_ctrl_c")
def test_ctrl_c_stops_the_threads():
    calls = []
    numbers = count()

    def act(x):
        calls.append(x)
        time.sleep(0.01)
        if next(numbers) == 4:  # for one of the two threads: a second Ctrl-C ends the waiting
            os.kill(os.getpid(), signal.SIGINT)
        return x

    threads = lasting_threads()
    with pytest.raises(KeyboardInterrupt):
        predict(Echo(act), torch.zeros(500, 1), devices=TWO, batch_size=1)
    assert len(calls) < 50
    assert lasting_threads() == threads


# --- GPUs ---------------------------------------------------------------------------------------


@pytest.mark.gpu
def test_one_gpu_gives_what_a_plain_loop_there_gives():
    model, inputs = LeNet(), images(100)
    outputs = predict(model, inputs, devices="cuda", batch_size=16)
    assert outputs.device.type == "cpu"
    assert next(model.parameters()).device.type == "cpu"  # left where it was
    assert torch.equal(outputs, plain_loop(copy.deepcopy(model).cuda(), inputs.cuda(), 16).cpu())
    torch.testing.assert_close(outputs, plain_loop(model, inputs, 16), rtol=1e-3, atol=1e-3)


@pytest.mark.gpu
def test_a_gpu_and_the_cpu_work_together_in_order():
    model, inputs = LeNet(), images(100)
    outputs = predict(model, inputs, devices=["cuda:0", "cpu"], batch_size=4)
    torch.testing.assert_close(outputs, plain_loop(model, inputs, 4), rtol=1e-3, atol=1e-3)


@pytest.mark.gpu
def test_a_real_out_of_memory_is_explained():
    huge = Echo(lambda x: torch.empty(len(x), 1 << 44, device=x.device))
    with pytest.raises(RuntimeError, match=r"Batch 0 failed on cuda:0: Lower batch_size") as caught:
        predict(huge, torch.zeros(2, 1), devices="cuda:0")
    assert isinstance(caught.value.__cause__, torch.OutOfMemoryError)


@pytest.mark.multigpu
def test_two_gpus_are_both_used_and_give_what_one_gives():
    used = set()
    model = LeNet()
    model.register_forward_hook(lambda _, __, output: used.add(output.device))
    inputs = images(200)
    outputs = predict(model, inputs, devices=["cuda:0", "cuda:1"], batch_size=2)
    assert used == {torch.device("cuda", 0), torch.device("cuda", 1)}
    assert torch.equal(outputs, predict(model, inputs, devices="cuda:0", batch_size=2))
