"""The search: what it finds, how it shows it, and that it needs neither mouse nor server."""

import json
import re
from hashlib import sha1
from pathlib import Path

import pytest
from running import ROOT
from test_browser import POCKET, assert_axe_finds_nothing

# Which section answers which query; of the first 18 that was known before any search was tried.
QUERIES = json.loads(Path(__file__).with_name("queries.json").read_text(encoding="utf-8"))
MAY_MISS = 2
OPENED = "search.html"

ELSEWHERE = [
    "index.html#the-chapters-and-their-questions",
    "book/errors.html",
    "book/glossary.html",
]

pytestmark = pytest.mark.slow


def ask(page, query):
    """Type a query on search.html; the addresses of the hits, within the site."""
    page.fill(".bd-search-container input", query)
    page.wait_for_function(
        "query => new URLSearchParams(location.search).get('q') == query", arg=query
    )
    root = page.evaluate("new URL('.', location.href).href")
    links = page.locator(".bd-search-container .search-hits a")
    return [link.removeprefix(root) for link in links.evaluate_all("all => all.map(a => a.href)")]


def test_the_page_that_answers_a_query_comes_first(opened):
    wrong = {}
    for query, wanted in QUERIES.items():
        first = ask(opened, query)[:1]
        if not first or first[0].partition("#")[0] != wanted.partition("#")[0]:
            wrong[query] = first
    assert len(wrong) <= MAY_MISS, wrong
    assert opened.errors == []
    assert [url for url in opened.asked if not url.startswith("file:")] == []


ASKED = (ROOT / "src/torchclinic/catalogue/asked.tsv").read_text(encoding="utf-8")
ROWS = [line.split("\t") for line in ASKED.splitlines()[1:]]
# One question in eight also measures how a question is answered that is not in the list.
MEASURE = [row for row in ROWS if sha1(row[0].encode()).digest()[0] % 8 == 1]
OTHERS = [row for row in ROWS if row not in MEASURE]
ANSWERS = """([questions, kept]) => {
    const pages = searchIndex.pages.map(([page, title, parts]) => [page, title, parts.map(
        ([heading, anchor, weight, text, asked]) =>
            [heading, anchor, weight, text, asked.filter((question) => kept.includes(question))])]);
    const search = searching(pages, "en", searchIndex.also);
    const hits = (question) => search.find(question).hits.slice(0, 3);
    return questions.map((q) => hits(q).map((h) => `${h.page.replace(".html", "")}#${h.anchor}`));
}"""


@pytest.mark.parametrize(
    ("kept", "first", "in_three"),
    # They are 0.99 and 1.00, held out 0.50 and 0.71. No section answers more than 8 of the 311: no
    # single heading that somebody changes can cost what lies between.
    [(ROWS, 0.96, 0.97), (OTHERS, 0.45, 0.65)],
    ids=["all", "held out"],
)
def test_what_people_ask_is_answered_first_and_often_if_it_is_not_in_the_list(
    opened, kept, first, in_three
):
    opened.fill(".bd-search-container input", "tensor")
    opened.wait_for_selector(".bd-search-container .search-hits a")
    found = opened.evaluate(ANSWERS, [[q for q, _ in MEASURE], [q for q, _ in kept]])
    right = []
    for (_question, targets), hits in zip(MEASURE, found, strict=True):
        # A target without a section is a page: all of its sections answer.
        right.append([not {hit, hit.partition("#")[0]}.isdisjoint(targets.split()) for hit in hits])
    shares = [sum(any(r[:n]) for r in right) / len(right) for n in (1, 3)]
    assert len(MEASURE) > 200
    assert shares[0] >= first, shares
    assert shares[1] >= in_three, shares


def test_a_typing_error_is_corrected_and_hits_are_shown_in_groups(opened):
    assert ask(opened, "dpp")[0] == ask(opened, "ddp")[0]
    ask(opened, "memroy")
    box = opened.locator(".bd-search-container .search-found")
    assert "This is what has “memory”." in box.locator(".search-says").inner_text()
    groups = box.locator(".hit-group").all_inner_texts()
    assert groups[0] == "Best"
    assert {*groups[1:]} == {"Chapters", "Errors", "Tools and other pages", "Glossary"}
    assert box.locator("details[open]").count() == 0
    assert box.locator(".search-hits a >> visible=true").count() <= 8 * len(groups)
    for term in ("rank", "rendezvous"):
        assert any("glossary.html#" in hit for hit in ask(opened, term)[:3]), term


