"""The calculators: the page's numbers are the package's, and a reader cannot break them."""

import json
import re
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path
from urllib.parse import parse_qsl

import pytest
import yaml
from bs4 import BeautifulSoup
from test_browser import AXE, PHONE, THEME, THEMES

from torchclinic import will_it_fit

ROOT = Path(__file__).resolve().parents[2]
OPENED = "book/will_it_fit.html"
PAGE = (ROOT / "book" / "will_it_fit.md").read_text(encoding="utf-8")
ESTIMATES = json.loads(Path(__file__).with_name("estimates.json").read_text())


# --- the page's numbers, calculated here with the package ---


def all_fields():
    forms = [
        yaml.safe_load(form) for form in re.findall(r"```\{controls\} \w+\n(.*?)```", PAGE, re.S)
    ]
    return {field["name"]: field for form in forms for field in form["fields"]}


def settings(link=""):
    """What the fields say when the page is opened by this link."""
    fields, chosen = all_fields(), dict(parse_qsl(link))
    values = {name: field["value"] for name, field in fields.items()}
    for name, value in chosen.items():
        for option in fields[name].get("options", []):
            if option["value"] == value:
                values |= option.get("set", {})
    return {name: number(value) for name, value in (values | chosen).items()}


def number(text):
    found = re.fullmatch(r"([\d.]+)([kMBT]?)", text)
    return float(found[1]) * 1000 ** " kMBT".find(found[2] or " ") if found else text


def transformer(of, precision):
    sizes = {key: of[key] for key in ("layers", "hidden", "heads", "sequence", "vocabulary")}
    return will_it_fit.transformer(
        **sizes,
        precision=precision,
        fused_attention=of["attention"] == "fused",
        checkpointing=of["checkpointing"] == "on",
    )


def memories(of):
    """The columns of the first table."""
    precision = of["precision"]
    saved = of["saved"] * 1e6 * will_it_fit.PRECISIONS[precision].activation / 4
    cast, root = saved, 0
    if of["kind"] == "transformer":
        sizes = transformer(of, precision)
        saved, root = sizes.activation_bytes, sizes.root
        # FSDP's MixedPrecisionPolicy casts what autocast leaves in float32.
        cast = transformer(of, precision.replace("amp", "bf16")).activation_bytes
    options = {key: of[key] for key in ("precision", "optimizer", "batch")}
    options |= {"activation_bytes": saved, "largest_block": of["block"], "root": root}
    gpus = {"gpus": of["gpus"]}
    rungs = [{}, {"rung": "dp"} | gpus, {"rung": "dp", "first": False} | gpus]
    rungs += [{"rung": "ddp"} | gpus, {"rung": "fsdp", "activation_bytes": cast} | gpus]
    return [will_it_fit.memory_per_gpu(of["params"], **options | rung) for rung in rungs]


def speed(of, ranks, rung):
    """Milliseconds of a step, and the speed-up."""
    size = will_it_fit.PRECISIONS[of["precision"]]
    flops = of["flops"] * 1e9
    if of["kind"] == "transformer":
        sizes = transformer(of, of["precision"])
        flops = sizes.flops / sizes.parameters * of["params"]
    seconds = will_it_fit.computing_seconds(
        of["batch"] * flops, of["peak"] * 1e12, utilisation=of["utilisation"] / 100
    )
    # FSDP gathers weights twice, cast, and reduces gradients once, as wide as DDP's.
    mean = (2 * size.cast + size.gradient) / 3
    nbytes = of["params"] * (size.gradient if rung == "ddp" else mean)
    link = of["latency"] / 1e6, of["bandwidth"] * 1e9
    options = {"overlap": of["overlap"], "scaling": of["scaling"], "rung": rung}
    gain = will_it_fit.speed_up(seconds, nbytes, ranks, *link, **options)
    return 1e3 * seconds * (ranks if of["scaling"] == "weak" else 1) / gain, gain


def row(*cells):
    return f"| {' | '.join(cells)} |"


def lines(after):
    """The rows of the first table after some words of the page."""
    table = re.search(r"\n\|.*?\n\| ?:?-.*?\n((?:\|.*\n)+)", PAGE[PAGE.index(after) :])
    return table[1].splitlines()


def test_the_first_table_is_the_packages():
    columns = memories(settings())
    names = {"16-bit copies": "casts", "Adam's copy": "step"}
    names |= {"at most": "total", "at least": "at_least"}
    parts = ["parameters", "gradients", "optimizer", "activations", "16-bit copies"]
    parts += ["communication", "Adam's copy", "at most", "at least"]
    rows = [
        row(part, *(f"{getattr(memory, names.get(part, part)) / 1e9:.1f}" for memory in columns))
        for part in parts
    ]
    assert rows == lines("container} memory-table")[:-1]


