"""Files whose tensors are not the weights of a model: what they are, and the way out.

Each kind is told by names, dtypes and shapes of tensors, or by names of files. To convert one as
if it held weights would ruin it, without an error.
"""

import json
import re
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from torch import Tensor

from torchclinic.checkpoint_files.pickles import StandIn
from torchclinic.checkpoint_files.reports import path_word, some

ORIGINAL = "Load it by the program that wrote it, or take the model that it was made from."
FROM = (
    "In transformers: AutoModelForCausalLM.from_pretrained({{folder!r}}{}).save_pretrained('whole')"
)
DEQUANTIZE = FROM.format(").dequantize(")
FLOAT8 = FROM.format(", dtype='float32', quantization_config=FineGrainedFP8Config(dequantize=True)")
MXFP4 = FROM.format(", quantization_config=Mxfp4Config(dequantize=True)")
COMPRESSED = FROM.format(", quantization_config=CompressedTensorsConfig(dequantize=True)")
# By torch alone. Of float8, what is left beside the last whole block has a scale of its own.
BLOCKS = (
    "Some shapes are no multiple of the block, which from_pretrained refuses or reads wrong. By "
    "torch: {load}; torch.save({{k: v.float() * s.float().repeat_interleave(ROWS, -2)[..., :v."
    "shape[-2], :].repeat_interleave(COLUMNS, -1)[..., :v.shape[-1]] if (s := w.get(k + "
    "'_scale_inv')) is not None else v for k, v in w.items() if not k.endswith('_scale_inv')}}, "
    "'whole.pt')"
)
GPTQ = (
    "With GPTQModel, which needs no GPU for it: from gptqmodel.utils.model_dequant import "
    "dequantize_model; dequantize_model({folder!r}, 'whole')"
)
# GPTQModel 7.7.0 takes the eight numbers in an int32 in another order.
AWQ = (
    "Of 4 bits, by torch: {load}; u = lambda t: (t[..., None] >> torch.tensor([0, 16, 4, 20, 8, "
    "24, 12, 28]) & 15).flatten(-2); plain = lambda q, z, s: ((u(q) - u(z)[g := torch.arange(len(q)"
    ") // (len(q) // len(s))]) * s[g]).T; torch.save({{k: v for k, v in w.items() if not k."
    "endswith(('.qweight', '.qzeros', '.scales'))}} | {{k[:-7] + 'weight': plain(*(w[k[:-7] + n] "
    "for n in ('qweight', 'qzeros', 'scales'))) for k in w if k.endswith('.qweight')}}, 'whole.pt')"
)
# from_pretrained reads a folder as Hugging Face's are.
MOVE = (
    "safetensors.torch.save_file(torch.load({path!r}, 'cpu'){at}, 'packed/model.safetensors') puts "
    "them where the model's config.json, with its quantization_config, can be beside. "
)
# The dtypes of packed tensors, how their names end, what is there with each of these in place of
# that end, the layout, and the way out. Of an ordinary layer, none has both.
PACKED = [
    ("uint8", "weight", ["weight.absmax", "weight.quant_map"], "bitsandbytes, 4 bits", DEQUANTIZE),
    ("int8", "weight", ["SCB"], "bitsandbytes, 8 bits", DEQUANTIZE),
    ("int32", "qweight", ["qzeros", "scales", "g_idx"], "GPTQ", GPTQ),
    ("int32", "qweight", ["qzeros", "scales"], "AWQ", AWQ),
    ("int32 uint8 int8", "weight_packed", ["weight_scale"], "compressed-tensors", COMPRESSED),
    ("uint8", "weight", ["weight_scale", "weight_scale_2"], "NVFP4 of ModelOpt", ORIGINAL),
    ("uint8", "_blocks", ["_scales"], "MXFP4, as of gpt-oss", MXFP4),
    ("float8", "", ["_scale_inv"], "float8 by blocks, as of DeepSeek", FLOAT8),
    ("int8 float8", "weight", ["weight_scale"], "compressed-tensors or ModelOpt", COMPRESSED),
    ("float8", "", ["_scale"], "float8", ORIGINAL),
    ("float8", "weight", ["scale_weight"], "float8 of ComfyUI", ORIGINAL),
    ("uint8 int8 float8", "weight_qdata", ["weight_scale"], "torchao", ORIGINAL),
    ("uint8 int8 float8", "weight._data", ["weight._scale"], "quanto", ORIGINAL),
    ("uint8 int8 int32", "W_q", ["scale", "zero"], "HQQ", ORIGINAL),
]
STEP = re.compile(r"global_step\d+")  # the folder of a step, in DeepSpeed's of a run
ZERO = (
    "If you trust who made them, make one model of all ranks' files: python -m deepspeed.utils."
    "zero_to_fp32 {run} whole -t {tag}{both}"
)
WHOLE_MODEL = "mp_rank_*_model_states.pt"  # under ZeRO-1 and ZeRO-2
BOTH = (
    ". Then load_into(model, {model!r}), which has all weights, in the dtype of training, and "
    "load_into(model, 'whole', strict=False): under ZeRO-1, this one lacks what was frozen"
)
RANKS = (
    "the file holds one rank's shards only{of}. If you have all ranks' files, and trust them: "
    "files = [torch.load(name, 'cpu', weights_only=False) for name in {ranks}]; torch.save({{k: "
    "torch.cat([file[k].to_local() for file in files]) if hasattr(v, 'to_local') else v for k, v "
    "in files[0].items()}}, 'whole.pt') joins them, if sharded once, by rows. Or save again, with "
    "get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))."
)
FSDP1 = (
    "the file holds one rank's shards only{of}. On as many ranks as wrote it, load each rank's "
    "file into the model under FSDP, with the StateDictType of then; save the model's state dict "
    "with FULL_STATE_DICT."
)
# What is in the name of a tensor's class, and what to say of it.
CLASSES = {
    ".DTensor": f"is a DTensor: {RANKS}",
    ".ShardedTensor": f"is FSDP1's ShardedTensor: {FSDP1}",
    "torchao.": "is quantized by torchao. With it: torch.save({{k: v.dequantize() if 'torchao' in "
    "type(v).__module__ else v for k, v in torch.load({path!r}, weights_only=False){at}.items()}}, "
    "'whole.pt'), if you trust the file.",
    "_rebuild_qtensor": "is quantized. Convert it where it was made: dequantize().",
    "_rebuild_sparse": "is sparse. Convert it where it was made: to_dense().",
    "_rebuild_meta": "is of the meta device: its numbers were never there, or not saved.",
    "": "is a tensor of a class that is not read here. Where it was made, save a plain one.",
}
# PEFT's and diffusers', kohya's, older diffusers', torchtune's: the layer, and the first of the two
# matrices whose product is to be added to its weight.
DOWN = re.compile(r"(.+?)[._]lora(?:_A|_down|\.down|_a|_embedding_A)(?:\.\w+){0,2}")
BESIDE = re.compile(r"[._]lora_|[._]lora\.(up|down)|[._](alpha|dora_scale|bias)$")
MERGES = {  # by how the first key begins
    r"base_model\.": "PeftModel.from_pretrained(model, {folder!r}).merge_and_unload(), with "
    "adapter_config.json beside the file",
    r"unet\.|transformer\.|text_encoder|lora_|.+lora[._]down": "pipe.load_lora_weights({path!r}); "
    "pipe.fuse_lora()",
    "": "by the program that wrote the file",
}
# In names of files of which each has a part: Hugging Face's, and those that ranks save.
SHARD = re.compile(r"-(\d+)-of-0*(\d{1,4})(?=\.\w+$)")
RANK = re.compile(r"(?<![^\W_])(?:rank|shard)[._-]?(\d{1,4})(?!\d)")
RANKS_SAID = re.compile(r"world_size_(\d{1,4})(?!\d)")
RANKS_APART = (
    "If each rank saved its own shards, load each into the model as it was wrapped then, on as "
    "many ranks, and save that whole; if all ranks saved the same, as under DDP, one file is the "
    "model."
)
# A layer of a mixture of experts, and the number of one of them, if each has tensors of its own.
EXPERTS = re.compile(r"\.experts\.(\d+\.)?")
JOINED = (
    "In the model, a layer's experts are one tensor, in the file one for each, as transformers has "
    "it: AutoModelForCausalLM.from_pretrained({folder!r}) joins them."
)
DIVIDED = (
    "In the file, a layer's experts are one tensor, in the model one for each. Transformers from 5 "
    "divides them: load the file into its model; what model.save_pretrained('whole') writes fits."
)
# Slices of tensors: Megatron's, and DeepSpeed's of a parallel model.
SLICE = re.compile(r"mp_rank_(\d\d)")
MEGATRON = (
    "In Megatron-LM: python tools/checkpoint/convert.py --target-tensor-parallel-size 1 "
    "--target-pipeline-parallel-size 1 --load-dir {run} --save-dir whole"
)


