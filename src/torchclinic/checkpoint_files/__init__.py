"""Checkpoints: look into any of them, fix them, load them across rungs.

In the order in which they build on each other: `pickles` reads without running, `reading` knows the
formats, `foreign` tells what is not weights, `weights` finds those, `keys` matches names; then what
a reader uses: `inspecting`, `loading`, `fixing`.
"""

from torchclinic.checkpoint_files.fixing import fix_checkpoint
from torchclinic.checkpoint_files.inspecting import inspect_checkpoint
from torchclinic.checkpoint_files.loading import load_into
from torchclinic.checkpoint_files.reading import CheckpointError

__all__ = ["CheckpointError", "fix_checkpoint", "inspect_checkpoint", "load_into"]
