"""Keys of files and models find each other, and never by accident."""

import pytest
import torch

from torchclinic.checkpoint_files.keys import clean_names, match, wrapper_of


def shaped(*keys, shape=(2,)):
    return {key: torch.zeros(shape) for key in keys}


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
        (["_module.a.w", "_module.b.w"], ["a.w", "b.w"], ["_module.a.w", "_module.b.w"]),
        (["steps", "module.a"], ["a"], ["module.a"]),
    ],
)
def test_keys_find_their_partners(file, model, names):
    found = match(shaped(*file), shaped(*model))
    assert found.names == dict(zip(model, names, strict=True))
    assert not found.missing_keys


def test_of_two_parts_none_is_guessed_and_one_layer_is_not_taken_for_another():
    found = match(shaped("student.w", "teacher.w"), shaped("w"))
    assert (found.names, found.missing_keys) == ({}, ["w"])
    found = match(shaped("student.w", shape=(3,)) | shaped("teacher.w"), shaped("w"))
    assert found.names == {"w": "teacher.w"}  # the shapes decide
    found = match(shaped("fc.weight", "fc.bias"), shaped("head.weight", "head.bias"))
    assert not found.names
    assert "head.weight (near 'fc.weight')" in found.problems()[0]
    long = "w" * 150  # the time to compare grows with the square
    assert "near" not in match(shaped(f"fc.{long}"), shaped(f"head.{long}")).problems()[0]


def test_a_prefix_that_would_cause_a_collision_or_is_on_some_keys_only_stays():
    found = match(shaped("module.a", "module.b", "a"), shaped("a", "b"))
    assert (found.names, found.unexpected_keys) == ({"a": "a"}, ["module.a", "module.b"])
    for name in ("module", "_module"):
        keys = [f"{name}.fc.weight", "conv.weight"]
        assert clean_names("x.pt", keys) == {key: key for key in keys}
    assert clean_names("x.pt", ["_module.module.w"]) == {"_module.module.w": "w"}


def test_ten_thousand_keys_are_matched_in_a_moment():
    keys = [f"layers.{i}.{part}.{n}" for i in range(1250) for part in "abcd" for n in ("w", "b")]
    found = match(shaped(*(f"module.{key}" for key in keys)), shaped(*(f"net.{k}" for k in keys)))
    assert len(found.names) == 10_000


def test_model_is_lightnings_prefix_in_a_lightning_file_alone():
    assert wrapper_of("model.", ["pytorch-lightning_version", "epoch"]) == "Lightning"
    unknown = "a model with this one as a part"  # Hugging Face's causal language models, say
    assert wrapper_of("model.", ["epoch"]) == unknown
    assert wrapper_of("_orig_mod.model.") == f"torch.compile over {unknown}"


def test_wrappers_are_taken_off_and_a_part_called_module_is_not():
    for key, name in {
        "_forward_module.module.module.x": "module.x",
        "_orig_mod.module._orig_mod.x": "x",
    }.items():
        assert clean_names("x.pt", [key, f"{key}y"]) == {key: name, f"{key}y": f"{name}y"}
