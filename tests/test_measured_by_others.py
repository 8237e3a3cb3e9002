"""The formulas of the calculators against what others have measured on GPUs."""

import os
import re
import subprocess
import sys
from collections import Counter, defaultdict
from itertools import chain

import pytest
from matplotlib.collections import PathCollection
from running import ROOT

from benchmarks import measured_by_others
from book._ext import measured
from torchclinic import will_it_fit

BOUNDS = {  # of the predictions: the median error, and the share that is within a ratio
    "memory": (0.07, 1.20, 0.90),
    "all-reduce": (0.15, 1.25, 1.00),
    "all-reduce below 1 MiB": (0.35, 2.00, 1.00),
    "FLOPs": (0.005, 1.05, 1.00),
    "share of the peak": (0.15, 2.00, 0.85),
    "speed-up over PCIe": (0.26, 1.25, 0.65),
    "speed-up over NVLink": (0.04, 1.20, 0.95),
    "speed-up over machines": (0.05, 1.25, 1.00),
}

# Each is the only row that one term of a formula decides; it may be off by so much.
ALONE = {
    "vit-l": ("Adam's copy in its step", 0.05),
    "vit-l-in-backward": ("one gradient at a time", 0.05),
    "bucket-view": ("DDP's buckets", 0.05),
    "hf-4-fp16": ("softmax in float32 under autocast", 0.08),
}


@pytest.fixture(scope="module")
def found():
    ratios = defaultdict(list)
    for kind, row, predicted, got in measured_by_others.pairs(measured_by_others.read()):
        ratios[kind, row["aside"]].append(predicted / got)
    return ratios


def test_every_row_says_what_was_measured_and_where():
    rows = measured_by_others.read()
    measured_by_others.check(rows)
    assert len(rows) >= 150
    assert sum(row["aside"] == "yes" for row in rows.values()) >= 30
    assert not [name for name, row in rows.items() if row["aside"] and row["left_out"]]
    for row in rows.values():
        for address in measured_by_others.addresses(row):
            assert re.fullmatch(
                r"https://(github.com/[\w.-]+/[\w.-]+|dev.to|www.gilesthomas.com)/\S+", address
            )


@pytest.mark.parametrize("aside", ["", "yes"])
@pytest.mark.parametrize("kind", BOUNDS)
def test_predictions_are_as_near_as_the_book_says(found, kind, aside):
    most, ratio, share = BOUNDS[kind]
    _, error, within = measured_by_others.spread(found[kind, aside], ratio - 1)
    assert error <= most
    assert within >= share


def test_the_page_promises_each_kind_of_row_what_its_predictions_hold():
    page = (ROOT / "book/are_the_numbers_right.md").read_text(encoding="utf-8")
    promised = re.findall(r"\| ([A-Z][^|]+) \| ([\d.]+) times \| (\d+) % \|\n", page)
    held = {
        (kind[0].upper() + kind[1:], f"{ratio:g}", f"{100 * share:g}")
        for kind, (_, ratio, share) in BOUNDS.items()
    }
    assert {*promised} == held
    links = re.search(r"`LINK` what joins the GPUs:\n(.*?)\.", page)[1]
    assert {*re.findall(r"`(\w+)`", links)} == measured_by_others.LINKS.keys() - {"roce", "eth100"}


def test_no_kind_of_row_is_forgotten(found):
    assert {kind for kind, _ in found} == set(BOUNDS)


def test_the_chapters_take_the_link_of_two_t4s_from_the_calculators():
    assert measured_by_others.preset("pcie3") == pytest.approx(will_it_fit.PCIE3)


def test_the_rows_that_decide_one_term_alone_are_met():
    rows = {row["id"]: said / got for row, said, got in measured_by_others.of("memory")}
    off = {name: rows[name] for name, (_, most) in ALONE.items() if abs(rows[name] - 1) > most}
    assert off == {}


def test_what_fits_by_the_calculator_did_so_in_every_run():
    read = [each for each in measured_by_others.of("memory") if each[0]["measured"] == "nvidia-smi"]
    for row, _, got in read:
        allocated = measured_by_others.memory(row | {"measured": "allocated"})
        least, most = will_it_fit.on_the_gpu(allocated)
        assert least <= got <= most, row["id"]
    assert len(read) >= 15


# --- the page Are the numbers right? ------------------------------------------------------------


def test_the_page_explains_the_furthest_row_of_each_kind_and_links_to_every_row():
    page = (ROOT / "book/are_the_numbers_right.md").read_text(encoding="utf-8")
    named = set(re.findall(r"`([a-z]\w*-[\w-]+)`", page))
    every, table = measured_by_others.read(), "\n".join(measured.rows())
    assert named - {"nvidia-smi"} <= every.keys()
    furthest = re.findall(r"\| \[([\w-]+)\]\(https", "\n".join(measured.kinds()))
    assert len(furthest) == len(BOUNDS)
    assert {*furthest, *ALONE} <= named
    assert [name for name in every if f"[{name}](https://" not in table] == []


