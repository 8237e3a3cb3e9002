"""Tables line up in a terminal and are HTML in a notebook."""

import pytest

from torchclinic.tables import Table, in_bytes


def test_numbers_are_flush_right_and_text_flush_left():
    table = Table(["name", "count"], [["a", 5], ["longer", "1,000"]])
    assert repr(table).splitlines() == [
        "name    count",
        "------  -----",
        "a           5",
        "longer  1,000",
    ]


def test_html_is_escaped_and_aligned_like_the_text():
    html = Table(["name", "count"], [["<a>", 5]])._repr_html_()
    assert '<td style="text-align: left">&lt;a&gt;</td>' in html
    assert '<td style="text-align: right">5</td>' in html


def test_a_row_of_another_length_is_refused():
    with pytest.raises(ValueError, match="A row of 1 under 2 columns"):
        Table(["a", "b"], [["x"]])


def test_an_empty_table_still_has_its_header():
    assert repr(Table(["a", "bc"], [])).splitlines() == ["a  bc", "-  --"]


def test_bytes_are_written_for_readers():
    assert [in_bytes(n) for n in (0, 999, 1000, 4_001_343, 3.2e9, 5e15, None)] == [
        "0 B", "999 B", "1.0 kB", "4.0 MB", "3.2 GB", "5000.0 TB", "–",
    ]  # fmt: skip
    assert [in_bytes(n) for n in (999.7, 999_960, 999_949, -999_960)] == [
        "1.0 kB", "1.0 MB", "999.9 kB", "-1.0 MB",
    ]  # fmt: skip
