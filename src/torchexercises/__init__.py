"""Judge an exercise: a reader's function runs on hidden cases, and its mistake is named.

Each name of `EXERCISES` is a function of this module, which takes what the reader wrote::

    import torchexercises as check

    check.average_gradients(average_gradients)

The cases stand beside this module, one function for each exercise, in the order of the book. They
run in processes of their own (`torchladder.launching`), where ranks matter on 2, 3 and 4: an answer
that divides by 2 is right on two. So they cannot hang the notebook, nor change what it has set.
"""

import functools
import importlib
import inspect
import json
import math
import os
import re
import sys
import time
import traceback
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from numbers import Real
from pathlib import Path

import cloudpickle
import torch
from torch import nn

from torchclinic.process_group import PEER_IS_GONE
from torchclinic.writing import atomic_file
from torchladder.launching import LaunchError, launch

CASES = ["on_disk", "across_devices", "one_loop", "many_ranks", "sharded", "resuming", "in_use"]
TIMEOUT = 20.0  # seconds for all cases on one number of ranks; right answers take under one
NOT_WRITTEN = "not written yet"
PEER_GONE = (
    "a rank that it exchanges with has returned, or sends tensors of other sizes: do all make the "
    "same calls, in the same order?"
)
HERE = os.path.dirname(__file__)


class Wrong(AssertionError):
    """What is wrong with an answer, in one sentence."""


EXERCISES: dict[str, "Exercise"] = {}
WRONG_TRIES = Counter()


@dataclass(frozen=True)
class Exercise:
    """The `cases` of an exercise, whose arguments are the names that the reader writes."""

    cases: Callable
    chapter: str
    minutes: int
    hint: str
    ranks: tuple[int, ...]

    def __call__(self, *answers: object, solution: bool = False) -> None:
        """Print what `judge` says of the answers, and a hint from the second wrong try on.

        What is right is noted in ``exercises_done.json``, but not the book's own `solution`.
        """
        name = self.cases.__name__
        right, reason = self.judge(*answers)
        print(f"{name}: {reason}")
        WRONG_TRIES[name] += not right and reason != NOT_WRITTEN
        if not right and WRONG_TRIES[name] > 1:
            print(f"Hint: {self.hint}")
        if right and not solution and name not in (done := _done()):
            with suppress(OSError), atomic_file(_done_file()) as file:  # may be read-only
                Path(file).write_text(json.dumps([*done, name]))

    def judge(
        self, *answers: object, limit: float = math.inf, show: str = "rank0"
    ) -> tuple[bool, str]:
        """Whether the answers are right, and a sentence: what was tried, or which mistake it is.

        In `limit` seconds. Bytes are pickled answers, which only the ranks unpickle. What they
        print is shown as `launch` is told to.
        """
        if any(map(is_stub, answers)):
            return False, NOT_WRITTEN
        end = time.monotonic() + limit
        for ranks in self.ranks:
            left = max(0.1, end - time.monotonic())
            options = {"world_size": ranks, "timeout": min(TIMEOUT, left), "show": show}
            try:  # by gloo: the cases' tensors are on the CPU
                launch(_in_rank, self.cases, answers, **options, backend="gloo")
            except (LaunchError, TimeoutError) as error:
                before = f" (Right on {self.ranks[0]} ranks.)" * (ranks > self.ranks[0])
                return False, _reason(error, ranks) + before
        several = " and".join(", ".join(map(str, self.ranks)).rsplit(",", 1))
        return True, "right" + f" on {several} ranks" * (self.ranks != (1,))


def exercise(chapter: str, minutes: int, *, hint: str, ranks: tuple = (1,)) -> Callable:
    """Make a function of cases the exercise of its name, in `EXERCISES`.

    It takes the reader's answers, runs them, and raises `Wrong` for what is wrong. On several
    `ranks`, it runs on each of them, in a process group.
    """

    def register(cases: Callable) -> Callable:
        EXERCISES[cases.__name__] = Exercise(cases, chapter, minutes, hint, ranks)
        return cases

    return register


on_ranks = functools.partial(exercise, ranks=(2, 3, 4))


# --- for the cases ------------------------------------------------------------------------------


