"""The calculators: the page's numbers are the package's, and a reader cannot break them."""

import contextlib
import json
import random
import re
from dataclasses import asdict
from itertools import product
from pathlib import Path
from urllib.parse import parse_qsl

import pytest
from bs4 import BeautifulSoup
from running import ROOT
from test_browser import PHONE

from torchclinic import will_it_fit

OPENED = "book/will_it_fit.html"
PAGE = (ROOT / "book" / "will_it_fit.md").read_text(encoding="utf-8")
FOUR_T4S = "model=gpt2-xl&gpu=t4&gpus=4"  # the case that the tests change
PUBLISHED = json.loads(Path(__file__).with_name("estimates.json").read_text())
# The page's settings that somebody has run, or that ran out of memory, and where that is told.
REPORTS = json.loads(Path(__file__).with_name("reports.json").read_text())
HUGE = "model=own&kind=counted&params=3.5T&block=1B&gpu=h100-80&saved=10"
BY_HAND = (
    "model=gpt2&tied=no&params=163M&gpu=rtx3090&gpus=1&checkpointing=off&attention=table&batch=7"
)


def lines(after):
    """The rows of the first table after some words of the page."""
    table = re.search(r"\n\|.*?\n\| ?:?-.*?\n((?:\|.*\n)+)", PAGE[PAGE.index(after) :])
    return table[1].splitlines()


def test_published_numbers_are_within_ten_percent_or_the_page_says_why_not():
    rows = []
    for case in PUBLISHED:
        result = answer(*case["call"])
        both = case["authors"], sum(result[part] for part in case["parts"]) / case["size"]
        away = both[1] / both[0] - 1
        assert abs(away) <= 0.1 or case["why"] in PAGE
        numbers = [f"{value:,.0f}" if value >= 100 else f"{value:.3g}" for value in both]
        cells = [case["training"], *(f"{text} {case['unit']}" for text in numbers)]
        cells += [f"{round(100 * away):+} %".replace("+0", "0")]
        rows.append(f"| {' | '.join(cells)} |")
    assert rows == lines("\n## What papers say")


def answer(name, positional, options):
    """What the package says, as the script gives it."""
    given = [will_it_fit.Transformer(**one) if isinstance(one, dict) else one for one in positional]
    result = getattr(will_it_fit, name)(*given, **options)
    if isinstance(result, will_it_fit.Memory):
        return asdict(result) | {"total": result.total, "at_least": result.at_least}
    return result._asdict() if hasattr(result, "_asdict") else result


SIZES = {"layers": 12, "hidden": 768, "heads": 12, "sequence": 1024, "vocabulary": 50257}
MIXTURE = {"block": "llama", "tied": False, "experts": 4}
MODELS = [will_it_fit.transformer(**SIZES, **more)._asdict() for more in ({}, MIXTURE)]
YES_NO = [True, False]
# For each function, what its arguments and its options may be.
CALLS = {
    "memory_per_gpu": ([[61706, 124e6]], {
        "rung": ["gpu", "dp", "ddp", "zero2", "fsdp", "hsdp"], "gpus": [1, 3, 6],
        "machines": [1, 3], "precision": [*will_it_fit.PRECISIONS],
        "optimizer": [*will_it_fit.STATES],
        "activation_bytes": [0, 33e6], "least_bytes": [None, 22e6], "batch": [1, 99],
        "largest_block": [None, 7e6], "root": [0, 39e6], "largest": [None, 38e6],
        "lora": [None, 5e6], "frozen_bytes": [0.5, 2], "frozen_root_bytes": [None, 4],
        "weight_decay": YES_NO, "accumulation": [1, 3], "held": will_it_fit.HELD,
    }),
    "transformer": ([], {name: [size] for name, size in SIZES.items()} | {
        "vocabulary": [100, 50257],
        "precision": [*will_it_fit.PRECISIONS], "checkpointing": will_it_fit.CHECKPOINTING,
        "block": will_it_fit.BLOCKS, "loss": will_it_fit.LOSSES, "kv_heads": [None, 4],
        "mlp": [None, 2048], "head_size": [None, 80], "experts": [1, 8], "chosen": [1, 3],
        "tied": YES_NO, "fused_attention": YES_NO, "fused_norms": YES_NO, "causal": YES_NO,
        "frozen": YES_NO,
    }),
    "on_the_gpu": ([[9e9]], {}),
    "serving": ([MODELS], {
        "tokens": [999], "memory": [1e9, 80e9], "bandwidth": [2e12], "bits": [4, 16],
        "cache_bytes": [1, 2], "gpus": [1, 4],
    }),
    "speed_up": ([[0.1], [1e8], [1, 2, 8, 4096], [2e-5], [5e9]], {
        "overlap": [0, 0.67], "scaling": ["weak", "strong"], "rung": ["ddp", "fsdp", "hsdp"],
        "machines": [1, 2], "network": [(3e-5, 4e9)], "gradients": [None, 9e7],
        "accumulation": [1, 8],
    }),
}  # fmt: skip


