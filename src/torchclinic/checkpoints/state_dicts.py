"""Where in a checkpoint the weights lie, and what the rest is."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

from torch import Tensor

from torchclinic.checkpoints.pickles import StandIn, walk
from torchclinic.checkpoints.reading import CheckpointError
from torchclinic.checkpoints.reports import some

# Under these names, programs put the state dict of the model; averaged weights are second choice.
WEIGHTS = {"state_dict", "model_state_dict", "model", "model_state", "net", "network", "module"}
WEIGHTS |= {"weights", "params", "model_weights", "net_state_dict"}
MODULE_PARTS = ("_parameters", "_buffers", "_modules")  # of any torch.nn.Module
EXTRA_STATE = "_extra_state"  # under such keys are what a module's get_extra_state() gave
TOP, USUAL_NAME, OTHER_NAME, AVERAGE, RANDOM_STATE = range(5)  # the best first
AVERAGED = re.compile(r"(^|[._])(ema|swa|averaged?)([._]|$)")


def is_state_dict(value: Any) -> bool:
    """Whether it is a dict of named tensors, for the most part."""
    if not isinstance(value, Mapping) or not all(isinstance(key, str) for key in value):
        return False
    tensors = sum(isinstance(v, Tensor) or is_unread_tensor(v) for v in value.values())
    return len(value) > 0 and 2 * tensors >= len(value)


def is_unread_tensor(value: Any) -> bool:
    """Whether a stand-in is of a tensor of a kind that is not read here."""
    return isinstance(value, StandIn) and "_rebuild_" in value.name


def is_shard(value: Any) -> bool:
    """Whether a stand-in is of a DTensor: its shape is the whole's, its numbers are one rank's."""
    args = (value.args or ()) if is_unread_tensor(value) else ()
    return any(isinstance(arg, StandIn) and arg.name.endswith(".DTensor") for arg in args)


def is_optimizer(value: Any) -> bool:
    return isinstance(value, Mapping) and {"state", "param_groups"} <= value.keys()


def is_model(value: Any) -> bool:
    """Whether a stand-in is of a whole pickled module."""
    state = value.state if isinstance(value, StandIn) else None
    parts = [isinstance(state, dict) and state.get(name) for name in MODULE_PARTS]
    return all(isinstance(part, dict) for part in parts)


def state_dicts(tree: Any) -> dict[str, Mapping]:
    """Every state dict or whole model in `tree`, by the dotted key it is under ("" at the top)."""
    return dict(_state_dicts(tree, (), set()))


def _state_dicts(tree: Any, above: tuple, opened: set[int]) -> Iterator[tuple[str, Mapping]]:
    if is_model(tree) or is_state_dict(tree):
        yield ".".join(map(str, above)), tree
    if isinstance(tree, Mapping) and len(above) < 3 and not is_optimizer(tree):
        opened.add(id(tree))
        for key, value in tree.items():
            if id(value) not in opened and not str(key).endswith(EXTRA_STATE):
                yield from _state_dicts(value, (*above, key), opened)


def choose(tree: Any, path: Any, key: str | None = None) -> tuple[str, Mapping]:
    """The state dict that is meant, after the dotted key it is under; of a whole model, its own.

    Raises
    ------
    CheckpointError
        If there is none, or several and `key` does not name one of them.
    """
    found = state_dicts(tree)
    best = min(map(_preference, found), default=None)
    chosen = [name for name in found if _preference(name) == best] if key is None else [key]
    if not found:
        raise CheckpointError(f"{path}: no state dict in it, but {describe(tree)}.")
    if chosen[0] not in found:
        names = (repr(name) if name else "'' (the top level)" for name in found)
        raise CheckpointError(f"{path}: no weights under {key!r}; there are: {some(names)}.")
    if len(chosen) > 1:
        raise CheckpointError(
            f"{path}: several state dicts in it ({some(map(repr, chosen))}). Choose one, such as "
            f"key={chosen[0]!r} (--key {chosen[0]})."
        )
    weights = found[chosen[0]]
    return chosen[0], _parts_of(weights) if is_model(weights) else weights


def _preference(name: str) -> tuple[int, int]:
    """Lower is more likely what is meant."""
    if not name:
        kind = TOP
    elif "rng" in name:
        kind = RANDOM_STATE
    elif AVERAGED.search(name):
        kind = AVERAGE
    else:
        kind = USUAL_NAME if name.rpartition(".")[2] in WEIGHTS else OTHER_NAME
    return kind, name.count(".")


def split(weights: Mapping[str, Any], path: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    """What of a state dict a model can take: tensors and plain extra state; and what else is there.

    Raises
    ------
    CheckpointError
        If some are tensors of a kind that is not read here, and would be lost.
    """
    kept = {}
    for key, value in weights.items():
        if is_unread_tensor(value):
            raise CheckpointError(f"{path}: {key!r} {_why_unread(value)}")
        is_plain = not any(isinstance(thing, StandIn) for _, thing in walk(value))
        if isinstance(value, Tensor) or (key.endswith(EXTRA_STATE) and is_plain):
            kept[key] = value
    return kept, {key: value for key, value in weights.items() if key not in kept}


def _why_unread(tensor: StandIn) -> str:
    if is_shard(tensor):
        return (
            "is a DTensor: the file holds one rank's shards only, not the whole tensors. Save "
            "again. On all ranks: state = get_model_state_dict(model, options=StateDictOptions("
            "full_state_dict=True, cpu_offload=True)); on rank 0: torch.save(state, path). Or "
            "torch.distributed.checkpoint.save, on all ranks."
        )
    return (
        "is a tensor that is sparse, quantized or on the meta device. Convert it where it was "
        "made: to_dense(), dequantize()."
    )


def _parts_of(model: StandIn) -> dict[str, Any]:
    """The state dict of a whole pickled model, from its parameters and buffers: no code is run."""
    weights, waiting, opened = {}, [("", model)], set()
    while waiting:
        prefix, module = waiting.pop()
        if not is_model(module) or id(module) in opened:
            continue
        opened.add(id(module))
        state = module.state
        skipped = state.get("_non_persistent_buffers_set") or ()
        for name, value in [*state["_parameters"].items(), *state["_buffers"].items()]:
            if value is not None and name not in skipped:
                weights[f"{prefix}{name}"] = value
        waiting += reversed([(f"{prefix}{n}.", m) for n, m in state["_modules"].items()])
    return weights


def kind_of(tensor: Tensor) -> tuple[str, str]:
    """Its shape and dtype: ``("64x3x7x7", "float32")``."""
    shape = "x".join(map(str, tensor.shape)) or "scalar"
    return shape, str(tensor.dtype).removeprefix("torch.")


def describe(value: Any) -> str:
    """A few words on a thing in a checkpoint.

    >>> describe({"state": {}, "param_groups": [{}]}), describe(0.5), describe([1, 2])
    ('optimizer state', '0.5', 'list of 2')
    """
    if is_model(value):
        return f"a whole model, class {value.name}"
    if isinstance(value, StandIn):
        inside = value.state if isinstance(value.state, dict) else value
        return f"{value.name} object" + (f" of {len(inside)} values" if inside else "")
    if isinstance(value, Tensor):
        return f"tensor {' '.join(kind_of(value))}"
    if is_optimizer(value):
        return "optimizer state"
    if is_state_dict(value):
        return f"state dict of {len(value)} entries"
    if isinstance(value, Mapping | list | tuple | set | frozenset):
        return f"{type(value).__name__} of {len(value)}"
    if isinstance(value, int) and value.bit_length() > 1000:  # Python refuses to print larger ones
        return f"an integer of {value.bit_length():,} bits"
    text = repr(value)
    return text if len(text) < 40 else f"{text[:36]}..."
