"""Every kind of checkpoint file, good and bad, has the outcome it should have."""

import os
import resource
import shutil
import sys
from pathlib import Path
from unittest import mock

import pytest
import torch
from kinds_of_files import BAD, GOOD, Net, net
from running import limited
from torch.nn.parallel import DataParallel

from torchclinic.checkpoint_files import (
    CheckpointError,
    fix_checkpoint,
    inspect_checkpoint,
    load_into,
)


@pytest.fixture
def made(kind, tmp_path):
    """A file of a kind and its folder, in which nothing may change, and no code of its may run."""
    folder = tmp_path / "made"
    folder.mkdir()
    with mock.patch.dict(os.environ):  # lightning and accelerate set variables
        path = Path((GOOD.get(kind) or BAD[kind])[0](folder))
    before = fingerprint(folder)
    used = int(Path("/proc/self/statm").read_text().split()[5]) * resource.getpagesize()
    with limited(resource.RLIMIT_DATA, used + 2**28):
        yield path, folder
    assert fingerprint(folder) == before
    assert not (folder / "marker").exists()


def fingerprint(folder):
    """Names, sizes and times of all that is in a folder."""
    paths = sorted(folder.rglob("*"))
    return [(str(p), p.stat().st_size, p.stat().st_mtime_ns) for p in paths]


def equal(state, wanted):
    assert state.keys() == wanted.keys()
    return all(torch.equal(state[key].float(), wanted[key].float()) for key in wanted)


def wanted_state(expected):
    state = net(expected.get("model", Net)).state_dict()
    if cast := expected.get("cast"):
        state = {k: v.to(cast) if v.is_floating_point() else v for k, v in state.items()}
    return state


@pytest.mark.parametrize("kind", GOOD)
def test_good_files_are_understood_fixed_and_loaded(kind, made, tmp_path):
    path, folder = made
    expected = GOOD[kind][1]
    kind_of_model, wanted = expected.get("model", Net), wanted_state(expected)

    found = inspect_checkpoint(path)
    assert found.weights_at == expected["at"]
    assert found.keys
    assert expected.get("prefix") in (None, *found.prefixes)
    assert bool(found.prefixes) == ("prefix" in expected)
    assert expected.get("calls", "") in " ".join(found.imports)
    assert bool(found.imports) == ("calls" in expected)
    devices = set() if "safetensors" in found.format else {expected["device"]}
    assert set(found.devices.values()) == devices
    assert ("saved on" in repr(found)) == bool(found.devices)
    assert expected.get("holds", "") in repr(found)
    assert all(len(line) <= 80 or str(folder) in line for line in repr(found).splitlines())
    assert len(repr(found).splitlines()) < 60

    model = DataParallel(kind_of_model()) if expected.get("needs_model") else None
    for name in ("fixed.pt", "fixed.safetensors"):
        report = fix_checkpoint(path, tmp_path / name, model=model)
        assert str(tmp_path / name) in repr(report)
    fixed = torch.load(tmp_path / "fixed.pt")
    assert type(fixed) is dict
    assert equal(fixed, wanted)
    assert all(fixed[key].dtype == wanted[key].dtype for key in wanted)
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage() for t in fixed.values()}
    assert sum(storage.nbytes() for storage in storages.values()) < 5000

    for source in (path, tmp_path / "fixed.pt", tmp_path / "fixed.safetensors"):
        model = kind_of_model()
        report = load_into(DataParallel(model), source, strict="more" not in expected)
        assert set(report.names) == set(wanted)
        assert equal(model.state_dict(), {k: v.to(torch.float32) for k, v in wanted.items()})


@pytest.mark.parametrize("kind", BAD)
def test_bad_files_are_refused_in_one_sentence(kind, made, tmp_path):
    path, _ = made
    _, message, inspectable = BAD[kind]
    if inspectable:
        assert any(message in advice for advice in inspect_checkpoint(path).advice)
    else:
        with pytest.raises(CheckpointError) as caught:
            inspect_checkpoint(path)
        assert message in str(caught.value)
    for target in (tmp_path / "old.pt", tmp_path / "old.safetensors"):
        target.write_bytes(b"the last good one")
        with pytest.raises(CheckpointError) as caught:
            fix_checkpoint(path, target)
        assert message in str(caught.value)
        assert "\n" not in str(caught.value)
        assert len(str(caught.value)) < 600
        assert str(path) in str(caught.value)
        assert target.read_bytes() == b"the last good one"
    model = net()
    if kind != "clash_after_stripping":  # with the model, it is clear which of the two is meant
        with pytest.raises(CheckpointError):
            load_into(model, path, strict=False)
    assert equal(model.state_dict(), net().state_dict())
    assert len(list(tmp_path.iterdir())) == 3


def test_the_hostile_files_do_harm_when_they_are_trusted(monkeypatch, tmp_path):
    """Else the tests above would show nothing."""
    (tmp_path / "marker_module.py").write_text("anything = 1")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("HOSTILE", "0")
    for kind in ("imports_a_module", "sets_a_variable", "malicious_alone"):
        (tmp_path / kind).mkdir()
        path = shutil.copy((GOOD.get(kind) or BAD[kind])[0](tmp_path / kind), tmp_path)
        torch.load(path, weights_only=False)
    assert "marker_module" in sys.modules
    assert os.environ["HOSTILE"] == "1"
    assert (tmp_path / "malicious_alone" / "marker").exists()
