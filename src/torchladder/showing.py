"""The book's tables and figures: one style, one colour a rung, legible in both themes.

A figure is drawn with ordinary matplotlib and shown as inline SVG whose ink is the colour of the
text around it, so it follows the reader's theme. Text stays text: it can be searched, selected
and translated.
"""

import html
import io
import re
import textwrap
from collections.abc import Mapping, Sequence
from statistics import median

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from torchclinic.tables import Table as Table
from torchclinic.tables import in_bytes as in_bytes

# Okabe and Ito's colour-blind-safe hues (https://jfly.uni-koeln.de/color/), blue, grey and purple
# shifted until each has a contrast of at least 3:1 on white and on the dark theme's background.
#: A colour for each rung, and ``"ink"`` and ``"faint"``, which follow the page's theme.
COLORS = {
    "cpu": "#808080",
    "gpu": "#2f86c8",
    "dp": "#d55e00",
    "ddp": "#009e73",
    "fsdp": "#c05c96",
    "hsdp": "#7f6bd6",
    # Two stand-ins that become CSS colours in the SVG: the page's text colour, strong and faint.
    "ink": "#010203",
    "faint": "#010204",
}

# Drawn 4.4 inches wide, a figure is shown up to 512 px wide, as the drawings in book/figures are:
# its text of 10 points is 16 px there, and 11 px on a phone whose column has 358.
_PIXELS_AN_INCH = 512 / 4.4

_STYLE = {
    "svg.fonttype": "none",
    "svg.hashsalt": "torchladder",
    "font.family": "sans-serif",
    "font.size": 10,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.axisbelow": True,
    "axes.grid": True,
    "grid.color": COLORS["faint"],
    "grid.linewidth": 0.6,
    "legend.frameon": False,
    "lines.linewidth": 2,
    **dict.fromkeys(
        ["text.color", "axes.edgecolor", "axes.labelcolor", "xtick.color", "ytick.color"],
        COLORS["ink"],
    ),
}


class Svg:
    """An SVG drawing with a text alternative; notebooks show it inline."""

    def __init__(self, svg: str, alt: str) -> None:
        self.svg = svg
        self.alt = alt

    def _repr_html_(self) -> str:
        label = f'role="img" aria-label="{html.escape(self.alt, quote=True)}"'
        return f'<figure class="torchladder-figure" {label}>{self.svg}</figure>'

    def __repr__(self) -> str:
        return f"Figure: {self.alt}"


def figure(
    title: str = "", *, width: float = 4.4, height: float = 2.9, **subplots
) -> tuple[Figure, Axes]:
    """A new figure in the book's style, and its axes.

    As ``plt.subplots`` gives them, but outside pyplot: nothing is shown until `show`.

    Parameters
    ----------
    title : str
        The figure's message, in a few words; it stands on lines of 40 characters.
    width, height : float
        Size in inches. At 4.4 inches, text of 10 points is legible on a phone: keep to both.
    **subplots
        Passed to ``matplotlib.figure.Figure.subplots`` (``nrows``, ``ncols``, ``sharex`` ...).
    """
    with matplotlib.rc_context(_STYLE):
        fig = Figure(figsize=(width, height), layout="constrained")
        axes = fig.subplots(**subplots)
        if title:
            title = textwrap.fill(title, 40)
            fig.suptitle(title, x=0, ha="left", fontsize=11, fontweight="bold")
        return fig, axes


def show(fig: Figure, alt: str) -> Svg:
    """`fig`, from `figure` or `dots`, as inline SVG; the last line of a cell that draws.

    Parameters
    ----------
    alt : str
        What the figure says and the values that matter, for those who cannot see it.

    Raises
    ------
    ValueError
        If `alt` is empty.
    """
    if not alt.strip():
        raise ValueError("A figure needs alt text: say in one sentence what it shows.")
    buffer = io.StringIO()
    with matplotlib.rc_context(_STYLE):
        # No date and no version in the file: the same data gives the same bytes.
        metadata = {"Date": None, "Creator": None}
        fig.savefig(buffer, format="svg", transparent=True, metadata=metadata)
    svg = re.sub(r"^.*?(?=<svg)|<metadata>.*?</metadata>", "", buffer.getvalue(), flags=re.DOTALL)
    svg = svg.replace(COLORS["faint"], "color-mix(in srgb, currentColor 22%, transparent)")
    svg = svg.replace(COLORS["ink"], "currentColor")
    # Several figures share one page: no style sheet of their own, no ids but those referred to.
    svg = re.sub(r"<style.*?</style>", "", svg, flags=re.DOTALL)
    svg = re.sub(r' id="[a-z]+[\w.]*_\d+"', "", svg)
    # matplotlib leaves out what is black, SVG's default; here the default is the page's ink.
    svg = svg.replace("stroke: #000000", "stroke: currentColor")

    def style(size: re.Match) -> str:
        width = _PIXELS_AN_INCH * float(size[1]) / 72
        return f'style="max-width: {width:.0f}px; width: 100%; height: auto; fill: currentColor"'

    svg = re.sub(r'width="([\d.]+)pt" height="[\d.]+pt"', style, svg, count=1)
    return Svg(svg.strip(), alt)


def dots(
    values: Mapping[str, float | Sequence[float]],
    *,
    title: str,
    unit: str,
    colors: Mapping[str, str] | str = "cpu",
    fmt: str = "{:,.0f}",
) -> Figure:
    """A row a label: a dot for each run, a large one at their median, whose value is written.

    Parameters
    ----------
    values : mapping of str to float or sequence of float
        What one run gave, or each of several.
    title, unit : str
        The message, and what the axis counts.
    colors : str or mapping of str to str
        A name in `COLORS` or any matplotlib colour, for all rows or by label.
    fmt : str
        How the median is written.
    """
    fig, ax = figure(title, height=1.1 + 0.38 * len(values))
    for y, (label, value) in enumerate(values.items()):
        runs = sorted(value) if isinstance(value, Sequence) else [value]
        middle, color = median(runs), colors if isinstance(colors, str) else colors[label]
        color = COLORS.get(color, color)
        ax.plot(runs, [y] * len(runs), "o-", color=color, markersize=4, linewidth=1)
        ax.plot(middle, y, "o", color=color, markersize=9)
        ax.annotate(
            fmt.format(middle), (runs[-1], y), (9, 0), textcoords="offset points", va="center"
        )
    ax.set_yticks(range(len(values)), [textwrap.fill(label, 18) for label in values])
    ax.set(ylim=(len(values) - 0.4, -0.6), xlabel=textwrap.fill(unit, 40))
    ax.set_xlim(0, 1.18 * ax.get_xlim()[1])
    ax.grid(axis="y", visible=False)
    return fig
