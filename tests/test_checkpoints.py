"""Inspecting, fixing and loading: what is refused, what is kept, what is said."""

import json
import os
import resource
import subprocess
import sys
from collections import OrderedDict
from functools import partial

import pytest
import torch
from checkpoint_files import Tied, net, on_cuda, plain, saved
from torch import nn
from torch.nn.parallel import DataParallel

from torchladder import cli
from torchladder.checkpoints import (
    CheckpointError,
    fix_checkpoint,
    inspect_checkpoint,
    load_into,
)
from torchladder.checkpoints.keys import clean, match


def shaped(*keys, shape=(2,)):
    return {key: torch.zeros(shape) for key in keys}


def same(model, other):
    return all(map(torch.equal, model.state_dict().values(), other.state_dict().values()))


# --- keys ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("file", "model", "names"),
    [
        (["module.a.w", "module.b.w"], ["a.w", "b.w"], ["module.a.w", "module.b.w"]),
        (["a.w", "b.w"], ["module.a.w", "module.b.w"], ["a.w", "b.w"]),
        (["module.w", "b.w"], ["module.w", "b.w"], ["module.w", "b.w"]),
        (["module.module.w", "module.b.w"], ["module.w", "b.w"], ["module.module.w", "module.b.w"]),
        (["model.w", "model_ema.module.w"], ["w"], ["model.w"]),
        (["model.f.a", "model.f.b", "loss.w"], ["net.f.a", "net.f.b"], ["model.f.a", "model.f.b"]),
        (["a.w", "b.w"], ["_orig_mod.a.w", "b._orig_mod.w"], ["a.w", "b.w"]),
        (["e.0.module.w", "e.1.w"], ["e.0.w", "e.1.w"], ["e.0.module.w", "e.1.w"]),
        (["n_averaged", "module.a"], ["a"], ["module.a"]),
        (["n_averaged", "a"], ["n_averaged", "a"], ["n_averaged", "a"]),
    ],
)
def test_keys_find_their_partners(file, model, names):
    found = match(shaped(*file), shaped(*model))
    assert found.names == dict(zip(model, names, strict=True))
    assert not found.missing


def test_two_parts_that_match_equally_well_are_not_guessed_between():
    found = match(shaped("student.w", "teacher.w"), shaped("w"))
    assert not found.names
    assert found.missing == ["w"]


def test_one_layer_is_not_taken_for_another():
    found = match(shaped("fc.weight", "fc.bias"), shaped("head.weight", "head.bias"))
    assert not found.names
    assert "head.weight (near 'fc.weight')" in found.problems()[0]


def test_a_prefix_that_would_cause_a_collision_stays():
    found = match(shaped("module.a", "module.b", "a"), shaped("a", "b"))
    assert found.names == {"a": "a"}
    assert found.problems()[-1].startswith("'module.a' and 'a' would be one key")


def test_a_prefix_on_some_keys_only_is_a_submodule():
    keys = ["module.fc.weight", "conv.weight"]
    assert clean(keys) == {key: key for key in keys}


def test_ten_thousand_keys_are_matched_in_a_moment():
    keys = [f"layers.{i}.{part}.{n}" for i in range(1250) for part in "abcd" for n in ("w", "b")]
    found = match(shaped(*(f"module.{key}" for key in keys)), shaped(*(f"net.{k}" for k in keys)))
    assert len(found.names) == 10_000


# --- inspect ------------------------------------------------------------------------------------


def test_an_inspection_says_what_there_is(tmp_path):
    model = DataParallel(net())
    state = {"model": model.state_dict(), "epoch": 3, "note": "\x1b[31mred"}
    path = on_cuda(tmp_path, state)
    found = inspect_checkpoint(path)
    assert found.parameters == sum(t.numel() for t in net().state_dict().values())
    assert found.prefixes == {"module.": 11}
    assert found.contents == {"model": "state dict of 11 entries", "epoch": "3",
                              "note": "'\\x1b[31mred'"}  # fmt: skip
    text = repr(found)
    assert "saved on cuda:0" in text
    assert "module.conv.{weight, bias}" in text
    assert "4x3x3x3, 4, float32" in text
    makers = "DataParallel or DDP"
    assert f"put there by {makers}" in " ".join(text.split())
    assert f"torchladder fix {path} -o fixed.pt" in " ".join(text.split())


