"""The loop does what it says: averages by image, repeats exactly, leaves modes as they were."""

import dataclasses

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from torchladder.data import balanced_subset, flip_and_crop, load, loader
from torchladder.models import MLP, LeNet
from torchladder.training import device_of, evaluate, train, train_epoch

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def data():
    """1,010 images: no multiple of the batch size, so that the last batch is small."""
    small = load()
    keep = balanced_subset(small, 101, 50)
    return dataclasses.replace(small, **{k: v for k, v in vars(keep).items() if k != "name"})


def new_model():
    torch.manual_seed(0)
    return LeNet()


def as_pair(data):
    """The same images and labels as two data sets of any kind."""
    return tuple(
        TensorDataset(data.normalise(images), labels)
        for images, labels in map(data.split, ("train", "test"))
    )


@pytest.mark.slow
def test_five_epochs_on_the_bundled_set_reach_85_percent():
    history = train(new_model(), load(), epochs=5, progress=False)
    assert history[-1].test_accuracy >= 0.85
    assert [epoch.epoch for epoch in history] == [1, 2, 3, 4, 5]
    assert history[0].loss > history[-1].loss


@pytest.mark.slow
@pytest.mark.parametrize("on_device", [False, True])
def test_the_same_seed_gives_the_same_parameters_bit_for_bit(data, on_device):
    one, other, third = new_model(), new_model(), new_model()
    train(one, data, epochs=2, progress=False)
    train(other, data, epochs=2, progress=False, on_device=on_device)
    train(third, data, epochs=2, progress=False, seed=1)
    pairs = list(zip(one.parameters(), other.parameters(), strict=True))
    assert all(torch.equal(a, b) for a, b in pairs)
    assert not torch.equal(next(one.parameters()), next(third.parameters()))


def test_dropout_follows_the_seed_too(data):
    def trained():
        torch.manual_seed(0)
        model = nn.Sequential(nn.Flatten(), nn.Dropout(0.5), nn.Linear(784, 10))
        train(model, data, epochs=1, progress=False)
        return model[2].weight

    assert torch.equal(trained(), trained())


@pytest.mark.parametrize("on_device", [False, True])
def test_augmentation_follows_the_seed_too(data, on_device):
    def trained(augment):
        model = new_model()
        options = {"epochs": 1, "batch_size": 256, "progress": False, "on_device": on_device}
        return train(model, data, augment=augment, **options)[0].loss

    assert trained(flip_and_crop) == trained(flip_and_crop)
    assert trained(flip_and_crop) != trained(None)


def test_metrics_are_averaged_by_image_not_by_batch(data):
    model = new_model()
    batches = loader(data, "test", batch_size=300)  # 500 images: batches of 300 and 200
    metrics = evaluate(model, batches)
    with torch.no_grad():
        logits = model(data.normalise(data.test_images))
    expected = F.cross_entropy(logits, data.test_labels).item()
    assert metrics.loss == pytest.approx(expected, rel=1e-6)
    assert metrics.count == 500
    assert metrics.accuracy == (logits.argmax(1) == data.test_labels).double().mean().item()


def test_training_metrics_count_every_image_once(data):
    model = new_model()
    frozen = torch.optim.SGD(model.parameters(), lr=0.0)
    metrics = train_epoch(model, loader(data, batch_size=64), frozen)
    everything = evaluate(model, [(data.normalise(data.train_images), data.train_labels)])
    assert metrics.count == 1010
    assert metrics.loss == pytest.approx(everything.loss, rel=1e-5)
    assert metrics.accuracy == everything.accuracy


def test_evaluation_changes_neither_modes_nor_statistics_nor_gradients(data):
    model = nn.Sequential(nn.BatchNorm2d(1), nn.Dropout(0.5), nn.Flatten(), nn.Linear(784, 10))
    model[0].eval()  # frozen on purpose, while the rest trains
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    one, other = (evaluate(model, loader(data, "test")) for _ in range(2))
    assert one == other  # dropout was off
    assert [model.training, model[0].training, model[1].training] == [True, False, True]
    assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())
    assert all(p.grad is None for p in model.parameters())


def test_evaluation_puts_modes_back_after_an_error():
    model = nn.Sequential(nn.Linear(2, 2))
    with pytest.raises(RuntimeError):
        evaluate(model, [(torch.zeros(1, 3), torch.zeros(1, dtype=torch.long))])
    assert model.training


