"""What training across two hosts does: measured, cut off and broken, for ``runs/two_hosts.json``.

``python tools/two_hosts.py record`` runs everything here, some twenty minutes; under torchrun,
this file is the program that measures the link.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from statistics import median

from two_hosts import ADDRESSES, DEVICE, NAMES, PORT, Host, Job, torchrun, two_hosts

from torchclinic.will_it_fit import all_reduce_seconds, step_seconds

ROOT = Path(__file__).resolve().parent.parent
RUNG, ELASTIC = ROOT / "rungs" / "4_ddp.py", ROOT / "rungs" / "4_ddp_elastic.py"
DATA = ROOT / "src" / "torchladder" / "bundled" / "fashion_mnist_small.npz"
# Without it a host that joins later waits in vain: github.com/pytorch/pytorch/issues/135712
OWN_STORE = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
RATES = (None, "1gbit", "100mbit")
DELAYS = (0.0, 0.001, 0.005)
SIZES = [4**k for k in range(5, 12)]  # bytes: 1 kB to 4 MB
EPOCHS = 4
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
    import torch.nn.functional as F
    from torch import nn
    from torch.nn.parallel import DistributedDataParallel

    from torchladder import models

    def block(step: Callable[[], object], steps: int) -> float:
        dist.barrier()
        start = time.perf_counter()
        for _ in range(steps):
            step()
        own = torch.tensor((time.perf_counter() - start) / steps, dtype=torch.float64)
        dist.all_reduce(own, dist.ReduceOp.MAX)
        return own.item()

    def training_step(build: Callable[[], nn.Module], batch: int, wrap) -> Callable[[], None]:
        net = wrap(build())
        optimizer = torch.optim.SGD(net.parameters(), lr=1e-3, momentum=0.9)
        images, labels = torch.randn(batch, 1, 28, 28), torch.randint(10, (batch,))

        def step() -> None:
            optimizer.zero_grad()
            F.cross_entropy(net(images), labels).backward()
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
        seconds = sorted(block(exchange, 1) for _ in range(times.item()))
        found["all_reduce"].append(
            {"bytes": size, "seconds": median(seconds), "least": seconds[0], "most": seconds[-1]}
        )
    builds = {"LeNet": models.LeNet, "MLP 512": partial(models.MLP, 784, 512)}
    for name, build in builds.items():
        ways = {"alone": lambda net: net, "ddp": DistributedDataParallel}
        made = {way: training_step(build, 64, wrap) for way, wrap in ways.items()}
        seconds = {way: [] for way in ways}
        for turn in range(6):
            for way, step in made.items():
                seconds[way].append(block(step, 3))
                if turn == 0:
                    seconds[way].clear()
        parameters = models.count_parameters(build())
        found["steps"].append({"model": name, "batch": 64, "parameters": parameters, **seconds})
    if dist.get_rank() == 0:
        print(json.dumps(found), flush=True)
    dist.destroy_process_group()


# --- running and reading ------------------------------------------------------------------------


def train(host: Host, folder: Path, *options: str, program: Path = RUNG, **more) -> Job:
    """Start a rung on a host, in a folder that only this host uses."""
    place = folder / host.name
    place.mkdir(exist_ok=True)
    words = ["--data", DATA, "--lr", "0.1", "--save", "lenet.pt"]
    words += ["--checkpoint", "checkpoint.pt"] if program == ELASTIC else []
    return host.start([*torchrun(host, *options), program, *words, *more.pop("rest", ())],
                      cwd=place, **more)  # fmt: skip


def epochs_of(job: Job) -> list[dict]:
    """What rank 0 printed, as numbers."""
    pattern = r"epoch (\d+): loss ([\d.]+), test ([\d.]+)%, ([\d,]+) images/s"
    return [
        {"epoch": int(epoch), "loss": float(loss), "accuracy": float(accuracy),
         "images_per_second": int(rate.replace(",", "")), "seconds": when}
        for when, line in job.lines
        for epoch, loss, accuracy, rate in re.findall(pattern, line)
    ]  # fmt: skip


def relative(rows: list[dict], start: float) -> list[dict]:
    return [row | {"seconds": round(row["seconds"] - start, 1)} for row in rows]


def shown(command: list, env: dict | None = None) -> str:
    """A command as a reader would type it."""
    words = [str(word).removeprefix(f"{ROOT}/") for word in command]
    text = shlex.join(words).replace(f"{sys.executable} -m torch.distributed.run", "torchrun")
    return " ".join([*(f"{k}={v}" for k, v in (env or {}).items()), text])


def words_of(job: Job, start: float, most: int = 12, length: int = 400) -> list[list]:
    """What it printed, without the traces: seconds, and the line."""
    lines, seen = [], set()
    for when, line in list(job.lines):
        text = line if len(line) <= length else line[:length] + " ..."
        if not NOISE.match(line) and text not in seen:
            seen.add(text)
            lines.append([round(when - start, 1), text])
    return lines if len(lines) <= most else [*lines[: most // 2], *lines[-most // 2 :]]


def ended(job: Job, start: float, deadline: float) -> dict:
    """How a job ended: its status, after how many seconds, and its words."""
    try:
        status = job.wait(max(0.1, start + deadline - time.time()))
        seconds = round((job.ended or time.time()) - start, 1)
    except subprocess.TimeoutExpired:
        status, seconds = None, None  # it still runs
    return {"status": status, "seconds": seconds, "printed": words_of(job, start)}


def same_tensors(one: Path, other: Path) -> bool:
    import torch

    first, second = torch.load(one), torch.load(other)
    return list(first) == list(second) and all(torch.equal(first[k], second[k]) for k in first)


# --- the experiments ----------------------------------------------------------------------------


def record_training(folder: Path) -> dict:
    """Rung 4 across two hosts, with two ranks on one host, and alone."""
    rest = ["--epochs", "2"]
    result = {}
    with two_hosts() as hosts:
        start = time.time()
        jobs = [train(host, folder, rest=rest) for host in hosts]
        statuses = [job.wait(300) for job in jobs]
        seconds = round(time.time() - start, 1)
        routes = [host.start(["ip", "route"]) for host in hosts]
        sent = [host.start(["cat", f"/sys/class/net/{DEVICE}/statistics/tx_bytes"])
                for host in hosts]  # fmt: skip
        for job in (*routes, *sent):
            job.wait(10)
        result["two_hosts"] = {
            "commands": {h.name: shown(j.command) for h, j in zip(hosts, jobs, strict=True)},
            "statuses": statuses, "seconds": seconds,
            "epochs": relative(epochs_of(jobs[0]), start),
            "printed": {h.name: words_of(j, start) for h, j in zip(hosts, jobs, strict=True)},
            "addresses": {host.name: host.address for host in hosts},
            "routes": {h.name: j.text.splitlines() for h, j in zip(hosts, routes, strict=True)},
            "bytes_sent": {h.name: int(j.text) for h, j in zip(hosts, sent, strict=True)},
            "saved_on": [name for name in NAMES if (folder / name / "lenet.pt").exists()],
        }  # fmt: skip
        two_ranks = folder / "two_ranks"
        for name, nproc in {"two_ranks_one_host": 2, "one_process": 1}.items():
            start, options = time.time(), ["--standalone", f"--nproc-per-node={nproc}"]
            batch = ["--batch-size", "128"] if name == "one_process" else []
            words = ["--data", DATA, "--lr", "0.1", "--save", f"{two_ranks}.{name}", *rest, *batch]
            job = hosts[0].start([*torchrun(hosts[0], *options), RUNG, *words])
            status = job.wait(300)
            command = shown(job.command).replace(f"{two_ranks}.{name}", "lenet.pt")
            result[name] = {
                "command": command, "status": status, "seconds": round(time.time() - start, 1),
                "epochs": relative(epochs_of(job), start),
            }  # fmt: skip
    result["same_state_dict_as_two_ranks_on_one_host"] = same_tensors(
        folder / NAMES[0] / "lenet.pt", Path(f"{two_ranks}.two_ranks_one_host")
    )
    return result


def record_cut_off(folder: Path) -> dict:
    """The elastic program: whole, and with the second host lost and back."""
    whole, cut, new = (folder / name for name in ("whole", "cut", "new"))
    for place in (whole, cut, new):
        place.mkdir()
    result = {"whole": whole_run(whole), "back": cut_run(cut, lose=1)}
    result["back"] |= compared(cut, whole)
    # The host of rank 0 is lost, no word of it reaches the other, and its disk is empty after.
    result["rank_0_lost"] = cut_run(new, lose=0, silent=True) | compared(new, whole)
    result["without_own_store"] = cut_run(folder / "without", lose=1, env={})
    result["link_only"] = link_only(folder)
    return result


def whole_run(folder: Path) -> dict:
    with two_hosts() as hosts:
        start = time.time()
        jobs = [start_elastic(host, folder, OWN_STORE) for host in hosts]
        statuses = [job.wait(300) for job in jobs]
    return {
        "commands": {h.name: shown(j.command, OWN_STORE) for h, j in zip(hosts, jobs, strict=True)},
        "statuses": statuses, "epochs": relative(epochs_of(jobs[0]), start),
    }  # fmt: skip


def start_elastic(host: Host, folder: Path, env: dict, *, meet: str = NAMES[0]) -> Job:
    options = ["--max-restarts=3", f"--rdzv-endpoint={meet}:{PORT}"]
    rest = ["--epochs", str(EPOCHS)]
    return train(host, folder, *options, program=ELASTIC, env=env, rest=rest)


def cut_run(folder: Path, *, lose: int, silent: bool = False, env: dict = OWN_STORE) -> dict:
    """Cut a host off in the third epoch, and bring it back five seconds later.

    Its processes are killed and its link goes down; where `silent`, the link first, so that not
    even the end of its connections reaches the other host. The rendezvous is on the host that
    stays: who loses that one loses all.
    """
    folder.mkdir(exist_ok=True)
    with two_hosts() as hosts:
        gone, stays = hosts[lose], hosts[1 - lose]
        jobs = {host.name: start_elastic(host, folder, env, meet=stays.name) for host in hosts}
        jobs[NAMES[0]].until("epoch 2:", 300)  # rank 0 is on the host whose name sorts first
        time.sleep(0.3)
        cut = time.time()
        if not silent:
            gone.kill()
            time.sleep(0.5)
        gone.cut()
        gone.kill()
        before = [jobs[gone.name].lines, epochs_of(jobs[NAMES[0]])]
        time.sleep(5)
        if lose == 0:
            for path in (folder / gone.name).iterdir():
                path.unlink()
        gone.join()
        back = time.time()
        again = start_elastic(gone, folder, env, meet=stays.name)
        ends = {stays.name: ended(jobs[stays.name], cut, 200), gone.name: ended(again, cut, 205)}
        after = epochs_of(jobs[stays.name] if lose else again)
        epochs = [row for row in before[1] if row["seconds"] < cut]
        epochs += [row for row in after if row["seconds"] > cut]
    return {
        "commands": {stays.name: shown(jobs[stays.name].command, env),
                     gone.name: shown(again.command, env)},
        "lost": gone.name, "stays": stays.name, "silent": silent, "epochs_before": 2,
        "timeline": timeline(jobs[stays.name], again, gone, stays, cut, back, epochs),
        "epochs": relative(epochs, cut),
        "ended": ends,
    }  # fmt: skip


def timeline(stayed: Job, again: Job, gone: Host, stays: Host, cut: float, back: float,
             epochs: list[dict]) -> list[dict]:  # fmt: skip
    """Seconds from the cut, and what happened then."""
    lines = [(w, line) for w, line in stayed.lines if w > cut]
    first = next((row for row in epochs if row["seconds"] > cut), None)
    events = [(cut, f"{gone.name} is cut off")]
    for what, pattern in {
        f"a rank on {stays.name} fails": r"RuntimeError",
        f"torchrun on {stays.name} sees that it failed": r"failed \(exitcode",
        f"torchrun on {stays.name} stops its rank, to meet again": r"closing signal",
        f"the ranks meet again, on {stays.name}": r"training on",
    }.items():
        events += [(when, what) for when, line in lines if re.search(pattern, line)][:1]
    events.append((back, f"{gone.name} is back and starts torchrun"))
    if first:
        events.append((first["seconds"], f"epoch {first['epoch']} is done, the first after it"))
    if stayed.ended:
        events.append((stayed.ended, f"torchrun on {stays.name} ends"))
    return [{"seconds": round(when - cut, 1), "what": what} for when, what in sorted(events)]


def compared(folder: Path, whole: Path) -> dict:
    ours, theirs = (next(place.glob("*/lenet.pt"), None) for place in (folder, whole))
    return {"same_state_dict": bool(ours and theirs and same_tensors(ours, theirs))}


def link_only(folder: Path) -> dict:
    """The link goes down and no process dies: who notices, and when?"""
    program = folder / "exchange.py"
    program.write_text(
        "import datetime, time, torch, torch.distributed as dist\n"
        'dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=20))\n'
        "for turn in range(10**6):\n"
        "    dist.all_reduce(torch.ones(1000))\n"
        "    time.sleep(0.05)\n"
        "    if turn == 40:\n"
        '        print("exchanging", flush=True)\n'
    )
    with two_hosts() as hosts:
        jobs = {host.name: host.start([*torchrun(host), program]) for host in hosts}
        for job in jobs.values():
            job.until("exchanging", 120)
        hosts[1].cut()
        cut = time.time()
        ends = {name: ended(job, cut, 120) for name, job in jobs.items()}
    return {"program": program.read_text(), "timeout": 20, "default_timeout": 1800, "ended": ends}


def record_link(folder: Path) -> dict:
    """Times of all-reduces and steps on links of several rates and delays, beside the formula's."""
    settings = []
    for rate in RATES:
        for delay in DELAYS if rate else DELAYS[:1]:  # at full rate, carrying costs more than that
            with two_hosts(rate=rate, delay=delay) as hosts:
                jobs = [host.start([*torchrun(host), __file__]) for host in hosts]
                statuses = [job.wait(300) for job in jobs]
            if any(statuses):
                raise RuntimeError("".join(job.text for job in jobs))
            found = next(json.loads(line) for _, line in jobs[0].lines if line.startswith("{"))
            settings.append(predicted(found, rate, delay))
            print(f"link {rate}, {delay} s: measured", flush=True)
    return {
        "command": shown(jobs[0].command),
        "rate_by": "tc tbf, on each host's interface",
        "delay_by": "two TUN devices and a thread that holds each packet for so long",
        "settings": settings,
    }


