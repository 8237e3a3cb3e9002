"""Fixing writes a plain state dict, or nothing."""

import argparse
import contextlib
import io
import json
import os
import re
from collections import OrderedDict, defaultdict

import pytest
import torch
from kinds_of_files import Counting, Net, Tied, ema_beside, net, plain, same, saved, written, zero
from running import NO_CHECKSUMS, full_disk
from safetensors import safe_open
from safetensors.torch import load_model, save_file
from torch import nn
from torch.nn.parallel import DataParallel

from torchclinic.checkpoint_files import (
    CheckpointError,
    fix_checkpoint,
    inspect_checkpoint,
    load_into,
)


def test_fix_writes_over_no_source_and_nothing_that_is_no_file(tmp_path):
    path = plain(tmp_path)
    before = path.read_bytes()
    (tmp_path / "link.pt").symlink_to(path)
    os.mkfifo(tmp_path / "pipe.pt")
    (tmp_path / "kept.pt").touch(0o444)
    for name, message in {
        path: "is the source",
        "link.pt": "is the source",
        ".": "ends in .pt or .safetensors",
        "train.py": "ends in .pt or .safetensors",
        "pipe.pt": "could not be written",
        "no/../x.pt": "could not be written",
        "kept.pt": "is write-protected",
    }.items():
        with pytest.raises(CheckpointError, match=message):
            fix_checkpoint(path, tmp_path / name)
    assert path.read_bytes() == before
    assert sorted(os.listdir(tmp_path)) == ["kept.pt", "link.pt", "pipe.pt", "x.pt"]
    for name in ["y.pt", "y.pt", "x.SAFETENSORS"]:  # a checkpoint may be replaced
        fix_checkpoint(path, tmp_path / name)
    with safe_open(tmp_path / "x.SAFETENSORS", framework="pt") as file:
        assert file.keys()


def test_with_a_model_the_file_gets_its_keys(tmp_path):
    path = saved(tmp_path, {"state_dict": {f"model.{k}": v for k, v in net().state_dict().items()}})
    whole = nn.ModuleDict({"backbone": net()})
    report = fix_checkpoint(path, tmp_path / "y.pt", model=whole)
    whole.load_state_dict(torch.load(tmp_path / "y.pt"))
    assert same(whole["backbone"], net())
    assert "model.conv.weight -> backbone.conv.weight" in repr(report)


@pytest.mark.parametrize("name", ["model", "my.model", 0])
def test_what_is_written_is_not_said_to_be_left_out(name, tmp_path):
    path = saved(tmp_path, {name: net().state_dict(), "optimizer": {"state": {}}})
    assert [*fix_checkpoint(path, tmp_path / "y.pt").dropped] == ["optimizer"]


def test_a_file_that_does_not_fit_the_model_is_refused(tmp_path):
    path, other = plain(tmp_path), net()
    other.module, other.head = nn.Linear(4, 3), nn.Linear(2, 2)
    del other.layers
    for model, message in {
        other: r"2 missing \(head.*module.weight is \(8, 4\) in the file.*Give the model as",
        nn.Linear(1, 1): "no key fits",
    }.items():
        with pytest.raises(CheckpointError, match=message):
            fix_checkpoint(path, tmp_path / "y.pt", model=model)
    assert os.listdir(tmp_path) == ["x.pt"]


@pytest.mark.parametrize("name", ["steps", "n_averaged"])
def test_a_buffer_of_the_models_that_is_called_like_a_counter_is_not_left_out(name, tmp_path):
    file = saved(tmp_path, {"module.weight": torch.ones(2, 2), name: torch.ones(4)})
    with pytest.raises(CheckpointError, match=f"{name} is called like a counter, and has many num"):
        fix_checkpoint(file, tmp_path / "out.pt")