def test_the_learning_rate_falls_linearly_to_zero(data):
    model = new_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    rates = []
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 - step / 16)
    step = schedule.step
    schedule.step = lambda: (rates.append(schedule.get_last_lr()[0]), step())
    train_epoch(model, loader(data), optimizer, schedule)
    assert rates[0] == 0.05
    assert rates == pytest.approx([0.05 * (1 - i / 16) for i in range(16)])
    assert schedule.get_last_lr()[0] == 0.0


@pytest.mark.slow
@pytest.mark.parametrize("amp", ["bf16", pytest.param("fp16", marks=pytest.mark.long)])
def test_mixed_precision_computes_in_16_bits_and_keeps_32_bit_parameters(data, amp):
    model = new_model()
    seen = set()
    model.classifier[-1].register_forward_hook(lambda *args: seen.add(args[-1].dtype))
    few = balanced_subset(data, 20, 10)  # float16 is slow on most CPUs
    history = train(model, few, epochs=2, batch_size=20, amp=amp, progress=False)
    assert seen == {torch.bfloat16 if amp == "bf16" else torch.float16}
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    assert history[-1].loss < history[0].loss


@pytest.mark.filterwarnings("error:Detected call of .lr_scheduler:UserWarning")
def test_the_schedule_waits_while_the_scaler_skips_steps():
    """The scale of 65,536 is too large for gradients of this size: they are infinite."""
    samples = TensorDataset(torch.full((12, 4), 1e3), torch.arange(12) % 3)
    model, seen = nn.Linear(4, 3), []

    def on_step(run):
        seen.append((model.weight.detach().clone(), run.optimizer.param_groups[0]["lr"]))

    start = model.weight.detach().clone()
    options = {"epochs": 4, "batch_size": 4, "lr": 1e-9, "amp": "fp16", "progress": False}
    train(model, (samples, samples), on_step=on_step, **options)
    weights, rates = zip(*seen, strict=True)
    moves = sum(not torch.equal(*pair) for pair in zip([start, *weights], weights, strict=False))
    assert torch.equal(weights[0], start)  # skipped
    assert 0 < moves < 12
    assert rates[0] == 1e-9
    assert rates[-1] == pytest.approx(1e-9 * (1 - moves / 12))


@pytest.mark.parametrize("every", [None, 1])
def test_a_run_that_diverges_stops_with_a_clear_error_and_keeps_the_good_files(tmp_path, every):
    samples = TensorDataset(torch.eye(12), torch.arange(12) % 3)

    def spoil(run):
        if run.step == 8:
            nn.init.constant_(run.model.weight, float("nan"))

    options = {"epochs": 4, "batch_size": 4, "checkpoint_every": every, "progress": False}
    model = nn.Linear(12, 3)
    with pytest.raises(FloatingPointError, match=r"epoch 3, step [89].*nan.*not saved.*lr=0.05"):
        train(model, (samples, samples), checkpoint_dir=tmp_path, on_step=spoil, **options)
    for path in tmp_path.iterdir():
        assert torch.load(path)["model"]["weight"].isfinite().all(), path.name
    assert (tmp_path / "best.pt").exists()
    assert (tmp_path / f"step_{7 if every else 6:08}.pt").exists()
    with pytest.raises(FloatingPointError, match=r"epoch 1, step 3.*lower learning rate"):
        train(nn.Linear(12, 3), (samples, samples), lr=1e38, batch_size=4, progress=False)


def test_without_amp_nothing_is_computed_in_16_bits(data):
    model = new_model()
    seen = set()
    model.classifier[-1].register_forward_hook(lambda *args: seen.add(args[-1].dtype))
    train(model, data, epochs=1, progress=False)
    assert seen == {torch.float32}


def test_a_model_in_channels_last_stays_so_and_learns(data):
    model = new_model().to(memory_format=torch.channels_last)
    history = train(model, data, epochs=2, progress=False)
    weight = model.features[3].weight
    assert weight.is_contiguous(memory_format=torch.channels_last)
    assert history[-1].loss < history[0].loss


