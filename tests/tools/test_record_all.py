"""``tools/record_all.py`` loses nothing when a step fails, hangs or is killed, and goes on later.

The steps here are small programs that do just that.
"""

import json
import sys
import tarfile
import time

import pytest
import record_all
from record_all import Session, Step

FAILS = "print('begun'); raise SystemExit(3)"
HANGS = "import time; time.sleep(600)"
DEAF = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(600)"
KILLED = "import os; os.kill(os.getpid(), 9)"
PASSES = "import pathlib, sys; pathlib.Path(sys.argv[1]).open('a').write('x')"


def step(name, program, folder, minutes=0.0, seconds=60.0):
    command = [sys.executable, "-S", "-c", program, str(folder / f"{name}.out")]
    return Step(name, command, minutes, seconds / 60)


@pytest.fixture
def session(tmp_path, monkeypatch):
    monkeypatch.setattr(record_all, "GRACE", 1)
    return Session(tmp_path / "recorded", tmp_path / "recorded.tar.gz")


def run(session, steps, seconds=600):
    return session.run(session.left(steps), {}, time.monotonic() + seconds)


def test_after_a_step_that_fails_hangs_or_is_killed_the_others_run(session):
    folder = session.folder
    steps = [
        step("fails", FAILS, folder),
        step("hangs", HANGS, folder, seconds=1),
        step("deaf", DEAF, folder, seconds=1),
        step("killed", KILLED, folder),
        step("passes", PASSES, folder),
    ]
    assert run(session, steps) == []
    ended = {name: outcome["ended"] for name, outcome in session.outcomes.items()}
    assert ended == {
        "fails": "failed with status 3",
        "hangs": "stopped after 1 s",
        "deaf": "stopped after 1 s",
        "killed": "killed by SIGKILL",
        "passes": "passed",
    }
    assert (folder / "logs/fails.txt").read_text() == "begun\n"
    assert (folder / "passes.out").read_text() == "x"


def test_another_machine_goes_on_with_what_is_missing_and_then_with_what_failed(session, tmp_path):
    first = [step("passes", PASSES, session.folder), step("mended", FAILS, session.folder)]
    run(session, first)

    folder = tmp_path / "elsewhere"
    record_all.unpack(session.archive, folder)
    later = Session(folder, tmp_path / "elsewhere.tar.gz")
    steps = [step(name, PASSES, folder) for name in ("passes", "mended", "new")]
    assert [left.name for left in later.left(steps)] == ["new", "mended"]
    assert run(later, steps) == []
    assert (folder / "passes.out").read_text() == "x"  # from the first machine: not run again
    assert later.left(steps) == []
    assert record_all.told(steps, later, []) == 0


def test_what_was_running_when_the_session_was_killed_runs_again(session):
    only = step("only", PASSES, session.folder)
    session.note(only, "running", 0.0)
    assert Session(session.folder, session.archive).left([only]) == [only]


def test_results_already_there_are_not_replaced_by_older_ones(session, tmp_path):
    run(session, [step("a", PASSES, session.folder)])
    older = tmp_path / "older.tar.gz"
    session.archive.rename(older)
    run(session, [step("b", PASSES, session.folder)])
    record_all.unpack(older, session.folder)
    assert json.loads(session.file.read_text()).keys() == {"a", "b"}


def test_nothing_is_begun_that_does_not_fit_into_the_time_left(session, capsys):
    steps = [step("long", PASSES, session.folder, minutes=9), step("short", PASSES, session.folder)]
    no_time = run(session, steps, seconds=60)
    assert (no_time, list(session.outcomes)) == (["long"], ["short"])
    assert record_all.told(steps, session, no_time) == 1
    assert "no time was left for: long" in capsys.readouterr().out


def test_no_step_outlives_the_session(session):
    hangs = step("hangs", HANGS, session.folder)
    run(session, [hangs], seconds=record_all.RESERVE + 1)
    assert session.outcomes["hangs"]["ended"] == "stopped after 1 s"


def test_what_a_step_leaves_running_is_ended(session):
    child = "import subprocess, sys; p = subprocess.Popen(['sleep', '600']); print(p.pid)"
    run(session, [step("leaves", child, session.folder)])
    pid = int((session.folder / "logs/leaves.txt").read_text())
    deadline = time.monotonic() + 20
    while alive(pid) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not alive(pid)


def alive(pid):
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().split()[2] != "Z"  # ended, but not yet waited for
    except FileNotFoundError:
        return False


def test_the_archive_holds_all_there_is_after_each_step(session):
    run(session, [step("fails", FAILS, session.folder), step("passes", PASSES, session.folder)])
    with tarfile.open(session.archive) as archive:
        names = set(archive.getnames())
    assert names == {"session.json", "logs/fails.txt", "logs/passes.txt", "passes.out"}
    assert not session.archive.with_name(f".{session.archive.name}").exists()


def test_steps_are_chosen_by_name_and_a_wrong_name_is_told(tmp_path):
    steps = record_all.all_steps(tmp_path, "1xH100", rehearse=False)
    names = [s.name for s in steps]
    assert names[0] == "tests"
    assert names[-1] == "record"
    some = record_all.chosen(steps, "record,tests", "")
    assert [s.name for s in some] == ["tests", "record"]
    others = record_all.chosen(steps, "", "record,tests")
    assert [s.name for s in others] == list(record_all.MEASUREMENTS)
    with pytest.raises(ValueError, match="no step ladder; there are: tests, speed_ladder"):
        record_all.chosen(steps, "ladder", "")


@pytest.mark.parametrize("name", record_all.MEASUREMENTS)
def test_each_measurement_is_a_program(name):
    assert (record_all.ROOT / f"benchmarks/gpu/{name}.py").is_file()


def test_without_torchrun_on_the_path_the_steps_get_one(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "executable", "/somewhere/python3")
    monkeypatch.setenv("PATH", str(tmp_path / "empty"))
    path = record_all.path_with_torchrun(tmp_path / "bin")
    assert path.split(":") == [str(tmp_path / "bin"), "/somewhere", str(tmp_path / "empty")]
    assert '/somewhere/python3" -m torch.distributed.run' in (tmp_path / "bin/torchrun").read_text()
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    assert record_all.path_with_torchrun(tmp_path / "other") == f"/somewhere:{tmp_path / 'bin'}"
    assert not (tmp_path / "other").exists()


def test_what_was_packed_is_installed_where_it_is_lacking_and_names_the_commit(
    tmp_path, monkeypatch
):
    (packed := tmp_path / "packed" / "wheels").mkdir(parents=True)
    for name in ("pytest-1.0-py3-none-any.whl", "no_such_thing-1.0-py3-none-any.whl"):
        (packed / name).touch()
    (packed.parent / "commit.json").write_text("{}")
    monkeypatch.setattr(record_all, "ROOT", tmp_path)
    installed = []
    monkeypatch.setattr(
        record_all.subprocess, "run", lambda command, **_: installed.append(command)
    )
    environment = record_all.environment_with(packed.parent, tmp_path / "site")
    (command,) = installed
    assert [word for word in command if word.endswith(".whl")] == [
        str(packed / "no_such_thing-1.0-py3-none-any.whl")
    ]
    paths = environment["PYTHONPATH"].split(":")
    assert paths[:2] == [str(tmp_path / "src"), str(tmp_path / "site")]
    assert environment["TORCHLADDER_DATA"] == str(packed.parent)
    assert (tmp_path / "commit.json").read_text() == "{}"