def calls():
    """Some hundred calls of each function that the package does not refuse, and its answers."""
    chance = random.Random(0)
    for name, (positional, options) in CALLS.items():
        for _ in range(900):
            given = [chance.choice(values) for values in positional]
            chosen = {option: chance.choice(values) for option, values in options.items()}
            with contextlib.suppress(ValueError, ZeroDivisionError):  # one GPU on two machines
                yield [name, given, chosen], answer(name, given, chosen)


# --- the page in a browser ---


@pytest.fixture
def page(opened):
    follow(opened, "")
    opened.evaluate("document.querySelectorAll('article details').forEach(d => d.open = true)")
    yield opened
    assert opened.errors == []
    assert [url for url in opened.asked if not url.startswith(("file:", "data:", "about:"))] == []


def follow(page, link, case=f"{FOUR_T4S}&"):
    """Open the page by a link, in the same window."""
    link = f"{case}{link}".rstrip("&")
    script = """link => new Promise(done => {
        if (location.hash.slice(1) == link) return done();
        addEventListener("hashchange", () => setTimeout(done), {once: true});
        location.hash = link;
    })"""
    page.evaluate(script, link)


def column(page, number):
    cells = page.locator(f".memory-table tbody td:nth-child({number})")
    return cells.all_inner_texts()


def test_the_script_answers_as_the_package_does(page):
    script = """calls => calls.map(([name, positional, options]) =>
        estimating[name](...positional, options))"""
    asked, wanted = zip(*calls(), strict=True)
    for call, want, found in zip(asked, wanted, page.evaluate(script, asked), strict=True):
        assert found == pytest.approx(want, rel=1e-12), call
    precisions = {key: value._asdict() for key, value in will_it_fit.PRECISIONS.items()}
    assert page.evaluate("estimating.PRECISIONS") == precisions


def test_the_tables_are_what_the_script_shows(page, site):
    still = BeautifulSoup((site / OPENED).read_bytes(), "html.parser")
    parts = [
        "memory-says",
        "memory-table",
        "speed-says",
        "speed-brief",
        "speed-sent",
        "speed-table",
        "serving-sent",
    ]
    follow(page, "", case="")
    for part in (f".{name}" for name in (*parts, "serving-says", "serving-table")):
        assert still.select_one(part).text.split() == page.locator(part).inner_text().split()
    cases = re.findall(r'.*data-settings="(.+?)".*?</span> \| (.*) \|', PAGE)
    for link, numbers in cases:
        follow(page, link, case="")
        assert page.locator(".memory-table th").first.inner_text() == "in GB"
        columns = [column(page, at) for at in (2, 3, 5)]
        chosen = page.locator(".speed-table .chosen td").all_inner_texts()
        shown = [each[-3] + {"no": " ✗", "maybe": " ?"}.get(each[-1], "") for each in columns]
        marks = [ms.lstrip("0123456789.,") for ms in chosen[1::2]]
        shown += map("".join, zip(chosen[2::2], marks, strict=True))
        assert shown == numbers.split(" | ")
    assert len(cases) >= 5
    # Without a script, the fields are hidden and the formulas there.
    assert all("pst-js-only" in form["class"] for form in still.select(".controls"))
    assert "need JavaScript" in still.select_one("article noscript").text
    assert "def memory_per_gpu" in still.text


def test_the_page_says_from_how_many_gpus_on_fsdp_fits(page):
    more, verdict = page.locator(".memory-more"), page.locator(".memory-says p")
    for link, words in {
        "model=llama-8b&gpu=rtx4090&gpus=1": "FSDP fits from 727 GPUs on",
        "model=70b&gpu=t4&batch=64": "FSDP does not fit on 4,096 GPUs either",
        # that it does not is not known of what has run: simplescaling/s1#13
        "model=qwen-32b&gpu=h100-80&sequence=20480": "FSDP may fit from 10 GPUs on",
        "model=qwen-32b&gpu=h100-80&sequence=20480&gpus=16": "with more GPUs it is no surer",
        BY_HAND: "FSDP fits from 2 GPUs on",
    }.items():
        follow(page, link, case="")
        assert words in more.inner_text(), link
    follow(page, f"{HUGE}&gpus=700", case="")
    enough = re.search(r"FSDP fits from ([\d,]+) GPUs on", more.inner_text())[1]
    enough = int(enough.replace(",", ""))
    assert 1000 < enough < 4000
    for gpus, kind in ((enough - 1, "close"), (enough, "fits")):
        follow(page, f"{HUGE}&gpus={gpus}", case="")
        assert verdict.get_attribute("data-verdict") == kind


ON_ONE = "model=llama-8b&gpu=a100-40&gpus=1"
BACKWARD, OFFLOAD = "paged 8-bit Adam in backward", "FSDP’s CPU offload"
AWAY, IN_PARTS = "checkpoints on the CPU", "the loss in parts"
OFFERED = {
    ON_ONE: ("Here it may fit with ", ["LoRA", "QLoRA", BACKWARD, OFFLOAD]),
    f"{ON_ONE}&rank=abc": ("", [BACKWARD, OFFLOAD]),  # those that need no rank, which is hidden
    # may fit: with LoRA it is already
    "model=7b&train=lora&gpu=rtx4090&gpus=1": (
        "It fits with ", ["all in bfloat16", "QLoRA", OFFLOAD, AWAY],
    ),
    "model=llama-8b&gpus=1&sequence=12288&train=lora&bits=4&precision=bf16": (
        "Here it may fit with ", [IN_PARTS, OFFLOAD, AWAY],
    ),
}  # fmt: skip


