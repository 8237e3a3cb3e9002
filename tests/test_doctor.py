"""`torchclinic doctor --distributed` finds what would end a long run, and names host and rank."""

import json
import os
import re
import signal
import socket
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

import pytest
import torch
import torch.distributed as dist
from running import port_for_a_store, ran

from tools import two_hosts
from torchclinic import doctor
from torchclinic.process_group import GROUP
from torchladder.launching import launch

HANG = 500  # seconds; ends what hangs, and says nothing about what is merely slow
DOCTOR = ["-m", "torchclinic", "doctor", "--distributed"]
TORCHRUN = [sys.executable, "-m", "torch.distributed.run"]


def facts(*hosts, **differing):
    """What ranks say of themselves, one on each of `hosts`; `differing` has a list a fact."""
    same = {
        "node": "0", "local_rank": 0, "local_size": 1, "WORLD_SIZE": len(hosts), "gpus": 0,
        "GPU": None, "uuid": None, "driver": None, "torch": "2.15.0", "CUDA": "13.2",
        "NCCL": "2.30.7", "Python": "3.11.7", "torchclinic": "0.1.0", "program": None,
        "interface": "eth0", "address": "10.0.0.1", "interfaces": ["lo", "eth0"],
    }  # fmt: skip
    each = [same | {"rank": i, "host": host} for i, host in enumerate(hosts)]
    for key, values in differing.items():
        for fact, value in zip(each, values, strict=True):
            fact[key] = value
    return each


# --- what is said of facts ----------------------------------------------------------------------


def test_what_must_not_differ_is_a_problem_that_names_the_host():
    for key, values, sentence in [
        ("torch", ["2.15.0", "2.10.0", "2.15.0"], "torch: 2.10.0 on b, 2.15.0 on the others; inst"),
        ("NCCL", ["2.30.7", "2.30.7", None], "NCCL: none on c, 2.30.7 on the others; install"),
        ("torchclinic", ["0.1", "0.0", "0.1"], "torchclinic: 0.0 on b, 0.1 on the others; install"),
        ("program", ["aa", "aa", "bb"], "program: bb on c, aa on the others; copy the same files"),
        ("WORLD_SIZE", [3, 4, 3], "WORLD_SIZE: 4 on b, 3 on the others; start all hosts"),
        ("GPU", ["H100", None, "H100"], "GPU: none on b, H100 on the others; torchclinic doctor"),
        ("uuid", ["x", "y", "x"], "ranks 0 and 2 on a share one GPU, which NCCL refuses"),
    ]:
        problems = doctor.disagreements(facts("a", "b", "c", **{key: values}))
        assert [problem[: len(sentence)] for problem in problems] == [sentence]
    differing = {"driver": ["580.1", "570.2", "580.1"], "GPU": ["H100", "H100", "A100"]}
    assert doctor.disagreements(facts("a", "b", "c", **differing)) == []
    # Another torch has another CUDA, and that is not said twice.
    differing = {"torch": ["2.15.0", "2.10.0"], "CUDA": ["13.2", "12.8"]}
    problems = doctor.disagreements(facts("a", "b", **differing))
    assert problems == ["torch: 2.15.0 on a, 2.10.0 on the others; install the same on every host."]
    assert doctor.disagreements(facts("a", "a", "b")) == []


def test_the_table_has_a_row_a_host_and_no_empty_column():
    table = doctor.host_table(facts("vm", "vm", "vm", node=["0", "0", "1"]))
    assert " ".join(table.header) == "host address ranks torch CUDA NCCL Python torchclinic"
    hosts = [["vm (node 0)", "10.0.0.1 (eth0)", "0-1"], ["vm (node 1)", "10.0.0.1 (eth0)", "2"]]
    assert [row[:3] for row in table.rows] == hosts


def test_the_verdict_has_the_bandwidth():
    # As nccl-tests has it, PERFORMANCE.md: B = S/t * 2(n-1)/n
    assert doctor.all_reduce_table({4000: 1e-3}, 4).rows == [["4.0 kB", "1 ms", "6.0 MB/s"]]
    names = {0: "a", 1: "a", 2: "b", 3: "c"}
    line = doctor.verdict(names, {4000: 1e-3})
    assert line == "OK: 4 ranks on 3 hosts agree; all-reduce 6.0 MB/s"


JOIN = {"doing": doctor.JOIN}


