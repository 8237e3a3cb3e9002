"""The loop does what it says: averages by image, repeats exactly, leaves modes as they were."""

import math

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

from torchladder import training
from torchladder.data import balanced_subset, dataloader, load_dataset
from torchladder.launching import launch
from torchladder.models import MLP, LeNet
from torchladder.training import evaluate, get_device, train, train_epoch


@pytest.fixture(scope="module")
def data():
    """1,010 images: no multiple of the batch size, so that the last batch is small."""
    return balanced_subset(load_dataset(), 101, 50)


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
def test_the_seed_alone_decides_order_and_dropout_bit_for_bit(data):
    def trained(data, **options):
        torch.manual_seed(0)
        model = nn.Sequential(LeNet().features, nn.Flatten(), nn.Dropout(0.5), nn.Linear(400, 10))
        history = train(model, data, epochs=2, **options)
        return torch.cat([p.detach().flatten() for p in model.parameters()]), history[-1].test_loss

    (one, loss), (again, same_loss) = trained(data), trained(data)
    assert torch.equal(one, again)
    assert loss == same_loss
    pair, pair_loss = trained(as_pair(data), workers=1)
    assert torch.equal(one, pair)
    assert pair_loss == loss
    assert not torch.equal(one, trained(data, seed=1)[0])


def test_it_is_chapter_05s_loop_bit_for_bit(data):
    model, mine = new_model(), new_model()
    batches = dataloader(data)
    optimizer = torch.optim.SGD(mine.parameters(), lr=0.05, momentum=0.9, weight_decay=5e-4)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1, 0, 2 * len(batches))
    for epoch in range(2):
        batches.sampler.set_epoch(epoch)
        for images, labels in batches:
            loss = F.cross_entropy(mine(images), labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            schedule.step()
    train(model, data, epochs=2)
    assert all(map(torch.equal, mine.parameters(), model.parameters()))


def test_metrics_are_averaged_by_image_not_by_batch(data):
    model = new_model()
    metrics = evaluate(model, dataloader(data, "test", batch_size=300))  # of 300 and of 200
    with torch.no_grad():
        logits = model(data.normalise(data.test_images))
    expected = F.cross_entropy(logits, data.test_labels).item()
    assert metrics.loss == pytest.approx(expected, rel=1e-6)
    assert metrics.count == 500
    assert metrics.accuracy == (logits.argmax(1) == data.test_labels).double().mean().item()
    frozen = torch.optim.SGD(model.parameters(), lr=0.0)
    trained = train_epoch(model, dataloader(data), frozen)
    everything = evaluate(model, [(data.normalise(data.train_images), data.train_labels)])
    assert trained.count == 1010
    assert trained.loss == pytest.approx(everything.loss, rel=1e-5)
    assert trained.accuracy == everything.accuracy


def test_ignored_labels_do_not_count_and_sums_lose_no_digits():
    logits, labels = torch.randn(6, 3), torch.tensor([-100, -100, 0, 2, -100, 1])
    found = evaluate(nn.Identity(), [(logits[:2], labels[:2]), (logits[2:], labels[2:])])
    assert found.loss == pytest.approx(F.cross_entropy(logits, labels).item(), rel=1e-6)
    right = (logits.argmax(1) == labels).sum().item()
    assert (found.accuracy, found.count) == (right / 3, 3)
    losses = [(torch.zeros(2**12, 3), torch.zeros(2**12, dtype=torch.int64))] * 999
    assert evaluate(nn.Identity(), losses).loss == pytest.approx(math.log(3), rel=1e-6)


def test_evaluation_changes_neither_modes_nor_statistics_nor_gradients(data):
    model = nn.Sequential(nn.BatchNorm2d(1), nn.Dropout(0.5), nn.Flatten(), nn.Linear(784, 10))
    model[0].eval()  # frozen on purpose, while the rest trains
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    one, other = (evaluate(model, dataloader(data, "test")) for _ in range(2))
    assert one == other  # dropout was off
    with pytest.raises(ValueError, match="expected 4D input"):
        evaluate(model, [(torch.zeros(1, 3), torch.zeros(1, dtype=torch.long))])
    assert [model.training, model[0].training, model[1].training] == [True, False, True]
    assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())
    assert all(p.grad is None for p in model.parameters())


