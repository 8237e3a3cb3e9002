"""Judge an exercise: a reader's function runs on hidden cases, and its mistake is named.

Each name of `EXERCISES` is a function of this module, which takes what the reader wrote::

    import torchexercises as check

    check.average_gradients(average_gradients)

The cases stand beside this module, one function for each exercise, in the order of the book. They
run in processes of their own (`torchladder.launching`), where ranks matter on 2, 3 and 4: an answer
that divides by 2 is right on two. So they cannot hang the notebook, nor change what it has set.
"""

import dis
import functools
import importlib
import inspect
import json
import math
import os
import re
import sys
import traceback
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from numbers import Real
from pathlib import Path

import torch

from torchclinic.process_group import PEER_IS_GONE
from torchclinic.writing import atomic_file
from torchladder.launching import LaunchError, launch, warm_up

CASES = ["on_disk", "across_devices", "one_loop", "many_ranks", "sharded", "resuming", "in_use"]
TIMEOUT = 20.0  # seconds for all cases on one number of ranks; right answers take under one
DONE = Path.cwd() / "exercises_done.json"  # now: chapters change the folder later


def _stub() -> None:
    """Do nothing."""


if "ipykernel" in sys.modules:  # a notebook, no rank: its first check need not wait
    with suppress(OSError):  # `launch` raises it, too
        warm_up()
HERE = os.path.dirname(__file__)
NOTHING = {_stub.__code__.co_code, (lambda: None).__code__.co_code}


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

        What is right is noted in the file `DONE`, but not the book's own `solution`.
        """
        name = self.cases.__name__
        right, said = self.judge(*answers)
        print(f"{name}: {said}")
        WRONG_TRIES[name] += not right and said != "not written yet"
        if not right and WRONG_TRIES[name] > 1:
            print(f"Hint: {self.hint}")
        if right and not solution and name not in (done := _done()):
            with suppress(OSError), atomic_file(DONE) as file:  # a folder that is read-only, say
                Path(file).write_text(json.dumps([*done, name]))

    def judge(self, *answers: object) -> tuple[bool, str]:
        """Whether the answers are right, and a sentence: what was tried, or which mistake it is."""
        if any(map(_not_written, answers)):
            return False, "not written yet"
        for ranks in self.ranks:
            try:
                launch(_in_rank, self.cases, answers, world_size=ranks, timeout=TIMEOUT)
            except (LaunchError, TimeoutError) as error:
                first = self.ranks[0]
                asks = f": is {first} in it?" if any(_holds(a, first) for a in answers) else "."
                before = f" (Right on {first} ranks{asks})" * (ranks > first)
                return False, _what_is_wrong(error, ranks) + before
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


def expect(what: str, got: object, right: object, mistakes: dict | None = None) -> None:
    """Raise `Wrong` unless `got` equals `right`: numbers to 1e-4, lists and tuples alike.

    Of `mistakes`, the sentences are told whose value is what was `got`; `what` begins them. A
    mistake that gives the right value here is none.
    """
    if _same(got, right):
        return
    fits = [said for said, value in (mistakes or {}).items() if _same(got, value)]
    raise Wrong(f"{what} {', or '.join(fits) or 'is {}, not {}'.format(*_short(got, right))}")


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


def _done() -> list[str]:
    with suppress(OSError, ValueError):  # not there yet, or not ours
        return json.loads(DONE.read_text())
    return []


def _not_written(answer: object) -> bool:
    """A stub: a function, or a class of functions, with no more than a docstring and `...`."""
    if inspect.isclass(answer):
        written = [f for f in vars(answer).values() if inspect.isfunction(f)]
        return any(map(_not_written, written))
    if isinstance(answer, dict):
        return any(map(_not_written, answer.values()))
    if code := getattr(answer, "__code__", None):  # a docstring is one of its constants
        return code.co_code in NOTHING and {*code.co_consts} <= {None, answer.__doc__}
    return answer is None or answer is ...


def _in_rank(cases: Callable, answers: tuple) -> None:
    torch.manual_seed(0)
    try:
        cases(*answers)
    except Exception as error:
        files = [frame.filename for frame in traceback.extract_tb(error.__traceback__)]
        if isinstance(error, Wrong) or any(os.path.dirname(file) != HERE for file in files):
            raise
        raise Wrong(f"what it takes or returns is not what its text says: {error}") from None


def _holds(thing: object, number: int) -> bool:
    """Whether the code of a function, or of one within it, has the number in it."""
    code = getattr(inspect.unwrap(thing), "__code__", thing)
    steps = dis.get_instructions(code) if inspect.iscode(code) else ()
    loaded = [step.argval for step in steps if step.opname.startswith("LOAD_")]
    return number in loaded or any(_holds(part, number) for part in loaded)


def _what_is_wrong(error: LaunchError | TimeoutError, ranks: int) -> str:
    text = str(error)
    if isinstance(error, LaunchError):
        whose = f"rank {error.rank} of {ranks}"
        if error.kind == "Wrong" and (found := re.search(r"failed with \S*Wrong: (.*)", text)):
            return f"{whose}: {found[1]}" if ranks > 1 else found[1]
        if PEER_IS_GONE.search(text):
            said = "waited for a rank that had returned: do all make the same calls, in the same "
            return f"{whose} {said}order?"
    text = re.sub(r"^rank 0 of 1 ", "", text)
    return "\n".join([text, *getattr(error, "__notes__", [])])


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