def test_what_does_not_fit_offers_the_changes_with_which_it_may_and_makes_them(page):
    more, cures = page.locator(".memory-more"), page.locator(".memory-more .cure")
    says, value = page.locator(".memory-says p"), lambda name: page.input_value(f"#fit-{name}")
    for link, (words, offered) in OFFERED.items():
        follow(page, link)
        assert words in more.inner_text()
        assert cures.all_inner_texts() == offered, link
    follow(page, ON_ONE)
    cures.get_by_text(BACKWARD).click()
    assert "To train: maybe, on one GPU" in says.inner_text()
    assert [value("held"), value("optimizer")] == ["one-gradient", "adam-8bit-paged"]
    follow(page, ON_ONE)
    cures.get_by_text(OFFLOAD).click()
    assert "with FSDP and CPU offload" in says.inner_text()
    assert "CPU offload costs in time" in page.locator(".speed-sent").inner_text()
    assert page.locator(".memory-figure .bar").count() == 4
    follow(page, ON_ONE)
    cures.first.click()
    assert says.get_attribute("data-verdict") in ("fits", "close")
    assert page.evaluate("document.activeElement.id") == "fit-train"
    assert "train=lora" in page.url
    assert page.locator(".memory-figure .bar").count() == 1  # one GPU runs no rung of many
    follow(page, "model=llama-8b&gpus=1&sequence=12288")  # of single changes, none is enough
    assert all(" and " in cure for cure in cures.all_inner_texts())
    cures.get_by_text(f"{OFFLOAD} and {IN_PARTS}").click()
    assert says.get_attribute("data-verdict") == "close"
    assert value("loss") == "parts"
    for link in REPORTS["ran out of memory"]:
        if "checkpointing=off" in link:  # else norms hardly count, and a GPT has no RMSNorm
            follow(page, link, case="")
            assert ("fused RMSNorm" in cures.all_inner_texts()) == ("=llama" in link)


def test_what_others_report_to_have_run_is_not_denied_and_what_ran_out_is_not_promised(page):
    verdict, cures = page.locator(".memory-says p"), page.locator(".memory-more .cure")
    for link, thread in (REPORTS["ran"] | REPORTS["ran out of memory"]).items():
        follow(page, link)
        found = verdict.get_attribute("data-verdict")
        promised = found == "fits"
        # Unsloth keeps checkpoints in the host's memory: there a change must be named that helps.
        possible = found != "not" or ("unsloth" in thread and cures.count() > 0)
        assert possible if link in REPORTS["ran"] else not promised, thread


def test_what_no_measurement_has_is_said_beside_the_answer(page):
    for link, what in {
        "model=7b&gpu=a100-80": "",
        "model=7b&gpu=a100-80&train=lora": "LoRA",
        "model=qwen-4b&gpu=a100-80&loss=parts": "Qwen3 or the loss in parts",
        "model=mixtral&gpu=a100-80": "experts",
        "model=7b&gpu=a100-80&gpus=16": "HSDP",
        "model=resnet50": "",
        "model=7b&gpu=a100-80&held=blocks": "offloading",
    }.items():
        follow(page, link)
        said = page.locator(".memory-more").inner_text()
        assert said.partition("held against has ")[2] == (f"{what}." if what else ""), link


def test_speeds_that_others_measured_are_within_a_quarter_of_what_is_said(page):
    for link, (tokens, thread) in REPORTS["tokens per second"].items():
        follow(page, link, case="")
        said = re.search(r" ([\d,]+) tokens per", page.locator(".speed-sent").inner_text())[1]
        assert 0.8 <= int(said.replace(",", "")) / tokens <= 1.25, thread


def test_the_caches_that_vllm_held_are_within_half_of_what_is_said(page):
    for link, (tokens, thread) in REPORTS["tokens in the cache"].items():
        follow(page, f"{link}&context=1", case="")
        said = re.search(r"The ([\d,]+) that fit", page.locator(".serving-says").inner_text())[1]
        assert 0.8 <= int(said.replace(",", "")) / tokens <= 1.5, thread


def test_no_answer_that_others_measured_is_faster_than_the_most_that_is_said(page):
    for link, (rate, thread) in REPORTS["tokens per second of an answer"].items():
        follow(page, f"{link}&context=1", case="")
        most = re.search(r"most ([\d.]+) tokens", page.locator(".serving-says").inner_text())[1]
        assert 0.7 <= rate / float(most) <= 1, thread


