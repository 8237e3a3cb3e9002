"""A benchmark's result: mostly a ratio of two things that were measured in the same run."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median


@dataclass
class Result:
    """`ratio` and its range.

    The range is where the median of many more runs would lie (`of_median`, 95 %), else from the
    lowest single run to the highest.
    """

    what: str
    ratio: float
    low: float
    high: float
    runs: int
    detail: str = ""
    of_median: bool = False

    @classmethod
    def of_pairs(cls, what, pairs: Sequence[tuple[float, float]], **more):
        """The median of ratios whose two sides ran one after the other."""
        return cls.of_runs(what, [this / that for this, that in pairs], **more)

    @classmethod
    def of_runs(cls, what, values: Sequence[float], **more):
        """The median of values that stand for themselves."""
        low, high = median_range(values)
        more["of_median"] = len(values) >= ENOUGH
        return cls(what, median(values), low, high, len(values), **more)


ENOUGH = 6  # of fewer runs, even lowest and highest do not hold the median in 95 % of cases


def median_range(values: Sequence[float]) -> tuple[float, float]:
    """Where the median of many more lies, in 95 % of cases; of few values, all of them."""
    n, outside = len(values), 0
    while 2 * sum(math.comb(n, i) for i in range(outside + 1)) <= 0.05 * 2**n:
        outside += 1
    outside = max(1, outside)
    return sorted(values)[outside - 1], sorted(values)[-outside]


def rounded(result: Result) -> list[str]:
    """The result and its range, with no more digits than the range bears; a count has none."""
    if result.low == result.high:
        return [f"{result.ratio:g}", ""]
    wide = result.high - result.low > 0.1 * abs(result.ratio)
    digits = 2 if wide else 3
    decimals = max(0, digits - 1 - math.floor(math.log10(abs(result.ratio) or 1)))
    ratio, low, high = (f"{v:,.{decimals}f}" for v in (result.ratio, result.low, result.high))
    return [ratio, f"{low} to {high}{'' if result.of_median else ' (single runs)'}"]


def table(results: list[dict]) -> str:
    """Results of ``results.json`` as the Markdown that the site's page includes."""
    heads = ["What", "In numbers", "Result", "Range", "Runs"]
    rows = [heads, ["---"] * len(heads)]
    for result in (Result(**result) for result in results):
        rows.append([result.what, result.detail, *rounded(result), str(result.runs)])
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)
