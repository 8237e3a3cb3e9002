"""The landing page: what it says is what the repository holds, and it leads there in few clicks."""

import re
from pathlib import Path

import landing
import pytest
from bs4 import BeautifulSoup

from torchclinic import errors

ROOT = Path(__file__).resolve().parents[2]
OPENED = "book/index.html"
RUNGS = ["05_rung_1_cpu", "06_rung_2_one_gpu", "08_rung_3_data_parallel"]
RUNGS += ["09_rung_4_distributed", "12_rung_5_fsdp"]


def test_no_number_in_the_ladder_is_typed_in():
    text = (ROOT / "book/index.md").read_text(encoding="utf-8")
    ladder = text[text.index("{.ladder}") : text.index("## From one GPU")]
    read = re.sub(r"\{[\w-]+\}`[^`]*`|\]\([^)]*\)", "", ladder)
    names = re.sub(r"[Rr]ungs? \d|GPU [01]|chapter \d+", "", read)
    assert re.findall(r"\d+", names) == []


def test_added_lines_are_those_of_the_diffs_and_what_is_gone_is_no_number():
    assert landing.added(ROOT, "2_gpu.py 3_dp.py")[1] == "2"
    assert landing.added(ROOT, "2_gpu.py 2_gpu.py")[1] == "0"
    with pytest.raises(ValueError, match="no output of 05_rung_1_cpu has"):
        landing.stored(ROOT, r"05_rung_1_cpu never printed ([\d.]+)")
    with pytest.raises(ValueError, match="cannot count rungs"):
        landing.count(ROOT, "rungs")


@pytest.mark.slow
def test_the_error_that_is_shown_has_the_answer_of_the_error_clinic(site):
    markup = BeautifulSoup((site / OPENED).read_bytes(), "html.parser")
    log = markup.select_one(".highlight-ipython-error pre").get_text()
    error = errors.find(log)[0].error
    link = markup.select_one(".explained a")
    assert link["href"] == f"../notebooks/{error.page}.html#{error.id}"


@pytest.mark.slow
def test_a_click_anywhere_on_a_rung_opens_its_chapter_and_so_does_the_keyboard(opened):
    opened.goto(opened.address)
    opened.get_by_role("link", name="Start with chapter 1").focus()
    heard = []
    for _ in RUNGS:
        opened.keyboard.press("Tab")
        heard.append(opened.evaluate("document.activeElement.innerText")[:6])
        outline = "getComputedStyle(document.activeElement, '::after').outlineStyle"
        assert opened.evaluate(outline) == "solid"
    assert heard == [f"Rung {number}" for number in (5, 4, 3, 2, 1)]
    opened.keyboard.press("Enter")
    opened.wait_for_url("**/05_rung_1_cpu.html")
    for number, chapter in enumerate(reversed(RUNGS)):
        opened.goto(opened.address)
        rung = opened.locator(".ladder > li").nth(number)
        box = rung.bounding_box()
        rung.click(position={"x": 10, "y": box["height"] - 5}, no_wait_after=True)  # the drawing
        opened.wait_for_url(f"**/notebooks/{chapter}.html")


@pytest.mark.slow
def test_the_buttons_are_on_the_first_screen_of_a_phone(opened):
    opened.goto(opened.address)
    opened.set_viewport_size({"width": 390, "height": 844})
    for name in ("I have an error", "Start with chapter 1"):
        box = opened.get_by_role("link", name=name).first.bounding_box()
        assert box["y"] + box["height"] < 844
    opened.set_viewport_size({"width": 1280, "height": 900})
