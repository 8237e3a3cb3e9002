"""Two hosts on one machine: training across them, faults, and that nothing stays behind."""

import json
import os
import re
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path
from unittest import mock

import pytest
import torch
import two_hosts
import two_hosts_record
from test_rungs import accuracy_printed, few_images, run_here
from two_hosts import torchrun

ROOT = Path(__file__).resolve().parent.parent.parent
RECORD = ROOT / "runs" / "two_hosts.json"
HERE = pytest.mark.skipif(
    not two_hosts.possible(), reason="needs root, ip and the right to make network namespaces"
)


def left_behind(maker):
    """Namespaces of this maker, and processes that run in one that is gone."""
    return [name for name in two_hosts._namespaces() if name.startswith(f"torchladder-{maker}-")]


def printed(host, command, timeout=60):
    job = host.start(command)
    assert job.wait(timeout) == 0, job.text
    return job.text


@HERE
@pytest.mark.slow
def test_rung_4_trains_across_two_hosts_as_well_as_in_one_process(tmp_path):
    few, folders = few_images(tmp_path, 3000), [tmp_path / name for name in two_hosts.NAMES]
    rung = [ROOT / "rungs" / "4_ddp.py", "--data", few, "--epochs", 1, "--lr", 0.1]
    with two_hosts.two_hosts() as hosts:
        jobs = []
        for host, folder in zip(hosts, folders, strict=True):
            (folder / "only").mkdir(parents=True)
            save = "only/lenet.pt" if host is hosts[0] else "not_here/lenet.pt"
            jobs.append(host.start([*torchrun(host), *rung, "--save", save], cwd=folder))
        assert [job.wait(250) for job in jobs] == [0, 0], jobs[0].text + jobs[1].text
        sent = printed(hosts[1], ["cat", f"/sys/class/net/{two_hosts.DEVICE}/statistics/tx_bytes"])
        routes = [printed(host, ["ip", "route"]) for host in hosts]
    assert left_behind(os.getpid()) == []
    # Each host sent its gradients once in each of 24 steps, and to the other host alone.
    gradients = 4 * sum(t.numel() for t in torch.load(folders[0] / "only" / "lenet.pt").values())
    assert 24 * gradients < int(sent) < 30 * gradients
    assert [route.split()[0] for route in routes] == list(reversed(two_hosts.ADDRESSES))
    assert "epoch" not in jobs[1].text
    one = run_here("4_ddp.py", *rung[1:], "--batch-size", 128)
    # The same sums in another order: within a few hundred images of 3,000 at this stage.
    accuracy = float(re.search(r"test ([\d.]+)%", jobs[0].text)[1])
    assert accuracy == pytest.approx(float(accuracy_printed(one)), abs=8)


@HERE
@pytest.mark.slow
def test_hosts_have_names_and_addresses_and_reach_only_each_other():
    look = "import socket; print(socket.gethostname(), socket.gethostbyname(socket.gethostname()))"
    out = "import socket; socket.create_connection(('192.0.2.1', 9), 2)"
    with two_hosts.two_hosts() as hosts:
        for host in hosts:
            assert printed(host, [sys.executable, "-c", look]) == f"{host.name} {host.address}\n"
        refused = hosts[0].start([sys.executable, "-c", out])
        assert refused.wait(30) == 1
        assert "Network is unreachable" in refused.text
        hosts[0].cut()
        assert "state DOWN" in printed(hosts[0], ["ip", "link", "show", two_hosts.DEVICE])
        hosts[0].join()
        assert hosts[1].address in printed(hosts[0], ["ip", "route"])


SEND = """
    import socket, sys, time
    count = int(sys.argv[1])
    if len(sys.argv) == 2:
        with socket.create_server(("", 5000)) as server:
            print("ready", flush=True)
            connection, _ = server.accept()
            while count > 0:
                count -= len(connection.recv(1 << 20))
            connection.sendall(b"!")
    else:
        with socket.create_connection((sys.argv[2], 5000)) as connection:
            start = time.perf_counter()
            connection.sendall(bytes(count))
            connection.recv(1)
            print(time.perf_counter() - start)
"""


@HERE
@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "count", "least", "most"),
    [
        ({"delay": 0.05}, 1, 0.1, 0.5),  # there and back
        ({"rate": "80mbit"}, 5_000_000, 0.45, 3),
        ({"rate": "80mbit", "delay": 0.05}, 5_000_000, 0.55, 4),
        ({}, 5_000_000, 0, 0.4),
    ],
    ids=["delay", "rate", "both", "neither"],
)
def test_a_link_is_as_slow_as_asked_for(options, count, least, most):
    send = [sys.executable, "-c", textwrap.dedent(SEND), count]
    with two_hosts.two_hosts(**options) as (first, second):
        second.start(send).until("ready", 30)
        assert least < float(printed(first, [*send, second.address])) < most


MAKER = """
    import os, signal, sys, time
    sys.path.insert(0, "tools")
    import two_hosts
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a script's `make test &` ignores it
    with two_hosts.two_hosts(delay=0.001) as (first, second):
        job = second.start(["sh", "-c", "echo started; sleep 50"])
        job.until("started", 30)
        print(second.pids()[-1], flush=True)
        time.sleep(50)  # what ends a test that waits in vain
"""


