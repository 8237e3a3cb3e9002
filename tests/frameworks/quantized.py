"""Weights of few bits, with the scales that make numbers of them beside them."""

from functools import partial

import torch
from cases import Case, X, logits, made_by, net
from hugging_face import language, llama

from torchclinic.checkpoint_files import load_into


def loaded(path, **more):
    from transformers import LlamaForCausalLM

    return LlamaForCausalLM.from_pretrained(path, dtype=torch.float32, **more)


def unpacked(path, **more):
    """The model again, with the plain weights that transformers saves of it."""
    model = loaded(path, **more)
    if not more:
        model = model.dequantize()
    model.save_pretrained(f"{path}.whole")
    load_into(fresh := llama(7), f"{path}.whole")
    return fresh


NF4 = {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4", "bnb_4bit_use_double_quant": True}


@made_by("bitsandbytes/nf4", **NF4)
@made_by("bitsandbytes/int8", load_in_8bit=True)
@made_by("bitsandbytes/nf4_state_dict", file="model.pt", **NF4)
def bits_and_bytes(folder, file="", **choice):
    from transformers import BitsAndBytesConfig

    llama().save_pretrained(folder / "before")
    model = loaded(folder / "before", quantization_config=BitsAndBytesConfig(**choice))
    model.save_pretrained(after := folder / "after")
    if file:
        torch.save(model.state_dict(), folder / file)
    way = {"way": "from_pretrained", "names": "bitsandbytes"}
    return language(
        folder / (file or "after"), model, own=lambda: unpacked(after), atol=2e-3, **way
    )


@made_by("torchao/int8_weight_only", config="Int8WeightOnlyConfig")
@made_by("torchao/float8_weight_only", config="Float8WeightOnlyConfig")
def by_torchao(folder, config):
    from torchao import quantization

    model, path = net(), folder / "model.pt"
    quantization.quantize_(model, getattr(quantization, config)())
    torch.save(model.state_dict(), path)

    def own():
        fresh, state = net(7), torch.load(path)
        plain = {k: v.dequantize() if hasattr(v, "dequantize") else v for k, v in state.items()}
        fresh.load_state_dict(plain)
        return fresh

    return Case(path, partial(net, 7), logits(model, X), own, way="dequantize", names="torchao")


FLOAT8 = {"num_bits": 8, "type": "float", "strategy": "channel", "symmetric": True}


@made_by("compressed-tensors/float8", form="float-quantized", top=448, weights=FLOAT8)
@made_by(
    "compressed-tensors/int4_packed", form="pack-quantized", top=7,
    weights=FLOAT8 | {"num_bits": 4, "type": "int"},
)  # fmt: skip
def compressed(folder, form, top, weights):
    from compressed_tensors import ModelCompressor
    from compressed_tensors.quantization import QuantizationConfig, apply_quantization_config
    from transformers import CompressedTensorsConfig

    model = llama()
    group = {"targets": ["Linear"], "weights": weights}
    if weights["type"] == "float":
        group["input_activations"] = weights | {"strategy": "token", "dynamic": True}
    config = {"config_groups": {"group_0": group}, "format": form, "ignore": ["lm_head"]}
    apply_quantization_config(model, QuantizationConfig(**config))
    for layer in [m for m in model.modules() if hasattr(m, "weight_scale")]:
        layer.weight_scale.data = layer.weight.data.abs().amax(1, keepdim=True) / top
    compressor = ModelCompressor.from_pretrained_model(model, form)
    compressor.compress_model(model)
    model.save_pretrained(folder)
    compressor.update_config(folder)

    def own():
        return unpacked(folder, quantization_config=CompressedTensorsConfig(dequantize=True))

    way = {"way": "from_pretrained", "names": "compressed-tensors"}
    case = language(folder, llama(), own=own, **way)
    case.want = logits(own(), case.x)
    return case


def to_blocks(weight):
    """DeepSeek's float8, with a scale for each square of numbers."""
    rows, columns = (size // BLOCK for size in weight.shape)
    tiles = weight.reshape(rows, BLOCK, columns, BLOCK)
    scales = tiles.abs().amax((1, 3)) / 448
    low = (tiles / scales[:, None, :, None]).to(torch.float8_e4m3fn)
    plain = (low.float() * scales[:, None, :, None]).reshape(weight.shape)
    return plain, {"weight": low.reshape(weight.shape), "weight_scale_inv": scales}


BLOCK = 16
DEEPSEEK = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [BLOCK, BLOCK]}


@made_by("safetensors/deepseek_float8")
def by_deepseek(folder):
    """By hand, in the layout: the programs that pack need a GPU."""
    from safetensors.torch import save_file
    from transformers import FineGrainedFP8Config

    model, state = llama(), {}
    for key, weight in list(model.state_dict().items()):
        packs = "_proj." in key
        plain, parts = to_blocks(weight) if packs else (weight.clone(), {"weight": weight})
        weight.copy_(plain)
        parts = {name: part.clone().contiguous() for name, part in parts.items()}
        state |= {key.removesuffix("weight") + name: part for name, part in parts.items()}
    save_file(state, folder / "model.safetensors", {"format": "pt"})
    model.config.quantization_config = DEEPSEEK
    model.config.save_pretrained(folder)

    def own():
        return unpacked(folder, quantization_config=FineGrainedFP8Config(dequantize=True))

    return language(folder, model, own=own, way="from_pretrained", names="float8")
