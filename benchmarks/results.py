"""A benchmark's result: mostly a ratio of two things that were measured in the same run."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from statistics import median


@dataclass
class Result:
    """`ratio` and its range; the goal is a lower limit unless `at_most`.

    The range is where the median of many more runs would lie (`of_median`, 95 %), else from the
    lowest single run to the highest. A result without a goal explains another.
    """

    what: str
    ratio: float
    low: float
    high: float
    runs: int
    goal: float | None
    at_most: bool = False
    detail: str = ""
    of_median: bool = False

    @property
    def met(self) -> str:
        """Whether the goal is met, if it lies outside the range."""
        if self.goal is None:
            return ""
        if self.low < self.goal < self.high:
            return "cannot tell"
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
        """The ratio of two medians; low and high from the ends of both ranges."""
        runs = min(len(these), len(those))
        (low, high), (least, most) = median_range(these), median_range(those)
        more["of_median"] = runs >= ENOUGH
        ratio = median(these) / median(those)
        return cls(what, ratio, low / most, high / least, runs, goal, **more)

    @classmethod
    def of_pairs(cls, what, pairs: Sequence[tuple[float, float]], goal, **more):
        """The median of ratios whose two sides ran one after the other."""
        return cls.of_runs(what, [this / that for this, that in pairs], goal, **more)

    @classmethod
    def of_runs(cls, what, values: Sequence[float], goal, **more):
        """The median of values that stand for themselves."""
        low, high = median_range(values)
        more["of_median"] = len(values) >= ENOUGH
        return cls(what, median(values), low, high, len(values), goal, **more)


ENOUGH = 6  # of fewer runs, even lowest and highest do not hold the median in 95 % of cases


def median_range(values: Sequence[float]) -> tuple[float, float]:
    """Where the median of many more lies, in 95 % of cases; of few values, all of them."""
    n, outside = len(values), 0
    while 2 * sum(math.comb(n, i) for i in range(outside + 1)) <= 0.05 * 2**n:
        outside += 1
    outside = max(1, outside)
    return sorted(values)[outside - 1], sorted(values)[-outside]


def rounded(result: Result) -> list[str]:
    """The result and its range, with no more digits than the range bears."""
    wide = result.high - result.low > 0.1 * abs(result.ratio)
    digits = 2 if wide else 3
    decimals = max(0, digits - 1 - math.floor(math.log10(abs(result.ratio) or 1)))
    ratio, low, high = (f"{v:,.{decimals}f}" for v in (result.ratio, result.low, result.high))
    return [ratio, f"{low} to {high}{'' if result.of_median else ' (single runs)'}"]


def table(results: list[dict]) -> str:
    """Results of ``results.json`` as the Markdown that the site's page includes."""
    heads = ["What", "In numbers", "Result", "Range", "Runs", "Goal", "Met?"]
    rows = [heads, ["---"] * len(heads)]
    for result in (Result(**result) for result in results):
        # The site would make one dash of two.
        what = re.sub(r"--\S+", r"`\g<0>`", escape(result.what, quote=False))
        detail = re.sub(r"(?<=\d) (?=s\b)", "\N{NO-BREAK SPACE}", result.detail)
        goal = "" if result.goal is None else f"{'≤' if result.at_most else '≥'} {result.goal:g}"
        numbers = [*rounded(result), str(result.runs), goal, result.met]
        rows.append([what, detail, *numbers])
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def measured_on(machines: Sequence[dict]) -> str:
    """A line for each machine, with the days."""
    days: dict[str, set[str]] = {}
    for machine in machines:
        facts = [f"{name} {value}" for name, value in machine.items() if name != "date"]
        days.setdefault("; ".join(facts), set()).add(machine["date"])
    return "\n".join(f"- {facts}: {', '.join(sorted(when))}" for facts, when in days.items())
