"""How the reports on checkpoints are set: 80 columns, and never longer than a screen or two."""

from collections.abc import Iterable
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
                parts = wrap(text[:600], 68, break_on_hyphens=False, break_long_words=False)
                heads = [label.replace("_", " "), *[""] * len(parts)]
                found += [f"{head:11} {part}" for head, part in zip(heads, parts, strict=False)]
    return "\n".join(map(printable, found))


def some(names: Iterable[object], count: int = 4, between: str = ", ") -> str:
    """The first of them, and how many more there are.

    >>> some("abcdef")
    'a, b, c, d, and 2 more'
    """
    names = [str(name) for name in names]
    more = [f"and {len(names) - count:,} more"] if len(names) > count else []
    return between.join(names[:count] + more)


def ends(rows: list[str], indent: str = "") -> list[str]:
    """The first twelve rows and the last four, and how many are between them."""
    if len(rows) < 18:
        return rows
    return [*rows[:12], f"{indent}... {len(rows) - 16:,} more ...", *rows[-4:]]


def counted(keys: Iterable[str]) -> str:
    """As in ``2: fc.weight, fc.bias``, and nothing for none."""
    keys = list(keys)
    return f"{len(keys)}: {some(keys)}" if keys else ""
