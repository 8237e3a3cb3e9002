"""``tools/record.py`` claims nothing false, leaks nothing, and loses no earlier run.

What it records is tested in ``tests/site/test_recorded_runs.py``.
"""

import errno
import json
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


@pytest.fixture
def parts(monkeypatch, tmp_path):
    """Two chapters and a file of tests that fail as often as told, and what has run."""
    (tmp_path / "notebooks").mkdir()
    for name in ("01_fine", "02_stops"):
        (tmp_path / "notebooks" / f"{name}.ipynb").write_text("{}")
    facts = {"machine": "1xH100", "gpus": ["H100"], "commit": "a", "clean": True, "torch": "2.11"}
    facts |= dict.fromkeys(("driver", "cuda", "torchvision", "python", "date"), "1")
    ran, bad = [], {"02_stops", "tests/test_a.py"}

    def run(path, target, clean):
        ran.append(path.stem)
        target.write_text("ran")
        passed = path.stem not in bad
        return {"passed": passed, "seconds": 1} | ({} if passed else {"error": "E", "code": "x"})

    def run_gpu_tests(file):
        ran.append(file)
        return {"passed": 1, "failed": int(file in bad), "skipped": 0, "names_of_failed": []}

    monkeypatch.setattr(record, "NOTEBOOKS", tmp_path / "notebooks")
    monkeypatch.setattr(record, "gpu_test_files", lambda: ["tests/test_a.py"])
    monkeypatch.setattr(record, "facts_of", lambda machine, command: dict(facts))
    monkeypatch.setattr(record, "run", run)
    monkeypatch.setattr(record, "run_gpu_tests", run_gpu_tests)
    return ran, bad, facts


def test_a_record_goes_on_with_what_is_missing_or_has_failed(parts, tmp_path):
    ran, bad, facts = parts
    machine = tmp_path / "runs/1xH100/machine.json"
    assert not record.record("1xH100", tmp_path / "runs", "", ["chapters"])
    assert not record.record("1xH100", tmp_path / "runs", "", ["tests"])
    assert ran == ["01_fine", "02_stops", "tests/test_a.py"]
    ran.clear()
    bad.clear()
    facts["commit"] = "b"
    assert record.record("1xH100", tmp_path / "runs", "", ["chapters", "tests"])
    assert ran == ["02_stops", "tests/test_a.py"]
    told = json.loads(machine.read_text())
    # The mended ones say that they come from another commit than the record.
    assert told["commit"] == "a"
    assert told["notebooks"]["01_fine"] == {"passed": True, "seconds": 1}
    assert told["notebooks"]["02_stops"]["commit"] == "b"
    assert told["gpu_tests"]["tests/test_a.py"]["failed"] == 0


def test_what_has_run_is_kept_when_a_later_part_is_killed(parts, tmp_path, monkeypatch):
    def killed(file):
        raise SystemExit

    monkeypatch.setattr(record, "run_gpu_tests", killed)
    with pytest.raises(SystemExit):
        record.record("1xH100", tmp_path / "runs", "", ["01_fine", "tests"])
    told = json.loads((tmp_path / "runs/1xH100/machine.json").read_text())
    assert list(told["notebooks"]) == ["01_fine"]
    assert told["gpu_tests"] == {}
    assert (tmp_path / "runs/1xH100/01_fine.ipynb").read_text() == "ran"


def test_a_record_is_not_completed_on_another_software_or_with_an_unknown_part(parts, tmp_path):
    _, _, facts = parts
    record.record("1xH100", tmp_path / "runs", "", ["01_fine"])
    facts["torch"] = "2.12"
    with pytest.raises(ValueError, match=r"is from elsewhere \(torch 2.11\)"):
        record.record("1xH100", tmp_path / "runs", "", ["chapters"])
    with pytest.raises(ValueError, match="no chapter and no file of GPU tests: 03_none"):
        record.record("1xH100", tmp_path / "runs", "", ["03_none"])


def test_a_whole_record_keeps_the_measurements_beside_it_and_no_old_chapter(parts, tmp_path):
    folder = tmp_path / "runs/1xH100"
    folder.mkdir(parents=True)
    for name in ("machine.json", "copies.json", "00_gone.ipynb"):
        (folder / name).write_text('{"old": true}')
    assert not record.record("1xH100", tmp_path / "runs", "")
    names = {path.name for path in folder.iterdir()}
    assert names == {"machine.json", "copies.json", "01_fine.ipynb", "02_stops.ipynb"}
    assert "old" not in json.loads((folder / "machine.json").read_text())
    assert json.loads((folder / "copies.json").read_text()) == {"old": True}


def test_tests_of_the_site_which_need_what_builds_it_are_not_asked_for():
    files = record.gpu_test_files()
    assert "tests/test_gpus.py" in files
    assert not [file for file in files if file.startswith(("tests/site/", "tests/tools/"))]


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
