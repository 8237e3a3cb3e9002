"""A benchmark's result: mostly a ratio of two things that were measured in the same run."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from statistics import median


@dataclass
class Result:
    """`ratio` and its spread over the runs; the goal is a lower limit unless `at_most`.

    One without a goal explains another.
    """

    what: str
    ratio: float
    low: float
    high: float
    runs: int
    goal: float | None
    at_most: bool = False
    detail: str = ""

    @property
    def met(self) -> str:
        """Whether the goal is met: ``not sure`` if it lies within the spread."""
        if self.goal is None:
            return ""
        if self.low < self.goal < self.high:
            return "not sure"
        return (
            "yes" if (self.ratio <= self.goal) == self.at_most or self.ratio == self.goal else "no"
        )

    def __str__(self) -> str:
        text = f"{self.what}: {self.ratio:.2f} ({self.low:.2f} to {self.high:.2f}, n={self.runs})"
        if self.goal is None:
            return text
        return f"{text}, goal {'<=' if self.at_most else '>='} {self.goal:g}, met: {self.met}"

    @classmethod
    def of_samples(cls, what, these: Sequence[float], those: Sequence[float], goal, **more):
        """The ratio of two medians; low and high from the runs that lie furthest apart."""
        ratio, low = median(these) / median(those), min(these) / max(those)
        runs = min(len(these), len(those))
        return cls(what, ratio, low, max(these) / min(those), runs, goal, **more)

    @classmethod
    def of_pairs(cls, what, pairs: Sequence[tuple[float, float]], goal, **more):
        """The median of ratios whose two sides ran one after the other."""
        ratios = [this / that for this, that in pairs]
        return cls(what, median(ratios), min(ratios), max(ratios), len(ratios), goal, **more)

    @classmethod
    def of_runs(cls, what, values: Sequence[float], goal, **more):
        """The median of values that stand for themselves."""
        return cls(what, median(values), min(values), max(values), len(values), goal, **more)


def table(results: list[dict]) -> str:
    """Results of ``results.json`` as the Markdown that the site's page includes."""
    heads = ["What", "In numbers", "Measured", "Spread", "Runs", "Goal", "Met?"]
    rows = [heads, ["---"] * len(heads)]
    for result in (Result(**result) for result in results):
        # The site would make one dash of two.
        what = re.sub(r"--\S+", r"`\g<0>`", escape(result.what, quote=False))
        detail = re.sub(r"(?<=\d) (?=s\b)", "\N{NO-BREAK SPACE}", result.detail)
        spread = f"{result.low:.2f} to {result.high:.2f}"
        goal = "" if result.goal is None else f"{'≤' if result.at_most else '≥'} {result.goal:g}"
        numbers = [f"{result.ratio:.2f}", spread, str(result.runs), goal, result.met]
        rows.append([what, detail, *numbers])
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def measured_on(machine: dict) -> str:
    """A sentence on the machine and the date."""
    facts = "; ".join(f"{name} {value}" for name, value in machine.items() if name != "date")
    return f"Measured on {machine['date']}. {facts}."
