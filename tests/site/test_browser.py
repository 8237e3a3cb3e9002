"""What a reader's browser shows of the site: in both themes, on a desk and on a phone."""

from dataclasses import dataclass, field
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
THEMES = ("light", "dark")
DESKTOP, PHONE = 1280, 390

pytestmark = pytest.mark.slow


@dataclass
class Visit:
    """What was seen when one page was opened in one theme."""

    where: str
    requests: list = field(default_factory=list)
    errors: list = field(default_factory=list)
    widths: dict = field(default_factory=dict)
    search_boxes: dict = field(default_factory=dict)
    uncoloured: list = field(default_factory=list)
    uncopiable: list = field(default_factory=list)
    violations: list = field(default_factory=list)
    theme: str = ""


SEARCH_BOXES = """() => [...document.querySelectorAll('input[type=search], .search-button__button')]
    .filter(e => e.checkVisibility({opacityProperty: true, visibilityProperty: true}))
    .map(e => e.getBoundingClientRect())
    .filter(r => r.width && r.right > 0 && r.left < innerWidth).length"""

# A cell is coloured if some of its text has another colour than the rest; one with nothing but a
# name has nothing to colour.
UNCOLOURED = """() => [...document.querySelectorAll('.cell_input pre')]
    .filter(pre => /[a-z]/i.test(pre.innerText) && !/^\\w+\\s*$/.test(pre.innerText))
    .filter(pre => ![...pre.querySelectorAll('span[class]')].length ||
        (pre.querySelector('.k, .kn, .s2, .mi') && new Set([...pre.querySelectorAll('span')]
            .map(span => getComputedStyle(span).color)).size < 2))
    .map(pre => pre.innerText.slice(0, 60))"""

UNCOPIABLE = """() => [...document.querySelectorAll('.cell_input .highlight')]
    .filter(block => !block.querySelector('button.copybtn'))
    .map(block => block.innerText.slice(0, 60))"""

# Of the thousands of coloured words on a page, axe needs to see one of each kind and place.
ONE_OF_A_KIND = """() => {
    const kinds = new Set();
    for (const span of document.querySelectorAll('pre span[class]')) {
        const place = span.closest('.output, .cell_input, .highlight');
        const kind = span.className + ' in ' + place?.tagName + ' ' + place?.className;
        if (kinds.has(kind)) span.replaceWith(...span.childNodes);
        kinds.add(kind);
    }
}"""

# Where only colours matter, one element of each way to be nested in elements, classes and styles is
# enough; axe takes long for many. It does not judge what is drawn. `known`: what other pages had.
ONE_OF_A_COLOUR = """(known) => {
    const kinds = new Set(known), kept = new Set(), added = [];
    const kind = e => !e ? '' : [e.tagName, e.getAttribute('class'), e.getAttribute('style'),
        e.tagName == 'TR' && e.rowIndex % 2].join(' ') + '<' + kind(e.parentElement);
    for (const e of document.querySelectorAll('body *:not(svg *)')) {
        const own = kind(e);
        if (kinds.has(own)) continue;
        kinds.add(own);
        added.push(own);
        for (let around = e; around; around = around.parentElement) kept.add(around);
    }
    document.querySelectorAll('body *').forEach(e => kept.has(e) || e.remove());
    return added;
}"""

# The page hears a little later that the system has another theme.
THEME = """async (theme) => {
    for (let i = 0; i < 50 && document.documentElement.dataset.theme != theme; i++)
        await new Promise(done => setTimeout(done, 20));
    return document.documentElement.dataset.theme;
}"""

# What is no matter of colours is looked for with each block of code and each drawing as one text:
# of their thousands of parts none has a role of its own, unless it can be clicked.
STRUCTURE = """async (run) => {
    const flat = [...document.querySelectorAll('pre, code, figure[role=img] > svg')]
        .filter(e => !e.querySelector('a, button, input, [tabindex], pre, code'))
        .map(e => [e, [...e.childNodes]]);
    for (const [e] of flat) e.replaceChildren(e.matches('svg') ? '' : e.textContent);
    const found = await eval(run)({rules: {'color-contrast': {enabled: false}}});
    for (const [e, parts] of flat) e.replaceChildren(...parts);
    return found;
}"""

