"""`launch` runs functions in real processes, blames the right one, and leaves nothing behind."""

import atexit
import copy
import ctypes
import multiprocessing as mp
import os
import pickle
import re
import runpy
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from running import alive, wait_until

from torchclinic.frames import describe, places
from torchladder import launching
from torchladder.launching import LaunchError, join_group, launch, warm_up

pytestmark = pytest.mark.slow
HANG = 180  # seconds; ends what hangs, and says nothing about what is merely slow


@pytest.fixture(scope="module", autouse=True)
def _fork_server():
    warm_up()
    launch(int)


@pytest.fixture(autouse=True)
def _nothing_is_left_behind():
    """Each test ends with no more processes, threads, descriptors and shared memory than before.

    There may be less: a thread or a file of an earlier test may end meanwhile.
    """

    def resources():
        descriptors = len(os.listdir("/proc/self/fd"))
        return ranks_running(), threading.active_count(), descriptors, shared_by_the_dead()

    before = resources()
    yield
    wait_until(lambda: all(now <= then for now, then in zip(resources(), before, strict=True)))


def shared_by_the_dead():
    """Shared memory that torch made for a process that is gone, not what other programs use."""
    made = {name for name in os.listdir("/dev/shm") if name.startswith("torch_")}
    return {name for name in made if not alive(name.split("_")[1])}


def ranks_running():
    """Process ids of the fork server's children."""
    from multiprocessing.forkserver import _forkserver

    server = _forkserver._forkserver_pid
    children = Path(f"/proc/{server}/task/{server}/children")
    return set(children.read_text().split()) if server else set()


# --- what it does -------------------------------------------------------------------------------


def test_closures_lambdas_local_classes_and_torchs_backends_travel():
    offset = 10

    class Adder:
        def __call__(self, x):
            return x + offset + dist.get_rank()

    assert launch(Adder(), 1) == [11, 12]
    assert launch(lambda: (offset, torch.backends.cudnn.benchmark)) == [(10, False)] * 2


def test_ranks_take_a_gpu_each_or_share_them_and_wait_for_the_last_to_join():
    def with_gpus(gpus):
        def work():
            rank, store = dist.get_rank(), dist.distributed_c10d._get_default_store()
            chosen = []

            def join(*backend, device_id):  # the ranks are in a group already
                chosen.extend(backend)
                time.sleep(rank)  # for rank 0 to go on, if it does not wait
                store.set(f"rank {rank} joins", "")

            torch.cuda.is_available, torch.cuda.device_count = lambda: gpus > 0, lambda: gpus
            torch.cuda.set_device, dist.init_process_group = chosen.append, join
            join_group()
            assert store.check(["rank 1 joins"])
            return chosen

        return launch(work, timeout=HANG, backend="gloo")

    assert with_gpus(2) == [[0, "nccl"], [1, "nccl"]]
    assert with_gpus(1) == [[0, "gloo"], [0, "gloo"]]


def test_the_ranks_have_the_callers_environment_of_today_and_share_the_cores(monkeypatch):
    def seen():
        return str(dist.get_debug_level()), torch.get_num_threads(), os.environ.get("OF_TODAY")

    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    # Of a container, say: fewer or more than the machine has.
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: range(6), raising=False)
    assert launch(seen) == [("DebugLevel.OFF", 3, None)] * 2
    monkeypatch.setenv("OF_TODAY", "now")
    monkeypatch.setenv("TORCH_DISTRIBUTED_DEBUG", "DETAIL")
    monkeypatch.setenv("OMP_NUM_THREADS", "4")
    assert launch(seen) == [("DebugLevel.DETAIL", 4, "now")] * 2


def test_data_loader_workers_of_a_rank_start_as_the_callers_and_end_with_it():
    class Numbers(list):  # of a cell, say: cannot be pickled by name
        pass

    def count():
        options = {"num_workers": 1, "persistent_workers": True}
        batches = torch.utils.data.DataLoader(Numbers(range(10)), 5, **options)
        return [batch.sum().item() for batch in batches]

    method = mp.get_start_method(allow_none=True)
    if mp.get_all_start_methods()[0] != "fork":  # the default, from Python 3.14 on
        mp.set_start_method("fork", force=True)
    try:
        assert launch(count) == [[10, 35], [10, 35]]
    finally:
        mp.set_start_method(method, force=True)


