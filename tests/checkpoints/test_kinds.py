"""Every kind of checkpoint file, good and bad, has the outcome it should have."""

import os
import shutil
import sys
from pathlib import Path
from unittest import mock

import pytest
import torch
from checkpoint_files import BAD, GOOD, Net, net
from torch.nn.parallel import DataParallel

from torchclinic.checkpoints import (
    CheckpointError,
    fix_checkpoint,
    inspect_checkpoint,
    load_into,
)


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """Makes a file of a kind, once; its folder is not to be written to."""
    made = {}

    def file(kind):
        if kind not in made:
            build = (GOOD.get(kind) or BAD[kind])[0]
            folder = tmp_path_factory.mktemp(kind)
            with mock.patch.dict(os.environ):  # lightning and accelerate set variables
                made[kind] = Path(build(folder)), folder
        return made[kind]

    return file


def fingerprint(folder):
    """Names, sizes and times of all that is in a folder."""
    paths = sorted(folder.rglob("*"))
    return [(str(p), p.stat().st_size, p.stat().st_mtime_ns) for p in paths]


def equal(state, wanted):
    assert list(state.keys() - wanted.keys()) == list(wanted.keys() - state.keys()) == []
    return all(torch.equal(state[key].float(), wanted[key].float()) for key in wanted)


def wanted_state(expected):
    state = net(expected.get("model", Net)).state_dict()
    if cast := expected.get("cast"):
        state = {k: v.to(cast) if v.is_floating_point() else v for k, v in state.items()}
    return state


def test_there_are_enough_kinds():
    assert len(GOOD) >= 50
    assert len(BAD) >= 40


@pytest.mark.parametrize("kind", GOOD)
def test_good_files_are_understood_fixed_and_loaded(kind, files, tmp_path):
    path, folder = files(kind)
    expected = GOOD[kind][1]
    before = fingerprint(folder)
    kind_of_model, wanted = expected.get("model", Net), wanted_state(expected)

    found = inspect_checkpoint(path)
    assert found.weights_at == expected.get("inspect_at", expected["at"])
    assert found.keys
    assert expected.get("prefix") in (None, *found.prefixes)
    assert bool(found.prefixes) == ("prefix" in expected)
    assert expected.get("calls", "") in " ".join(found.imports)
    assert bool(found.imports) == bool({"calls", "inspect_at"} & expected.keys())
    device = expected.get("device", "cpu")
    assert set(found.devices.values()) == (set() if "safetensors" in found.format else {device})
    assert ("saved on" in repr(found)) == bool(found.devices)
    assert expected.get("oversized") in (None, *found.oversized)
    assert expected.get("holds", "") in repr(found)
    assert all(len(line) <= 80 or str(folder) in line for line in repr(found).splitlines())
    assert len(repr(found).splitlines()) < 60

    options = {name: expected[name] for name in ("key",) if name in expected}
    if expected.get("needs_model"):
        options["model"] = DataParallel(kind_of_model())
    for name in ("fixed.pt", "fixed.safetensors"):
        report = fix_checkpoint(path, tmp_path / name, **options)
        assert str(tmp_path / name) in repr(report)
    fixed = torch.load(tmp_path / "fixed.pt")
    assert type(fixed) is dict
    assert equal(fixed, wanted)
    assert all(fixed[key].dtype == wanted[key].dtype for key in wanted)
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage() for t in fixed.values()}
    assert sum(storage.nbytes() for storage in storages.values()) < 5000

    for source in [path, tmp_path / "fixed.pt", *tmp_path.glob("*.safetensors")]:
        model = kind_of_model()
        given = {"key": options["key"]} if "key" in options and source == path else {}
        report = load_into(DataParallel(model), source, strict=kind not in WITH_MORE, **given)
        assert set(report.names) == set(wanted)
        assert equal(model.state_dict(), {k: v.to(torch.float32) for k, v in wanted.items()})
    assert fingerprint(folder) == before
    assert not (folder / "marker").exists()


# More in the file than the model has.
WITH_MORE = {"part_of_a_larger_model"}


@pytest.mark.parametrize("kind", BAD)
def test_bad_files_are_refused_in_one_sentence(kind, files, tmp_path):
    path, folder = files(kind)
    _, message, inspectable = BAD[kind]
    before = fingerprint(folder)
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
    if kind not in LOADABLE:
        with pytest.raises(CheckpointError):
            load_into(model, path, strict=False)
    assert equal(model.state_dict(), net().state_dict())
    assert len(list(tmp_path.iterdir())) == 2
    assert fingerprint(folder) == before
    assert not (folder / "marker").exists()


# With the model to compare with, it is clear which of the two is meant.
LOADABLE = {"clash_after_stripping"}


def test_the_files_that_import_do_so_when_they_are_trusted(files, monkeypatch, tmp_path):
    """That they are hostile, too, though they call nothing."""
    (tmp_path / "marker_module.py").write_text("anything = 1")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("HOSTILE", "0")
    for kind in ("weights_that_import_a_module", "weights_that_set_a_variable"):
        torch.load(files(kind)[0], weights_only=False)
    assert "marker_module" in sys.modules
    assert os.environ["HOSTILE"] == "1"


def test_the_marker_is_made_when_the_file_is_trusted(files, tmp_path):
    """That the malicious files are malicious: else the tests above would show nothing."""
    path, folder = files("malicious_alone")
    shutil.copy(path, tmp_path)
    torch.load(tmp_path / path.name, weights_only=False).close()
    assert (folder / "marker").exists()
    (folder / "marker").unlink()
