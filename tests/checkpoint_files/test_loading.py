"""Weights of any wrapping arrive by name, or the model stays as it was."""

from collections import OrderedDict
from copy import deepcopy

import pytest
import torch
from kinds_of_files import Counting, Rebuilt, one_rank, saved
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DataParallel
from torch.nn.utils import parametrizations, weight_norm
from torch.optim.swa_utils import AveragedModel

from torchclinic.checkpoint_files import CheckpointError, fix_checkpoint, load_into


def test_what_does_not_fit_is_an_error_that_changes_nothing_or_is_left_out_on_request():
    torch.manual_seed(0)
    old = nn.ModuleDict({"body": nn.Linear(8, 4), "fc": nn.Linear(4, 1000)})
    parts = {"body": nn.Linear(8, 4), "fc": nn.Linear(4, 10), "myFc": nn.Linear(4, 200)}
    new = nn.ModuleDict(parts)
    before = {key: value.clone() for key, value in new.state_dict().items()}
    with pytest.raises(CheckpointError) as caught:
        load_into(new, DataParallel(old).state_dict())
    assert all(torch.equal(new.state_dict()[k], v) for k, v in before.items())
    assert "fc.weight is (1000, 4) in the file, (10, 4) in the model" in str(caught.value)
    assert "2 missing (myFc.weight" in str(caught.value)
    report = load_into(new, DataParallel(old).state_dict(), strict=False)
    assert torch.equal(new["body"].weight, old["body"].weight)
    assert torch.equal(new["fc"].weight, before["fc.weight"])
    assert report.missing_keys == ["myFc.weight", "myFc.bias"]
    assert list(report.mismatched_shapes) == ["fc.weight", "fc.bias"]
    assert "missing     2: myFc.weight, myFc.bias" in repr(report)
    for model in (new, nn.BatchNorm1d(3), nn.Identity()):  # the second makes its counter itself
        with pytest.raises(CheckpointError, match="no key fits"):
            load_into(model, {"model": nn.Linear(2, 2).state_dict()}, strict=False)


def test_another_head_on_a_model_with_batch_norm_has_a_way_out(tmp_path):
    """Batch norm may judge keys itself, so torch's own refusal comes first."""
    old, new = (nn.Sequential(nn.BatchNorm1d(4), nn.Linear(4, n)) for n in (7, 5))
    path = saved(tmp_path, DataParallel(old).state_dict())
    with pytest.raises(CheckpointError) as caught:
        load_into(new, path)
    assert "1.weight is (7, 4) in the file, (5, 4) in the model; 1.bias is" in str(caught.value)
    assert str(caught.value).endswith(
        " strict=False) would leave 2 of the model's keys as they are."
    )
    assert list(load_into(new, path, strict=False).mismatched_shapes) == ["1.weight", "1.bias"]


def test_a_refusal_by_a_models_own_code_is_not_cut_within_a_word():
    model = nn.Linear(2, 1)
    model.register_load_state_dict_pre_hook(lambda *_: None)
    with pytest.raises(CheckpointError, match=r"refused it \(.* \.\.\.\)\."):
        load_into(model, {"weight": torch.ones(9, 8, 7), "bias": torch.ones(6, 5, 4)})


def test_a_part_is_chosen_by_its_name_without_wrappers(tmp_path):
    whole = nn.ModuleDict({"visual": nn.Linear(2, 1), "text": nn.Linear(3, 1)})
    path = saved(tmp_path, {"state_dict": DataParallel(whole).state_dict(), "epoch": 3})
    for key in ("visual", "module.visual", "state_dict.visual"):
        load_into(part := nn.Linear(2, 1), path, key=key)
        assert torch.equal(part.weight, whole["visual"].weight)
    averaged = AveragedModel(nn.ModuleDict({"visual": nn.Linear(2, 1)})).state_dict()
    both = {"model": whole.state_dict(), "model_ema": averaged}
    load_into(part := nn.Linear(2, 1), both, key="visual")
    assert torch.equal(part.weight, whole["visual"].weight)