@pytest.mark.parametrize("workers", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_a_pair_of_data_sets_trains_as_the_same_images_do(data, workers):
    one, other = new_model(), new_model()
    expected = train(one, data, epochs=2, progress=False)
    history = train(other, as_pair(data), epochs=2, workers=workers, progress=False)
    for a, b in zip(one.parameters(), other.parameters(), strict=True):
        assert torch.equal(a, b)
    assert history[-1].test_loss == expected[-1].test_loss


def test_a_pair_may_hold_anything_that_has_a_length_and_an_index():
    samples = [(torch.full((4,), float(i % 3)), i % 3) for i in range(30)]  # labels: plain int
    history = train(MLP(4, outputs=3), (samples, samples), batch_size=7, progress=False)
    assert len(history) == 5
    assert history[-1].loss < history[0].loss


def test_on_step_sees_every_step_with_its_loss_and_learning_rate(data):
    seen, model = [], new_model()

    def on_step(run):
        assert run.model is model
        seen.append((run.step, run.epoch, run.batch, run.loss, run.schedule.get_last_lr()[0]))

    history = train(model, data, epochs=2, batch_size=500, progress=False, on_step=on_step)
    assert [entry[:3] for entry in seen] == [
        (1, 0, 1), (2, 0, 2), (3, 0, 3), (4, 1, 1), (5, 1, 2), (6, 1, 3)
    ]  # fmt: skip
    losses = torch.stack([entry[3] for entry in seen[:3]])
    assert not losses.requires_grad  # kept losses keep no graph
    mean = (losses * torch.tensor([500, 500, 10])).sum() / 1010
    assert history[0].loss == pytest.approx(mean.item(), rel=1e-6)
    assert [entry[4] for entry in seen] == pytest.approx([0.05 * (1 - i / 6) for i in range(1, 7)])


@pytest.mark.slow
def test_a_pair_goes_on_in_the_middle_of_an_epoch_and_on_step_with_it(data, tmp_path):
    """As if nothing had happened, and no step is seen twice but those after the last save."""

    def run(folder, seen, stop_after=None):
        def on_step(run):
            seen.append(run.step)
            if run.step == stop_after:
                raise InterruptedError

        model = new_model()
        options = {"epochs": 2, "batch_size": 100, "checkpoint_every": 3, "progress": False}
        train(model, as_pair(data), checkpoint_dir=folder, on_step=on_step, **options)
        return model

    whole = run(tmp_path / "whole", [])
    first, second = [], []
    with pytest.raises(InterruptedError):
        run(tmp_path / "broken", first, stop_after=16)
    broken = run(tmp_path / "broken", second)
    assert first + second == [*range(1, 17), *range(16, 23)]  # 22 steps; the 15th was saved
    for a, b in zip(whole.parameters(), broken.parameters(), strict=True):
        assert torch.equal(a, b)


def test_an_error_in_on_step_ends_the_training(data):
    def on_step(run):
        if run.step == 2:
            raise StopIteration("enough")

    with pytest.raises(StopIteration, match="enough"):
        train(new_model(), data, progress=False, on_step=on_step)


@pytest.mark.slow
def test_workers_load_the_same_batches(data):
    one, other = new_model(), new_model()
    train(one, data, epochs=2, progress=False)
    train(other, data, epochs=2, progress=False, workers=1)
    assert torch.equal(next(one.parameters()), next(other.parameters()))


def test_the_history_prints_a_row_an_epoch_in_text_and_html(data):
    history = train(new_model(), data, epochs=2, progress=False)
    lines = repr(history).splitlines()
    assert lines[0].split()[:3] == ["epoch", "loss", "accuracy"]
    assert len(lines) == 4
    assert history._repr_html_().count("<tr>") == 3
    assert history[0].images_per_second == pytest.approx(1010 / history[0].seconds)
    assert history[0].peak_memory > 50e6


@pytest.mark.parametrize("seed", [2**63 - 1, -(2**63)])
def test_the_largest_seeds_work(data, seed):
    tiny = balanced_subset(data, 1, 1)
    train(MLP(784), tiny, epochs=2, batch_size=10, seed=seed, progress=False)


def test_a_batch_may_hold_all_images(data):
    tiny = balanced_subset(data, 1, 1)
    assert len(train(MLP(784), tiny, epochs=1, batch_size=10, progress=False)) == 1
    with pytest.raises(ValueError, match="batch_size=11: there are 10 training images"):
        train(MLP(784), tiny, epochs=1, batch_size=11, progress=False)


def test_the_bar_is_silent_when_asked(data, capfd, monkeypatch):
    monkeypatch.setenv("TQDM_DISABLE", "0")
    train(new_model(), data, epochs=1, progress=False)
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"epochs": 0}, "epochs=0: train for at least one"),
        ({"lr": 0}, "lr=0: the learning rate is above 0"),
        ({"lr": float("nan")}, "lr=nan: the learning rate is above 0"),
        ({"lr": float("inf")}, "lr=inf: the learning rate is above 0 and finite"),
        ({"seed": 10**22}, "seed=10000000000000000000000: choose a whole number"),
        ({"seed": -(2**63) - 1}, "seed=-9223372036854775809: choose a whole number"),
        ({"rung": "tpu"}, "No rung 'tpu': choose one of cpu, gpu, dp, ddp"),
        ({"amp": "int8"}, "amp='int8': choose None, 'fp16' or 'bf16'"),
        ({"batch_size": 0}, "batch_size=0: a batch holds at least one image"),
        (
            {"batch_size": 99999999999999},
            "batch_size=99999999999999: there are 1,010 training images",
        ),
        ({"workers": -1}, "workers=-1: give 0"),
        ({"workers": 5000}, r"workers=5000: far too many for \d+ cores"),
        ({"device": "gpu"}, "'gpu' is not a device"),
        ({"rung": "gpu", "device": "cpu"}, "Device 'cpu' is not on rung 'gpu'"),
        ({"rung": "dp", "amp": "bf16"}, "amp='bf16': DataParallel would compute in fp16"),
        ({"on_device": True, "workers": 2}, "workers=2: nothing to load"),
    ],
)
def test_bad_arguments_are_named_before_anything_is_trained(data, arguments, message):
    model = new_model()
    before = next(model.parameters()).clone()
    with pytest.raises(ValueError, match=message):
        train(model, data, progress=False, **arguments)
    assert torch.equal(before, next(model.parameters()))


