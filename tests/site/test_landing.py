"""The landing page: what it says is what the repository holds, and it leads there in few clicks."""

import gzip
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest
from running import ROOT
from test_browser import PHONE

from book._ext import landing

OPENED = "index.html"
RUNGS = ["05_rung_1_cpu", "06_rung_2_one_gpu", "08_rung_3_data_parallel"]
RUNGS += ["09_rung_4_distributed", "12_rung_5_fsdp", "21_rung_6_rehearse"]


def test_the_ladder_says_what_the_formulas_give():
    """GPT-2 XL on rung 4: 4 + 4 + 8 bytes a parameter, activations, and gradients over NVLink."""
    nbytes, seconds = landing.needs("ddp")
    assert 31e9 < nbytes < 32e9
    flops = 16 * 1024 * (8 * 1.558e9 + 16 * 48 * 1600 * 1024)  # with attention's, and once more
    computing, exchange = flops / (0.58 * 312e12) / 8, 2 * 7 / 8 * 4 * 1.558e9 / 200e9
    assert abs(seconds - (computing + exchange)) < 0.01
    sharded, alone = landing.needs("fsdp"), landing.needs("gpu")
    assert sharded[0] < alone[0] / 6
    assert landing.needs("dp")[1] > seconds
    assert alone[1] > seconds > landing.needs("hsdp")[1]
    assert seconds == pytest.approx(sharded[1], rel=1e-3)


@pytest.mark.slow
def test_a_log_that_is_pasted_is_answered_on_the_page_of_the_error_clinic(opened):
    opened.goto(opened.address)
    opened.fill("#paste", "ValueError: optimizer got an empty parameter list")  # as if typed
    assert opened.url == opened.address
    opened.get_by_role("button", name="Explain").click()
    opened.wait_for_selector("#found a[href$='errors_training.html#empty-parameters']")
    assert opened.input_value("#log").startswith("ValueError")


@pytest.mark.slow
def test_a_long_log_is_taken_to_the_clinic_without_being_shown(opened):
    opened.goto(opened.address)
    opened.focus("#paste")
    error = "ValueError: optimizer got an empty parameter list\n"
    opened.keyboard.insert_text(error + "step 1 loss 0.5\n" * 100_000)
    opened.wait_for_selector("#found a[href$='errors_training.html#empty-parameters']")
    assert opened.url.endswith("book/errors.html#log-says")
    assert opened.evaluate("window.name") == ""
    opened.go_back()
    assert opened.input_value("#paste") == ""
    assert opened.errors == []


@pytest.mark.slow
def test_each_rung_shows_its_program_marks_what_it_adds_and_leads_to_its_chapter(opened):
    opened.goto(opened.address)
    opened.get_by_role("radio", name="DDP").focus()
    for number in (5, 6, 1, 2, 3):
        opened.keyboard.press("ArrowUp")  # to the rung above; the highest leads to the lowest
        panel = opened.locator(".rung-panel:visible")
        assert panel.count() == 1
        assert RUNGS[number - 1] in panel.locator("a").get_attribute("href")
        added = panel.locator("mark:visible").all_inner_texts()
        assert bool(added) == (number > 1)
        in_sight = "mark => mark.offsetTop - mark.closest('pre').scrollTop"
        assert not added or 0 <= panel.locator("mark").first.evaluate(in_sight) < 100
    assert [line for line in added if "DataParallel(model)" in line]


@pytest.mark.slow
def test_the_stairs_say_what_the_ladder_says_and_lead_to_the_chapters(pages):
    steps = pages[OPENED].select(".steps li")
    links = [step.a["href"] for step in steps]
    assert [link.removesuffix(".html").rpartition("/")[2] for link in links] == RUNGS
    rows = pages[OPENED].select("label.ladder-row")[::-1]
    for step, row in zip(steps, rows, strict=True):
        *_others, time = (span.get_text() for span in row.find_all("span", recursive=False))
        assert step.p.get_text() == time


@pytest.mark.slow
def test_a_route_leaves_its_chapters_and_all_brings_the_others_back(visit):
    page = visit(OPENED, java_script_enabled=False)
    chapters = page.locator(".index li:visible")
    every = len(list(ROOT.glob("notebooks/[0-9]*.ipynb")))
    assert chapters.count() == every
    page.get_by_text("My training dies").click()
    numbers = [text[:2] for text in chapters.all_inner_texts()]
    assert numbers == ["09", "11", "14", "16", "19"]
    page.get_by_text("All", exact=True).click()
    assert chapters.count() == every


@pytest.mark.slow
def test_on_a_phone_a_part_shows_its_chapters_when_opened_and_a_route_those_of_all_parts(visit):
    page = visit(OPENED, viewport={"width": PHONE, "height": 844})
    assert page.evaluate("document.documentElement.scrollHeight") <= 4.5 * 844
    assert page.locator(".way p:visible").count() == 2 * page.locator(".way").count()
    heights = page.locator(".steps li > p:last-child").evaluate_all(
        "all => all.map(p => p.offsetHeight)"
    )
    assert len(set(heights)) == 1  # each rung's name on one line
    chapters = page.locator(".index li:visible")
    assert chapters.count() == 0
    page.locator(".index summary", has_text="II. The ladder").click()
    assert chapters.count() == 9
    page.get_by_text("My training dies").click()
    assert chapters.count() == 5


@pytest.mark.slow
def test_the_program_is_given_by_the_first_page_and_each_rungs_by_its_chapter(visit):
    for name, label, file in [
        (OPENED, "Download gpt.py", "gpt.py"),
        ("notebooks/10_inside_ddp.html", "Download gpt.py", "gpt.py"),
        ("notebooks/12_rung_5_fsdp.html", "Download 5_fsdp.py", "5_fsdp.py"),
    ]:
        page = visit(name)
        with page.expect_download() as download:
            page.get_by_role("link", name=label).first.click()
        assert download.value.suggested_filename == file
        assert Path(download.value.path()).read_bytes() == (ROOT / "rungs" / file).read_bytes()


@pytest.mark.slow
def test_explain_with_an_empty_box_stays_and_says_what_to_paste(opened):
    opened.goto(opened.address)
    opened.get_by_role("button", name="Explain").click()
    assert "Paste" in opened.inner_text("#paste-says")
    assert opened.evaluate("document.activeElement.id") == "paste"
    assert opened.url == opened.address


@pytest.mark.slow
def test_the_first_page_is_three_screens_and_a_half_and_250_kb(opened, site):
    opened.set_viewport_size({"width": 1280, "height": 800})
    opened.asked.clear()
    opened.goto(opened.address)
    opened.wait_for_load_state("networkidle")
    assert opened.evaluate("document.documentElement.scrollHeight") <= 3.5 * 800
    files = {Path(unquote(urlsplit(url).path)) for url in opened.asked if url.startswith("file:")}
    packed = (".woff2", ".webp")
    sizes = [
        len(data if file.suffix in packed else gzip.compress(data))
        for file, data in ((file, file.read_bytes()) for file in files)
    ]
    assert sum(sizes) <= 250e3
