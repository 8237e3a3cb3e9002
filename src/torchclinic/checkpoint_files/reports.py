"""How the reports on checkpoints are set: 80 columns, and never longer than a screen or two."""

import os
import re
import shlex
from collections.abc import Iterable
from itertools import chain, count
from textwrap import wrap
from types import SimpleNamespace

from torchclinic import printable


class Report(SimpleNamespace):
    """What was found or done: facts as attributes, and a text for people as ``repr``."""

    text = ""

    def __repr__(self) -> str:
        return self.text


def lines(**rows: str | Iterable[str]) -> str:
    """Lines with labels in front; a row without text is left out.

    >>> print(lines(file="a.pt", left_out=["epoch", "loss"], moved=""))
    file        a.pt
    left out    epoch
    left out    loss
    """
    found = []
    for label, texts in rows.items():
        for text in [texts] if isinstance(texts, str) else texts:
            if text.startswith("\n"):  # a table of its own
                found += text.split("\n")
            elif text:
                parts = wrap(text[:1200], 68, break_on_hyphens=False, break_long_words=False)
                if re.search(r"(--key[ =]|torchclinic fix )\$?'", text):  # there, spaces are names
                    parts = [text]
                heads = [label.replace("_", " "), *[""] * len(parts)]
                found += [f"{head:11} {part}" for head, part in zip(heads, parts, strict=False)]
    return "\n".join(map(printable, found))


def word(text: object) -> str:
    """A name as one word of a command to copy, in which no shell sees more; ... if it cannot be.

    >>> print(word("model.ema"), word("a; b"), word("=ls"), word("it's"), word("a\\n"))
    model.ema 'a; b' '=ls' $'it\\x27s' $'a\\x0a'
    """
    text = str(text)
    if re.search("[\ud800-\udc7f\udd00-\udfff]", text) or len(text) > 280:
        return "..."
    if text.isprintable() and "'" not in text:
        return f"'{text}'" if text.startswith("=") else shlex.quote(text)  # for zsh, a program
    raw = text.encode(errors="surrogateescape")
    escaped = re.sub(rb"[^\w./-]", lambda byte: b"\\x%02x" % ord(byte[0]), raw)
    return f"$'{escaped.decode()}'"


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
