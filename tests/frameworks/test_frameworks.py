"""Files that today's frameworks write are loaded right, or refused with a way out that works."""

import os
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from unittest import mock

import pytest
import torch

pytest.importorskip("transformers", reason="needs the frameworks: make test-frameworks")

from cases import MAKERS, MODULES

from torchclinic.checkpoint_files import (
    CheckpointError,
    fix_checkpoint,
    inspect_checkpoint,
    load_into,
)

for module in MODULES:  # each adds its makers
    import_module(module)

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]


def loaded(case, out):
    """The model after `load_into`."""
    load_into(model := case.fresh(), case.path, **case.options)
    return model


def fixed(case, out):
    """After `fix`, which knows nothing of the model, and `load_into`."""
    fix_checkpoint(case.path, out, **case.options)
    load_into(model := case.fresh(), out)
    return model


def fixed_for(case, out):
    """After `fix` for a model, whose file PyTorch then takes as it is."""
    fix_checkpoint(case.path, out, model=(model := case.fresh()), **case.options)
    model.load_state_dict(torch.load(out))
    return model


def told(path):
    """What `inspect` says of it, also if it opens no more than its beginning."""
    try:
        return repr(inspect_checkpoint(path))
    except CheckpointError as error:
        return str(error)


@pytest.fixture
def case(title, tmp_path):
    program = title.split("/")[0]
    try:
        version(program)
    except PackageNotFoundError:
        pytest.skip(f"{program} is not installed")
    with mock.patch.dict(os.environ):
        place = tmp_path / title
        place.mkdir(parents=True)
        yield MAKERS[title](place)


@pytest.mark.parametrize("title", MAKERS)
def test_a_frameworks_file_is_loaded_right_or_refused_with_the_way_out(case, tmp_path):
    def right(model):
        torch.testing.assert_close(case.run(model, case.x), case.want, rtol=1e-3, atol=case.atol)

    right(case.own())  # what a refusal names leads here
    assert case.names.lower() in told(case.path).lower()
    for way in (loaded, fixed, fixed_for):
        refusal, model = "", None
        try:
            model = way(case, tmp_path / f"{way.__name__}.pt")
        except CheckpointError as error:
            refusal = str(error)
        assert bool(refusal) == bool(case.way), f"{way.__name__}: {refusal or 'not refused'}"
        assert case.way in refusal
        if model:
            right(model)


@pytest.mark.parametrize("title", ["transformers/one_file"])
def test_what_was_compared_depends_on_the_weights(case):
    assert not torch.allclose(case.run(case.fresh(), case.x), case.want, atol=1e-2)