def test_threads_launch_at_one_time_and_the_main_module_stays_what_it_is():
    main = sys.modules["__main__"]
    with ThreadPoolExecutor() as pool:
        names = pool.map(lambda name: launch(lambda: name, world_size=1), "abcabc")
        assert [*names] == [[name] for name in "abcabc"]
    assert sys.modules["__main__"] is main


# --- what it shows ------------------------------------------------------------------------------


def speak():
    print(f"rank {dist.get_rank()} speaks")
    print("and errs", file=sys.stderr)
    atexit.register(print, "and goes")


def test_what_is_left_in_a_cycle_is_freed_before_the_group_goes(capsys):
    class Left:  # as DDP's reducer, which aborts the process if it is later
        def __init__(self):
            self.itself = self

        def __del__(self):
            print(f"freed in a group: {dist.is_initialized()}")

    launch(lambda: Left() and None, world_size=1)
    assert capsys.readouterr().out == "freed in a group: True\n"


def test_prints_are_shown_as_asked(capsys):
    own = "rank 0 speaks\nand errs\nand goes\n"
    other = "[rank 1] rank 1 speaks\n[rank 1] and errs\n[rank 1] and goes\n"
    for show, expected in {"rank0": own, "all": own + other, "none": ""}.items():
        launch(speak, show=show)
        assert capsys.readouterr().out == expected


def test_of_prints_that_are_not_live_the_last_are_kept(capsys, monkeypatch):
    monkeypatch.setattr(launching, "KEPT", 4_000)

    def print_lines():
        for i in range(1_000):
            print(f"line {i} é")

    launch(print_lines, show="all", timeout=HANG)
    whole = "".join(f"line {i} é\n" for i in range(1_000))
    shown = capsys.readouterr().out
    assert shown.startswith(whole), "rank 0's, live"
    last = re.sub(r"(?m)^\[rank 1\] ", "", shown[len(whole) :])
    assert whole.endswith(last[1:])
    assert 3_900 < len(last.encode()) <= 4_000


# --- what goes wrong ----------------------------------------------------------------------------


def test_the_rank_that_raised_is_blamed_with_its_own_line_and_shows_its_prints(capsys):
    def fail():
        print(f"rank {dist.get_rank()} before the end")
        if dist.get_rank() == 1:
            raise ValueError("no\nsuch thing")

    with pytest.raises(LaunchError) as caught:
        launch(fail, show="none", timeout=HANG)
    message = str(caught.value)
    assert message.startswith("rank 1 of 2 failed with ValueError: no\nsuch thing\n")
    assert 'raise ValueError("no\\nsuch thing")' in message
    assert message.count("such thing") == 2, "the message, and the line that raised it"
    assert "site-packages" not in message
    assert (caught.value.rank, caught.value.kind) == (1, "ValueError")
    assert capsys.readouterr().out == "[rank 1] rank 1 before the end\n"
    for again in (pickle.loads(pickle.dumps(caught.value)), copy.copy(caught.value)):
        assert (type(again), str(again)) == (LaunchError, message)
        assert (again.rank, again.kind) == (1, "ValueError")
    assert launch(dist.get_rank) == [0, 1]


def test_what_a_failed_rank_does_at_exit_does_not_hide_its_failure(capsys):
    def work():
        atexit.register(time.sleep, 10 * HANG)
        print("half a line", end="")
        if dist.get_rank() == 1:
            raise ValueError("the cause")
        dist.barrier()

    with pytest.raises(LaunchError, match=r"^rank 1 of 2 failed with ValueError: the cause"):
        launch(work, timeout=30, show="none")
    assert "[rank 1] half a line" in capsys.readouterr().out


def test_failed_ranks_have_time_for_what_they_do_at_exit(capsys, monkeypatch):
    monkeypatch.setattr(launching, "GRACE", HANG)

    def fail():
        atexit.register(lambda: time.sleep(1) or print("and goes"))
        raise ValueError("the cause")

    with pytest.raises(LaunchError, match="the cause"):
        launch(fail, timeout=2 * HANG, show="none")
    assert capsys.readouterr().out == "[rank 0] and goes\n[rank 1] and goes\n"


def abort(last_words):
    os.write(2, last_words.encode())
    os.abort()


TERMINATED = "terminate called without an active exception\n"