def test_a_dtype_is_for_all_floating_point_tensors_and_no_others(tmp_path):
    state = net(Tied).state_dict() | {"ids": torch.arange(3), "mask": torch.ones(2) > 0}
    state["overlap"] = state["ids"].as_strided((2,), (1,), 1)
    state |= {
        "double": torch.tensor([1e300], dtype=torch.float64),
        "half": torch.ones(2).bfloat16(),
    }
    state["part"] = torch.ones(1000)[:3]
    optimizer = torch.optim.SGD(net().parameters(), 0.1).state_dict()
    path = saved(tmp_path, {"model": state, "optimizer": optimizer})
    for target in (tmp_path / "y.pt", tmp_path / "y.safetensors"):
        report = fix_checkpoint(path, target, dtype=torch.bfloat16)
        found = inspect_checkpoint(target).keys
        assert report.converted == {"float32 to bfloat16": 5, "float64 to bfloat16": 1}
        assert "converted   5 tensors from float32 to bfloat16" in repr(report)
        assert report.not_finite == {"double": 1}  # too large for the new dtype
        assert "not finite  NaN or inf in 1 of 10 tensors: double (1)" in repr(report)
        assert report.dropped == {"optimizer": "optimizer state"}
        assert [v.dtype for k, v in found.items() if v.dtype != torch.bfloat16] == [
            torch.int64, torch.bool, torch.int64]  # fmt: skip
        for key in ("embed.weight", "body.bias", "part", "ids", "overlap", "half"):
            assert torch.equal(found[key], state[key].to(found[key].dtype)), key
        assert found["embed.weight"].data_ptr() == found["head.weight"].data_ptr()


def test_numbers_that_a_dtype_changes_by_more_than_rounding_are_counted(tmp_path):
    path = saved(tmp_path, {"w": torch.tensor([1000, 0.3])})
    report = fix_checkpoint(path, tmp_path / "y.pt", dtype=torch.float8_e4m3fn)
    assert report.changed == {"w": 1}
    assert "changed     numbers that are not only rounded in 1 of 1 tensors: w (1)" in repr(report)
    assert fix_checkpoint(path, tmp_path / "y.pt", dtype=torch.bfloat16).changed == {}


class Scaled(torch.Tensor):
    """Numbers that mean nothing without its `scale`."""


def test_what_a_tensor_s_class_held_beside_its_numbers_is_said_to_be_left_out(tmp_path):
    weight = torch.tensor([[1, 2]], dtype=torch.int8).as_subclass(Scaled)
    weight.scale = 0.5
    path = saved(tmp_path, {"weight": weight})
    said = f"left out    of {Scaled.__module__}.Scaled tensors, all but the numbers"
    assert said in repr(fix_checkpoint(path, tmp_path / "y.pt"))
    assert said in repr(load_into(nn.Linear(2, 1, bias=False), path))


def test_ties_survive_in_both_formats_and_transformers_reads_the_second(tmp_path):
    """Or, if they come as copies, are made by the model, unless they differ."""
    ties = net(Tied).state_dict()
    copies = ties | {"head.weight": ties["embed.weight"].clone()}
    for path, model in {
        saved(tmp_path, ties): None,
        saved(tmp_path, copies, "z.pt"): Tied(),
    }.items():
        report = fix_checkpoint(path, tmp_path / "y.pt", model=model)
        assert report.tied == [["embed.weight", "head.weight"]]
        state = torch.load(tmp_path / "y.pt")
        assert state["embed.weight"].data_ptr() == state["head.weight"].data_ptr()
        fix_checkpoint(path, tmp_path / "y.safetensors", model=model)
        loaded = Tied()
        load_model(loaded, tmp_path / "y.safetensors")
        assert same(loaded, net(Tied))
    with safe_open(tmp_path / "y.safetensors", "pt") as file:
        assert file.metadata()["format"] == "pt"  # for which transformers asks
    for other in (ties["head.weight"] + 1, ties["head.weight"].clone().view(torch.int32)):
        path = saved(tmp_path, ties | {"head.weight": other})
        says = r"'embed.weight' and 'head.weight' differ, and Tied ties them"
        with pytest.raises(CheckpointError, match=says):
            load_into(loaded, path)
        with pytest.raises(CheckpointError, match=says):
            fix_checkpoint(path, tmp_path / "y.pt", model=loaded)
    assert same(loaded, net(Tied))


