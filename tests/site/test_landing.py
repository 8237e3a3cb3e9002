"""The landing page: what it says is what the repository holds, and it leads there in few clicks."""

from pathlib import Path

import landing
import pytest
from bs4 import BeautifulSoup

from torchclinic import errors, will_it_fit

ROOT = Path(__file__).resolve().parents[2]
OPENED = "book/index.html"
RUNGS = ["05_rung_1_cpu", "06_rung_2_one_gpu", "08_rung_3_data_parallel"]
RUNGS += ["09_rung_4_distributed", "12_rung_5_fsdp", "13_rung_6_rehearse"]


def test_the_ladder_is_calculated_as_the_calculator_does():
    """1.5 billion numbers of 16 bytes, one more set of gradients, half of all on each of two."""
    rungs = [*will_it_fit.RUNGS, "hsdp"]
    gigabytes = {rung: landing.needs(rung).gigabytes for rung in rungs}
    assert gigabytes["gpu"] == pytest.approx(26.2, abs=0.05)
    assert gigabytes["ddp"] == pytest.approx(31.2, abs=0.05)
    assert gigabytes["fsdp"] == gigabytes["hsdp"] == pytest.approx(13.3, abs=0.05)
    seconds = {rung: landing.needs(rung).seconds for rung in rungs}
    assert seconds["ddp"] == pytest.approx(1.091 / 2 + 0.394 - 0.273, abs=0.001)
    assert seconds["dp"] == pytest.approx(1.091 / 2 + 2 * 0.394, abs=0.001)
    between = 2 * 1.5575e9 / 6.25e9  # half of the gradients, in each direction; two machines
    assert seconds["hsdp"] == pytest.approx((seconds["fsdp"] + between) / 2, abs=0.001)
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
def test_each_rung_shows_its_program_marks_what_it_adds_and_leads_to_its_chapter(opened):
    opened.goto(opened.address)
    opened.get_by_role("radio", name="DDP").focus()
    for number in (5, 6, 1, 2, 3):
        opened.keyboard.press("ArrowDown")
        panel = opened.locator(".rung-panel:visible")
        assert panel.count() == 1
        assert RUNGS[number - 1] in panel.locator("a").get_attribute("href")
        added = panel.locator("mark:visible").all_inner_texts()
        assert bool(added) == (number > 1)
    assert [line for line in added if "DataParallel(model)" in line]
    opened.get_by_label("Compare with rung 1").check()
    since_first = opened.locator(".rung-panel:visible mark:visible").all_inner_texts()
    assert set(added) < set(since_first)
    assert [line for line in since_first if "LeNet().to(device)" in line]
    opened.get_by_label("Compare with rung 1").uncheck()


@pytest.mark.slow
def test_the_buttons_are_on_the_first_screen_of_a_phone(opened):
    opened.goto(opened.address)
    opened.set_viewport_size({"width": 390, "height": 844})
    for name in ("I have an error", "Climb the ladder"):
        box = opened.get_by_role("link", name=name).first.bounding_box()
        assert box["y"] + box["height"] < 844
    opened.set_viewport_size({"width": 1280, "height": 900})