class Stream(IterableDataset):
    def __iter__(self):
        yield torch.zeros(1, 28, 28), 0

    def __len__(self):  # it may have one; that does not make it one to index
        return 1


@pytest.mark.parametrize(
    ("wrong", "arguments", "message"),
    [
        (lambda pair: pair[0], {}, "data is a TensorDataset: give an ImageData or a pair"),
        (lambda pair: DataLoader(pair[0]), {}, "data is a DataLoader: give an ImageData or a pair"),
        (lambda pair: (Stream(), pair[1]), {}, "train set is an IterableDataset.*Chapter 10"),
        (lambda pair: (pair[0], Stream()), {}, "test set is an IterableDataset.*Chapter 10"),
        (lambda pair: (pair[0], []), {}, "test split is empty"),
        (lambda pair: pair, {"on_device": True}, "on_device=True: only an ImageData"),
        (lambda pair: pair, {"batch_size": 1011}, "batch_size=1011: there are 1,010 training"),
    ],
)
def test_data_that_cannot_be_trained_on_are_named(data, wrong, arguments, message):
    with pytest.raises(ValueError, match=message):
        train(new_model(), wrong(as_pair(data)), progress=False, **arguments)


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
def test_rung_gpu_without_a_gpu_says_why(data):
    with pytest.raises(ValueError, match=r"No GPU for rung 'gpu': .*Rung 'cpu' runs everywhere"):
        train(MLP(784), data, rung="gpu")


def test_a_pretend_gpu_is_chosen_on_rung_gpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert device_of("gpu") == torch.device("cuda:0")
    assert device_of("gpu", "cuda:1") == torch.device("cuda:1")
    assert device_of("cpu") == CPU
    with pytest.raises(ValueError, match="Device 'cuda:1' is not on rung 'cpu'"):
        device_of("cpu", "cuda:1")
    with pytest.raises(ValueError, match="No GPU 2 here"):
        device_of("gpu", "cuda:2")


def test_no_batches_is_an_error():
    with pytest.raises(ValueError, match="No batches"):
        evaluate(MLP(), [])


@pytest.mark.gpu
@pytest.mark.parametrize("amp", [None, "fp16", "bf16"])
@pytest.mark.parametrize("on_device", [False, True])
def test_one_gpu_learns_as_well_as_the_cpu(amp, on_device):
    history = train(new_model(), load(), rung="gpu", amp=amp, on_device=on_device, progress=False)
    assert history[-1].test_accuracy >= 0.85
    assert 0 < history[-1].peak_memory < 1e9
