"""Prefixes that wrappers put before the keys of a state dict: found, taken off, put on.

A prefix is a leading part of a key, up to a dot. ``str.replace`` would also hit a submodule that
is really called ``module``, and setting keys by position would load any weights into any layer.
"""

import difflib
import re
from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from itertools import dropwhile, groupby
from typing import Any

from torchclinic.checkpoint_files.reading import LIGHTNING, CheckpointError
from torchclinic.checkpoint_files.reports import some

# What puts a segment into keys. No submodule of one's own has one of the first four names.
WRAPPERS = {
    "_orig_mod": "torch.compile",
    "_fsdp_wrapped_module": "FSDP",
    "_checkpoint_wrapped_module": "activation checkpointing",
    "_forward_module": "Lightning Fabric",
    "_module": "Opacus",
    "module": "DataParallel or DDP",
    "model": "Lightning",  # the usual name of the model in a LightningModule, and not only there
}
UNMISTAKABLE = tuple(WRAPPERS)[:4]
COUNTERS = "n_averaged", "steps"  # beside the weights: AveragedModel's, MMEngine's


def drop_segments(key: str) -> str:
    """`key` without the segments that only wrappers have, wherever they stand.

    >>> drop_segments("0._orig_mod.weight")
    '0.weight'
    """
    return ".".join(part for part in key.split(".") if part not in UNMISTAKABLE)


def strip_leading_wrappers(key: str) -> str:
    """`key` without the wrappers' segments that it begins with.

    >>> strip_leading_wrappers("_orig_mod.module.fc.weight")
    'fc.weight'
    """
    return ".".join(dropwhile(WRAPPERS.__contains__, key.split(".")))


def is_counter(key: str, keys: Collection[str]) -> bool:
    """Whether it is the counter of AveragedModel, or of MMEngine's, in whatever wrappers.

    >>> is_counter("_orig_mod.n_averaged", []), is_counter("head.n_averaged", [])
    (True, False)
    >>> is_counter("steps", ["steps", "module.bias"]), is_counter("steps", ["steps", "bias"])
    (True, False)
    """
    name = strip_leading_wrappers(key)
    return name == COUNTERS[0] or (name == COUNTERS[1] and _is_beside(key, keys))


def _is_beside(key: str, keys: Collection[str]) -> bool:
    """Whether all keys but counters begin with the ``module.`` beside this one."""
    start = f"{key.removesuffix(key.rpartition('.')[2])}module."
    return all(k.startswith(start) or strip_leading_wrappers(k) in COUNTERS for k in keys)


def removed_prefixes(names: Mapping[str, str]) -> dict[str, int]:
    """The prefixes that a renaming of keys removes, and from how many keys.

    >>> removed_prefixes({"module.fc.bias": "fc.bias", "model._orig_mod.bias": "model.bias"})
    {'module.': 1, '_orig_mod.': 1}
    """
    found: Counter[str] = Counter()
    for old, new in names.items():
        gone = Counter(old.split(".")) - Counter(new.split("."))
        inner = "".join(f"{part}." for part in gone if part in WRAPPERS)
        found[old.removesuffix(new) if old.endswith(new) else inner] += 1
    return {prefix: count for prefix, count in found.items() if prefix}


def wrapper_of(prefix: str, keys: Collection[str] = ()) -> str:
    """What writes such a prefix, into a file with these keys; at its top level, too.

    >>> wrapper_of("module.module.", ["n_averaged", "module.module.weight"])
    'AveragedModel over DataParallel or DDP'
    """
    parts = prefix.split(".")[:-1]
    known = {part: WRAPPERS[part] for part in WRAPPERS if part != "model" or LIGHTNING in keys}
    makers = [known.get(part, "a model with this one as a part") for part in parts]
    if "module" in parts and any(is_counter(key, keys) for key in keys):
        makers[parts.index("module")] = "AveragedModel"
    return " over ".join(maker for maker, _ in groupby(makers))


def prefix_notes(prefixes: Mapping[str, int], keys: Collection[str]) -> list[str]:
    """A phrase for each prefix: on how many keys it is, and what put it there."""
    return [
        f"{prefix!r} on {count:,} keys: put there by {wrapper_of(prefix, keys)}"
        for prefix, count in prefixes.items()
    ]