def what_it_is(state: Mapping[Any, Any], path: Path, at: str = "") -> str:
    """What a state dict holds in place of a model's weights, and the way out; else nothing.

    `at` is how Python takes it out of what the file holds: ``['model']``.
    """
    tensors = {k: v for k, v in state.items() if isinstance(v, Tensor) and isinstance(k, str)}
    shapes = {key: tuple(value.shape) for key, value in tensors.items()}
    found = _adapter(shapes, path) or _placeholders(shapes) or _packed(tensors, at) or _slice(path)
    return (
        f"Not the weights of a model but {found[0]}. {filled(found[1], path, at)}" if found else ""
    )


def filled(way_out: str, path: Path, at: str = "") -> str:
    """The way out with the names of this file, of its folder, and of the place in it."""
    folder = path if path.is_dir() else path.parent
    home = _named(folder)
    above = 1 if STEP.fullmatch(home.name) else 2 if SLICE.match(home.name) else 0
    run = [home, *home.parents][min(above, len(home.parents))]
    names = {"run": path_word(run), "tag": path_word(home.name), "folder": str(folder)}
    every = parts_of(path)
    names["of"] = f" ({_others(path, every)})" if every else ""
    names["ranks"] = "NAMES_BY_RANK"
    if every and (rank := RANK.search(path.name)):
        start, width = str(path.with_name(path.name[: rank.start(1)])), len(rank[1])
        number = f"f'{{r:0{width}}}'" if rank[1].startswith("0") and width > 1 else "str(r)"
        pieces = f"{start!r} + {number} + {path.name[rank.end(1) :]!r}"
        names["ranks"] = f"[{pieces} for r in range({len(every)})]"
    names["load"] = f"w = torch.load({str(path)!r}, 'cpu'){at}"
    if not at:
        names["load"] = (
            "from torchclinic.checkpoint_files import inspect_checkpoint; w = inspect_checkpoint("
            f"{str(path)!r}).keys"
        )
    models = [*folder.glob(WHOLE_MODEL), *folder.glob(f"*/{WHOLE_MODEL}")]
    newest = max(models, key=lambda file: file.stat().st_mtime, default=None)
    names["both"] = BOTH.format(model=str(newest)) if newest else ""
    return way_out.format(path=str(path), at=at, **names)


