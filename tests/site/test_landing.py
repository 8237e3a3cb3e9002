"""The landing page: what it says is what the repository holds, and it leads there in few clicks."""

import pytest

from book._ext import landing

OPENED = "index.html"
RUNGS = ["05_rung_1_cpu", "06_rung_2_one_gpu", "08_rung_3_data_parallel"]
RUNGS += ["09_rung_4_distributed", "12_rung_5_fsdp", "19_rung_6_rehearse"]


def test_the_ladder_says_what_the_formulas_give():
    """GPT-2 XL on rung 4: 4 + 4 + 8 bytes a parameter, activations, and gradients over NVLink."""
    nbytes, seconds = landing.needs("ddp")
    assert 32e9 < nbytes < 33e9
    flops = 16 * 1024 * (8 * 1.558e9 + 16 * 48 * 1600 * 1024)  # with attention's, and once more
    computing, exchange = flops / (0.58 * 312e12) / 2, 4 * 1.558e9 / 200e9
    assert abs(seconds - (computing + exchange)) < 0.01
    sharded, alone = landing.needs("fsdp"), landing.needs("gpu")
    assert sharded[0] < alone[0] / 1.9
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
        opened.keyboard.press("ArrowDown")
        panel = opened.locator(".rung-panel:visible")
        assert panel.count() == 1
        assert RUNGS[number - 1] in panel.locator("a").get_attribute("href")
        added = panel.locator("mark:visible").all_inner_texts()
        assert bool(added) == (number > 1)
    assert [line for line in added if "DataParallel(model)" in line]