def test_the_average_of_mmengine_is_loaded_and_a_models_own_steps_are_not_left_out(tmp_path):
    model, steps = nn.Linear(2, 1), {"steps": torch.tensor(3)}
    average = steps | DataParallel(nn.Linear(2, 1)).state_dict()
    path = saved(tmp_path, {"state_dict": model.state_dict(), "ema_state_dict": average})
    load_into(model, path, key="ema_state_dict")
    assert torch.equal(model.weight, average["module.weight"])
    report = fix_checkpoint(path, tmp_path / "y.pt", key="ema_state_dict")
    assert list(report.names) == ["weight", "bias"]
    assert "put there by AveragedModel" in " ".join(repr(report).split())
    with pytest.raises(CheckpointError, match=r"1 unexpected \(steps\)"):
        load_into(nn.Linear(2, 1), steps | model.state_dict())
    report = fix_checkpoint(saved(tmp_path, steps | model.state_dict()), tmp_path / "y.pt")
    assert "steps" in report.names


def test_a_model_on_the_meta_device_is_refused():
    with torch.device("meta"):
        model = nn.Linear(2, 1)
    with pytest.raises(CheckpointError, match="to_empty"):
        load_into(model, nn.Linear(2, 1).state_dict())


def test_a_model_whose_shapes_the_first_batch_decides_is_refused():
    norm = nn.BatchNorm1d
    model = nn.Sequential(norm(2), nn.LazyLinear(1), nn.LazyBatchNorm1d())
    state = nn.Sequential(norm(2), nn.Linear(2, 1), norm(1)).state_dict()
    state["0.weight"] += 1
    with pytest.raises(CheckpointError, match=r"'1\.weight' has no shape yet.* Call the model"):
        load_into(model, state)
    assert torch.equal(model[0].weight, torch.ones(2))
    model(torch.ones(3, 2))
    load_into(model, state)
    assert torch.equal(model[0].weight, state["0.weight"])


def test_a_model_with_a_sharded_part_is_refused_and_stays_as_it_was():
    model = nn.Sequential(nn.Linear(2, 1), nn.Linear(1, 1))
    before = model[0].weight.clone()
    with one_rank():
        fully_shard(model[1], mesh=torch.distributed.init_device_mesh("cpu", (1,)))
        says = r"'1\.weight' is sharded\. torch.*full_state_dict"
        with pytest.raises(CheckpointError, match=says):
            load_into(model, nn.Sequential(nn.Linear(2, 1), nn.Linear(1, 1)).state_dict())
    assert torch.equal(model[0].weight, before)


def test_what_is_rounded_to_the_models_dtype_is_told():
    done = load_into(nn.Linear(2, 1), nn.Linear(2, 1).double().state_dict())
    assert done.converted == {"float64 to float32": 2}
    assert "converted   2 tensors from float64 to float32" in repr(done)


@pytest.mark.parametrize(
    ("number", "dtype", "count"),
    [
        (1 + 2j, "float32", 1),
        (1.7, "int64", 1),
        (float("nan"), "int32", 1),
        (1e6, "float16", 1),
        (0.1, "bfloat16", 0),
        (float("inf"), "float16", 0),
        (torch.tensor(-1), "uint64", 1),
        (torch.tensor(1e300, dtype=torch.float64), "float32", 1),
        (1e3, "float8_e4m3fn", 1),
        (-1.0, "float8_e8m0fnu", 1),
        (0.3, "float8_e4m3fn", 0),
    ],
)
def test_numbers_that_a_dtype_changes_more_than_by_rounding_are_named(number, dtype, count):
    model = nn.Module()
    model.register_buffer("w", torch.zeros(2, dtype=getattr(torch, dtype)))
    one, number = torch.tensor(1), torch.as_tensor(number)
    report = load_into(model, {"w": torch.stack([number, one.to(number.dtype)])})
    assert report.changed == ({"w": 1} if count else {})
    row = "changed     numbers that are not only rounded in 1 of 1 tensors: w (1)"
    assert (row in repr(report)) == bool(count)


def test_a_model_with_extra_state_loads_its_own_state_dict():
    load_into(model := Counting(0), DataParallel(Counting(7)).state_dict())
    assert model.seen == 7


class Picky(Counting):
    """A module that refuses a state after its parameters were copied."""

    def set_extra_state(self, state):
        super().set_extra_state(state)
        if self.seen is None:
            raise state["stop"]


