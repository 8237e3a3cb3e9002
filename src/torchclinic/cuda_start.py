"""Which line started CUDA, so that a forked process cannot use it?"""

from __future__ import annotations

import os
import sys
import traceback
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from functools import wraps
from multiprocessing import get_context
from types import FrameType

import torch

from torchclinic.frames import caller, calls_down_to

# The calls after which PyTorch refuses CUDA in a forked process, each looked up by this name
# whenever it is needed. `_lazy_init` itself has copies: torch.cuda.memory and torch.cuda.random
# import it by name, as may any library, and C++ (`tensor.cuda()`, `torch.ones(2, device="cuda")`)
# asks torch.cuda for it. All run the same function, which asks `_is_in_bad_fork` right before it
# starts CUDA, in every build. Not covered: what reaches the driver without any of these.
_SPOIL_FORKS = (
    (torch.cuda, "_is_in_bad_fork", "started"),
    (torch._C, "_cuda_getDeviceCount", "asked"),
    (torch._C, "_cuda_getArchFlags", "asked"),
)

BEFORE = """\
Before the block, CUDA had been started or asked about the GPUs: a forked process cannot use it.
Restart the kernel (or the script), and put the earlier lines into the block too."""
ASKED = """\
This asked CUDA about the GPUs; a process forked later cannot use CUDA:
{calls}
With PYTORCH_NVML_BASED_CUDA_CHECK=1 in the environment by then, torch.cuda.is_available() asks
NVIDIA's NVML instead, and leaves forks alone."""
STARTED = """\
This started CUDA; a process forked later cannot use it:
{calls}"""
TRIED = """\
This tried to start CUDA:
{calls}"""
NOTHING = "As far as PyTorch knows, nothing in the block started CUDA or asked about the GPUs."


class CudaStart:
    """What started CUDA in a block; prints as an answer. See `who_starts_cuda`.

    Attributes
    ----------
    before : bool
        Whether a process forked before the block could not have used CUDA.
    asked : list[traceback.FrameSummary]
        The calls, the outermost first, down to the first that asked CUDA about the GPUs without
        starting it; empty if none did.
    started : list[traceback.FrameSummary]
        The same for the first that started CUDA, or tried to.
    """

    def __init__(self, before: bool) -> None:
        self.before = before
        self.asked: list[traceback.FrameSummary] = []
        self.started: list[traceback.FrameSummary] = []
        self._initialized = False

    def __repr__(self) -> str:
        texts = [BEFORE] if self.before else []
        started = STARTED if self._initialized else TRIED
        for text, calls in [(ASKED, self.asked), (started, self.started)]:
            if calls:
                texts.append(text.format(calls="".join(traceback.format_list(calls)).rstrip()))
        return "\n\n".join(texts) or NOTHING


@contextmanager
def who_starts_cuda() -> Iterator[CudaStart]:
    """Find the import or line in a ``with`` block after which a forked process cannot use CUDA.

    That process fails with "Cannot re-initialize CUDA in forked subprocess". Two kinds of call lead
    to it. One starts CUDA: ``model.cuda()``, for example. The other only asks about the GPUs, as
    ``torch.cuda.is_available()`` does; ``torch.cuda.is_initialized()`` is still False after it.
    Many libraries ask when they are imported.

    The call may come from another thread, and the block may end in an exception. Where there is no
    GPU, the attempt to start CUDA is found. Nothing is started on entry, but a process is forked
    that ends at once: only there does PyTorch tell what happened before the block.

    What starts CUDA's driver from C++ alone is not found: ``pin_memory``, ``torch.cuda.Stream()``,
    the first ``backward()`` of a CUDA build even on the CPU, or another library, such as CuPy.
    PyTorch does not note it either, so that the forked process fails with other words, if it does.

    Yields
    ------
    CudaStart
        To be printed after the block. For each kind it holds the first such call, with those that
        led to it: from the line in the block down through libraries. The standard library and most
        of PyTorch are left out. Cells of a notebook have their labels.

    Examples
    --------
    On a machine without a GPU, CUDA cannot start, and the line is found all the same:

    >>> from contextlib import suppress
    >>> def weights():
    ...     return torch.zeros(3, device="cuda")
    >>> with who_starts_cuda() as found, suppress(AssertionError, RuntimeError):
    ...     model = weights()
    >>> [call.line for call in found.started]
    ['model = weights()', 'return torch.zeros(3, device="cuda")']
    """
    found = CudaStart(before=torch.cuda.is_initialized() or _forks_are_spoiled())
    block = caller(sys._getframe(1))
    with ExitStack() as originals:
        for owner, name, kind in _SPOIL_FORKS:
            if function := getattr(owner, name, None):  # a build without CUDA has only the first
                setattr(owner, name, _noting(function, kind, found, block))
                originals.callback(setattr, owner, name, function)
        try:
            yield found
        finally:
            found._initialized = torch.cuda.is_initialized()


def _noting(function: Callable, kind: str, found: CudaStart, block: FrameType | None) -> Callable:
    @wraps(function)
    def noted(*args, **kwargs):
        call = sys._getframe(1)
        while call.f_code is noted.__code__:  # of a block inside this one
            call = call.f_back
        # `manual_seed` and others ask `_is_in_bad_fork` too, and start nothing.
        starts = kind == "asked" or call.f_code.co_name == "_lazy_init"
        if starts and not found.started and not getattr(found, kind):
            setattr(found, kind, calls_down_to(call, block))
        return function(*args, **kwargs)

    return noted


def _forks_are_spoiled() -> bool:
    """Whether a process forked now could not use CUDA: PyTorch tells it only in that process."""
    if not torch.backends.cuda.is_built() or not hasattr(os, "fork"):
        return False
    process = get_context("fork").Process(target=lambda: os._exit(torch.cuda._is_in_bad_fork()))
    # No process to spare, or this one may start none: then nobody knows.
    with warnings.catch_warnings(), suppress(OSError, AssertionError):
        warnings.simplefilter("ignore")  # Python 3.12 warns of forks where there are threads
        process.start()
        process.join()
        return process.exitcode == 1
    return False
