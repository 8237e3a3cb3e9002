"""Drawings load nothing, follow the theme and say what they show; so do the charts of cells."""

import json
import re
from html import unescape
from pathlib import Path
from xml.etree import ElementTree

ROOT = Path(__file__).resolve().parents[2]
FIGURES = sorted((ROOT / "book/figures").glob("*.svg"))
PICTURE = re.compile(r"!\[((?:[^\[\]]|\[[^\[\]]*\])*)\]\(([\w./-]+\.svg)\)")


def test_a_drawing_brings_no_script_and_loads_nothing():
    for path in FIGURES:
        for element in ElementTree.fromstring(path.read_bytes()).iter():
            assert element.tag.rpartition("}")[2] not in {"script", "foreignObject", "image", "a"}
            for name, value in element.attrib.items():
                assert not name.startswith("on"), path.name
                assert value.startswith("#") or not name.endswith("href"), path.name


def test_words_of_a_drawing_have_the_colour_of_the_pages_text():
    for path in FIGURES:
        for text in ElementTree.fromstring(path.read_bytes()).iter("{*}text"):
            assert text.get("fill", "currentColor") == "currentColor", (path.name, text.text)


def test_words_of_a_drawing_are_at_least_11_pixels_high_on_a_phone():
    for path in FIGURES:
        drawing = path.read_text(encoding="utf-8")
        width = float(re.search(r'viewBox="\S+ \S+ (\S+) ', drawing)[1])
        smallest = min(map(float, re.findall(r'font-size="([\d.]+)"', drawing)))
        assert smallest * 358 / width > 11, path.name


def pages():
    """Every page that readers see, by its path, as Markdown."""
    for path in sorted((ROOT / "book").glob("*.md")):
        yield path, path.read_text(encoding="utf-8")
    for path in sorted((ROOT / "notebooks").glob("*.ipynb")):
        cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
        yield path, "\n".join("".join(c["source"]) for c in cells if c["cell_type"] == "markdown")


def test_every_drawing_on_a_page_is_there_and_says_in_a_sentence_what_it_shows():
    for page, text in pages():
        for alt, target in PICTURE.findall(text):
            assert (page.parent / target).exists(), (page.name, target)
            assert len(alt.split()) >= 6, (page.name, alt)
            assert alt.endswith("."), (page.name, alt)


def test_every_chart_says_what_it_shows():
    for path in sorted((ROOT / "notebooks").glob("*.ipynb")):
        for cell in json.loads(path.read_text(encoding="utf-8"))["cells"]:
            for output in cell.get("outputs", []):
                page = "".join(output.get("data", {}).get("text/html", ""))
                if page.startswith("<figure"):
                    alt = unescape(re.search('aria-label="([^"]*)"', page)[1])
                    assert len(alt.split()) >= 8, (path.name, alt)
                    assert alt.endswith("."), (path.name, alt)
