"""Checkpoints: look into any of them, fix them, load them across rungs.

In the order in which they build on each other: `pickles` reads without running, `reading` knows the
formats, `state_dicts` finds the weights, `keys` matches names; then what a reader uses:
`inspecting`, `loading`, `fixing`.
"""

from torchladder.checkpoints.fixing import fix_checkpoint
from torchladder.checkpoints.inspecting import inspect_checkpoint
from torchladder.checkpoints.loading import load_into
from torchladder.checkpoints.reading import CheckpointError

__all__ = ["CheckpointError", "fix_checkpoint", "inspect_checkpoint", "load_into"]
