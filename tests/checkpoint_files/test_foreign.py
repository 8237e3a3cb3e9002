"""Files whose tensors are not the weights are told by name and shape, and nothing ordinary is."""

import json
import os
import re
from pathlib import Path

import pytest
import torch
from kinds_of_files import net, one_rank, same, saved, written
from safetensors.torch import save_file
from torch import nn
from torch.distributed.tensor import DTensor, Shard
from torch.nn.utils.parametrizations import weight_norm
from torch.nn.utils.parametrize import remove_parametrizations
from torch.testing._internal.distributed import fake_pg  # noqa: F401 - the backend "fake"

from torchclinic.checkpoint_files import (
    CheckpointError,
    fix_checkpoint,
    foreign,
    inspect_checkpoint,
    load_into,
)


def made(dtypes):
    """Such tensors: two dashes in a name are a dot; a dtype may have a shape."""
    kinds = {k: v if isinstance(v, tuple) else (v, (4, 4)) for k, v in dtypes.items()}
    return {
        name.replace("__", "."): torch.zeros(shape).to(getattr(torch, dtype))
        for name, (dtype, shape) in kinds.items()
    }


def tensors(folder, **dtypes):
    save_file({"norm.weight": torch.ones(2)} | made(dtypes), folder / "model.safetensors")
    return folder / "model.safetensors"


FP8, F32, F16, U8, I8, I32 = "float8_e4m3fn", "float32", "float16", "uint8", "int8", "int32"
QUANTIZED = {  # keys and dtypes as each program writes them
    "bitsandbytes, 8": {"q__weight": I8, "q__SCB": F32, "q__weight_format": U8},
    "GPTQ": {"q__qweight": I32, "q__qzeros": I32, "q__scales": F16, "q__g_idx": I32},
    "AWQ": {"q__qweight": I32, "q__qzeros": I32, "q__scales": F16},
    "compressed-tensors": {"q__weight_packed": I32, "q__weight_scale": F16, "q__weight_shape": I32},
    "compressed-tensors or": {"q__weight": FP8, "q__weight_scale": F32, "q__input_scale": F32},
    "NVFP4 of M": {"q__weight": U8, "q__weight_scale": FP8, "q__weight_scale_2": F32},
    "MXFP4": {"mlp__gate_up_proj_blocks": U8, "mlp__gate_up_proj_scales": U8},
    "DeepSeek": {"q__weight": FP8, "q__weight_scale_inv": F32},
    "float8)": {"experts__w1": FP8, "experts__w1_scale": "float8_e8m0fnu"},
    "ComfyUI": {"scaled_fp8": FP8, "q__weight": FP8, "q__scale_weight": F32},
    "torchao": {"q___weight_qdata": FP8, "q___weight_scale": F32},
    "quanto": {"q__weight___data": I8, "q__weight___scale": F32},
    "quanto, less": {"q__weight___data___data": U8, "q__weight___scale": F32},
    "HQQ": {"q__W_q": U8, "q__scale": F16, "q__zero": F16},
}  # fmt: skip
DOWN, UP = (F32, (4, 8, 3, 3)), (F32, (8, 4, 1, 1))  # of a convolution
ADAPTERS = {
    "model.load_lora_adapter": {"down_blocks__0__to_q__lora_A__weight": DOWN,
                                "down_blocks__0__to_q__lora_B__weight": UP},
    "PeftModel": {"base_model__model__q__lora_A__weight": DOWN,
                  "base_model__model__q__lora_B__weight": UP},
    "with adapter_config": {"base_model__model__e__lora_embedding_A": DOWN,
                                "base_model__model__e__lora_embedding_B": UP},
    "fuse_lora": {"unet__mid__to_q__lora_A__weight": DOWN, "unet__mid__to_q__lora_B__weight": UP},
    "pipe.": {"unet__mid__processor__to_q_lora__down__weight": DOWN,
              "unet__mid__processor__to_q_lora__up__weight": UP},
    "by the program": {"layers__0__attn__q_proj__lora_a__weight": DOWN,
                       "layers__0__attn__q_proj__lora_b__weight": UP},
}  # fmt: skip