@pytest.mark.slow
@pytest.mark.parametrize(
    ("precision", "dtype"),
    [
        ("bf16-mixed", torch.bfloat16),
        pytest.param("fp16-mixed", torch.float16, marks=pytest.mark.long),
    ],
)
def test_precision_is_what_is_computed_in_and_parameters_keep_32_bits(data, precision, dtype):
    model = new_model()
    seen = set()
    model.classifier[-1].register_forward_hook(lambda *args: seen.add(args[-1].dtype))
    few = balanced_subset(data, 20, 10)  # float16 is slow on most CPUs
    history = train(model, few, epochs=2, batch_size=20, precision=precision)
    assert seen == {dtype}
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    assert history[-1].loss < history[0].loss


@pytest.mark.filterwarnings("error:Detected call of .lr_scheduler:UserWarning")
def test_the_schedule_waits_while_the_scaler_skips_steps():
    """The scale of 65,536 is too large for gradients of this size: they are infinite."""
    samples = TensorDataset(torch.full((12, 4), 1e3), torch.arange(12) % 3)
    model, seen = nn.Linear(4, 3), []

    def on_step(state):
        seen.append((model.weight.detach().clone(), state.optimizer.param_groups[0]["lr"]))

    start = model.weight.detach().clone()
    options = {"epochs": 4, "batch_size": 4, "lr": 1e-9, "precision": "fp16-mixed"}
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

    def spoil(state):
        if state.step == 8:
            nn.init.constant_(state.model.weight, float("nan"))

    options = {"epochs": 4, "batch_size": 4, "checkpoint_every": every}
    model = nn.Linear(12, 3)
    with pytest.raises(FloatingPointError, match=r"epoch 3, step [89].*nan.*not saved.*lr=0.05"):
        train(model, (samples, samples), checkpoint_dir=tmp_path, on_step=spoil, **options)
    for path in tmp_path.iterdir():
        assert torch.load(path)["model"]["weight"].isfinite().all(), path.name
    assert (tmp_path / "best.pt").exists()
    assert (tmp_path / f"step_{7 if every else 6:08}.pt").exists()
    with pytest.raises(FloatingPointError, match=r"epoch 1, step 3.*lower learning rate"):
        train(nn.Linear(12, 3), (samples, samples), lr=1e38, batch_size=4)


def test_a_model_in_channels_last_stays_so_and_learns(data):
    model = new_model().to(memory_format=torch.channels_last)
    history = train(model, data, epochs=2)
    weight = model.features[3].weight
    assert weight.is_contiguous(memory_format=torch.channels_last)
    assert history[-1].loss < history[0].loss
    lines = repr(history).splitlines()
    assert lines[0].split()[:3] == ["epoch", "loss", "accuracy"]
    assert len(lines) == 4
    assert history._repr_html_().count("<tr>") == 3
    assert history[0].images_per_second == pytest.approx(1010 / history[0].seconds)
    assert history[0].peak_memory > 50e6


def test_a_pair_may_hold_anything_with_a_length_and_an_index_and_each_epoch_has_its_order():
    samples = [(torch.tensor([i % 3, i / 30, 0, 1]), i % 3) for i in range(30)]  # labels: plain int
    model, read = MLP(4, outputs=3), []
    model.register_forward_pre_hook(lambda _, inputs: read.append(inputs[0][:, 1].tolist()))
    history = train(model, (samples, samples), batch_size=30)
    assert history[-1].loss < history[0].loss
    assert len(set(map(tuple, read))) == 5 + 1  # a new order for each epoch, one for the tests


