"""Every page at every width. A file in parts: it takes longest, and files run side by side."""

import pytest

DESKTOP = 1280
PARTS = 8

pytestmark = pytest.mark.slow

# How wide the page is, how small its smallest code in view, whether an unfolded
# cell of an exercise is hidden, how many have a line that is cut off, how many would break one
FITS = """() => {
    const all = (selector) => [...document.querySelectorAll(selector)];
    const seen = (selector) => all(selector).filter(e => e.checkVisibility());
    const cells = seen('.exercise .cell_input pre'), style = (e) => getComputedStyle(e);
    return [document.documentElement.scrollWidth,
        Math.min(99, ...seen('.bd-article pre').map(e => parseFloat(style(e).fontSize))),
        all('.exercise .cell_input:not(details *) pre').some(e => !e.checkVisibility()),
        cells.filter(e => e.scrollWidth > e.clientWidth).length,
        cells.filter(e => style(e).whiteSpace != 'pre' || style(e).overflowX != 'auto').length];
}"""


@pytest.mark.parametrize("part", range(PARTS))
def test_no_page_scrolls_sideways_code_is_large_enough_and_exercises_keep_their_lines(
    browser, address, pages, part
):
    page = browser.new_page(reduced_motion="reduce")
    wrong = {}
    for name in list(pages)[part::PARTS]:
        page.goto(address + name)
        for width in (320, 620, 768, 1000, DESKTOP):
            page.set_viewport_size({"width": width, "height": 800})
            wide, small, lost, cut_off, styles = page.evaluate(FITS)
            if wide > width or small < 13.5 or lost or styles or (cut_off and width == DESKTOP):
                wrong[name, width] = wide, small, lost, cut_off, styles
    assert wrong == {}
    page.close()
