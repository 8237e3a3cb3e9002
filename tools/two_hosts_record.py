"""What training across two hosts does: measured, cut off and broken, for ``runs/two_hosts.json``.

``python tools/two_hosts_record.py [train] [cut_off] [link] [faults]`` runs these experiments, or
all, some fifteen minutes, as root. Under torchrun, this file is the program that measures the link.
"""

from __future__ import annotations

import datetime
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from statistics import median

from two_hosts import ADDRESSES, DEVICE, NAMES, PORT, Host, Job, torchrun, two_hosts

ROOT = Path(__file__).resolve().parent.parent
RUNG, ELASTIC = ROOT / "rungs" / "4_ddp.py", ROOT / "rungs" / "4_ddp_elastic.py"
DATA = ROOT / "src" / "torchladder" / "bundled" / "fashion_mnist_small.npz"
# Without it a host that joins later waits in vain: github.com/pytorch/pytorch/issues/135712
OWN_STORE = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
RATES = {None: None, "1gbit": 125e6, "100mbit": 12.5e6}  # bytes per second
DELAYS = (0.0, 0.001, 0.005)
SIZES = [4**k for k in range(5, 12)]  # bytes: 1 kB to 4 MB
GIVE_UP = 240  # seconds after which a fault that is still silent is recorded so
NOISE = re.compile(
    r"(\[\w*rank\d+\]: )?(\s|$|Traceback|frame #|Exception raised|<omitting|The above exc|\s*\^)"
    r"|.*socket.cpp:\d+\] \[c10d\] The hostname of the client|\[Gloo\] Rank"
    r"|[-=*]{9}|Failures:$|Root Cause|\[\d+\]:$"
)


# --- the program that measures ------------------------------------------------------------------


