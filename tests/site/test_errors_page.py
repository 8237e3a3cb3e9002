"""The page "I have an error": what stands there, what its script finds in a log, how it is used."""

import pickle
import random
import re
from itertools import cycle

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
    assert there == named | {"none", "other", "short", "unknown", "its-error", "last-words"}


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
    for pattern, gap in zip(patterns, cycle((1, GAP, GAP + 1)), strict=False):
        yield f"[rank0]: {pattern.replace('*', 'x' * gap)}\n"
    yield from (pattern.split("*")[0] * 50 for pattern in patterns[::10])
    chance = random.Random(0)
    for _ in range(300):
        yield "".join(chance.choice([*HARD, *patterns]) for _ in range(chance.randint(1, 40)))
    known = "\n" * 9 + "IndexError: Target 10 is out of bounds."
    yield from ("usage: a\na.py: error: no such thing\n", ROOT_ERROR + known)
    yield from (ROOT_ERROR, ROOT_ERROR.replace("/home/me", "/lib/python3"))
    yield from (ROOT_ERROR.replace("KeyError: 'k'", "OSError: Broken pipe"), "tensorflow/ torch")


@pytest.fixture
def page(opened):
    opened.evaluate("window.clinic ??= finding(errorRules)")
    opened.locator("#log").fill("")
    opened.wait_for_function("!document.querySelector('#found').hasChildNodes()")
    yield opened
    assert opened.errors == []


READ = """logs => logs.map(clinic.read).map(({matches, program, isError, notice, unknown}) => [
    matches.map(({id, line, cases}) => [id, line, cases]), program, isError, notice, unknown])"""


def read(log):
    """What the script says of a log, by the package."""
    found = errors.find(log)
    matches = [[one.error.id, one.line, cases.about(one.error, *one.place)] for one in found]
    of_none = None if found else errors.other_program(log), None if found else bool(signs_of(log))
    notice = _only_notices(log, found) if found else None
    return [matches, *of_none, notice, unknown_root(log, found) or None]


def test_the_script_reads_a_log_as_the_package_does(page):
    hard = [*logs(), *logs_of_cases()]
    wanted = [read(log) for log in hard]
    found = page.evaluate(READ, hard)
    assert [each for each in zip(hard, found, wanted, strict=True) if each[1] != each[2]] == []
    assert {match[0] for matches, *_ in wanted for match in matches} >= {
        error.id for error in CATALOGUE.values() if error.patterns
    }
    assert sum(any(which for *_, which in matches) for matches, *_ in wanted) > 200
    assert sum(unknown is not None for *_, unknown in wanted) > 2


ROOT_ERROR = """\
[rank0]: Traceback (most recent call last):
[rank0]:   File "/home/me/train.py", line 9, in <module>
[rank0]:   File "/usr/lib/python3.11/site-packages/x/y.py", line 77, in get
[rank0]: KeyError: 'k'

failed (exitcode: 1) local_rank: 0
"""


def test_the_first_error_that_no_entry_knows_stands_before_its_echo(page):
    page.locator("#log").fill(ROOT_ERROR)
    page.wait_for_selector(".match")
    shown = page.locator("#found").inner_text()
    assert 0 <= shown.find("KeyError: 'k'") < shown.find("Your line\n/home/me/train.py, line 9")
    assert shown.find("/home/me/train.py, line 9") < shown.find("ChildFailedError")
    for log in (
        "RuntimeError: no such flower\nstep 2 ended",
        "y\nfailed (exitcode: 1) local_rank: 0",
    ):
        page.locator("#log").fill("")
        page.locator("#log").fill(log)
        said = page.locator("#found").get_by_text(
            re.compile("^(?:Its error|The program's last words)")
        )
        said.first.wait_for()
        assert f"{said.first.inner_text()} {log.split(chr(10))[0]}" in telling.explain(log)


def logs_of_cases():
    """Logs with the words of each case of each entry: in its line, others, code, a path."""
    begun = 'Traceback (most recent call last):\n  File "/envs/{text}/{text}.py", line 3, in f\n'
    places = cycle((
        "{message} {text}",
        "RuntimeError: {text}\n{message}\n\n{text}",
        begun + "    {text}\nRuntimeError: {message}",
        begun + "    f(x)\nRuntimeError: {message} a{text}b",
        "RuntimeError: {message} (/envs/{text}/lib)",
        "x " * 9000 + "{message} {text}",
    ))  # fmt: skip
    for error in CATALOGUE.values():
        message = error.patterns[0].replace("*", "x") if error.patterns else "x"
        for words in [part for parts, _ in cases.cases_of(error) for part in parts]:
            yield next(places).format(message=message, text=" ".join(words))


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
    assert 0 <= parts[0] < parts[1] < parts[2] < first < letters(told).find("Whythisone")
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


def test_what_was_typed_before_clear_is_not_read_after_it(visit):
    page = visit("book/errors.html")
    page.clock.install()
    page.locator("#log").press_sequentially("CUDA out of memory")  # a short text waits for more
    page.locator("button", has_text="Clear").evaluate("button => button.click()")
    page.clock.run_for(10_000)
    assert page.evaluate("document.querySelector('#found').childNodes.length") == 0


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
    asked.append(f"Why are several processes started on GPU 0?\n{'| 1  N/A  2579941  C  |' * 9}")
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
    log = "RuntimeError: DataLoader worker (pid 7) is killed by signal: Terminated. "
    page.locator("#log").fill(log)
    page.wait_for_selector(".match")
    shown = letters(page.locator(".match .error-fix").first.inner_text())
    assert "Otherwise" in shown
    assert letters(errors.explain(log).split("\nDo:")[1]).startswith(shown)
    assert "What to do in the case that your log names:" in page.locator(".match .do").inner_text()


