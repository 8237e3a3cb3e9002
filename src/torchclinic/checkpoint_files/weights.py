"""Where in a checkpoint the weights lie, what they are, and what the rest is."""

import re
from collections.abc import Collection, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeGuard

import torch
from torch import Tensor

from torchclinic.checkpoint_files.foreign import TEXTS, WAYS, filled, why_unread
from torchclinic.checkpoint_files.keys import clean_names, strip_leading_wrappers
from torchclinic.checkpoint_files.memory import ties
from torchclinic.checkpoint_files.pickles import (
    BRANCHES,
    STORAGES,
    StandIn,
    storage_id,
    walk,
)
from torchclinic.checkpoint_files.reading import CheckpointError
from torchclinic.checkpoint_files.reports import key_option, literal, some
from torchclinic.tables import in_bytes

# Under these names, programs put the state dict of the model; averaged weights are second choice.
WEIGHTS = {"state_dict", "model_state_dict", "model", "model_state", "net", "network", "module"}
WEIGHTS |= {"weights", "params", "model_weights", "net_state_dict"}
AVERAGED = re.compile(r"(^|[._])(ema|swa|averaged?|shadow)([._]|$)")
# Under these, tensors are that a run needs to go on, or a loss's own.
OF_THE_RUN = re.compile(
    r"(^|[._])(rng|random|loss(es)?|criterion|sampler|(data)?loader|optim(izers?)?|scaler|"
    r"(lr_)?schedulers?|metrics?|train(ing|er)?_state|progress|history)([._]|$)"
)
COPY = re.compile(r"(^|_)(student|teacher|online|target|momentum|ema|swa|averaged?)(_|$)")
MODULE_PARTS = ("_parameters", "_buffers", "_modules")  # of any torch.nn.Module
COMPILED = "torch._dynamo.eval_frame.OptimizedModule"  # by torch.compile
HOOKS = ("_state_dict_hooks", "_state_dict_pre_hooks")  # what they do to the weights is not known
LONGEST = 1000  # letters of a name: longer ones, again in each name below, would fill the memory
MOST_LETTERS = 5_000_000  # of all names in a whole model: its parts may share parts without end
SHOWN_TIMES = 4  # how often tensors may show the numbers of a storage: more might have no end
NOT_ROUNDED = "numbers that are not only rounded"
EXTRA_STATE = "_extra_state"  # under such keys are what a module's get_extra_state() gave


def is_state_dict(value: Any) -> bool:
    """Whether it is a dict of named tensors, for the most part."""
    if not isinstance(value, Mapping) or not all(isinstance(key, str) for key in value):
        return False
    return len(value) > 0 and 2 * _tensor_count(value) >= len(value)


def _tensor_count(value: Mapping) -> int:
    return sum(isinstance(v, Tensor) or is_unread_tensor(v) for v in value.values())


def is_unread_tensor(value: Any) -> bool:
    """Whether a stand-in is of a tensor of a kind that is not read here."""
    return isinstance(value, StandIn) and "_rebuild_" in value.name


def is_optimizer(value: Any) -> bool:
    return isinstance(value, Mapping) and {"state", "param_groups"} <= value.keys()


def is_model(value: Any) -> TypeGuard[StandIn]:
    """Whether a stand-in is of a whole pickled module."""
    return _attributes(value) is not None


def _attributes(value: Any) -> dict | None:
    """A module's: they are its state, or, as of torch.fx's, what it is to be made from."""
    if isinstance(value, StandIn) and value.name == COMPILED and value.args:
        return {part: {} for part in MODULE_PARTS} | {"_modules": {"_orig_mod": value.args[0]}}
    places = [value.state, *(value.args or ())[:1]] if isinstance(value, StandIn) else []
    dicts = [place for place in places if isinstance(place, dict)]
    whole = (d for d in dicts if all(isinstance(d.get(part), dict) for part in MODULE_PARTS))
    return next(whole, None)


def _places(tree: Any) -> list[tuple[str, str, Mapping]]:
    """Every state dict or whole model in `tree`, as `_containers` has them."""
    return [c for c in _containers(tree, set()) if is_model(c[2]) or is_state_dict(c[2])]


def _containers(
    tree: Any, opened: set[int], above: tuple[str, ...] = (), at: str = ""
) -> Iterator[tuple[str, str, Any]]:
    """What may hold weights, each once, after its dotted key and how Python takes it out."""
    opened.add(id(tree))
    yield ".".join(above), at, tree
    if isinstance(tree, Mapping | list | tuple) and len(above) < 3 and not is_optimizer(tree):
        inside = tree.items() if isinstance(tree, Mapping) else enumerate(tree[:100])
        for key, value in inside:
            may_hold = isinstance(value, Mapping | list | tuple) and not str(key).endswith(
                EXTRA_STATE
            )
            if may_hold and id(value) not in opened:
                names = (*above, str(key)[:LONGEST])
                yield from _containers(value, opened, names, f"{at}[{literal(key)}]")


