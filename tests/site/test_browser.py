"""What a browser shows of a page of each kind: in both themes, on a desk and on a phone."""

from pathlib import Path

import pytest

THEMES = ("light", "dark")
DESKTOP, PHONE = 1280, 390
POCKET = {"width": PHONE, "height": 844}
KINDS = (
    "index.html",
    "notebooks/09_rung_4_distributed.html",  # a chapter: diffs, tables, folds, tracebacks
    "notebooks/11_where_memory_goes.html",  # formulas, charts, drawings
    "notebooks/errors_workers.html",
    "book/errors.html",
    "book/will_it_fit.html",
    "book/cheat_sheet.html",
    "book/api/training.html",
    "book/glossary.html",
    "book/references.html",
    "book/where_this_was_run.html",
    "search.html",
)

pytestmark = pytest.mark.slow

# The page hears a little later that the system has another theme.
THEME = """async (theme) => {
    for (let i = 0; i < 5000 && document.documentElement.dataset.theme != theme; i++)
        await new Promise(done => setTimeout(done, 20));
    return document.documentElement.dataset.theme;
}"""

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

# Without preload: false, axe itself asks for style sheets, some of them by wrong addresses.
AXE = """async (parts) =>
    (await axe.run(parts, {resultTypes: ['violations'], preload: false})).violations
    .filter(v => ['serious', 'critical'].includes(v.impact))
    .map(v => v.id + ': ' + v.nodes.slice(0, 3).map(n =>
        n.target.join(' ') + ' (' + (n.any[0] || n.all[0] || n.none[0] || {}).message + ')')
        .join('; '))"""


def assert_axe_finds_nothing(page, axe, *parts):
    """In both themes; in the whole page, or in what the selectors `parts` name."""
    page.evaluate(axe)
    for theme in THEMES:
        page.emulate_media(color_scheme=theme)
        assert page.evaluate(THEME, theme) == theme
        assert page.evaluate(AXE, {"include": parts or ["html"]}) == [], theme


@pytest.mark.parametrize("name", KINDS)
def test_a_page_of_each_kind_asks_nobody_fits_the_window_and_keeps_no_reader_out(
    browser, address, axe, name
):
    page = browser.new_page(viewport={"width": DESKTOP, "height": 900}, reduced_motion="reduce")
    asked, errors = [], []
    page.on("request", lambda request: asked.append(request.url))
    page.on("pageerror", lambda error: errors.append(str(error)))
    page.on("console", lambda said: said.type == "error" and errors.append(said.text))
    page.goto(address + name)
    page.evaluate("document.querySelectorAll('details').forEach(d => d.open = true)")
    for width in (DESKTOP, PHONE):
        page.set_viewport_size({"width": width, "height": 900})
        assert page.evaluate("document.documentElement.scrollWidth") <= width
    page.set_viewport_size({"width": DESKTOP, "height": 900})
    assert [url for url in asked if not url.startswith((address, "data:", "blob:"))] == []
    assert errors == []
    page.evaluate(ONE_OF_A_KIND)
    assert_axe_finds_nothing(page, axe)
    page.close()


def test_columns_keep_their_shape_on_a_phone_and_show_that_they_scroll_and_sentences_wrap(visit):
    page = visit("book/broken_checkpoint.html", viewport=POCKET)
    style = """pre => [
        pre.scrollWidth > pre.clientWidth, getComputedStyle(pre).whiteSpace, pre.tabIndex]"""
    columns = page.locator("pre", has_text="checksums").first
    assert columns.evaluate(style) == [True, "pre", 0]
    assert "gradient" in columns.evaluate("pre => getComputedStyle(pre).backgroundImage")
    assert page.locator("pre", has_text="cut off").evaluate(style) == [False, "pre-wrap", -1]
    page = visit("notebooks/14_checkpoints_across_rungs.html", viewport=POCKET)
    columns = page.locator(".cell_output pre", has_text="found.pt: torch.save").first
    assert columns.evaluate(style) == [True, "pre", 0]
    assert "gradient" in columns.evaluate("pre => getComputedStyle(pre).backgroundImage")


