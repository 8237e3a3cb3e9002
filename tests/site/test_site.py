"""The built site: what a reader's browser gets, with and without a browser to try it in.

The site is `_build/html`, built if it is not there; `TORCHLADDER_SITE` names another folder.
"""

import base64
import functools
import http.server
import importlib.util
import io
import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
import threading
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from urllib.parse import unquote, urldefrag, urlsplit

import nbformat
import pytest
import yaml
from bs4 import BeautifulSoup

ROOT = Path(__file__).resolve().parent.parent
EXTENSIONS = ROOT / "book" / "_ext"
THEMES = ("light", "dark")
DESKTOP, PHONE = 1280, 390


@pytest.fixture(scope="session")
def site():
    folder = os.environ.get("TORCHLADDER_SITE")
    if folder:
        return Path(folder).resolve()
    folder = ROOT / "_build" / "html"
    if not (folder / "index.html").exists():
        build = Path(sys.executable).with_name("jupyter-book")
        command = [build, "build", ".", "-W", "-n", "--keep-going"]
        subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.DEVNULL)
    return folder


@pytest.fixture(scope="session")
def pages(site):
    """Every page, parsed, by its address within the site."""
    files = [path for path in sorted(site.rglob("*.html")) if "_static" not in path.parts]
    return {
        path.relative_to(site).as_posix(): BeautifulSoup(path.read_bytes(), "html.parser")
        for path in files
    }


def contents():
    """What `_toc.yml` lists, as paths without suffix."""
    toc = yaml.safe_load((ROOT / "_toc.yml").read_text(encoding="utf-8"))
    chapters = [chapter["file"] for part in toc["parts"] for chapter in part["chapters"]]
    return [toc["root"], *chapters]


# --- what the files say -------------------------------------------------------------------------


def test_every_notebook_and_page_of_the_book_is_in_the_contents():
    files = [*(ROOT / "notebooks").glob("*.ipynb"), *(ROOT / "book").glob("*.md")]
    there = {path.relative_to(ROOT).with_suffix("").as_posix() for path in files}
    assert sorted(contents()) == sorted(there)


def test_the_site_has_a_page_for_everything_in_the_contents(pages):
    assert [name for name in contents() if f"{name}.html" not in pages] == []


def test_the_entrance_leads_to_the_landing_page(pages):
    link = pages["index.html"].find("a")["href"]
    assert link == "book/index.html"
    assert link in pages["index.html"].find("meta", {"http-equiv": "refresh"})["content"]


def test_every_internal_link_and_anchor_resolves(site, pages):
    anchors = {name: {tag["id"] for tag in page.find_all(id=True)} for name, page in pages.items()}
    broken = []
    for name, page in pages.items():
        targets = [tag[key] for key in ("href", "src") for tag in page.find_all(**{key: True})]
        for target in targets:
            address, anchor = urldefrag(target)
            if urlsplit(address).scheme or address.startswith("//"):
                continue
            path = unquote(urlsplit(address).path)
            file = (site / name).parent / path if path else site / name
            file = file.resolve()
            if not file.is_file():
                broken.append(f"{name}: {target}")
            elif anchor and file.suffix == ".html":
                known = anchors[file.relative_to(site).as_posix()]
                if unquote(anchor) not in known:
                    broken.append(f"{name}: {target}")
    assert broken == []


def test_no_markup_and_no_style_sheet_loads_from_another_host(site, pages):
    loads = {"script": "src", "img": "src", "iframe": "src", "source": "src", "link": "href"}
    remote = [
        f"{name}: {tag}"
        for name, page in pages.items()
        for element, key in loads.items()
        for tag in page.find_all(element)
        if re.match(r"(https?:)?//", tag.get(key, ""))
    ]
    for sheet in site.rglob("*.css"):
        text = sheet.read_text(encoding="utf-8", errors="replace")
        remote += [
            f"{sheet.name}: {url}" for url in re.findall(r"url\(['\"]?(?:https?:)?//.*?\)", text)
        ]
        remote += [
            f"{sheet.name}: {url}" for url in re.findall(r"@import.*?(?:https?:)?//.*", text)
        ]
    assert remote == []


