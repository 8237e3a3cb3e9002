"""The whole book as one PDF: ``make pdf`` writes ``_build/the-device-ladder.pdf``.

Sphinx joins all pages to one, and Chromium prints it, with the titles as the PDF's outline. Looks
are the site's own, with ``book/_static/print.css``.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

import chromium

ROOT = Path(__file__).resolve().parent.parent
OWN_PAGE = re.compile(r'(?<=href=")(?:\.\./)*book/index\.html(?=#)')
# The cheat sheet's style is for a sheet of its own.
SHEET = re.compile(r'<link[^>]+/cheat_sheet\.css"[^>]*>')


def join_pages(folder: Path) -> Path:
    """One page of the whole book, in `folder`, whose links lead to places in itself."""
    subprocess.run(["jupyter-book", "config", "sphinx", "."], cwd=ROOT, check=True)
    paths = os.pathsep.join(map(str, (ROOT / "book" / "_ext", ROOT / "src")))
    sphinx = [sys.executable, "-m", "sphinx", "-q", "-b", "singlehtml", ROOT, folder]
    subprocess.run(sphinx, env=os.environ | {"PYTHONPATH": paths}, check=True)
    page = folder / "book" / "index.html"
    html = OWN_PAGE.sub("", SHEET.sub("", page.read_text(encoding="utf-8")))
    # Sphinx takes the page to be at the top.
    page.write_text(html.replace('="_static/', '="../_static/'), encoding="utf-8")
    return page


def print_page(page: Path, pdf: Path) -> None:
    """Print the file `page` to `pdf`, with all that is folded open."""
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = chromium.launch(playwright)
        tab = browser.new_page()
        tab.set_default_timeout(600_000)
        tab.goto(page.as_uri())
        tab.evaluate("document.querySelectorAll('details').forEach(fold => fold.open = true)")
        tab.pdf(
            path=pdf, prefer_css_page_size=True, print_background=True, outline=True, tagged=True
        )
        browser.close()


def main(pdf: Path) -> None:
    pdf.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        print_page(join_pages(Path(folder)), pdf)
    print(f"{pdf}: {pdf.stat().st_size / 1e6:.1f} MB")


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else ROOT / "_build" / "the-device-ladder.pdf")