def adapter(folder, keys):
    save_file(made(keys), folder / "adapter.safetensors")
    return folder / "adapter.safetensors"


def peft_folder(folder):
    """As the Trainer leaves it, with a whole layer of modules_to_save."""
    keys = {"base_model__model__lm_head__weight": F32} | ADAPTERS["PeftModel"]
    adapter(folder, keys).rename(folder / "adapter_model.safetensors")
    about = {"base_model_name_or_path": "acme/seven-{billion}", "r": 4}
    (folder / "adapter_config.json").write_text(json.dumps(about))
    saved(folder, {"state": {}, "param_groups": []}, "optimizer.pt")
    saved(folder, {}, "scheduler.pt")
    return folder


def prompts(folder):
    save_file({"prompt_embeddings": torch.ones(4, 8)}, folder / "adapter_model.safetensors")
    (folder / "adapter_config.json").write_text("{}")
    return folder


def deepspeed(folder, state, name):
    (folder / "run" / "global_step7").mkdir(parents=True)
    return saved(folder / "run" / "global_step7", {"ds_version": "0.19"} | state, name)


def placeholders(folder):
    state = {name: torch.empty(0) for name in ("a.weight", "a.bias")} | {"mask": torch.ones(3)}
    name = "zero_pp_rank_0_mp_rank_00_model_states.pt"
    return deepspeed(folder, {"module": state, "param_shapes": [{}]}, name)


def megatron(folder):
    for rank in ("mp_rank_00", "mp_rank_01"):
        (folder / "run" / "iter_0000007" / rank).mkdir(parents=True)
        state = {"model": {"decoder.weight": torch.ones(2, 2)}, "iteration": 7}
        path = saved(folder / "run" / "iter_0000007" / rank, state, "model_optim_rng.pt")
    return path


ONNX_BY_TEN = b"\x08\x0a\x12\x0aten-letter\x1a\x062.15.0:\x10" + bytes(100)  # its length: a newline
# What other programs' own files are told is in test_made_by.py.
FILES = {
    **{w: (lambda folder, k=k: tensors(folder, **k)) for w, k in QUANTIZED.items()},
    **{w: (lambda folder, k=k: adapter(folder, k)) for w, k in ADAPTERS.items()},
    "an adapter of rank 4 for 1 layers, to be added to the weights of 'acme/seven-{b": peft_folder,
    "They cannot be merged": prompts,
    "zero_to_fp32 {}/run whole -t global_step7": placeholders,
    "a step of DeepSpeed's. If": lambda folder: placeholders(folder).parent,
    "--model-type GPT --target-tensor-parallel-size 1 --target-pipeline-parallel-size 1 "
    "--load-dir {}/run --save": megatron,
    "ONNX, a program, whose": lambda folder: written(folder, ONNX_BY_TEN, "model"),
    "2 tensors without names under 'shadow_params'": lambda folder: saved(
        folder, {"decay": 0.9, "shadow_params": [torch.ones(2), torch.ones(3)]}
    ),
    ", 'rb')).module_ is the model": lambda folder: written(
        folder, b"\x80\x02cskorch.net\nNeuralNet\n)\x81}X\1\0\0\0aK\1sb."
    ),
}


@pytest.mark.parametrize("words", FILES)
def test_what_is_not_weights_is_told_and_never_converted(words, tmp_path):
    path, model = FILES[words](tmp_path), net()
    words = words.replace("{}", str(tmp_path))
    try:
        told = " ".join(inspect_checkpoint(path).advice)
    except CheckpointError as error:
        told = str(error)
    assert words in told
    assert "A plain state dict" not in told
    assert not (told.startswith("Not the w") and "(the weights)" in repr(inspect_checkpoint(path)))
    for options in ({}, {"dtype": torch.float32}, {"model": net()}):
        with pytest.raises(CheckpointError, match=re.escape(words)):
            fix_checkpoint(path, tmp_path / "fixed.pt", **options)
    assert not (tmp_path / "fixed.pt").exists()
    for strict in (True, False):
        with pytest.raises(CheckpointError, match=re.escape(words)):
            load_into(model, path, strict=strict)
    assert same(model, net())
    assert len(told) < 800