def test_names_that_safetensors_keeps_for_itself_lose_no_tensor(tmp_path):
    """The note on a tied tensor would go where the format is said."""
    weight = torch.arange(4.0)
    path = saved(tmp_path, {"a": weight, "format": weight, "b": weight})
    fix_checkpoint(path, tmp_path / "y.safetensors")
    found = inspect_checkpoint(tmp_path / "y.safetensors").keys
    assert sorted(found) == ["a", "b", "format"]
    assert all(torch.equal(value, weight) for value in found.values())
    path = saved(tmp_path, {"__metadata__": weight})
    with pytest.raises(CheckpointError, match=r"'__metadata__' is a name that .* Write a \.pt"):
        fix_checkpoint(path, tmp_path / "z.safetensors")


@pytest.mark.parametrize(
    "show",
    [
        lambda whole: {"a": whole[0:4], "b": whole[1:5], "c": whole[:1].expand(9)},  # they overlap
        lambda whole: {"a": whole[::2], "b": whole[::2].view(4, 1)},  # twice the same
    ],
)
def test_numbers_that_no_tensor_shows_are_left_out(show, tmp_path):
    state = show(torch.arange(8.0))
    report = fix_checkpoint(saved(tmp_path, state), tmp_path / "y.pt")
    assert report.cloned == list(state)
    assert torch.tensor(7.0).numpy().tobytes() not in (tmp_path / "y.pt").read_bytes()
    found = torch.load(tmp_path / "y.pt")
    assert all(torch.equal(found[key], state[key]) for key in state)


def test_slices_that_show_all_together_are_not_copied(tmp_path):
    whole = torch.arange(8.0)
    dealt = {"a": whole[::2], "b": whole[1::2]}
    for parts in ({"a": whole[3:], "b": whole[:5]}, {"a": whole.view(2, 4).T}, dealt):
        report = fix_checkpoint(saved(tmp_path, parts), tmp_path / "y.pt")
        assert report.cloned == []


def test_checksums_are_written_though_torch_was_told_to_leave_them_out(tmp_path):
    path = plain(tmp_path)
    with NO_CHECKSUMS:
        fix_checkpoint(path, tmp_path / "y.pt")
        assert not torch.serialization.get_crc32_options()
    assert inspect_checkpoint(tmp_path / "y.pt").checksums.startswith("right")


def test_a_full_disk_costs_nothing(tmp_path):
    path = saved(tmp_path, {"w": torch.randn(200_000)})
    for name in ("y.pt", "y.safetensors"):
        target = written(tmp_path, b"the last good one", name)
        with full_disk(), pytest.raises(CheckpointError, match=f"^{target}: could not be written"):
            fix_checkpoint(path, target)
        assert target.read_bytes() == b"the last good one"
    assert sorted(os.listdir(tmp_path)) == ["x.pt", "y.pt", "y.safetensors"]


def test_one_number_shown_a_billion_times_does_not_fill_the_disk(tmp_path):
    path = saved(tmp_path, {"w": torch.zeros(1).expand(10**9)})
    for name, dtype, size in [("y.safetensors", None, 4), ("y.pt", torch.float16, 2)]:
        with pytest.raises(CheckpointError, match=rf"'w' shows the same 4 B .* {size}.0 GB on the"):
            fix_checkpoint(path, tmp_path / name, dtype=dtype)
    assert os.listdir(tmp_path) == ["x.pt"]
    fix_checkpoint(path, tmp_path / "y.pt")
    assert (tmp_path / "y.pt").stat().st_size < 5000
    path = saved(tmp_path, {"w": torch.zeros(2000)[::2].expand(10**8, 1000)})
    with pytest.raises(CheckpointError, match=r"again and again: .* on the disk\.$"):
        fix_checkpoint(path, tmp_path / "z.pt")


def test_a_wider_dtype_writes_what_is_shown_again_no_larger(tmp_path):
    eight = torch.zeros(1_000_000, dtype=torch.float8_e4m3fn)
    path = saved(tmp_path, {f"w{i}": eight[i:] for i in range(4)})
    with pytest.raises(CheckpointError, match=r"1.0 MB again and again: .* 16.0 MB on the disk"):
        fix_checkpoint(path, tmp_path / "y.pt", dtype=torch.float32)
    path = saved(tmp_path, {"w": eight})
    fix_checkpoint(path, tmp_path / "y.pt", dtype=torch.float64)
    assert torch.load(tmp_path / "y.pt")["w"].dtype == torch.float64


