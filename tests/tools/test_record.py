"""``tools/record.py`` claims nothing false, leaks nothing, and loses no earlier run.

What it records is tested in ``tests/site/test_recorded_runs.py``.
"""

import errno
import os
import socket
import subprocess
import sys
from pathlib import Path

import nbformat
import pytest
import record

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.slow
def test_a_false_claim_is_refused_in_a_sentence_and_leaves_nothing(tmp_path):
    claim = "../2xT4000"
    done = subprocess.run(
        [sys.executable, ROOT / "tools/record.py", claim, "--runs", tmp_path / "runs"],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 2
    assert done.stderr.startswith(f"record: {claim!r} is not here: this machine has ")
    assert f"can be recorded as {record.machine_name()!r}" in done.stderr
    assert done.stderr.count("\n") == 1
    assert list(tmp_path.iterdir()) == []


@pytest.fixture
def no_chapters(monkeypatch, tmp_path):
    """A repository with neither chapters nor tests, which is recorded in no time."""
    monkeypatch.setattr(record, "ROOT", tmp_path)
    monkeypatch.setattr(record, "NOTEBOOKS", tmp_path / "notebooks")
    return tmp_path


@pytest.mark.slow
def test_an_earlier_run_survives_when_the_new_one_cannot_take_its_place(no_chapters, monkeypatch):
    runs = no_chapters / "runs"
    earlier = runs / record.machine_name()
    earlier.mkdir(parents=True)
    (earlier / "machine.json").write_text("an earlier run")
    replace = os.replace

    def full_disk(source, target):
        if Path(target) == earlier and Path(source).name == earlier.name:
            raise OSError(errno.ENOSPC, "No space left on device")
        replace(source, target)

    monkeypatch.setattr(os, "replace", full_disk)
    with pytest.raises(OSError, match="No space"):
        record.record(earlier.name, runs, "command")
    assert (earlier / "machine.json").read_text() == "an earlier run"
    assert list(runs.iterdir()) == [earlier]


@pytest.mark.parametrize(
    ("host", "text", "cleaned"),
    [
        ("torch", "import torch; torch.float32", "import torch; torch.float32"),
        ("cuda", "on cuda:0", "on cuda:0"),
        ("torch", "tcp://torch:29500 as me@torch", "tcp://<host>:29500 as me@<host>"),
        ("blue-7.lab.org", "on blue-7, blue-7.lab.org:80", "on <host>, <host>:80"),
        ("blue-7", "not dark-blue-7 or blue-70", "not dark-blue-7 or blue-70"),
    ],
)
def test_a_hosts_name_is_replaced_but_never_a_word_of_the_book(monkeypatch, host, text, cleaned):
    monkeypatch.setattr(socket, "gethostname", lambda: host)
    assert record.cleaner()(text) == cleaned


def test_only_what_a_cell_put_out_is_cleaned_and_not_the_words_of_the_format():
    def clean(text):
        return text.replace("stream", "<host>").replace("stdout", "<host>")

    output = nbformat.v4.new_output("stream", name="stdout", text="a stream")
    assert record.cleaned(output, clean) == {**output, "text": "a <host>"}