@pytest.mark.parametrize(
    ("die", "how"),
    [
        (lambda: os.kill(os.getpid(), signal.SIGKILL), "was killed by SIGKILL"),
        (lambda: os._exit(3), "exited with 3"),
        (lambda: ctypes.string_at(0), "was killed by SIGSEGV\nrank 1 was at:"),
        (lambda: abort(TERMINATED), f"was killed by SIGABRT: {TERMINATED}rank 1 was at:"),
    ],
)
def test_a_rank_that_dies_is_blamed_rather_than_the_one_that_waits_for_it(die, how):
    def work():
        if dist.get_rank() == 1:
            die()
        dist.barrier()

    with pytest.raises(LaunchError, match=f"^rank 1 of 3 {how}") as caught:
        launch(work, world_size=3, timeout=HANG)
    assert caught.value.kind is None


def test_a_mismatch_of_collectives_is_told_with_each_ranks_line(monkeypatch):
    # The rank that was not aborted has so long to say where it was; a busy machine needs more.
    monkeypatch.setattr(launching, "GRACE", HANG)

    def work():
        if dist.get_rank() == 1:
            dist.all_reduce(torch.ones(5000))
        for _ in range(20):  # the first may end before the other rank is aborted
            dist.all_reduce(torch.ones(1000))

    with pytest.raises(LaunchError, match="distributed collective mismatch") as caught:
        launch(work, timeout=HANG)
    message = str(caught.value)  # gloo aborts the one that receives: who is wrong cannot be told
    assert message.startswith("rank 0 of 2 was killed by SIGABRT: [enforce fail")
    aborted, _, sender = message.partition("rank 0 was at:")[2].partition("rank ")
    assert "dist.all_reduce(torch.ones(1000))" in aborted
    assert "dist.all_reduce(torch.ones(5000))" in sender
    assert f"{__file__}, line " in aborted
    # In its traceback; or where it is, if gloo has not told it that the other is gone.
    assert re.search(rf'{re.escape(__file__)}"?, line \d', sender)


def test_a_rank_that_goes_on_after_another_has_aborted_is_asked_where_it_is():
    def work():
        store = dist.distributed_c10d._get_default_store()
        if dist.get_rank() == 0:
            store.wait(["rank 1 sleeps"])
            os.abort()
        store.set("rank 1 sleeps", "")
        time.sleep(HANG)

    with pytest.raises(LaunchError, match="rank 0 of 2 was killed by SIGABRT") as caught:
        launch(work)
    first, _, then = str(caught.value).partition("rank 1 was at:")
    assert "os.abort()" in first
    assert "time.sleep(HANG)" in then


def test_a_rank_that_aborts_because_another_is_gone_is_not_blamed():
    def work(last_words):
        if dist.get_rank() == 1:
            raise ValueError("the cause")
        try:
            dist.barrier()
        except RuntimeError:
            abort(last_words)

    of_gloo = "terminate called after throwing an instance of 'gloo::IoException'\n"
    of_gloo += "  what():  [pair.cc:561] Connection closed by peer [127.0.0.1]:1234\n"
    for last_words in (of_gloo, TERMINATED):
        with pytest.raises(LaunchError, match=r"^rank 1 of 2 failed with ValueError: the cause"):
            launch(work, last_words, timeout=HANG)


@pytest.mark.parametrize(
    ("sent", "timeout", "error", "message"),
    [
        (signal.SIGKILL, HANG, LaunchError, "rank 1 of 2 was killed by SIGKILL$"),
        (signal.SIGSTOP, 10, TimeoutError, "rank 1 of 2 still running after 10 s"),
    ],
)
def test_a_rank_that_is_killed_or_stopped_while_it_sends_its_result_is_named(
    sent, timeout, error, message
):
    def work():
        frame = sys._getframe()
        while frame.f_code.co_name != "_run_rank":
            frame = frame.f_back
        if dist.get_rank() == 1:
            os.write(frame.f_locals["result"].fileno(), (9).to_bytes(8, "big") + b"half")
            os.kill(os.getpid(), sent)

    with pytest.raises(error, match=f"^{message}"):
        launch(work, timeout=timeout)


@pytest.mark.parametrize(
    ("leave", "message"),
    [
        (lambda: sys.exit("enough"), "failed with SystemExit: enough"),
        (lambda: (i for i in "ab"), "the generator that was returned cannot be sent back"),
    ],
)
def test_other_ways_to_leave_are_named_too(leave, message):
    with pytest.raises(LaunchError, match=message):
        launch(leave, timeout=HANG)


