"""The page "I have an error": what stands there, what its script finds in a log, how it is used."""

import pickle
import random
import re

import pytest
from running import ROOT
from test_browser import PHONE, assert_axe_finds_nothing

from tools.clinic_notebooks import PARTS
from torchclinic import errors
from torchclinic.errors import asking, cases, telling
from torchclinic.errors.finding import GAP
from torchclinic.errors.roots import unknown_root
from torchclinic.errors.squeezing import signs as signs_of
from torchclinic.errors.telling import ASK, _only_notices

OPENED = "book/errors.html"
SIZE = 5_000_000
CATALOGUE = errors.catalogue()
OF_PART = {part: [error for error in CATALOGUE.values() if error.part == part] for part in PARTS}
NOTICE = " environment variable for each process to be 1 in default"
PREFIXED = "module-prefix"  # an entry that a reader of chapter 14 meets
PREFIX = CATALOGUE[PREFIXED]
LOG = """\
W1122 05:13:11.123000 4242 torch/distributed/run.py:803] Setting OMP_NUM_THREADS
[rank1]: Traceback (most recent call last):
[rank1]:   File "/home/me/train.py", line 41, in <module>
[rank1]: RuntimeError: Error(s) in loading state_dict for Net:
[rank1]: \tMissing key(s) in state_dict: "conv.weight".
[rank1]: \tUnexpected key(s) in state_dict: "module.conv.weight", "<img src=x onerror=alert(1)>".
"""

pytestmark = pytest.mark.slow


def letters(text):
    return re.sub(r"[^a-zA-Z0-9_]", "", text)


# --- what stands there --------------------------------------------------------------------------


def test_the_list_has_every_entry_once_and_each_leads_to_its_section(pages):
    items = iter(pages[OPENED].select(".error-index > li"))
    for part, entries in OF_PART.items():
        sections = pages[f"notebooks/errors_{part}.html"].select("article section section")
        assert [section["id"] for section in sections] == [error.id for error in entries]
        for section, error in zip(sections, entries, strict=True):
            heading = section.select_one("h2 > :first-child, h2").text
            item = next(items)
            address = f"../notebooks/errors_{part}.html#{error.id}"
            assert item.select_one(".error-title a")["href"] == address
            for name in ("title", "message", "cause", "fix"):
                said = item.select_one(f".error-{name}").text
                text = re.sub(r"\]\([^)]*\)", "", getattr(error, name))
                assert letters(said) == letters(re.sub(r"\|[ |-]+\|", "", text)), error.id
            assert letters(heading) == letters(error.title)
    assert list(items) == []


def test_without_a_script_the_whole_list_is_there_and_no_field_is(pages):
    page = pages[OPENED]
    assert all("pst-js-only" in field["class"] for field in page.select(".clinic-field"))
    assert not page.select(".error-index[hidden], .error-index [hidden]")
    assert "needs JavaScript" in page.select_one("article noscript").text
    assert letters(page.select_one(".ask-others").text) == letters(ASK)


def test_every_phrase_of_the_script_is_in_the_page(pages):
    script = (ROOT / "book/_static/errors.js").read_text(encoding="utf-8")
    there = {phrase["data-phrase"] for phrase in pages[OPENED].select("[data-phrase]")}
    named = set(re.findall(r'phrase\("([\w-]+)"', script)) | {"first", "later"}
    named |= {"follows", "follows-alone", "warning", "found-one", "found-more"}
    assert there == named | {"none", "other", "short", "unknown", "unknown-at"}


# --- what the script finds ----------------------------------------------------------------------

