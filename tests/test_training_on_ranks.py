"""Several ranks compute, and report, what one process would."""

import dataclasses

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

from torchladder.data import DeviceBatches, balanced_subset, load, loader
from torchladder.launching import LaunchError, launch
from torchladder.models import LeNet
from torchladder.training import evaluate, train


def part_of_the_data(count, test=50):
    small = load()
    part = balanced_subset(small, count, test)
    return dataclasses.replace(small, **{k: v for k, v in vars(part).items() if k != "name"})


def trained(make=LeNet, *, batch_size, rung="cpu", count=101, **options):
    """The trained parameters, and the history as plain numbers."""
    torch.manual_seed(0)
    model = make().double()
    data = part_of_the_data(count)
    model.register_forward_pre_hook(lambda module, inputs: (inputs[0].double(),))
    history = train(
        model, data, batch_size=batch_size, rung=rung, epochs=2, progress=False, **options
    )
    numbers = [(e.loss, e.accuracy, e.test_loss, e.test_accuracy) for e in history]
    return dict(model.state_dict()), numbers


@pytest.mark.slow
@pytest.mark.parametrize("options", [{}, {"on_device": True}])
def test_two_ranks_with_batch_b_equal_one_process_with_batch_2b(options):
    expected, numbers = trained(batch_size=128)
    for state, their_numbers in launch(trained, batch_size=64, rung="ddp", **options):
        for name, tensor in expected.items():
            torch.testing.assert_close(state[name], tensor, rtol=1e-9, atol=1e-12, msg=name)
        for mine, theirs in zip(numbers, their_numbers, strict=True):
            assert theirs == pytest.approx(mine, rel=1e-5)


@pytest.mark.slow
def test_ranks_share_out_a_pair_of_data_sets_as_they_do_images():
    def pair_trained():
        data = part_of_the_data(10, 7)
        pair = tuple(
            TensorDataset(data.normalise(images), labels)
            for images, labels in map(data.split, ("train", "test"))
        )
        states, numbers = [], []
        for given in (data, pair):
            torch.manual_seed(0)
            model = LeNet()
            history = train(model, given, rung="ddp", epochs=2, batch_size=8, progress=False)
            states.append(torch.cat([p.detach().flatten() for p in model.parameters()]))
            numbers.append([(e.loss, e.test_loss, e.test_accuracy) for e in history])
        return torch.equal(*states), numbers[0] == numbers[1]

    assert launch(pair_trained) == [(True, True)] * 2


@pytest.mark.slow
def test_on_step_is_called_on_every_rank():
    def steps():
        seen = []
        options = {"epochs": 2, "batch_size": 30, "on_step": lambda run: seen.append(run.step)}
        train(LeNet(), part_of_the_data(10), rung="ddp", progress=False, **options)
        return seen

    assert launch(steps) == [[1, 2, 3, 4]] * 2


@pytest.mark.slow
def test_ranks_hold_equal_parameters_even_when_the_images_cannot_be_shared_out_evenly():
    one, other = launch(trained, batch_size=64, rung="ddp", count=100 + 1, world_size=2)
    for name, tensor in one[0].items():
        assert torch.equal(tensor, other[0][name])
    assert one[1] == other[1]


def norm_net():
    return nn.Sequential(nn.Flatten(), nn.BatchNorm1d(784), nn.Linear(784, 10))


@pytest.mark.slow
def test_batch_norm_makes_two_ranks_differ_from_one_process():
    """Each rank normalises by the mean of its own half of the batch: that is not the same."""
    expected, _ = trained(norm_net, batch_size=128)
    (state, _), _ = launch(trained, norm_net, batch_size=64, rung="ddp")
    difference = (state["2.weight"] - expected["2.weight"]).abs().max()
    assert 1e-6 < difference < 0.5


@pytest.mark.slow
@pytest.mark.parametrize("options", [{}, {"ddp_options": {"broadcast_buffers": False}}])
def test_what_is_reported_is_the_accuracy_of_the_model_that_each_rank_holds_and_best_pt_too(
    tmp_path, options
):
    """Batch norm keeps statistics on each rank, of its own images, which evaluation uses."""

    def run():
        torch.manual_seed(0)
        model, data = norm_net(), part_of_the_data(20)
        more = {"rung": "ddp", "epochs": 1, "batch_size": 16, "lr": 0.01, "progress": False}
        (epoch,) = train(model, data, checkpoint_dir=tmp_path, **more, **options)
        return epoch.test_accuracy, evaluate(model, loader(data, "test")).accuracy

    for reported, of_this_rank in launch(run, world_size=3):
        best = norm_net()
        best.load_state_dict(torch.load(tmp_path / "best.pt")["model"])
        of_best = evaluate(best, loader(part_of_the_data(20), "test")).accuracy
        assert reported == pytest.approx(of_this_rank) == pytest.approx(of_best)