def test_a_dtype_that_cannot_be_copied_changes_nothing(tmp_path):
    path = saved(tmp_path, {"weight": torch.ones(2, 2), "bias": Rebuilt(torch.uint4)})
    model = nn.Linear(2, 2)
    before = model.weight.clone()
    with pytest.raises(CheckpointError, match=r"x\.pt: 'bias' .*uint4.*float32"):
        load_into(model, path)
    assert torch.equal(model.weight, before)


def test_an_expanded_buffer_is_loaded():
    model = nn.Module()
    model.register_buffer("mask", torch.zeros(1).expand(3))
    model.register_buffer("huge", torch.zeros(1).expand(10**14), persistent=False)
    before = model.mask
    with pytest.raises(CheckpointError, match="no key fits"):
        load_into(model, {"other": torch.arange(3.0)})
    assert model.mask is before
    load_into(model, {"mask": torch.arange(3.0)})
    assert model.mask.tolist() == [0, 1, 2]


def test_a_buffer_that_cannot_be_written_to_changes_nothing():
    model = nn.Linear(2, 3)
    with torch.inference_mode():
        model.register_buffer("mask", torch.zeros(3))
    before, version = model.weight.clone(), model.weight._version
    state = {"weight": torch.ones(3, 2), "bias": torch.ones(3), "mask": torch.ones(3)}
    with pytest.raises(CheckpointError, match=r"'mask' cannot be copied .* clone"):
        load_into(model, state)
    assert torch.equal(model.weight, before)
    assert model.weight._version == version  # a graph that needs it goes on


def test_a_tied_number_may_be_any_of_a_row():
    model = nn.Linear(1, 1, bias=False)
    model.tied = model.weight
    state = {"weight": torch.arange(8.0)[3::9].view(1, 1), "tied": torch.tensor([[3.0]])}
    assert state["weight"].stride(0) != 1
    load_into(model, state)
    assert model.weight == 3


class Replacing(nn.Linear):
    """A module whose state dict is a copy, and that takes new parameters in place of its own."""

    def _save_to_state_dict(self, destination, prefix, keep_vars):
        super()._save_to_state_dict(destination, prefix, keep_vars)
        destination[f"{prefix}weight"] = self.weight.detach().clone()

    def _load_from_state_dict(self, state, prefix, *rest):
        self.weight = nn.Parameter(state[f"{prefix}weight"])
        self.bias.data.copy_(state[f"{prefix}bias"])
        raise ValueError("not these")


def test_a_module_that_replaces_its_parameters_gets_its_own_back():
    model = Replacing(2, 1)
    weight, bias = model.weight, model.bias.clone()
    before = weight.clone()
    with pytest.raises(CheckpointError, match="not these"):
        load_into(model, nn.Linear(2, 1).state_dict())
    assert model.weight is weight
    assert torch.equal(weight, before)
    assert torch.equal(model.bias, bias)


def test_a_module_that_refuses_its_state_leaves_the_model_as_it_was():
    stops = {KeyError("a count"): CheckpointError, KeyboardInterrupt(): KeyboardInterrupt}
    for stop, expected in stops.items():
        model = nn.Sequential(nn.BatchNorm1d(2), Picky(7))
        before = {key: value.clone() for key, value in model[0].state_dict().items()}
        weight = model[1].weight.clone()
        state = nn.Sequential(nn.BatchNorm1d(2), Counting(None)).state_dict()
        state = {key: value + 3 if "extra" not in key else value for key, value in state.items()}
        state["1._extra_state"]["stop"] = stop
        with pytest.raises(expected):
            load_into(model, state)
        assert all(torch.equal(model[0].state_dict()[k], v) for k, v in before.items())
        assert torch.equal(model[1].weight, weight)
        assert model[1].seen == 7


def test_a_hook_that_refuses_after_the_copying_leaves_the_model_as_it_was():
    model = nn.Linear(2, 1)
    model.register_load_state_dict_post_hook(lambda *_: {}["not these"])
    weight = model.weight.clone()
    with pytest.raises(CheckpointError, match="not these"):
        load_into(model, nn.Linear(2, 1).state_dict())
    assert torch.equal(model.weight, weight)