def test_another_state_dict_beside_the_weights_is_named_and_can_be_had(tmp_path):
    path = ema_beside(tmp_path)
    assert "--key ema" in repr(inspect_checkpoint(path))
    assert fix_checkpoint(path, tmp_path / "y.pt").dropped["ema"] == "state dict of 11 entries"
    fix_checkpoint(path, tmp_path / "z.pt", key="ema")
    averaged = torch.load(tmp_path / "z.pt")
    assert torch.equal(averaged["conv.weight"], net().conv.weight + 1)


def test_tensors_beside_the_weights_are_not_taken_for_them(tmp_path):
    beside = {name: torch.ones(3) for name in ("rng_state", "mean", "std")}
    state, scale = net().state_dict(), {"scale": torch.ones(1)}
    for name, thing in {
        "model": {"model": state} | beside,
        "state_dict": {"state_dict": scale} | beside,
        "it": {"it": net()} | beside,
        "a.model": {"a": {"model": state} | beside, "epoch": 1},
        "": state | {"running": scale, "ema": state, "rng": {**state, **beside}},
    }.items():
        assert inspect_checkpoint(saved(tmp_path, thing)).weights_at == name
    path = saved(tmp_path, {"generator": state} | beside)
    with pytest.raises(CheckpointError, match=r"'', 'generator'.*Choose one"):
        fix_checkpoint(path, tmp_path / "y.pt")
    assert len(fix_checkpoint(path, tmp_path / "y.pt", key="").names) == 3


# Dtypes that safetensors lacks.
LACKING = tuple(f"torch.{name}" for name in ("bcomplex", "bits", "complex32", "complex128"))


def every_kind_of_tensor():
    """Of each dtype that torch.save takes, and lying in memory in each way."""
    wide, found = torch.randn(4, 6), {}
    for dtype in {dtype for dtype in vars(torch).values() if isinstance(dtype, torch.dtype)}:
        with contextlib.suppress(RuntimeError, KeyError):  # what cannot be made so, or saved
            numbers = torch.arange(64, dtype=torch.uint8).view(dtype)
            torch.save(numbers, io.BytesIO())
            found |= {} if "qint" in str(dtype) or "quint" in str(dtype) else {str(dtype): numbers}
    found["attributes"] = torch.ones(2).as_subclass(Scaled)
    found["attributes"].scale = 0.5
    return found | {
        "transposed": wide.T, "strided": wide[1::2, ::3], "expanded": wide[:1].expand(3, 6),
        "scalar": wide[0, 0], "empty": torch.ones(0, 3), "nan": torch.tensor([float("nan"), -0.0]),
        "parameter": nn.Parameter(wide + 1), "requires grad": torch.ones(2, requires_grad=True),
        "channels last": torch.randn(1, 2, 3, 4).to(memory_format=torch.channels_last),
        "tied": wide, "tied, too": wide, "pt": torch.ones(1),
    }  # fmt: skip


def bits(tensors):
    plain = {key: tensor.detach() for key, tensor in tensors.items()}
    return {k: (t.dtype, t.shape, bytes(t.flatten().view(torch.uint8))) for k, t in plain.items()}


def test_every_kind_of_tensor_arrives_to_the_bit(tmp_path):
    state = every_kind_of_tensor()
    for name in ("y.pt", "y.safetensors"):
        fix_checkpoint(saved(tmp_path, state), tmp_path / name)
        found = inspect_checkpoint(tmp_path / name).keys
        assert bits(found) == bits(state)
        assert found["tied"].data_ptr() == found["tied, too"].data_ptr()
        for lacking in [key for key in state if key.startswith(LACKING)]:
            path = saved(tmp_path, {lacking: state.pop(lacking)})
            with pytest.raises(CheckpointError, match=f"safetensors has no {lacking}"):
                fix_checkpoint(path, tmp_path / "z.safetensors")