def test_every_picture_has_a_text_alternative(pages):
    without = []
    for name, page in pages.items():
        without += [f"{name}: {img}" for img in page.find_all("img") if not img.get("alt")]
        for figure in page.select("figure:has(svg)"):
            labelled = figure.get("aria-label") or figure.select_one("svg > title")
            if not labelled:
                without.append(f"{name}: {str(figure)[:100]}")
    assert without == []


def test_every_page_has_a_title_and_a_description_of_its_own(pages):
    titles, descriptions = {}, {}
    for name, page in pages.items():
        found = page.find_all("meta", {"name": "description"})
        assert len(found) == 1, f"{name} has {len(found)} descriptions"
        if name != "index.html":
            titles.setdefault(page.title.get_text(strip=True), []).append(name)
            descriptions.setdefault(found[0]["content"].strip(), []).append(name)
    for texts in (titles, descriptions):
        assert "" not in texts
        assert [names for names in texts.values() if len(names) > 1] == []


def test_every_chapter_can_be_downloaded_as_it_is_in_the_repository(site, pages):
    for notebook in (ROOT / "notebooks").glob("*.ipynb"):
        name = f"notebooks/{notebook.stem}.html"
        link = pages[name].select_one(".chapter-buttons > a[download]")
        downloaded = ((site / name).parent / link["href"]).resolve()
        cells = [json.loads(path.read_bytes())["cells"] for path in (notebook, downloaded)]
        assert cells[0] == cells[1], f"{name} offers another notebook"


def test_every_chapter_offers_a_notebook_for_kaggle_that_carries_the_package(site, pages):
    for notebook in (ROOT / "notebooks").glob("*.ipynb"):
        name = f"notebooks/{notebook.stem}.html"
        link = pages[name].select_one(".chapter-panel a[download]")
        assert_is_self_contained((site / name).parent / link["href"])


def assert_is_self_contained(path):
    notebook = nbformat.read(path, as_version=4)
    nbformat.validate(notebook)
    (carried,) = re.findall(r'carried="([\w+/=]{1000,})"', notebook.cells[0].source)
    with tarfile.open(fileobj=io.BytesIO(base64.b64decode(carried))) as archive:
        assert "torchladder/__init__.py" in archive.getnames()


def test_the_footer_names_the_year_and_both_licences(pages):
    for name in contents():
        footer = pages[f"{name}.html"].select_one("footer.bd-footer-content").get_text()
        assert re.search(r"202[6-9]|20[3-9]\d", footer), f"{name}: {footer}"
        assert "MIT" in footer
        assert "CC BY 4.0" in footer


def test_the_search_index_knows_the_words_of_every_error_on_a_page(site):
    from sphinx.search.en import SearchEnglish

    text = (site / "searchindex.js").read_text(encoding="utf-8")
    index = json.loads(text[text.index("(") + 1 : text.rindex(")")])
    english, unknown = SearchEnglish({}), []
    for notebook in (ROOT / "notebooks").glob("*.ipynb"):
        number = index["docnames"].index(f"notebooks/{notebook.stem}")
        for cell in json.loads(notebook.read_bytes())["cells"]:
            for output in cell.get("outputs", []):
                if output["output_type"] != "error":
                    continue
                message = re.sub(r"\x1b\[[\d;]*m", "", f"{output['ename']} {output['evalue']}")
                for word in english.split(message.splitlines()[0]):
                    # As the indexer does it; long words and digits have rules of their own.
                    if not (
                        word.isascii() and word.isalpha() and english.word_filter(word.lower())
                    ):
                        continue
                    stem = english.stem(word.lower())
                    if not english.word_filter(stem):  # "one" becomes "on", which is left out
                        stem = word.lower()
                    # A word of the page's title is kept apart.
                    pages = [index[kind].get(stem, []) for kind in ("terms", "titleterms")]
                    if not any(number in (n if isinstance(n, list) else [n]) for n in pages):
                        unknown.append(f"{notebook.stem}: {word}")
    assert unknown == []


# --- what our own Sphinx extensions do ----------------------------------------------------------