ORDINARY = [
    # timm's, transformers', torchvision's and torch.ao's own names
    ["patch_embed.proj.weight", "blocks.0.attn.logit_scale", "blocks.0.ls1.gamma", "head.weight"],
    ["logit_scale", "logit_bias", "vision_model.embeddings.position_ids", "text.weight"],
    ["conv.weight", "conv.weight_fake_quant.scale", "conv.weight_fake_quant.zero_point"],
    ["q.weight", "q.scale", "q.zero", "q.weight_scale", "q.scales", "q.weight_scale_inv"],
    ["backbone.layers.0.mixer.A_log", "backbone.layers.0.mixer.dt_bias", "lm_head.weight"],
    # LoRA inside a whole model: PEFT's, torchtune's, loralib's
    ["q.base_layer.weight", "q.lora_A.default.weight", "q.lora_B.default.weight"],
    ["layers.0.q.weight", "layers.0.q.lora_a.weight", "layers.0.q.lora_b.weight"],
    ["q.weight", "q.lora_A", "q.lora_B"],
    ["explora_A.weight", "alpha", "x.lora_scale"],
    ["qweight", "qzeros", "scales", "g_idx", "W_q", "blocks", "scales_blocks"],
]


@pytest.mark.parametrize("names", ORDINARY, ids=lambda names: names[0])
@pytest.mark.parametrize("dtype", ["float32", FP8])
def test_nothing_ordinary_is_called_quantized_or_an_adapter(names, dtype, tmp_path):
    kinds = {k: dtype if k.endswith("weight") and "scale" not in k else F32 for k in names}
    if dtype == FP8:  # a cast: with scales beside them they would be quantized
        kinds = {k: v for k, v in kinds.items() if "weight_" not in k}
    path = tensors(tmp_path, **{k.replace(".", "__"): v for k, v in kinds.items()})
    assert not inspect_checkpoint(path).advice[0].startswith("Not the weights")


def test_a_module_that_has_them_all_takes_packed_weights_and_their_scales(tmp_path):
    """As a layer does that computes with them."""
    path = tensors(tmp_path, **QUANTIZED["DeepSeek"])
    layer = nn.Module()
    layer.register_buffer("weight", torch.ones(4, 4).to(torch.float8_e4m3fn))
    layer.register_buffer("weight_scale_inv", torch.ones(4, 4))
    model = nn.ModuleDict({"q": layer, "norm": nn.LayerNorm(2, bias=False)})
    load_into(model, path)
    assert not layer.weight_scale_inv.any()
    fix_checkpoint(path, tmp_path / "y.pt", model=model)
    with pytest.raises(CheckpointError, match="DeepSeek"):
        fix_checkpoint(path, tmp_path / "z.pt", model=model, dtype=torch.float32)


class Packed(nn.Module):
    """As bitsandbytes' layers: it loads the scales, which it does not have until then."""

    scales = None

    def __init__(self):
        super().__init__()
        self.register_buffer("weight", torch.ones(4, 4).to(torch.int8))

    def _load_from_state_dict(self, state, prefix, *rest):
        self.scales = state.pop(f"{prefix}SCB")
        state.pop(f"{prefix}weight_format")
        super()._load_from_state_dict(state, prefix, *rest)


def test_a_layer_that_knows_packed_weights_takes_them(tmp_path):
    path = tensors(tmp_path, **QUANTIZED["bitsandbytes, 8"])
    model = nn.ModuleDict({"q": Packed(), "norm": nn.LayerNorm(2, bias=False)})
    load_into(model, path)
    assert not model["q"].weight.any()
    assert model["q"].scales is not None
    model = nn.ModuleDict({"q": Packed(), "other": nn.LayerNorm(2, bias=False)})
    with pytest.raises(CheckpointError, match="bitsandbytes, 8 bits"):
        load_into(model, path)
    assert model["q"].weight.all()


