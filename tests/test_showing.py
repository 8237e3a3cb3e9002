"""Figures follow the page's theme and carry a text alternative; tables line up."""

import re

import pytest

from torchladder import showing
from torchladder.showing import Table, in_bytes


def drawing():
    values = {"one": 1.0, "two": [2.0, 3.0, 5.0], "a batch at once, two workers": 4}
    fig = showing.dots(values, title="A <b> title " * 4, unit="images/s", colors="ddp")
    return showing.show(fig, alt='Two "bars"')


def test_a_figure_is_text_and_has_the_pages_colours_and_no_ids_but_those_referred_to():
    svg = drawing().svg
    assert drawing().svg == svg, "the same data gives the same bytes"
    assert "currentColor" in svg
    assert showing.COLORS["ddp"] in svg
    for absent in (showing.COLORS["ink"], showing.COLORS["faint"], "<style"):
        assert absent not in svg
    assert not re.search(r"#000000|#ffffff|: (black|white)", svg)
    assert {f"#{name}" in svg for name in re.findall(r'id="([^"]+)"', svg)} == {True}
    for line in ("images/s", "a batch at once,", "two workers"):
        assert f">{line}<" in svg
    assert svg.count(">A &lt;b&gt; title A &lt;b&gt;") == 1, "a long title has two lines"


def test_the_alternative_text_is_escaped_and_required():
    figure = drawing()
    assert 'aria-label="Two &quot;bars&quot;"' in figure._repr_html_()
    assert repr(figure) == 'Figure: Two "bars"'
    with pytest.raises(ValueError, match="needs alt text"):
        showing.show(showing.figure()[0], alt=" ")


def test_dots_show_every_run_and_their_median_in_rows_from_the_top_and_from_zero():
    colors = {"a": "ddp", "b": "#123456"}
    (axes,) = showing.dots({"a": [4.0, 2.0], "b": 5}, title="t", unit="u", colors=colors).axes
    assert [list(line.get_xdata()) for line in axes.lines] == [[2, 4], [3], [5], [5]]
    assert [line.get_color() for line in axes.lines[1:3]] == [showing.COLORS["ddp"], "#123456"]
    assert [text.get_text() for text in axes.texts] == ["3", "5"]
    assert [label.get_text() for label in axes.get_yticklabels()] == ["a", "b"]
    low, high = axes.get_ylim()
    assert low > high
    assert axes.get_xlim()[0] == 0


def test_html_in_a_table_is_escaped_and_it_may_be_empty_but_not_ragged():
    """The chapters' tables, which are compared, show the rest."""
    table = Table(["name", "count"], [["<a>", 5], ["longer", "1,000"]])
    assert '<td style="text-align: left">&lt;a&gt;</td>' in table._repr_html_()
    assert repr(Table(["a", "bc"], [])).splitlines() == ["a  bc", "-  --"]
    with pytest.raises(ValueError, match="A row of 1 under 2 columns"):
        Table(["a", "b"], [["x"]])


def test_bytes_are_written_for_readers():
    assert [in_bytes(n) for n in (0, 999, 999.7, 4_001_343, 999_949, -999_960, 5e15, None)] == [
        "0 B", "999 B", "1.0 kB", "4.0 MB", "999.9 kB", "-1.0 MB", "5000.0 TB", "–",
    ]  # fmt: skip