@pytest.mark.parametrize(("free", "first"), [("1.10 GiB", True), ("1.10 MiB", False)])
def test_of_many_cases_those_of_the_log_are_seen_or_the_first_and_the_others_unfold(
    page, free, first
):
    log = f"OutOfMemoryError: CUDA out of memory. Tried to allocate 20.00 MiB. {free} is free."
    page.locator("#log").fill(log)
    fix, items = page.locator(".match .error-fix"), page.locator(".match .error-fix li")
    fix.wait_for()
    error = CATALOGUE["cuda-out-of-memory"]
    assert items.count() == len(cases.bullets(error))
    assert items.first.inner_text().startswith("Gigabytes were free") == first
    assert sum(case.is_visible() for case in items.all()) == (1 if first else 3)
    assert ("that your log names" in page.locator(".match .do").inner_text()) == first
    told = letters(errors.explain(log).split("\nDo:")[1].partition("\nMore:")[0])
    fix.locator("summary").click()
    assert all(case.is_visible() for case in items.all())
    fix.locator("summary").evaluate("summary => summary.remove()")
    assert letters(fix.inner_text()).startswith(told)


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
    "all phrases far into a line": "x " * 200_000 + " ".join(PHRASES),
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
    lines = page.locator(".match :not(.log-line) + .log-line")
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


def test_a_file_without_end_or_without_text_or_unreadable_is_refused_and_one_of_powershell_is_not(
    page, tmp_path
):
    def says(kind, name, content):
        (tmp_path / name).write_bytes(content)
        page.locator(".choose-files input").set_input_files(tmp_path / name)
        page.locator("#log-says", has_text=kind).wait_for()
        return page.locator("#log-says").inner_text()

    assert "explain" in says("Your log is 51.0 MB", "large.log", bytes(51_000_000))
    assert "inspect" in says("This is not text", "model.pt", b"PK\x03\x04" + bytes(range(256)) * 50)
    assert page.locator("#log").input_value() == ""
    says("One entry", "powershell.log", LOG.encode("utf-16"))
    assert page.locator("#log").input_value() == LOG
    page.evaluate("() => { File.prototype.arrayBuffer = async () => { throw Error('gone'); } }")
    says("A file could not be read", "a.log", LOG.encode())
    page.reload()


def test_long_code_of_a_cure_is_copied_with_a_button(visit):
    page = visit(OPENED, permissions=["clipboard-read", "clipboard-write"])
    page.locator("#log").fill(LOG)
    code = page.locator(".match .do code:has(.copy-code)").first
    page.get_by_role("button", name="Copy", exact=True).first.click()
    page.get_by_role("button", name="Copied").wait_for()
    assert page.evaluate("navigator.clipboard.readText()") == code.text_content()


def test_on_a_phone_no_button_stands_on_another_line_than_the_end_of_its_code(page):
    page.set_viewport_size({"width": PHONE, "height": 844})
    page.locator("#log").fill("OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB.")
    page.locator(".match summary").first.click()
    apart = """all => all.map(button => {
        const end = document.createRange(), code = button.closest("code");
        end.selectNode(button.previousSibling);
        const [text, box] = [end, button].map(part => part.getBoundingClientRect());
        const isApart = text.bottom < box.top || text.top > box.bottom || box.right > innerWidth;
        return [code.textContent, isApart];
    })"""
    told = page.locator(".match .copy-code").evaluate_all(apart)
    page.set_viewport_size({"width": 1280, "height": 900})
    assert len(told) > 5
    assert [text for text, is_apart in told if is_apart or not text] == []


def test_what_a_cure_quotes_of_a_log_has_no_button(page):
    page.locator("#log").fill("Engine core initialization failed. See root cause above")
    page.wait_for_selector(".match")
    assert page.locator(".match .do code:has(.copy-code)", has_text="Engine core").count() == 0
    assert page.locator(".match .do code", has_text="Engine core").count() == 1


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


@pytest.mark.parametrize(
    "before", ["", 'Traceback (most recent call last):\n  File "a.py", line 3\n']
)
def test_a_few_words_or_an_error_that_no_entry_knows_can_be_searched_for(page, before):
    page.locator("#log").fill(f"{before}KeyError: 'zorblat'")
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


def test_a_log_is_neither_sent_nor_in_a_link(page):
    page.locator("#log").fill(LOG)
    page.wait_for_selector(".match")
    assert [url for url in page.asked if not url.startswith(("file:", "data:"))] == []
    assert page.url == page.address
    pages = page.locator("#found a").evaluate_all("all => all.map(a => a.pathname + a.search)")
    assert all(re.search(r"/(notebooks|book)/\w+\.html$", address) for address in pages), pages
    assert set(ids_of(page.locator("#found h2 a"))) <= set(CATALOGUE)
    page.reload()
    assert page.locator("#log").input_value() == ""
    assert page.locator(".match").count() == 0


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
