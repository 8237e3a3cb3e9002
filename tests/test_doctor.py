"""`torchclinic doctor --distributed` finds what would end a long run, and names host and rank."""

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from contextlib import suppress
from importlib import import_module
from importlib.util import find_spec

import pytest
import torch
import torch.distributed as dist

from torchclinic import doctor
from torchclinic.doctor import (
    blame,
    bus_bandwidth,
    disagreements,
    host_table,
    link_speed,
    missing_ranks,
    rounds,
    slow_pairs,
    verdict,
)
from torchclinic.process_group import GROUP
from torchladder.launching import launch

HANG = 120  # seconds; twenty times what a test takes here
DOCTOR = ["-m", "torchclinic", "doctor", "--distributed"]
TORCHRUN = [sys.executable, "-m", "torch.distributed.run"]


def facts(*hosts, **differing):
    """What ranks say of themselves, one on each of `hosts`; `differing` has a list a fact."""
    same = {
        "node": "0", "local_rank": 0, "local_size": 1, "WORLD_SIZE": len(hosts), "gpus": 0,
        "GPU": None, "uuid": None, "driver": None, "torch": "2.15.0", "CUDA": "13.2",
        "NCCL": "2.30.7", "Python": "3.11.7", "torchclinic": "0.1.0", "program": None,
        "interface": "eth0", "address": "10.0.0.1", "interfaces": ["lo", "eth0"], "link": None,
    }  # fmt: skip
    each = [same | {"rank": i, "host": host} for i, host in enumerate(hosts)]
    for key, values in differing.items():
        for fact, value in zip(each, values, strict=True):
            fact[key] = value
    return each


# --- what is said of facts ----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("differing", "sentence"),
    [
        ({"torch": ["2.15.0", "2.10.0", "2.15.0"]}, "b has torch 2.10.0, the others 2.15.0: inst"),
        ({"NCCL": ["2.30.7", "2.30.7", None]}, "c has no NCCL, the others 2.30.7: install"),
        ({"torchclinic": ["0.1.0", "0.0.9", "0.1.0"]}, "b has torchclinic 0.0.9, the others"),
        ({"program": ["aa", "aa", "bb"]}, "c has program bb, the others aa: copy the same files"),
        ({"WORLD_SIZE": [3, 4, 3]}, "b has WORLD_SIZE 4, the others 3: start all hosts with"),
        ({"GPU": ["H100", None, "H100"]}, "no GPU that PyTorch sees on b, but on the others: run"),
        ({"uuid": ["x", "y", "x"]}, "ranks 0 and 2 on a share one GPU, which NCCL refuses"),
    ],
)
def test_what_differs_is_a_problem_that_names_the_host(differing, sentence):
    problems, warnings = disagreements(facts("a", "b", "c", **differing))
    assert [problem[: len(sentence)] for problem in problems] == [sentence]
    assert warnings == []


def test_another_torch_has_another_cuda_and_that_is_not_said_twice():
    differing = {"torch": ["2.15.0", "2.10.0"], "CUDA": ["13.2", "12.8"]}
    problems, _ = disagreements(facts("a", "b", **differing))
    assert problems == ["b has torch 2.10.0, a 2.15.0: install the same on every host."]


def test_what_may_go_well_is_a_warning():
    differing = {"driver": ["580.1", "570.2", "580.1"], "GPU": ["H100", "H100", "A100"]}
    problems, warnings = disagreements(facts("a", "b", "c", **differing))
    assert problems == []
    assert warnings == [
        "b has driver 570.2, the others 580.1: that often goes well.",
        "c has GPU A100, the others H100: the slowest sets the pace.",
    ]


def test_ranks_that_are_alike_have_no_problem():
    assert disagreements(facts("a", "a", "b")) == ([], [])


def test_the_table_has_a_row_a_host_and_no_empty_column():
    same_name = facts("vm", "vm", "vm", node=["0", "0", "1"])
    lines = str(host_table(same_name)).splitlines()
    columns = "host address ranks torch CUDA NCCL Python torchclinic"
    assert " ".join(lines[0].split()) == columns
    assert lines[2].startswith("vm (node 0)  10.0.0.1 (eth0)    0-1  2.15.0")
    assert lines[3].startswith("vm (node 1)  10.0.0.1 (eth0)      2  2.15.0")


def test_bus_bandwidth_is_that_of_nccl_tests():
    # Its PERFORMANCE.md: B = S/t * 2(n-1)/n
    assert bus_bandwidth(8e9, 1.0, 8) == 14e9
    assert bus_bandwidth(8e9, 1.0, 2) == 8e9