def not_taken(tree: Any, where: str | None, path: Any) -> dict[str, str]:
    """State dicts beside the chosen one; averages in lists, with what puts them into a model."""
    found = {name: value for name, _, value in _places(tree)}
    above = [n for n in found if where is not None and f"{where}.".startswith(f"{n}." * bool(n))]
    names = [n for n in found if n not in above and not _likeliness(n, found[n])[0]]
    return dict.fromkeys(names, "") | dict(_unnamed(tree, path) if found else ())


def _unnamed(tree: Any, path: Any) -> Iterator[tuple[str, str]]:
    """Lists of tensors, as averages of the parameters are kept, and what puts them into a model."""
    for name, at, thing in _containers(tree, set()):
        is_list = isinstance(thing, list | tuple) and len(thing) > 1 and not OF_THE_RUN.search(name)
        if is_list and all(isinstance(v, Tensor) and v.is_floating_point() for v in thing):
            source = f"torch.load({literal(str(path), 300)}, 'cpu'){at}"
            yield (
                name,
                f"{len(thing)} tensors without names, as averages of the parameters are kept: for "
                f"p, new in zip(model.parameters(), {source}, strict=True): p.data.copy_(new)",
            )


def choose(tree: Any, path: Any, key: str | None = None) -> tuple[str, str, Mapping]:
    """The state dict that is meant; of a whole model, its own.

    Before it come the dotted key that it is under, and how Python takes it out: ``['model']``.

    A key that is none may be what all keys of one of several models begin with.

    Raises
    ------
    CheckpointError
        If there is none, or several and `key` does not name one of them.
    """
    places = _places(tree)
    found, at = {name: value for name, _, value in places}, {name: at for name, at, _ in places}
    chosen = _likeliest(found) if key is None else [key]
    if isinstance(tree, Mapping) and "ds_version" in tree and "module" not in tree:
        raise CheckpointError(
            f"{path}: the optimizer's, of DeepSpeed. {filled(WAYS['zero'], Path(path))}"
        )
    if not found:
        raise CheckpointError(f"{path}: no state dict in it, but {_instead(tree, path)}.")
    if chosen[0] not in found:
        for clean in (False, True):  # without wrappers, if no key begins so with them
            both = [(at[n], _under(found[n], n, chosen[0], path, clean)) for n in found]
            parts = [(place, part) for place, part in both if part]
            if len(parts) == 1:
                return chosen[0], *parts[0]
        names = (repr(name) if name else "'' (the top level)" for name in found)
        raise CheckpointError(f"{path}: no weights under {key!r}; there are: {some(names)}.")
    if len(chosen) > 1:
        raise CheckpointError(
            f"{path}: several state dicts in it ({some(f'{name!r:.80}' for name in chosen)}). "
            f"Choose one, such as key={literal(chosen[0], 300)} ({key_option(chosen[0])})."
        )
    if [name for name, *_ in places].count(chosen[0]) > 1:
        raise CheckpointError(f"{path}: two state dicts are called {chosen[0]!r}. Rename one.")
    return chosen[0], at[chosen[0]], _named_weights(found[chosen[0]], path)


def _named_weights(found: Mapping, path: Any) -> Mapping[str, Any]:
    return _state_dict_of(found, path) if is_model(found) else found


def _under(weights: Mapping, name: str, key: str, path: Any, clean: bool) -> dict[str, Any]:
    """What begins with `key` in the state dict called `name`, whose own name may stand before."""
    whole = _named_weights(weights, path)
    start = f"{key}.".removeprefix(f"{name}." if name else "")
    names = clean_names(path, whole) if clean else {k: k for k in whole}
    return {n.removeprefix(start): whole[k] for k, n in names.items() if n.startswith(start)}


def _instead(tree: Any, path: Any) -> str:
    """What there is where there is no state dict."""
    for name, words in _unnamed(tree, path):
        return words.replace(" names", f" names under {name!r:.80}" if name else " names", 1)
    for _, at, thing in _containers(tree, set()):
        inside = thing.values() if type(thing) is dict else [thing]
        names = [value.name if isinstance(value, StandIn) else "" for value in inside]
        for kind, words in TEXTS["objects"].items():
            if names and all(re.match(kind, name) for name in names):
                return filled(words, Path(path), at)
    return describe(tree)