def test_extra_state_is_kept_with_containers_of_pythons_and_torchs_own_kinds(tmp_path):
    inner = nn.BatchNorm1d(2).state_dict()
    seen = {"steps": OrderedDict(a=3), "shape": torch.Size([2, 3]), "inner": inner}
    path = saved(tmp_path, {"module.w": torch.ones(2), "module._extra_state": seen})
    fix_checkpoint(path, tmp_path / "y.pt")
    found = torch.load(tmp_path / "y.pt", weights_only=True)["_extra_state"]
    assert [type(value) for value in found.values()] == [OrderedDict, torch.Size, OrderedDict]
    assert repr(found) == repr(seen)
    assert found["inner"]._metadata == inner._metadata
    with pytest.raises(CheckpointError, match="'_extra_state' is dict of 3"):
        fix_checkpoint(path, tmp_path / "y.safetensors")
    inner._metadata["args"] = argparse.Namespace()
    path = saved(tmp_path, {"w": torch.ones(2), "_extra_state": inner})
    assert [*fix_checkpoint(path, tmp_path / "y.pt").dropped] == ["_extra_state"]


@pytest.mark.parametrize("thing", [frozenset("a"), defaultdict(int, cats=3)])
def test_extra_state_that_is_not_plain_is_left_out(thing, tmp_path):
    state = {"w": torch.ones(2), "_extra_state": {"kinds": thing}}
    torch.save(state, tmp_path / "x.pt", pickle_protocol=4)
    assert [*fix_checkpoint(tmp_path / "x.pt", tmp_path / "y.pt").dropped] == ["_extra_state"]
    assert [*torch.load(tmp_path / "y.pt", weights_only=True)] == ["w"]


def test_a_tensor_in_extra_state_is_checked_and_written_like_any(tmp_path):
    whole = torch.cat([torch.full((2,), torch.nan), torch.arange(1_000_000.0)])
    part, scale = whole[:2], torch.arange(100.0)
    seen = {"part": part, "again": [part], "scale": scale}
    bare = [torch.ones(2).untyped_storage()]  # numbers of no tensor
    state = {"weight": scale, "bias": torch.ones(1), "_extra_state": seen}
    path = saved(tmp_path, state | {"x._extra_state": bare})
    report = fix_checkpoint(path, tmp_path / "y.pt")
    assert (tmp_path / "y.pt").stat().st_size < 5000
    found = torch.load(tmp_path / "y.pt")
    assert found["_extra_state"]["part"] is found["_extra_state"]["again"][0]
    assert bits({"x": found["_extra_state"]["part"]}) == bits({"x": part})
    assert found["_extra_state"]["scale"].data_ptr() == found["weight"].data_ptr()
    assert report.cloned == ["_extra_state.part", "_extra_state.again.0"]
    assert report.not_finite == {"_extra_state.part": 2, "_extra_state.again.0": 2}
    assert report.verified == 3
    assert report.dropped == {"x._extra_state": "list of 1"}
    assert inspect_checkpoint(path).not_finite == report.not_finite


def test_a_flipped_bit_in_extra_state_is_found(tmp_path):
    path = zero(
        saved(tmp_path, Counting(torch.arange(1.0, 100)).state_dict()), torch.arange(1.0, 100)
    )
    for work in (fix_checkpoint, lambda *_: load_into(Counting(0), path)):
        with pytest.raises(CheckpointError, match=r"of '_extra_state\.seen' are not"):
            work(path, tmp_path / "y.pt")


def rename(module, state, prefix, metadata):
    """A hook that changes what state_dict() gives."""


def test_hooks_that_would_change_a_whole_models_state_dict_are_named(tmp_path):
    model = nn.Sequential(nn.Linear(2, 1))
    model[0].register_state_dict_post_hook(rename)
    report = fix_checkpoint(saved(tmp_path, model), tmp_path / "y.pt")
    assert "left out    0._state_dict_hooks (dict of 1)" in repr(report)


