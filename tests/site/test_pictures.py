"""Drawings load nothing and follow the theme; test_pages.py reads what they say that they show."""

from pathlib import Path
from xml.etree import ElementTree

ROOT = Path(__file__).resolve().parents[2]
FIGURES = sorted((ROOT / "book/figures").glob("*.svg"))


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