def clean_names(path: Any, keys: Iterable[str], beside: Collection[str] = ()) -> dict[str, str]:
    """Names without wrappers for `keys`, when there is no model to compare with.

    ``module.`` is taken off once (twice under AveragedModel), and only if all keys begin so;
    likewise ``_module.``; and ``model.``, if what is `beside` them is Lightning's. AveragedModel's
    counter goes.

    Raises
    ------
    CheckpointError
        If two keys would become one.

    Examples
    --------
    >>> clean_names("x.pt", ["_orig_mod.module.fc.weight", "_orig_mod.module.module.bias"])
    {'_orig_mod.module.fc.weight': 'fc.weight', '_orig_mod.module.module.bias': 'module.bias'}
    """
    every = {key: drop_segments(key) for key in keys}
    names = _without_counter(every)
    averaged = len(names) < len(every)
    for prefix in ["_module.", "module.", "module." * averaged, "model." * (LIGHTNING in beside)]:
        names = _off(prefix, names)
    if collision := _collision(names):
        raise CheckpointError(
            f"{path}: Without wrappers, {collision} would be one key: nothing was changed. Rename "
            "one of them first: state[new] = state.pop(old)."
        )
    return names


def _off(prefix: str, names: dict[str, str]) -> dict[str, str]:
    """The names without a prefix, if all have it."""
    is_on_all = all(new.startswith(prefix) for new in names.values())
    return {k: new.removeprefix(prefix) for k, new in names.items()} if is_on_all else names


def _without_counter(names: dict[str, str]) -> dict[str, str]:
    """Without AveragedModel's counter, if all else begins with the ``module.`` beside it."""
    every = names.values()
    its = {new for new in every if is_counter(new, every) and _is_beside(new, every)}
    return {key: new for key, new in names.items() if new not in its}  # else the model's own


def _collision(names: Mapping[str, str]) -> str:
    """Two keys that get the same name, if there are."""
    first: dict[str, str] = {}
    for key, new in names.items():
        if first.setdefault(new, key) != key:
            return f"{first[new]!r} and {key!r}"
    return ""


@dataclass
class Match:
    """How the keys of a file and of a model go together."""

    names: dict[str, str]  # from the model's keys to the file's, where the shapes agree too
    missing_keys: list[str]  # keys of the model that the file lacks
    unexpected_keys: list[str]  # keys of the file that the model lacks
    # The file's (None of what is no tensor) and the model's, by its key.
    mismatched_shapes: dict[str, tuple[tuple | None, tuple | None]]
    renamed: dict[str, str]  # from all keys of the file to those that the model is given

    def problems(self) -> list[str]:
        """A phrase for each kind of trouble, with the first keys by name."""
        found = []
        if self.missing_keys:
            names = _with_near_names(self.missing_keys, self.unexpected_keys)
            found.append(f"{len(names)} missing ({some(names)})")
        if self.mismatched_shapes:
            shapes = [
                f"{key} is {ours} in the file, {theirs} in the model"
                for key, (ours, theirs) in self.mismatched_shapes.items()
            ]
            found.append(f"{len(shapes)} of other shape ({some(shapes, between='; ')})")
        if self.unexpected_keys:
            found.append(f"{len(self.unexpected_keys)} unexpected ({some(self.unexpected_keys)})")
        return found


def _with_near_names(missing: list[str], others: list[str]) -> list[str]:
    """The missing keys, the first of each layer with the most similar one of the file."""
    short = [key for key in others[:500] if len(key) < 100]  # likeness is slow to find
    names = {strip_leading_wrappers(key): key for key in short}
    layers = {key.rpartition(".")[0]: key for key in reversed(missing[:4])}
    near = {key: difflib.get_close_matches(key, names, 1) for key in layers.values()}
    return [f"{k} (near {names[near[k][0]]!r})" if near.get(k) else k for k in missing]


def match(source: Mapping[str, Any], target: Mapping[str, Any]) -> Match:
    """Find for each key of a model (`target`) the one of a file (`source`); values have shapes.

    One prefix may go from the file's keys and one may come, but only if more keys match for it
    and no two keys become one.

    Examples
    --------
    >>> import torch
    >>> model = torch.nn.Linear(2, 1)
    >>> match(torch.nn.DataParallel(model).state_dict(), model.state_dict()).names
    {'weight': 'module.weight', 'bias': 'module.bias'}
    """
    goal = {drop_segments(key): key for key in target}  # parts of the model may be compiled
    ours = {
        key: _shape(value)
        for key, value in source.items()
        if key in goal or not is_counter(key, source)
    }
    theirs = {new: _shape(target[key]) for new, key in goal.items()}
    names = _best_names(ours, theirs)
    pairs = {key: new for key, new in names.items() if new in goal}
    mismatched = {
        goal[new]: (ours[key], theirs[new])
        for key, new in pairs.items()
        if not _fits(ours[key], theirs[new])
    }
    found = set(pairs.values())
    return Match(
        names={goal[new]: key for key, new in pairs.items() if goal[new] not in mismatched},
        missing_keys=[goal[new] for new in goal if new not in found],
        unexpected_keys=[key for key in names if key not in pairs],
        mismatched_shapes=mismatched,
        renamed={key: goal.get(new, new) for key, new in names.items()},
    )


