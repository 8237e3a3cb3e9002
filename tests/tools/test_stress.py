"""What a busy machine makes fail is counted, and ranks are stopped for a moment."""

import os
import signal
import subprocess
import sys
import threading
from contextlib import ExitStack
from types import SimpleNamespace

import psutil
import pytest
from running import state, wait_until

from tools import stress

pytestmark = pytest.mark.slow
HANG = 600  # seconds; ends what hangs, and says nothing about what is merely slow
JUNIT = '<testsuite><testcase classname="a" name="b"><failure/></testcase><testcase name="c"/>'


def test_a_rank_is_stopped_for_a_moment_and_nothing_else(monkeypatch):
    over = threading.Event()
    monkeypatch.setattr(stress, "time", SimpleNamespace(sleep=lambda seconds: over.wait(HANG)))
    loop = [sys.executable, "-c", "while True: pass"]
    with ExitStack() as started:
        pids = []
        for env in (None, {"RANK": "0"}, {"RANK": "1"}):
            process = started.enter_context(subprocess.Popen(loop, env=env))
            started.callback(process.kill)
            pids.append(process.pid)
        os.kill(pids[1], signal.SIGSTOP)  # by its own test
        wait_until(lambda: state(pids[1]) == "T")
        stopping = threading.Thread(target=stress.stop_one_rank, args=(psutil.Process(), 2.0))
        stopping.start()
        wait_until(lambda: state(pids[2]) == "T")
        assert state(pids[0]) != "T"
        over.set()
        stopping.join()
        wait_until(lambda: state(pids[2]) != "T")
        assert state(pids[1]) == "T"


def test_what_fell_is_counted_and_a_missing_report_is_a_fall(tmp_path, monkeypatch, capsys):
    there, missing = tmp_path / "there.xml", tmp_path / "missing.xml"
    write = f"open({str(there)!r}, 'w').write({JUNIT + '</testsuite>'!r})"
    monkeypatch.setattr(stress, "COMMAND", [sys.executable, "-c", write])
    monkeypatch.setattr(stress, "REPORTS", [there, missing])
    with pytest.raises(SystemExit, match="1"):
        stress.main(2)
    told = capsys.readouterr().out.splitlines()
    assert [line[:22] for line in told[:2]] == ["round 1 of 2: 2 fell, ", "round 2 of 2: 2 fell, "]
    assert sorted(told[2:]) == ["2 of 2: a::b", "2 of 2: no missing.xml"]