class Renaming(nn.Linear):
    """A module that knows the name that an older version gave to its weight."""

    _version = 2

    def _load_from_state_dict(self, state, prefix, local_metadata, *rest):
        if local_metadata.get("version") == 1:
            state[f"{prefix}weight"] = state.pop(f"{prefix}kernel")
        super()._load_from_state_dict(state, prefix, local_metadata, *rest)


class Labelled(nn.Linear):
    """A module that keeps a word beside its tensors, under a name of its own."""

    word = ""

    def _save_to_state_dict(self, destination, prefix, keep_vars):
        super()._save_to_state_dict(destination, prefix, keep_vars)
        destination[f"{prefix}word"] = self.word

    def _load_from_state_dict(self, state, prefix, *rest):
        self.word = state.pop(f"{prefix}word")
        super()._load_from_state_dict(state, prefix, *rest)


class Scaled(nn.Linear):
    """A module that saves what it does not load, as quantized layers do."""

    def _save_to_state_dict(self, destination, prefix, keep_vars):
        super()._save_to_state_dict(destination, prefix, keep_vars)
        destination[f"{prefix}weight.scale"] = torch.ones(1)


def with_a_buffer(value):
    model = nn.Linear(2, 1)
    model.register_buffer("count", value)
    return model


def as_version_1(model, **renamed):
    state = model.state_dict()
    for old, new in renamed.items():
        state[new] = state.pop(old)
    for note in state._metadata.values():
        note["version"] = 1
    return state


def weight_norms(how):
    torch.manual_seed(7)
    return nn.Sequential(how(nn.Linear(3, 4, bias=False)), nn.BatchNorm1d(4))


def without_counter():
    state = as_version_1(nn.BatchNorm1d(2))
    state.pop("num_batches_tracked")
    return state


@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.parametrize("wrapped", ["", "_orig_mod.module."])
@pytest.mark.parametrize(
    ("model", "state"),
    [
        (weight_norms(parametrizations.weight_norm),
         lambda: weight_norms(weight_norm).state_dict()),
        (parametrizations.weight_norm(nn.Linear(3, 4)),
         lambda: weight_norm(nn.Linear(3, 4)).state_dict()),
        (nn.BatchNorm1d(2), without_counter),
        (Renaming(2, 1), lambda: as_version_1(Renaming(2, 1), weight="kernel")),
        (nn.Sequential(Labelled(2, 1)), lambda: nn.Sequential(Labelled(2, 1)).state_dict()),
        (with_a_buffer(torch.tensor(0.0)), with_a_buffer(torch.ones(1)).state_dict),
    ],
    ids=["weight_norm", "all of it older", "BatchNorm 1", "version", "a word", "PyTorch 0.3"],
)  # fmt: skip
def test_what_torch_loads_is_loaded(model, state, wrapped, tmp_path):
    expected = deepcopy(model)
    given = state()
    expected.load_state_dict(given)
    notes = {f"{wrapped}{name}".rstrip("."): note for name, note in given._metadata.items()}
    given = OrderedDict((f"{wrapped}{key}", value) for key, value in given.items())
    given._metadata = notes
    for source in (given, saved(tmp_path, {"state_dict": given, "epoch": 3})):
        loaded = deepcopy(model)
        report = load_into(loaded, source)
        assert repr(loaded.state_dict()) == repr(expected.state_dict())
        assert not report.missing_keys + report.unexpected_keys


@pytest.mark.parametrize("strict", [True, False])
def test_what_torch_does_not_take_is_not_called_loaded(strict):
    model, state = Scaled(2, 1), Scaled(2, 1).state_dict()
    before = model.weight.clone()
    with pytest.raises(RuntimeError, match=r"Unexpected key.*weight\.scale"):
        Scaled(2, 1).load_state_dict(state)
    if strict:
        with pytest.raises(CheckpointError, match=r"1 unexpected \(weight\.scale\)"):
            load_into(model, state)
        assert torch.equal(model.weight, before)
    else:
        report = load_into(model, state, strict=False)
        assert report.unexpected_keys == ["weight.scale"]
        assert list(report.names) == ["weight", "bias"]