def test_of_a_long_text_the_beginning_is_looked_for_and_no_word_is_put_right(opened):
    words = " ".join(f"{word}x tensor" for word in ("qvantum", "zorblat", "plimth") * 200)
    opened.goto(f"{opened.address}?q={words}")
    opened.wait_for_selector(".bd-search-container .search-hits a")
    asked = opened.evaluate("new URLSearchParams(location.search).get('q')")
    assert asked == words[:2000].strip()
    opened.goto(f"{opened.address}?q=half%20a%20tensor")
    opened.evaluate("""() => {
        const field = document.querySelector(".bd-search-container input");
        field.value = "half a tensor \\ud83d";
        field.dispatchEvent(new InputEvent("input"));
    }""")
    opened.wait_for_function("location.search.endsWith('tensor%20%EF%BF%BD')")
    opened.goto(opened.address)


def test_what_the_calculators_answer_at_first_is_not_found_but_what_they_are_for_is(index):
    page = next(sections for page, _, sections in index if page == "book/will_it_fit.html")
    texts = " ".join(text for _heading, _anchor, _weight, text, _asked in page)
    assert "How much memory training needs on each GPU" in texts
    assert not re.search(
        "To (train|use it): yes|8 GPUs are|With full caches|[0-9] GB of gradients", texts
    )


def test_how_long_a_chapter_takes_is_no_text_of_it_and_many_hits_are_not_called_all(opened, index):
    sections = [section for _page, _title, sections in index for section in sections]
    assert not any("minutes to read." in text for _, _, _, text, _ in sections)
    ask(opened, "gpu")
    assert opened.inner_text(".bd-search-container .search-says") == "The 50 best sections."


def test_every_section_that_answers_a_question_is_there(index):
    known = {f"{page}#{s[1]}" for page, _title, sections in index for s in sections}
    known |= {page for page, *_ in index}
    targets = {t for _question, targets in ROWS for t in targets.split()}
    assert {re.sub("(#|$)", r".html\1", t, count=1) for t in targets} - known == set()


def test_a_message_with_other_numbers_and_paths_leads_to_its_entry(opened):
    message = (
        "torch.distributed.DistBackendError: NCCL error in: /pytorch/c10d/ProcessGroupNCCL.cpp"
        ":9999, unhandled system error (run with NCCL_DEBUG=INFO for details), NCCL version 9.99.9"
    )
    assert ask(opened, message)[0] == "notebooks/errors_ranks.html#nccl-system-error"
    known = opened.inner_text(".bd-search-container .search-hits .hit-page >> nth=0")
    assert "the error clinic knows this message" in known


def test_a_hit_shows_its_sentence_with_the_words_marked(opened):
    hit = opened.locator(".bd-search-container .search-hits li").first
    ask(opened, "metrics over ranks")
    assert hit.locator(".hit-heading mark").all_inner_texts() == ["Metrics over ranks"]
    assert "09 · Rung 4 Train with DistributedDataParallel" in hit.locator(".hit-page").inner_text()
    marked = " ".join(hit.locator(".hit-text mark").all_inner_texts()).lower()
    assert "rank" in marked
    assert len(hit.locator(".hit-text").inner_text()) < 300
    # Who asks in words reads prose, and who asks in code, code; of sections what they are about.
    for query, kind, said in [
        ("multi gpu inference", "span", ""),
        ("torch.inference_mode()", "code", ""),
        ("why is dataparallel slow", "span", "How much is copied in each step?"),
    ]:
        ask(opened, query)
        assert said in hit.locator(f".hit-text > {kind}").inner_text(), query


def test_an_empty_field_shows_what_may_be_asked_and_each_of_it_is_answered(opened):
    opened.fill(".bd-search-container input", "")
    examples = opened.locator(".bd-search-container .search-advice a")
    examples.first.wait_for()
    for query in examples.all_inner_texts():
        assert len(ask(opened, query)) >= 3, query
    opened.fill(".bd-search-container input", "")
    examples.first.click()
    opened.locator(".search-hits a").first.wait_for()
    assert "?q=" in opened.url


