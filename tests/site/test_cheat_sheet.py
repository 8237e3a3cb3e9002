"""The cheat sheet: its lines are those of the programs and the clinic; it prints on one page."""

import io
import re

import pypdf
import pytest
from running import ROOT
from test_browser import THEME, THEMES

from torchclinic import errors

OPENED = "book/cheat_sheet.html"
PAGE = (ROOT / "book" / "cheat_sheet.md").read_text(encoding="utf-8")
SECTIONS = dict(re.findall(r"^## (.+?)\n(.*?)(?=^## |\Z)", PAGE, re.M | re.S))
RUNG = re.compile(r"`(\d_\w+\.py)`.*?```python\n(.*?)```", re.S)
ROW = re.compile(r"^\| \[(?P<message>.+)\]\((?P<link>\S+)\) \| (?P<fix>.+) \|$", re.M)


def lines(code):
    return [line.split("  #")[0].strip() for line in code.splitlines() if line.strip()]


def test_every_line_of_a_rung_is_in_its_program():
    rungs = RUNG.findall(SECTIONS["The rungs"])
    assert [name[0] for name, _ in rungs] == list("123456")
    for name, code in rungs:
        if name in ("4_ddp.py", "5_fsdp.py"):  # shorter here; test_code_of_pages.py runs them
            continue
        text = (ROOT / "rungs" / name).read_text(encoding="utf-8")
        program = lines(text.replace("LeNet()", "Net()"))
        assert [line for line in lines(code) if line not in program] == []


def test_the_ten_errors_are_entries_of_the_clinic_with_their_fix():
    rows = list(ROW.finditer(SECTIONS["Ten errors"]))
    assert len(rows) == 10
    for row in rows:
        notebook, name = row["link"].split("#")
        error = errors.catalogue()[name]
        assert notebook == f"../notebooks/{error.page}.ipynb"
        assert row["fix"] == " ".join(error.in_brief[1].split())
        assert row["message"].replace("`", "") in error.message.replace("`", ""), name


@pytest.mark.slow
@pytest.mark.parametrize("theme", THEMES)
def test_the_sheet_prints_on_one_legible_page(opened, theme):
    opened.emulate_media(color_scheme=theme)
    assert opened.evaluate(THEME, theme) == theme
    [sheet] = pypdf.PdfReader(io.BytesIO(opened.pdf(prefer_css_page_size=True))).pages
    sizes = set()

    def visit(text, page, line, font, size):
        if text.strip():  # Chromium shrinks a page whose content is too wide
            sizes.add(round(size * abs(line[3] * page[3]), 1))

    text = " ".join(sheet.extract_text(visitor_text=visit).split())
    for word in ("Cheat sheet", *SECTIONS, "5_fsdp.py", "leave only the printing in the"):
        assert word in text
    assert "Skip to main content" not in text
    assert opened.get_by_role("button", name="Print one A4 page").is_visible()
    assert "Print one" not in text
    assert min(sizes) >= 7  # points