def measure() -> None:
    """Times of all-reduces and of training steps; rank 0 prints them as JSON."""
    import torch
    import torch.distributed as dist

    from torchladder import models

    def block(step, steps: int) -> float:
        dist.barrier()
        start = time.perf_counter()
        for _ in range(steps):
            step()
        own = torch.tensor((time.perf_counter() - start) / steps, dtype=torch.float64)
        dist.all_reduce(own, dist.ReduceOp.MAX)
        return own.item()

    def training_step(net):
        optimizer = torch.optim.SGD(net.parameters(), lr=1e-3, momentum=0.9)
        images, labels = torch.randn(64, 1, 28, 28), torch.randint(10, (64,))

        def step() -> None:
            optimizer.zero_grad()
            torch.nn.functional.cross_entropy(net(images), labels).backward()
            optimizer.step()

        return step

    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    found = {"all_reduce": [], "steps": []}
    for size in SIZES:
        exchange = partial(dist.all_reduce, torch.zeros(size // 4))
        # Rank 0 decides how often, so that both ranks do it equally often.
        times = torch.tensor(max(2, min(20, int(0.3 / block(exchange, 2)))))
        dist.broadcast(times, 0)
        seconds = [block(exchange, 1) for _ in range(times.item())]
        found["all_reduce"].append({"bytes": size, "seconds": median(seconds)})
    for name, build in {"LeNet": models.LeNet, "MLP 512": partial(models.MLP, 784, 512)}.items():
        net = build()
        ddp = torch.nn.parallel.DistributedDataParallel(build())
        steps = {"alone": training_step(net), "ddp": training_step(ddp)}
        turns = [{way: block(step, 3) for way, step in steps.items()} for _ in range(6)]
        seconds = {way: [turn[way] for turn in turns[1:]] for way in steps}
        gradients = 4 * sum(p.numel() for p in net.parameters())
        found["steps"].append({"model": name, "gradient_bytes": gradients, **seconds})
    if dist.get_rank() == 0:
        print(json.dumps(found), flush=True)
    dist.destroy_process_group()


# --- running and reading ------------------------------------------------------------------------


def train(host: Host, folder: Path, *options: str, program: Path = RUNG, epochs: int = 2,
          env: dict | None = None, more: tuple = ()) -> Job:  # fmt: skip
    """Start a rung on a host, in a folder that only this host uses."""
    place = folder / host.name
    place.mkdir(parents=True, exist_ok=True)
    words = ["--data", DATA, "--lr", "0.1", "--save", "lenet.pt", "--epochs", epochs, *more]
    words += ["--checkpoint", "checkpoint.pt"] if program == ELASTIC else []
    return host.start([*torchrun(host, *options), program, *words], cwd=place, env=env)


def epochs_of(job: Job, start: float) -> list[dict]:
    """What rank 0 printed, as numbers."""
    pattern = r"epoch (\d+): loss ([\d.]+), test ([\d.]+)%"
    return [
        {"epoch": int(epoch), "loss": float(loss), "accuracy": float(accuracy),
         "seconds": round(when - start, 1)}
        for when, line in job.lines
        for epoch, loss, accuracy in re.findall(pattern, line)
    ]  # fmt: skip


def ended(job: Job, start: float, deadline: float = GIVE_UP) -> dict:
    """How a job ended: its status, after how many seconds, and its words without the traces."""
    try:
        status = job.wait(max(0.1, start + deadline - time.time()))
        seconds = round((job.ended or time.time()) - start, 1)
    except subprocess.TimeoutExpired:
        status, seconds = None, None  # it still runs
    lines = {}
    for when, line in list(job.lines):
        if not NOISE.match(line):
            lines.setdefault(line[:400], round(when - start, 1))
    printed = [[when, line] for line, when in lines.items()]
    if len(printed) > 12:
        printed = printed[:6] + printed[-6:]
    return {"status": status, "seconds": seconds, "printed": printed}


def same_tensors(one: Path, other: Path) -> bool:
    """Whether two runs have saved the same model."""
    import torch

    first, second = (torch.load(next(run.glob("*/lenet.pt"))) for run in (one, other))
    return list(first) == list(second) and all(torch.equal(first[k], second[k]) for k in first)


# --- the experiments ----------------------------------------------------------------------------


def record_training(folder: Path) -> dict:
    """Rung 4 across two hosts, with two ranks on one host, and alone."""
    result = {}
    with two_hosts() as hosts:
        result["two_hosts"] = train_all(hosts, folder / "two_hosts")
        result["two_hosts"] |= {
            "addresses": {host.name: host.address for host in hosts},
            "bytes_sent": {host.name: bytes_sent(host) for host in hosts},
        }
        for name, options, more in [
            ("two_ranks_one_host", ["--nproc-per-node=2"], ()),
            ("one_process", ["--nproc-per-node=1"], ("--batch-size", "128")),
        ]:
            options = ["--standalone", *options]
            result[name] = train_all(hosts[:1], folder / name, *options, more=more)
    same = same_tensors(folder / "two_hosts", folder / "two_ranks_one_host")
    return result | {"same_state_dict_as_two_ranks_on_one_host": same}


def train_all(hosts: Sequence[Host], folder: Path, *options: str, **more) -> dict:
    """Start a rung on all hosts, and wait for its end; what rank 0 printed."""
    start = time.time()
    jobs = [train(host, folder, *options, **more) for host in hosts]
    if any(ended(job, start)["status"] != 0 for job in jobs):
        raise RuntimeError("".join(job.text for job in jobs))
    return {"epochs": epochs_of(jobs[0], start)}


def bytes_sent(host: Host) -> int:
    (link,) = json.loads(host.ip("-s", "-j", "link", "show", DEVICE))
    return link["stats64"]["tx"]["bytes"]


ELASTIC_RUN = {"program": ELASTIC, "epochs": 4, "env": OWN_STORE}


def record_cut_off(folder: Path) -> dict:
    """The elastic program: whole, and with a host lost and back."""
    with two_hosts() as hosts:
        result = {"whole": train_all(hosts, folder / "whole", **ELASTIC_RUN)}
    # Then the host of rank 0: no word of it reaches the other, and its disk is empty after.
    for name, how in {"back": {"lose": 1}, "rank_0_lost": {"lose": 0, "silent": True}}.items():
        result[name] = cut_run(folder / name, **how)
        result[name]["same_state_dict"] = same_tensors(folder / name, folder / "whole")
    return result


def cut_run(folder: Path, *, lose: int, silent: bool = False) -> dict:
    """Cut a host off in the third epoch, and bring it back five seconds later.

    Its processes are killed and its link goes down; where `silent`, the link first, so that not
    even the end of its connections reaches the other host. The rendezvous is on the host that
    stays: who loses that one loses all.
    """
    with two_hosts() as hosts:
        gone, stays = hosts[lose], hosts[1 - lose]
        meet = "--max-restarts=3", f"--rdzv-endpoint={stays.name}:{PORT}"
        jobs = [train(host, folder, *meet, **ELASTIC_RUN) for host in hosts]
        first = jobs[0]  # rank 0 is on the host whose name sorts first
        first.until("epoch 2:", 300)
        time.sleep(0.3)
        cut = time.time()
        if not silent:
            gone.kill()
            time.sleep(0.5)
        gone.cut()
        gone.kill()
        time.sleep(5)
        if lose == 0:
            for path in (folder / gone.name).iterdir():
                path.unlink()
        gone.join()
        back = time.time()
        again, stayed = train(gone, folder, *meet, **ELASTIC_RUN), jobs[1 - lose]
        ends = {stays.name: ended(stayed, cut), gone.name: ended(again, cut)}
    epochs = epochs_of(first, cut) + (epochs_of(again, cut) if first is not stayed else [])
    events = timeline(stayed, gone.name, stays.name, cut, back, epochs)
    return {"timeline": events, "epochs": epochs, "ended": ends}


def timeline(stayed: Job, gone: str, stays: str, cut: float, back: float, epochs: list) -> list:
    """Seconds from the cut, and what happened then."""
    events = [(0.0, f"{gone} is cut off"), (back - cut, f"{gone} is back and starts torchrun")]
    for what, pattern in {
        f"a rank on {stays} fails": r"RuntimeError",
        f"torchrun on {stays} sees that it failed": r"failed \(exitcode",
        f"torchrun on {stays} stops its rank, to meet again": r"closing signal",
        f"the ranks meet again, on {stays}": r"training on",
    }.items():
        after = [when - cut for when, line in stayed.lines if re.search(pattern, line)]
        events += [(seconds, what) for seconds in after if seconds > 0][:1]
    done = [(row["seconds"], row["epoch"]) for row in epochs if row["seconds"] > 0]
    events += [(when, f"epoch {n} is done, the first after it") for when, n in done[:1]]
    events.append((stayed.ended - cut, f"torchrun on {stays} ends"))
    return [{"seconds": round(when, 1), "what": what} for when, what in sorted(events)]


def record_link(folder: Path) -> dict:
    """Times of all-reduces and steps on links of several rates and delays."""
    settings = []
    for rate, bandwidth in RATES.items():
        for delay in DELAYS if rate else DELAYS[:1]:  # at full rate, carrying costs more than that
            with two_hosts(rate=rate, delay=delay) as hosts:
                jobs = [host.start([*torchrun(host), __file__]) for host in hosts]
                if sum(job.wait(300) for job in jobs):
                    raise RuntimeError("".join(job.text for job in jobs))
            found = next(json.loads(line) for _, line in jobs[0].lines if line.startswith("{"))
            link = {"rate": rate, "bytes_per_second": bandwidth, "delay": delay}
            settings.append(link | found)
    return {"settings": settings}


SHORT, JOIN = "--rdzv-conf=read_timeout=10", "--rdzv-conf=join_timeout=15"
AT = "--rdzv-endpoint=10.231.7.1:29500"
HERE, THERE = [f"{SHORT},is_host=1", AT], [f"{SHORT},is_host=0", AT]
OWN = [f"--local-addr={address}" for address in ADDRESSES]
NAMED, LO, ETH1 = ({"GLOO_SOCKET_IFNAME": name} for name in (DEVICE, "lo", "eth1"))
STATIC = ["--rdzv-backend=static"]
DEBIAN = {"own_address": "127.0.1.1"}  # then an endpoint that is an address is no host's own
# The options of both hosts (None: it is not started), and what else is other than usual.
FAULTS = {
    "the first host never starts": (None, [SHORT], {}),
    "each host's own name stands for 127.0.1.1, and the endpoint is an address: no host takes "
    "it for its own": ([SHORT, AT], [SHORT, AT], DEBIAN),
    "the same with is_host=1 and 0: the hosts meet, their ranks do not": (HERE, THERE, DEBIAN),
    "the same with is_host, --local-addr and GLOO_SOCKET_IFNAME: it trains": (
        [*HERE, OWN[0]], [*THERE, OWN[1]], DEBIAN | {"env": [NAMED, NAMED]}
    ),
    "another program listens on the rendezvous' port of host1": ([SHORT], [SHORT], {"busy": True}),
    "the same with the static rendezvous": (STATIC, STATIC, {"busy": True}),
    "GLOO_SOCKET_IFNAME names an interface that host2 does not have": (
        [], [], {"env": [NAMED, ETH1]}
    ),
    "GLOO_SOCKET_IFNAME=lo on both hosts": ([], [], {"env": [LO, LO]}),
    "--nnodes=2 on host1 and 3 on host2": ([JOIN], [JOIN, "--nnodes=3"], {}),
    "--nproc-per-node=2 on host1 and 1 on host2: it trains": (["--nproc-per-node=2"], [], {}),
    "host2 has another version of the program": ([], [], {"other": True}),
}  # fmt: skip
# To go on alone takes 45 seconds: host2 counts as dead after 15, and the rendezvous then waits
# for 30 more whether another host comes.
LOST = {"2": ["--nnodes=2", "--rdzv-conf=join_timeout=20"], "1:2": ["--nnodes=1:2"]}


def record_faults(folder: Path) -> list[dict]:
    """Each fault's messages, and after how many seconds they came."""
    found = [fault(folder / f"fault{i}", what) for i, what in enumerate(FAULTS)]
    return found + [lost_for_good(folder / f"lost{i}", nodes) for i, nodes in enumerate(LOST)]


def fault(folder: Path, what: str) -> dict:
    *options, made = FAULTS[what]
    folder.mkdir()
    programs, env = [RUNG, RUNG], made.get("env", [{}, {}])
    if made.get("other"):
        programs[1] = folder / "other_model.py"
        text = RUNG.read_text().replace("(400, 120)", "(400, 128)").replace("(120,", "(128,")
        programs[1].write_text(text)
    busy = (
        "import socket, time; s = socket.create_server(('', 29500)); "
        "print('up', flush=True); time.sleep(999)"
    )
    with two_hosts(own_address=made.get("own_address")) as hosts:
        if made.get("busy"):
            hosts[0].start([sys.executable, "-c", busy]).until("up", 60)
        start = time.time()
        jobs = {
            host.name: train(host, folder, *options[i], program=programs[i], epochs=1, env=env[i])
            for i, host in enumerate(hosts)
            if options[i] is not None
        }
        ends = {name: ended(job, start) for name, job in jobs.items()}
    return {"what": what, "ended": ends}


def lost_for_good(folder: Path, nodes: str) -> dict:
    with two_hosts() as hosts:
        options = [*LOST[nodes], "--max-restarts=3"]
        jobs = [train(host, folder, *options, **ELASTIC_RUN) for host in hosts]
        jobs[0].until("epoch 1:", 300)
        time.sleep(0.3)
        lost = time.time()
        hosts[1].kill()
        end = ended(jobs[0], lost)
    what = f"host2 is lost and never comes back, --nnodes={nodes}"
    return {"what": what, "ended": {NAMES[0]: end}}


def main(parts: list[str], target: Path = ROOT / "runs" / "two_hosts.json") -> None:
    """Run the experiments and write what they gave; parts that are not named stay as they are."""
    from machine_facts import machine_facts
    from record import cleaner
    from refresh import write_text

    # What the program under torchrun imports.
    os.environ["PYTHONPATH"] = f"{ROOT / 'src'}:{os.environ.get('PYTHONPATH', '')}".rstrip(":")
    experiments = {"train": record_training, "cut_off": record_cut_off}
    experiments |= {"link": record_link, "faults": record_faults}
    facts, today = machine_facts(), datetime.date.today().isoformat()
    head = {"machine": facts, "date": today, "torch": facts["torch"]}
    result = (json.loads(target.read_text("utf-8")) if target.exists() else {}) | head
    for part in parts or experiments:
        with tempfile.TemporaryDirectory() as folder:
            found = json.dumps(experiments[part](Path(folder)), ensure_ascii=False)
            result[part] = json.loads(cleaner()(found.replace(f"{folder}/", "")))
        write_text(json.dumps(result, indent=1, ensure_ascii=False) + "\n", target)
        print(f"{part}: written to {target.name}", flush=True)


if __name__ == "__main__":
    measure() if "RANK" in os.environ else main(sys.argv[1:])
