"""What pages tell other programs, in a small book that has an address."""

from urllib.parse import urljoin

import nbformat
import pytest
import yaml
from nbformat.v4 import new_markdown_cell, new_notebook
from running import ROOT, parsed, sphinx

SETTINGS = yaml.safe_load((ROOT / "_config.yml").read_text(encoding="utf-8"))["sphinx"]["config"]
SITE = "https://someone.example/book/"
PROJECT = f"""
[project]
name = "small"
[project.urls]
Repository = "https://github.com/someone/book/"
Documentation = "{SITE}"
"""

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def published(tmp_path_factory):
    folder = tmp_path_factory.mktemp("published")
    (folder / "book").mkdir()
    (folder / "pyproject.toml").write_text(PROJECT)
    (folder / "notebooks").mkdir()
    ours = new_notebook(cells=[new_markdown_cell("# Ours\n\nA notebook of another book.")])
    nbformat.write(ours, folder / "notebooks/01_ours.ipynb")
    toc = "```{toctree}\nbook/new\nnotebooks/01_ours\n```\n"
    head = "---\nmyst:\n  html_meta:\n    description: Of two pages\n---\n\n# Small\n\nA page.\n\n"
    (folder / "index.md").write_text(f"{head}{{repository}}`The source`\n\n{toc}")
    (folder / "book/new.md").write_text("# A new page\n\nAnother page.\n")
    own = {name: SETTINGS[name] for name in SETTINGS if name.startswith(("ogp", "sitemap", "notf"))}
    own |= {"html_title": "A small book", "html_static_path": [str(ROOT / "book/_static")]}
    own |= {"redirects": {"old/name": "../book/new.html"}}
    own |= {"templates_path": [str(ROOT / "book/_templates")]}
    own["extensions"] = ["myst_nb", "sphinx_sitemap", "notfound.extension"]
    own["extensions"] += ["sphinxext.opengraph", "sphinx_reredirects", "book._ext.addresses"]
    names = ("descriptions", "recorded_runs", "chapter_buttons", "error_clinic", "search")
    own["extensions"] += [f"book._ext.{name}" for name in names]
    assert sphinx(folder, **own) == (0, "")
    return folder / "_build"


def test_pages_name_their_address_their_preview_and_the_repository(published):
    page = parsed(published / "book/new.html")
    told = {tag["property"]: tag["content"] for tag in page.select("meta[property^='og:']")}
    assert told["og:site_name"] == "A small book"
    assert told["og:url"] == f"{SITE}book/new.html"
    assert told["og:title"] == "A new page"
    assert told["og:description"] == "Another page."
    assert (published / told["og:image"].removeprefix(SITE)).is_file()
    links = parsed(published / "index.html").find_all("a", href="https://github.com/someone/book")
    assert "The source" in [link.get_text() for link in links]
    assert f"{SITE}book/new.html" in (published / "sitemap.xml").read_text()


def test_llms_txt_names_the_book_and_each_of_its_pages(published):
    links = ["- [Small](index.html): Of two pages", "- [A new page](book/new.html)"]
    lines = ["# A small book", "> Of two pages", "", *links, "- [Ours](notebooks/01_ours.html)"]
    assert (published / "llms.txt").read_text().splitlines() == lines


def test_a_book_without_our_pages_has_nothing_that_leads_to_them(published):
    page = parsed(published / "notebooks/01_ours.html")
    links = {link["href"].partition("#")[0] for link in page.select("article a[href]")}
    assert links > {""}
    assert [link for link in links if not (published / "notebooks" / link).exists()] == []
    assert not page.select(".as-run-on, .rungs, .chapter-panel")
    assert not (published / "_static/error_rules.js").exists()


def test_a_page_that_moved_leads_on_and_dead_links_find_the_book_at_any_depth(published):
    assert "../book/new.html" in (published / "old/name.html").read_text()
    page = parsed(published / "404.html")
    assert page.select_one("article form")["action"] == "/book/search.html"
    dead = f"{SITE}no/such/page/at/all.html"
    targets = {link["href"] for link in page.select("a[href]:not([href^='#'], [href^='http'])")}
    assert targets
    for target in targets:
        address = urljoin(dead, target).partition("#")[0]
        assert (published / address.removeprefix(SITE)).exists(), target