HARD = ["\x1b[31m", "\x1b[", "[31m", "1m", "\\u001b", "^[", "[rank0]: ", "[rank1]:", " ", "\t"]
HARD += [*"\r\u2028\xa0\u3000\ufeff\x85\x1c\x00\x7f𝟘é：「‘\"'…\\n|", "\\n", "\\t", "\\\\n", "\\'"]
HARD += ["E   ", "> ", ">>> ", "- ", "2026-01-01 10:10:10,123 ", "10:10:10", "INFO", "ERROR "]
HARD += ["ERROR", "0:", "worker-1  |", "I0101 10:10:10.123 55 a/b.py:5] ", "[1,0]<stderr>:"]
HARD += ["\n", "\n", "\n", "\r\n"]


def logs():
    """Every log of the tests, some made of what makes them hard, and hostile ones."""
    files = sorted((ROOT / "tests/errors").rglob("*.txt"))
    yield from (file.read_bytes().decode("utf-8", "replace") for file in files)
    patterns = [pattern for error in CATALOGUE.values() for pattern in error.patterns]
    yield from ("", "\n", LOG, LOG.replace("\n", "\r\n"), "KeyError: 'momentum'", "Error Error")
    yield from ("val_error: 0.52, 0 errors", "10 errors", "error: 0", "1.0 error")
    yield "Test error 3.1 %\nKilled\n"
    yield from ("## CUDA out of memory", "If you see CUDA out of memory: CUDA error: out of memory")
    for pattern in patterns:
        yield f"[rank0]: {pattern.replace('*', 'x')}\n"
        yield pattern.replace("*", "x" * GAP)
        yield pattern.replace("*", "x" * (GAP + 1))
        yield pattern.split("*")[0] * 50
    chance = random.Random(0)
    for _ in range(300):
        yield "".join(chance.choice([*HARD, *patterns]) for _ in range(chance.randint(1, 40)))


@pytest.fixture
def page(opened):
    opened.evaluate("window.clinic ??= finding(errorRules)")
    opened.locator("#log").fill("")
    opened.wait_for_function("!document.querySelector('#found').hasChildNodes()")
    yield opened
    assert opened.errors == []


def test_the_script_finds_what_the_package_finds(page):
    cases = list(logs())
    answers = """logs => logs.map(log => [clinic.find(log), log]).map(([found, log]) =>
        [found.map(({id, line}) => [id, line]),
         clinic.otherProgram(log), clinic.signs(log), clinic.onlyNotices(log, found)])"""
    wanted = []
    for log in cases:
        told = errors.find(log)
        signs, notices = signs_of(log), _only_notices(log, told)
        ids = [[match.error.id, match.line] for match in told]
        wanted.append([ids, errors.other_program(log), signs, notices])
    found = page.evaluate(answers, cases)
    assert [(log, a, b) for log, a, b in zip(cases, found, wanted, strict=True) if a != b] == []
    assert sum(bool(matches) for matches, *_ in wanted) > len(CATALOGUE)


ROOT_ERROR = """\
[rank0]: Traceback (most recent call last):
[rank0]:   File "/home/me/train.py", line 9, in <module>
[rank0]:   File "/usr/lib/python3.11/site-packages/x/y.py", line 77, in get
[rank0]: KeyError: 'k'

failed (exitcode: 1) local_rank: 0
"""


def test_the_first_error_that_no_entry_knows_stands_before_its_echo_as_in_the_terminal(page):
    known = "\n" * 9 + "IndexError: Target 10 is out of bounds."
    cases = [
        *logs(),
        "usage: a\na.py: error: no such thing\n",
        ROOT_ERROR,
        ROOT_ERROR + known,
        ROOT_ERROR.replace("/home/me", "/lib/python3"),
    ]
    wanted = [unknown_root(log, errors.find(log)) or None for log in cases]
    assert page.evaluate("logs => logs.map(log => clinic.read(log).unknown)", cases) == wanted
    assert wanted[-3] == {
        "line": 4,
        "text": "KeyError: 'k'",
        "program": "/home/me/train.py, line 9",
    }
    page.locator("#log").fill(ROOT_ERROR)
    page.wait_for_selector(".match")
    shown = page.locator("#found").inner_text()
    assert 0 <= shown.find("at /home/me/train.py, line 9:") < shown.find("KeyError: 'k'")
    assert shown.find("KeyError: 'k'") < shown.find("ChildFailedError")