def models_in(state: Mapping[str, Any]) -> list[str]:
    """What the keys of several models of one kind begin with, if one is called as copies are."""
    parts: dict[str, dict[str, Any]] = {}
    for key, value in state.items():
        for dot in list(re.finditer(r"\.", key))[:2]:
            parts.setdefault(key[: dot.start()], {})[key[dot.end() :]] = value.shape
    copies = [name for name in parts if COPY.search(name.rpartition(".")[2])][:10]
    alike = [[n for n in parts if parts[n] == parts[name]] for name in copies]
    return max((names for names in alike if len(names) > 1), key=len, default=[])


def _likeliest(found: Mapping[str, Mapping]) -> list[str]:
    """The names of what is likely meant: several, if it cannot be told.

    A state dict with others inside may be a checkpoint with a few tensors: it comes after one of a
    usual name or a whole model, and equals one that has more tensors.
    """
    order = {name: _likeliness(name, state) for name, state in found.items()}
    for name, (*odd, unusual, depth) in list(order.items()):
        above = [name[: dot.start()] for dot in re.finditer(r"\.", name)] + [""] * bool(name)
        for outer in [] if any(odd) else [outer for outer in above if outer in found]:
            if not unusual or is_model(found[name]):
                order[outer] = max(order[outer], (*odd, unusual, depth + 0.5))
            elif _tensor_count(found[name]) > _tensor_count(found[outer]):
                order[outer] = max(order[outer], (*odd, unusual, depth))
    best = min(order.values(), default=None)
    return [name for name in found if order[name] == best]


def _likeliness(name: str, state: Mapping) -> tuple:
    """Lower is likelier: the top, a usual name, any, an average's, what is of the run."""
    if not name:
        return False, False, False, 0
    tensors = (v for v in state.values() if isinstance(v, Tensor) and v.dim())
    has_numbers = any(v.is_floating_point() or v.is_complex() for v in tensors) or is_model(state)
    has_numbers = has_numbers or any(map(is_unread_tensor, state.values()))
    of_a_run = bool(OF_THE_RUN.search(name)) or not has_numbers
    unusual = name.rpartition(".")[2] not in WEIGHTS
    return of_a_run, bool(AVERAGED.search(name)), unusual, name.count(".") + 1


def split(
    weights: Mapping[str, Any], path: Any, at: str = "", wanted: Collection[str] = ()
) -> tuple[dict[str, Any], dict[str, Any]]:
    """What of a state dict a model can take: tensors and plain extra state; and what else is there.

    Under the `wanted` keys, anything plain.

    Raises
    ------
    CheckpointError
        If some are tensors of a kind that is not read here, and would be lost; if there is none.
    """
    kept = {}
    for key, value in weights.items():
        if getattr(value, "is_nested", False):
            raise CheckpointError(
                f"{path}: {key!r} is a nested tensor: give its to_padded_tensor(0)."
            )
        if is_unread_tensor(value):
            raise CheckpointError(f"{path}: {key!r} {why_unread(value, Path(path), at)}")
        odd = (True for _, thing in walk(value) if isinstance(thing, (StandIn, *STORAGES)))
        is_extra = key.endswith(EXTRA_STATE) or strip_leading_wrappers(key) in wanted
        if isinstance(value, Tensor) or (is_extra and not any(odd)):
            kept[key] = value
    if not any(isinstance(value, Tensor) for value in kept.values()):
        others = some((f"{key} ({what})" for key, what in described(weights).items()), 2)
        raise CheckpointError(f"{path}: no weights in it that can be read, but {others or 'none'}.")
    return kept, {key: value for key, value in weights.items() if key not in kept}


def tensors_in(values: Mapping[str, Any]) -> dict[str, Tensor]:
    """Each tensor by its key; of extra state, by the dotted keys that lead to it."""
    found = {key: value for key, value in values.items() if isinstance(value, Tensor)}
    for key, value in [item for item in values.items() if item[0] not in found]:
        for inner, tensor in [pair for pair in walk(value) if isinstance(pair[1], Tensor)]:
            name = f"{key}.{inner}"
            found[name if name not in found else f"{name} ({len(found)})"] = tensor
    return found


