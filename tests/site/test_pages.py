"""What the files of the built site say, without a browser to show them.

All tests that read every page stand here: reading them takes long, and one process does it once.
"""

import importlib
import inspect
import json
import re
from collections import Counter
from copy import copy
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from urllib.parse import unquote, urldefrag, urlsplit

import pytest
import yaml
from running import ROOT

from book._ext import recorded_runs

SOURCES = "\n".join(path.read_text(encoding="utf-8") for path in (ROOT / "book/api").glob("*.md"))
MODULES = re.findall(r"automodule:: (\S+)", SOURCES)
# Of HTML and of SVG.
ATTRIBUTES = ("href", "src", "xlink:href", "action", "poster", "data")

pytestmark = pytest.mark.slow


def contents():
    """What `_toc.yml` lists, as paths without suffix."""
    toc = yaml.safe_load((ROOT / "_toc.yml").read_text(encoding="utf-8"))
    chapters = [chapter for part in toc["parts"] for chapter in part["chapters"]]
    pages = [page for chapter in chapters for page in (chapter, *chapter.get("sections", []))]
    return [toc["root"], *(page["file"] for page in pages)]


def test_every_notebook_and_page_of_the_book_is_in_the_contents_and_on_the_site(pages):
    files = [*(ROOT / "notebooks").glob("*.ipynb"), *(ROOT / "book").rglob("*.md")]
    files.append(ROOT / "index.md")
    files.remove(ROOT / "book/SKILL.md")  # on the site as it is, for programs
    there = {path.relative_to(ROOT).with_suffix("").as_posix() for path in files}
    assert sorted(contents()) == sorted(there)
    assert [name for name in contents() if f"{name}.html" not in pages] == []


def test_no_page_loads_from_another_host(pages):
    """What style sheets and scripts ask for is seen by test_browser.py."""
    loads = (
        "script[src], img[src], iframe[src], source[src], link[rel~=stylesheet], link[rel~=icon]"
    )
    for name, page in pages.items():
        urls = [tag.get("src") or tag["href"] for tag in page.select(loads)]
        assert [url for url in urls if re.match(r"(https?:)?//", url)] == [], name


def test_every_picture_says_in_a_sentence_what_it_shows(pages):
    for name, page in pages.items():
        assert all(img.get("alt") for img in page.find_all("img")), name
        for figure in page.select("figure:has(svg)"):
            told = figure["aria-label"]
            assert len(told.split()) >= (6 if "mechanism" in figure["class"] else 8), (name, told)
            assert told.endswith("."), (name, told)


def test_every_page_has_a_title_and_a_description_of_its_own(pages):
    titles, descriptions = {}, {}
    for name, page in pages.items():
        found = page.find_all("meta", {"name": "description"})
        assert len(found) == 1, f"{name} has {len(found)} descriptions"
        titles.setdefault(page.title.get_text(strip=True), []).append(name)
        descriptions.setdefault(found[0]["content"].strip(), []).append(name)
    for texts in (titles, descriptions):
        assert "" not in texts
        assert [names for names in texts.values() if len(names) > 1] == []


def test_every_chapter_can_be_downloaded_as_it_is_and_with_the_packages_for_kaggle(site, pages):
    given = set()  # programs
    for notebook in (ROOT / "notebooks").glob("*.ipynb"):
        name = f"notebooks/{notebook.stem}.html"
        links = pages[name].select(".chapter-buttons a[download]:not([href$='.py'])")
        plain, *hosted = (((site / name).parent / link["href"]).resolve() for link in links)
        cells = [json.loads(path.read_bytes())["cells"] for path in (notebook, plain, hosted[0])]
        assert cells[0] == cells[1], f"{name} offers another notebook"
        assert {*hosted} == {(site / "hosted" / notebook.name).resolve()}
        assert 'carried="' in "".join(cells[2][0]["source"])
        program = [a["href"] for a in pages[name].select(".chapter-buttons a[href$='.py']")]
        for path in ((site / name).parent / link for link in program):
            assert path.read_bytes() == (ROOT / "rungs" / path.name).read_bytes()
            given.add(path.name)
    assert given == {path.name for path in ROOT.glob("rungs/[0-9]_*.py")}


def test_diffs_name_their_files_cells_are_coloured_and_answers_folded(pages):
    page = pages["notebooks/06_rung_2_one_gpu.html"]
    lines = page.select_one(".highlight-udiff pre").text.splitlines()
    assert lines[:2] == ["--- rungs/1_cpu.py", "+++ rungs/2_gpu.py"]
    assert {"for", "with"} <= {span.text for span in page.select(".cell_input .k")}
    assert page.select("details.hide .cell_output")