def logs_of_cases():
    """Logs with the words of each case of each entry: in its line, others, code, a path."""
    for error in CATALOGUE.values():
        message = error.patterns[0].replace("*", "x") if error.patterns else ""
        for words in [part for parts, _ in cases.cases_of(error) for part in parts]:
            text = " ".join(words)
            yield f"{message} {text}"
            yield f"RuntimeError: {text}\n{message}\n\n{text}"
            frame = f'File "/envs/{text}/{text}.py", line 3, in f'
            begun = f"Traceback (most recent call last):\n  {frame}\n"
            yield f"{begun}    {text}\nRuntimeError: {message}"
            yield f"{begun}    f(x)\nRuntimeError: {message} a{text}b"
            yield f"{'x ' * 9000}{message} {text}"


def test_of_several_cases_the_script_puts_the_same_first_as_the_package(page):
    told = "logs => logs.map(log => clinic.read(log).matches.map(({id, cases}) => [id, cases]))"
    chosen, logs = 0, list(logs_of_cases())
    for log, found in zip(logs, page.evaluate(told, logs), strict=True):
        matches = errors.find(log)
        wanted = [[match.error.id, cases.about(match.error, *match.place)] for match in matches]
        assert found == wanted, log
        chosen += any(which for _, which in wanted)
    assert chosen > len(logs) / 3


TIMED = """([unit, size]) => {
    const log = unit.repeat(Math.ceil(size / unit.length)).slice(0, size);
    const start = performance.now();
    clinic.find(log);
    return performance.now() - start;
}"""


def test_no_log_of_5_mb_takes_long_and_an_ordinary_one_is_answered_at_once(page):
    line = '[rank{0}]: 2026-01-01 10:10:{0:02d},123 INFO train.py:{1} - "step" {1} loss 0.{2}\n'
    unit = "".join(line.format(i % 8, i, i * 7919 % 100_000) for i in range(1000))
    fastest = min(page.evaluate(TIMED, [unit, SIZE]) for _ in range(5))
    assert fastest < 2000  # 200 ms on a quiet machine; this one may be busy
    hostile = ["a", "\n", "> ", '"', " ", "\r", "\x1b[", "[1;", "\\n", "\t[rank1]:\t"]
    hostile += [f"{'a' * 60}         \n", "Error abcd efgh\n"]
    firsts = [p.partition("*") for error in CATALOGUE.values() for p in error.patterns]
    hostile += [first for first, gap, _ in firsts if gap][:5]
    slow = {unit: page.evaluate(TIMED, [unit, SIZE]) for unit in hostile}
    assert {unit: ms for unit, ms in slow.items() if ms > 5000} == {}


# --- the box for a log --------------------------------------------------------------------------


def ids_of(links):
    return links.evaluate_all("links => links.map(link => link.hash.slice(1))")


def test_a_log_is_answered_with_the_keyboard_alone_and_shown_as_text(page):
    page.locator("#log").focus()
    page.keyboard.insert_text(LOG)
    match = page.locator(".match").first
    assert page.locator("#log-says").inner_text() == "One entry matches your log."
    assert page.locator("#log-says").get_attribute("role") == "status"
    for _ in ("Clear the box", "the message"):
        page.keyboard.press("Tab")
    focused = page.locator(":focus")
    assert focused.get_attribute("href").endswith(f"errors_states.html#{PREFIXED}")
    assert page.evaluate("getComputedStyle(document.activeElement).outlineStyle") != "none"
    match.locator("summary").press("Enter")
    told = match.inner_text()
    first = letters(told).find(letters("line 6"))
    parts = [letters(told).find(letters(part)) for part in (PREFIX.title, *PREFIX.in_brief)]
    assert 0 <= first < parts[0] < parts[1] < parts[2] < letters(told).find("Whythisone")
    assert "This more general entry also matches: Missing and unexpected keys" in told
    assert "line 6" in told
    assert "onerror=alert(1)>" in told
    marked = match.locator("mark").all_inner_texts()
    assert marked == ['Unexpected key(s) in state_dict: "module']
    assert match.locator("img").count() == 0
    page.get_by_role("button", name="Clear").click()
    assert page.evaluate("document.activeElement.id") == "log"
    page.wait_for_function("!document.querySelector('#found').hasChildNodes()")
    assert page.locator("#log-says").inner_text() == ""