def sphinx(folder, **settings):
    """Build the few files in `folder` as a site of its own; the exit status and the warnings."""
    settings |= {"html_math_renderer": "mathml", "html_theme": "basic"}
    lines = [f"{name} = {value!r}" for name, value in settings.items()]
    (folder / "conf.py").write_text("\n".join(lines))
    build = subprocess.run(
        [sys.executable, "-m", "sphinx", "-q", "-W", "--keep-going", folder, folder / "_build"],
        env=os.environ | {"PYTHONPATH": str(EXTENSIONS)},
        capture_output=True,
        text=True,
    )
    return build.returncode, build.stderr


def test_a_rung_diff_shows_names_signs_and_counts_and_follows_its_files(tmp_path):
    (tmp_path / "one.py").write_text("import torch\n\nx = 1 < 2\n")
    (tmp_path / "two.py").write_text("import torch\n\nx = 2 < 3\ny = 4\n")
    (tmp_path / "index.rst").write_text("A page\n======\n\n.. rung-diff:: one.py two.py\n")
    assert sphinx(tmp_path, extensions=["rung_diff", "mathml"]) == (0, "")
    figure = BeautifulSoup((tmp_path / "_build/index.html").read_bytes(), "html.parser").figure
    assert "one.py" in figure.figcaption.text
    assert "two.py" in figure.figcaption.text
    assert "−1 +2" in figure.figcaption.text
    assert [line.text for line in figure.find_all("del")] == ["− x = 1 < 2\n"]
    assert [line.text for line in figure.find_all("ins")] == ["+ x = 2 < 3\n", "+ y = 4\n"]

    (tmp_path / "two.py").write_text("import torch\n\nx = 1 < 2\nz = 5\n")
    assert sphinx(tmp_path, extensions=["rung_diff", "mathml"]) == (0, "")
    figure = BeautifulSoup((tmp_path / "_build/index.html").read_bytes(), "html.parser").figure
    assert [line.text for line in figure.find_all("ins")] == ["+ z = 5\n"]


def test_a_rung_diff_of_a_missing_file_and_a_broken_formula_fail_the_build(tmp_path):
    (tmp_path / "one.py").write_text("x = 1\n")
    (tmp_path / "index.rst").write_text(
        "A page\n======\n\n.. rung-diff:: one.py gone.py\n\n"
        ":math:`\\nosuchcommand` and :math:`\\frac{1}`\n"
    )
    status, warnings = sphinx(tmp_path, extensions=["rung_diff", "mathml"])
    assert status != 0
    assert "index.rst:4" in warnings
    assert "rung-diff: cannot read gone.py" in warnings
    assert "unknown command \\nosuchcommand" in warnings
    assert "mfrac of 1 parts" in warnings


def test_formulas_become_mathml_and_cells_without_language_info_are_coloured(tmp_path):
    cells = [
        {"cell_type": "markdown", "metadata": {}, "source": "# A page\n\n$\\alpha^2$"},
        {
            "cell_type": "code",
            "metadata": {},
            "source": "for i in range(3):\n    pass",
            "outputs": [],
            "execution_count": 1,
        },
    ]
    notebook = {"cells": cells, "metadata": {}, "nbformat": 4, "nbformat_minor": 4}
    (tmp_path / "index.ipynb").write_text(json.dumps(notebook))
    config = yaml.safe_load((ROOT / "_config.yml").read_text(encoding="utf-8"))["sphinx"]["config"]
    settings = {key: config[key] for key in ("suppress_warnings", "nb_ipywidgets_js")}
    settings |= {"nb_execution_mode": "off", "myst_enable_extensions": ["dollarmath"]}
    extensions = ["myst_nb", "site_pages", "mathml"]
    assert sphinx(tmp_path, extensions=extensions, **settings) == (0, "")
    page = BeautifulSoup((tmp_path / "_build/index.html").read_bytes(), "html.parser")
    assert page.select_one("math msup").text == "α2"
    assert [span.text for span in page.select(".cell_input .k")] == ["for", "pass"]


