"""The whole book as one PDF, in the file that is named: ``make pdf`` calls this.

Sphinx joins all pages to one, the chapters first, and Chromium prints it, with the titles as the
PDF's outline. Looks are the site's own, with ``book/_static/print.css``.
"""

import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

import yaml

from tools import chromium

ROOT = Path(__file__).resolve().parent.parent
OWN_PAGE = re.compile(r'(?<=href=")(?:\.\./)*index\.html(?=#)')
# The cheat sheet's style is for a sheet of its own.
SHEET = re.compile(r'<link[^>]+/cheat_sheet\.css"[^>]*>')
# Every page of the site, by the anchor that Sphinx gives it. Before its title, the anchor may be at
# the end of the page before.
CONTENTS = """() => {
    const list = document.createElement('nav');
    list.className = 'printed-contents';
    for (const place of document.querySelectorAll('[id^="document-"]')) {
        const title = place.nextElementSibling.querySelector('h2, h3');
        const words = title.innerHTML.replace(/<a.*/s, ''); // without the link to itself
        list.innerHTML += `<a class="printed-${title.localName}" href="#${place.id}">
            <span>${words}</span></a>`;
        title.prepend(place);
    }
    document.querySelector('article section section').before(list);
    const headings = [...document.querySelectorAll('h1, h2, h3, h4, h5, h6')];
    return [[...list.children].map(line => line.hash.slice(1)),
        headings.filter(title => title.checkVisibility()).map(title => title.innerText)];
}"""
NUMBER = """pages => document.querySelectorAll('.printed-contents a').forEach(
    (line, i) => line.dataset.page = pages[i])"""


def paper_order(toc: dict) -> dict:
    """The contents of the site as a book has them: the chapters first, the error clinic last."""
    parts = toc.get("parts", [])
    parts.sort(key=lambda part: ("book/errors" in str(part), "numbered" not in part))
    for part in parts:
        part["chapters"].sort(key=lambda chapter: chapter["file"] == "book/errors")
    return toc


def join_pages(folder: Path) -> Path:
    """One page of the whole book, in `folder`, whose links lead to places in itself."""
    subprocess.run(["jupyter-book", "config", "sphinx", "."], cwd=ROOT, check=True)
    paths = os.pathsep.join(map(str, (ROOT / "book" / "_ext", ROOT / "src")))
    contents = folder / "_toc.yml"
    toc = yaml.safe_load((ROOT / "_toc.yml").read_text(encoding="utf-8"))
    contents.write_text(yaml.safe_dump(paper_order(toc)), encoding="utf-8")
    sphinx = [sys.executable, "-m", "sphinx", "-q", "-b", "singlehtml", ROOT, folder]
    sphinx += ["-D", f"external_toc_path={contents}"]
    subprocess.run(sphinx, env=os.environ | {"PYTHONPATH": paths}, check=True)
    page = folder / "index.html"
    html = OWN_PAGE.sub("", SHEET.sub("", page.read_text(encoding="utf-8")))
    page.write_text(html, encoding="utf-8")
    return page


def print_page(page: Path, pdf: Path) -> None:
    """Print the file `page` to `pdf`: a second time when it is known what is on which page."""
    from playwright.sync_api import sync_playwright
    from pypdf import PdfReader

    with sync_playwright() as playwright:
        browser = chromium.launch(playwright)
        tab = browser.new_page()
        tab.set_default_timeout(600_000)
        tab.goto(page.as_uri())
        tab.emulate_media(media="print")
        tab.evaluate("document.querySelectorAll('details').forEach(fold => fold.open = true)")
        names, titles = tab.evaluate(CONTENTS)
        looks = {"path": pdf, "prefer_css_page_size": True, "print_background": True}
        tab.pdf(**looks)
        book = PdfReader(pdf)
        pages = {page.indirect_reference: number for number, page in enumerate(book.pages, 1)}
        places = [book.named_destinations[f"/{name}"] for name in names]
        tab.evaluate(NUMBER, [pages[place.page] for place in places])
        tab.pdf(outline=True, tagged=True, **looks)
        browser.close()
    name_outline(pdf, titles)


def name_outline(pdf: Path, titles: list[str]) -> None:
    """Chromium doubles or joins words of a title that stands on several lines: write it again."""
    from pypdf import PdfWriter
    from pypdf.generic import NameObject, TextStringObject

    def entries(entry):
        while entry:
            yield entry.get_object()
            yield from entries(entry.get_object().get("/First"))
            entry = entry.get_object().get("/Next")

    book = PdfWriter(clone_from=pdf)
    outline = entries(book.get_outline_root()["/First"])
    for entry, title in zip(outline, titles, strict=True):
        entry[NameObject("/Title")] = TextStringObject(title)
    book.write(pdf)


def main(pdf: Path) -> None:
    pdf.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        print_page(join_pages(Path(folder)), pdf)
    print(f"{pdf}: {pdf.stat().st_size / 1e6:.1f} MB")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