def test_a_few_words_that_no_entry_has_lead_to_the_search(page, visit):
    page.locator("#log").fill("out of memory")
    link = page.locator("#found a", has_text="Search the book").get_attribute("href")
    assert link == "../search.html?q=out%20of%20memory"
    first = visit(f"book/{link}").locator(".bd-search-container .search-hits a").first
    assert "memory" in first.inner_text()


SAID = [
    "loss grows when I accumulate", "显存慢慢增加", "it hangs\nwhen only rank 0 validates\n",
    "the model file\nhas 138 kB after ZeRO-3", "RuntimeError: the ranks hang in the validation",
]  # fmt: skip


DECIDED = [  # what no entry is likely for, and the case that then comes first
    ("Since our move, the net on the new server is slow", "Always 0 %"),
    ("More memory is used since our second coffee", "once, after the first step"),
    ("After the resume nothing happened, and the run was stuck in the same room", "After a resume"),
]  # fmt: skip


def test_what_somebody_says_leads_to_the_same_three_in_the_box_and_in_the_terminal(page):
    for text in SAID:
        page.locator("#log").fill("")
        page.wait_for_function("!document.querySelector('#found').hasChildNodes()")
        page.locator("#log").fill(text)
        best = page.locator("#found .search-hits a")
        best.first.wait_for()
        found = best.evaluate_all("all => all.map(a => a.href.split('/html/').at(-1))")
        wanted = asking.nearest(text)
        says = page.locator("#log-says").inner_text()
        assert says == ("No entry matches your log." if "Error" in text else telling.NEAREST)
        for link, address in zip(found, wanted, strict=True):
            assert link.replace(".html", "").endswith(address.partition("book/")[2] or address)
    for said, first in DECIDED:
        page.locator("#log").fill(said)
        case = page.locator("#found li").first
        case.get_by_text(first).wait_for()
        assert page.locator("#log-says").inner_text() == telling.DECIDES
        whole = "".join(page.locator("#found > div").first.all_inner_texts())
        assert letters(whole) in letters(telling.explain(said))
        assert page.locator("#found .search-hits").count() == 0
    page.locator("#log").fill("how do I bake a chocolate cake")
    page.locator("#found").get_by_text("Nothing in the book is close").wait_for()
    message = "I cannot bake a chocolate cake: unexpected flour"  # in words, which no entry has
    assert telling.explain(message).startswith(f"{telling.UNKNOWN}\n")
    page.locator("#log").fill(message)
    page.locator("#log-says", has_text="No entry matches your log").wait_for()
    assert "Nothing in the book is close" not in page.locator("#found").inner_text()
    page.locator("#log").fill("epoch 1: loss 0.42\nepoch 2: loss 0.31")
    page.wait_for_function("!document.querySelector('#found .search-hits')")


def test_the_script_reads_questions_as_the_package_does(page):
    page.locator("#log").fill(SAID[0])
    page.wait_for_selector("#found .search-hits")  # the scripts are there
    asked = [
        *SAID,
        "",
        "x",
        "训",
        "steps 1/2: loss 0.3",
        HARD[0],
        *(q for q, _ in asking._rows("asked")[::9]),
    ]
    asked.append(f"{SAID[0]}\n\nI see this:\n\n```\nepoch 1: loss 0.42\n```\n\nWhat can my net do?")
    asked += [
        f"{said} {words}" for said, *_ in DECIDED for words in ("", "on two GPUs", "since May")
    ]
    asked += ["the port is already in use, an error", "each worker needs more memory"]
    asked += ["It is not a hang, the training is slow in Graz", "no oom, the epoch is longer"]
    asked += ["This is not a memory leak. The accuracy is bad", "swap the two layers please"]
    both = "all => { const asker = nearest(errorWords); "
    both += "return all.map(q => [asker.find(q), asker.decides(q), saidIn(q)]); }"
    wanted = [[asking.nearest(q), [*asking.decides(q)], asking.said_in(q)] for q in asked]
    assert page.evaluate(both, asked) == wanted


