"""Where in a checkpoint the weights lie, and what the rest is."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

from torchladder.checkpoints.pickles import StandIn
from torchladder.checkpoints.reading import Checkpoint, walk
from torchladder.checkpoints.reports import shape_text, some
from torchladder.checkpoints.tensors import CheckpointError, SavedTensor, live_tensors

# Under these names, programs put the state dict of the model; averaged weights are second choice.
WEIGHTS = {"state_dict", "model_state_dict", "model", "model_state", "net", "network", "module"}
WEIGHTS |= {"weights", "params", "model_weights", "net_state_dict"}
MODULE_PARTS = ("_parameters", "_buffers", "_modules")  # of any torch.nn.Module
AVERAGED = re.compile(r"(^|[._])(ema|swa|averaged?)([._]|$)")


def is_tensor(value: Any) -> bool:
    """Whether it is a tensor, saved or live, that can be read."""
    return hasattr(value, "dtype") and hasattr(value, "shape")


def is_state_dict(value: Any) -> bool:
    """Whether it is a dict of named tensors, for the most part."""
    if not isinstance(value, Mapping) or not all(isinstance(key, str) for key in value):
        return False
    return len(value) > 0 and 2 * sum(map(is_tensor, value.values())) >= len(value)


def is_optimizer(value: Any) -> bool:
    return isinstance(value, Mapping) and {"state", "param_groups"} <= value.keys()


def is_model(value: Any) -> bool:
    """Whether a stand-in is of a whole pickled module."""
    state = value.state if isinstance(value, StandIn) else None
    parts = [isinstance(state, dict) and state.get(name) for name in MODULE_PARTS]
    return all(isinstance(part, dict) for part in parts)


def find_weights(tree: Any, path: Any = "it", key: str | None = None) -> tuple[str, Any]:
    """The state dict or whole model in `tree`, after the dotted key it is under ("" at the top).

    Raises
    ------
    CheckpointError
        If there is none, or several and `key` does not name one of them.
    """
    found = dict(_candidates(tree))
    if key is not None:
        if key in found:
            return key, found[key]
        raise CheckpointError(
            f"{path}: no weights under {key!r}; there are: {some(map(repr, found))}."
        )
    if not found:
        what = "one tensor" if is_tensor(tree) else describe(tree)
        raise CheckpointError(f"{path}: no state dict in it, but {what}.")
    best = min(map(_rank, found))
    chosen = [name for name in found if _rank(name) == best]
    if len(chosen) > 1:
        raise CheckpointError(
            f"{path}: several state dicts in it ({some(map(repr, chosen))}). Choose one, such as "
            f"key={chosen[0]!r} (--key {chosen[0]})."
        )
    return chosen[0], found[chosen[0]]


def _candidates(tree: Any, above: tuple = (), depth: int = 3) -> Iterator[tuple[str, Any]]:
    if is_model(tree) or is_state_dict(tree):
        yield ".".join(map(str, above)), tree
    elif isinstance(tree, Mapping) and depth and not is_optimizer(tree):
        for key, value in tree.items():
            yield from _candidates(value, (*above, key), depth - 1)


def _rank(name: str) -> tuple[int, int]:
    """Lower is more likely what is meant."""
    last = name.rsplit(".", 1)[-1]
    kind = 2 if "rng" in name else 1 if AVERAGED.search(name) else 0 if last in WEIGHTS else 1.5
    return (0 if not name else kind), name.count(".")


def tensors_of(weights: Mapping[str, Any], path: Any) -> tuple[dict[str, SavedTensor], dict]:
    """The tensors of a state dict, and what else is in it.

    Raises
    ------
    CheckpointError
        If some are tensors of a kind that is not read here, and would be lost.
    """
    tensors = {key: value for key, value in weights.items() if isinstance(value, SavedTensor)}
    live = {key: t for key, t in weights.items() if is_tensor(t) and key not in tensors}
    rest = {key: value for key, value in weights.items() if key not in tensors | live}
    for key, value in rest.items():
        inside = [v for _, v in walk(value)]
        if any(isinstance(v, SavedTensor) or "_rebuild_" in getattr(v, "name", "") for v in inside):
            raise CheckpointError(
                f"{path}: {key!r} is {describe(value)}, a tensor that is sparse, quantized, on the "
                "meta device or sharded over ranks. Convert it where it was made: to_dense(), "
                "dequantize(), full_tensor()."
            )
    for key, tensor in tensors.items():
        tensor.storage.key = tensor.storage.key or key  # for messages
    return tensors | live_tensors(live), rest


def weights_of(model: StandIn) -> dict[str, Any]:
    """The state dict of a whole pickled model, as far as its parts show it without its code."""
    weights, waiting, opened = {}, [("", model)], set()
    while waiting:
        prefix, module = waiting.pop()
        state = module.state if is_model(module) and id(module) not in opened else {}
        opened.add(id(module))
        skipped = state.get("_non_persistent_buffers_set") or ()
        for name, value in [
            *state.get("_parameters", {}).items(),
            *state.get("_buffers", {}).items(),
        ]:
            if value is not None and name not in skipped:
                weights[f"{prefix}{name}"] = value
        inside = [(f"{prefix}{name}.", m) for name, m in state.get("_modules", {}).items()]
        waiting += reversed(inside)
    return weights


def run_model(checkpoint: Checkpoint, where: str) -> dict[str, SavedTensor]:
    """The state dict of a whole pickled model by its own ``state_dict()``. Runs the file's code."""
    import torch

    try:
        found = torch.load(checkpoint.path, map_location="cpu", weights_only=False)
        for key in filter(None, where.split(".")):
            found = found[key]
        state = found.state_dict()
        return live_tensors({key: t for key, t in state.items() if is_tensor(t)})
    except Exception as error:  # it is the file's code that failed, in whatever way
        raise CheckpointError(
            f"{checkpoint.path}: its model could not be made ({type(error).__name__}: {error}). "
            "Its class must be importable under the name it had when it was saved."
        ) from error


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
    if is_tensor(value):
        return f"tensor {shape_text(value.shape)} {str(value.dtype).removeprefix('torch.')}"
    if is_optimizer(value):
        return "optimizer state"
    if is_state_dict(value):
        return f"state dict of {len(value)} entries"
    if isinstance(value, Mapping | list | tuple | set):
        return f"{type(value).__name__} of {len(value)}"
    text = repr(value)
    return text if len(text) < 40 else f"{text[:36]}..."