def test_slow_pairs_are_held_against_their_own_kind():
    names = {0: "a", 1: "a", 2: "b", 3: "c"}
    within, across, bad = 10e9, 1e9, 0.1e9
    speeds = {(0, 1): within, (0, 2): across, (0, 3): bad, (2, 3): across}
    [warning] = slow_pairs(speeds, names)
    assert warning.startswith(
        "a - c (ranks 0 and 3) is 10.0 times slower than the median pair betw"
    )
    line = verdict(facts("a", "a", "b", "c"), [], [warning], {4000: 1e-3}, speeds)
    assert line == (
        "OK: 4 ranks on 3 hosts agree; all-reduce 6.0 MB/s; slowest pair a - c (ranks 0 and 3) "
        "100.0 MB/s; warnings: 1"
    )


def test_every_pair_of_hosts_is_measured_and_no_rank_is_asked_twice_at_a_time():
    names = {rank: f"host{rank // 2}" for rank in range(18)}
    turns = rounds(names)
    pairs = [pair for turn in turns for pair in turn]
    assert sorted(pairs) == [(a, b) for a in range(0, 18, 2) for b in range(a + 2, 18, 2)]
    for turn in turns:
        ranks = [rank for pair in turn for rank in pair]
        assert len(ranks) == len(set(ranks))


def test_the_link_of_a_virtual_interface_has_no_speed():
    assert link_speed("lo") is None
    assert link_speed("no-such-interface") is None
    assert link_speed(None) is None


JOIN = {"do": "join", "backend": "gloo", "seconds": 9}


def test_the_rank_that_failed_is_blamed_not_those_that_lost_it():
    lost = {"error": "RuntimeError: Connection closed by peer [10.0.0.2]:4242"}
    answers = {0: lost, 1: {"error": "RuntimeError: no such interface"}, 2: {"late": True}}
    [sentence] = blame(JOIN, answers, facts("a", "b", "c"))
    assert sentence.startswith(
        "rank 1 on b could not join the process group (gloo): RuntimeError: "
    )
    assert "Interface tried: eth0 (10.0.0.1); that host has lo and eth0." in sentence
    # One that was killed says nothing.
    [sentence] = blame(JOIN, {0: lost, 2: {"late": True}}, facts("a", "b", "c"))
    assert sentence.startswith("rank 1 on b registered, then did not answer")


def test_if_all_wait_the_addresses_are_told():
    late = {rank: {"late": True} for rank in range(2)}
    [sentence] = blame(JOIN, late, facts("a", "b", address=["10.0.0.1", "127.0.1.1"]))
    assert "ranks 0 and 1 could not join the process group (gloo) within 9 s" in sentence
    assert "10.0.0.1 of a and 127.0.1.1 of b" in sentence
    assert "on b set GLOO_SOCKET_IFNAME" in sentence


def test_missing_ranks_are_told_when_time_is_up():
    store = dist.HashStore()
    store.set("facts/0", "")
    start = time.monotonic()
    assert missing_ranks(store, "facts", range(3), 0.5) == [1, 2]
    assert 0.5 <= time.monotonic() - start < HANG
    assert missing_ranks(store, "facts", [0], 0) == []


def test_without_a_launcher_it_says_how_to_start_it(monkeypatch):
    for name in GROUP:
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(ValueError, match=r"RANK.*not set.*torchrun --nproc-per-node=2 -m torchl"):
        doctor.run(60)


# --- real ranks ---------------------------------------------------------------------------------


def doctor_on_ranks(capsys, on_rank_1=None, *, timeout=60.0, world_size=2, world=2, **environment):
    """Exit status of each rank, and what rank 0 prints; ``on_rank_1()`` comes before the check.

    Each rank is a host, for the doctor, and rank 0 opens the store, as it does without torchrun.
    """
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])

    def one_rank():
        rank, pids = dist.get_rank(), [0] * world_size
        dist.all_gather_object(pids, os.getpid())
        dist.destroy_process_group()
        del os.environ["TORCHELASTIC_USE_AGENT_STORE"]
        os.environ |= {"MASTER_PORT": port, "WORLD_SIZE": str(world), "GROUP_RANK": str(rank)}
        os.environ |= {"LOCAL_WORLD_SIZE": "1", "LOCAL_RANK": "0"}
        if rank == 1:
            os.environ |= environment
            if on_rank_1:
                on_rank_1()
        doctor.GRACE = 2.0
        try:
            return doctor.run(timeout)
        finally:
            with suppress(ProcessLookupError):
                os.kill(pids[-1], signal.SIGCONT)

    statuses = launch(one_rank, world_size=world_size, timeout=HANG)
    return statuses, capsys.readouterr().out