def test_gpus_that_share_each_layer_hold_and_read_more_and_the_page_says_how_many_would_do(page):
    says, use = (page.locator(f".serving-{part}") for part in ("says p", "sent a"))
    two = "model=qwen-32b&gpu=rtx4090&weight_bits=8&context=18144"  # LMCache/LMCache#1241
    follow(page, two, case="")
    assert says.get_attribute("data-verdict") == "not"
    assert use.inner_text().endswith("GB of weights; 2 GPUs together would do")
    rates = []
    for share, context, verdict in (
        ("2", 18144, "fits"),
        ("2", 32768, "close"),
        ("4", 18144, "fits"),
    ):
        follow(page, f"{two}&share={share}&context={context}", case="")
        assert says.get_attribute("data-verdict") == verdict
        assert f"on {share} GPUs together" in use.inner_text()
        rates.append(float(re.search(r"most ([\d.]+) tokens", says.inner_text())[1]))
    assert rates[2] == pytest.approx(2 * rates[0], rel=0.01)
    follow(page, "model=qwen-32b&gpu=rtx3090&weight_bits=4", case="")
    assert use.inner_text().startswith("To use it: maybe, on one GPU")


def test_gpus_that_share_each_layer_divide_its_heads(page):
    says, use = (page.locator(f".serving-{part}") for part in ("says p", "sent a"))
    follow(page, "model=llama-8b&gpu=t4&share=3", case="")
    assert "must divide the heads" in says.inner_text()
    assert use.text_content() == "–"
    follow(page, "model=qwen-14b&gpu=t4&context=600000", case="")  # 40 heads
    assert "16 GPUs together" not in use.text_content()


def test_a_sequence_that_gpus_share_costs_each_its_share_and_one_gpu_all_of_it(page):
    shared = "model=llama-8b&gpu=h100-80&gpus=8&sequence=65536&cp="
    seen, fsdp = [], {}
    for cp in (1, 2, 8):
        follow(page, f"{shared}{cp}", case="")
        seen.append(column(page, 2)[3])
        fsdp[cp] = column(page, 5)[3]
    assert len({*seen}) == 1
    follow(page, "model=llama-8b&gpu=h100-80&gpus=8&sequence=8192", case="")
    assert fsdp[8] == column(page, 5)[3] != fsdp[2] != fsdp[1]
    follow(page, "model=gpt2&gpu=h100-80&gpus=8&cp=8", case="")  # not this model
    assert not page.locator("#fit-cp").is_visible()


def test_gpus_that_share_a_sample_divide_all_numbers_of_gpus(page):
    rows = page.locator(".speed-table tbody tr td:first-child")
    shared = "model=llama-8b&gpu=l40s&sequence=65536"
    follow(page, f"{shared}&gpus=8&cp=8", case="")
    assert "FSDP fits from 16 GPUs on" in page.locator(".memory-more").inner_text()
    assert rows.all_inner_texts() == ["8", "16", "32", "64"]
    follow(page, f"{shared}&gpus=12&cp=12&batch=99", case="")
    assert "does not fit on 4,092 GPUs" in page.locator(".memory-more").inner_text()
    assert rows.all_inner_texts() == ["12"]
    follow(page, f"{shared}&gpus=8&cp=3", case="")
    assert page.locator("#fit-cp").get_attribute("aria-invalid") == "true"
    said = "No answer yet. GPUs that share a sample: it does not divide the GPUs."
    assert seen(page)["answers"] == [said] * 2
    page.locator("#fit-layers").fill("16")  # the parameters are counted all the same
    assert page.locator("#fit-params").input_value() == "4.54B"
    page.locator("#fit-architecture").select_option("gpt")
    assert "–" not in seen(page)["numbers"]


def test_one_gpu_is_told_what_it_trains_on_itself(page):
    rates = []
    for gpus in ("1", "2"):
        follow(page, f"model=llama-1b&gpu=h100-80&gpus={gpus}&batch=4", case="")
        said = page.locator(".speed-sent").inner_text()
        rates.append(int(re.search(r" ([\d,]+) tokens per", said)[1].replace(",", "")))
        assert ("One GPU trains on" in said) == (gpus == "1")
    gain = float(re.search(r"are ([\d.]+) times", page.locator(".speed-says").inner_text())[1])
    assert rates[1] / rates[0] == pytest.approx(gain, rel=0.01)
    follow(page, "model=70b&gpu=h100-80&gpus=1", case="")  # which it cannot hold
    assert "tokens per second" not in page.locator(".speed-sent").inner_text()


def test_a_verdict_begins_with_the_answer_and_reset_brings_the_first_settings_back(page):
    answer, field = page.locator(".memory-says strong"), page.locator("#fit-batch")
    assert answer.inner_text() == "To train: yes, with FSDP on 4 GPUs."
    field.fill("64")
    page.get_by_role("link", name="Reset", exact=True).click()
    page.wait_for_function("document.querySelector('#fit-batch').value == '1'")
    assert answer.inner_text() == "To train: yes, with FSDP on 8 GPUs."