@pytest.mark.parametrize("whole", ["model.safetensors", "pytorch_model.bin"])
def test_one_shard_of_two_is_half_a_model_and_not_fixed_alone(whole, tmp_path):
    folder = tmp_path / "hf"
    folder.mkdir()
    homes = {}
    for number, part in enumerate(["embed", "head"], 1):
        state, path = {f"{part}.weight": torch.ones(2)}, folder / whole
        path = path.with_stem(f"{path.stem}-0000{number}-of-00002")
        save_file(state, path) if "safe" in whole else torch.save(state, path)
        homes[f"{part}.weight"] = path.name
    first, second = (folder / name for name in homes.values())
    text = f"one of 2 shards of a model (with {second.name}). For the whole, name the folder that"
    assert text in " ".join(repr(inspect_checkpoint(first)).split())
    both = nn.ModuleDict({name: nn.LayerNorm(2, bias=False) for name in ("embed", "head")})
    for work in (load_into, lambda _, first: fix_checkpoint(first, tmp_path / "y.pt")):
        with pytest.raises(CheckpointError, match=re.escape(text)):
            work(both, first)
    embed = nn.ModuleDict({"embed": nn.LayerNorm(2, bias=False)})
    assert list(fix_checkpoint(first, tmp_path / "y.pt", model=embed).names) == ["embed.weight"]

    (folder / "training_args.bin").write_bytes(b"of no interest")
    load_into(both, folder)  # without an index, all shards together are the model
    second.rename(tmp_path / "second")
    with pytest.raises(CheckpointError, match=f"; not here: {second.name}"):
        fix_checkpoint(folder, tmp_path / "y.pt")
    (tmp_path / "second").rename(second)
    (folder / f"{whole}.index.json").write_text(json.dumps({"weight_map": homes}))
    fix_checkpoint(folder, tmp_path / "z.pt")
    assert list(torch.load(tmp_path / "z.pt")) == list(homes)
    with pytest.raises(CheckpointError, match="is the source"):
        fix_checkpoint(folder, second)


def test_a_name_that_is_not_utf8_is_a_name(tmp_path):
    path = plain(tmp_path)
    for name in ("x\udcff.pt", "x\udcff.safetensors"):
        fix_checkpoint(path, tmp_path / name)
        path = tmp_path / name
        load_into(model := Net(), path)
        assert same(model, net())


class Versioned(nn.Linear):
    """As torchvision's MNASNet, it loads no state dict that does not say which version it is."""

    _version = 2

    def _load_from_state_dict(self, state, prefix, local_metadata, *rest):
        assert local_metadata["version"] == 2
        super()._load_from_state_dict(state, prefix, local_metadata, *rest)


@pytest.mark.parametrize("around", [nn.Sequential, DataParallel])
def test_the_versions_of_modules_are_kept_where_they_matter(around, tmp_path):
    fix_checkpoint(saved(tmp_path, around(Versioned(2, 1)).state_dict()), tmp_path / "y.pt")
    model = Versioned(2, 1) if around is DataParallel else nn.Sequential(Versioned(2, 1))
    model.load_state_dict(torch.load(tmp_path / "y.pt"))
    fix_checkpoint(saved(tmp_path, nn.BatchNorm1d(2).state_dict()), tmp_path / "z.pt")
    assert type(torch.load(tmp_path / "z.pt")) is dict


def test_both_formats_get_the_mode_that_new_files_have(tmp_path):
    old = os.umask(0o022)
    try:
        for name in ("y.pt", "y.safetensors"):
            fix_checkpoint(plain(tmp_path), tmp_path / name)
            assert (tmp_path / name).stat().st_mode & 0o777 == 0o644
    finally:
        os.umask(old)


def test_a_row_of_one_number_fits_a_scalar_of_the_model_and_a_longer_one_does_not(tmp_path):
    model = nn.Linear(1, 1)
    model.scale = nn.Parameter(torch.zeros(()))
    state = model.state_dict() | {"scale": torch.tensor([5.0])}
    fix_checkpoint(saved(tmp_path, state), tmp_path / "y.pt", model=model)
    model.load_state_dict(torch.load(tmp_path / "y.pt"))
    assert model.scale == 5
    path = saved(tmp_path, state | {"scale": torch.tensor([5.0, 6.0])})
    with pytest.raises(CheckpointError, match=r"scale is \(2,\) in the file, \(\) in the model"):
        fix_checkpoint(path, tmp_path / "z.pt", model=model)