def test_a_prediction_ends_with_its_answer_folded_and_an_exercise_is_a_card(pages):
    for name, page in pages.items():
        asked = [strong for strong in page.select("article strong") if strong.text == "Predict."]
        predictions, exercises = page.select(".prediction"), page.select("section.exercise")
        assert [box.select_one("p > strong") for box in predictions] == asked, name
        for box in predictions:
            fold = box.select("details.below-input")[0]
            assert fold.select_one(".cell_output, figure")
            assert fold.summary.text.split() == ["Show", "the", "answer", "Hide", "the", "answer"]
            assert not fold.find_next_sibling()
        titles = [h3.text for h3 in page.select("article h3") if h3.text.startswith("Exercise ")]
        assert [exercise.h3.text for exercise in exercises] == titles


def test_a_fold_hides_what_it_has_shown(pages):
    for name, page in pages.items():
        for fold in page.select("div.cell details.hide > summary"):
            shows, hides = (said.text for said in fold.select("p"))
            assert hides == shows.partition(":")[0].replace("Show", "Hide", 1), name


def test_the_exercises_that_a_teacher_finds_stand_in_the_order_of_the_chapters(pages):
    rows = pages["book/for_teachers.html"].select("#which-exercises td:first-child")
    chapters = [row.text for row in rows]
    assert chapters == sorted(chapters) != []


def test_a_figure_has_its_alternative_text_below_it(pages):
    figures = pages["notebooks/16_resume.html"].select("figure.torchladder-figure")
    assert len(figures) > 2
    for figure in figures:
        assert figure["aria-label"].startswith(figure.figcaption.text)
        assert len(figure.figcaption.text) < 300


def test_a_recorded_run_stands_beside_its_chapter_and_is_told_with_what_failed(pages):
    told = pages["book/where_this_was_run.html"].select_one("article").text.replace("’", "'")
    assert ("Not yet verified on 2xT4" in told) != (ROOT / "book/runs/2xT4").exists()
    for file in (ROOT / "book/runs").glob("*/machine.json"):
        facts, machine = json.loads(file.read_bytes()), recorded_runs.label(file.parent.name)
        assert facts["note"] in told
        for name, part in facts["parts"].items():
            assert part.get("told", part["ended"]) in told
            here, there = f"notebooks/{name}.html", f"book/runs/{file.parent.name}/{name}.html"
            line = here in pages and pages[here].select_one(".as-run-on")
            if there in pages:
                assert line.find("a", href=f"../{there}", string=machine)
                assert facts["note"] in pages[there].select_one(".admonition").text
                links = [a["href"] for a in pages[there].select("article section section p a")]
                assert not [link for link in links if link.startswith(".")]
            elif line:
                assert f"{machine} (outputs not kept)" in line.text
                assert f"{name}: {part['ended']}, outputs not kept" in told


def test_a_recorded_page_says_that_its_chapter_did_not_reach_its_end():
    facts = {"date": "2026-01-02", "torch": "2.11", "parts": {"02": {"ended": "ValueError: `x`"}}}
    note = recorded_runs.note(SimpleNamespace(recorded_runs={"1xT4": facts}), "1xT4", "02")
    assert "did not reach its end: `ValueError: 'x'`" in note


def test_contents_of_the_clinic_are_its_headings_and_links_to_terms_say_what_they_mean(pages):
    page = pages["notebooks/errors_ranks.html"]
    links = [a.text.strip() for a in page.select(".bd-sidebar-secondary a.nav-link")]
    assert len(links) > 25
    assert links == [h2.text.strip().removesuffix("#").strip() for h2 in page.select("article h2")]
    terms = pages["notebooks/09_rung_4_distributed.html"].select("a[href*='glossary.html#']")
    told = [a["aria-description"] for a in terms]
    assert any(text.startswith("A running program with memory of its own") for text in told)
    assert all(told)
    run = page.select_one(".as-run-on").text
    assert re.search(r"this page, \d+ \w+ 20\d\d, PyTorch 2", run)
    assert pages["notebooks/09_rung_4_distributed.html"].select_one("details > .as-run-on")


def test_no_line_ends_between_a_number_and_its_unit_and_code_stays_as_it_is(pages):
    page = copy(pages["book/will_it_fit.html"])
    for code in page.select("head, pre, code, script, style, select, svg"):
        assert "\N{NO-BREAK SPACE}" not in code.extract().text
    assert not re.search(r"\d (%|GB)", page.text)