def test_on_a_phone_the_first_answer_to_a_few_words_is_above_the_keyboard_and_a_tap_opens_it(visit):
    height = 500  # that a keyboard leaves
    page = visit(OPENED, viewport={"width": PHONE, "height": height}, has_touch=True)
    files = page.locator(".choose-files")
    assert files.is_visible()
    page.locator("#log").tap()
    page.keyboard.type("second gpu idle")
    answer = page.locator("#found .search-hits a").first
    answer.wait_for()
    assert not files.is_visible()
    page.get_by_role("button", name="Clear").tap()
    files.wait_for()
    page.keyboard.type("second gpu idle")
    answer.wait_for()
    box = answer.bounding_box()
    assert box["y"] + box["height"] < height
    page.touchscreen.tap(box["x"] + 50, box["y"] + 5)
    page.wait_for_url("**#dp-second-gpu-idle")


def test_an_example_is_one_button_away(page):
    assert not page.get_by_role("button", name="Clear").is_visible()
    page.get_by_role("button", name="Try an example").click()
    assert ids_of(page.locator(".match h2 a")) == [PREFIXED]


def test_of_several_cases_the_one_that_the_log_names_comes_first_as_in_the_terminal(page):
    for log in (
        "RuntimeError: DataLoader worker (pid 7) is killed by signal: Terminated. ",
        "RuntimeError: The checkpoint being loaded used a DP world size of 8 but the current is 4.",
    ):
        page.locator("#log").fill(log)
        page.wait_for_selector(".match")
        shown = letters(page.locator(".match .error-fix").first.inner_text())
        told = letters(errors.explain(log).split("\nDo:")[1])
        assert "Otherwise" in shown
        assert told.startswith(shown)
        page.locator("#log").fill("")
        page.wait_for_function("!document.querySelector('#found').hasChildNodes()")


def test_files_come_into_the_field_and_dumps_are_sent_to_a_terminal(page, tmp_path):
    dump = {"version": "2.4", "pg_config": {}, "entries": []}
    files = [tmp_path / name for name in ("log_0", "trace_0")]
    files[0].write_text(LOG)
    files[1].write_bytes(pickle.dumps(dump, 2))
    says = "document.querySelector('#log-says').textContent"
    for file, wanted in zip(files, ("One entry", "torchclinic"), strict=True):
        page.locator("#log").fill("")
        page.locator(".choose-files input").set_input_files([file, files[0]])
        page.wait_for_function(f"{says}.includes('{wanted}')")
        assert (page.locator(".match").count() > 0) == (file == files[0])
        assert page.locator("#log").input_value().endswith(f"\n{LOG}")


def test_logs_chosen_one_after_the_other_are_read_together_that_of_an_own_error_first(
    page, tmp_path
):
    gone = (
        "RuntimeError: [../gloo/transport/tcp/pair.cc:561] Connection closed by peer [127.0.0.1]:1"
    )
    for name, text in (("a", gone), ("b", LOG)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "stderr.log").write_text(text)
        page.locator(".choose-files input").set_input_files(tmp_path / name / "stderr.log")
        page.wait_for_function("t => document.querySelector('#log').value.includes(t)", arg=text)
    assert page.locator("#log").input_value() == f"{LOG}\n{gone}"
    page.locator("#log").fill("")
    page.wait_for_function("!document.querySelector('#found').hasChildNodes()")
    page.locator(".choose-files input").set_input_files(tmp_path / "a" / "stderr.log")
    page.wait_for_function("t => document.querySelector('#log').value == t", arg=gone)


