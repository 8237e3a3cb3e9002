"""What is wrong here, and what do I do? The tools that a reader of *The Device Ladder* takes away.

`errors` explains a log, `checkpoint_files` inspects, mends and loads files of any framework,
`doctor` looks at machines, `where` finds the tensor, `will_it_fit` knows before you train.
"""

__version__ = "0.2.0"
OLDEST_TORCH = (2, 10)  # older ones load checkpoints unsafely (CVE-2026-24747)


class UserError(ValueError):
    """What the user asked for cannot be done; the message says why, and the way out."""


def printable(text: str) -> str:
    """A file chooses its names; it does not get to send codes to a terminal."""
    text = text[:2000]
    return text if text.isprintable() else "".join(c if c.isprintable() else "?" for c in text)


def simulate_gpus(count: int = 2, **options) -> None:
    """See :func:`torchclinic.simulated_gpus.simulate_gpus`."""
    from torchclinic import simulated_gpus

    simulated_gpus.simulate_gpus(count, **options)


def load_ipython_extension(shell) -> None:
    """``%load_ext torchclinic``: a line under each traceback names its entry in the catalogue."""
    from torchclinic.errors.tracebacks import watch

    watch(shell)