def test_a_batch_norm_of_today_that_lacks_its_counter_is_refused_as_torch_does():
    state = nn.BatchNorm1d(2).state_dict()
    del state["num_batches_tracked"]
    state["weight"] += 1
    model = nn.BatchNorm1d(2)
    with pytest.raises(CheckpointError, match=r"1 missing \(num_batches_tracked\)"):
        load_into(model, state)
    assert torch.equal(model.weight, torch.ones(2))


def test_other_weights_in_the_file_are_named_as_left_out(tmp_path):
    weights = {"state_dict": nn.Linear(2, 1), "state_dict_ema": nn.Linear(2, 1)}
    path = saved(tmp_path, {k: m.state_dict() for k, m in weights.items()} | {"rng": [1, 2]})
    for key, other in [(None, "state_dict_ema"), ("state_dict_ema", "state_dict")]:
        report = load_into(nn.Linear(2, 1), path, key=key)
        assert f"left out    {other}: weights too; key='{other}' takes them" in repr(report)
    whole = saved(tmp_path, {"model": {"state": nn.Linear(2, 1).state_dict()}})
    assert "left out" not in repr(load_into(nn.Linear(2, 1), whole))


@pytest.mark.parametrize("wrap", [torch.compile, DataParallel])
def test_the_counter_of_averages_is_left_out_in_whatever_wrapper(wrap, tmp_path):
    model, fresh = nn.Linear(2, 1), nn.Linear(2, 1)
    path = saved(tmp_path, wrap(AveragedModel(model)).state_dict())
    load_into(fresh, path)
    assert torch.equal(fresh.weight, model.weight)
    report = fix_checkpoint(path, tmp_path / "fixed.pt")
    assert list(report.names) == ["weight", "bias"]
    assert [*report.dropped.values()] == ["AveragedModel's counter"]


def through_numpy(tensor):
    return torch.from_numpy(tensor.detach().numpy())


@pytest.mark.parametrize("by", [torch.Tensor.detach, through_numpy])
def test_a_models_own_tensors_can_change_places(by):
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    state = {key: by(value) for key, value in model.state_dict().items()}
    swapped = {key: state[f"{1 - int(key[0])}{key[1:]}"] for key in state}
    wanted = deepcopy(swapped)
    load_into(model, swapped)
    assert all(torch.equal(value, wanted[key]) for key, value in model.state_dict().items())


class OneMemory(nn.Module):
    def __init__(self, a, b):
        super().__init__()
        self.a, self.b = nn.Parameter(a), nn.Parameter(b)


@pytest.mark.parametrize(
    "other",
    [torch.Tensor.detach, through_numpy, lambda t: t[1:, :1], lambda t: t.t()],
)
def test_two_parameters_in_one_memory_take_no_numbers_that_differ(other, tmp_path):
    numbers = torch.zeros(3, 3)
    model = OneMemory(numbers, other(numbers))
    wanted = torch.arange(9.0).view(3, 3)
    state = {"a": wanted, "b": other(wanted) + 1}
    with pytest.raises(CheckpointError, match="'a' and 'b' differ, and OneMemory ties them"):
        load_into(model, state)
    assert torch.equal(model.a, torch.zeros(3, 3))
    with pytest.raises(CheckpointError, match="OneMemory ties them"):
        fix_checkpoint(saved(tmp_path, state), tmp_path / "y.pt", model=model)
    load_into(model, state | {"b": other(wanted).clone()})
    assert torch.equal(model.a, wanted)


def test_halves_of_one_memory_take_numbers_of_their_own_and_a_row_again_and_again_does_not():
    both = torch.zeros(3, 4)
    halves = {"a": torch.ones(3, 2), "b": torch.full((3, 2), 2.0)}
    model = OneMemory(both[:, :2], both[:, 2:])
    load_into(model, halves)
    assert all(torch.equal(value, halves[key]) for key, value in model.state_dict().items())
    model = OneMemory(torch.zeros(5).as_strided((3, 3), (1, 1)), torch.zeros(1))
    with pytest.raises(CheckpointError, match="numbers of 'a' differ, and OneMemory ties them"):
        load_into(model, {"a": torch.arange(9.0).view(3, 3), "b": torch.ones(1)})
