"""Files whose tensors are not the weights of a model: what they are, and the way out.

Each kind is told by names, dtypes and shapes of tensors, or by names of files. To convert one as
if it held weights would ruin it, without an error.
"""

import json
import re
import tomllib
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from torch import Tensor

from torchclinic.checkpoint_files.pickles import StandIn
from torchclinic.checkpoint_files.reports import free_name, literal, path_word, some

# In a file of its own, as it is text: what is said of each kind, and the ways out.
TEXTS = tomllib.loads((Path(__file__).parent / "ways_out.toml").read_text("utf-8"))
WAYS = TEXTS["ways"]
STEP = re.compile(r"global_step\d+")  # the folder of a step, in DeepSpeed's of a run
WHOLE_MODEL = "mp_rank_*_model_states.pt"  # under ZeRO-1 and ZeRO-2
# PEFT's and diffusers', kohya's, older diffusers', torchtune's: the layer, and the first of the two
# matrices whose product is to be added to its weight.
DOWN = re.compile(r"(.+?)[._]lora(?:_A|_down|\.down|_a|_embedding_A)(?:\.\w+){0,2}")
BESIDE = re.compile(r"[._]lora_|[._]lora\.(up|down)|[._](alpha|dora_scale|bias)$")
# In names of files of which each has a part: Hugging Face's, and those that ranks save.
SHARD = re.compile(r"-(\d+)-of-0*(\d{1,4})(?=\.\w+$)")
RANK = re.compile(r"(?<![^\W_])(?:rank|shard)[._-]?(\d{1,4})(?!\d)")
RANKS_SAID = re.compile(r"world_size_(\d{1,4})(?!\d)")
# A layer of a mixture of experts, and the number of one of them, if each has tensors of its own.
EXPERTS = re.compile(r"\.experts\.(\d+\.)?")
PACKED_BY_TORCH = re.compile(r"(^|\.)_packed_params(\.|$)")
# Slices of tensors: Megatron's, and DeepSpeed's of a parallel model.
SLICE = re.compile(r"mp_rank_(\d\d)")


def what_it_is(state: Mapping[Any, Any], path: Path, at: str = "") -> str:
    """What a state dict holds in place of a model's weights, and the way out; else nothing.

    `at` is how Python takes it out of what the file holds: ``['model']``.
    """
    tensors = {k: v for k, v in state.items() if isinstance(v, Tensor) and isinstance(k, str)}
    shapes = {key: tuple(value.shape) for key, value in tensors.items()}
    found = _adapter(shapes, path) or _placeholders(shapes) or _packed(tensors, at) or _slice(path)
    if any(isinstance(key, str) and PACKED_BY_TORCH.search(key) for key in state):
        found = "quantized ones (torch.ao), packed", WAYS["torch_ao"]
    if not found:
        return ""
    return f"Not the weights of a model but {found[0]}. {filled(found[1], path, at)}"


def filled(way_out: str, path: Path, at: str = "", **names: str) -> str:
    """The way out with the names of this file, of its folder, and of the place in it."""
    folder = path if path.is_dir() else path.parent
    home = _named(folder)
    above = 1 if STEP.fullmatch(home.name) else 2 if SLICE.match(home.name) else 0
    run = [home, *home.parents][min(above, len(home.parents))]
    names |= {"run": path_word(run), "tag": path_word(home.name), "folder": str(folder)}
    names |= {"name": path.name, "here": path_word(folder), "file": path_word(path)}
    names |= {"whole": free_name("whole"), "whole_pt": free_name("whole.pt")}
    names |= {"plain": free_name("plain.pt"), "packed": free_name("packed")}
    every = parts_of(path)
    names["of"] = f" ({_others(path, every)})" if every else ""
    names["ranks"] = "NAMES_BY_RANK"
    if every and (rank := RANK.search(every[0])):
        begin, end = str(path.with_name(every[0][: rank.start(1)])), every[0][rank.end(1) :]
        number = f"f'{{r:0{len(rank[1])}}}'"
        names["ranks"] = f"[{begin!r} + {number} + {end!r} for r in range({len(every)})]"
    source = literal(str(path), 300)
    names["load"] = f"w = torch.load({source}, 'cpu'){at}"
    if not at:
        names["load"] = (
            "from torchclinic.checkpoint_files import inspect_checkpoint; w = inspect_checkpoint("
            f"{source}).keys"
        )
    if "{both}" in way_out:
        models = [*folder.glob(WHOLE_MODEL), *folder.glob(f"*/{WHOLE_MODEL}")]
        newest = max(models, key=lambda file: file.lstat().st_mtime, default=None)
        names["both"] = WAYS["both"].format(model=str(newest), **names) if newest else ""
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
    others = _others(path, names)
    return f"by its name one of {len(names)} ranks' files ({others}). {WAYS['ranks_apart']}"


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
        return filled(WAYS["experts_joined"], path)
    divided = (ours, theirs) == ({True}, {False})
    return filled(WAYS["experts_divided"], path) if divided else ""