# A timer of the page counts while it says that it reads.
COUNT = """() => {
    window.ticks = 0;
    const says = document.querySelector("#log-says");
    setInterval(() => { ticks += says.textContent.startsWith("Reading"); }, 1);
}"""
FILLER = "step 1 loss 0.5\n"
PHRASES = [p.replace("*", "x") for error in CATALOGUE.values() for p in error.patterns]
ATTACKS = {
    "a log": FILLER * 50_000 + LOG + FILLER * 50_000,
    "all phrases in one line": " ".join(PHRASES * 5),
    "all phrases far into a line": "x " * 200_000 + " ".join(PHRASES),
    "line ends": "\n" * 300_000 + "CUDA out of memory",
    "escapes in one line": "\x1b[" * 150_000 + "CUDA out of memory",
}


@pytest.mark.parametrize("log", ATTACKS.values(), ids=ATTACKS)
def test_a_long_log_is_read_while_the_page_goes_on_and_the_field_has_its_end(visit, log):
    page = visit(OPENED)
    page.evaluate(COUNT)
    page.locator("#log").focus()
    page.keyboard.insert_text(log)
    found = errors.find(log)
    page.wait_for_function("n => document.querySelectorAll('.match').length == n", arg=len(found))
    assert page.evaluate("ticks") > 0
    assert ids_of(page.locator(".match h2 a")) == [match.error.id for match in found]
    lines = page.locator(".match .log-line:first-child")
    told = [line.partition(" ")[2].partition("\n")[0] for line in lines.all_inner_texts()]
    assert told == [str(match.line) for match in found]
    marks = lines.evaluate_all("all => all.map(line => line.querySelectorAll('mark').length)")
    assert 0 not in marks
    value = page.locator("#log").input_value()
    assert len(value) <= 20_000
    assert log.endswith(value)
    size = f"{len(log) / 1e6:.1f} MB" if len(log) > 1e6 else f"{len(log) / 1e3:.0f} kB"
    assert f"All of it is read: {size}." in page.locator(".clinic-field").inner_text()


def test_what_stands_before_a_fields_text_goes_on_counting_until_all_is_replaced(visit):
    page = visit(OPENED)
    page.locator("#log").focus()
    page.keyboard.insert_text(LOG + FILLER * 2_000)
    match, part = page.locator(".match"), page.locator(".field-hint", has_text="The box shows")
    match.wait_for()
    page.keyboard.type("y")
    page.wait_for_timeout(600)  # longer than the pause after which what was typed is read
    match.wait_for()
    page.keyboard.insert_text(FILLER * 2_000)  # another log, after the first
    page.wait_for_function("document.querySelector('#log').value.length < 20000")
    match.wait_for()
    assert part.is_visible()
    page.keyboard.press("Control+a")
    page.keyboard.insert_text("KeyError: 'momentum' and others")
    match.wait_for(state="detached")
    assert not part.is_visible()


def test_a_log_without_end_and_a_file_that_cannot_be_read_are_refused(page, tmp_path):
    large = tmp_path / "large.txt"
    with large.open("wb") as file:
        file.truncate(51_000_000)
    page.locator(".choose-files input").set_input_files(large)
    says = page.locator("#log-says", has_text="Your log is 51.0 MB")
    says.wait_for()
    assert "torchclinic explain" in says.inner_text()
    page.evaluate(
        "() => { File.prototype.arrayBuffer = async () => { throw new DOMException('gone'); } }"
    )
    (tmp_path / "small.txt").write_text(LOG)
    page.locator(".choose-files input").set_input_files(tmp_path / "small.txt")
    page.locator("#log-says", has_text="A file could not be read").wait_for()
    page.reload()