def test_the_second_table_is_the_packages():
    of, rows = settings(), []
    for ranks in (2, 4, 8, 16, 32, 64):
        cells = []
        for rung in ("ddp", "fsdp"):
            ms, gain = speed(of, ranks, rung)
            cells += [f"{ms:,.0f}", f"{gain:.2f}", f"{gain / ranks:.0%}".replace("%", " %")]
        rows.append(row(str(ranks), *cells))
    assert rows == lines("container} speed-table")


def test_the_few_cases_are_the_packages():
    found = lines("\n## A few cases")
    rows = []
    for line in found:
        of = settings(re.search(r'data-settings="(.*?)"', line)[1])
        single, _, _, ddp, fsdp = (f"{memory.total / 1e9:.1f}" for memory in memories(of))
        gains = [f"{speed(of, of['gpus'], rung)[1]:.2f}" for rung in ("ddp", "fsdp")]
        rows.append(row(line.split(" | ")[0].removeprefix("| "), single, ddp, fsdp, *gains))
    assert rows == found
    assert len(rows) >= 5


def test_published_numbers_are_within_ten_percent_or_the_page_says_why_not():
    rows = []
    for case in ESTIMATES["published"]:
        result = answer(case["call"])
        ours = sum(result[part] for part in case["parts"]) if case["parts"] else result
        both = case["authors"], ours / case["size"]
        away = both[1] / both[0] - 1
        assert abs(away) <= 0.1 or case["why"] in PAGE
        numbers = [f"{value:,.0f}" if value >= 100 else f"{value:.3g}" for value in both]
        cells = [f"{text} {case['unit']}" for text in numbers]
        rows.append(row(case["training"], *cells, f"{round(100 * away):+} %".replace("+0", "0")))
    assert rows == lines("\n## Are the numbers right?")


def answer(call):
    """One call of the table of cases, as the script gives it."""
    name, positional, options = call
    result = getattr(will_it_fit, name)(*positional, **(options or {}))
    if isinstance(result, will_it_fit.Memory):
        return asdict(result) | {"total": result.total, "at_least": result.at_least}
    return result._asdict() if isinstance(result, tuple) else result


# --- the page in a browser ---


@pytest.fixture
def page(opened):
    follow(opened, "")
    yield opened
    assert opened.errors == []


def follow(page, link):
    """Open the page by a link, in the same window."""
    script = """link => new Promise(done => {
        if (location.hash.slice(1) == link) return done();
        addEventListener("hashchange", () => setTimeout(done), {once: true});
        location.hash = link;
    })"""
    page.evaluate(script, link)


def column(page, number):
    cells = page.locator(f".memory-table tbody td:nth-child({number})")
    return cells.all_inner_texts()


@pytest.mark.slow
def test_the_script_answers_as_the_package_does(page):
    script = """calls => calls.map(([name, positional, options]) =>
        estimating[name](...positional, ...(options ? [options] : [])))"""
    answers = page.evaluate(script, ESTIMATES["calls"])
    for call, found in zip(ESTIMATES["calls"], answers, strict=True):
        assert found == pytest.approx(answer(call), rel=1e-12), call
    precisions = {key: value._asdict() for key, value in will_it_fit.PRECISIONS.items()}
    assert page.evaluate("will_it_fit.PRECISIONS") == precisions


@pytest.mark.slow
@pytest.mark.parametrize(
    "link", ["", "model=resnet50&gpus=2&batch=64&precision=fp32", "gpu=h100-80"]
)
def test_the_page_shows_what_the_package_says(page, link):
    follow(page, link)
    of = settings(link)
    assert page.locator(".memory-table th").first.inner_text() == "in GB"
    for at, memory in enumerate(memories(of), 2):
        values = [*asdict(memory).values(), memory.total, memory.at_least]
        assert column(page, at)[:-1] == [f"{value / 1e9:.1f}" for value in values]
    chosen = page.locator(".speed-table .chosen td").all_inner_texts()
    gains = [f"{speed(of, of['gpus'], rung)[1]:.2f}" for rung in ("ddp", "fsdp")]
    assert [chosen[2], chosen[5]] == gains


@pytest.mark.slow
def test_typing_changes_table_sentence_and_address(page):
    page.get_by_label("Parameters", exact=True).first.fill("2.56M")
    assert page.locator(".memory-table th").first.inner_text() == "in MB"
    assert column(page, 2)[0] == "10.2"
    assert "On one GPU it fits" in page.locator(".memory-says").inner_text()
    assert "params=2.56M" in page.url
    assert page.locator("#two-params").input_value() == "2.56M"  # the same setting, further down


