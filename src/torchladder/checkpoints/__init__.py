"""Checkpoints: look into any of them, fix them, load them across rungs, save and resume."""

from importlib import import_module

# Imported when they are used: looking into a file needs no torch, whose import takes a second.
_HOMES = {
    "CheckpointError": "tensors",
    "fix_checkpoint": "fixing",
    "inspect_checkpoint": "inspecting",
    "load_into": "loading",
    "resume": "resuming",
    "save_checkpoint": "saving",
}
__all__ = list(_HOMES)


def __getattr__(name: str):
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