def test_a_checkpoint_is_no_text_and_a_log_of_powershell_is(page, tmp_path):
    says = page.locator("#log-says")
    (tmp_path / "model.pt").write_bytes(b"PK\x03\x04" + bytes(range(256)) * 50)
    page.locator(".choose-files input").set_input_files(tmp_path / "model.pt")
    says.filter(has_text="This is not text").wait_for()
    assert "torchclinic inspect" in says.inner_text()
    assert page.locator("#log").input_value() == ""
    (tmp_path / "log.txt").write_text(LOG, "utf-16")
    page.locator(".choose-files input").set_input_files(tmp_path / "log.txt")
    says.filter(has_text="One entry").wait_for()
    assert page.locator("#log").input_value() == LOG
    page.reload()


def test_long_code_of_a_cure_is_copied_with_a_button(visit):
    page = visit(OPENED, permissions=["clipboard-read", "clipboard-write"])
    page.locator("#log").fill(LOG)
    code = page.locator(".match .do code:has(+ .copy-code)").first
    page.get_by_role("button", name="Copy", exact=True).first.click()
    page.get_by_role("button", name="Copied").wait_for()
    assert page.evaluate("navigator.clipboard.readText()") == code.text_content()


def test_what_a_cure_quotes_of_a_log_has_no_button_and_what_one_types_has(page):
    page.locator("#log").fill("Engine core initialization failed. See root cause above")
    page.wait_for_selector(".match")
    codes = page.locator(".match .do code.literal")
    copied = page.locator(".match .do code:has(+ .copy-code)").all_text_contents()
    assert "Engine core initialization failed" in codes.all_text_contents()
    assert "Engine core initialization failed" not in copied
    page.locator("#log").fill("")
    page.wait_for_function("!document.querySelector('#found').hasChildNodes()")
    page.locator("#log").fill("AssertionError: Torch not compiled with CUDA enabled")
    page.wait_for_selector(".match")
    assert any(
        "pip install" in code
        for code in page.locator(".match .do code:has(+ .copy-code)").all_text_contents()
    )


def test_names_in_a_log_stand_in_no_command(page):
    page.locator("#log").fill(LOG.replace("conv", "$(touch x);`touch x`"))
    page.wait_for_selector(".match")
    texts = page.locator("#found :is(code, pre)").all_inner_texts()
    assert [text for text in texts if "touch x" in text] == [
        text for text in page.locator(".log-line code").all_inner_texts() if "touch x" in text
    ]
    assert "touch x" in page.locator(".log-line code").first.inner_text()


def test_half_a_letter_ends_neither_the_box_nor_the_search(page, visit):
    page.evaluate("""() => {
        const log = document.querySelector("#log");
        log.value = "half a letter \\ud83d";
        log.dispatchEvent(new InputEvent("input"));
    }""")
    link = page.locator("#found a", has_text="Search the book")
    assert link.get_attribute("href").endswith("half%20a%20letter%20%EF%BF%BD")


def test_an_error_that_no_entry_knows_can_be_searched_for(page):
    log = """Traceback (most recent call last):
  File "train.py", line 3, in <module>
    rate = settings["zorblat"]
KeyError: 'zorblat'
"""
    page.locator("#log").fill(log)
    link = page.locator("#found a", has_text="Search the book")
    link.wait_for()
    assert link.count() == 1
    assert link.inner_text() == "Search the book and all errors for: KeyError: 'zorblat'"
    assert link.get_attribute("href").endswith("search.html?q=KeyError%3A%20'zorblat'")