def test_data_parallel_without_a_gpu_is_one_process():
    if torch.cuda.is_available():
        pytest.skip("this machine has a GPU")
    expected, numbers = trained(batch_size=64)
    state, their_numbers = trained(batch_size=64, rung="dp")
    assert all(torch.equal(state[name], tensor) for name, tensor in expected.items())
    assert numbers == their_numbers


def evaluated(test):
    torch.manual_seed(0)
    data = part_of_the_data(1, test)
    rank, world_size = torch.distributed.get_rank(), torch.distributed.get_world_size()
    batches = loader(data, "test", rank=rank, world_size=world_size)
    return evaluate(LeNet(), batches, across_ranks=True)


@pytest.mark.slow
@pytest.mark.parametrize("test", [6, 7])
def test_evaluation_counts_every_image_once_on_any_number_of_ranks(test):
    torch.manual_seed(0)
    expected = evaluate(LeNet(), loader(part_of_the_data(1, test), "test"))
    for metrics in launch(evaluated, test, world_size=3):
        assert metrics.count == expected.count == 10 * test
        assert metrics.accuracy == expected.accuracy
        assert metrics.loss == pytest.approx(expected.loss, rel=1e-6)


def test_the_ranks_images_are_one_epoch_in_the_order_of_one_process():
    data = part_of_the_data(10)
    whole = loader(data, batch_size=100)
    parts = [loader(data, batch_size=50, rank=rank, world_size=2) for rank in range(2)]
    on_device = [
        DeviceBatches(data, device=torch.device("cpu"), batch_size=50, rank=r, world_size=2)
        for r in range(2)
    ]
    for epoch in range(2):
        for batches in [whole, *parts, *on_device]:
            batches.sampler.set_epoch(epoch)
        ((_, labels),) = whole
        for pair in (parts, on_device):
            (((_, one),), ((_, other),)) = pair
            assert torch.equal(torch.stack([one, other], 1).flatten(), labels)


@pytest.mark.slow
def test_a_rank_that_fails_ends_the_training_of_all():
    def fail():
        model = LeNet()
        if torch.distributed.get_rank() == 1:
            model.register_forward_hook(lambda *_: 1 / 0)
        train(model, part_of_the_data(20), rung="ddp", epochs=1, progress=False)

    with pytest.raises(LaunchError, match="rank 1 of 2 failed with ZeroDivisionError"):
        launch(fail, timeout=300)


@pytest.mark.slow
def test_options_reach_ddp():
    class HalfUsed(nn.Module):
        def __init__(self):
            super().__init__()
            self.used, self.unused = nn.Linear(784, 10), nn.Linear(784, 10)

        def forward(self, x):
            return self.used(x.flatten(1))

    def run(**options):
        data = part_of_the_data(20)
        return train(HalfUsed(), data, rung="ddp", epochs=2, progress=False, ddp_options=options)[
            -1
        ].loss

    one, other = launch(run, find_unused_parameters=True, timeout=300)
    assert one == other
    with pytest.raises(LaunchError, match="Expected to have finished reduction"):
        launch(run, timeout=300)


def test_the_upper_rungs_say_what_they_need():
    data = part_of_the_data(1)
    with pytest.raises(ValueError, match="Rung 'ddp' needs a process group: start the program"):
        train(LeNet(), data, rung="ddp")
    with pytest.raises(ValueError, match="Rung 'dp' chooses its devices itself"):
        train(LeNet(), data, rung="dp", device="cpu")


@pytest.mark.slow
def test_ranks_draw_dropout_of_their_own():
    def drawn():
        net, seen = nn.Sequential(nn.Flatten(), nn.Dropout(), nn.Linear(784, 10)), []
        net[1].register_forward_hook(lambda _, inputs, output: seen.append(output == 0))
        train(net, part_of_the_data(10), rung="ddp", epochs=1, batch_size=50, progress=False)
        return seen[0]

    one, other = launch(drawn)
    assert one.shape == other.shape
    assert not torch.equal(one, other)
