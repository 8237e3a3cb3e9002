"""Messy logs: `logs/` holds them, and ``logs/expected.json`` the entries that each must give.

They are what real programs printed, then as schedulers, loggers, containers, terminals, notebooks
and forums make it. The browser's tests read the same files.
"""

import json
from pathlib import Path

import pytest

from torchclinic import errors
from torchclinic.errors import catalogue, explain, find, nearest

LOGS = Path(__file__).parent / "logs"
EXPECTED = json.loads((LOGS / "expected.json").read_text())


def log(name):
    # As bytes, or Python would mend the ends of lines.
    return (LOGS / name).read_bytes().decode()


def found(text):
    return [match.error.id for match in find(text)]


@pytest.mark.parametrize("name", EXPECTED)
def test_a_messy_log_gives_its_entries_the_cause_first(name):
    assert found(log(name)) == EXPECTED[name]


def test_every_log_is_expected_to_hold_something():
    assert {path.name for path in LOGS.glob("*.txt")} == set(EXPECTED)
    assert all(EXPECTED.values())


@pytest.mark.parametrize("name", EXPECTED)
def test_the_line_that_is_shown_holds_words_of_the_log(name):
    text = log(name)
    for match in find(text):
        shown, line = match.text, text.split("\n")[match.line - 1]
        shown = errors._plain(shown.removeprefix("... ").removesuffix(" ..."))
        assert "".join(shown.split()) in "".join(errors._plain(line).split())
        assert match.text.isprintable()


def test_of_a_long_line_the_words_that_matched_are_shown():
    text = "x " * 5000 + "Missing key(s) in state_dict: 'a'. " + "y " * 5000
    (match,) = find(text)
    assert match.line == 1
    assert "Missing key(s) in state_dict: 'a'." in match.text
    assert len(match.text) < 300


def test_lines_are_counted_as_an_editor_counts_them():
    text = "\n\nloading\r\n\nMissing key(s) in state_dict: 'a'.\n"
    assert [match.line for match in find(text)] == [5]


def test_an_escape_sequence_in_a_log_does_not_reach_the_terminal():
    text = "\x1b]0;title\x07Missing key(s) in state_dict: \x1b[31m'a'\x1b[0m\x08\x9b2J"
    assert not set(explain(text)) & set("\x1b\x07\x08\x9b")


UNRELATED = {
    "a key of a dict": "KeyError: 'rank'",
    "a column of pandas": """
Traceback (most recent call last):
  File "/opt/venv/lib/python3.11/site-packages/pandas/core/indexes/base.py", line 3805, in get_loc
    return self._engine.get_loc(casted_key)
  File "pandas/_libs/hashtable_class_helper.pxi", line 7089, in PyObjectHashTable.get_item
KeyError: 'RANKING'

The above exception was the direct cause of the following exception:

KeyError: 'RANKING'
""",
    "a setting": "KeyError: 'momentum'",
    "the environment": """
  File "<frozen os>", line 679, in __getitem__
KeyError: 'HF_TOKEN'
""",
    "an attribute": "AttributeError: 'NoneType' object has no attribute 'shape'",
    "another module's attribute": "AttributeError: 'Trainer' object has no attribute 'module'",
    "a package": "ModuleNotFoundError: No module named 'torchtext'",
    "JSON": "json.decoder.JSONDecodeError: Expecting value: line 1 column 1 (char 0)",
    "HTTP": """
requests.exceptions.HTTPError: 404 Client Error: Not Found for url: https://example.org/model.pt
During handling of the above exception, another exception occurred:
urllib3.exceptions.MaxRetryError: HTTPSConnectionPool(host='example.org', port=443): Max retries
exceeded with url: /model.pt (Caused by NewConnectionError('Failed to establish a new connection'))
""",
    "shapes of numpy": (
        "ValueError: operands could not be broadcast together with shapes (3,4) (5,)\n"
        "ValueError: shapes (3,4) and (5,6) not aligned: 4 (dim 1) != 5 (dim 0)"
    ),
    "an assertion in a training loop": """
Traceback (most recent call last):
  File "train.py", line 31, in <module>
    train(model, loader, device="cuda:0")
  File "train.py", line 22, in train
    loss.backward(); optimizer.step(); scheduler.step()
    assert loss.item() < 10, "loss too large on rank 0"
AssertionError: loss too large on rank 0
""",
    "an interrupt": "Traceback (most recent call last):\n    time.sleep(1)\nKeyboardInterrupt",
    "a file of the user": "FileNotFoundError: [Errno 2] No such file or directory: 'train.csv'",
    "a type": "TypeError: unsupported operand type(s) for +: 'int' and 'str'",
    "a name": "NameError: name 'model' is not defined. Did you mean: 'module'?",
    "arguments": "train.py: error: unrecognized arguments: --learning-rate 0.1",
    "a number": "ZeroDivisionError: division by zero",
    "an index": "IndexError: list index out of range",
    "unicode": "UnicodeDecodeError: 'utf-8' codec can't decode byte 0xff in position 0",
    "syntax": "SyntaxError: invalid syntax. Perhaps you forgot a comma?",
    "a program that works": """
training on cuda:0 with 2 workers, world size 2, rank 0, NCCL, port 29500
epoch 1: loss 0.523, test 81.20%, 12,345 images/s, 812 MB of CUDA memory
saved module.pt: all keys matched
""",
    "a build": "gcc: fatal error: cannot execute 'cc1plus': No such file or directory",
    "a database": "sqlite3.OperationalError: database is locked",
    "cuDNN under TensorFlow": "Could not create cudnn handle: CUDNN_STATUS_NOT_INITIALIZED",
    "CUDA under llama.cpp": """
CUDA error: an illegal memory access was encountered
  current device: 0, in function ggml_backend_cuda_synchronize at ggml-cuda.cu:2446
""",
    "another program's port": "OSError: [Errno 99] error while attempting to bind on the address",
}