def test_no_counts_the_context_that_every_process_has(page):
    follow(page, "model=qwen-32b&gpu=a100-80&gpus=7&sequence=1024&precision=bf16-master", case="")
    said = page.locator(".memory-says").inner_text()
    assert said.endswith(
        "needs 85.6\N{NO-BREAK SPACE}GB or more, and a GPU has 85.1\N{NO-BREAK SPACE}GB."
    )


def test_more_tokens_keep_the_model_and_a_mixtures_experts_are_counted(page):
    for model in ("gpt2", "llama-8b"):
        follow(page, f"model={model}")
        page.locator("#fit-sequence").fill("2048")
        assert page.locator("#fit-model").input_value() == model
        link, shown = page.url.partition("#")[2], column(page, 2)
        follow(page, "", case="")
        follow(page, link, case="")
        assert column(page, 2) == shown
    follow(page, "model=qwen-30b-a3b")
    met = "Of 30.5B parameters a token meets 3.35B."
    assert page.locator(".speed-sent").inner_text().startswith(met)
    follow(page, "model=mixtral")
    assert page.locator("#fit-params").input_value() == "46.7B"
    page.locator("#fit-experts").fill("4")
    assert page.locator("#fit-model").input_value() == "own"
    assert page.locator("#fit-params").input_value() == "24.2B"
    page.locator("#fit-chosen").fill("5")
    assert "not as many experts" in page.locator("[data-error=chosen]").inner_text()
    page.locator("#fit-architecture").select_option("gpt")
    assert not page.locator("#fit-experts").is_visible()
    assert "–" not in column(page, 2)


def test_batches_that_add_up_share_an_exchange_and_the_page_offers_it(page):
    follow(page, "model=resnet50&optimizer=momentum&batch=16")
    says, sent = page.locator(".speed-says p"), page.locator(".speed-more")
    before = float(re.search(r"are ([\d.]+) times", says.inner_text())[1])
    offered = sent.locator(".cure")
    gain = float(re.search(r"DDP ([\d.]+) times", offered.inner_text())[1])
    offered.click()
    assert page.locator("#two-accumulation").input_value() == "8"
    assert float(re.search(r"are ([\d.]+) times", says.inner_text())[1]) == gain > 1.5 * before
    assert sent.locator(".cure").count() == 0


def test_sgds_weight_decay_and_an_8_bit_cache_count(page):
    totals = []
    for decay in ("no", "yes"):
        follow(page, f"model=posts&optimizer=momentum&decay={decay}")
        totals.append(float(column(page, 2)[-3]))
    assert totals == [11.2, 12.8]  # a copy of 801 million gradients, when 16-bit copies are gone
    for optimizer, visible in (("sgd", True), ("adam", False)):
        follow(page, f"optimizer={optimizer}")
        assert page.locator("#fit-decay").is_visible() == visible
    for bits, cache in (("16", "1.1\N{NO-BREAK SPACE}GB"), ("8", "536.9\N{NO-BREAK SPACE}MB")):
        follow(page, f"model=llama-8b&gpu=l40s&cache_bits={bits}")
        assert cache in page.locator(".serving-says").inner_text()


def test_what_fits_on_no_number_of_gpus_names_the_memory_that_would_do(page):
    follow(page, "model=llama-8b")  # on four T4s
    said = page.locator(".memory-more").inner_text()
    enough = float(re.search(r"GPUs of ([\d.]+)\sGB would do", said)[1])
    for memory, verdict in ((enough - 1, "close"), (enough + 1, "fits")):
        follow(page, f"model=llama-8b&memory={memory:.1f}")
        assert page.locator(".memory-says p").get_attribute("data-verdict") == verdict


def test_below_the_answer_for_training_stands_the_one_for_use_and_leads_to_its_numbers(page):
    use = page.locator(".serving-sent a")
    for link, said in {
        "model=llama-8b&gpu=h100-80": "yes, on one GPU: 16.1 GB of weights, at most 208 tokens per",
        "model=70b&gpu=h100-80": "no, not on one GPU: 141.1 GB of weights",
        "model=llama-8b&gpu=h100-80&weight_bits=4": "yes, on one GPU: 5.6 GB of weights",
    }.items():
        follow(page, link)
        assert " ".join(use.inner_text().split()).startswith(f"To use it: {said}"), link
    use.click()
    assert page.url.endswith("#how-fast-will-it-answer")
    follow(page, "model=resnet50")
    assert not use.is_visible()


def test_a_card_for_a_pc_is_alone_unless_the_reader_has_said_how_many(page):
    card, gpus = page.locator("#fit-gpu"), page.locator("#fit-gpus")
    follow(page, "", case="")
    for name, count in (("rtx4090", "1"), ("a100-80", "8"), ("rtx3090", "1")):
        card.select_option(name)
        assert gpus.input_value() == count
    gpus.fill("2")
    assert card.input_value() == "rtx3090"
    for name in ("rtx5090", "l4"):
        card.select_option(name)
        assert gpus.input_value() == "2"
    link = page.url.partition("#")[2]
    follow(page, "", case="")
    follow(page, link, case="")
    card.select_option("rtx4090")
    assert gpus.input_value() == "2"