# Without preload: false, axe itself asks for style sheets, some of them by wrong addresses.
AXE = """async (options) =>
    (await axe.run(document, {resultTypes: ['violations'], preload: false, ...options})).violations
    .filter(v => ['serious', 'critical'].includes(v.impact))
    .map(v => v.id + ': ' + v.nodes.slice(0, 3).map(n =>
        n.target.join(' ') + ' (' + (n.any[0] || n.all[0] || n.none[0] || {}).message + ')')
        .join('; '))"""
COLOURS = {"runOnly": ["color-contrast"]}


@pytest.fixture(scope="session")
def visits(browser, address, pages, axe):
    """Every page in both themes, and all that was seen there."""
    context = browser.new_context(reduced_motion="reduce")
    visits, known = [], []
    for name in pages:
        # The entrance only leads on; pages of source differ in nothing but their code.
        source = name.startswith("_modules/torchladder/") and not name.endswith("/writing.html")
        if name != "index.html" and not source:
            visits += visit(context, address, name, axe, known)
    context.close()
    return visits


def visit(context, address, name, axe, known):
    """A `Visit` of one page in each theme: as it opens, and after the reader's system changed."""
    page = context.new_page()
    page.set_viewport_size({"width": DESKTOP, "height": 900})
    requests, errors = [], []
    page.on(
        "request",
        lambda request: (
            request.url.startswith((address, "data:", "blob:")) or requests.append(request.url)
        ),
    )
    page.on("pageerror", lambda error: errors.append(str(error)))
    page.on(
        "console",
        lambda message: (
            message.type == "error" and errors.append(f"{message.text} {message.location['url']}")
        ),
    )
    page.emulate_media(color_scheme=THEMES[0])
    page.goto(address + name)
    page.evaluate("document.querySelectorAll('details').forEach(d => d.open = true)")
    visits = [Visit(f"{name} ({theme})", requests, errors) for theme in THEMES]
    both = list(zip(visits, THEMES, strict=True))
    for width, turn in ((DESKTOP, both), (PHONE, both[::-1])):  # the fewest changes of theme
        page.set_viewport_size({"width": width, "height": 900})
        for seen, theme in turn:
            page.emulate_media(color_scheme=theme)
            seen.theme = page.evaluate(THEME, theme)
            seen.uncoloured = page.evaluate(UNCOLOURED)
            seen.uncopiable = page.evaluate(UNCOPIABLE)
            seen.widths[width] = page.evaluate("document.documentElement.scrollWidth")
            seen.search_boxes[width] = page.evaluate(SEARCH_BOXES)
    page.set_viewport_size({"width": DESKTOP, "height": 900})
    page.evaluate(axe)
    others = page.evaluate(STRUCTURE, AXE)  # a theme changes nothing of it
    heard = len(errors)
    page.evaluate(ONE_OF_A_KIND)
    added = page.evaluate(ONE_OF_A_COLOUR, known)
    known += added
    for seen, theme in zip(visits, THEMES, strict=True):
        page.emulate_media(color_scheme=theme)
        page.evaluate(THEME, theme)
        seen.violations = others + (page.evaluate(AXE, COLOURS) if added else [])
    del errors[heard:]  # of scripts that miss what was taken away
    page.close()
    return visits


def test_no_page_requests_another_host(visits):
    assert {seen.where: seen.requests for seen in visits if seen.requests} == {}


def test_no_page_has_an_error_in_the_console(visits):
    assert {seen.where: seen.errors for seen in visits if seen.errors} == {}


def test_every_page_follows_the_readers_light_or_dark_theme(visits):
    assert [seen.where for seen in visits if f"({seen.theme})" not in seen.where] == []


def test_no_page_is_wider_than_its_window(visits):
    wide = {
        seen.where: seen.widths for seen in visits if any(w < v for w, v in seen.widths.items())
    }
    assert wide == {}