def test_on_step_sees_every_step_with_its_loss(data):
    seen, model = [], new_model()

    def on_step(state):
        assert state.model is model
        seen.append((state.step, state.epoch, state.batch, state.loss))
        if state.step == 7:
            raise StopIteration("enough")

    history = train(model, data, epochs=2, batch_size=500, on_step=on_step)
    assert [entry[:3] for entry in seen] == [
        (1, 0, 1), (2, 0, 2), (3, 0, 3), (4, 1, 1), (5, 1, 2), (6, 1, 3)
    ]  # fmt: skip
    losses = torch.stack([entry[3] for entry in seen[:3]])
    assert not losses.requires_grad  # kept losses keep no graph
    mean = (losses * torch.tensor([500, 500, 10])).sum() / 1010
    assert history[0].loss == pytest.approx(mean.item(), rel=1e-6)
    with pytest.raises(StopIteration, match="enough"):
        train(model, data, epochs=3, batch_size=500, on_step=on_step)


def test_bad_arguments_are_named_before_anything_is_trained(data):
    for given, arguments, message in [
        (data, {"rung": "tpu"}, "No rung 'tpu': choose one of cpu, gpu, dp, ddp"),
        (data, {"rung": "ddp"}, "Rung 'ddp' needs a process group: start the program"),
        (data, {"precision": "int8"}, "precision='int8': choose one of fp32, fp16-mixed, bf16-mix"),
        (data, {"rung": "dp", "precision": "bf16-mixed"}, "DataParallel would compute in fp16"),
        (data, {"checkpoint_every": 3}, "checkpoint_every=3: name a checkpoint_dir"),
        ((as_pair(data)[0], []), {}, "test split is empty"),
        (data, {"epochs": 0}, "epochs=0: give 1 or more"),
    ]:
        model = new_model()
        before = next(model.parameters()).clone()
        with pytest.raises(ValueError, match=message):
            train(model, given, **arguments)
        assert torch.equal(before, next(model.parameters()))
    with pytest.raises(ValueError, match=r"Labels of shape \(2, 5\): give one class number per im"):
        evaluate(nn.Unflatten(1, (3, 5)), [(torch.zeros(2, 15), torch.zeros(2, 5).long())])
    with pytest.raises(ValueError, match=r"MLP'> is no model: give one such as MLP\(784\)"):
        train(MLP, data)


def test_rung_gpu_takes_the_first_gpu_or_says_why_there_is_none(monkeypatch):
    if not torch.cuda.is_available():
        with pytest.raises(ValueError, match=r"No GPU for rung 'gpu': .*Rung 'cpu' runs every"):
            get_device("gpu")
    cuda = torch.device("cuda")
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda check_available: cuda)
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 2)
    assert get_device("gpu") == torch.device("cuda:0")
    assert get_device("cpu") == torch.device("cpu")


@pytest.mark.gpu
@pytest.mark.parametrize("precision", ["fp32", "fp16-mixed", "bf16-mixed"])
def test_one_gpu_learns_as_well_as_the_cpu(data, precision):
    if "simulated" not in torch.cuda.get_device_name().lower():  # these would take minutes
        whole = train(new_model(), load_dataset(), rung="gpu", precision=precision)
        assert whole[-1].test_accuracy >= 0.85
    options = {"epochs": 4, "batch_size": 32}
    *_, expected = train(new_model(), data, **options)
    *_, epoch = train(new_model(), data, rung="gpu", precision=precision, **options)
    assert epoch.loss == pytest.approx(expected.loss, rel=0.1)
    assert epoch.test_accuracy == pytest.approx(expected.test_accuracy, abs=0.05)
    assert expected.test_accuracy > 0.7
    assert 0 < epoch.peak_memory < 1e9


def shared_buffer():
    net = nn.Linear(2, 2)
    net.register_buffer("kept", (torch.arange(12.0) + 100 * dist.get_rank()).view(3, 4)[:, ::2])
    training._share_buffers(net)
    return net.kept.tolist()


@pytest.mark.slow
def test_ranks_share_a_buffer_that_lies_in_memory_with_gaps():
    of_rank_0 = torch.arange(12.0).view(3, 4)[:, ::2].tolist()
    assert launch(shared_buffer, backend="gloo", show="none") == 2 * [of_rank_0]