def predicted(found: dict, rate: str | None, delay: float) -> dict:
    """Put what the formulas say from the nominal rate and delay beside what was measured.

    ``predicted`` counts one delay for a message, as a ring does. ``predicted_round_trip`` counts
    two: gloo sends a message when the receiver has told it that it is ready
    (github.com/pytorch/gloo, gloo/transport/tcp/pair.cc), and in an all-reduce both sides become
    ready at the same time.
    """
    bandwidth = rate and int(rate[:-4]) * {"gbit": 1e9, "mbit": 1e6}[rate[-4:]] / 8
    for name, latency in {"predicted": delay, "predicted_round_trip": 2 * delay}.items():
        for row in found["all_reduce"]:
            row[name] = bandwidth and all_reduce_seconds(row["bytes"], 2, latency, bandwidth)
        for row in found["steps"]:
            row["gradient_bytes"] = 4 * row["parameters"]
            exchange = bandwidth and all_reduce_seconds(
                row["gradient_bytes"], 2, latency, bandwidth
            )
            row[name] = bandwidth and step_seconds(median(row["alone"]), exchange)
    return {"rate": rate, "bytes_per_second": bandwidth, "delay": delay, **found}


def record_faults(folder: Path) -> list[dict]:
    """Each fault's messages, and after how many seconds they came."""
    found = []
    for name, run in faults(folder).items():
        found.append({"name": name, **run()})
        print(f"fault {name}: seen", flush=True)
    return found