@pytest.mark.parametrize(
    ("repository", "address"),
    [
        (
            "https://github.com/someone/book",
            "https://github.com/someone/book/blob/gh-pages/kaggle/a",
        ),
        ("https://gitlab.com/someone/book", None),
        ("", None),
    ],
)
def test_kaggle_is_offered_to_import_what_it_can_import(repository, address):
    spec = importlib.util.spec_from_file_location("buttons", EXTENSIONS / "chapter_buttons.py")
    buttons = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(buttons)
    options = {"repository_url": repository} if repository else {}
    config = SimpleNamespace(html_theme_options=options, published_branch="gh-pages")
    link = buttons.import_address(config, "kaggle/a")
    assert link == (address and f"https://kaggle.com/kernels/welcome?src={address}")


# --- what a browser shows -----------------------------------------------------------------------


def find_browser():
    names = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
    return os.environ.get("CHROMIUM") or next(filter(None, map(shutil.which, names)), None)


def without_browser(reason):
    if os.environ.get("CI"):
        pytest.fail(f"{reason}, and CI never goes without")
    pytest.skip(reason)


@pytest.fixture(scope="session")
def address(site):
    class Quiet(http.server.SimpleHTTPRequestHandler):
        def log_message(self, *args):
            pass

    handler = functools.partial(Quiet, directory=site)
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}/"
        server.shutdown()