@pytest.mark.parametrize("text", UNRELATED.values(), ids=UNRELATED)
def test_an_unrelated_error_gives_no_entry(text):
    assert found(text) == []


# --- which comes first, and which gives way -----------------------------------------------------


def forget():
    """What was worked out of a catalogue, for another one."""
    for cached in (
        errors._squeezed_patterns,
        errors._words,
        errors._weights,
    ):
        cached.cache_clear()


@pytest.fixture
def small(monkeypatch):
    """A catalogue of four entries."""

    def entry(name, pattern, **fields):
        return errors.Error(
            name, "files", f"`{name}`", "A cause.", "A fix.", patterns=[pattern], **fields
        )

    entries = [
        entry("general", "could not * the state"),
        entry("special", "could not load the state", over=["general"]),
        entry("consequence", "Connection closed by peer", kind="follows"),
        entry("advice", "UserWarning: slow", kind="warning"),
        entry("other", "port * is taken"),
    ]
    monkeypatch.setattr(errors, "catalogue", lambda: {entry.id: entry for entry in entries})
    forget()
    yield
    forget()


@pytest.mark.usefixtures("small")
def test_errors_come_before_what_follows_from_them_and_that_before_warnings():
    text = "UserWarning: slow\nConnection closed by peer\nport 1 is taken\ncould not save the state"
    assert found(text) == ["other", "general", "consequence", "advice"]


@pytest.mark.usefixtures("small")
def test_a_log_that_holds_only_a_consequence_or_a_warning_is_told_so():
    assert "It often follows from an error of another" in explain("Connection closed by peer")
    assert "It is a warning" in explain("UserWarning: slow")
    assert "It often" not in explain("port 1 is taken")


@pytest.mark.usefixtures("small")
def test_a_special_entry_is_told_instead_of_the_general_one():
    assert found("could not load the state") == ["special"]


@pytest.mark.usefixtures("small")
def test_a_general_entry_gives_way_only_where_it_is_the_same_error():
    special, general = "Error: could not load the state", "Error: could not save the state"
    lines = "step\n" * (errors.NEAR + 1)
    assert found(f"{general}\n{lines}{special}") == ["general", "special"]
    assert found(f"{special}\n{lines}{general}") == ["special", "general"]
    assert found(f"{special}\n{lines}{special}") == ["special"]
    assert found(f"{general}\n{lines[10:]}{special}") == ["special"]
    # One message of many lines: no other error is named in between.
    assert found(f"{general}\n{lines}could not load the state") == ["special"]


KEYS = ", ".join(f'"{{}}layer1.{i}.conv1.weight"' for i in range(200))


@pytest.mark.parametrize("width", [80, 120, 100_000])
def test_a_message_that_a_window_cut_into_hundreds_of_lines_is_one_error(width):
    text = f"Error(s) in loading state_dict for Net: Missing key(s) in state_dict: {KEYS}. "
    text += f"Unexpected key(s) in state_dict: {KEYS.replace('{}', 'module.')}."
    lines = [text[i : i + width].replace("{}", "") for i in range(0, len(text), width)]
    assert found("\n".join(lines)) == ["module-prefix"]