def _fits(file: tuple | None, model: tuple | None) -> bool:
    """PyTorch, too, takes a row of one number for a scalar, as 0.3 saved it."""
    return model is None or file == model or (model == () and file == (1,))


def renamed_versions(versions: Mapping[str, Any], renamed: Mapping[str, str]) -> dict[str, Any]:
    """What a state dict notes on modules, by their names, when its keys get others.

    >>> renamed_versions({"module.norm": {"version": 2}}, {"module.norm.weight": "norm.weight"})
    {'norm': {'version': 2}}
    """
    found = {}
    for pair in renamed.items():
        old, new = (key.split(".")[:-1] for key in pair)
        while isinstance(note := versions.get(".".join(old)), dict):
            found[".".join(new)] = note
            if not (old and new) or old.pop() != new.pop():
                break
    return found


def _best_names(ours: Mapping[str, Any], theirs: Mapping[str, Any]) -> dict[str, str]:
    """The renaming of our keys under which most of them are theirs.

    Of renamings that do equally well, the one that only takes off wrappers; else none at all.
    """
    plain = {key: drop_segments(key) for key in ours}
    if _collision(plain):
        return {key: key for key in ours}

    def renamed(off: str, on: str) -> dict[str, str]:
        return {k: on + n.removeprefix(off) if n.startswith(off) else n for k, n in plain.items()}

    def fit(off: str, on: str) -> tuple[int, int, int]:
        """How many keys are theirs, and how many in shape, too; if none, how many begin alike."""
        every = renamed(off, on)
        pairs = {key: new for key, new in every.items() if new in theirs}
        alike = sum(ours[key] == theirs[new] for key, new in pairs.items())
        near = 0 if pairs else sum(new.rpartition(".")[0] in parts for new in every.values())
        # Beside the model's own keys, those under a prefix are another part's or another model's.
        if off not in wrappers and not all(plain[key].startswith(off) for key in pairs):
            return -1, 0, 0
        return (-1, 0, 0) if _collision(pairs) else (len(pairs), alike, near)

    parts = {key[: dot.start()] for key in theirs for dot in re.finditer(r"\.", key)}
    # A whole model's prefix is on many keys, a layer's name on few.
    removed = _shared_prefixes(plain.values(), len(ours) / 4)
    added = _shared_prefixes(theirs, len(ours) / 2)
    wrappers = ["", *(prefix for prefix in removed if not strip_leading_wrappers(prefix))]
    by_wrappers = [(off, "") for off in wrappers]
    others = [(off, on) for on in added for off in wrappers] + [(off, "") for off in removed]
    fits = {change: fit(*change) for change in [*by_wrappers, *others]}
    most = max(fits.values())
    best = [change for change in fits if fits[change] == most]
    certain = best[0] in by_wrappers or len(best) == 1
    return _without_inner_wrappers(renamed(*best[0]) if certain else plain, theirs)


def _without_inner_wrappers(names: dict[str, str], theirs: Mapping[str, Any]) -> dict[str, str]:
    """Take off DP's and DDP's prefix around a part of the model: ``layers.1.module.weight``."""
    free = theirs.keys() - set(names.values())
    for key, new in names.items():
        inner = new.replace(".module.", ".", 1)
        if new not in theirs and inner in free:
            names[key] = inner
            free.remove(inner)
    return names


def _shared_prefixes(keys: Iterable[str], least: float) -> list[str]:
    """Prefixes of one to eight segments that are on at least so many keys."""
    split = [key.split(".", 9)[:-1] for key in keys]
    counts = Counter(".".join(parts[: i + 1]) for parts in split for i in range(len(parts[:8])))
    return [f"{prefix}." for prefix, count in counts.items() if count >= least]


def _shape(value: Any) -> tuple | None:
    try:
        return tuple(value.shape)
    except (AttributeError, RuntimeError):  # no tensor; a lazy parameter
        return None
