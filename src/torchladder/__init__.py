"""The helper package of *The Device Ladder: PyTorch from one tensor to many GPUs*.

One module an idea, in the order of the book: `devices`, `data`, `models`, `training`,
`measuring`, `launching`, `checkpoints`, `resuming`, `plotting`, `errors`. What a chapter teaches
stands in the chapter; what the reader has seen twice lives here.
"""

__version__ = "0.2.0"
OLDEST_TORCH = (2, 10)  # older ones load checkpoints unsafely (CVE-2026-24747)


def load_ipython_extension(shell) -> None:
    """``%load_ext torchclinic``: a line under each traceback names its entry in the catalogue."""
    from torchclinic.errors import watch

    watch(shell)


def unload_ipython_extension(shell) -> None:
    """``%unload_ext torchladder``."""
    from torchclinic.errors import unwatch

    unwatch(shell)
