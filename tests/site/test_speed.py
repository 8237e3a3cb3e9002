"""What a page weighs and asks for; how long it takes is measured by ``make bench``."""

import re
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest
import yaml
from page_weight import PLAIN
from pages import as_sent
from pygments.formatters import HtmlFormatter
from pygments.styles import get_style_by_name
from pygments.token import Name

ROOT = Path(__file__).resolve().parents[2]
HEAVIEST = 250_000  # bytes over the wire: a quarter of what a page may weigh
REQUESTS = 28

pytestmark = pytest.mark.slow


def loaded(site, name, page):
    """The files that a browser fetches for a page before its reader does anything."""
    links = page.select("link[rel=stylesheet], link[rel=icon], link[rel=preload]")
    links = [link["href"] for link in links]
    links += [tag["src"] for tag in page.select("script[src], img[src]") if not is_lazy(tag)]
    local = [unquote(urlsplit(link).path) for link in links if not urlsplit(link).scheme]
    # The page for dead links has addresses from the top.
    tops = {True: site, False: (site / name).parent}
    files = {(tops[path.startswith("/")] / path.lstrip("/")).resolve() for path in local}
    for sheet in [file for file in files if file.suffix == ".css"]:
        files |= imported(sheet)
    return {site / name, *files}


def is_lazy(tag):
    return tag.get("loading") == "lazy"


def imported(sheet):
    text = sheet.read_text(encoding="utf-8")
    return {
        (sheet.parent / name).resolve()
        for name in re.findall(r"@import [^\"']*[\"'](.*?)[\"']", text)
    }


def test_no_page_is_heavy_over_the_wire_and_none_asks_for_many_files(site, pages):
    sizes, heavy = {}, {}
    for name, page in pages.items():
        files = loaded(site, name, page)
        sizes |= {file: len(as_sent(file)) for file in files - sizes.keys()}
        weight = sum(sizes[file] for file in files)
        if weight > HEAVIEST or len(files) > REQUESTS:
            heavy[name] = f"{weight} bytes in {len(files)} files"
    assert heavy == {}


def test_a_browser_asks_for_the_files_that_were_counted(browser, address, site, pages):
    name = "notebooks/errors_ranks.html"
    page = browser.new_page()
    asked = set()
    page.on("request", lambda request: asked.add(urlsplit(request.url)))
    page.goto(address + name, wait_until="networkidle")
    page.close()
    paths = {(site / unquote(url.path[1:])).resolve() for url in asked if url.scheme == "http"}
    icon = {site / "_static/favicon.svg"}  # a browser without a window does not ask for it
    assert paths | icon == loaded(site, name, pages[name])


def test_nothing_of_the_icon_font_is_on_the_site(site):
    assert [path for path in site.rglob("*") if re.search("awesome|woff|[.]ttf", path.name)] == []
    texts = [*site.glob("_static/**/*.css"), *site.glob("_static/scripts/*.js")]
    own = [path for path in texts if "Font Awesome" in path.read_text(encoding="utf-8")]
    assert own == []
    assert list(site.rglob("*.map")) == []


def test_every_icon_of_the_theme_is_drawn(pages):
    shown = {
        kind
        for page in pages.values()
        for tag in page.select("[class*='fa-']")
        for kind in tag["class"]
        if re.match("fa-(?!solid$|lg$)", kind)
    }
    sheet = (ROOT / "book/_static/torchladder.css").read_text(encoding="utf-8")
    assert len(shown) >= 9
    assert shown <= set(re.findall(r"^\.(fa-[\w-]+) \{ --icon: url", sheet, re.MULTILINE))


def test_names_and_brackets_in_code_are_no_elements_and_neither_are_words(pages):
    for page in pages.values():
        assert page.select("code .pre") == []
        for kind in ("n", "nx", "p", "w"):
            assert page.select(f".highlight [class='{kind}']") == []


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_what_is_no_element_would_look_like_the_rest_of_the_code(theme):
    config = yaml.safe_load((ROOT / "_config.yml").read_text(encoding="utf-8"))
    options = config["sphinx"]["config"]["html_theme_options"]
    style = get_style_by_name(options[f"pygments_{theme}_style"])
    name = style.style_for_token(Name)
    assert not name["bold"] | name["italic"] | name["underline"]
    assert [style.style_for_token(kind) for kind in PLAIN] == [name] * len(PLAIN)
    sheet = HtmlFormatter(style=style).get_style_defs(".highlight")
    assert re.search(rf"^\.highlight {{.* color: #{name['color']} }}$", sheet, re.MULTILINE | re.I)