def test_the_page_names_the_medians_that_rest_on_one_or_two_rows():
    rows = [row for row, *_ in measured_by_others.of("share of the peak") if not row["aside"]]
    counts = Counter((measured_by_others.family(row), bool(row["layers"])) for row in rows)
    few = {key: count for key, count in counts.items() if count <= 2}
    rtx_3090 = {("RTX 3090", False): 1, ("RTX 3090", True): 2}
    assert few == rtx_3090 | {("H100", False): 1, ("A100", False): 2}


def test_the_ranges_beside_an_answer_and_at_its_field_are_those_of_all_rows():
    page = (ROOT / "book/will_it_fit.md").read_text(encoding="utf-8")
    ends = defaultdict(list)
    for row, _, share in measured_by_others.of("share of the peak"):
        family = measured_by_others.family(row)
        for of in (family, "all") if row["layers"] else ("conv",):
            ends[of].append(round(100 * share))
    for card in ("A100", "H100", "all", "conv"):
        assert f"\nspan-{card.lower()}: {min(ends[card])}, {max(ends[card])}, " in page
        assert len(ends[card]) >= 9
    for card in ("A100", "H100", "V100", "RTX 3090", "RTX 4090"):
        called = card.replace("RTX", "an RTX")
        assert f"{min(ends[card])} to {max(ends[card])} on {called}" in page


def test_half_a_microsecond_more_would_bring_the_rows_from_1_mib_on_within_a_fifth():
    _, bandwidth = measured_by_others.preset("h100")
    outside = []
    for kind in ("all-reduce", "all-reduce below 1 MiB"):
        for row, _, got in measured_by_others.of(kind):
            if row["link"] == "h100":
                given = row["bytes"], int(row["gpus"]), 3.5e-6, bandwidth
                ratio = will_it_fit.all_reduce_seconds(*given) / got
                outside += [row["id"]] * (not 1 / 1.2 <= ratio <= 1.2)
    assert outside == ["mle-h200-32768", "mle-h200-262144"]


def test_what_the_calculator_calls_untested_is_in_no_row_of_memory():
    rows = [row for row, *_ in measured_by_others.of("memory")]
    assert {row["rung"] for row in rows} == {"gpu", "ddp", "fsdp"}
    optimizers = {"", "adam", "adam-loop", "adam-8bit", "adam in backward", "momentum"}
    assert {row["optimizer"] for row in rows} == optimizers
    untested = r"GPT|Qwen|Mixtral|LoRA|parts"
    assert not [
        row["id"] for row in rows if re.search(untested, f"{row['model']} {row['measured']}")
    ]


def test_two_geforce_cards_are_slower_than_twice_and_four_were_slower_than_one():
    found = measured_by_others.of("speed-up over PCIe")
    times = {row["id"]: (said, got) for row, said, got in found if row["link"] == "geforce"}
    assert len(times) == 6
    assert times["lambda-4x3090-large"][1] < 1
    assert all(got / 1.25 < said < 2.05 * got for said, got in times.values())


def test_the_figure_has_a_dot_for_each_row():
    dots = chain.from_iterable(ax.collections for ax in measured_by_others.figure().axes)
    drawn = [len(part.get_offsets()) for part in dots if isinstance(part, PathCollection)]
    pairs = [kind for kind, *_ in measured_by_others.pairs(measured_by_others.read())]
    assert sum(drawn) == len(pairs) - pairs.count("FLOPs")


# --- numbers that readers send ------------------------------------------------------------------


@pytest.mark.slow
def test_rows_measured_here_pass_the_check_of_the_table_and_say_that_a_cpu_is_no_gpu():
    env = os.environ | {"CUDA_VISIBLE_DEVICES": ""}  # sizes for a GPU would take minutes
    command = [sys.executable, "-m", "benchmarks.measure_here"]
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    rows = measured_by_others.read(done.stdout.splitlines())
    measured_by_others.check(rows)
    assert rows["here-1"].keys() == next(iter(measured_by_others.read().values())).keys()
    assert {"speed", "all-reduce"} <= {row["kind"] for row in rows.values()}
    assert {row["left_out"] for row in rows.values()} == {"no GPU"}
    assert "say nothing about one" in done.stderr


def test_a_row_with_a_missing_field_is_refused():
    row = measured_by_others.read()["tune-3b"] | {"precision": "", "unit": ""}
    with pytest.raises(ValueError, match="Row mine has no unit and no precision: fill it in, or"):
        measured_by_others.check({"mine": row})
    with pytest.raises(ValueError, match="its base, other, is no row"):
        measured_by_others.check({"mine": row | {"base": "other", "left_out": "why", "unit": "s"}})