def test_what_is_copied_lacks_prompts_and_what_only_a_notebook_needs(visit):
    ddp, both = "notebooks/09_rung_4_distributed.html", "notebooks/both_gpus.html"
    for name, holds, begins in (
        ("index.html", "python gpt.py", "python gpt.py --data tokens.npy"),
        (ddp, "%%writefile train_ddp", "import os\n"),
        (ddp, "!torchrun", "torchrun --standalone"),
        (both, "%%writefile train", "%%writefile train.py\n"),
        (both, "!torchrun", "!torchrun"),
    ):
        page = visit(name, permissions=["clipboard-read", "clipboard-write"])
        page.locator(".highlight:has(.copybtn)", has_text=holds).first.hover()
        page.locator(".highlight", has_text=holds).locator(".copybtn").first.click()
        page.wait_for_selector(".copybtn.success")
        copied = page.evaluate("navigator.clipboard.readText()")
        assert copied.startswith(begins)
        assert not copied.endswith("\n")


def test_the_menu_shows_the_parts_and_the_pages_of_the_one_that_is_read(visit):
    page = visit("notebooks/13_which_rung.html")
    assert page.locator(".bd-links .part[open] .caption").all_inner_texts() == ["II. The ladder"]
    page.locator(".bd-links .part > summary", has_text="Tools").click()
    assert page.locator(".bd-links a", has_text="Will it fit").is_visible()
    page = visit("index.html")  # which has links of its own
    parts = page.locator(".bd-links .part")
    assert [parts.count(), page.locator(".bd-links .part li >> visible=true").count()] == [8, 0]
    parts.get_by_text("Tools", exact=True).click()
    assert page.locator(".bd-links a", has_text="Will it fit").is_visible()


def test_on_this_page_marks_the_section_that_is_read_after_any_jump(visit):
    page = visit("notebooks/errors_ranks.html", reduced_motion="reduce")
    for name in ("peer-gone", "hang-at-start", "collective-on-one-rank"):
        page.evaluate("id => document.getElementById(id).lastElementChild.scrollIntoView()", name)
        page.locator(f".bd-sidebar-secondary a.active[href='#{name}']").wait_for()


def test_the_typefaces_of_the_book_come_with_it_and_the_icons_are_those_that_pages_use(visit, site):
    page = visit("index.html", without="**/book/*")
    asked = []
    page.on("request", lambda request: asked.append(request.url.rpartition("/")[2]))
    page.goto(page.url.replace("index.html", "notebooks/09_rung_4_distributed.html"))
    page.evaluate("document.fonts.ready")
    fonts = {name for name in asked if ".woff2" in name}
    ours = {"literata.woff2", "literata-italic.woff2", "jetbrains-mono.woff2", "icons.woff2"}
    assert fonts <= ours
    assert {"literata.woff2", "jetbrains-mono.woff2", "icons.woff2"} <= fonts
    assert sum((site / "_static" / name).stat().st_size for name in ours) <= 60_000
    assert page.evaluate("document.fonts.check('16px Book', 'A')")


def test_a_term_is_defined_under_the_mouse_at_the_focus_and_at_a_first_tap(visit):
    page = visit("notebooks/10_inside_ddp.html", viewport=POCKET, has_touch=True)
    term, shown = page.locator("a[href$='glossary.html#rank']").first, page.locator(".definition")
    for show in (term.hover, term.focus, term.tap):
        show()
        assert shown.inner_text().startswith("The number of a process"), show
        page.keyboard.press("Escape")
        page.mouse.move(0, 0)
        page.evaluate("document.activeElement.blur()")
        assert not shown.is_visible(), show
    term.tap()
    with page.expect_navigation(url="**/glossary.html#rank"):
        term.tap()


def test_the_ring_goes_round_by_round_without_a_script_and_ends_with_the_sum(visit):
    page = visit("notebooks/10_inside_ddp.html", java_script_enabled=False)
    for rounds, sums in enumerate((0, 0, 0, 4, 8, 12, 16)):
        assert page.locator(".ring-step:visible td.whole").all_inner_texts() == ["1111"] * sums
        if rounds < 6:
            page.locator(".ring-step:visible").get_by_text("Next").click()


