"""What a page of the site loads, and when a reader with a slow machine can use it.

A page can be used when its last long task has ended: from then on it answers at once
(https://web.dev/articles/tti). The processor is slowed down four times, as for a cheap phone.
"""

import functools
import gzip
import http.server
import sys
import threading
from pathlib import Path
from statistics import median

from results import Result

ROOT = Path(__file__).parents[1]
sys.path.append(str(ROOT / "tools"))
import chromium

SITE = ROOT / "_build/html"
PAGES = ("notebooks/16_where_memory_goes", "notebooks/errors_ranks", "book/errors", "book/index")
COMPRESSED = (".html", ".css", ".js", ".svg", ".json")  # as GitHub Pages does
SLOWER = 4
BYTES, SECONDS = 1e6, 1.5
RUNS, QUICK_RUNS = 7, 3
WATCH = """window.ends = []; new PerformanceObserver((list) => ends.push(
    ...list.getEntries().map(({startTime, duration}) => startTime + duration)
)).observe({type: 'longtask', buffered: true});"""
USABLE = """() => Math.max(...ends,
    performance.getEntriesByName('first-contentful-paint')[0].startTime,
    performance.getEntriesByType('navigation')[0].domContentLoadedEventEnd) / 1000"""


def as_sent(file):
    """A file's bytes as they go over the wire."""
    data = file.read_bytes()
    return gzip.compress(data, 6) if file.suffix in COMPRESSED else data


class Site(http.server.SimpleHTTPRequestHandler):
    """Serves files compressed."""

    protocol_version = "HTTP/1.1"

    def log_message(self, *args):
        pass

    def do_GET(self):
        file = Path(self.translate_path(self.path))
        if not file.is_file():
            self.send_error(404)
            return
        body = as_sent(file)
        self.send_response(200)
        if file.suffix in COMPRESSED:
            self.send_header("Content-Encoding", "gzip")
        self.send_header("Content-Type", self.guess_type(str(file)))
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)


def visit(browser, address):
    """The bytes that a page loads into an empty cache, and after how many seconds it is usable."""
    context = browser.new_context(viewport={"width": 1280, "height": 900})
    page = context.new_page()
    protocol = context.new_cdp_session(page)
    loaded = []
    protocol.send("Network.enable")
    protocol.send("Emulation.setCPUThrottlingRate", {"rate": SLOWER})
    protocol.on("Network.loadingFinished", lambda of: loaded.append(of["encodedDataLength"]))
    page.add_init_script(WATCH)
    page.goto(address, wait_until="networkidle")
    page.wait_for_timeout(1500)
    seconds = page.evaluate(USABLE)
    context.close()
    return sum(loaded), seconds


def measure(full=True):
    """Two results a page: its bytes and its seconds, each as a share of what is allowed."""
    from playwright.sync_api import sync_playwright

    if not SITE.is_dir():
        raise FileNotFoundError(f"{SITE} is not there. Build the site first: make book")
    handler = functools.partial(Site, directory=SITE)
    results = []
    with (
        http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server,
        sync_playwright() as playwright,
    ):
        threading.Thread(target=server.serve_forever, daemon=True).start()
        browser = chromium.launch(playwright)
        for name in PAGES if full else PAGES[::3]:
            address = f"http://127.0.0.1:{server.server_port}/{name}.html"
            visits = [visit(browser, address) for _ in range(RUNS if full else QUICK_RUNS)]
            sizes, seconds = zip(*visits, strict=True)
            results += shares(name.partition("/")[2], sizes, seconds)
        browser.close()
        server.shutdown()
    return results


def shares(name, sizes, seconds):
    of_bytes = [size / BYTES for size in sizes]
    of_seconds = [second / SECONDS for second in seconds]
    kilobytes, middle = median(sizes) / 1e3, median(seconds)
    return [
        Result.of_runs(
            f"What {name} loads at first, as a share of 1 MB",
            of_bytes,
            1,
            at_most=True,
            detail=f"{kilobytes:.0f} kB, compressed",
        ),
        Result.of_runs(
            f"Until {name} can be used, as a share of {SECONDS} s",
            of_seconds,
            1,
            at_most=True,
            detail=f"{middle:.1f} s on a processor slowed down {SLOWER} times",
        ),
    ]