def key_note(keys: Iterable[str], path: Path, table: str = "inside") -> str:
    """What to say of weights in parts, or of those of another shape, by their keys.

    >>> key_note(["conv.parametrizations.weight.original0"], Path("a.pt"))[:54]
    'Weights are in parts, as under torch.nn.utils.parametr'
    """
    keys = list(keys)
    for pattern, words in TEXTS[table].items():
        if any(re.search(pattern, key) for key in keys):
            return filled(words, path)
    return ""


def home_note(path: Path) -> str:
    """What to say of weights beside which a library of Hugging Face keeps what it knows of them."""
    folder = path if path.is_dir() else path.parent
    notes = (words for name, words in TEXTS["homes"].items() if (folder / name).is_file())
    return next((filled(words, path) for words in notes), "")


def exact_note(tensors: Mapping[str, Tensor], path: Path) -> str:
    """What to say of weights of 16 bits beside which DeepSpeed has them in float32."""
    low = any(v.is_floating_point() and v.itemsize == 2 for v in tensors.values())
    if not low or not path.match(WHOLE_MODEL) or not [*path.parent.glob("*_optim_states.pt")]:
        return ""
    exact = "What was trained is in float32 in the optimizer's files beside it."
    return f"{exact} {filled(WAYS['zero'], path)}."


def _packed(tensors: Mapping[str, Tensor], at: str) -> tuple[str, str] | None:
    for kinds, end, others, layout, way in TEXTS["packed"]:
        way_out = WAYS[way]
        alike = tuple(f"torch.{kind}" for kind in kinds.split())
        ours = [k for k, v in tensors.items() if k.endswith(end) and str(v.dtype).startswith(alike)]
        stems = [key.removesuffix(end) for key in ours]
        found = [stem for stem in stems if all(f"{stem}{other}" in tensors for other in others)]
        if found:
            beside = " and ".join(f"...{other}" for other in others)
            count = f"{len(found):,} of {len(tensors):,} tensors are packed"
            what = f"quantized ones ({layout}): {count}, wrong without the {beside}"
            if way == "float8" and (sides := _sides_of_blocks(tensors, found)):
                way_out = WAYS["blocks"].replace("ROWS", sides[0]).replace("COLUMNS", sides[1])
            elif at and "{folder!r}" in way_out:
                way_out = f"{WAYS['move']} " + way_out.replace("{folder!r}", "'{packed}'")
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
    way_out = next(way for begin, way in TEXTS["merges"].items() if re.match(begin, first))
    return what, f"Load that model, then merge: {way_out}"


def _are_alone(layers: set[str], keys: Iterable[str]) -> bool:
    """Whether all that is under the names of these layers is an adapter's."""
    dots = ((key, dot.start()) for key in keys for dot in re.finditer(r"[._]", key[:500]))
    heads = ((key, key[:at]) for key, at in dots)
    return all(BESIDE.search(key) for key, head in heads if head in layers)


def stays_inside(path: Path) -> bool:
    """Whether a file is in its folder, which a stranger may have filled with links to yours."""
    home, target = path.parent.resolve(), path.resolve()
    # In Hugging Face's cache, names under snapshots/<revision> are links into blobs.
    places = [home, *(p.parent / "blobs" for p in home.parents if p.name == "snapshots")]
    return any(map(target.is_relative_to, places))


def _base_of(config: Path) -> str:
    """Whose adapter it is, as PEFT notes it."""
    with suppress(OSError, ValueError, KeyError, TypeError, RuntimeError):  # links in a circle
        if not (config.is_file() and stays_inside(config)):
            return "a model that is not named here"
        with open(config, "rb") as file:
            name = json.loads(file.read(1_000_000))["base_model_name_or_path"]
        if name and isinstance(name, str):
            return f"{name!r:.100}"
    return "a model that is not named here"


def _placeholders(shapes: Mapping[str, tuple]) -> tuple[str, str] | None:
    empty = sum(shape == (0,) for shape in shapes.values())
    if not empty or 2 * empty < len(shapes):
        return None
    what = f"placeholders: {empty:,} of {len(shapes):,} tensors hold no numbers, as under ZeRO-3"
    return what, WAYS["zero"]


def _slice(path: Path) -> tuple[str, str] | None:
    """One of several files, each with a part of most tensors."""
    for place in (path, _named(path.parent)):
        if SLICE.match(place.name):
            others = {f[1] for p in place.parent.iterdir() if (f := SLICE.match(p.name))}
            if len(others) > 1:
                return f"a slice of each, of {len(others)} (tensor parallel)", WAYS["megatron"]
    return None


def why_unread(tensor: StandIn, path: Path, at: str = "") -> str:
    """What to say of a tensor that is more than plain numbers, after its name."""
    parts = [tensor, *(tensor.args or ())]
    name = " ".join(part.name for part in parts if isinstance(part, StandIn))
    return filled(next(words for kind, words in TEXTS["classes"].items() if kind in name), path, at)
