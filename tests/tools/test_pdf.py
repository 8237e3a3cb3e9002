"""The PDF of the whole book: what a reader finds in it."""

import pdf
import pytest
from pypdf import PdfReader


def titles(outline):
    for entry in outline:
        yield from titles(entry) if isinstance(entry, list) else [" ".join(entry.title.split())]


@pytest.mark.long
def test_the_pdf_has_every_chapter_in_its_outline_and_its_links_lead_to_places_in_it(tmp_path):
    pdf.main(tmp_path / "book.pdf")
    book = PdfReader(tmp_path / "book.pdf")
    outline = " | ".join(titles(book.outline))
    for words in ("Save a tensor", "Train on one GPU", "Glossary", "Will it fit"):
        assert words in outline
    places = {name.lstrip("/") for name in book.named_destinations}
    notes = [note.get_object() for page in book.pages for note in page.get("/Annots", ())]
    inside = {str(note["/Dest"]).lstrip("/") for note in notes if "/Dest" in note}
    assert len(inside) > 200
    assert inside <= places
    assert not [n for n in notes if str(n.get("/A", {}).get("/URI", "")).startswith("file:")]