def save_rows(model):
    """What two ranks save of a model under FSDP2."""
    with one_rank("fake", 2):
        mesh = torch.distributed.init_device_mesh("cpu", (2,))
        for rank in range(2):
            parts = {k: whole.chunk(2)[rank].clone() for k, whole in model.state_dict().items()}
            state = {k: DTensor.from_local(part, mesh, [Shard(0)]) for k, part in parts.items()}
            torch.save({"model": state}, f"rank{rank}.pt")


def told_line(path):
    """The line of code in what is said of a file."""
    try:
        told = " ".join(inspect_checkpoint(path).advice)
    except CheckpointError as error:
        told = str(error)
    return re.search(r"(files = |torch\.save\().*\)", told.partition(" joins")[0])[0]


def test_the_lines_run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(7)
    model, names = nn.Linear(4, 3), {"torch": torch}
    save_rows(model)
    assert "shards only (with rank1.pt)" in inspect_checkpoint("rank0.pt").advice[0]
    exec(told_line(tmp_path / "rank0.pt"), names)
    assert same(model, loaded("whole.pt"))
    torch.export.save(torch.export.export(model, (torch.ones(1, 4),)), "x.pt2")
    exec(told_line(tmp_path / "x.pt2"), names)
    assert same(model, loaded("plain.pt"))
    torch.jit.script(model).save("script.pt")
    exec(told_line(tmp_path / "script.pt"), names)
    assert same(model, loaded("plain-2.pt"))


def squeezed(numbers):
    """Eight numbers of 4 bits, along the last axis, in each int32."""
    wide = numbers.unflatten(-1, (-1, 8)).long() << torch.arange(0, 32, 4)
    return wide.sum(-1).to(torch.uint32).view(torch.int32)


def awq():
    """As AutoAWQ packs a weight of 16 x 32, with a scale and a zero for 16 columns each."""
    numbers, zeros = torch.randint(0, 16, (32, 16)), torch.randint(0, 16, (2, 16))
    scales = torch.rand(2, 16)
    plain = (numbers - zeros.repeat_interleave(16, 0)) * scales.repeat_interleave(16, 0)
    mixed = [
        t.unflatten(-1, (-1, 8))[..., [0, 2, 4, 6, 1, 3, 5, 7]].flatten(1) for t in (numbers, zeros)
    ]
    parts = {"qweight": squeezed(mixed[0]), "qzeros": squeezed(mixed[1]), "scales": scales}
    return plain.T, parts


