"""Weights of any wrapping arrive by name, or the model stays as it was."""

import pytest
import torch
from checkpoint_files import Counting, net, saved
from torch import nn
from torch.nn.parallel import DataParallel

from torchclinic.checkpoints import CheckpointError, load_into


def same(model, other):
    return all(map(torch.equal, model.state_dict().values(), other.state_dict().values()))


def copy_of(model):
    return {key: value.clone() for key, value in model.state_dict().items()}


def test_any_wrapping_loads_into_any_other():
    wraps = [lambda model: model, DataParallel, torch.compile]
    wraps.append(lambda model: torch.compile(DataParallel(model)))
    for from_, into in [(a, b) for a in wraps for b in wraps]:
        model = into(net())
        for parameter in model.parameters():
            nn.init.zeros_(parameter)
        report = load_into(model, from_(net()).state_dict())
        assert same(model, net())
        assert len(report.names) == 11


@pytest.fixture
def heads():
    torch.manual_seed(0)
    old = nn.ModuleDict({"body": nn.Linear(8, 4), "fc": nn.Linear(4, 1000)})
    return old, nn.ModuleDict({"body": nn.Linear(8, 4), "myFc": nn.Linear(4, 200)})


def test_a_new_head_is_named(heads):
    old, new = heads
    head = new["myFc"].weight.clone()
    report = load_into(new, DataParallel(old).state_dict(), skip=["fc", "myFc"])
    assert torch.equal(new["body"].weight, old["body"].weight)
    assert torch.equal(new["myFc"].weight, head)
    assert report.skipped == ["myFc.weight", "myFc.bias"]
    assert set(report.names) == {"body.weight", "body.bias"}


def test_a_head_of_the_same_name_and_another_shape_is_left_or_initialised(heads):
    old, new = heads
    new["fc"] = new.pop("myFc")
    nn.init.ones_(new["fc"].weight)
    report = load_into(new, old.state_dict(), skip=["fc"])
    assert new["fc"].weight.eq(1).all()
    assert report.skipped == ["fc.weight", "fc.bias"]
    report = load_into(new, old.state_dict(), reinit=["fc"])
    assert 0 < new["fc"].weight.abs().max() <= 0.5  # as reset_parameters() draws them
    assert report.reinitialised == ["fc.weight", "fc.bias"]


def test_an_error_has_both_shapes_and_changes_nothing(heads):
    old, new = heads
    new["fc"] = nn.Linear(4, 10)
    before, messages = copy_of(new), []
    for options in ({}, {"reinit": ["myFc"]}, {"skip": ["nofc"]}, {"reinit": ["myFcc"]}):
        with pytest.raises(CheckpointError) as caught:
            load_into(new, old.state_dict(), **options)
        messages.append(str(caught.value))
        assert all(torch.equal(new.state_dict()[k], v) for k, v in before.items())
    assert "fc.weight is (1000, 4) in the file, (10, 4) in the model" in messages[0]
    assert "2 missing (myFc.weight" in messages[0]
    assert "no 'myFcc'; is it 'myFc'?" in messages[3]


def test_not_strict_loads_what_fits_but_not_nothing(heads):
    old, new = heads
    report = load_into(new, old.state_dict(), strict=False)
    assert report.missing_keys == ["myFc.weight", "myFc.bias"]
    assert report.unexpected_keys == ["fc.weight", "fc.bias"]
    assert "missing     2: myFc.weight, myFc.bias" in repr(report)
    for state in (nn.Linear(2, 2).state_dict(), {"model": nn.Conv2d(1, 1, 1).state_dict()}):
        with pytest.raises(CheckpointError, match="no key fits"):
            load_into(new, state, strict=False)


def test_a_part_is_made_anew_with_its_buffers_or_refused():
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2), nn.ParameterList([torch.ones(1)]))
    model[1].running_mean.fill_(3)
    state = copy_of(model)
    for name in ("2", "2.0"):
        with pytest.raises(CheckpointError, match=r"has no reset_parameters\(\)"):
            load_into(model, state, reinit=[name])
    load_into(model, state, reinit=["1"])
    assert not model[1].running_mean.any()


def test_a_model_on_the_meta_device_is_refused():
    with torch.device("meta"):
        model = nn.Linear(2, 1)
    with pytest.raises(CheckpointError, match="to_empty"):
        load_into(model, nn.Linear(2, 1).state_dict())


def test_a_model_with_extra_state_loads_its_own_state_dict(tmp_path):
    path = saved(tmp_path, DataParallel(Counting(7)).state_dict())
    for source in (path, Counting(7).state_dict()):
        model = Counting(0)
        load_into(model, source)
        assert model.seen == 7
