"""What a keyboard reaches and a screen reader is told; axe looks at pages in test_browser.py."""

import pytest

OPENED = "notebooks/06_rung_2_one_gpu.html"  # has diffs, figures, tables, folded code, solutions

pytestmark = pytest.mark.slow

# The element that has the focus: its name, whether it or a part of it has a ring, and whether it
# comes after the last one
FOCUS = """() => {
    const e = document.activeElement, last = window.lastFocus;
    window.lastFocus = e;
    const name = e.getAttribute('aria-label') || e.textContent || e.title ||
        e.labels?.[0]?.textContent || '';
    return {kind: e.tagName + '.' + e.className, name: name.trim(),
        ring: [e, ...e.querySelectorAll('*')].map(part => getComputedStyle(part))
            .some(style => style.outlineStyle != 'none'),
        colour: getComputedStyle(e).outlineColor,
        after: !last || Boolean(last.compareDocumentPosition(e) & 4)}; // it follows
}"""


def test_the_tab_key_reaches_every_kind_of_control_and_shows_where_it_is(opened):
    seen = []
    for _ in range(400):
        opened.keyboard.press("Tab")
        if opened.evaluate("document.activeElement == document.body"):
            break
        seen.append(opened.evaluate(FOCUS))
    assert seen[0]["name"] == "Skip to main content"
    assert {"A", "BUTTON", "SUMMARY"} <= {stop["kind"].split(".")[0] for stop in seen}
    assert len({stop["colour"] for stop in seen if stop["kind"].startswith("A")}) == 1  # one ring
    wrong = [stop for stop in seen if not (stop["ring"] and stop["name"] and stop["after"])]
    assert wrong == []
    names = {" ".join(stop["name"].split()) for stop in seen}
    assert {"Download notebook", "For Kaggle", "Theme: the system's"} <= names
    assert [name for name in names if name.startswith("Show the solution")]
    assert opened.evaluate("lastFocus.closest('footer') != null")  # so all of the page was passed


def test_what_moves_stands_still_for_who_asked_for_it(opened):
    moving = """() => [...document.querySelectorAll('*')].map(e => getComputedStyle(e))
        .filter(s => s.transitionDuration.split(', ').some(t => parseFloat(t) > 0) &&
            s.transitionProperty != 'none' || s.animationName != 'none').length"""
    assert opened.evaluate(moving) == 0
    assert opened.evaluate("getComputedStyle(document.documentElement).scrollBehavior") == "auto"