def _state_dict_of(model: StandIn, path: Any) -> dict[str, Any]:
    """The state dict of a whole pickled model, from its parameters and buffers: no code is run."""
    waiting: list[tuple[str, Any, tuple]] = [("", model, ())]
    weights, known, letters = {}, {}, 0
    while waiting:
        prefix, module, above = waiting.pop()
        if id(module) in above:
            continue
        state = _attributes(module)
        if state is None:
            raise CheckpointError(
                f"{path}: {prefix[:-1]!r:.80} is {describe(module):.80}, whose weights only its "
                "own code can find. If you trust it, save its state_dict() to another file."
            )
        if id(module) not in known:
            known[id(module)] = _entries(state)
        below = []
        for part, name, value in known[id(module)]:
            key = f"{prefix}{name}"
            letters += len(key)
            if letters > MOST_LETTERS:
                raise CheckpointError(f"{path}: its parts have more names than any model's.")
            if part == "_modules":
                below.append((f"{key}.", value, (*above, id(module))))
            elif key in weights:
                raise CheckpointError(f"{path}: two tensors are called {key!r}.")
            else:
                weights[key] = value
        waiting += reversed(below)
    return weights


def _entries(state: dict) -> list[tuple[str, Any, Any]]:
    """What a module with these attributes gives a state dict: the part it is in, name and value."""
    names = state.get("_non_persistent_buffers_set")
    skipped = {n for n in names if isinstance(n, str)} if isinstance(names, BRANCHES) else ()
    inside = [(part, *item) for part in MODULE_PARTS for item in state[part].items()]
    inside = [entry for entry in inside if entry[0] != "_buffers" or entry[1] not in skipped]
    inside += [("", *item) for item in state.items() if _is_beyond_reading(*item)]
    return [entry for entry in inside if entry[2] is not None]


def _is_beyond_reading(name: Any, value: Any) -> bool:
    """Whether an attribute of a module's may do to its state dict what only its code can tell."""
    hooks = name in HOOKS and isinstance(value, dict) and value
    return bool(hooks) or (isinstance(value, StandIn) and value.name == "torch.ScriptObject")


def _shown(values: Mapping[str, Any], dtype: torch.dtype | None = None) -> dict[int, int]:
    """How many bytes of each storage the keys show, by `storage_id`; of tied keys once.

    With a dtype, how many there would be in it.
    """
    firsts = [values[keys[0]] for keys in ties(values)]
    shown = dict.fromkeys(map(storage_id, firsts), 0)
    for tensor in firsts:
        size = dtype.itemsize if dtype and tensor.is_floating_point() else tensor.itemsize
        shown[storage_id(tensor)] += tensor.numel() * size
    return shown


def oversized(values: Mapping[str, Any]) -> list[str]:
    """Keys of tensors whose storage holds numbers that none of the keys shows."""
    views: dict[int, list[Tensor]] = {}
    for names in ties(values):
        views.setdefault(storage_id(values[names[0]]), []).append(values[names[0]])
    hiding = {i for i, tensors in views.items() if not _show_all(tensors)}
    tensors = {key: value for key, value in values.items() if isinstance(value, Tensor)}
    return [key for key, tensor in tensors.items() if storage_id(tensor) in hiding]


def _show_all(views: list[Tensor]) -> bool:
    """Whether views of a storage together show all of it."""
    end, views = 0, [each_once(view) for view in views]
    size = views[0].untyped_storage().nbytes()
    dense = [v for v in views if torch.empty_like(v, device="meta").stride() == v.stride()]
    for start, length in sorted((v.storage_offset() * v.itemsize, v.nbytes) for v in dense):
        end = max(end, start + length) if start <= end else end
    if end == size or sum(v.nbytes for v in views) < size:
        return bool(end == size)
    seen = torch.zeros(size, dtype=torch.bool)  # each byte: one view may fill another's gaps
    for v in views:
        steps = (*(step * v.itemsize for step in v.stride()), 1)
        seen.as_strided((*v.shape, v.itemsize), steps, v.storage_offset() * v.itemsize).fill_(True)
    return bool(seen.all())


def each_once(tensor: Tensor) -> Tensor:
    """The numbers that a tensor shows, once where it is expanded."""
    repeats = tensor.numel() and 0 in tensor.stride()
    return tensor[tuple(slice(None) if n else 0 for n in tensor.stride())] if repeats else tensor


def not_finite(values: Mapping[str, Any]) -> dict[str, int]:
    """How many numbers are NaN or infinite, by the keys of the tensors that hold such."""
    counts = {}
    for names in ties(values):
        value = each_once(values[names[0]])
        if value.nbytes > value.untyped_storage().nbytes():  # in rows that overlap
            value = torch.empty(0, dtype=value.dtype).set_(value.untyped_storage())
        counts |= dict.fromkeys(names, _count_not_finite(value))
    return {key: counts[key] for key in values if counts.get(key)}


def _count_not_finite(value: Tensor) -> int:
    if not (value.is_floating_point() or value.is_complex()):
        return 0
    with suppress(NotImplementedError):  # float4, which has neither
        parts = [p.float() if p.itemsize == 1 else p for p in _chunks(value)]  # float8 cannot say
        return sum(part.numel() - int(part.isfinite().sum()) for part in parts)
    return 0


