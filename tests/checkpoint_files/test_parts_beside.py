"""Files with weights that count only with what is beside them: no way out leaves that away."""

import pytest
import torch
from torch import nn
from torch.nn.utils import prune

from torchclinic.checkpoint_files import (
    CheckpointError,
    fix_checkpoint,
    inspect_checkpoint,
    load_into,
)


def linear():
    return nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2))


def pruned():
    model = linear()
    prune.l1_unstructured(model[0], "weight", amount=0.5)
    return model.state_dict()


def older_spectral_norm():
    model = linear()
    nn.utils.spectral_norm(model[0])
    return model.state_dict()


def with_lora():
    return linear().state_dict() | {"0.lora_A": torch.ones(2, 4), "0.lora_B": torch.ones(4, 2)}


def with_prompts():
    return linear().state_dict() | {"prompt_encoder.default.embedding.weight": torch.ones(3, 4)}


def prepared_to_be_quantized():
    return linear().state_dict() | {"0.weight_fake_quant.scale": torch.ones(1)}


MADE = {
    pruned: "prune.identity",
    older_spectral_norm: "older torch.nn.utils.spectral_norm",
    with_lora: "LoRA",
    with_prompts: "get_peft_model",
    prepared_to_be_quantized: "torch.ao",
}


@pytest.mark.parametrize("make", MADE)
def test_what_changes_the_answers_is_not_left_out(make, tmp_path):
    torch.save(make(), tmp_path / "x.pt")
    advice = inspect_checkpoint(tmp_path / "x.pt").advice
    assert any(MADE[make] in text for text in advice)
    assert not any("load_into(model, path)" in text for text in advice)
    with pytest.raises(CheckpointError, match=MADE[make]):
        load_into(linear(), tmp_path / "x.pt")
    with pytest.raises(CheckpointError, match=MADE[make]):
        fix_checkpoint(tmp_path / "x.pt", tmp_path / "y.pt", model=linear())
    report = fix_checkpoint(tmp_path / "x.pt", tmp_path / "y.pt")  # as it is, and says so
    assert MADE[make] in " ".join(str(report).split())


# Of Swin, SAM, DLA and others: keys of ordinary models that look like those.
ORDINARY = [
    "0.attn_mask",
    "att.k_linear.weight",
    "1._module.weight",
    "steps",
    "prompt_encoder.no_mask_embed.weight",
    "base.base_layer.0.weight",
]


@pytest.mark.parametrize("key", ORDINARY)
def test_an_ordinary_key_is_taken_for_none_of_them(key, tmp_path):
    torch.save(linear().state_dict() | {key: torch.ones(3)}, tmp_path / "x.pt")
    assert inspect_checkpoint(tmp_path / "x.pt").advice[-1].startswith("A plain state dict")
    report = fix_checkpoint(tmp_path / "x.pt", tmp_path / "y.pt", model=linear())
    assert list(report.dropped) == [key]


def test_the_way_out_of_a_pruned_file_gives_its_answers(tmp_path):
    torch.save(pruned(), tmp_path / "x.pt")
    model = linear()
    prune.identity(model[0], "weight")
    load_into(model, tmp_path / "x.pt")
    prune.remove(model[0], "weight")
    state = torch.load(tmp_path / "x.pt")
    assert torch.equal(model[0].weight, state["0.weight_orig"] * state["0.weight_mask"])


def test_packed_weights_of_torch_are_no_weights(tmp_path):
    state = {"0._packed_params._packed_params": (torch.ones(2, 2), None), "1.bias": torch.ones(2)}
    torch.save(state, tmp_path / "x.pt")
    assert "torch.ao" in inspect_checkpoint(tmp_path / "x.pt").advice[0]
    with pytest.raises(CheckpointError, match=r"torch\.ao"):
        fix_checkpoint(tmp_path / "x.pt", tmp_path / "y.pt")


def test_what_strict_false_would_leave_random_is_said():
    with pytest.raises(CheckpointError, match=r"would leave 2 of the model's keys as they are\."):
        load_into(linear(), {k: v for k, v in linear().state_dict().items() if k[0] == "0"})


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.head = nn.Embedding(5, 3), nn.Linear(3, 5, bias=False)
        self.head.weight = self.embed.weight


def test_a_head_under_another_name_is_not_taken_for_a_tied_one(tmp_path):
    state = {"embed.weight": torch.ones(5, 3), "embed_out.weight": torch.zeros(5, 3)}
    torch.save(state, tmp_path / "x.pt")
    for load in (
        lambda: load_into(Tied(), tmp_path / "x.pt"),
        lambda: fix_checkpoint(tmp_path / "x.pt", tmp_path / "y.pt", model=Tied()),
    ):
        with pytest.raises(CheckpointError, match=r"1 missing \(head\.weight"):
            load()


def test_beside_a_config_its_library_is_named(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    torch.save({"0.weight": torch.ones(4, 4)}, tmp_path / "x.pt")
    with pytest.raises(CheckpointError, match="from_pretrained"):
        load_into(linear(), tmp_path / "x.pt")


@pytest.mark.parametrize("prefix", ["aux.", "teacher.", "old.aux.", "module.aux."])
def test_a_head_of_another_part_is_not_put_into_the_models_own(prefix, tmp_path):
    """The main head was left out of the file, and a part of the same shape is in it."""
    model = nn.ModuleDict({"body": nn.Linear(4, 4), "fc": nn.Linear(4, 2)})
    state = {k.replace("fc.", f"{prefix}fc."): v for k, v in model.state_dict().items()}
    torch.save(state, tmp_path / "x.pt")
    with pytest.raises(CheckpointError, match=r"2 missing \(fc\.weight"):
        load_into(model, tmp_path / "x.pt")
    with pytest.raises(CheckpointError, match=r"2 missing \(fc\.weight"):
        fix_checkpoint(tmp_path / "x.pt", tmp_path / "y.pt", model=model)