@pytest.mark.usefixtures("small")
def test_a_gap_has_its_limit():
    assert found(f"port {'x' * errors.GAP} is taken") == ["other"]
    assert found(f"port {'x' * (errors.GAP + 1)} is taken") == []
    assert found(f"port 1 {'x' * 300} port 2 is taken") == ["other"]


@pytest.mark.usefixtures("small")
def test_a_pattern_may_begin_with_what_is_also_a_prefix(monkeypatch):
    entry = errors.Error("bus", "files", "`bus`", "A.", "B.", patterns=["ERROR: bus in worker"])
    monkeypatch.setattr(errors, "catalogue", lambda: {"bus": entry})
    forget()
    assert found("[rank0]: ERROR: bus in worker") == ["bus"]


# --- whose error it is ----------------------------------------------------------------------------

OF = "Missing key(s) in state_dict: 'a'."
SUMMARY = """ChildFailedError:
Root Cause (first observed failure):
[0]:
  time      : 2026-11-22_05:{}
  host      : gpu07
  rank      : {} (local_rank: 1)
  exitcode  : -9 (pid: 4711)
"""


@pytest.mark.parametrize(
    ("text", "rank"),
    [
        (f"[rank3]: {OF}", "rank 3"),
        (f"\x1b[31m[rank3]:\x1b[0m {OF}", "rank 3"),
        (f"2026-01-01 10:10:10,123 [rank12]: {OF}", "rank 12"),
        (f"[1,2]<stderr>: {OF}", "rank 2"),
        (SUMMARY.format("20:00", 5).partition(":\n")[2], "rank 5"),
        ("srun: error: gpu07: task 2: Killed", "task 2"),
        (OF, ""),
        (f"weights[rank3] {OF}", ""),
        (f"[rank0]: loading\n{OF}", ""),
    ],
)
def test_a_match_names_the_rank_that_its_line_names(text, rank):
    (match,) = find(text)
    assert match.rank == rank
    assert (f", of {rank}: " in explain(text)) == bool(rank)


def test_who_failed_first_is_told_if_torchrun_or_srun_say_so():
    first = "torchrun says that rank 5 failed first."
    assert first in explain(SUMMARY.format("20:00", 5))
    # The logs of two hosts, one after the other.
    assert first in explain(SUMMARY.format("20:31", 0) + SUMMARY.format("20:00", 5))
    assert "srun names is task 2 on gpu07: Exited with exit code 1." in explain(
        f"{OF}\nsrun: error: gpu07: task 2: Exited with exit code 1\n"
        "srun: error: gpu07: task 3: Terminated\n"
    )
    assert "first" not in explain(OF).partition("Why:")[0]


# --- when nothing is found ----------------------------------------------------------------------


def without(name, monkeypatch):
    """The catalogue without an entry."""
    rest = {key: entry for key, entry in catalogue().items() if key != name}
    monkeypatch.setattr(errors, "catalogue", lambda: rest)


def test_the_nearest_entries_of_a_message_in_other_words_nearly_always_hold_its_own():
    """A third of its words replaced, in the traceback of a library."""
    told = {entry.id: entry for entry in catalogue().values() if entry.kind == "error"}
    missed = []
    for name, entry in told.items():
        words = entry.message.strip("`").split(" ")
        words = [word if number % 3 else "xxxx" for number, word in enumerate(words)]
        text = TRACEBACK.format(" ".join(words))
        if name not in [error.id for error in nearest(text)]:
            missed.append(name)
    assert len(missed) <= len(told) / 10, missed


TRACEBACK = """Traceback (most recent call last):
  File "/opt/venv/lib/python3.11/site-packages/torch/nn/modules/module.py", line 1787, in _call_impl
    return forward_call(*args, **kwargs)
torch.distributed.elastic.RuntimeError: {}
"""


def test_a_log_without_a_telling_line_or_a_known_word_has_no_nearest_entry():
    assert nearest("") == []
    assert nearest("lorem ipsum dolor sit amet\n" * 100) == []


def test_what_is_printed_of_an_unknown_error_says_what_to_collect():
    text = explain("RuntimeError: the flux capacitor has no state_dict that worker could load")
    assert text.startswith("No entry of the catalogue has these words.")
    assert "torchclinic doctor" in text
    assert max(map(len, text.splitlines())) <= 100
