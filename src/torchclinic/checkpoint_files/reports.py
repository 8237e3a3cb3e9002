"""How the reports on checkpoints are set: 80 columns, and never longer than a screen or two."""

import os
import re
import shlex
from collections.abc import Iterable
from itertools import chain, count
from textwrap import wrap
from types import SimpleNamespace

from torchclinic import printable

LONGEST_ROW = 1200  # characters
# Where a command or code begins that somebody may copy: from there on, a text is not wrapped.
TO_COPY = re.compile(
    r"\A(?s:.*)--key[ =]|torchclinic fix |\(?\b(?:cd|zip|python) |\bkey=|"
    r"\bfrom \S+ import |\b(?:\w+ = |for p, )|\{\w|[\w.]*\w\("
)


class Report(SimpleNamespace):
    """What was found or done: facts as attributes, and a text for people as ``repr``."""

    text = ""

    def __repr__(self) -> str:
        return self.text


def lines(**rows: str | Iterable[str]) -> str:
    """Lines with labels in front; a row without text is left out; a `table` has none.

    >>> print(lines(file="a.pt", left_out=["epoch", "loss"], moved=""))
    file        a.pt
    left out    epoch
    left out    loss
    """
    found = []
    for label, texts in rows.items():
        for text in [texts] if isinstance(texts, str) else texts:
            if label == "table":
                found.append(text)
            elif text:
                parts = _wrapped(text)
                heads = [label.replace("_", " "), *[""] * len(parts)]
                found += [f"{head:11} {part}" for head, part in zip(heads, parts, strict=False)]
    return "\n".join(map(printable, found))


def _wrapped(text: str) -> list[str]:
    """Its lines: prose is wrapped, and what is to be copied is whole, or not there."""
    begin = TO_COPY.search(text[:LONGEST_ROW])
    prose, code = (text[: begin.start()], text[begin.start() :]) if begin else (text, "")
    if code and len(text) <= 68:
        return [text]
    parts = wrap(prose[:LONGEST_ROW], 68, break_on_hyphens=False, break_long_words=False)
    return parts + [code if len(code) <= LONGEST_ROW else "..."] * bool(code)


def word(text: object) -> str:
    """A name as one word of a command to copy, in which no shell sees more; ... if it cannot be.

    >>> print(word("model.ema"), word("a; b"), word("=ls"), word("a\\n"))
    model.ema 'a; b' '=ls' ...
    """
    text = str(text)
    if not text.isprintable() or len(text) > 280:
        return "..."
    return f"'{text}'" if text.startswith("=") else shlex.quote(text)  # for zsh, a program


def literal(key: object, most: int = 160) -> str:
    """A key as Python to copy; ... if it is too long, for half of it would be other code.

    >>> print(literal("it's"), literal(3), literal("a" * 1000))
    "it's" 3 ...
    """
    is_plain = isinstance(key, int) or (isinstance(key, str) and len(key) <= most)
    text = repr(key) if is_plain else "..."
    return text if len(text) <= most else "..."


def path_word(path: object) -> str:
    """A path as a `word` that no program takes for an option."""
    return word(f"./{path}" if str(path).startswith("-") else path)


def free_name(name: str, folder: str | os.PathLike = "") -> str:
    """A name for a file in a folder that a printed command may write: ``x.pt``, or x-2.pt..."""
    stem, end = os.path.splitext(name)
    names = chain([name], (f"{stem}-{i}{end}" for i in count(2)))
    return next(name for name in names if not os.path.lexists(os.path.join(folder, name)))


def key_option(key: str) -> str:
    """How ``torchclinic fix`` is told under which key the weights are."""
    return f"--key{'=' if key.startswith('-') else ' '}{word(key)}"


def some(names: Iterable[object], count: int = 4, between: str = ", ") -> str:
    """The first of them, and how many more there are.

    >>> some("abcdef")
    'a, b, c, d, and 2 more'
    """
    texts = [str(name) for name in names]
    more = [f"and {len(texts) - count:,} more"] if len(texts) > count else []
    return between.join(texts[:count] + more)


def ends(rows: list[str], indent: str = "") -> list[str]:
    """The first twelve rows and the last four, and how many are between them."""
    if len(rows) < 18:
        return rows
    return [*rows[:12], f"{indent}... {len(rows) - 16:,} more ...", *rows[-4:]]


def counted(keys: Iterable[str]) -> str:
    """As in ``2: fc.weight, fc.bias``, and nothing for none."""
    keys = list(keys)
    return f"{len(keys)}: {some(keys)}" if keys else ""
