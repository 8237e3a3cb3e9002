"""The PDF of the whole book: what a reader finds in it."""

import re
import unicodedata

import pytest
from pypdf import PdfReader
from running import ROOT

from tools import pdf
from torchclinic import errors


def titles(outline):
    for entry in outline:
        yield from titles(entry) if isinstance(entry, list) else [" ".join(entry.title.split())]


def words(page):
    return " ".join(unicodedata.normalize("NFKC", page.extract_text()).split())  # no ligatures


@pytest.mark.long
def test_the_pdf_has_a_books_contents_and_outline_and_its_links_lead_to_places_in_it(tmp_path):
    pdf.main(tmp_path / "book.pdf")
    book = PdfReader(tmp_path / "book.pdf")
    entries = [entry for entry in book.outline[1] if not isinstance(entry, list)]
    pages = dict(zip(titles(entries), map(book.get_destination_page_number, entries), strict=True))
    chapters = [title for title in pages if title[:2].isdigit()]
    assert len(chapters) == len([*ROOT.glob("notebooks/[0-9]*.ipynb")])
    contents = words(book.pages[0])
    for title in (*chapters, "Glossary", "Set up", "I have an error"):
        assert f"{title} {pages[title] + 1}" in contents
        assert title in words(book.pages[pages[title]])
    assert sorted(pages.values()) == [*pages.values()]
    assert min(chapters, key=pages.get) == chapters[0] < "02"
    assert [*pages][-1] == "I have an error"
    messages = [" ".join(error.message.split()) for error in errors.catalogue().values()]
    quoted = {text[1:-1] for text in messages if re.fullmatch("`[^`]*`", text)}
    assert len(quoted) > 100
    assert quoted <= {*titles(book.outline)}
    places = {name.lstrip("/") for name in book.named_destinations}
    notes = [note.get_object() for page in book.pages for note in page.get("/Annots", ())]
    inside = {str(note["/Dest"]).lstrip("/") for note in notes if "/Dest" in note}
    assert len(inside) > 200
    assert inside <= places
    assert not [n for n in notes if str(n.get("/A", {}).get("/URI", "")).startswith("file:")]