@pytest.mark.slow
def test_the_page_says_from_how_many_gpus_on_fsdp_fits(page):
    follow(page, "model=7b")
    said = page.locator(".memory-says").inner_text()
    enough = int(re.search(r"FSDP fits from (\d+) GPUs on", said)[1])
    totals = [memories(settings(f"model=7b&gpus={gpus}"))[4].total for gpus in (enough - 1, enough)]
    assert totals[1] <= 0.9 * 15.6e9 < totals[0]
    follow(page, "model=70b&batch=64")
    assert "FSDP does not fit on 4096 GPUs either" in page.locator(".memory-says").inner_text()


@pytest.mark.slow
def test_layers_and_hidden_size_count_the_parameters(page):
    shown = {name: page.locator(f"#fit-{name}") for name in ("params", "block", "layers", "model")}
    page.locator("#fit-hidden").fill("2048")
    shown["layers"].fill("24")
    assert [field.input_value() for field in shown.values()] == ["1.31B", "50.4M", "24", "own"]
    of = settings(page.url.partition("#")[2])
    assert column(page, 2)[-3] == f"{memories(of)[0].total / 1e9:.1f}"
    shown["params"].fill("1.4B")  # a real model may differ from the formula
    assert shown["layers"].input_value() == "24"
    link = page.url.partition("#")[2]
    follow(page, "")
    follow(page, link)
    assert [field.input_value() for field in shown.values()] == ["1.4B", "50.4M", "24", "own"]
    shown["model"].select_option("7b")
    assert shown["params"].input_value() == "6.74B"
    shown["model"].select_option("resnet50")
    page.locator("#fit-kind").select_option("transformer")
    assert shown["params"].input_value() == "6.59B"  # of the sizes, which were those of 7B


@pytest.mark.slow
def test_fsdp_sends_as_much_as_ddp_if_only_its_weights_have_16_bits(page):
    for precision, more in [("amp", 1), ("fp32", 1.5), ("bf16", 1.5)]:
        follow(page, f"precision={precision}&overlap=0&latency=0&time=measured&ms=1&gpus=2")
        ms = page.locator(".speed-table .chosen td").all_inner_texts()
        ddp, fsdp = (float(ms[i].replace(",", "")) - 1 for i in (1, 4))
        assert fsdp == pytest.approx(more * ddp, rel=0.01)


@pytest.mark.slow
def test_a_slider_moves_by_the_keyboard_alone(page):
    field, before = page.locator("#fit-gpus"), column(page, 6)
    field.focus()
    page.keyboard.press("Tab")
    for _ in range(20):
        page.keyboard.press("ArrowRight")
    slider = page.locator(":focus")
    assert slider.get_attribute("type") == "range"
    assert slider.get_attribute("aria-valuetext") == field.input_value() != "4"
    assert column(page, 6) != before
    assert page.evaluate("getComputedStyle(document.activeElement).outlineStyle") == "solid"


@pytest.mark.slow
def test_a_preset_sets_its_numbers_until_one_is_changed_by_hand(page):
    page.get_by_label("GPU", exact=True).select_option("h100-80")
    assert [page.locator(f"#{id}").input_value() for id in ("fit-memory", "two-peak")] == [
        "80",
        "989",
    ]
    page.locator("#two-peak").fill("400")
    assert page.locator("#fit-gpu").input_value() == "own"
    assert page.locator("#fit-memory").input_value() == "80"


@pytest.mark.slow
def test_a_link_restores_the_settings(page):
    page.locator("#fit-model").select_option("7b")
    page.locator("#fit-gpus").fill("16")
    page.locator("#two-overlap").fill("0.25")
    page.locator("#two-scaling").select_option("strong")
    link, shown = page.url.partition("#")[2], page.locator("article table").all_inner_texts()
    assert dict(parse_qsl(link)) == {
        "model": "7b", "gpus": "16", "overlap": "0.25", "scaling": "strong"
    }  # fmt: skip
    page.goto("about:blank")
    page.goto(f"{page.address}#{link}")
    assert page.locator("article table").all_inner_texts() == shown
    follow(page, "")
    assert page.locator("#fit-gpus").input_value() == "4"


HOSTILE = {
    "": "a number is missing",
    "-1": "it must be from 1 to 4096",
    "1e99": "it must be from 1 to 4096",
    "0": "it must be from 1 to 4096",
    "2.5": "whole number",
    "four": "not a number",
    "<img src=x onerror=alert(1)>": "not a number",
    "NaN": "not a number",
    "Infinity": "not a number",
}