def test_the_search_index_has_the_message_of_every_error_on_a_page(index):
    texts = {page: json.dumps(sections, ensure_ascii=False) for page, _, sections in index}
    missing = []
    for notebook in (ROOT / "notebooks").glob("*.ipynb"):
        cells = json.loads(notebook.read_bytes())["cells"]
        outputs = [output for cell in cells for output in cell.get("outputs", [])]
        for message in [output["evalue"] for output in outputs if "evalue" in output]:
            first = re.sub(r"\x1b\[[\d;]*m", "", message).strip().partition("\n")[0]
            line = json.dumps(" ".join(first.split()), ensure_ascii=False)[1:-1]
            if line not in texts[f"notebooks/{notebook.stem}.html"]:
                missing.append(f"{notebook.stem}: {line}")
    assert missing == []


def article(page):
    return page.select_one("article.bd-article")


def test_headings_go_down_one_level_at_a_time_from_one_title(pages):
    wrong = {}
    for name, page in pages.items():
        if not article(page):
            continue
        levels = [int(tag.name[1]) for tag in article(page).find_all(re.compile("^h[1-6]$"))]
        steps = [b for a, b in pairwise(levels) if b > a + 1]
        if steps or levels.count(1) > 1:
            wrong[name] = levels
    assert wrong == {}


def public(module):
    """What a module offers: ``__all__``, or all that it defines and that has no underscore."""
    names = getattr(module, "__all__", None) or [
        name
        for name, thing in vars(module).items()
        if not name.startswith("_")
        and (inspect.isfunction(thing) or inspect.isclass(thing))
        and thing.__module__ == module.__name__
    ]
    return {f"{module.__name__}.{name}": getattr(module, name) for name in names}


def test_every_public_name_of_a_module_with_a_page_has_exactly_one_entry(pages):
    counts = Counter(
        term["id"]
        for name, page in pages.items()
        if name.startswith("book/api/")
        for term in page.select("dt.sig[id]")
    )
    expected = set().union(*(public(importlib.import_module(name)) for name in MODULES))
    assert {name: counts[name] for name in expected if counts[name] != 1} == {}
    assert {name: count for name, count in counts.items() if count > 1} == {}


def test_no_page_loads_an_index_before_somebody_searches(site, pages):
    assert not (site / "searchindex.js").exists()
    for page in pages.values():
        scripts = {tag["src"].partition("?")[0] for tag in page.find_all("script", src=True)}
        scripts = {Path(source).name for source in scripts}
        assert not scripts & {"searchindex.js", "searchtools.js", "search_index.js"}
        assert "search.js" in scripts


@pytest.fixture(scope="module")
def anchors(pages):
    return {name: {tag["id"] for tag in page.find_all(id=True)} for name, page in pages.items()}


def targets(page):
    for attribute in ATTRIBUTES:
        for tag in page.find_all(attrs={attribute: True}):
            yield tag[attribute]
    for tag in page.find_all("meta", {"http-equiv": "refresh"}):
        yield tag["content"].partition("url=")[2]


def leads_nowhere(site, anchors, name, target, root="/"):
    address, anchor = urldefrag(target)
    if urlsplit(address).scheme or address.startswith("//"):
        return False
    path = unquote(urlsplit(address).path)
    top = site if path.startswith("/") else (site / name).parent
    file = (top / path.removeprefix(root).lstrip("/")).resolve() if path else site / name
    if not file.is_file():
        return True
    known = anchors.get(file.relative_to(site).as_posix(), set())
    return bool(anchor) and file.suffix == ".html" and unquote(anchor) not in known


def test_every_internal_link_and_anchor_resolves(site, pages, anchors):
    root = pages["404.html"].html["data-content_root"]  # where the site is on its host
    broken = [
        f"{name}: {target}"
        for name, page in pages.items()
        for target in targets(page)
        if leads_nowhere(site, anchors, name, target, root)
    ]
    assert broken == []


def test_only_the_page_for_dead_links_has_addresses_from_the_top(pages):
    from_top = {name for name, page in pages.items() for link in targets(page) if link[:1] == "/"}
    assert from_top == {"404.html"}


def test_every_hit_leads_to_a_section_that_is_there(index, pages):
    for page, _title, sections in index:
        anchors = {tag["id"] for tag in pages[page].find_all(id=True)}
        assert {anchor for _heading, anchor, *_ in sections} - anchors == set()
