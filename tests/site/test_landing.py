"""The landing page: what it says is what the repository holds, and it leads there in few clicks."""

import json
import re
from pathlib import Path

import landing
import pytest
from bs4 import BeautifulSoup

from torchclinic import errors

ROOT = Path(__file__).resolve().parents[2]
OPENED = "book/index.html"
RUNGS = ["05_rung_1_cpu", "06_rung_2_one_gpu", "08_rung_3_data_parallel"]
RUNGS += ["09_rung_4_distributed", "17_rung_5_fsdp"]
LOG = """[rank0]: Traceback (most recent call last):
[rank0]: RuntimeError: Error(s) in loading state_dict for Linear:
\tMissing key(s) in state_dict: "weight", "bias".
\tUnexpected key(s) in state_dict: "module.weight", "module.bias".
"""


@pytest.fixture(scope="module")
def markup(site):
    return BeautifulSoup((site / OPENED).read_bytes(), "html.parser")


# --- numbers -------------------------------------------------------------------------------------


def test_no_number_in_the_ladder_is_typed_in():
    text = (ROOT / "book/index.md").read_text(encoding="utf-8")
    ladder = text[text.index("{.ladder}") : text.index("## From one GPU")]
    read = re.sub(r"\{[\w-]+\}`[^`]*`|\]\([^)]*\)", "", ladder)
    names = re.sub(r"[Rr]ungs? \d|GPU [01]|chapter \d+", "", read)
    assert re.findall(r"\d+", names) == []


def test_added_lines_are_those_of_the_diffs():
    assert landing.added(ROOT, "2_gpu.py 3_dp.py")[1] == "2"
    assert landing.added(ROOT, "2_gpu.py 2_gpu.py")[1] == "0"


def test_an_output_or_a_result_that_is_gone_is_no_number():
    with pytest.raises(ValueError, match="no output of 05_rung_1_cpu has"):
        landing.stored(ROOT, r"05_rung_1_cpu never printed ([\d.]+)")
    with pytest.raises(ValueError, match="unpack"):
        landing.share(ROOT, "rungs never measured")
    with pytest.raises(ValueError, match="cannot count rungs"):
        landing.count(ROOT, "rungs")


@pytest.mark.slow
def test_the_ladder_shows_the_measured_share_and_names_its_machine(markup):
    results = json.loads((ROOT / "benchmarks/results.json").read_text())["rungs"]
    what = "DDP on two ranks, 64 images each, as a share of the ceiling"
    (ratio,) = (result["ratio"] for result in results["results"] if result["what"] == what)
    rung = markup.select(".ladder > li")[1].get_text(" ")
    assert f"{100 * ratio:.0f}\u00a0%" in rung
    notes = " ".join(note.get_text(" ") for note in markup.select(".ladder-note"))
    assert results["machine"]["CPU"] in notes
    assert results["machine"]["date"] in notes


@pytest.mark.slow
def test_the_error_that_is_shown_has_the_answer_of_the_error_clinic(markup):
    log = markup.select_one(".highlight-ipython-error pre").get_text()
    error = errors.find(log)[0].error
    link = markup.select_one(".explained a")
    assert link["href"] == f"../notebooks/{error.page}.html#{error.id}"


def test_who_copies_dataparallel_from_the_page_reads_that_pytorch_recommends_another():
    text = (ROOT / "book/index.md").read_text(encoding="utf-8")
    below = text[text.index("{changes} 2_gpu.py 3_dp.py") : text.index("## Paste an error")]
    assert re.search(r"PyTorch\s+\[recommends rung 4\]", below)


# --- in a browser --------------------------------------------------------------------------------


@pytest.fixture
def page(opened):
    opened.goto(opened.address)
    return opened


@pytest.mark.slow
@pytest.mark.parametrize("chapter", RUNGS)
def test_a_click_anywhere_on_a_rung_opens_its_chapter(page, chapter):
    rung = page.locator(".ladder > li").nth(len(RUNGS) - 1 - RUNGS.index(chapter))
    box = rung.bounding_box()
    x = {"06_rung_2_one_gpu": 10}.get(chapter, box["width"] - 5)  # on the drawing, beside the text
    rung.click(position={"x": x, "y": box["height"] - 5}, no_wait_after=True)
    page.wait_for_url(f"**/notebooks/{chapter}.html")


@pytest.mark.slow
def test_the_keyboard_climbs_down_the_ladder_and_a_screen_reader_hears_its_rungs(page):
    page.get_by_role("link", name="Start with chapter 1").focus()
    heard = []
    for _ in RUNGS:
        page.keyboard.press("Tab")
        heard.append(page.evaluate("document.activeElement.innerText"))
        outline = "getComputedStyle(document.activeElement, '::after').outlineStyle"
        assert page.evaluate(outline) == "solid"
    assert [name[:6] for name in heard] == [f"Rung {number}" for number in (5, 4, 3, 2, 1)]
    page.keyboard.press("Enter")
    page.wait_for_url("**/05_rung_1_cpu.html")


@pytest.mark.slow
def test_from_the_landing_page_a_pasted_error_has_its_fix_in_two_clicks(page):
    page.get_by_role("link", name="I have an error").first.click()
    page.locator("#log").click()
    page.keyboard.insert_text(LOG)
    fix = errors.first_sentence(errors.catalogue()["module-prefix"].fix)
    words = re.sub(r"`|\[|\]\([^)]*\)", "", fix)
    answer = page.locator(".match").first
    answer.wait_for()
    assert words in answer.inner_text()


@pytest.mark.slow
def test_from_the_landing_page_a_chapter_for_kaggle_is_three_clicks_away(browser, address):
    page = browser.new_page()
    page.goto(f"{address}{OPENED}")  # a browser downloads nothing from a file
    page.get_by_role("link", name="Start with chapter 1").click()
    page.get_by_text("Run on Kaggle").click()
    link = page.locator(".chapter-panel a").first
    with page.expect_download() as download:
        link.click()
    assert download.value.suggested_filename == "01_tensors_on_disk.ipynb"
    page.close()


@pytest.mark.slow
def test_the_buttons_are_on_the_first_screen_of_a_phone(page):
    page.set_viewport_size({"width": 390, "height": 844})
    for name in ("I have an error", "Start with chapter 1"):
        box = page.get_by_role("link", name=name).first.bounding_box()
        assert box["y"] + box["height"] < 844
    page.set_viewport_size({"width": 1280, "height": 900})