@pytest.mark.slow
@pytest.mark.parametrize("by_link", [False, True])
def test_hostile_numbers_are_named_and_give_no_answer(page, by_link):
    for typed, said in HOSTILE.items():
        if by_link:
            follow(page, f"gpus={typed}")
        else:
            page.locator("#fit-gpus").fill(typed)
        found = seen(page)
        assert said in found["error"]
        assert found["answers"] == [f"No answer yet. GPUs: {found['error']}"] * 2
        assert set(found["numbers"]) == {"–"}
        assert not WRONG.search(found["words"]), typed
    page.locator("#fit-gpus").fill("4")
    assert "–" not in seen(page)["numbers"]


@pytest.mark.slow
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
        return {error: text("#fit-gpus-error"), status: text("article [role=status]"),
            answers: [text(".memory-says"), text(".speed-says")],
            numbers: texts(":is(.memory-table, .speed-table) td:nth-child(n + 2)"),
            words: text("article")}
    }""")


@pytest.mark.slow
def test_extremes_stay_numbers_and_within_a_phone(page):
    page.set_viewport_size({"width": PHONE, "height": 800})
    for end in ("from", "to"):
        numbers = [field for field in all_fields().values() if "from" in field]
        link = "&".join(f"{field['name']}={field[end]}" for field in numbers)
        for kind in ("transformer", "counted"):
            follow(page, f"{link}&kind={kind}&attention=table&scaling=strong")
            assert page.evaluate("document.documentElement.scrollWidth") <= PHONE
            assert not WRONG.search(seen(page)["words"])
    page.set_viewport_size({"width": 1280, "height": 900})


@pytest.mark.slow
def test_a_case_is_a_link_that_fills_the_fields(page):
    page.get_by_role("link", name="ResNet-50, mixed precision").click()
    page.wait_for_function("document.querySelector('#fit-model').value == 'resnet50'")
    assert page.locator("#fit-batch").input_value() == "64"
    page.get_by_role("link", name="Back to the first settings").click()
    page.wait_for_function("document.querySelector('#fit-model').value == 'gpt2-xl'")


@pytest.mark.slow
def test_nothing_is_asked_of_another_host(page):
    page.locator("#fit-model").select_option("70b")
    assert [url for url in page.asked if not url.startswith(("file:", "data:", "about:"))] == []


@pytest.mark.slow
def test_axe_finds_nothing_serious_while_errors_are_shown(page, axe):
    follow(page, "gpus=four&nosuch=1")
    page.evaluate(axe)
    parts = ["[role=status]", ".controls", ".memory-says", ".memory-table", ".memory-figure"]
    for theme in THEMES:
        page.emulate_media(color_scheme=theme)
        page.evaluate(THEME, theme)
        assert page.evaluate(AXE.replace("document,", f"{parts},"), {}) == [], theme
    page.emulate_media(color_scheme="light")


@pytest.mark.slow
def test_without_script_the_page_says_the_same_and_hides_its_fields(page, site):
    file = site / "book" / "will_it_fit.html"
    still = BeautifulSoup(file.read_bytes(), "html.parser")
    for part in (".memory-says", ".memory-table", ".speed-says", ".speed-table"):
        assert still.select_one(part).text.split() == page.locator(part).inner_text().split()
    assert all(form.has_attr("hidden") for form in still.select(".controls"))
    assert "need JavaScript" in still.select_one("article noscript").text
    assert "def memory_per_gpu" in still.text


@pytest.mark.slow
def test_every_label_and_phrase_can_be_translated(tmp_path):
    (tmp_path / "conf.py").write_text("extensions = ['myst_parser', 'controls']")
    field = "{name: a, label: How many, value: '1', from: '0', to: '9', hint: Take care}"
    options = "{name: b, label: Which, options: [{value: x, text: This one}]}"
    form = f"```{{controls}} f\nlegend: A form\nfields:\n- {field}\n- {options}\n```\n"
    phrases = '```{phrases}\nfits: "{rung} fits."\n```\n'
    (tmp_path / "index.md").write_text(f"# A page\n\n{form}\n{phrases}")
    build = [
        sys.executable,
        "-m",
        "sphinx",
        "-q",
        "-W",
        "-b",
        "gettext",
        tmp_path,
        tmp_path / "out",
    ]
    environment = {"PYTHONPATH": str(ROOT / "book" / "_ext"), "PATH": ""}
    subprocess.run(build, check=True, env=environment, timeout=60)
    found = (tmp_path / "out" / "index.pot").read_text()
    for text in ("A form", "How many", "Take care", "Which", "This one", "{rung} fits."):
        assert f'msgid "{text}"' in found