def test_layers_and_hidden_size_count_the_parameters(page):
    shown = {name: page.locator(f"#fit-{name}") for name in ("params", "block", "layers", "model")}
    page.locator("#fit-hidden").fill("2048")
    shown["layers"].fill("24")
    assert [field.input_value() for field in shown.values()] == ["1.31B", "50.4M", "24", "own"]
    shown["params"].fill("1.4B")  # a real model may differ from the formula
    page.locator("#fit-sequence").fill("2048")  # and keeps what was said of it
    link = page.evaluate("location.hash.slice(1)")
    follow(page, "")
    follow(page, link)
    assert [field.input_value() for field in shown.values()] == ["1.4B", "50.4M", "24", "own"]
    shown["model"].select_option("7b")
    assert shown["params"].input_value() == "6.74B"
    shown["model"].select_option("resnet50")
    page.locator("#fit-kind").select_option("transformer")
    assert shown["params"].input_value() == "6.74B"  # of the sizes, which were those of 7B


def test_the_sizes_of_each_model_give_its_parameters_and_its_block(page):
    models = page.locator("#fit-model option").evaluate_all("all => all.map(one => one.value)")
    read = "() => ['params', 'block'].map(name => document.getElementById(`fit-${name}`).value)"
    for model in models:
        follow(page, f"model={model}")
        told = page.evaluate(read)
        page.locator("#fit-kind").dispatch_event("input")  # counts the parameters again
        assert told == page.evaluate(read), model


def test_what_does_not_fit_is_no_answer_and_its_comparison_is_named(page):
    says, verdict = page.locator(".speed-says p"), "data-verdict"
    eight, sixteen = "model=7b&gpu=h100-80&gpus=8", "model=7b&gpu=a100-80&gpus=16&network=eth100"
    for link, kind, words in [
        ("model=70b", "not", "fits on no rung|Compared with one GPU that could hold it"),
        (eight, "fits", "with FSDP|that could hold|DDP does not fit"),
        ("model=gpt2&gpu=a100-80", "fits", "with DDP|as fast as one.|With FSDP"),
        (sixteen, "fits", "with HSDP|DDP does not fit. With FSDP:"),
        ("gpus=2&link=a100", "close", "Maybe, if FSDP fits"),
    ]:
        follow(page, link)
        assert says.get_attribute(verdict) == kind, link
        assert all(each in says.inner_text() for each in words.split("|")), says.inner_text()
    follow(page, eight)
    marks = [cell[-1] for cell in page.locator(".speed-table tr td:nth-child(2)").all_inner_texts()]
    assert set(marks) == {"✗"}


def test_float32_has_no_estimate_but_a_measured_step_has_a_speed_up(page):
    says, sent = (page.locator(f".speed-{part} p") for part in ("says", "sent"))
    follow(page, "precision=fp32")
    assert "no estimate for float32" in says.inner_text()
    assert sent.inner_text() == "–"
    for settings in ("time=measured&ms=250", "gpu=own&peak=8.1"):
        follow(page, f"precision=fp32&{settings}")
        assert re.search(r"\d times (its|as)", says.inner_text())


def test_hours_money_and_the_two_shares_of_the_peak(page):
    follow(page, "model=llama-8b&gpu=a100-80&gpus=8&link=own&bandwidth=10000&latency=0&price=2")
    said = page.locator(".speed-sent p").inner_text().replace(",", "")
    found = re.search(
        r"(\d+) tokens.*MFU (.*)\s% HFU (.*)\s%.*take (.*) hours.*costs (.*) at", said
    )
    rate, mfu, hfu, hours, money = map(float, found.groups())
    assert hfu == pytest.approx(58, rel=0.03)  # the preset, less what little is sent
    assert mfu == pytest.approx(hfu * 3 / 4, rel=0.01)
    assert hours == pytest.approx(1e9 / rate / 3600, rel=0.01)
    assert money == pytest.approx(2 * 8 * hours, rel=0.01)


def test_the_time_and_the_rate_have_the_range_that_others_measured(page):
    said = page.locator(".speed-sent p")
    for link, percents, where in [
        ("model=7b&gpu=a100-80&gpus=8", (26, 58, 74), "A100"),
        ("model=gpt2&gpu=rtx4090&gpus=2", (24, 61, 81), "all cards"),
        ("model=resnet50&gpu=t4&gpus=2&optimizer=momentum&batch=64", (6, 19, 31), "all cards"),
    ]:
        follow(page, link, case="")
        told = said.inner_text().replace(",", "")
        found = re.search(r"for ([\d.]+)\sms in a step \(([\d.]+) to ([\d.]+) at the (.*?)\)", told)
        usual, fast, slow = map(float, found.groups()[:3])
        low, middle, high = percents
        assert (fast * high, slow * low) == pytest.approx((usual * middle,) * 2, rel=0.05)
        assert (
            found[4]
            == f"{low} to {high}\N{NO-BREAK SPACE}% of the peak that others measured on {where}"
        )
        rate = re.search(
            r"([\d.]+) (?:tokens|samples) per second \((.*) to (.*) with that range", told
        )
        rate, least, most = map(float, rate.groups())
        assert usual / slow <= least / rate * 1.05 < 1 < most / rate <= usual / fast * 1.05
    for settings in ("time=measured&ms=250", "gpu=own&peak=300"):
        follow(page, f"model=7b&{settings}", case="")
        assert "others measured" not in said.inner_text()