def test_nothing_found_says_so_or_names_the_other_program(page):
    log = "ValueError: weird tensors and unexpected state_dict device failed process"
    assert not errors.find(log)
    page.locator("#log").fill(log)
    page.wait_for_selector("#found .ask-others")
    assert "No entry matches your log" in page.locator("#log-says").inner_text()
    assert letters(page.locator("#found .ask-others").inner_text()) == letters(ASK)
    page.locator("#log").fill("epoch 1: loss 0.42\nepoch 2: loss 0.31")
    says = "document.querySelector('#log-says').textContent"
    page.wait_for_function(f"{says}.includes('There is no error in this log')")
    assert page.locator(".match, #found .ask-others").count() == 0
    page.locator("#log").fill(LOG.splitlines()[0] + NOTICE)
    page.wait_for_function(f"{says}.includes('but this notice')")
    assert "the program goes on" in page.locator(".match.warning").inner_text()
    page.locator("#log").fill("ggml_cuda: CUDA error: out of memory")
    page.wait_for_function(f"{says}.includes('llama.cpp')")
    assert page.locator(".match").count() == 0


def test_a_log_is_neither_sent_nor_kept_and_is_in_no_link(page):
    page.locator("#log").fill(LOG)
    page.wait_for_selector(".match")
    assert [url for url in page.asked if not url.startswith(("file:", "data:"))] == []
    assert page.url == page.address
    pages = page.locator("#found a").evaluate_all("all => all.map(a => a.pathname + a.search)")
    assert all(re.search(r"/(notebooks|book)/\w+\.html$", address) for address in pages), pages
    assert set(ids_of(page.locator("#found h2 a"))) <= set(CATALOGUE)
    stored = page.evaluate(
        "JSON.stringify([{...localStorage}, {...sessionStorage}, history.state])"
    )
    assert "state_dict" not in stored
    page.reload()
    assert page.locator("#log").input_value() == ""
    assert page.locator(".match").count() == 0


def test_back_from_an_entry_brings_the_log_and_its_answer(page):
    opened = page.url
    page.locator("#log").fill(LOG)
    page.locator(".match h2 a").first.click()
    page.wait_for_url("**/notebooks/**")
    page.go_back()
    page.wait_for_selector(".match")
    assert page.locator("#log").input_value() == LOG
    page.goto(opened)
    assert page.locator("#log").input_value() == ""


STORED = "JSON.stringify([{...localStorage}, {...sessionStorage}, history.state, window.name])"


def test_a_log_stays_in_the_tab_only_for_who_follows_a_link_of_its_answer_until_back(visit):
    page = visit(OPENED)
    log = page.locator("#log")
    log.fill(LOG)
    page.wait_for_selector(".match")
    page.goto(page.url.replace(OPENED, "index.html"))
    assert "state_dict" not in page.evaluate(STORED)
    page.go_back()
    log.fill("")
    log.fill(LOG)
    page.wait_for_selector(".match")
    page.locator(".match h2 a").first.click()
    page.wait_for_url("**/notebooks/**")
    assert "state_dict" in page.evaluate(STORED)
    page.go_back()
    page.wait_for_selector(".match")
    assert log.input_value() == LOG
    assert "state_dict" not in page.evaluate(STORED)


def test_a_log_too_long_to_be_kept_leaves_no_older_one(visit):
    page = visit(OPENED)
    page.evaluate("sessionStorage.setItem('log', 'an older one')")
    page.locator("#log").focus()
    page.keyboard.insert_text(FILLER * 70_000 + LOG)
    page.locator(".match h2 a").first.click()
    page.wait_for_url("**/notebooks/**")
    assert page.evaluate("sessionStorage.getItem('log')") is None


def test_answers_are_legible_in_both_themes_and_fit_a_phone(page, axe):
    page.locator("#log").fill(LOG.replace('"module', '"module' + "." * 400 + "x" * 400))
    page.wait_for_selector(".match")
    assert_axe_finds_nothing(page, axe, "#found", ".clinic-field", "#all-errors")
    page.set_viewport_size({"width": PHONE, "height": 900})
    assert page.evaluate("document.documentElement.scrollWidth") <= PHONE
    wide = "e => [...e.querySelectorAll('#found *')].filter(c => c.clientWidth < c.scrollWidth)"
    assert page.locator("article").evaluate(f"e => ({wide})(e).length") == 0