def test_the_rank_that_failed_is_blamed_not_those_that_lost_it():
    three = facts("a", "b", "c", address=["10.0.0.1", "10.0.0.2", "127.0.1.1"])
    lost = JOIN | {"error": "RuntimeError: Connection closed by peer [10.0.0.2]:4242"}
    late = JOIN | {"error": "time-out, though all reach the store"}
    failed = JOIN | {"error": "RuntimeError: no such interface"}
    [sentence] = doctor.blame("gloo", {0: lost, 1: failed}, three)  # rank 2 was killed for it
    assert [sentence] == doctor.blame("gloo", {0: lost, 1: failed, 2: late}, three)
    told = "rank 1 on b could not join the process group (gloo): RuntimeError: no such interface. "
    assert sentence.startswith(f"{told}Interface tried: eth0 (10.0.0.2); that host has lo and eth0")
    # One that was killed says nothing.
    [sentence] = doctor.blame("gloo", {0: lost, 2: late}, three)
    assert sentence.startswith("rank 1 on b registered, then did not answer")
    # If all wait, each one's address is told, and what a loopback address needs.
    sentences = doctor.blame("gloo", dict.fromkeys(range(3), late), three)
    assert [" (127.0.1.1);" in sentence for sentence in sentences] == [False, False, True]
    assert all("on c set GLOO_SOCKET_IFNAME to the interface" in s for s in sentences)


def test_without_a_launcher_it_says_how_to_start_it(monkeypatch):
    for name in GROUP:
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(ValueError, match=r"RANK.*not set.*torchrun --nproc-per-node=2 -m torchc"):
        doctor.run(60)


def test_what_ranks_say_is_in_their_order_whichever_comes_first():
    class Store(dict):
        def check(self, keys):
            return keys[0] in self

        def get(self, key):
            self["facts/0"] = '"a"'  # comes once rank 1 has been heard
            return self[key]

    heard = doctor._hear(Store({"facts/1": '"b"'}), "facts", range(2), HANG)
    assert [*heard.items()] == [(0, "a"), (1, "b")]


def test_rank_0_keeps_the_store_until_all_know_how_it_ended(monkeypatch):
    def agree(store, rank, backend, timeout):
        store.set(f"answer/{rank}", '{"times": {"4000": 0.001}}')

    store = dist.HashStore()
    for fact in facts("a", "b"):
        store.set(f"facts/{fact['rank']}", json.dumps(fact))
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setattr(doctor, "GRACE", HANG)
    monkeypatch.setattr(doctor, "_perform", agree)
    with ThreadPoolExecutor() as pool:
        follower = pool.submit(doctor._follow, store, 1, HANG)
        assert doctor._lead(store, HANG) == []
        assert store.check(["bye/1"])
        assert follower.result() == []


# --- real ranks ---------------------------------------------------------------------------------


def doctor_on_ranks(capsys, on_rank_1=None, *, timeout=60.0, started=2, **environment):
    """Exit status of each of two ranks, and what rank 0 prints; `on_rank_1` comes before the check.

    Each rank is a host, for the doctor, and rank 0 opens the store, as it does without torchrun.
    """

    def one_rank():
        rank, pids = dist.get_rank(), [0] * started
        dist.all_gather_object(pids, os.getpid())
        dist.destroy_process_group()
        del os.environ["TORCHELASTIC_USE_AGENT_STORE"]
        os.environ |= {"MASTER_PORT": str(port), "WORLD_SIZE": "2", "GROUP_RANK": str(rank)}
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

    with port_for_a_store() as port:
        statuses = launch(one_rank, world_size=started, timeout=HANG)
    return statuses, capsys.readouterr().out.splitlines()


def test_two_folders_agree_only_if_names_and_contents_do(tmp_path):
    folders = {
        "ours": {"a.py": "x"},
        "same": {"a.py": "x"},
        "another name": {"b.py": "x"},
        "joined": {"a.py": "x\0y"},
        "parted": {"a.py": "x", "b.py": "y"},
        "configured": {"a.py": "x", "b.yaml": "y"},
        "otherwise": {"a.py": "x", "b.yaml": "z"},
    }
    for folder, files in folders.items():
        (tmp_path / folder / "folder.py").mkdir(parents=True)
        os.mkfifo(tmp_path / folder / "pipe.py")  # to read it would take for ever
        for name, text in {**files, "log.txt": folder}.items():
            (tmp_path / folder / name).write_text(text)
    ours, same, *others = (doctor.hash_of(str(tmp_path / folder)) for folder in folders)
    assert ours == same
    assert len({ours, *others}) == 6


