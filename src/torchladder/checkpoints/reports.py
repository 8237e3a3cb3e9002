"""How the reports on checkpoints are set: 80 columns, and never longer than a screen or two."""

from __future__ import annotations

from collections.abc import Iterable
from textwrap import wrap


def row(label: str, text: str) -> list[str]:
    """Lines with a label in front.

    >>> row("total", "11 tensors")
    ['total       11 tensors']
    """
    first, *more = wrap(text[:600], 68, break_on_hyphens=False, break_long_words=False) or [""]
    return [f"{label:11} {first}".rstrip(), *(f"{'':11} {line}" for line in more)]


def printable(lines: Iterable[str]) -> str:
    """One text. A file chooses its names; it does not get to send codes to a terminal."""
    return "\n".join("".join(c if c.isprintable() else "?" for c in line) for line in lines)


def some(names: Iterable[object], count: int = 4, between: str = ", ") -> str:
    """The first of them, and how many more there are.

    >>> some("abcdef")
    'a, b, c, d, and 2 more'
    """
    names = [str(name) for name in names]
    more = [f"and {len(names) - count:,} more"] if len(names) > count else []
    return between.join(names[:count] + more)


def ends(items: list, first: int, last: int) -> list:
    """The first and the last of a long list of pairs, with a word on those between."""
    if len(items) <= first + last + 1:
        return items
    return [*items[:first], ("", f"... {len(items) - first - last:,} more ..."), *items[-last:]]


def shape_text(shape: tuple[int, ...]) -> str:
    """As in ``64x3x7x7``."""
    return "x".join(map(str, shape)) or "scalar"