@pytest.fixture
def standard_output():
    """What `doctor.run` does to it is undone."""
    stream, kept = sys.stdout, os.dup(1)
    yield
    os.dup2(kept, 1)
    os.close(kept)
    sys.stdout = stream


@pytest.mark.slow
def test_two_ranks_that_are_well_get_an_ok(tmp_path, monkeypatch, capfd, standard_output):
    """Rank 0 is this process, rank 1 another; there is no torchrun."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    ranks = [
        dict(zip(GROUP, map(str, (rank, rank, 2, 2, "127.0.0.1", port)), strict=True))
        for rank in range(2)
    ]
    command = [sys.executable, *DOCTOR, "--program", __file__]
    other = subprocess.Popen(command, env=os.environ | ranks[1])
    for name, value in ranks[0].items():
        monkeypatch.setenv(name, value)
    try:
        assert doctor.run(HANG, __file__, str(tmp_path / "found.json")) == 0
        assert other.wait(HANG) == 0
    finally:
        other.kill()
        if dist.is_initialized():
            dist.destroy_process_group()
    lines = capfd.readouterr().out.splitlines()
    assert_well(lines, tmp_path / "found.json")


@pytest.mark.long
def test_two_ranks_of_torchrun_get_an_ok(tmp_path):
    command = [*TORCHRUN, "--nproc-per-node=2", *DOCTOR, "--program", __file__]
    command += ["--json", str(tmp_path / "found.json")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=HANG)
    assert done.returncode == 0, done.stderr
    assert "ChildFailedError" not in done.stderr
    assert_well(done.stdout.splitlines(), tmp_path / "found.json")


def assert_well(lines, file):
    assert lines[0].split()[:3] == ["host", "address", "ranks"]
    assert lines[0].endswith("program")
    assert re.fullmatch(
        r"OK: 2 ranks on 1 host agree; all-reduce [\d.]+ [kMG]B/s; slowest pair .* "
        r"\(ranks 0 and 1\) [\d.]+ [kMG]B/s",
        lines[-1],
    )
    found = json.loads(file.read_text())
    assert found["verdict"] == lines[-1]
    assert [fact["torch"] for fact in found["facts"]] == [torch.__version__] * 2
    assert found["all_reduce"][0]["bytes"] == 4000
    assert [pair["ranks"] for pair in found["pairs"]] == [[0, 1]]


@pytest.mark.slow
def test_a_rank_that_never_comes_is_named_in_time(capsys):
    start = time.monotonic()
    statuses, out = doctor_on_ranks(capsys, timeout=1, world_size=1)
    assert statuses == [1]
    assert out.splitlines()[-1].startswith("PROBLEM  rank 1 of 2 did not register within 1 s: ")
    assert time.monotonic() - start < HANG


@pytest.mark.slow
def test_a_rank_that_registers_and_then_hangs_is_named_in_time(capsys):
    def stop_when_told_to_join():
        # All its threads; it goes on when rank 0 has ended.
        doctor.join = lambda order: os.kill(os.getpid(), signal.SIGSTOP)

    statuses, out = doctor_on_ranks(capsys, stop_when_told_to_join, timeout=1)
    assert statuses == [1, 1]
    host = socket.gethostname()
    told = f"PROBLEM  rank 1 on {host} (node 1) registered, then did not answer when it was told"
    assert out.splitlines()[-1].startswith(told)


@pytest.mark.slow
def test_another_version_and_the_wrong_interface_are_named(capsys):
    def other_version():
        torch.__version__ = "2.3.4"

    wrong = {"GLOO_SOCKET_IFNAME": "eth77"}
    statuses, out = doctor_on_ranks(capsys, other_version, **wrong)
    assert statuses == [1, 1]
    host = socket.gethostname()
    version, interface = out.splitlines()[-2:]
    told = f"PROBLEM  {host} (node 1) has torch 2.3.4, {host} (node 0) {torch.__version__}: install"
    assert version.startswith(told)
    told = f"PROBLEM  rank 1 on {host} (node 1) could not join the process group (gloo): Runtime"
    assert interface.startswith(told)
    assert "eth77. Interface tried: eth77 (no address); that host has " in interface
    assert "Check GLOO_SOCKET_IFNAME" in interface


@pytest.mark.slow
def test_a_store_that_nobody_opens_is_one_sentence():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # and does not listen
        values = (1, 0, 2, 1, "127.0.0.1", taken.getsockname()[1])
        environment = dict(zip(GROUP, map(str, values), strict=True))
        command = [sys.executable, *DOCTOR, "--timeout", "1"]
        everything = os.environ | environment
        done = subprocess.run(command, env=everything, capture_output=True, text=True, timeout=HANG)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.startswith(f"PROBLEM  rank 1 on {socket.gethostname()} has no connection to")
    assert done.stderr.count("\n") == 1


@pytest.mark.gpu
@pytest.mark.slow
def test_two_ranks_on_one_gpu_are_a_problem():
    environment = os.environ | {"CUDA_VISIBLE_DEVICES": "0"}
    command = [*TORCHRUN, "--nproc-per-node=2", *DOCTOR]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=HANG)
    assert done.returncode == 1
    assert "PROBLEM  ranks 0 and 1 on" in done.stdout
    assert "share one GPU, which NCCL refuses" in done.stdout


@pytest.mark.multigpu
@pytest.mark.slow
def test_two_gpus_are_measured_by_nccl():
    command = [*TORCHRUN, "--nproc-per-node=2", *DOCTOR]
    done = subprocess.run(command, capture_output=True, text=True, timeout=HANG)
    assert done.returncode == 0, done.stderr
    assert "driver" in done.stdout.splitlines()[0]
    assert done.stdout.splitlines()[-1].startswith("OK: 2 ranks on 1 host agree; all-reduce ")


# --- two hosts ----------------------------------------------------------------------------------

two_hosts = import_module("two_hosts") if find_spec("two_hosts") else None
needs_hosts = pytest.mark.skipif(
    two_hosts is None or not two_hosts.possible(), reason="needs root and network namespaces"
)


def doctor_on_hosts(second=None, timeout=20, **options):
    """Exit status and prints of torchrun on each of two hosts; `second` is the second's setting."""
    with two_hosts.two_hosts(**options) as hosts:
        jobs = []
        for host in hosts:
            settings = [f"--rdzv-conf=is_host={int(host is hosts[0])}"]
            settings += [f"--local-addr={host.address}"]
            command = [*two_hosts.torchrun(host, *settings), *DOCTOR, "--timeout", str(timeout)]
            jobs.append(host.start(command, env=second if host is hosts[1] else None))
        return [(job.wait(HANG), job.text) for job in jobs]