@pytest.fixture
def without_gpus(monkeypatch):
    """Two ranks that share a machine's only GPU would be a problem of their own."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")


@pytest.mark.slow
def test_two_ranks_of_torchrun_get_an_ok(without_gpus):
    command = [*TORCHRUN, "--nproc-per-node=2", *DOCTOR, "--program", __file__]
    lines = ran(*command).splitlines()
    assert lines[0].split()[:3] == ["host", "address", "ranks"]
    assert lines[0].endswith("program")
    assert re.fullmatch(r"OK: 2 ranks on 1 host agree; all-reduce [\d.]+ [kMG]B/s", lines[-1])


@pytest.mark.slow
def test_a_rank_that_never_comes_is_named_in_time(capsys):
    statuses, lines = doctor_on_ranks(capsys, timeout=1, started=1)
    assert statuses == [1]
    assert lines[-1].startswith("PROBLEM  rank 1 of 2 did not register within 1 s: ")


@pytest.mark.slow
def test_a_rank_that_registers_and_then_hangs_is_named_in_time(capsys):
    def stop_when_told_to_join():
        # All its threads; it goes on when rank 0 has ended.
        doctor.join = lambda order: os.kill(os.getpid(), signal.SIGSTOP)

    statuses, lines = doctor_on_ranks(capsys, stop_when_told_to_join, timeout=10)
    assert statuses == [1, 1]
    told = f"PROBLEM  rank 1 on {socket.gethostname()} (node 1) registered, then did not answer: "
    assert lines[-1].startswith(told)


@pytest.mark.slow
def test_another_version_and_the_wrong_interface_are_named(capsys, without_gpus):
    def other_version():
        torch.__version__ = "2.3.4"

    statuses, lines = doctor_on_ranks(capsys, other_version, GLOO_SOCKET_IFNAME="eth77")
    assert statuses == [1, 1]
    host, (version, interface) = socket.gethostname(), lines[-2:]
    assert version.startswith("PROBLEM  torch: ")
    assert f"{torch.__version__} on {host} (node 0), 2.3.4 on the others; install" in version
    told = f"PROBLEM  rank 1 on {host} (node 1) could not join the process group (gloo): Runtime"
    assert interface.startswith(told)
    assert "eth77. Interface tried: eth77 (no address); that host has " in interface
    assert "Check GLOO_SOCKET_IFNAME" in interface


@pytest.mark.slow
def test_a_store_that_nobody_opens_is_one_sentence(capsys):
    def without_rank_0():
        values = (1, 0, 2, 1, "127.0.0.1", port)
        os.environ |= dict(zip(GROUP, map(str, values), strict=True))
        return doctor.run(1)

    with port_for_a_store() as port:
        assert launch(without_rank_0, world_size=1, timeout=HANG) == [1]
    told = "".join(capsys.readouterr())
    assert told.count("\n") == 1
    assert told.startswith(f"PROBLEM  rank 1 on {socket.gethostname()} has no connection to")


@pytest.mark.gpu
@pytest.mark.slow
def test_two_ranks_on_one_gpu_are_a_problem():
    environment = os.environ | {"CUDA_VISIBLE_DEVICES": "0"}
    command = [*TORCHRUN, "--nproc-per-node=2", *DOCTOR]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=HANG)
    assert done.returncode == 1
    assert re.search("PROBLEM  ranks 0 and 1 on .* share one GPU, which NCCL refuses", done.stdout)


# --- two hosts ----------------------------------------------------------------------------------


def doctor_on_hosts(second=None, **options):
    """Exit status and prints of torchrun on each of two hosts; `second` is the second's setting."""
    with two_hosts.two_hosts(**options) as hosts:
        jobs = []
        for host in hosts:
            settings = [f"--rdzv-conf=is_host={int(host is hosts[0])}"]
            settings += [f"--local-addr={host.address}"]
            command = [*two_hosts.torchrun(host, *settings), *DOCTOR, "--timeout", "20"]
            jobs.append(host.start(command, env=second if host is hosts[1] else None))
        (first, out), (other, text) = [(job.wait(HANG), job.text) for job in jobs]
    line = next(line for line in out.splitlines() if line.startswith(("OK", "PROBLEM")))
    return (first, other), line, out, text


@pytest.mark.long
@pytest.mark.slow
def test_two_hosts_are_ok_unless_one_has_the_wrong_interface():
    if not two_hosts.possible():
        pytest.skip("needs root and network namespaces")
    statuses, line, out, other = doctor_on_hosts(rate="100mbit")
    assert statuses == (0, 0), out + other
    assert re.search(r"^host1  10\.231\.7\.1 \(eth0\) +0 ", out, re.MULTILINE)
    assert re.search(r"^host2  10\.231\.7\.2 \(eth0\) +1 ", out, re.MULTILINE)
    # 100 Mbit/s are 12.5 MB/s, less what the headers take.
    speed = re.fullmatch(r"OK: 2 ranks on 2 hosts agree; all-reduce ([\d.]+) MB/s", line)[1]
    assert 3 < float(speed) < 13

    statuses, line, out, other = doctor_on_hosts({"GLOO_SOCKET_IFNAME": "eth77"})
    assert statuses == (1, 1)
    assert line.startswith("PROBLEM  rank 1 on host2 could not join the process group (gloo): ")
    # torchrun's report is the last thing on each host's screen.
    assert all(line in text.partition("Root Cause")[2] for text in (out, other))