def test_the_dark_theme_prints_dark_on_white_with_solutions_open_and_comes_back(visit):
    page = visit("notebooks/03_devices.html", color_scheme="dark")
    page.emulate_media(media="print", color_scheme="dark")
    page.evaluate("dispatchEvent(new Event('beforeprint'))")
    colour = "e => getComputedStyle(e).color.match(/[\\d.]+/g).slice(0, 3).map(Number)"
    assert sum(page.locator(".bd-article p").first.evaluate(colour)) < 200
    solution = page.locator(".bd-article details.hide > :not(summary)").last
    assert solution.evaluate("e => e.getBoundingClientRect().height") > 10
    hidden = "all => all.map(e => getComputedStyle(e).display)"
    assert set(page.locator(".chapter-buttons").evaluate_all(hidden)) == {"none"}
    page.evaluate("dispatchEvent(new Event('afterprint'))")
    assert page.evaluate("document.documentElement.dataset.theme") == "dark"


def test_a_click_on_run_on_kaggle_shows_the_steps_and_gives_the_notebook(visit, site):
    page = visit("notebooks/02_models_on_disk.html")
    steps = page.locator(".chapter-panel li")
    assert not steps.first.is_visible()
    page.get_by_text("For Kaggle").last.click()  # the button above the exercises
    assert [step.is_visible() for step in steps.all()] == [True] * 3
    with page.expect_download() as download:
        steps.first.get_by_role("link").click()
    offered = site / "hosted" / "02_models_on_disk.ipynb"
    assert Path(download.value.path()).read_bytes() == offered.read_bytes()
    page.keyboard.press("Escape")
    assert not steps.first.is_visible()


def test_a_page_has_its_theme_before_any_script_has_come(visit):
    for scheme in THEMES:
        page = visit("notebooks/13_which_rung.html", without="**/*.js*", color_scheme=scheme)
        assert page.evaluate("document.documentElement.dataset.theme") == scheme


def test_on_a_phone_no_cell_of_a_table_is_printed_over_the_next(visit):
    for name in ("11_where_memory_goes", "20_one_tensor", "21_rung_6_rehearse"):
        page = visit(f"notebooks/{name}.html", viewport=POCKET)
        firsts = page.locator("article table:has(th:nth-child(4)) tr > :first-child")
        wide = firsts.evaluate_all(
            "all => all.filter((cell) => cell.scrollWidth > cell.clientWidth + 1).length"
        )
        assert wide == 0, name


def test_on_a_phone_the_menu_shows_the_page_the_drawer_closes_and_next_is_whole(visit):
    page = visit("notebooks/13_which_rung.html", viewport=POCKET)
    page.click(".primary-toggle")
    current = page.locator("dialog[open] a.current").last
    page.wait_for_function("[...document.querySelectorAll('dialog[open] a.current')].at(-1)"
                           ".getBoundingClientRect().bottom < innerHeight")  # fmt: skip
    assert current.bounding_box()["y"] > 0
    page.click("dialog[open] .dialog-close")
    page.click(".secondary-toggle")
    parts = page.locator("dialog[open] .toc-entry ul a >> visible=true")  # of sections
    assert parts.count() > 3
    page.click("dialog[open] a[href='#measure-your-own-model']")
    page.wait_for_selector("dialog[open]", state="detached")
    assert page.locator("#measure-your-own-model").bounding_box()["y"] < 844
    for link in page.locator(".prev-next-area > a").all():
        box = link.bounding_box()
        assert box["x"] >= 0
        assert box["x"] + box["width"] <= 390
    name = page.locator(".bd-header-article .site-name")
    assert name.get_attribute("href") == "#"  # it names the page, and leads to its top
    on_top = "([x, y]) => document.elementFromPoint(x, y).closest('.primary-toggle') != null"
    button = page.locator(".primary-toggle").bounding_box()
    right = [button["x"] + button["width"] - 2, button["y"] + button["height"] / 2]
    assert page.evaluate(on_top, right)
    name.click()
    page.wait_for_function("document.querySelector('.site-name').href.endsWith('index.html')")
