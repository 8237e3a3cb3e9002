"""What pages tell other programs, in a small book that has an address."""

from urllib.parse import urljoin

import pytest
import yaml
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
    toc = "```{toctree}\nbook/new\n```\n"
    (folder / "index.md").write_text(f"# Small\n\nA page.\n\n{{repository}}`The source`\n\n{toc}")
    (folder / "book/new.md").write_text("# A new page\n\nAnother page.\n")
    own = {name: SETTINGS[name] for name in SETTINGS if name.startswith(("ogp", "sitemap", "notf"))}
    own |= {"html_static_path": [str(ROOT / "book/_static")]}
    own |= {"redirects": {"old/name": "../book/new.html"}}
    own["extensions"] = ["myst_parser", "sphinx_sitemap", "notfound.extension"]
    own["extensions"] += ["sphinxext.opengraph", "sphinx_reredirects", "site_pages"]
    assert sphinx(folder, **own) == (0, "")
    return folder / "_build"


def test_pages_name_their_address_their_preview_and_the_repository(published):
    page = parsed(published / "book/new.html")
    told = {tag["property"]: tag["content"] for tag in page.select("meta[property^='og:']")}
    assert told["og:url"] == f"{SITE}book/new.html"
    assert told["og:title"] == "A new page"
    assert told["og:description"] == "Another page."
    assert (published / told["og:image"].removeprefix(SITE)).is_file()
    links = parsed(published / "index.html").find_all("a", href="https://github.com/someone/book")
    assert "The source" in [link.get_text() for link in links]
    assert f"{SITE}book/new.html" in (published / "sitemap.xml").read_text()


def test_a_page_that_moved_leads_on_and_dead_links_find_the_book_at_any_depth(published):
    assert "../book/new.html" in (published / "old/name.html").read_text()
    page = parsed(published / "404.html")
    dead = f"{SITE}no/such/page/at/all.html"
    targets = {link["href"] for link in page.select("a[href]:not([href^='#'], [href^='http'])")}
    assert targets
    for target in targets:
        address = urljoin(dead, target).partition("#")[0]
        assert (published / address.removeprefix(SITE)).exists(), target