def faults(folder: Path) -> dict[str, Callable[[], dict]]:
    """What goes wrong between hosts, by name; a value makes it so and tells what was said."""
    other = folder / "other_model.py"
    other.write_text(RUNG.read_text().replace("(400, 120)", "(400, 128)").replace("(120,", "(128,"))
    busy = (
        "import socket, time; s = socket.create_server(('', 29500)); "
        "print('up', flush=True); time.sleep(999)"
    )
    short, join = "--rdzv-conf=read_timeout=10", "--rdzv-conf=join_timeout=15"
    static = ["--rdzv-backend=static"]
    # As Debian writes it. An end point that is an address is then no host's own.
    debian = {"own_address": "127.0.1.1"}
    at = "--rdzv-endpoint=10.231.7.1:29500"
    yes, no = [f"{short},is_host=1", at], [f"{short},is_host=0", at]
    own = [f"--local-addr={address}" for address in ADDRESSES]
    trial = partial(fault, folder)
    named = {"GLOO_SOCKET_IFNAME": DEVICE}
    return {
        "nobody_answers": partial(
            trial, "the first host never starts", first=None, second=[short]
        ),
        "name_is_loopback": partial(
            trial, "each host's own name stands for 127.0.1.1, and the end point is an address: "
            "no host takes it for its own", [short, at], [short, at], debian
        ),
        "name_is_loopback_is_host": partial(
            trial, "the same with is_host=1 and 0: the hosts meet, their ranks do not",
            yes, no, debian
        ),
        "name_is_loopback_mended": partial(
            trial, "the same with is_host, --local-addr and GLOO_SOCKET_IFNAME: it trains",
            [*yes, own[0]], [*no, own[1]], debian, env=[named, named]
        ),
        "port_in_use": partial(
            trial, "another program listens on the rendezvous' port of host1",
            [short], [short], busy=busy
        ),
        "port_in_use_static": partial(
            trial, "the same with the static rendezvous", static, static, busy=busy
        ),
        "wrong_interface": partial(
            trial, "GLOO_SOCKET_IFNAME names an interface that host2 does not have",
            env=[named, {"GLOO_SOCKET_IFNAME": "eth1"}]
        ),
        "loopback_interface": partial(
            trial, "GLOO_SOCKET_IFNAME=lo on both hosts", env=[{"GLOO_SOCKET_IFNAME": "lo"}] * 2
        ),
        "other_nnodes": partial(
            trial, "--nnodes=2 on host1 and 3 on host2", [join], [join, "--nnodes=3"]
        ),
        "other_nproc": partial(
            trial, "--nproc-per-node=2 on host1 and 1 on host2: it trains",
            ["--nproc-per-node=2"], []
        ),
        "other_model": partial(
            trial, "host2 has another version of the program", programs=(RUNG, other)
        ),
        "lost_for_good": partial(lost_for_good, folder, "2"),
        "lost_goes_on_alone": partial(lost_for_good, folder, "1:2"),
    }  # fmt: skip