def verdict_in(text):
    return next(line for line in text.splitlines() if line.startswith(("OK", "PROBLEM")))


@needs_hosts
@pytest.mark.long
@pytest.mark.slow
def test_two_hosts_are_ok_and_their_slow_link_shows():
    (first, out), (second, other) = doctor_on_hosts(rate="100mbit")
    assert (first, second) == (0, 0), out + other
    line = verdict_in(out)
    assert line.startswith("OK: 2 ranks on 2 hosts agree; all-reduce ")
    assert re.search(r"^host1  10\.231\.7\.1 \(eth0\) +0 ", out, re.MULTILINE)
    assert re.search(r"^host2  10\.231\.7\.2 \(eth0\) +1 ", out, re.MULTILINE)
    # 100 Mbit/s are 12.5 MB/s, less what the headers take.
    speeds = re.findall(r"([\d.]+) MB/s", line)
    assert len(speeds) == 2
    assert all(3 < float(speed) < 13 for speed in speeds), line


@needs_hosts
@pytest.mark.long
@pytest.mark.slow
def test_the_host_with_the_wrong_interface_is_named_on_both():
    (first, out), (second, other) = doctor_on_hosts({"GLOO_SOCKET_IFNAME": "eth77"})
    assert (first, second) == (1, 1)
    line = verdict_in(out)
    assert line.startswith("PROBLEM  rank 1 on host2 could not join the process group (gloo): ")
    # torchrun's report is the last thing on each host's screen.
    for text in (out, other):
        assert line in text.partition("Root Cause")[2]


@needs_hosts
@pytest.mark.long
@pytest.mark.slow
def test_a_host_name_that_stands_for_loopback_is_the_advice():
    (first, out), (second, _) = doctor_on_hosts(own_address="127.0.1.1")
    assert (first, second) == (1, 1)
    assert "host1  127.0.1.1 (lo)" in out
    assert "on host1 and host2 set GLOO_SOCKET_IFNAME to the interface" in verdict_in(out)
