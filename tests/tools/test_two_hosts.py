"""Two hosts on one machine: training across them, faults, and that nothing stays behind."""

import json
import os
import re
import shutil

import pytest
import torch
from running import ROOT
from test_rungs import accuracy_printed, few_images, run_here

from tools import two_hosts, two_hosts_record
from tools.two_hosts import torchrun

SCENARIOS = two_hosts_record.SCENARIOS
OTHER_RANKS = ("fsdp_back_with_two", "fsdp_alone")
HERE = pytest.mark.skipif(
    not two_hosts.possible(), reason="needs root, ip and the right to make network namespaces"
)


@pytest.fixture(autouse=True)
def nothing_stays():
    yield
    if shutil.which("ip"):
        ours = f"{two_hosts.PREFIX}{os.getpid()}-"
        assert [name for name in two_hosts.namespaces() if name.startswith(ours)] == []


@HERE
@pytest.mark.slow
def test_rung_4_trains_across_two_hosts_as_well_as_in_one_process(tmp_path):
    few, folders = few_images(tmp_path, 3000), [tmp_path / name for name in two_hosts.NAMES]
    rung = [ROOT / "rungs" / "4_ddp.py", "--data", few, "--epochs", 1, "--lr", 0.1]
    with two_hosts.two_hosts() as hosts:
        jobs = []
        for host, folder in zip(hosts, folders, strict=True):
            folder.mkdir()
            jobs.append(host.start([*torchrun(host), *rung, "--save", "lenet.pt"], cwd=folder))
        assert [job.wait(550) for job in jobs] == [0, 0], jobs[0].text + jobs[1].text
        (link,) = json.loads(hosts[1].ip("-s", "-j", "link", "show", two_hosts.DEVICE))
        sent = link["stats64"]["tx"]["bytes"]
        routes = [host.ip("route") for host in hosts]
    # Each host sent its gradients once in each of 24 steps, and to the other host alone.
    gradients = 4 * sum(t.numel() for t in torch.load(folders[0] / "lenet.pt").values())
    assert 24 * gradients < sent < 30 * gradients
    assert [route.split()[0] for route in routes] == list(reversed(two_hosts.ADDRESSES))
    assert "epoch" not in jobs[1].text
    assert list(folders[1].iterdir()) == []
    one = run_here("4_ddp.py", *rung[1:], "--batch-size", 128)
    # The same sums in another order: within a few hundred images of 3,000 at this stage.
    accuracy = float(re.search(r"test ([\d.]+)%", jobs[0].text)[1])
    assert accuracy == pytest.approx(float(accuracy_printed(one)), abs=8)


def test_the_record_has_every_fault_and_no_path_of_a_machine():
    """That runs went on as if nothing was lost is asserted by chapters 16 and 19."""
    text = (ROOT / "book/runs/two_hosts.json").read_text(encoding="utf-8")
    assert not re.search(r"/(work|tmp|root|home|usr|var)\b", text)
    # A machine's own address, or one that is not of these two hosts or of a loopback.
    found = set(re.findall(r"\b\d+\.\d+\.\d+\.\d+\b", text))
    assert {one for one in found if not one.startswith("127.")} == set(two_hosts.ADDRESSES)
    faults = SCENARIOS["faults"], json.loads(text)["faults"]
    played, recorded = ({fault["what"] for fault in each.values()} for each in faults)
    assert played == recorded


def numbers(run):
    return [row | {"seconds": 0} for row in run["rows"]]


@HERE
@pytest.mark.long
@pytest.mark.parametrize(
    ("name", "like"),
    [(name, how["like"]) for name, how in SCENARIOS["cut_off"].items() if "like" in how],
)
def test_a_run_that_loses_a_host_ends_as_the_whole_one(name, like, tmp_path):
    scenarios = SCENARIOS["cut_off"]
    runs = {one: two_hosts_record.play(tmp_path / one, **scenarios[one]) for one in (like, name)}
    if name in OTHER_RANKS:  # the same pictures, added up in another order
        for row, other in zip(runs[name]["rows"], runs[like]["rows"], strict=True):
            assert row["loss"] == pytest.approx(other["loss"], abs=0.005)
    else:
        assert runs[name]["same_state_dict"]
        assert numbers(runs[name]) == numbers(runs[like])


# Which host's torchrun ends how, and what is said there.
FAULTS = {
    "never_starts": ("host2", 1, r"timed out after 10000ms .*to connect to \(host1, 29500\)"),
    "version": ("host2", 1, r"\[1\]: params\[4\] in this process with sizes \[128, 400\]"),
    "lost": ("host1", 1, "RendezvousTimeoutError"),
    "lost_alone": ("host1", 0, "step 32:"),  # the host that is left goes on alone
}


@HERE
@pytest.mark.long
@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_between_hosts_is_told(name, tmp_path):
    ended = two_hosts_record.play(tmp_path / name, **SCENARIOS["faults"][name])["ended"]
    host, status, words = FAULTS[name]
    assert ended[host]["status"] == status, ended
    assert re.search(words, "\n".join(line for _, line in ended[host]["printed"])), ended