def parts_of(path: Path) -> list[str]:
    """The names of the files of which this is one, whether they are there or not; else none."""
    found = SHARD.search(path.name) or RANK.search(path.name)
    if not found:
        return []
    begin, end = path.name[: found.start(1)], path.name[found.end(1) :]
    if found.re is SHARD:
        numbers, width = range(1, int(found[2]) + 1), len(found[1])
    else:
        beside = re.compile(rf"{re.escape(begin)}(\d{{1,4}}){re.escape(end)}")
        there = [r[1] for p in path.parent.glob("*") if (r := beside.fullmatch(p.name))]
        width, said = min(map(len, there), default=1), RANKS_SAID.search(path.name)
        last = int(said[1]) - 1 if said else max(map(int, there), default=0)
        # Without a first one, it may be the rank of an adapter.
        numbers = range(last + 1) if said or 0 in map(int, there) else range(0)
    return [f"{begin}{i:0{width}}{end}" for i in numbers] if len(numbers) > 1 else []


def _others(path: Path, names: list[str]) -> str:
    """The other files of which this is one, and which of them are not there."""
    missing = [name for name in names if not path.with_name(name).is_file()]
    others = some(name for name in names if name != path.name)
    return f"with {others}{'; not here: ' * bool(missing)}{some(missing)}"