def test_names_in_a_file_cannot_send_codes_to_the_terminal(tmp_path):
    found = inspect_checkpoint(saved(tmp_path, {"\x1b]0;title\x07": torch.zeros(2)}))
    assert "\x1b" not in repr(found)
    assert "?]0;title?" in repr(found)


def test_a_report_on_thousands_of_keys_is_short(tmp_path):
    state = {f"a.long.name.of.the.layer.{i}.weight": torch.zeros(1) for i in range(3000)}
    text = repr(inspect_checkpoint(saved(tmp_path, state)))
    assert len(text.splitlines()) < 40
    assert "2,984 more" in text
    assert "3,000 tensors" in text


def test_ties_and_views_are_named(tmp_path):
    state = net(Tied).state_dict()
    state["body.bias"] = torch.zeros(1_000_000)[:4]
    found = inspect_checkpoint(saved(tmp_path, state))
    assert found.shared == [["embed.weight", "head.weight"]]
    assert found.oversized == ["body.bias"]
    assert "body.bias: 16 B of a storage of 4.0 MB" in repr(found)


def test_large_files_are_verified_on_request_only(tmp_path, monkeypatch):
    monkeypatch.setattr("torchladder.checkpoints.inspecting.QUICK", 1000)
    path = plain(tmp_path)
    assert "verify=True" in inspect_checkpoint(path).checksums
    assert inspect_checkpoint(path, verify=True).checksums == "right, of 11 storages"


