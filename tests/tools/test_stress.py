"""What a busy machine makes fail is counted, and ranks are stopped for a moment."""

import subprocess
import sys
import threading

import psutil
import pytest
from running import wait_until

from tools import stress

pytestmark = pytest.mark.slow
JUNIT = '<testsuite><testcase classname="a" name="b"><failure/></testcase><testcase name="c"/>'


def test_a_rank_is_stopped_for_a_moment_and_nothing_else(monkeypatch):
    loop = [sys.executable, "-c", "while True: pass"]
    with subprocess.Popen(loop) as other, subprocess.Popen(loop, env={"RANK": "1"}) as rank:
        states = {process: psutil.Process(process.pid).status for process in (other, rank)}
        stopping = threading.Thread(target=stress.stop_one_rank, args=(psutil.Process(), 2.0))
        stopping.start()
        wait_until(lambda: states[rank]() == psutil.STATUS_STOPPED)
        assert states[other]() != psutil.STATUS_STOPPED
        stopping.join()
        wait_until(lambda: states[rank]() != psutil.STATUS_STOPPED)
        other.kill()
        rank.kill()


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