@pytest.fixture(scope="session")
def browser():
    executable = find_browser()
    if not executable:
        without_browser("no Chromium here: install it, or name one in $CHROMIUM")
    try:
        from playwright.sync_api import sync_playwright
    except ImportError:
        without_browser("playwright is not installed")
    # Root may not use the sandbox. The rest keeps the browser itself from calling home, and
    # answers as if no host but this machine existed.
    flags = [
        "--no-sandbox",
        "--disable-gpu",
        "--disable-quic",
        "--disable-background-networking",
        "--disable-component-update",
        "--disable-sync",
        "--no-first-run",
    ]
    flags.append("--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=executable, args=flags)
        yield browser
        browser.close()


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

# A cell is coloured if some of its text has another colour than the rest.
UNCOLOURED = """() => [...document.querySelectorAll('.cell_input pre')]
    .filter(pre => /[a-z]/i.test(pre.innerText))
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
        const place = span.closest('ins, del, .output, .cell_input, .rung-diff, .highlight');
        const kind = span.className + ' in ' + place?.tagName + ' ' + place?.className;
        if (kinds.has(kind)) span.replaceWith(...span.childNodes);
        kinds.add(kind);
    }
}"""

# Where only colours matter, one element of each way to be nested in elements, classes and styles is
# enough; axe takes long for many. It does not judge what is drawn.
ONE_OF_A_COLOUR = """() => {
    const kinds = new Set(), kept = new Set();
    const kind = e => !e ? '' : [e.tagName, e.getAttribute('class'), e.getAttribute('style'),
        e.tagName == 'TR' && e.rowIndex % 2].join(' ') + '<' + kind(e.parentElement);
    for (const e of document.querySelectorAll('body *:not(svg *)')) {
        if (kinds.has(kind(e))) continue;
        kinds.add(kind(e));
        for (let around = e; around; around = around.parentElement) kept.add(around);
    }
    document.querySelectorAll('body *').forEach(e => kept.has(e) || e.remove());
}"""

# The page hears a little later that the system has another theme.
THEME = """async (theme) => {
    for (let i = 0; i < 50 && document.documentElement.dataset.theme != theme; i++)
        await new Promise(done => setTimeout(done, 20));
    return document.documentElement.dataset.theme;
}"""

# Without preload: false, axe itself asks for style sheets, some of them by wrong addresses.
AXE = """async (options) =>
    (await axe.run(document, {resultTypes: ['violations'], preload: false, ...options})).violations
    .filter(v => ['serious', 'critical'].includes(v.impact))
    .map(v => v.id + ': ' + v.nodes.slice(0, 3).map(n =>
        n.target.join(' ') + ' (' + (n.any[0] || n.all[0] || n.none[0] || {}).message + ')')
        .join('; '))"""
COLOURS = {"runOnly": ["color-contrast"]}
ALL_BUT_COLOURS = {"rules": {"color-contrast": {"enabled": False}}}


@pytest.fixture(scope="session")
def visits(browser, address, pages):
    """Every page in both themes, and all that was seen there."""
    try:
        import axe_playwright_python
    except ImportError:
        without_browser("axe-playwright-python is not installed")
    axe = Path(axe_playwright_python.__file__).with_name("axe.min.js").read_text(encoding="utf-8")
    context = browser.new_context(reduced_motion="reduce")
    visits = []
    for name in pages:
        if name != "index.html":  # the entrance only leads on
            visits += visit(context, address, name, axe)
    context.close()
    return visits


def visit(context, address, name, axe):
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
    for width in (DESKTOP, PHONE):
        page.set_viewport_size({"width": width, "height": 900})
        for seen, theme in zip(visits, THEMES, strict=True):
            page.emulate_media(color_scheme=theme)
            seen.theme = page.evaluate(THEME, theme)
            seen.uncoloured = page.evaluate(UNCOLOURED)
            seen.uncopiable = page.evaluate(UNCOPIABLE)
            seen.widths[width] = page.evaluate("document.documentElement.scrollWidth")
            seen.search_boxes[width] = page.evaluate(SEARCH_BOXES)
    page.set_viewport_size({"width": DESKTOP, "height": 900})
    page.evaluate(ONE_OF_A_KIND)
    page.evaluate(axe)
    others = page.evaluate(AXE, ALL_BUT_COLOURS)  # a theme changes nothing of it
    page.evaluate(ONE_OF_A_COLOUR)
    for seen, theme in zip(visits, THEMES, strict=True):
        page.emulate_media(color_scheme=theme)
        page.evaluate(THEME, theme)
        seen.violations = others + page.evaluate(AXE, COLOURS)
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


def test_searching_for_an_error_message_finds_its_chapter(browser, address):
    page = browser.new_page()
    page.goto(f"{address}search.html?q=Expected+all+tensors+to+be+on+the+same+device")
    page.wait_for_selector("#search-results li a", timeout=10_000)
    page.wait_for_function(
        "!document.querySelector('#search-results h2').innerText.match(/Searching/)"
    )
    found = page.eval_on_selector_all("#search-results li a", "links => links.map(a => a.href)")
    page.close()
    assert any("04_tensors_across_devices" in link for link in found), found


def test_a_click_on_download_gives_the_chapter(browser, address):
    page = browser.new_page()
    page.goto(f"{address}notebooks/03_devices.html")
    with page.expect_download() as download:
        page.get_by_role("link", name="Download", exact=True).click()
    assert download.value.suggested_filename == "03_devices.ipynb"
    given = Path(download.value.path()).read_bytes()
    assert given == (ROOT / "notebooks/03_devices.ipynb").read_bytes()
    page.close()


def test_a_click_on_run_on_kaggle_shows_the_steps_and_gives_the_notebook(browser, address):
    page = browser.new_page()
    page.goto(f"{address}notebooks/03_devices.html")
    steps = page.locator(".chapter-panel li")
    assert not steps.first.is_visible()
    page.get_by_text("Run on Kaggle").click()
    assert [step.is_visible() for step in steps.all()] == [True] * 3
    with page.expect_download() as download:
        steps.first.get_by_role("link").click()
    assert download.value.suggested_filename == "03_devices.ipynb"
    assert_is_self_contained(download.value.path())
    page.close()


def test_run_on_kaggle_needs_neither_script_nor_mouse_nor_server(browser, site):
    context = browser.new_context(
        java_script_enabled=False, viewport={"width": PHONE, "height": 800}
    )
    page = context.new_page()
    page.goto((site / "notebooks/03_devices.html").as_uri())
    page.get_by_text("Run on Kaggle").focus()
    page.keyboard.press("Enter")
    panel = page.locator(".chapter-panel")
    assert panel.is_visible()
    box = panel.bounding_box()
    assert box["x"] >= 0
    assert box["x"] + box["width"] <= PHONE
    page.keyboard.press("Enter")
    assert not panel.is_visible()
    context.close()