@HERE
@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL], ids=["Ctrl-C", "killed"])
def test_nothing_stays_behind_when_the_maker_is_stopped(number):
    command = [sys.executable, "-c", textwrap.dedent(MAKER)]
    streams = {"stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL}
    with subprocess.Popen(command, cwd=ROOT, text=True, **streams) as maker:
        inside = int(maker.stdout.readline())
        os.kill(inside, 0)  # it runs
        maker.send_signal(number)
        maker.wait(30)
    if number == signal.SIGKILL:
        assert len(left_behind(maker.pid)) == 2
        two_hosts.remove_left_overs()  # as the next one does first
    assert left_behind(maker.pid) == []
    end = time.time() + 10
    while Path(f"/proc/{inside}").exists() and time.time() < end:
        time.sleep(0.02)
    assert not Path(f"/proc/{inside}").exists()


@HERE
@pytest.mark.slow
def test_a_block_that_fails_leaves_nothing():
    def fail():
        with two_hosts.two_hosts() as (first, _):
            first.start(["sleep", "300"])
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    assert left_behind(os.getpid()) == []


@HERE
@pytest.mark.slow
def test_waiting_for_words_that_never_come_shows_what_came():
    with two_hosts.two_hosts() as (first, _):
        job = first.start(["echo", "something else"])
        with pytest.raises(TimeoutError, match=r"no line with 'these'(.|\n)*something else"):
            job.until("these", 5)


def test_the_formula_stands_beside_the_measured_times():
    found = {
        "all_reduce": [{"bytes": 1_000_000, "seconds": 0.1}],
        "steps": [{"parameters": 250_000, "alone": [0.01, 0.02, 0.03], "ddp": [0.1]}],
    }
    there = two_hosts_record.predicted(found, "100mbit", 0.005)
    assert there["bytes_per_second"] == 12.5e6
    assert there["all_reduce"][0]["predicted"] == pytest.approx(2 * 0.005 + 0.08)
    assert there["steps"][0]["predicted"] == pytest.approx(0.02 + 0.09)


def test_traces_and_warnings_without_meaning_are_left_out_of_what_a_host_said():
    lines = [
        "[W1122 01:55:07.3 socket.cpp:207] [c10d] The hostname of the client socket cannot be ...",
        "[rank0]: Traceback (most recent call last):",
        '[rank0]:   File "4_ddp.py", line 111, in <module>',
        "[rank0]:     loss.backward()",
        "[rank0]: RuntimeError: Connection reset by peer",
        "frame #3: <unknown function> + 0x15f6988",
        "=" * 60,
        "epoch 3: loss 0.4",
    ]
    job = mock.Mock(lines=[(10.0 + i, line) for i, line in enumerate(lines)])
    said = two_hosts_record.words_of(job, start=10.0)
    assert said == [[4.0, "[rank0]: RuntimeError: Connection reset by peer"], [7.0, lines[-1]]]


def test_the_record_has_all_parts_and_no_path_of_a_machine():
    text = RECORD.read_text(encoding="utf-8")
    recorded = json.loads(text)
    assert {"machine", "date", "torch", "train", "cut_off", "link", "faults"} <= set(recorded)
    assert not re.search(r"/(work|tmp|root|home|usr|var)\b", text)
    # A machine's own address, or one that is not of these two hosts or of a loopback.
    found = set(re.findall(r"\b\d+\.\d+\.\d+\.\d+\b", text))
    assert {one for one in found if not one.startswith("127.")} == set(two_hosts.ADDRESSES)
    assert recorded["train"]["same_state_dict_as_two_ranks_on_one_host"]
    assert recorded["cut_off"]["back"]["same_state_dict"]
    assert recorded["cut_off"]["rank_0_lost"]["same_state_dict"]


@HERE
@pytest.mark.long
@pytest.mark.parametrize(
    ("lose", "silent"), [(1, False), (0, True)], ids=["host2", "host1 with rank 0, silently"]
)
def test_a_run_that_loses_a_host_for_a_while_ends_exactly_as_the_whole_one(lose, silent, tmp_path):
    whole = two_hosts_record.whole_run(tmp_path)
    assert whole["statuses"] == [0, 0]
    cut = two_hosts_record.cut_run(tmp_path / "cut", lose=lose, silent=silent)
    assert [end["status"] for end in cut["ended"].values()] == [0, 0], cut
    numbers = [
        [(row["epoch"], row["loss"], row["accuracy"]) for row in run["epochs"]]
        for run in (whole, cut)
    ]
    assert numbers[0] == numbers[1]
    assert two_hosts_record.compared(tmp_path / "cut", tmp_path) == {"same_state_dict": True}
    assert left_behind(os.getpid()) == []


# Which host says what; a host that is not here says nothing of it.
FAULTS = {
    "nobody_answers": {"host2": r"timed out after 10000ms .*to connect to \(host1, 29500\)"},
    "name_is_loopback": dict.fromkeys(
        two_hosts.NAMES, r"timed out after 10000ms .*to connect to \(10.231.7.1, 29500\)"
    ),
    "other_model": {"host2": r"\[1\]: params\[4\] in this process with sizes \[128, 400\]"},
    "lost_for_good": {"host1": "RendezvousTimeoutError"},
}


@HERE
@pytest.mark.long
@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_between_hosts_is_told(name, tmp_path):
    found = two_hosts_record.faults(tmp_path)[name]()
    for host, words in FAULTS[name].items():
        said = "\n".join(line for _, line in found["ended"][host]["printed"])
        assert re.search(words, said), found
        assert found["ended"][host]["status"] not in (0, None)
    assert left_behind(os.getpid()) == []


@HERE
@pytest.mark.long
def test_one_host_goes_on_alone_where_that_is_allowed(tmp_path):
    found = two_hosts_record.faults(tmp_path)["lost_goes_on_alone"]()
    assert found["ended"]["host1"]["status"] == 0
    assert [row["epoch"] for row in found["epochs"]] == [1, 2, 3]