def part_note(path: Path) -> str:
    """What to say of a file that is one shard of several, by its name; else nothing.

    >>> part_note(Path("hf/model-00001-of-00002.safetensors"))[:74]
    'one of 2 shards of a model (with model-00002-of-00002.safetensors; not her'
    """
    if not (names := parts_of(path)):
        return ""
    if SHARD.search(path.name):
        return (
            f"one of {len(names)} shards of a model ({_others(path, names)}). For the whole, "
            f"name the folder that has them all ({path_word(path.parent)})."
        )
    return f"by its name one of {len(names)} ranks' files ({_others(path, names)}). {RANKS_APART}"


def _named(folder: Path) -> Path:
    """With its name, which the folder lacks in which somebody stands."""
    return folder if folder.name else folder.absolute()


def experts_note(missing: Iterable[str], unexpected: Iterable[str], path: Path) -> str:
    """What to say where a layer's experts are one tensor in a model or file, and not in the other.

    >>> experts_note(["experts.down", ".experts.down"], [".experts.0.down.w"], Path("a/b"))[:50]
    "In the model, a layer's experts are one tensor, in"
    """
    ours, theirs = (
        {bool(m[1]) for key in keys if (m := EXPERTS.search(key))} for keys in (missing, unexpected)
    )
    if (ours, theirs) == ({False}, {True}):
        return filled(JOINED, path)
    return DIVIDED if (ours, theirs) == ({True}, {False}) else ""


def exact_note(tensors: Mapping[str, Tensor], path: Path) -> str:
    """What to say of weights of 16 bits beside which DeepSpeed has them in float32."""
    low = any(v.is_floating_point() and v.itemsize == 2 for v in tensors.values())
    if not low or not path.match(WHOLE_MODEL) or not [*path.parent.glob("*_optim_states.pt")]:
        return ""
    return (
        f"What was trained is in float32 in the optimizer's files beside it. {filled(ZERO, path)}."
    )


def _packed(tensors: Mapping[str, Tensor], at: str) -> tuple[str, str] | None:
    for kinds, end, others, layout, way_out in PACKED:
        alike = tuple(f"torch.{kind}" for kind in kinds.split())
        ours = [k for k, v in tensors.items() if k.endswith(end) and str(v.dtype).startswith(alike)]
        stems = [key.removesuffix(end) for key in ours]
        found = [stem for stem in stems if all(f"{stem}{other}" in tensors for other in others)]
        if found:
            beside = " and ".join(f"...{other}" for other in others)
            count = f"{len(found):,} of {len(tensors):,} tensors are packed"
            what = f"quantized ones ({layout}): {count}, wrong without the {beside}"
            if way_out is FLOAT8 and (sides := _sides_of_blocks(tensors, found)):
                way_out = BLOCKS.replace("ROWS", sides[0]).replace("COLUMNS", sides[1])
            elif at and "{folder!r}" in way_out:
                way_out = MOVE + way_out.replace("{folder!r}", "'packed'")
            return what, way_out
    return None