def test_every_page_shows_one_search_box(visits):
    # The page of search results has a second one, with the words that were searched.
    counts = {s.where: s.search_boxes for s in visits if not s.where.startswith("search.html")}
    assert {where: n for where, n in counts.items() if n != {DESKTOP: 1, PHONE: 1}} == {}


def test_every_code_cell_is_coloured(visits):
    assert {seen.where: seen.uncoloured for seen in visits if seen.uncoloured} == {}


def test_every_code_cell_has_a_copy_button(visits):
    assert {seen.where: seen.uncopiable for seen in visits if seen.uncopiable} == {}


def test_axe_finds_nothing_serious_in_either_theme(visits):
    assert {seen.where: seen.violations for seen in visits if seen.violations} == {}


FAULTS = """() => {
    const last = [...document.querySelectorAll('.bd-article section')].at(-1);
    last.insertAdjacentHTML('beforeend', `
        <pre><code><a href="#" id="no-name"></a></code></pre><img src="x.png" id="no-words">
        <p style="color: #999; background: #aaa" id="pale">pale</p>`);
}"""


def test_the_visit_sees_faults_that_were_planted_far_below_the_window(browser, address, axe):
    context = browser.new_context(reduced_motion="reduce")
    planted = f"addEventListener('DOMContentLoaded', {FAULTS})"
    context.add_init_script(planted)
    seen = visit(context, address, "notebooks/16_where_memory_goes.html", axe, [])
    for one in seen:
        text = " ".join(one.violations)
        assert [mark for mark in ("#no-name", "#no-words", "#pale") if mark not in text] == []
    context.close()


def test_a_click_on_download_gives_the_chapter(browser, address):
    page = browser.new_page()
    page.goto(f"{address}notebooks/03_devices.html")
    with page.expect_download() as download:
        page.get_by_role("link", name="Download", exact=True).click()
    assert download.value.suggested_filename == "03_devices.ipynb"
    given = Path(download.value.path()).read_bytes()
    assert given == (ROOT / "notebooks/03_devices.ipynb").read_bytes()
    page.close()


def test_a_click_on_run_on_kaggle_shows_the_steps_and_gives_the_notebook(browser, address, site):
    page = browser.new_page()
    page.goto(f"{address}notebooks/03_devices.html")
    steps = page.locator(".chapter-panel li")
    assert not steps.first.is_visible()
    page.get_by_text("Run on Kaggle").click()
    assert [step.is_visible() for step in steps.all()] == [True] * 3
    with page.expect_download() as download:
        steps.first.get_by_role("link").click()
    assert download.value.suggested_filename == "03_devices.ipynb"
    offered = site / "hosted" / "03_devices.ipynb"
    assert Path(download.value.path()).read_bytes() == offered.read_bytes()
    page.close()


def test_the_panels_need_neither_script_nor_mouse_nor_server(browser, site):
    context = browser.new_context(
        java_script_enabled=False, viewport={"width": PHONE, "height": 800}
    )
    page = context.new_page()
    page.goto((site / "notebooks/03_devices.html").as_uri())
    buttons, panels = page.locator("summary.chapter-button").all(), page.locator(".chapter-panel")
    assert len(buttons) == panels.count() > 0
    for button, panel in zip(buttons, panels.all(), strict=True):
        before = button.bounding_box()
        button.focus()
        page.keyboard.press("Enter")
        assert panel.is_visible()
        assert button.bounding_box() == before
        box = panel.bounding_box()
        assert box["x"] >= 0
        assert box["x"] + box["width"] <= PHONE
        page.keyboard.press("Enter")
        assert not panel.is_visible()
    context.close()


def test_one_panel_closes_the_other_and_lies_over_the_page(browser, site):
    page = browser.new_page()
    page.goto((site / "notebooks/03_devices.html").as_uri())
    panels = page.locator(".chapter-panel").all()
    for number, button in enumerate(page.locator("summary.chapter-button").all()):
        button.click()
        assert [panel.is_visible() for panel in panels] == [
            panel is panels[number] for panel in panels
        ]
    panels[-1].get_by_role("link", name="More about").click()  # a click needs nothing on top
    page.wait_for_url("**/book/hosted.html*")
    page.close()