def fault(folder: Path, what: str, first: list[str] | None = (),
          second: list[str] = (), made: dict | None = None, *, env: list[dict] = ({}, {}),
          busy: str = "", programs: tuple = (RUNG, RUNG)) -> dict:  # fmt: skip
    with two_hosts(**(made or {})) as hosts:
        if busy:
            hosts[0].start([sys.executable, "-c", busy]).until("up", 60)
        start, jobs = time.time(), {}
        for i, options in enumerate((first, second)):
            if options is not None:
                rest = ["--epochs", "1"]
                jobs[NAMES[i]] = train(hosts[i], folder, *options, program=programs[i],
                                       env=env[i], rest=rest)  # fmt: skip
        ends = {name: ended(job, start, GIVE_UP) for name, job in jobs.items()}
    commands = {NAMES[i]: shown(jobs[NAMES[i]].command, env[i]) for i in (0, 1) if NAMES[i] in jobs}
    return {"what": what, "commands": commands, "ended": ends}


def lost_for_good(folder: Path, nnodes: str) -> dict:
    place = folder / f"lost_{nnodes.replace(':', '_')}"
    place.mkdir()
    with two_hosts() as hosts:
        options = ["--max-restarts=3", f"--nnodes={nnodes}"]
        # To go on alone takes 45 seconds: host2 counts as dead after 15, and the rendezvous
        # then waits for 30 more whether another host comes.
        options += ["--rdzv-conf=join_timeout=20"] if nnodes == "2" else []
        jobs = [train(host, place, *options, program=ELASTIC, env=OWN_STORE,
                      rest=["--epochs", "3"]) for host in hosts]  # fmt: skip
        jobs[0].until("epoch 1:", 300)
        time.sleep(0.3)
        lost = time.time()
        hosts[1].kill()
        end = ended(jobs[0], lost, GIVE_UP)
    return {
        "what": f"host2 is lost and never comes back, --nnodes={nnodes}",
        "commands": {NAMES[0]: shown(jobs[0].command, OWN_STORE)},
        "ended": {NAMES[0]: end},
        "epochs": relative(epochs_of(jobs[0]), lost),
    }


def record(target: Path, parts: list[str]) -> None:
    """Run the experiments and write what they gave; parts that are not named stay as they are."""
    from machine_facts import machine_facts
    from record import cleaner
    from refresh import write_json

    facts = machine_facts()
    experiments = {
        "train": record_training,
        "cut_off": record_cut_off,
        "link": record_link,
        "faults": record_faults,
    }
    result = json.loads(target.read_text()) if target.exists() else {}
    head = {"machine": facts, "date": facts["date"], "torch": facts["torch"]}
    result = head | {"command": "python tools/two_hosts.py record"} | result | head
    clean = cleaner()
    for part in parts or experiments:
        with tempfile.TemporaryDirectory() as folder:
            found = experiments[part](Path(folder))
            text = clean(json.dumps(found).replace(f"{folder}/", ""))
            result[part] = json.loads(text)
        write_json(result, target)
        print(f"{part}: written to {target.name}", flush=True)


if __name__ == "__main__" and "RANK" in os.environ:
    measure()