def test_a_field_that_does_not_agree_with_another_says_so(page):
    for setting, field, said in [
        ("params=1.4B", "params", "vocabulary give 1.56B"),
        ("params=1.5B", "params", ""),
        ("model=70b", "params", ""),
        ("block=100M", "block", "give 30.7M"),
        ("heads=24", "heads", "does not divide the hidden size"),
    ]:
        follow(page, setting)
        note = page.locator(f"[data-error={field}]").last
        assert said in note.text_content(), setting
        assert note.is_visible() == bool(said), setting
        assert page.locator("[aria-invalid=true]").count() == 0
        assert "–" not in seen(page)["numbers"]


def test_a_screen_reader_is_told_the_answer_once_the_fields_are_at_rest(page):
    page.evaluate("""() => {
        window.told = [];
        const spoken = document.querySelector("article .visually-hidden[role=status]");
        const hear = new MutationObserver(() => told.push(spoken.textContent));
        hear.observe(spoken, {childList: true});
    }""")
    page.locator("#fit-gpus").evaluate("""field => {
        for (const gpus of ["2", "20", "200"]) {
            field.value = gpus;
            field.dispatchEvent(new Event("input", {bubbles: true}));
        }
    }""")  # at once: between calls of their own, a busy machine may let them rest
    page.wait_for_function("told.length")
    assert page.evaluate("told") == [page.locator(".memory-says p").inner_text()]
    assert page.locator("article [aria-live]").count() == 0


def test_a_choice_fills_fields_and_changes_answer_and_address_and_a_link_restores_it(page):
    page.get_by_role("link", name=re.compile("ResNet-50.* two T4s")).click()
    page.wait_for_function("document.querySelector('#fit-model').value == 'resnet50'")
    assert page.locator("#fit-batch").input_value() == "64"
    follow(page, "")
    page.get_by_label("GPU", exact=True).select_option("h100-80")
    names = ("#fit-memory", "#fit-peak", "#two-link", "#two-bandwidth", "#fit-gpu")
    numbers = [page.locator(name) for name in names]
    assert [field.input_value() for field in numbers] == ["84.9", "989", "h100", "420", "h100-80"]
    page.locator("#two-link").select_option("a100")  # another link of the same GPU
    assert [field.input_value() for field in numbers] == ["84.9", "989", "a100", "200", "h100-80"]
    for machine in ("8", "4"):  # which may have more or fewer of them
        page.locator("#fit-per").fill(machine)
        assert page.locator("#fit-gpu").input_value() == "h100-80"
    page.locator("#fit-peak").fill("989")  # what it is
    assert page.locator("#fit-gpu").input_value() == "h100-80"
    page.locator("#fit-peak").fill("400")  # the preset holds until one is changed by hand
    assert [field.input_value() for field in numbers] == ["84.9", "400", "a100", "200", "own"]
    page.get_by_text("The numbers of the link and the network").click()
    assert not page.locator("#two-far_latency").is_visible()
    page.locator("#two-network").select_option("own")
    assert page.locator("#two-far_latency").is_visible()
    follow(page, "")
    page.get_by_label("Parameters", exact=True).first.fill("2.56M")
    assert page.locator(".memory-table th").first.inner_text() == "in MB"
    assert column(page, 2)[0] == "10.2"
    assert "To train: yes, on one GPU" in page.locator(".memory-says").inner_text()
    assert "params=2.56M" in page.url
    assert page.locator("#two-params").input_value() == "2.56M"  # the same setting, further down
    follow(page, "")
    page.locator("#fit-model").select_option("7b")
    page.locator("#fit-gpus").fill("16")
    page.locator("#two-overlap").fill("0.25")
    page.locator("#two-scaling").select_option("strong")
    assert dict(parse_qsl(page.url.partition("#")[2])) == {
        "model": "7b", "gpu": "t4", "gpus": "16", "overlap": "0.25", "scaling": "strong"
    }  # fmt: skip


CHANGE_ALL = """() => {
    for (const field of document.querySelectorAll("[data-name]")) {
        if (field.options) field.selectedIndex = field.options.length - 1;
        else field.value = parseFloat(field.dataset.from) + 1;
        field.dispatchEvent(new Event("input", {bubbles: true}));
    }
}"""
VALUES = "[...document.querySelectorAll('[data-name]')].map(({id, value}) => [id, value])"


def test_the_address_restores_every_field(visit):
    page = visit(OPENED)
    before = page.evaluate(VALUES)
    page.evaluate(CHANGE_ALL)
    changed = page.evaluate(VALUES)
    assert sum(map(list.__ne__, before, changed)) > 40
    link = page.url
    page.goto("about:blank")
    page.goto(link)
    assert page.evaluate(VALUES) == changed
    follow(page, "", case="")
    assert page.evaluate(VALUES) == before


