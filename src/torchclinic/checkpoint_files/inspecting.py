"""What is in a checkpoint, and what to do with it."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from torchclinic.checkpoint_files import foreign, reading, weights
from torchclinic.checkpoint_files.keys import clean_names, prefix_notes, removed_prefixes
from torchclinic.checkpoint_files.pickles import StandIn, walk
from torchclinic.checkpoint_files.reports import (
    Report,
    ends,
    free_name,
    key_option,
    lines,
    path_word,
    some,
    word,
)
from torchclinic.tables import in_bytes

QUICK = 200e6  # bytes whose checksums take no time worth an option


def inspect_checkpoint(path: str | Path, *, verify: bool | None = None) -> Report:
    """Look into a checkpoint of any kind without running code from it or reading its numbers.

    (The numbers are read of files that ``torch.save`` wrote before PyTorch 1.6.)

    Parameters
    ----------
    path : path
        A file, or the folder of a sharded checkpoint.
    verify : bool, optional
        Compare the numbers with the checksums in the file, and look for NaN and inf. Reads all of
        it; by default only if that is quick.

    Returns
    -------
    Report
        Printed, it is the whole report. Its attributes:

        - ``format``, such as "torch.save (zip)", and ``contents``: what is at the top level
        - ``weights_at``: the dotted key of the state dict that fix takes, "" at the top, or None;
          ``keys``: its tensors; ``parameters``: the numbers in them, of tied tensors once
        - ``devices``: where each of them was when it was saved, if the format says so
        - ``prefixes`` of wrappers, and on how many keys each is
        - ``shared``: keys that are one tensor; ``oversized``: keys whose storage holds more
        - ``checksums``: whether there are some, and right; ``not_finite``: how many numbers are
          NaN or infinite, by key, or None if they were not read
        - ``imports``: what ``weights_only=False`` would import, and may call
        - ``advice``: what to do next

    Raises
    ------
    CheckpointError
        If this is not a checkpoint, or is damaged.
    OSError
        If there is no such file or it may not be read.

    Examples
    --------
    >>> import tempfile, torch
    >>> wrapped = torch.nn.DataParallel(torch.nn.Linear(2, 1))
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     torch.save({"model": wrapped.state_dict(), "epoch": 3}, f"{folder}/dp.pt")
    ...     found = inspect_checkpoint(f"{folder}/dp.pt")
    >>> found.weights_at, list(found.keys), found.prefixes
    ('model', ['module.weight', 'module.bias'], {'module.': 2})
    """
    checkpoint = reading.open_checkpoint(path)
    where, keys, every, names, note = None, {}, {}, {}, ""
    try:
        where, at, state = weights.choose(checkpoint.tree, checkpoint.path)
        keys = every = {key: value for key, value in state.items() if isinstance(value, Tensor)}
        names = clean_names(checkpoint.path, keys, checkpoint.tree)
        every = weights.tensors_in(weights.split(state, checkpoint.path, at)[0])  # or fix refuses
        note = foreign.what_it_is(state, checkpoint.path, at)
    except reading.CheckpointError as error:
        note = str(error)
    groups = weights.ties(keys)
    size = sum(file.stat().st_size for file in checkpoint.files)
    reads = verify or (verify is None and size < QUICK)
    found = Report(
        format=checkpoint.format,
        contents=_contents(checkpoint.tree, where),
        weights_at=where,
        keys=keys,
        parameters=sum(keys[names[0]].numel() for names in groups),
        devices={k: checkpoint.device(t) for k, t in keys.items()} if checkpoint.devices else {},
        prefixes=removed_prefixes(names),
        shared=[names for names in groups if len(names) > 1],
        oversized=weights.oversized(every),
        checksums=_checksums(checkpoint, reads),
        not_finite=weights.not_finite(every) if reads else None,
        imports=checkpoint.imports,
    )
    found.advice = [note] if note else list(_advice(found, Path(path)))
    others = weights.not_taken(checkpoint.tree, where, checkpoint.path)
    others |= {f"{where}.{name}".removeprefix("."): "" for name in weights.models_in(keys)}
    head = f"{path}: {found.format}, {in_bytes(size)}"
    found.text = _text(found, head, every, others, checkpoint.unlisted_note())
    return found


def _contents(tree: Any, where: str | None) -> dict[str, str]:
    """Names and descriptions of what is at the top level; of weights, what is beside them."""
    if not isinstance(tree, dict) or isinstance(tree, StandIn):
        return {"": weights.describe(tree)}
    shown = {k: v for k, v in tree.items() if where or not isinstance(v, Tensor)}
    inside = weights.described(shown)
    return inside if where else {"": weights.describe(tree)} | inside


def _checksums(checkpoint: reading.Checkpoint, wanted: bool) -> str:
    if not checkpoint.checksums:
        return "none in this file"
    if not wanted:
        return "not compared: verify=True (--verify) reads the whole file"
    count = checkpoint.verify(walk(checkpoint.tree))
    return f"right, of {count:,} storage{'s' * (count != 1)}"


def _advice(found: Report, path: Path) -> Iterator[str]:
    """Sentences on what to do next."""
    if note := foreign.part_note(path):
        yield f"This is {note}"
        if foreign.SHARD.search(path.name):
            return
    if note := foreign.exact_note(found.keys, path):
        yield note
    if inside := foreign.key_note(found.keys, path):
        yield inside
    if found.imports:
        yield (
            "torch.load refuses this file unless weights_only=False, which imports what is listed "
            "under 'code' and may call it. fix leaves it out and runs nothing."
        )
    if copies := weights.models_in(found.keys):
        first = key_option(f"{found.weights_at}.{copies[0]}".removeprefix("."))
        yield (
            f"{len(copies)} models of one kind in one dict: torchclinic fix {path_word(path)} -o "
            f"{free_name('fixed.pt')} {first} takes one of them."
        )
        return
    if inside:
        return
    is_plain = found.weights_at == "" and {*found.devices.values()} <= {"cpu"}
    is_plain &= all(not key or key.endswith(weights.EXTRA_STATE) for key in found.contents)
    sharded = path.is_dir() and found.format != "safetensors"
    if found.prefixes or found.oversized or found.imports or sharded or not is_plain:
        free = free_name("fixed.pt")
        yield f"torchclinic fix {path_word(path)} -o {free} makes a plain state dict of it."
    else:
        yield "A plain state dict: load_into(model, path), or load_state_dict if keys are equal."


def _text(
    found: Report, head: str, every: Mapping[str, Tensor], others: Mapping[str, str], unlisted: str
) -> str:
    """The report; `others` are not taken unless they are named, or as is said there.

    `every` has the tensors in extra state, too.
    """
    keys = found.keys
    weights_at = None if found.advice[0].startswith("Not the weights") else found.weights_at
    holds = [
        f"{name}{': ' * bool(name)}{what}{' (the weights)' * (name == weights_at)}"
        for name, what in found.contents.items()
    ]
    finite = "not read: verify=True (--verify) looks for NaN and inf"
    if found.not_finite is not None:
        finite = weights.count_note(found.not_finite, len(every))
    total = f"{len(keys):,} tensors, {found.parameters:,} numbers, "
    total += in_bytes(sum(keys[names[0]].nbytes for names in weights.ties(keys)))
    if found.devices:
        total += f", saved on {', '.join(sorted({*found.devices.values()}))}"
    return lines(
        file=head,
        checksums=found.checksums,
        not_finite=finite,
        holds=ends(holds),
        or_take=ends(
            [
                f"{word(name) if name else 'the top level'}: {way_out or key_option(name)}"
                for name, way_out in others.items()
            ]
        ),
        table=["", *_table(keys), ""] if keys else [],
        total=total if keys else "",
        left_out=unlisted,
        prefix=prefix_notes(found.prefixes, [*keys, *({reading.LIGHTNING} & {*found.contents})]),
        tied=some(" = ".join(names) for names in found.shared),
        oversized=[
            f"{name}: {in_bytes(every[name].nbytes)} of a storage of "
            f"{in_bytes(every[name].untyped_storage().nbytes())}; fix leaves the rest out"
            for name in found.oversized[:3]
        ],
        code=f"would import {some(found.imports, 6)}" if found.imports else "",
        next=found.advice,
    )


def _table(keys: Mapping[str, Tensor]) -> list[str]:
    """A line a tensor: name, shape, dtype."""
    names = {key: key if len(key) < 45 else f"{key[:20]}...{key[-21:]}" for key in keys}
    rows = [f"  {names[key]:44}  {weights.kind_of(tensor)}" for key, tensor in keys.items()]
    return ends(rows, "  ")