def float8_blocks(rows=20, columns=40, block=16):
    """As DeepSeek's: the last row and column of blocks are not whole."""
    low = torch.randn(rows, columns).to(torch.float8_e4m3fn)
    scales = torch.rand(-(-rows // block), -(-columns // block))
    wide = scales.repeat_interleave(block, 0)[:rows].repeat_interleave(block, 1)[:, :columns]
    return low.float() * wide, {"weight": low, "weight_scale_inv": scales}


def int8_rows(rows=4, columns=6):
    """As bitsandbytes' Linear8bitLt."""
    low, scales = torch.randint(-127, 127, (rows, columns)).to(torch.int8), torch.rand(rows)
    parts = {"weight": low, "SCB": scales, "weight_format": torch.tensor(0).to(torch.uint8)}
    return low * scales[:, None] / 127, parts


def quanto():
    low, scales = torch.randint(-127, 127, (4, 6)).to(torch.int8), torch.rand(4, 1)
    parts = {"weight._data": low, "weight._scale": scales, "input_scale": torch.ones(())}
    return low * scales, parts


@pytest.mark.parametrize("pack", [awq, float8_blocks, int8_rows, quanto])
@pytest.mark.parametrize("inside", [False, True])
def test_the_line_that_unpacks_weights_gives_the_numbers(pack, inside, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    plain, parts = pack()
    state = {f"q.{name}": part for name, part in parts.items()} | {"norm.weight": torch.ones(3)}
    name = "x.pt" if inside else "model.safetensors"
    if inside:
        torch.save({"model": state, "optimizer": {"state": {}, "param_groups": []}}, name)
    else:
        save_file({key: value.contiguous() for key, value in state.items()}, name)
    told = " ".join(inspect_checkpoint(name).advice)
    exec(re.search(r"(from torchclinic|w = torch).*'whole.pt'\)", told)[0], {"torch": torch})
    whole = torch.load("whole.pt")
    assert whole.keys() == {"q.weight", "norm.weight"}
    assert torch.equal(whole["q.weight"], plain)


def test_blocks_that_are_whole_are_left_to_transformers(tmp_path):
    parts = float8_blocks(32, 64)[1]
    save_file({f"q.{name}": part for name, part in parts.items()}, tmp_path / "x.safetensors")
    assert "FineGrainedFP8Config" in inspect_checkpoint(tmp_path / "x.safetensors").advice[0]


def test_packed_weights_inside_a_file_with_other_parts_are_told_with_their_place(tmp_path):
    packed = {"q.weight_packed": torch.ones(4, 4).int(), "q.weight_scale": torch.ones(4, 1)}
    rest = {"ema": {"q.weight": torch.ones(4, 32)}, "optimizer": {"state": {}, "param_groups": []}}
    path = saved(tmp_path, {"model": packed} | rest)
    told = " ".join(inspect_checkpoint(path).advice)
    assert f"save_file(torch.load('{path}', 'cpu')['model'], 'packed/model.safetensors')" in told
    assert "from_pretrained('packed', " in told
    with pytest.raises(CheckpointError, match=re.escape(told)):
        fix_checkpoint(path, tmp_path / "y.pt")


def loaded(path):
    model = nn.Linear(4, 3)
    model.load_state_dict(torch.load(path))
    return model


def test_a_file_of_one_of_several_ranks_names_the_others(tmp_path):
    names = ["x_rank_0.pt", "x_rank_1.pt", "lora_rank8.pt", "lora_rank16.pt", "world_size_3_rank_1"]
    for name in names:
        saved(tmp_path, {"w": torch.ones(2)}, name)
    part = "one of 2 ranks' files (with x_rank_1.pt). If each rank saved its own shards"
    path = tmp_path / "x_rank_0.pt"
    for report in (inspect_checkpoint(path), fix_checkpoint(path, tmp_path / "y.pt")):
        assert part in " ".join(repr(report).split())
    with pytest.raises(CheckpointError, match=re.escape(part)):
        load_into(nn.LayerNorm(2), path)
    assert "ranks' files" not in repr(inspect_checkpoint(tmp_path / "lora_rank8.pt"))
    missing = "; not here: world_size_3_rank_0, world_size_3_rank_2)."
    assert missing in " ".join(repr(inspect_checkpoint(tmp_path / names[-1])).split())
    assert foreign.parts_of(tmp_path / "x/rank_0.pt") == []  # nobody may list its folder


def test_a_folder_of_deepspeeds_with_whole_weights_gives_those(tmp_path):
    tensors(tmp_path, a__weight=F32)
    (tmp_path / "zero_to_fp32.py").touch()
    assert "a.weight" in inspect_checkpoint(tmp_path).keys


def zero_two(folder):
    """A step of ZeRO-1 or ZeRO-2: the weights are whole, the optimizer is not."""
    state = {"module": {"a.weight": torch.ones(2).bfloat16()}, "param_shapes": []}
    path = deepspeed(folder, state, "mp_rank_00_model_states.pt")
    saved(path.parent, {"ds_version": "0.19"}, "bf16_zero_pp_rank_0_mp_rank_00_optim_states.pt")
    return path


def test_the_exact_copy_beside_weights_of_16_bits_is_named(tmp_path):
    path = zero_two(tmp_path)
    both = f"load_into(model, '{path}'), which has all weights"
    told = inspect_checkpoint(path).advice[0]
    assert "in float32 in the optimizer's files beside it" in told
    assert f"zero_to_fp32 {tmp_path}/run whole -t global_step7. Then {both}" in told
    for name in ("", "zero_to_fp32.py"):
        (tmp_path / "run" / name).touch()
        with pytest.raises(CheckpointError, match=re.escape(both)):
            inspect_checkpoint(tmp_path / "run" if name else path.parent)
    next(path.parent.glob("*optim*")).unlink()
    assert "float32" not in " ".join(inspect_checkpoint(path).advice)


def test_experts_that_are_one_tensor_in_the_model_or_in_the_file_have_a_way(tmp_path):
    one = nn.ParameterDict({"up": torch.ones(2, 4, 3)})
    apart = nn.ModuleList(nn.ModuleDict({"up": nn.Linear(3, 4)}) for _ in range(2))
    pair = [nn.ModuleDict({"mlp": nn.ModuleDict({"experts": part})}) for part in (one, apart)]
    for model, other, words in [(*pair, "from_pretrained("), (*pair[::-1], "save_pretrained(")]:
        path = saved(tmp_path, other.state_dict())
        with pytest.raises(CheckpointError, match=re.escape(words)):
            load_into(model, path)
        with pytest.raises(CheckpointError, match=re.escape(words)):
            fix_checkpoint(path, tmp_path / "y.pt", model=model)


def test_weights_in_parts_and_positions_of_another_size_have_a_way(tmp_path):
    plain, parts = nn.Sequential(nn.Linear(2, 3)), nn.Sequential(weight_norm(nn.Linear(2, 3)))
    path = saved(tmp_path, parts.state_dict())
    assert "weight_norm(model.conv)" in str(inspect_checkpoint(path))
    with pytest.raises(CheckpointError, match=r"remove_parametrizations\(model.conv, 'weight'\)"):
        load_into(plain, path)
    load_into(parts, path)
    remove_parametrizations(parts[0], "weight")
    load_into(plain, parts.state_dict())
    with pytest.raises(CheckpointError, match="get_peft_model"):
        load_into(plain, {"0.base_layer.weight": torch.ones(3, 2), "0.bias": torch.ones(3)})
    for name in ("pos_embed", "positional_embedding"):
        small, large = (nn.ParameterDict({name: torch.ones(1, n, 4)}) for n in (5, 10))
        with pytest.raises(CheckpointError, match=r"resample_abs_pos_embed.* open_clip"):
            load_into(nn.ModuleList([small]), nn.ModuleList([large]).state_dict())


def test_models_that_name_the_same_weights_in_another_way_have_a_way_out(tmp_path):
    attention = {f"att.{part}linear.weight": torch.ones(4, 4) for part in "qkv"}
    kernel = {"_torch_params.sequential/dense/kernel": torch.ones(2, 4)}
    for state, words in [(attention, "in_proj_weight"), (kernel, "transposed")]:
        path = saved(tmp_path, state)
        assert words in inspect_checkpoint(path).advice[0]
        with pytest.raises(CheckpointError, match="no key fits"):
            load_into(nn.Linear(4, 2), path)
    text = nn.ModuleDict({"resblocks": nn.ModuleList([nn.Linear(2, 2)])})
    model = nn.ModuleDict({"text": nn.ModuleDict({"transformer": text}), "visual": nn.Linear(2, 1)})
    state = {k.removeprefix("text."): v for k, v in model.state_dict().items()}
    path = saved(tmp_path, state)
    with pytest.raises(CheckpointError, match=r"open_clip\.load_checkpoint\(model, "):
        load_into(model, path)


def test_a_state_dict_with_something_beside_is_not_called_plain(tmp_path):
    path = saved(tmp_path, nn.Linear(2, 1).state_dict() | {"checkpointer": {"saved": []}})
    assert "torchclinic fix" in inspect_checkpoint(path).advice[0]


def test_a_slice_is_told_where_somebody_stands_in_its_folder(tmp_path, monkeypatch):
    path = megatron(tmp_path)
    monkeypatch.chdir(path.parent)
    with pytest.raises(CheckpointError, match=f"--load-dir {tmp_path}/run --save"):
        fix_checkpoint(path.name, "x.pt")


def test_one_of_several_models_in_a_flat_dict_is_chosen(tmp_path):
    student, teacher = nn.BatchNorm1d(2), nn.BatchNorm1d(2)
    nn.init.constant_(teacher.weight, 3.0)
    both = nn.ModuleDict({"student": student, "teacher": teacher})
    for at, thing in {
        "": both.state_dict(),
        "model.": {"model": both.state_dict(), "epoch": 3},
    }.items():
        path = saved(tmp_path, thing)
        found = repr(inspect_checkpoint(path))
        assert f"{at}teacher: --key {at}teacher" in found
        assert "2 models of one kind" in found
        model = nn.BatchNorm1d(2)
        with pytest.raises(CheckpointError, match="Choose one: key='student', key='teacher'"):
            load_into(model, path)
        for key in ("teacher", f"{at}teacher"):
            model = nn.BatchNorm1d(2)
            load_into(model, path, key=key)
            assert same(model, teacher)
        report = fix_checkpoint(path, tmp_path / "y.pt", key=f"{at}student")
        assert list(report.names) == list(student.state_dict())
        assert not [key for key in report.dropped if key.startswith("student")]
        with pytest.raises(CheckpointError, match="no weights under 'teach'"):
            load_into(model, path, key="teach")
    twice = saved(tmp_path, {"one": both.state_dict(), "two": both.state_dict()})
    with pytest.raises(CheckpointError, match="no weights under 'teacher'"):
        load_into(model, twice, key="teacher")
    ordinary = {f"encoder.layers.{i}.weight": torch.ones(2) for i in range(6)}
    path = saved(tmp_path, ordinary | {"model_ema.decay": torch.ones(1)})
    assert "of one kind" not in repr(inspect_checkpoint(path))


def test_a_state_dict_in_a_list_is_found(tmp_path):
    path = saved(tmp_path, {"best": (3, {"net": nn.Linear(2, 1).state_dict()})})
    assert inspect_checkpoint(path).weights_at == "best.1.net"
    load_into(nn.Linear(2, 1), path, key="best.1.net")
    fix_checkpoint(path, tmp_path / "y.pt")


def test_every_way_out_has_its_names_filled_in(tmp_path):
    path = tmp_path / "a{b}.pt"
    for part in ("ways", "classes", "merges", "programs", "folders", "beginnings"):
        for words in foreign.TEXTS[part].values():
            told = foreign.filled(words, path, model="m.pt", pack="zip")
            assert not re.search(r"\{(?!k|t\.name|b\})", told)


def test_averages_in_a_list_are_named_with_the_line_that_takes_them(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    model, average = nn.Linear(4, 3), nn.Linear(4, 3)
    lists = [{"shadow.params": [p.detach() for p in average.parameters()]}]
    saved(tmp_path, {"model": model.state_dict(), "ema": lists, "rng": [torch.ones(2)] * 2})
    found = inspect_checkpoint("x.pt")
    assert list(re.findall("or take +(.*?):", repr(found))) == ["ema.0.shadow.params"]
    report = " ".join(repr(load_into(nn.Linear(4, 3), "x.pt")).split())
    line = re.search(r"for p, new.*_\(new\)", report)[0]
    exec(line, {"torch": torch, "model": model})
    assert same(model, average)


def test_of_an_adapters_config_nothing_is_read_outside_its_folder_and_no_pipe(tmp_path):
    (tmp_path / "in").mkdir()
    peft_folder(tmp_path / "in")
    config = (tmp_path / "in/adapter_config.json").rename(tmp_path / "outside.json")
    path = tmp_path / "in/adapter_config.json"
    for make in (
        lambda: path.symlink_to(config),
        lambda: path.symlink_to(path),
        lambda: os.mkfifo(path),
    ):
        make()
        assert "a model that is not named here" in inspect_checkpoint(tmp_path / "in").advice[0]
        path.unlink()


def test_a_line_to_copy_writes_over_no_file_of_yours(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    tables = [table for table in foreign.TEXTS.values() if isinstance(table, dict)]
    ways = [words for table in tables for words in table.values()]
    target = r"(?:'|(?:dcp_to_torch|to_fp32|to_fp32.py) \S+ |--save-dir )"
    target = re.compile(target + r"(whole\.pt|plain\.pt|whole|packed)(?=['/. ]|$)")

    def targets():
        texts = [foreign.filled(words, tmp_path / "x.pt", pack="", model="") for words in ways]
        return [name for text in texts for name in target.findall(text)]

    assert len(targets()) >= 17
    for name in {*targets()}:
        Path(name).touch()
    assert targets() == []
