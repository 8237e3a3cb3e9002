"""Several ranks compute, and report, what one process would."""

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

from torchladder.data import balanced_subset, dataloader, load_dataset
from torchladder.launching import launch
from torchladder.models import LeNet
from torchladder.training import evaluate, train


def part_of_the_data(count, test=50):
    return balanced_subset(load_dataset(), count, test)


def trained(*, batch_size, rung="cpu", as_pair=False):
    """The trained parameters, and the history as plain numbers."""
    torch.manual_seed(0)
    model = LeNet().double()
    data = part_of_the_data(101)
    if as_pair:
        data = [TensorDataset(data.normalise(x), y) for x, y in map(data.split, ("train", "test"))]
    model.register_forward_pre_hook(lambda module, inputs: (inputs[0].double(),))
    history = train(model, data, batch_size=batch_size, rung=rung, epochs=2)
    numbers = [(e.loss, e.accuracy, e.test_loss, e.test_accuracy) for e in history]
    return dict(model.state_dict()), numbers


@pytest.mark.slow
def test_two_ranks_with_batch_b_of_a_pair_equal_one_process_with_batch_2b():
    """Of the book's own sets, test_resuming.py shows it with another number of ranks."""
    expected, numbers = trained(batch_size=128)
    one, other = launch(trained, batch_size=64, rung="ddp", as_pair=True)
    assert all(torch.equal(tensor, other[0][name]) for name, tensor in one[0].items())
    assert one[1] == other[1]
    torch.testing.assert_close(one[0], expected, rtol=1e-9, atol=1e-12)
    for mine, theirs in zip(numbers, one[1], strict=True):
        assert theirs == pytest.approx(mine, rel=1e-5)


def norm_net():
    return nn.Sequential(nn.Flatten(), nn.BatchNorm1d(784), nn.Linear(784, 10))


@pytest.mark.slow
def test_what_is_reported_is_the_accuracy_of_the_model_that_each_rank_holds_and_best_pt_too(
    tmp_path,
):
    """Batch norm keeps statistics on each rank, of its own images, which evaluation uses."""

    def run():
        torch.manual_seed(0)
        model, data, steps = norm_net(), part_of_the_data(20), []
        options = {"rung": "ddp", "epochs": 1, "batch_size": 16, "lr": 0.01}
        options |= {"checkpoint_dir": tmp_path, "on_step": lambda state: steps.append(state.step)}
        (epoch,) = train(model, data, **options)
        return epoch.test_accuracy, evaluate(model, dataloader(data, "test")).accuracy, steps

    for reported, of_this_rank, steps in launch(run, world_size=3):
        best = norm_net()
        best.load_state_dict(torch.load(tmp_path / "best.pt")["model"])
        of_best = evaluate(best, dataloader(part_of_the_data(20), "test")).accuracy
        assert reported == pytest.approx(of_this_rank) == pytest.approx(of_best)
        assert steps == [1, 2, 3, 4, 5]  # of 67 images in batches of 16, on every rank


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
def test_data_parallel_without_a_gpu_is_one_process():
    expected, numbers = trained(batch_size=64)
    state, their_numbers = trained(batch_size=64, rung="dp")
    torch.testing.assert_close(state, expected, rtol=0, atol=0)
    assert numbers == their_numbers


def evaluated(test):
    torch.manual_seed(0)
    data = part_of_the_data(1, test)
    rank, world_size = torch.distributed.get_rank(), torch.distributed.get_world_size()
    batches = dataloader(data, "test", rank=rank, world_size=world_size)
    return evaluate(LeNet(), batches, across_ranks=True)


@pytest.mark.slow
def test_padding_images_are_not_counted_twice():
    """70 images cannot be shared out evenly among three ranks."""
    torch.manual_seed(0)
    expected = evaluate(LeNet(), dataloader(part_of_the_data(1, 7), "test"))
    for metrics in launch(evaluated, 7, world_size=3):
        assert metrics.count == expected.count == 70
        assert metrics.accuracy == expected.accuracy
        assert metrics.loss == pytest.approx(expected.loss, rel=1e-6)


@pytest.mark.slow
def test_ranks_draw_dropout_of_their_own():
    def drawn():
        net, seen = nn.Sequential(nn.Flatten(), nn.Dropout(), nn.Linear(784, 10)), []
        net[1].register_forward_hook(lambda _, inputs, output: seen.append(output == 0))
        net.eval()  # train sees to it that dropout drops
        train(net, part_of_the_data(10), rung="ddp", epochs=1, batch_size=50)
        return seen[0]

    one, other = launch(drawn)
    assert one.shape == other.shape
    assert not torch.equal(one, other)
