"""What a style sheet keeps."""

import tinycss2
from unused_styles import used


def kept(sheet, *names):
    rules = tinycss2.parse_stylesheet(sheet, skip_whitespace=True)
    return tinycss2.serialize(list(used(rules, set(names)))).strip()


def test_a_rule_stays_if_some_element_can_have_all_its_classes_and_ids():
    assert kept(".a.b > #c p{x:1}", "a", "b", "c") == ".a.b > #c p{x:1}"
    for there in ("ab", "ac", "bc"):
        assert kept(".a.b > #c p{x:1}", *there) == ""


def test_of_several_selectors_those_stay_that_can_match():
    assert kept('.a,.b .a,p[x=".b,"]{x:1}', "a") == '.a,p[x=".b,"]{x:1}'


def test_what_is_excluded_need_not_be_there():
    assert kept("p:not(.a,.b){x:1}") == "p:not(.a,.b){x:1}"


def test_one_of_several_that_are_asked_for_is_enough():
    assert kept("p:is(.a, .b) i{x:1}", "b") == "p:is(.a, .b) i{x:1}"
    assert kept("p:is(.a, .b) i{x:1}") == ""


def test_rules_inside_a_media_query_are_looked_at_one_by_one():
    sheet = "@media print{.a{x:1}.b{x:2}}"
    assert kept(sheet, "b") == "@media print{.b{x:2}}"


def test_licences_fonts_and_animations_stay():
    sheet = "/*! MIT */@font-face{src:url(a)}@keyframes k{from{x:1}to{x:2}}"
    assert kept(sheet + "/* why */") == sheet


def test_classes_that_a_script_gives_are_known(site):
    """The theme's script takes the layout from narrow search results so."""
    script = site / "_static/scripts/pydata-sphinx-theme.js"
    assert "pst-squeeze" in script.read_text(encoding="utf-8")
    assert not any(
        "pst-squeeze" in page.read_text() for page in (site / "notebooks").glob("*.html")
    )
    sheet = site / "_static/styles/pydata-sphinx-theme.css"
    assert ".pst-squeeze" in sheet.read_text(encoding="utf-8")