def test_inspecting_imports_no_torch(tmp_path):
    path = plain(tmp_path)
    program = (
        "import sys; from torchladder.checkpoints import inspect_checkpoint;"
        f"repr(inspect_checkpoint({str(path)!r})); print({{'torch', 'numpy'}} & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.stdout == "set()\n", done.stderr


def test_trust_asks_the_model_for_its_state_dict(tmp_path):
    path = saved(tmp_path, {"model": net(Tied)})
    seen, asked = inspect_checkpoint(path), inspect_checkpoint(path, trust=True)
    assert list(seen.keys) == list(asked.keys)
    assert seen.shared == asked.shared == [["embed.weight", "head.weight"]]


# --- fix ----------------------------------------------------------------------------------------


def test_fix_never_writes_over_its_source(tmp_path):
    path = plain(tmp_path)
    before = path.read_bytes()
    (tmp_path / "link.pt").symlink_to(path)
    for target in (path, tmp_path / "link.pt"):
        with pytest.raises(CheckpointError, match="is the source"):
            fix_checkpoint(path, target)
    with pytest.raises(CheckpointError, match="Name the file to write"):
        fix_checkpoint(path)
    assert path.read_bytes() == before


def test_in_place_keeps_what_was_there(tmp_path):
    path = saved(tmp_path, DataParallel(net()).state_dict())
    before = path.read_bytes()
    assert fix_checkpoint(path, in_place=True).backup == tmp_path / "x.pt.bak"
    once = path.read_bytes()
    assert fix_checkpoint(path, in_place=True).backup == tmp_path / "x.pt.bak1"
    assert (tmp_path / "x.pt.bak").read_bytes() == before
    assert (tmp_path / "x.pt.bak1").read_bytes() == once
    assert list(torch.load(path)) == list(net().state_dict())


def test_with_a_model_the_file_gets_its_keys(tmp_path):
    path = saved(tmp_path, {"state_dict": {f"model.{k}": v for k, v in net().state_dict().items()}})
    for model in (net(), DataParallel(net())):
        fix_checkpoint(path, tmp_path / "y.pt", model=model)
        assert list(torch.load(tmp_path / "y.pt")) == list(net().state_dict())
    whole = nn.ModuleDict({"backbone": net()})
    report = fix_checkpoint(path, tmp_path / "y.pt", model=whole)
    whole.load_state_dict(torch.load(tmp_path / "y.pt"))
    assert same(whole["backbone"], net())
    assert "model.conv.weight -> backbone.conv.weight" in repr(report)


def test_a_file_that_does_not_fit_the_model_is_refused_or_written_in_part(tmp_path):
    path = plain(tmp_path)
    other = net()
    other.module = nn.Linear(4, 3)
    other.head = nn.Linear(2, 2)
    del other.layers
    with pytest.raises(CheckpointError) as caught:
        fix_checkpoint(path, tmp_path / "y.pt", model=other)
    assert "7 keys fit, 2 missing (head.weight" in str(caught.value)
    assert "module.weight is (8, 4) in the file, (3, 4) in the model" in str(caught.value)
    assert not (tmp_path / "y.pt").exists()
    report = fix_checkpoint(path, tmp_path / "y.pt", model=other, strict=False)
    assert report.missing == ["head.weight", "head.bias"]
    assert report.changed == {"module.weight": ((8, 4), (3, 4)), "module.bias": ((8,), (3,))}
    assert len(torch.load(tmp_path / "y.pt")) == 7
    with pytest.raises(CheckpointError, match="no key fits"):
        fix_checkpoint(path, tmp_path / "z.pt", model=nn.Linear(1, 1), strict=False)


def test_ties_survive_in_both_formats(tmp_path):
    from safetensors.torch import load_model

    path = saved(tmp_path, net(Tied).state_dict())
    assert fix_checkpoint(path, tmp_path / "y.pt").tied == [["embed.weight", "head.weight"]]
    state = torch.load(tmp_path / "y.pt")
    assert state["embed.weight"].data_ptr() == state["head.weight"].data_ptr()
    fix_checkpoint(path, tmp_path / "y.safetensors")
    model = Tied()
    load_model(model, tmp_path / "y.safetensors")
    assert same(model, net(Tied))


def test_transformers_reads_what_fix_writes(tmp_path):
    """It asks for this note in the header."""
    from safetensors import safe_open

    fix_checkpoint(plain(tmp_path), tmp_path / "y.safetensors")
    with safe_open(tmp_path / "y.safetensors", "pt") as file:
        assert file.metadata()["format"] == "pt"
        assert set(json.loads(file.metadata()["torchladder.crc32"])) == set(file.keys())


def test_the_setting_for_checksums_is_put_back(tmp_path):
    path = plain(tmp_path)
    torch.serialization.set_crc32_options(False)
    try:
        fix_checkpoint(path, tmp_path / "y.pt")
        assert not torch.serialization.get_crc32_options()
    finally:
        torch.serialization.set_crc32_options(True)
    assert inspect_checkpoint(tmp_path / "y.pt").checksums.startswith("right")


def limited(arguments, size):
    """Run the command where no file can grow beyond `size` bytes, as on a disk that gets full."""
    return subprocess.run(
        [sys.executable, "-m", "torchladder", *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=60,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (size, size)),
    )


@pytest.mark.parametrize("name", ["y.pt", "y.safetensors"])
def test_a_full_disk_costs_nothing(name, tmp_path):
    path = saved(tmp_path, {"w": torch.randn(200_000)})
    target = tmp_path / name
    target.write_bytes(b"the last good one")
    done = limited(["fix", path, "-o", target], 100_000)
    assert done.returncode == 2
    assert done.stderr.startswith(f"torchladder fix: {target}: could not be written")
    assert done.stderr.count("\n") == 1
    assert target.read_bytes() == b"the last good one"
    assert sorted(os.listdir(tmp_path)) == ["x.pt", name]


def test_a_folder_that_is_not_there_is_one_sentence(tmp_path):
    with pytest.raises(CheckpointError, match="could not be written"):
        fix_checkpoint(plain(tmp_path), tmp_path / "no" / "y.pt")


# --- load_into ----------------------------------------------------------------------------------


def wrappings():
    return {
        "plain": net,
        "data_parallel": lambda: DataParallel(net()),
        "compiled": lambda: torch.compile(net()),
        "both": lambda: torch.compile(DataParallel(net())),
        "in_place": lambda: (lambda m: (m.compile(), m)[1])(net()),
    }


@pytest.mark.parametrize("source", wrappings())
@pytest.mark.parametrize("target", wrappings())
def test_any_wrapping_loads_into_any_other(source, target):
    model = wrappings()[target]()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    report = load_into(model, wrappings()[source]().state_dict())
    assert same(model, net())
    assert len(report.names) == 11


def heads():
    torch.manual_seed(0)
    old = nn.Sequential(OrderedDict(body=nn.Linear(8, 4), fc=nn.Linear(4, 1000)))
    new = nn.Sequential(OrderedDict(body=nn.Linear(8, 4), myFc=nn.Linear(4, 200)))
    return old, new


def test_a_new_head_is_named():
    old, new = heads()
    how = {"myFc.weight": partial(nn.init.normal_, std=0.02), "myFc.bias": nn.init.zeros_}
    report = load_into(new, DataParallel(old).state_dict(), skip=["fc"], reinit=how)
    assert torch.equal(new.body.weight, old.body.weight)
    assert 0.01 < new.myFc.weight.std() < 0.03
    assert not new.myFc.bias.any()
    assert report.reinitialised == ["myFc.weight", "myFc.bias"]
    assert set(report.names) == {"body.weight", "body.bias"}


def test_a_head_of_the_same_name_and_another_shape_is_made_anew():
    old, new = heads()
    new.fc = new.myFc
    del new.myFc
    before = new.fc.weight.clone()
    load_into(new, old.state_dict(), reinit=["fc"])
    assert not torch.equal(new.fc.weight, before)
    assert new.fc.weight.abs().max() <= 0.5  # as reset_parameters() draws them
    load_into(new, old.state_dict(), reinit={"fc": lambda tensor: torch.ones_like(tensor)})
    assert new.fc.weight.eq(1).all()
    report = load_into(new, old.state_dict(), skip=["fc"])
    assert new.fc.weight.eq(1).all()
    assert report.skipped == ["fc.weight", "fc.bias"]


def test_an_error_has_both_shapes_and_changes_nothing():
    old, new = heads()
    before = {k: v.clone() for k, v in new.state_dict().items()}
    new.fc = nn.Linear(4, 10)
    calls = [{}, {"reinit": ["myFc"]}, {"skip": ["nofc"]}, {"reinit": {"myFcc": nn.init.zeros_}}]
    messages = []
    for options in calls:
        with pytest.raises(CheckpointError) as caught:
            load_into(new, old.state_dict(), **options)
        messages.append(str(caught.value))
        assert all(torch.equal(new.state_dict()[k], v) for k, v in before.items())
    assert "fc.weight is (1000, 4) in the file, (10, 4) in the model" in messages[0]
    assert "2 missing (myFc.weight" in messages[0]
    assert "no 'myFcc'; is it 'myFc'?" in messages[3]


def test_not_strict_loads_what_fits_but_not_nothing():
    old, new = heads()
    report = load_into(new, old.state_dict(), strict=False)
    assert report.missing == ["myFc.weight", "myFc.bias"]
    assert report.left_over == ["fc.weight", "fc.bias"]
    assert "missing     2: myFc.weight, myFc.bias" in repr(report)
    for state in (nn.Linear(2, 2).state_dict(), {"model": nn.Conv2d(1, 1, 1).state_dict()}):
        with pytest.raises(CheckpointError, match="no key fits"):
            load_into(new, state, strict=False)


def test_a_part_without_a_way_to_make_it_anew_is_refused():
    class Scale(nn.Module):
        def __init__(self):
            super().__init__()
            self.by = nn.Parameter(torch.ones(1))

    model = nn.Sequential(Scale())
    state = {k: v.clone() for k, v in model.state_dict().items()}
    for name in ("0", "0.by"):
        with pytest.raises(CheckpointError, match=r"has no reset_parameters\(\)"):
            load_into(model, state | {"1": torch.ones(1)}, reinit=[name], strict=False)


def test_buffers_of_a_part_made_anew_are_made_anew_too():
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    model[1].running_mean.fill_(3)
    state = {k: v.clone() for k, v in model.state_dict().items()}
    load_into(model, state, reinit=["1"])
    assert not model[1].running_mean.any()


def test_a_damaged_file_is_not_loaded(tmp_path):
    path = plain(tmp_path)
    data = path.read_bytes()
    at = data.find(net().conv.weight.detach().numpy().tobytes())
    path.write_bytes(data[:at] + bytes(64) + data[at + 64 :])
    torch.load(path)  # sees nothing
    model = net()
    with pytest.raises(CheckpointError, match="checksum differs"):
        load_into(model, path)
    assert same(model, net())


def test_a_model_on_the_meta_device_is_refused():
    with torch.device("meta"):
        model = nn.Linear(2, 1)
    with pytest.raises(CheckpointError, match="to_empty"):
        load_into(model, nn.Linear(2, 1).state_dict())


# --- the commands -------------------------------------------------------------------------------


def command(capsys, *arguments):
    with pytest.raises(SystemExit) as ended:
        cli.main([str(argument) for argument in arguments])
    return ended.value.code, capsys.readouterr()


def test_inspect_prints_the_report(tmp_path, capsys):
    code, printed = command(capsys, "inspect", plain(tmp_path), "--verify")
    assert code == 0
    assert "checksums   right, of 11 storages" in printed.out


def test_fix_takes_a_model_from_the_current_folder(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    (tmp_path / "my_models.py").write_text(
        "import torch\n"
        "def net():\n    return torch.nn.Linear(2, 1)\n"
        "def needs_numbers():\n    assert torch.ones(1).item() == 1\n    return net()\n"
        "def fails(width):\n    pass\n"
        "seven = lambda: 7\n"
    )
    saved(tmp_path, {"net": DataParallel(nn.Linear(2, 1)).state_dict()})
    for name in ("net", "needs_numbers"):
        code, printed = command(capsys, "fix", "x.pt", "-o", "y.pt", "--for", f"my_models:{name}")
        assert code == 0, printed.err
        assert list(torch.load("y.pt")) == ["weight", "bias"]
    for name, message in {
        "my_models:fails": "missing 1 required positional argument: 'width'",
        "my_models:none": "no attribute 'none'",
        "no_such_module:net": "No module named 'no_such_module'",
        "my_models:seven": "made a int, not a torch.nn.Module",
        "my_models": "Give module:Model",
    }.items():
        code, printed = command(capsys, "fix", "x.pt", "-o", "z.pt", "--for", name)
        assert code == 2
        assert message in printed.err
        assert printed.err.count("\n") == 1
    assert not (tmp_path / "z.pt").exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["inspect", "no.pt"], "No such file or directory: 'no.pt'"),
        (["fix", "no.pt", "-o", "y.pt"], "No such file or directory: 'no.pt'"),
        (["fix", "x.pt"], "Name the file to write"),
        (["fix", "x.pt", "-o", "x.pt"], "x.pt is the source"),
        (["fix", "x.pt", "-o", "y.pt", "--in-place"], "not both"),
        (["fix", "x.pt", "-o", "y.pt", "--key", "ema"], "no weights under 'ema'; there are: ''"),
        (["fix", ".", "--in-place"], "only one can be fixed in place"),
    ],
)
def test_bad_input_is_one_sentence(arguments, message, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    before = plain(tmp_path).read_bytes()
    code, printed = command(capsys, *arguments)
    assert code == 2
    assert message in printed.err
    assert printed.err.count("\n") == 1
    assert os.listdir() == ["x.pt"]
    assert (tmp_path / "x.pt").read_bytes() == before


@pytest.mark.parametrize("name", ["inspect", "fix"])
def test_help_fits_a_terminal_and_has_an_example(name, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    code, printed = command(capsys, name, "--help")
    assert code == 0
    assert f"Example: torchladder {name}" in printed.out
    assert all(len(line) <= 80 for line in printed.out.splitlines())
    monkeypatch.undo()
