"""Messy logs: `logs/` holds them, and ``logs/expected.json`` the entries that each must give.

They are what real programs printed, then as schedulers, loggers, containers, terminals, notebooks
and forums make it. ``unrelated.txt`` holds what other programs print, between lines of dashes, and
``others.txt`` what they print in words that PyTorch prints, too. The browser's tests read them all.
"""

import json
import random
import string
import time
from pathlib import Path

import pytest

from torchclinic import UserError, errors, logs
from torchclinic.errors import catalogue, explain, find, finding, roots, squeezing
from torchclinic.logs import first_to_fail

LOGS = Path(__file__).parent / "logs"
EXPECTED = json.loads((LOGS / "expected.json").read_text())
# As bytes, or Python would mend the ends of lines.
TEXTS = {path.name: path.read_bytes().decode() for path in sorted(LOGS.glob("*.txt"))}
OF = "Missing key(s) in state_dict: 'a'."


def found(text):
    return [match.error.id for match in find(text)]


def test_a_messy_log_gives_its_entries_the_cause_first():
    assert all(EXPECTED.values())
    assert {name: found(text) for name, text in TEXTS.items()} == EXPECTED


def test_of_the_lines_that_people_paste_most_each_gives_its_entry():
    """``pasted.tsv``: the entry, then a line as versions from 1.0 on have printed it."""
    text = Path(__file__).with_name("pasted.tsv").read_text(encoding="utf-8")
    lines = [line.split("\t") for line in text.splitlines()]
    assert [(name, found(line), line) for name, line in lines if found(line) != [name]] == []
    assert len(lines) >= 100


def test_an_unrelated_error_gives_no_entry():
    texts = Path(__file__).with_name("unrelated.txt").read_text().split("----\n")
    assert [text for text in texts if found(text)] == []
    assert len(texts) > 20


def test_a_log_of_another_program_is_said_to_be_one(monkeypatch):
    sections = Path(__file__).with_name("others.txt").read_text().split("---- ")[1:]
    told = [section.partition("\n")[::2] for section in sections]
    assert [(name, errors.other_program(log), found(log)) for name, log in told] == [
        (name, name, []) for name, _ in told
    ]
    assert all(f"seems to come from {name}" in " ".join(explain(log).split()) for name, log in told)
    assert errors.other_program(f"{told[0][1]} File site-packages/torch/cuda.py") == ""
    monkeypatch.setitem(errors.page("other_programs"), "others", {})
    assert len([log for _, log in told if found(log)]) > len(told) / 2  # they share words


def test_of_a_long_line_the_place_of_the_match_is_shown():
    text = "KeyError: 'RANK'"
    for before in (0, 300, 700, 990, 1010, 5000):
        (match,) = find(f"{'step ' * (before // 5)}{text} {'and on ' * 300}")
        assert text in match.text, before
        assert len(match.text) < 260


def test_the_line_that_is_shown_holds_words_of_the_log():
    for name, text in TEXTS.items():
        for match in find(text):
            shown, line = match.text, text.split("\n")[match.line - 1]
            shown = squeezing._plain(shown.removeprefix("... ").removesuffix(" ..."))
            assert "".join(shown.split()) in "".join(squeezing._plain(line).split()), name
            assert match.text.isprintable(), name


def test_lines_are_counted_as_an_editor_counts_them():
    assert [match.line for match in find(f"\n\nloading\r\n\n{OF}\n")] == [5]


def test_an_escape_sequence_in_a_log_does_not_reach_the_terminal():
    text = "\x1b]0;title\x07Missing key(s) in state_dict: \x1b[31m'a'\x1b[0m\x08\x9b2J"
    assert not set(explain(text)) & set("\x1b\x07\x08\x9b")


# --- which comes first, and which gives way -----------------------------------------------------


def test_a_full_disk_comes_before_the_file_that_it_cut_off():
    cut = "RuntimeError: PytorchStreamReader failed reading zip archive"
    full = "OSError: [Errno 28] No space left on device"
    assert found(f"{cut}\nfirst:\n{full}") == found(f"{full}\nthen:\n{cut}") == ["disk-full"]
    assert found(cut) == ["cut-off"]


def test_a_start_that_went_on_is_no_hang():
    waits = "Initializing distributed: GLOBAL_RANK: 0, MEMBER: 1/4"
    assert found(f"{waits}\n") == ["lightning-slurm"]
    for line in (
        "All distributed processes registered. Starting with 4 processes",
        "KeyError: 'k'",
    ):
        assert found(f"{waits}\n{line}\n") == found(f"{line}\n{waits}\n") == [], line


