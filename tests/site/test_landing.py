"""The landing page: what it says is what the repository holds, and it leads there in few clicks."""

import re
from pathlib import Path

import landing
import pytest
import yaml
from bs4 import BeautifulSoup

from torchclinic import errors, will_it_fit

ROOT = Path(__file__).resolve().parents[2]
OPENED = "book/index.html"
RUNGS = ["05_rung_1_cpu", "06_rung_2_one_gpu", "08_rung_3_data_parallel"]
RUNGS += ["09_rung_4_distributed", "12_rung_5_fsdp", "13_rung_6_rehearse"]


def test_the_ladder_is_calculated_as_the_calculator_does():
    """GPT-2 XL: memory and computing by its formulas, the time of exchanges by hand."""
    text = (ROOT / "book/index.md").read_text(encoding="utf-8")
    rungs = yaml.safe_load(re.search(r"```\{rungs\}\n(.*?)```", text, re.DOTALL)[1])
    sizes = {"layers": 48, "hidden": 1600, "heads": 25, "sequence": 1024, "vocabulary": 50257}
    for rung in rungs:
        name, gpus = rung["rung"], 1 if rung["rung"] in ("cpu", "gpu") else 2
        sharded = name in ("fsdp", "hsdp")
        cast = "bf16" if sharded else "bf16-mixed"  # FSDP casts also what autocast does not
        model = will_it_fit.transformer(**sizes, precision=cast, checkpointing=True)
        memory = will_it_fit.memory_per_gpu(
            model.parameters, rung="fsdp" if sharded else name, gpus=gpus, precision="bf16-mixed",
            optimizer="adam", activation_bytes=model.activation_bytes, batch=landing.BATCH / gpus,
            largest_block=model.largest_block, root=model.root,
        )  # fmt: skip
        assert rung["gigabytes"] == round(memory.at_least / 1e9), name
    one = landing.BATCH * model.flops / (0.3 * 312e12)
    gradients = 4 * model.parameters / 15.8e9  # PCIe 3.0 x16; FSDP sends as much in three parts
    two = one / 2 + gradients - one / 4  # half of the computing hides it
    between = 2 * model.parameters / 6.25e9  # of a shard; two GPUs share 100 Gbit/s
    seconds = [one * 0.3 * 312, one, one / 2 + 2 * gradients, two, two, (two + between) / 2]
    shown = [f"{s:.0f}" if s > 9 else f"{s:.2g}" for s in seconds]
    assert [str(rung["seconds"]) for rung in rungs] == shown


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
