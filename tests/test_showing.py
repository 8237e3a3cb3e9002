"""Figures follow the page's theme, carry a text alternative, and are the same every time."""

import re

import pytest

from torchladder import showing


def drawing():
    return showing.show(
        showing.dots({"one": 1.0, "two": [2.0, 3.0, 5.0]}, title="A <b> title", unit="images/s"),
        alt='Two "bars"',
    )


def test_ink_is_the_pages_text_colour_and_no_stand_in_is_left():
    svg = drawing().svg
    assert "currentColor" in svg
    for name in ("ink", "faint"):
        assert showing.COLORS[name] not in svg
    assert not re.search(r"#000000|#ffffff|: (black|white)", svg)


def test_text_stays_text_and_is_escaped():
    svg = drawing().svg
    assert ">A &lt;b&gt; title<" in svg
    assert ">images/s<" in svg


def test_the_alternative_text_is_escaped_and_required():
    figure = drawing()
    assert 'aria-label="Two &quot;bars&quot;"' in figure._repr_html_()
    assert repr(figure) == 'Figure: Two "bars"'
    with pytest.raises(ValueError, match="needs alt text"):
        showing.show(showing.figure()[0], alt=" ")


def test_the_same_data_gives_the_same_bytes():
    assert drawing().svg == drawing().svg


def test_ids_are_only_those_that_are_referred_to():
    svg = drawing().svg
    for name in re.findall(r'id="([^"]+)"', svg):
        assert f"#{name}" in svg
    assert "<style" not in svg


def test_dots_show_every_run_and_their_median():
    fig = showing.dots({"a": [4.0, 2.0], "b": 5.0}, title="t", unit="u")
    runs, middle, single, _ = (list(line.get_xdata()) for line in fig.axes[0].lines)
    assert (runs, middle, single) == ([2.0, 4.0], [3.0], [5.0])
    assert [text.get_text() for text in fig.axes[0].texts] == ["3", "5"]


@pytest.mark.parametrize("draw", [showing.bars, showing.dots])
def test_rows_go_down_and_begin_at_zero(draw):
    axes = draw({"first": 1.0, "second": 2.0}, title="t", unit="u").axes[0]
    assert [label.get_text() for label in axes.get_yticklabels()] == ["first", "second"]
    low, high = axes.get_ylim()
    assert low > high
    assert axes.get_xlim()[0] == 0


def test_bars_take_a_rungs_colour_or_any_other():
    fig = showing.bars({"a": 1, "b": 1}, title="t", unit="u", colors={"a": "ddp", "b": "#123456"})
    colours = [patch.get_facecolor()[:3] for patch in fig.axes[0].patches]
    assert [round(c * 255) for c in colours[0]] == [0, 158, 115]
    assert [round(c * 255) for c in colours[1]] == [0x12, 0x34, 0x56]


@pytest.mark.parametrize("draw", [showing.bars, showing.dots])
def test_nothing_to_draw_is_an_error(draw):
    with pytest.raises(ValueError, match="no values"):
        draw({}, title="t", unit="u")


def test_several_axes_share_one_title():
    fig, axes = showing.figure("Both", ncols=2)
    assert len(axes) == 2
    assert fig.get_suptitle() == "Both"


def test_a_long_title_takes_two_lines_and_long_labels_too():
    fig = showing.dots({"a batch at once, two workers": 1.0}, title="word " * 12, unit="u")
    assert len(fig.get_suptitle().splitlines()) == 2
    (label,) = fig.axes[0].get_yticklabels()
    assert label.get_text() == "a batch at once,\ntwo workers"


def test_a_figure_is_as_wide_on_a_desk_as_the_books_drawings_and_shrinks_with_its_page():
    svg = drawing().svg
    assert 'style="max-width: 512px; width: 100%; height: auto' in svg
    assert 'viewBox="0 0 316.8 ' in svg


def test_each_rungs_colour_stands_out_on_a_light_and_on_a_dark_page():
    def luminance(colour):
        parts = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
        red, green, blue = (
            p / 12.92 if p <= 0.04045 else ((p + 0.055) / 1.055) ** 2.4 for p in parts
        )
        return 0.2126 * red + 0.7152 * green + 0.0722 * blue

    def contrast(one, other):
        low, high = sorted([luminance(one), luminance(other)])
        return (high + 0.05) / (low + 0.05)

    for rung in ("cpu", "gpu", "dp", "ddp", "fsdp"):
        for page in ("#ffffff", "#121212"):
            assert contrast(showing.COLORS[rung], page) >= 3, (rung, page)