def changed(old: Tensor, new: torch.dtype) -> int:
    """How many numbers `new` changes by more than rounding."""
    has_points = new.is_floating_point or new.is_complex
    near = {"rtol": torch.finfo(new).eps, "atol": torch.finfo(new).tiny} if has_points else {}
    wide = torch.complex128 if old.is_complex() or new.is_complex else torch.float64
    if old.is_floating_point() and new.is_floating_point and max(old.itemsize, new.itemsize) <= 4:
        wide = torch.float32  # holds both, and takes a third of the time
    count = 0
    with suppress(NotImplementedError):  # of float4, nothing is known
        for part in map(Tensor.cpu, _chunks(old.detach())):  # a Mac's GPU has no float64
            there, here = part.to(new).to(wide), part.to(wide)
            same = torch.isclose(there, here, **near or {"rtol": 0, "atol": 0}, equal_nan=True)
            count += part.numel() - int(same.sum())
    return count


def _chunks(value: Tensor) -> Iterator[Tensor]:
    """All of it, a few million numbers at a time: what is shown in an odd order is not copied."""
    if value.numel() <= 1 << 22:
        yield value
    else:
        for half in value.chunk(2, value.shape.index(max(value.shape))):
            yield from _chunks(half)


def refuse_endless(values: Mapping[str, Any], dtype: torch.dtype | None = None) -> None:
    """Refuse what shows its numbers again and again: 4 bytes would fill the disk, in that dtype."""
    tensors = {key: value for key, value in values.items() if isinstance(value, Tensor)}
    there = {storage_id(t): t.untyped_storage().nbytes() for t in tensors.values()}
    shown, again = _shown(values, dtype), any(size > there[i] for i, size in _shown(values).items())
    if again and sum(shown.values()) > 1e6 + SHOWN_TIMES * sum(there.values()):
        key = max(tensors, key=lambda k: (i := storage_id(tensors[k]), shown[i] - there[i])[1])
        raise CheckpointError(
            f"{key!r} shows the same {in_bytes(there[storage_id(tensors[key])])} again and again: "
            f"the tensors would take {in_bytes(sum(shown.values()))} on the disk."
        )


def count_note(counts: Mapping[str, int], tensors: int, what: str = "NaN or inf") -> str:
    """The report's line on numbers, of so many tensors, that are odd: nothing, if none is."""
    names = some(f"{key} ({count:,})" for key, count in counts.items())
    return f"{what} in {len(counts)} of {tensors} tensors: {names}" if counts else ""


def kind_of(tensor: Tensor) -> str:
    """Its shape and dtype: ``64x3x7x7 float32``."""
    shape = "x".join(map(str, tensor.shape)) or "scalar"
    return f"{shape} {tensor.dtype}".replace("torch.", "")


def described(values: Mapping[Any, Any]) -> dict[str, str]:
    """What each of them is, by its key; each is looked at once, however often it is there."""
    words = {i: describe(value) for i, value in {id(v): v for v in values.values()}.items()}
    return {str(key): words[id(value)] for key, value in values.items()}


def describe(value: Any) -> str:
    """A few words on a thing in a checkpoint.

    >>> describe({"state": {}, "param_groups": [{}]}), describe(0.5), describe([1, 2])
    ('optimizer state', '0.5', 'list of 2')
    >>> describe("trained on everything " * 4)
    "'trained on everything trained on ev..."
    """
    if is_model(value):
        return f"a whole model, class {value.name}"
    if isinstance(value, StandIn):
        inside = value.state if isinstance(value.state, dict) else value
        return f"{value.name} object" + (f" of {len(inside)} values" if inside else "")
    if isinstance(value, Tensor):
        return f"tensor {kind_of(value)}"
    if isinstance(value, STORAGES):  # repr would have each number
        return f"a storage of {getattr(value, '_untyped_storage', value).nbytes():,} bytes"
    if is_optimizer(value):
        return "optimizer state"
    if is_state_dict(value):
        return f"state dict of {len(value)} entries"
    if isinstance(value, Mapping):
        return f"dict of {len(value)}"
    if isinstance(value, list | tuple | set | frozenset):
        return f"{type(value).__name__} of {len(value)}"
    if isinstance(value, int) and value.bit_length() > 1000:  # Python refuses to print larger ones
        return f"an integer of {value.bit_length():,} bits"
    text = repr(value[:50] if isinstance(value, str | bytes) else value)
    return text if len(text) < 40 else f"{text[:36]}..."