def expect(what: str, got: object, right: object, mistakes: dict | None = None) -> None:
    """Raise `Wrong` unless `got` equals `right`: numbers to 1e-4, lists and tuples alike.

    Of `mistakes`, the sentences are told whose value is what was `got`; `what` begins them. A
    mistake that gives the right value here is none. What has a graph where the right value has
    none is wrong, too.
    """
    if not _same(got, right):
        reasons = [reason for reason, value in (mistakes or {}).items() if _same(got, value)]
        shown = "is {}, not {}".format(*_short(got, right))
        raise Wrong(f"{what} {', or '.join(reasons) or shown}")
    if any(t.grad_fn for t in tensors_in(got)) and not any(t.grad_fn for t in tensors_in(right)):
        raise Wrong(f"{what} keeps its graph, and so the memory of all layers")


def expect_alone(what: str, *tensors: torch.Tensor, rows: str = "the other rows") -> None:
    """Raise `Wrong` if the tensors are views that keep more numbers in memory than their own."""
    storages = {s.data_ptr(): s.nbytes() for s in (t.untyped_storage() for t in tensors)}
    held, needed = sum(storages.values()), sum(tensor.nbytes for tensor in tensors)
    if held > needed:
        raise Wrong(f"{what} is a view, which keeps {rows}: {held} bytes instead of {needed}")


def unchanged(function: Callable, names: str) -> Callable:
    """The function, which then raises `Wrong` if it changes an argument.

    `names` are those of its first arguments; one that is called ``_`` may be changed.
    """

    def watched(*args, **kwargs):
        before = [_copy(value) for value in args]
        found = function(*args, **kwargs)
        for name, value, kept in zip(names.split(), args, before, strict=False):
            if name != "_":
                expect(f"`{name}`, which was given, afterwards", _copy(value), kept)
        return found

    return watched


@contextmanager
def raises(where: str, *errors: type[Exception]) -> Iterator[None]:
    """Raise `Wrong` unless one of these errors is raised."""
    with suppress(*errors), case(where):
        yield
        raise Wrong(f"nothing is raised {where}")


@contextmanager
def case(what: str) -> Iterator[None]:
    """Add to an exception that is not the judge's own in which case it was raised."""
    try:
        yield
    except Exception as error:
        if not isinstance(error, Wrong):
            error.add_note(f"The case was: {what}.")
        raise


@contextmanager
def graphs_of_at_most(inputs: int, net: nn.Module, *, outputs: bool = False) -> Iterator[None]:
    """Raise `Wrong` once the graphs of more inputs of the net are kept at the same time.

    Or its `outputs`, without a graph too. The net's first layer must keep its input for backward.
    """
    calls = []  # of each, how many inputs, and what is gone when nobody keeps its graph or output

    def copied(net: nn.Module, args: tuple) -> torch.Tensor:
        x = args[0].clone()  # which only the graph keeps
        calls.append((len(x), [weakref.ref(x)]))
        return x

    def after_forward(net: nn.Module, args: tuple, output: torch.Tensor) -> None:
        calls[-1][1].extend([weakref.ref(output)] * outputs)
        kept = sum(n for n, refs in calls if any(ref() is not None for ref in refs))
        if kept > inputs:
            what = "outputs" if outputs else "graphs"
            raise Wrong(f"the {what} of {kept} inputs are kept at once, where {inputs} would do")

    hooks = [net.register_forward_pre_hook(copied), net.register_forward_hook(after_forward)]
    yield
    for hook in hooks:
        hook.remove()


def tensors_in(value: object) -> list[torch.Tensor]:
    """The tensor, or those in a list, tuple or dict, at any depth."""
    if isinstance(value, (list, tuple, dict)):
        parts = value.values() if isinstance(value, dict) else value
        return [tensor for part in parts for tensor in tensors_in(part)]
    return [value] if isinstance(value, torch.Tensor) else []


# --- which are there, and which are done ---------------------------------------------------------


def progress() -> None:
    """Print which exercises are done in this folder, chapter by chapter."""
    for chapter in sorted({known.chapter for known in all_exercises().values()}):
        names = [name for name, known in EXERCISES.items() if known.chapter == chapter]
        left = [f"{name} ({EXERCISES[name].minutes} min)" for name in names if name not in _done()]
        print(f"{chapter}: {len(names) - len(left)} of {len(names)} done", *left, sep="\n    ")


def __getattr__(name: str) -> Exercise:
    if name.startswith("_") or name in CASES or name not in all_exercises():
        raise AttributeError(f"no exercise is called {name!r}: check.progress() lists all")
    return EXERCISES[name]


@functools.cache
def all_exercises() -> dict[str, Exercise]:
    """The exercises by name, in the order of the book."""
    for module in CASES:
        importlib.import_module(f"{__name__}.{module}")
    return EXERCISES


