"""A small table that reads well in a terminal and in a notebook."""

import html
from collections.abc import Iterable, Sequence


class Table:
    """Rows under a header; plain text in a terminal, HTML in a notebook.

    Parameters
    ----------
    header : sequence
        Column titles.
    rows : iterable of sequences
        One value a column; numbers are set flush right. Format them before they come here.

    Raises
    ------
    ValueError
        If a row is longer or shorter than the header.

    Examples
    --------
    >>> Table(["file", "bytes"], [["a.pt", 1478], ["view.pt", 4001343]])
    file       bytes
    -------  -------
    a.pt        1478
    view.pt  4001343
    """

    def __init__(self, header: Sequence[object], rows: Iterable[Sequence[object]]) -> None:
        self.header = [str(title) for title in header]
        self.rows = [[str(cell) for cell in row] for row in rows]
        for row in self.rows:
            if len(row) != len(self.header):
                raise ValueError(f"A row of {len(row)} under {len(self.header)} columns: {row}")

    def _numeric(self) -> list[bool]:
        """For each column, whether all its cells are numbers, with or without a unit."""
        return [
            any(cell[:1].isdigit() for cell in column)
            and all(cell[:1] in "0123456789.+-–" and " + " not in cell for cell in column)
            for _, *column in zip(self.header, *self.rows, strict=True)
        ]

    def __repr__(self) -> str:
        columns = list(zip(self.header, *self.rows, strict=True))
        widths = [max(map(len, column)) for column in columns]
        align = [str.rjust if numeric else str.ljust for numeric in self._numeric()]
        lines = []
        for line in [self.header, ["-" * width for width in widths], *self.rows]:
            padded = zip(align, line, widths, strict=True)
            lines.append("  ".join(put(cell, width) for put, cell, width in padded).rstrip())
        return "\n".join(lines)

    def _repr_html_(self) -> str:
        sides = ["right" if numeric else "left" for numeric in self._numeric()]

        def line(tag: str, cells: list[str]) -> str:
            inner = (
                f'<{tag} style="text-align: {side}">{html.escape(cell)}</{tag}>'
                for side, cell in zip(sides, cells, strict=True)
            )
            return f"<tr>{''.join(inner)}</tr>"

        head = f"<thead>{line('th', self.header)}</thead>"
        body = "\n".join(line("td", row) for row in self.rows)
        return f"<table>\n{head}\n<tbody>\n{body}\n</tbody></table>"


def in_bytes(count: float | None) -> str:
    """`count` bytes for a reader: ``'4.0 MB'``, in powers of 1000 as disks are sold.

    Examples
    --------
    >>> in_bytes(4_001_343)
    '4.0 MB'
    """
    if count is None:
        return "–"
    for unit in ["B", "kB", "MB", "GB"]:
        text = f"{count:.0f}" if unit == "B" else f"{count:.1f}"
        if abs(float(text)) < 1000:  # as it is written: 999,960 B are no 1000.0 kB
            return f"{text} {unit}"
        count /= 1000
    return f"{count:.1f} TB"