def _sides_of_blocks(tensors: Mapping[str, Tensor], names: list[str]) -> list[str]:
    """The rows and columns, powers of two, that have a scale; none if all blocks are whole."""
    pairs = [(tensors[n].shape[-2:], tensors[f"{n}_scale_inv"].shape[-2:]) for n in names]
    pairs = [pair for pair in pairs if len(pair[1]) == 2 and all(pair[1])]
    sides = [[(shape[i], scales[i]) for shape, scales in pairs] for i in range(2)]
    fits = [
        next((2**e for e in range(16) if all(-(-n // 2**e) == m for n, m in side)), 128)
        for side in sides
    ]
    whole = all(n % fit == 0 for fit, side in zip(fits, sides, strict=True) for n, _ in side)
    return [] if whole else [str(fit) for fit in fits]


def _adapter(shapes: Mapping[str, tuple], path: Path) -> tuple[str, str] | None:
    down = {key: found[1] for key in shapes if (found := DOWN.fullmatch(key))}
    config = path.parent / "adapter_config.json"
    of_peft = path.name.startswith("adapter_model") and config.is_file()
    if not of_peft and (not down or not _are_alone({*down.values()}, shapes)):
        return None  # a layer's own weight is there, too: a whole model
    ranks = sorted({shapes[key][0] for key in down if shapes[key]})
    rank = f" of rank {' and '.join(map(str, ranks))} for {len({*down.values()})} layers"
    what = f"an adapter{rank if ranks else ''}, to be added to the weights of {_base_of(config)}"
    if any("prompt_e" in key for key in shapes):
        prompts = "PeftModel.from_pretrained(model, {folder!r}) puts the prompts before its input"
        return what, f"Load that model; {prompts}. They cannot be merged"
    first = "base_model." if of_peft else next(iter(down))
    way_out = next(way for begin, way in MERGES.items() if re.match(begin, first))
    return what, f"Load that model, then merge: {way_out}"


def _are_alone(layers: set[str], keys: Iterable[str]) -> bool:
    """Whether all that is under the names of these layers is an adapter's."""
    dots = ((key, dot.start()) for key in keys for dot in re.finditer(r"[._]", key[:500]))
    heads = ((key, key[:at]) for key, at in dots)
    return all(BESIDE.search(key) for key, head in heads if head in layers)


def _base_of(config: Path) -> str:
    """Whose adapter it is, as PEFT notes it."""
    with suppress(OSError, ValueError, KeyError, TypeError):
        name = json.loads(config.read_bytes()[:1_000_000])["base_model_name_or_path"]
        if name and isinstance(name, str):
            return f"{name!r:.100}"
    return "a model that is not named here"


def _placeholders(shapes: Mapping[str, tuple]) -> tuple[str, str] | None:
    empty = sum(shape == (0,) for shape in shapes.values())
    if not empty or 2 * empty < len(shapes):
        return None
    what = f"placeholders: {empty:,} of {len(shapes):,} tensors hold no numbers, as under ZeRO-3"
    return what, ZERO


def _slice(path: Path) -> tuple[str, str] | None:
    """One of several files, each with a part of most tensors."""
    for place in (path, _named(path.parent)):
        if SLICE.match(place.name):
            others = {f[1] for p in place.parent.iterdir() if (f := SLICE.match(p.name))}
            if len(others) > 1:
                return f"a slice of each, of {len(others)} (tensor parallel)", MEGATRON
    return None


def why_unread(tensor: StandIn, path: Path, at: str = "") -> str:
    """What to say of a tensor that is more than plain numbers, after its name."""
    parts = [tensor, *(tensor.args or ())]
    name = " ".join(part.name for part in parts if isinstance(part, StandIn))
    return filled(next(words for kind, words in CLASSES.items() if kind in name), path, at)