HOSTILE = {"": "a number is missing", "2.5": "whole number"}
HOSTILE |= dict.fromkeys(("-1", "1e99", "0"), "it must be from 1 to 4096")
HOSTILE |= dict.fromkeys(
    ("four", "0,512", "1234,567", "<img src=x onerror=alert(1)>", "NaN"), "not a number"
)


def test_hostile_numbers_are_named_and_give_no_answer(page):
    ways = [page.locator("#fit-gpus").fill, lambda typed: follow(page, f"gpus={typed}")]
    for way, (typed, said) in product(ways, HOSTILE.items()):
        way(typed)
        found = seen(page)
        assert said in found["error"]
        assert found["answers"] == [f"No answer yet. GPUs: {found['error']}"] * 2
        assert set(found["numbers"]) == {"–"}
        assert not WRONG.search(found["words"]), typed
    page.locator("#fit-gpus").fill("4")
    assert "–" not in seen(page)["numbers"]


def test_a_wrong_number_of_experts_leaves_no_answer_of_other_settings(page):
    for typed in ("0", "", "x"):
        follow(page, f"gpus=1&memory=1&experts={typed}", case="")
        assert seen(page)["answers"][0].startswith("No answer yet. Experts in a layer: ")


def test_a_link_by_hand_cannot_break_the_page(page):
    for link in ("model=nosuch", "constructor=1", "__proto__=1", "precision=<b>", "%E0%A4%A=1"):
        follow(page, link)
        found = seen(page)
        assert not WRONG.search(found["words"])
        assert "does not know" in found["status"], link
        assert "–" not in found["numbers"]


WRONG = re.compile(r"\b(NaN|Infinity|undefined|null|\d+e\+\d+)\b")


def seen(page):
    return page.evaluate("""() => {
        const text = selector => document.querySelector(selector).innerText;
        const texts = selector => [...document.querySelectorAll(selector)].map(e => e.innerText);
        return {error: text("#fit-gpus-error"), status: text("article .control-error[role=status]"),
            answers: [text(".memory-says"), text(".speed-says")],
            numbers: texts(":is(.memory-table, .speed-table) td:nth-child(n + 2)"),
            words: text("article")}
    }""")


def test_on_a_phone_three_fields_stand_above_the_answer_and_a_cure_unfolds_its_own(visit):
    page = visit(f"{OPENED}#{ON_ONE}", viewport={"width": PHONE, "height": 844})
    tops = [
        page.locator(part).bounding_box()["y"]
        for part in ("#fit-model", "#fit-gpu", "#fit-gpus", ".memory-more", ".memory-figure")
    ]
    assert tops == sorted(tops)
    for part in ("#fit-gpus", ".memory-says p"):
        box = page.locator(part).bounding_box()
        assert box["y"] + box["height"] <= 844, part
    label, field = (page.locator(f"#fit-gpus{part}").bounding_box() for part in ("-label", ""))
    assert label["y"] + label["height"] <= field["y"]
    trained = page.locator("#fit-train")
    assert not trained.is_visible()
    page.locator(".memory-more .cure").first.click()
    assert trained.is_visible()
    assert page.evaluate("document.activeElement.id") == "fit-train"


def test_beside_the_speed_up_stand_the_numbers_of_one_gpu_and_of_all(page):
    follow(page, "model=gpt2-xl&gpu=a100-80&gpus=4&checkpointing=on")
    cells = page.locator(".speed-brief tbody tr")
    numbers = [[float(n.replace(",", "")) for n in re.findall(r"[\d.,]+$|[\d.,]+(?=\t)", row)]
               for row in cells.all_inner_texts()]  # fmt: skip
    (alone, step), (one, all_), (slow, fast) = numbers
    said = page.locator(".speed-says p").inner_text()
    gain = float(re.search(r"are ([\d.]+) times", said)[1])
    assert page.locator(".speed-brief th").last.inner_text() == "4 GPUs"
    assert [4 * alone / step, all_ / one, slow / fast] == pytest.approx([gain] * 3, rel=0.02)
    follow(page, ON_ONE)  # which trains on no rung
    assert set(cells.nth(1).locator("td + td").all_inner_texts()) == {"–"}
    follow(page, "gpus=abc")
    assert set(page.locator(".speed-brief td + td").all_inner_texts()) == {"–"}


def test_extremes_stay_numbers_and_within_a_phone(page):
    page.set_viewport_size({"width": PHONE, "height": 800})
    script = """end => [...document.querySelectorAll("[data-from]")]
        .map(field => `${field.dataset.name}=${field.dataset[end]}`).join("&")"""
    for end in ("from", "to"):
        link = page.evaluate(script, end)
        for kind in ("transformer", "counted"):
            follow(page, f"{link}&kind={kind}&attention=table&scaling=strong")
            assert page.evaluate("document.documentElement.scrollWidth") <= PHONE
            assert not WRONG.search(seen(page)["words"])
    page.set_viewport_size({"width": 1280, "height": 900})