def _done_file() -> Path:
    """Beside the notebook, although chapters change the folder."""
    shell = sys.modules.get("IPython") and sys.modules["IPython"].get_ipython()
    return Path(getattr(shell, "starting_dir", os.getcwd()), "exercises_done.json")


def _done() -> list[str]:
    with suppress(OSError, ValueError):  # not there yet, or not ours
        return json.loads(_done_file().read_text())
    return []


# --- how it is judged ---------------------------------------------------------------------------


def _nothing() -> None:
    """Do nothing."""


EMPTY = {_nothing.__code__.co_code, (lambda: None).__code__.co_code}


def is_stub(answer: object) -> bool:
    """A function, or a class of functions, with no more than a docstring and `...`."""
    if inspect.isclass(answer):
        return any(is_stub(part) for part in vars(answer).values() if inspect.isfunction(part))
    if code := getattr(answer, "__code__", None):  # a docstring is one of its constants
        return code.co_code in EMPTY and {*code.co_consts} <= {None, answer.__doc__}
    return answer is None or answer is ...


def _in_rank(cases: Callable, answers: tuple) -> None:
    torch.manual_seed(0)
    try:
        cases(*(cloudpickle.loads(a) if isinstance(a, bytes) else a for a in answers))
    except Exception as error:
        files = [frame.filename for frame in traceback.extract_tb(error.__traceback__)]
        if isinstance(error, Wrong) or any(os.path.dirname(file) != HERE for file in files):
            raise error from None
        raise Wrong(f"what it takes or returns is not what its text says: {error}") from None


def _reason(error: LaunchError | TimeoutError, ranks: int) -> str:
    text = str(error)
    if isinstance(error, LaunchError):
        whose = f"rank {error.rank} of {ranks}: " if ranks > 1 else ""
        if error.kind == "Wrong" and (found := re.search(r"failed with \S*Wrong: (.*)", text)):
            return whose + found[1]
        if PEER_IS_GONE.search(text):
            return whose + PEER_GONE
    text = re.sub(r"^rank 0 of 1 ", "", text)
    return "\n".join([text, *getattr(error, "__notes__", [])])


def _copy(value: object) -> object:
    """Tensors without their graphs, which copy.deepcopy refuses; all but containers as they are."""
    if isinstance(value, torch.Tensor):
        return value.detach().clone()
    if isinstance(value, dict):
        return {key: _copy(part) for key, part in value.items()}
    return [_copy(part) for part in value] if isinstance(value, (list, tuple)) else value


def _same(got: object, right: object) -> bool:
    if isinstance(right, (list, tuple)) and isinstance(got, (list, tuple)):
        got, right = dict(enumerate(got)), dict(enumerate(right))
    if isinstance(right, dict):
        known = isinstance(got, dict) and got.keys() == right.keys()
        return known and all(_same(got[key], right[key]) for key in right)
    if isinstance(right, Real) and isinstance(got, torch.Tensor) and got.numel() == 1:
        got = got.item()
    if isinstance(right, Real) and isinstance(got, Real):
        return math.isclose(got, right, rel_tol=1e-4, abs_tol=1e-6)
    if isinstance(right, torch.Tensor):
        if not isinstance(got, torch.Tensor) or _kind(got) != _kind(right):
            return False
        if right.is_meta or not right.is_floating_point():
            return right.is_meta or torch.equal(got, right)
        rounding = max(1e-4, 2 * torch.finfo(right.dtype).eps)  # of bfloat16, 1 in 64
        return torch.allclose(got, right, rounding, 1e-5, equal_nan=True)
    return got == right


def _short(*values: object) -> list[str]:
    """Each value in few characters: those where they differ, if they begin alike."""
    texts = [*map(_text, values)]
    at = [*(a == b for a, b in zip(*texts, strict=False)), False].index(False)
    begin = max(texts[0].rfind(" ", 0, at) + 1, at - 40) if at > 50 else 0
    texts = ["... " * (begin > 0) + text[begin:] for text in texts]
    return [text if len(text) <= 60 else text[:57] + "..." for text in texts]


def _text(value: object) -> str:
    if not isinstance(value, torch.Tensor):
        return repr(value)
    numbers = () if value.is_meta else value.detach().flatten().tolist()
    digits = ".6g" if value.is_floating_point() else ""
    return " ".join([_kind(value), *(f"{number:{digits}}" for number in numbers)])


def _kind(value: torch.Tensor) -> str:
    return f"{str(value.dtype).removeprefix('torch.')} {list(value.shape)} on {value.device}"