@pytest.fixture
def small(monkeypatch):
    """A catalogue of six entries."""

    def entry(name, pattern, **fields):
        fields |= {"cause": "A cause.", "fix": "A fix.", "patterns": [pattern]}
        return errors.Error(name, "files", "A title", f"`{name}`", **fields)

    entries = [
        entry("general", "could not * the state"),
        entry("special", "could not load the state", over=["general"]),
        entry("consequence", "Connection closed by peer", kind="follows"),
        entry("advice", "UserWarning: slow", kind="warning"),
        entry("other", "port * is taken"),
        entry("prefixed", "ERROR: bus in worker"),
    ]
    monkeypatch.setattr(finding, "catalogue", lambda: {entry.id: entry for entry in entries})
    monkeypatch.setattr(finding, "patterns_of", finding.patterns_of.__wrapped__)


@pytest.mark.usefixtures("small")
def test_errors_come_before_what_follows_from_them_and_that_before_warnings():
    text = "UserWarning: slow\nConnection closed by peer\nport 1 is taken\ncould not save the state"
    assert found(text) == ["other", "general", "consequence", "advice"]
    assert "It often follows from another error" in explain("Connection closed by peer")
    assert "It is a warning" in explain("UserWarning: slow")
    assert "It often" not in explain("port 1 is taken")


@pytest.mark.usefixtures("small")
def test_a_general_entry_gives_way_only_where_it_is_the_same_error():
    special, general = "Error: could not load the state", "Error: could not save the state"
    lines = "step\n" * (finding.NEAR + 1)
    assert found("could not load the state") == ["special"]
    assert found(f"{general}\n{lines}{special}") == ["general", "special"]
    assert found(f"{special}\n{lines}{general}") == ["special", "general"]
    assert found(f"{special}\n{lines}{special}") == ["special"]
    assert found(f"{general}\n{lines[10:]}{special}") == ["special"]
    # One message of many lines: no other error is named in between.
    assert found(f"{general}\n{lines}could not load the state") == ["special"]


def test_a_message_that_a_window_cut_into_hundreds_of_lines_is_one_error():
    keys = ", ".join(f'"{{}}layer1.{i}.conv1.weight"' for i in range(200))
    text = f"Error(s) in loading state_dict for Net: Missing key(s) in state_dict: {keys}. "
    text += f"Unexpected key(s) in state_dict: {keys.replace('{}', 'module.')}."
    for width in (80, 120, 100_000):
        lines = [text[i : i + width].replace("{}", "") for i in range(0, len(text), width)]
        assert found("\n".join(lines)) == ["module-prefix"], width


@pytest.mark.usefixtures("small")
def test_a_gap_has_its_limit_and_a_pattern_may_begin_with_what_is_also_a_prefix():
    assert found(f"port {'x' * finding.GAP} is taken") == ["other"]
    assert found(f"port {'x' * (finding.GAP + 1)} is taken") == []
    assert found(f"port 1 {'x' * 300} port 2 is taken") == ["other"]
    assert found("[rank0]: ERROR: bus in worker") == ["prefixed"]


# --- whose error it is --------------------------------------------------------------------------

SUMMARY = """ChildFailedError:
Root Cause (first observed failure):
[0]:
  time      : 2026-11-22_05:{}
  host      : gpu07
  rank      : {} (local_rank: 1)
  exitcode  : -9 (pid: 4711)
"""
RANKS = {
    f"[rank3]: {OF}": "rank 3",
    f"\x1b[31m[rank3]:\x1b[0m {OF}": "rank 3",
    f"2026-01-01 10:10:10,123 [rank12]: {OF}": "rank 12",
    f"[1,2]<stderr>: {OF}": "rank 2",
    SUMMARY.format("20:00", 5).partition(":\n")[2]: "rank 5",
    "srun: error: gpu07: task 2: Killed": "task 2",
    OF: "",
    f"weights[rank3] {OF}": "",
    f"[rank0]: loading\n{OF}": "",
}


def test_a_match_names_the_rank_that_its_line_names():
    for text, rank in RANKS.items():
        assert [match.rank for match in find(text)] == [rank], text
        assert (f", of {rank}: " in explain(text)) == bool(rank), text


def test_who_failed_first_is_told_if_torchrun_or_srun_say_so():
    summaries = SUMMARY.format("20:31", 0), SUMMARY.format("20:00", 5)
    first = {"rank": "rank 5", "says": "torchrun says that rank 5 failed first."}
    # Also of the logs of two hosts, one after the other.
    for texts in (summaries[1:], summaries, ["".join(summaries)]):
        assert first_to_fail(dict(enumerate(texts))) == first
    ended = (
        "\nsrun: error: gpu07: task 2: Exited with exit code 1\nsrun: error: gpu07: task 3: Killed"
    )
    assert first_to_fail({"": OF + ended}) == {
        "rank": "task 2",
        "says": "The first that srun names is task 2 on gpu07: Exited with exit code 1.",
    }
    assert first_to_fail({"": OF}) == {}