def test_what_nothing_answers_is_said_and_an_error_is_sent_to_the_clinic(opened):
    assert ask(opened, "zzyzx") == []
    says = ".bd-search-container .search-says"
    assert opened.inner_text(says) == "Nothing has the words “zzyzx”."
    ways = opened.locator(".bd-search-container .search-advice a")
    assert [way.get_attribute("href").removeprefix("./") for way in ways.all()] == ELSEWHERE
    assert ask(opened, "ZzyzxError: frobnication failed") != []
    assert opened.inner_text(says).startswith("No section has all of these words;")
    offered = opened.locator(".bd-search-container .search-advice a").get_attribute("href")
    assert offered.endswith("book/errors.html#log")


def test_without_a_script_the_page_of_the_search_leads_on_and_has_no_field(visit):
    page = visit("search.html", java_script_enabled=False)
    ways = page.locator(".bd-search-container a")
    assert [way.get_attribute("href") for way in ways.all()] == ELSEWHERE
    assert not page.locator(".bd-search-container input").is_visible()


def test_escape_leads_back_to_the_button_that_opened_the_search(visit):
    page = visit("notebooks/04_tensors_across_devices.html", viewport=POCKET)
    button = page.locator(".bd-header-article .search-button")
    button.focus()
    page.keyboard.press("Enter")
    page.locator("#pst-search-dialog input").wait_for()
    page.keyboard.press("Escape")
    page.wait_for_function("document.activeElement.matches('.bd-header-article .search-button')")


def test_the_keyboard_alone_goes_from_a_chapter_to_a_hit_or_to_all_of_them(visit):
    page = visit("notebooks/04_tensors_across_devices.html")
    page.keyboard.press("Control+k")
    page.keyboard.type("pin_memory")
    page.wait_for_selector("#pst-search-dialog .search-hits a")
    assert page.locator("#pst-search-dialog [role=status]").inner_text()
    page.keyboard.press("Escape")
    assert not page.locator("#pst-search-dialog").is_visible()
    page.keyboard.press("Control+k")
    page.keyboard.press("Control+a")
    page.keyboard.insert_text("set_epoch")
    page.wait_for_selector(f"#pst-search-dialog .search-hits a[href$='{QUERIES['set_epoch']}']")
    for key in ("ArrowDown", "ArrowDown", "ArrowUp", "ArrowUp"):
        page.keyboard.press(key)
    assert page.evaluate("document.activeElement.name") == "q"
    page.keyboard.press("ArrowDown")
    page.keyboard.press("Enter")
    page.wait_for_url(f"**/{QUERIES['set_epoch']}")
    page.keyboard.press("Control+k")
    page.locator("#pst-search-dialog .search-hits a").first.wait_for()
    assert page.locator("#pst-search-dialog input").input_value() == "set_epoch"
    page.click("#pst-search-dialog .dialog-close")
    assert not page.locator("#pst-search-dialog").is_visible()
    page.keyboard.press("Control+k")
    page.keyboard.press("Control+a")
    page.keyboard.type("what is a state_dict")
    page.keyboard.press("Enter")  # opens the best, though it was pressed before the hits were there
    page.wait_for_url("**/02_models_on_disk.html#what-is-a-state-dict")
    page.keyboard.press("Control+k")
    page.keyboard.press("Control+a")
    page.keyboard.insert_text("state_dict")
    page.locator("#pst-search-dialog .search-more a[href$='q=state_dict']").press("Enter")
    page.wait_for_url("**/search.html?q=state_dict")  # an address to pass on
    page.wait_for_selector(".bd-search-container .search-hits a")
    assert page.locator(".bd-search-container .search-hits a").count() > 8


def test_hits_fit_the_window_and_axe_finds_nothing_serious(visit, axe):
    page = visit("search.html?q=torch.load", viewport=POCKET, reduced_motion="reduce")
    page.keyboard.press("Control+k")
    page.keyboard.type("torch.load")
    page.wait_for_selector(".search-hits a >> visible=true")
    assert page.evaluate("document.documentElement.scrollWidth") <= 390
    assert_axe_finds_nothing(page, axe)


def test_what_is_loading_or_cannot_be_loaded_is_said(visit):
    page = visit("search.html", without="**/search_index.js")
    page.fill(".bd-search-container input", "tensor")
    page.locator(".bd-search-container .search-says", has_text="could not be loaded").wait_for()