def test_a_place_is_told_whatever_letters_its_path_has(tmp_path):
    line = "    faulthandler.dump_traceback(file)  # here"
    path = tmp_path / "my clóne モ😀.py"
    path.write_text(f"import faulthandler\ndef work(file):\n{line}\n")
    with open(tmp_path / "dump", "w+") as dump:
        runpy.run_path(str(path))["work"](dump)
    told = places((tmp_path / "dump").read_text(), hide="nothing")
    assert told[:2] == [f"  {path}, line 3, in work", line]


def test_time_out_says_who_was_still_running_and_where(tmp_path, monkeypatch):
    # A pipe may give what is in it in pieces.
    monkeypatch.setattr(os, "read", lambda file, most, read=os.read: read(file, min(most, 40)))
    sleeps, over = tmp_path / "sleeps", [0]

    def wait_for_ever():
        if dist.get_rank() == 1:
            sleeps.touch()
            time.sleep(10 * HANG)

    def read_and_let_time_pass(r, read=launching._read):
        read(r)
        over[0] = HANG * (over[0] > 0 or (r.rank == 0 and r.done and sleeps.exists()))

    monkeypatch.setattr(launching, "_read", read_and_let_time_pass)
    monkeypatch.setattr(time, "monotonic", lambda now=time.monotonic: now() + over[0])
    with pytest.raises(TimeoutError) as caught:
        launch(wait_for_ever, timeout=HANG)
    message = str(caught.value)
    assert message.startswith(f"rank 1 of 2 still running after {HANG} s\nrank 1 was at:\n")
    assert re.search(rf"{re.escape(__file__)}, line \d+, in wait_for_ever\n    \w", message)
    assert launch(dist.get_rank) == [0, 1]


def test_a_rank_that_will_not_end_is_ended_when_another_fails():
    def work():
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        dist.barrier()
        if dist.get_rank() == 1:
            raise ValueError
        while True:
            print("x" * 10_000)

    with pytest.raises(LaunchError, match="rank 1 of 2 failed with ValueError"):
        launch(work, show="none")


def test_a_rank_that_was_killed_is_blamed_and_one_that_raised_before_is_told(capsys, monkeypatch):
    monkeypatch.setattr(launching, "GRACE", HANG)

    def work():
        print("half a line", end="")
        if dist.get_rank() == 0:
            raise ValueError("of its own")
        time.sleep(1)
        os.kill(os.getpid(), signal.SIGKILL)

    with pytest.raises(LaunchError, match=r"^rank 1 of 2 was killed by SIGKILL\n") as caught:
        launch(work, timeout=HANG)
    assert "\nrank 0 of 2 failed with ValueError: of its own\n" in str(caught.value)
    assert capsys.readouterr().out == "half a line"


def test_an_exception_of_megabytes_is_told_without_its_middle():
    message = describe(ValueError("begins" + "x" * 5_000_000 + "ends"), {}, hide="")
    assert message.startswith("ValueError: beginsxxx")
    assert message.endswith("xxxends")
    assert len(message) < 200_000


def test_what_cannot_work_is_refused_before_any_process_starts(monkeypatch):
    lock = threading.Lock()
    with pytest.raises(TypeError, match=r"<lambda> or its arguments cannot be sent .*lock"):
        launch(lambda: lock)
    with pytest.raises(TypeError, match=r"^NoneType is no function: launch"):
        launch(print())
    for options, message in [
        ({"world_size": 0}, "world_size=0: choose a whole number from 1 to"),
        ({"world_size": 100_000}, "world_size=100000: choose a whole number from 1 to"),
        ({"show": "rank1"}, "show='rank1'"),
    ]:
        with pytest.raises(ValueError, match=message):
            launch(int, **options)
    monkeypatch.setattr(mp, "get_all_start_methods", lambda: ["spawn"])  # as on Windows
    with pytest.raises(OSError, match="WSL 2"):
        launch(int)


@pytest.mark.parametrize(
    "end",
    [
        lambda: None,
        lambda: os.kill(os.getpid(), signal.SIGKILL),
        lambda: dist.get_rank() or os.kill(os.getppid(), signal.SIGKILL) or time.sleep(6000),
    ],
)
def test_what_a_rank_has_started_ends_with_it(end, tmp_path):
    def start():
        (tmp_path / str(subprocess.Popen(["sleep", "6000"]).pid)).touch()
        dist.barrier()
        end()

    with suppress(LaunchError):
        launch(start)
    wait_until(lambda: not any(map(alive, os.listdir(tmp_path))))