def test_the_cause_is_told_though_fifty_errors_before_it_follow_from_it():
    """After more of them it is not looked for, here and in the box of the site."""
    echo, cause = "RuntimeError: Connection closed by peer [10.0.0.2]:4242", "ValueError: mine"
    assert roots.first_failure([*[echo] * 50, cause]) == (50, cause)
    assert roots.first_failure([*[echo] * 51, cause]) is None


# --- no text is slow to read, whatever it holds --------------------------------------------------

PATTERNS = [p for name in catalogue() for p in finding.patterns_of(name)]
# All patterns, each without its last piece: what is looked for longest and never found.
BEGUN = ["".join(p[:-1] or [p[0][:-1]]) for p in PATTERNS]
HOSTILE = ["a", "\n", " ", "\t\n", "'\"`", "> > > ", "> > > > > > > >\n", "- - - ", "\x1b[31m"]
HOSTILE += ["\x1b[", "\x1b[" + "1;" * 500_000, "\\u001b[", "[", "2026-03-07T10:02:04.123456789 "]
HOSTILE += ["训练报错，怎么办？", "10%|##  |\r", "word" * 100 + "|"]
HOSTILE += [f"1]({(')' + 9 * '│') * 30}{'(' * 200}\n"]  # a line of code as IPython quotes it
HOSTILE += ["".join(p[0] for p in PATTERNS if len(p) > 1), "".join(BEGUN[::3])]
HOSTILE += [(" " * 50).join(BEGUN[1::3])]
HOSTILE += ["".join(random.Random(0).choices(string.printable, k=100_000))]


def seconds(text):
    start = time.process_time()
    explain(text)
    return time.process_time() - start


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_ten_times_as_much_of_a_hostile_text_takes_no_more_than_its_share():
    size = 200_000
    for piece in HOSTILE:
        text = piece * (size // len(piece) + 1)
        tenth, whole = seconds(text[: size // 10]), seconds(text[:size])
        assert whole < 2, piece[:50]
        assert whole < 20 * max(tenth, 0.02), piece[:50]


@pytest.mark.timeout(100)
def test_a_long_line_without_a_known_error_is_explained_in_time():
    line = "a" * 2_000_000
    assert "Nothing in the book is close" in explain(line)
    assert "last words, in line 1: b" in explain(f"b\n{line}failed (exitcode")


def test_a_long_line_is_prepared_once_however_many_matches_it_has(monkeypatch):
    lengths, plain = [], squeezing._plain
    monkeypatch.setattr(squeezing, "_plain", lambda text: lengths.append(len(text)) or plain(text))
    line = " ".join(
        pattern.replace("*", "x") for e in catalogue().values() for pattern in e.patterns
    )
    assert len(find(line)) > 100
    assert sum(lengths) < 5 * len(line)


def test_in_slices_of_any_size_the_same_is_found(monkeypatch):
    monkeypatch.setattr(finding, "SLICE", 997)
    assert {name: found(text) for name, text in TEXTS.items()} == EXPECTED


# --- which files are read, and how much of them --------------------------------------------------


def test_of_many_logs_no_more_is_held_than_of_one(monkeypatch, tmp_path):
    monkeypatch.setattr(logs, "MOST", 60_000)
    many = "step\n" * 8000
    for rank in range(8):
        (tmp_path / f"rank{rank}.log").write_text(f"{many}{OF}\n")
    texts = logs.read([str(tmp_path)])
    assert all(OF in text for text in texts.values())
    assert sum(map(len, texts.values())) < 1.5 * logs.MOST


def test_a_link_in_a_folder_may_lead_to_a_log_and_not_to_what_the_system_makes_up(tmp_path):
    (tmp_path / "containers").mkdir()
    (tmp_path / "containers/0.txt").write_text(OF)
    (tmp_path / "pods").mkdir()
    (tmp_path / "pods/rank0.log").symlink_to("../containers/0.txt")  # as Kubernetes has them
    assert [*logs.read([str(tmp_path / "pods")]).values()] == [OF]
    (tmp_path / "pods/rank1.log").symlink_to("/proc/self/pagemap")  # of hundreds of GB
    with pytest.raises(UserError, match=r"rank1\.log is a link into /proc"):
        logs.read([str(tmp_path / "pods")])
