"""How a cost grows: seconds at several sizes, drawn, and what a hundred times more would cost."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from statistics import median

LINE_COLORS = ("gpu", "dp", "ddp")


@dataclass
class Curve:
    """Seconds by what is counted, in one line or several.

    `lines` is ``{"inspect": [(10, [0.11, 0.12, 0.11]), (100, [...])], "fix": [...]}``: for each
    line its points, for each point the seconds of all runs. All lines have the same x.
    """

    what: str  # the figure's title
    x: str  # what is counted, with its unit, in the plural: "megabytes"
    lines: dict[str, list[tuple[float, list[float]]]]

    def beyond(self, line: str, times: float = 100) -> float:
        """Seconds at `times` the largest x: the worse of two ways to go on from the last points.

        On a straight line through the last two, or on a power of x through them, which is the
        worse where seconds grow faster than x.
        """
        (x0, y0), (x1, y1) = ((x, median(runs)) for x, runs in self.lines[line][-2:])
        straight = y1 + (y1 - y0) / (x1 - x0) * (times - 1) * x1
        power = y1 * times ** (math.log(y1 / y0) / math.log(x1 / x0))
        return max(straight, power, y1)

    def extrapolated(self) -> str:
        """A sentence on what a hundred times more would cost."""
        most = next(iter(self.lines.values()))[-1][0]
        costs = ", ".join(f"{name} {in_seconds(self.beyond(name))}" for name in self.lines)
        return (
            f"A hundred times more, {100 * most:,.0f} {self.x}, would take about: {costs}. "
            "That is not measured but extrapolated from the last two points."
        )

    def in_words(self) -> str:
        """What the figure shows."""
        lines = [
            f"{name} {', '.join(f'{in_seconds(median(runs))} at {x:,g}' for x, runs in points)}"
            for name, points in self.lines.items()
        ]
        return f"{self.what}. Time by number of {self.x}: {'; '.join(lines)}."

    def drawn(self) -> str:
        """The figure, as HTML that Markdown can hold: a dot a run, and a line through medians."""
        from torchladder.plotting import COLORS, figure, show

        fig, ax = figure(self.what)
        for (name, points), color in zip(self.lines.items(), LINE_COLORS, strict=False):
            color, (xs, all_runs) = COLORS[color], zip(*points, strict=True)
            ax.plot(xs, [median(runs) for runs in all_runs], color=color, label=name)
            ax.plot(xs, all_runs, "o", color=color, markersize=4)
        if len(self.lines) > 1:
            ax.legend(frameon=False, labelcolor="linecolor", loc="upper left")
        if xs[-1] > 20 * xs[0]:
            ax.set(xscale="log", yscale="log")
            ax.yaxis.set_major_formatter("{x:g}")
        else:
            ax.set(xlim=(0, None), ylim=(0, None))
        ax.set_xticks(xs, [f"{x:,g}" for x in xs], minor=False)
        ax.set_xticks([], minor=True)
        ax.set(xlabel=self.x, ylabel="seconds")
        # On one line: in Markdown, HTML ends where a line is empty.
        return re.sub(r"\s*\n\s*", " ", show(fig, self.in_words())._repr_html_())


def in_seconds(value: float) -> str:
    """To two digits, in a unit that suits: ``12 ms``, ``0.15 s``, ``5 min``."""
    units = [(7200, 3600, "h"), (120, 60, "min"), (0.1, 1, "s"), (0, 1e-3, "ms")]
    size, unit = next((size, unit) for least, size, unit in units if value >= least)
    return f"{float(f'{value / size:.2g}'):,g}\N{NO-BREAK SPACE}{unit}"
