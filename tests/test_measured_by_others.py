"""The formulas of the calculators against what others have measured on GPUs."""

from collections import defaultdict

import measured_by_others
import pytest

from torchclinic import will_it_fit

BOUNDS = {  # of the predictions: the median error, and the share that is within a ratio
    "memory": (0.08, 1.20, 0.90),
    "all-reduce": (0.15, 1.25, 1.00),
    "all-reduce below 1 MiB": (0.35, 2.00, 1.00),
    "FLOPs": (0.005, 1.05, 1.00),
    "share of the peak": (0.65, 2.50, 0.90),
    "speed-up over PCIe": (0.26, 1.25, 0.65),
    "speed-up over NVLink": (0.04, 1.20, 0.95),
    "speed-up over machines": (0.05, 1.25, 1.00),
}


@pytest.fixture(scope="module")
def found():
    ratios = defaultdict(list)
    for kind, row, ratio in measured_by_others.ratios():
        ratios[kind, row["aside"]].append(ratio)
    return ratios


def test_every_row_says_what_was_measured_and_where():
    rows = measured_by_others.read()
    assert len(rows) >= 150
    assert sum(row["aside"] == "yes" for row in rows.values()) >= 30
    for row in rows.values():
        assert all(row[field] != "" for field in ("source", "measured", "value", "unit"))
        assert not (row["aside"] and row["left_out"])
        assert not row["base"] or row["base"] in rows


@pytest.mark.parametrize("aside", ["", "yes"])
@pytest.mark.parametrize("kind", BOUNDS)
def test_predictions_are_as_near_as_the_book_says(found, kind, aside):
    most, ratio, share = BOUNDS[kind]
    _, error, within = measured_by_others.spread(found[kind, aside], ratio - 1)
    assert error <= most
    assert within >= share


def test_no_kind_of_row_is_forgotten(found):
    assert {kind for kind, _ in found} == set(BOUNDS)


def test_the_chapters_take_the_link_of_two_t4s_from_the_calculators():
    assert measured_by_others.preset("pcie3") == pytest.approx(will_it_fit.PCIE3)
