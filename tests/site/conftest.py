"""The site of the sources as they are: built from scratch, or just now by ``make test-site``."""

import contextlib
import functools
import http.server
import json
import os
import sys
import threading
from collections.abc import Mapping
from pathlib import Path

import pytest
from running import ROOT, parsed, ran

from tools import chromium

LIMIT = 300_000  # milliseconds; ends what hangs, and says nothing about what is merely slow


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items):
    for item in items:
        if "site" in getattr(item, "fixturenames", ()):
            item.add_marker(pytest.mark.slow)


@pytest.fixture(scope="session")
def site(tmp_path_factory):
    if folder := os.environ.get("TORCHLADDER_SITE"):
        return Path(folder).resolve()
    folder = tmp_path_factory.mktemp("site")
    tool = Path(sys.executable).with_name("jupyter-book")
    options = ["--path-output", folder, "-W", "-n", "--keep-going", "--quiet"]
    ran(tool, "build", ROOT, *options, cwd=ROOT)
    return folder / "_build" / "html"


class Pages(Mapping):
    """Every page by its address within the site, parsed when it is first asked for."""

    def __init__(self, site):
        self.site = site
        files = [path for path in sorted(site.rglob("*.html")) if "_static" not in path.parts]
        self.parsed = dict.fromkeys(path.relative_to(site).as_posix() for path in files)

    def __getitem__(self, name):
        self.parsed[name] = self.parsed[name] or parsed(self.site / name)
        return self.parsed[name]

    def __iter__(self):
        return iter(self.parsed)

    def __len__(self):
        return len(self.parsed)


@pytest.fixture(scope="session")
def pages(site):
    return Pages(site)


@pytest.fixture(scope="session")
def index(site):
    """For each page that can be found its address, its title and its sections."""
    text = (site / "_static/search_index.js").read_text(encoding="utf-8")
    return json.loads(text.removeprefix("const searchIndex = ").rstrip(";\n"))["pages"]


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
    if not chromium.find():
        without_browser("no Chromium here: install it, or name one in $CHROMIUM")
    try:
        from playwright.sync_api import sync_playwright
    except ImportError:
        without_browser("playwright is not installed")
    with sync_playwright() as playwright:
        browser = chromium.launch(playwright)
        yield browser
        browser.close()


@pytest.fixture
def visit(browser, address):
    """Opens a page by its address within the site, in a window of its own that ends with the test.

    What is asked for by an address like `without` does not come.
    """
    with contextlib.ExitStack() as windows:

        def visit(name, without="no such file", **options):
            window = windows.enter_context(browser.new_context(**options))
            window.set_default_timeout(LIMIT)
            page = window.new_page()
            page.route(without, lambda route: route.abort())
            page.goto(address + name)
            return page

        yield visit


@pytest.fixture(scope="module")
def opened(browser, site, request):
    """A module's page as a file on the disk, opened once; what it asks for and what goes wrong."""
    page = browser.new_page(viewport={"width": 1280, "height": 900}, reduced_motion="reduce")
    page.set_default_timeout(LIMIT)
    page.asked, page.errors = [], []
    page.on("request", lambda request: page.asked.append(request.url))
    page.on("pageerror", lambda error: page.errors.append(str(error)))
    page.address = (site / request.module.OPENED).as_uri()
    page.goto(page.address)
    yield page
    page.close()


@pytest.fixture(scope="session")
def axe():
    """The script that checks a page for what keeps readers out."""
    try:
        import axe_playwright_python
    except ImportError:
        without_browser("axe-playwright-python is not installed")
    return Path(axe_playwright_python.__file__).with_name("axe.min.js").read_text(encoding="utf-8")
