"""Are these hosts fit for a long run? ``torchladder doctor --distributed``, under torchrun.

Each rank writes what it is into torchrun's store, the one place that all reach before there is a
process group. Rank 0 gives orders there (join, measure), and each rank writes what came of them.
A rank that is silent or fails is so known by name. A collective cannot tell: all its ranks wait.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import platform
import re
import socket
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from datetime import timedelta
from itertools import combinations, count
from pathlib import Path
from statistics import median
from threading import Thread

import torch
import torch.distributed as dist

from torchladder import __version__
from torchladder.launching import GROUP, PEER_IS_GONE, join_group
from torchladder.measuring import measure, measure_across_ranks
from torchladder.tables import Table, in_bytes
from torchladder.writing import atomic_file

SIZES = [1000 * 4**i for i in range(1, 9)]  # bytes of an all-reduce: 4 kB to 66 MB
BUDGET = 5.0  # seconds for all sizes; those that would take longer are left out
GRACE = 3.0  # seconds for answers that are on their way
# What to do if hosts differ in it. In the first all must agree; the second may go well.
MUST_AGREE = {
    "WORLD_SIZE": "start all hosts with the same --nnodes and --nproc-per-node",
    "torchladder": "install the same on every host",
    "torch": "install the same on every host",
    "CUDA": "install the same build of torch on every host",
    "NCCL": "install the same build of torch on every host",
    "program": "copy the same program to every host",
}
SHOULD_AGREE = {"Python": "", "driver": "", "GPU": "; the slowest sets the pace"}


def run(timeout: float, program: str | None = None, json_file: str | None = None) -> int:
    """Check the ranks of this torchrun; rank 0 prints what it finds. The exit status, 0 or 1.

    Parameters
    ----------
    timeout : float
        Seconds that a rank may take to register, and to join the others.
    program : str, optional
        A file or folder, such as the training program: its contents must be alike on all hosts.
    json_file : str, optional
        Rank 0 writes there what it found.

    Raises
    ------
    ValueError
        If this is not a rank that torchrun (or another launcher) has started.
    """
    if missing := [name for name in GROUP if name not in os.environ]:
        raise ValueError(
            f"{', '.join(missing)} not set. Start it as you start your training, with torchrun: "
            "torchrun --nproc-per-node=2 -m torchladder doctor --distributed"
        )
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    # Before PyTorch 2.12, gloo announces its connections on the stdout of every rank.
    sys.stdout = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    try:
        store = connect(timeout)
        store.set(f"facts/{rank}", json.dumps(facts_of_rank(program)))
        if rank == 0:
            problems = _lead(store, world, timeout, json_file)
        else:
            problems = _follow(store, rank, timeout)
    except dist.DistError as error:
        problems = [
            f"rank {rank} on {socket.gethostname()} has no connection to the store at "
            f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}: {_short(error)}. Check "
            "that rank 0 still runs, the address, the port and the firewall."
        ]
        print("PROBLEM ", problems[0], file=sys.stderr)
    if problems:
        _tell_torchrun("PROBLEM  " + "\n".join(problems))
    return 1 if problems else 0


def connect(timeout: float) -> dist.Store:
    """The store at ``MASTER_ADDR``: torchrun's, or else one that rank 0 opens there."""
    environment, limit = os.environ, timedelta(seconds=timeout)
    torchruns = environment.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    opens = environment["RANK"] == "0" and not torchruns
    # Unlike `init_process_group`, it does not wait for the others: who is missing is the question.
    store = dist.TCPStore(
        environment["MASTER_ADDR"], int(environment["MASTER_PORT"]), is_master=opens,
        timeout=limit, wait_for_workers=False, multi_tenant=True,
    )  # fmt: skip
    attempt = environment.get("TORCHELASTIC_RESTART_COUNT", "0")
    return dist.PrefixStore(f"torchladder/doctor/{attempt}", store)


# --- what a rank is -----------------------------------------------------------------------------


def facts_of_rank(program: str | None = None) -> dict:
    """What is to be known of this rank, as JSON can hold it; nothing is joined for it."""
    names = ("RANK", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "WORLD_SIZE")
    rank, local_rank, local_size, world = (int(os.environ[name]) for name in names)
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    gpu = torch.cuda.get_device_properties(local_rank % gpus) if gpus else None
    driver = Path("/proc/driver/nvidia/version")
    driver = re.search(r"\d+\.\d[\d.]*", driver.read_text()) if driver.exists() else None
    nccl = torch.cuda.nccl.version() if dist.is_nccl_available() else None
    interface, address = interface_used("NCCL" if gpus >= local_size else "GLOO")
    return {
        "rank": rank, "local_rank": local_rank, "local_size": local_size, "WORLD_SIZE": world,
        "host": socket.gethostname(), "node": os.environ.get("GROUP_RANK", address),
        "interface": interface, "address": address, "link": link_speed(interface),
        "interfaces": [name for _, name in socket.if_nameindex()],
        "gpus": gpus, "GPU": gpu and gpu.name, "uuid": gpu and str(gpu.uuid),
        "driver": driver and driver[0], "torch": torch.__version__,
        "CUDA": torch.version.cuda or torch.version.hip,
        "NCCL": ".".join(map(str, nccl)) if nccl else None, "Python": platform.python_version(),
        "torchladder": __version__, "program": program and hash_of(program),
    }  # fmt: skip


def interface_used(backend: str) -> tuple[str | None, str | None]:
    """The interface for the ranks' messages and its IPv4 address, each `None` if unknown.

    It is the one that ``GLOO_SOCKET_IFNAME`` or ``NCCL_SOCKET_IFNAME`` names. Without it gloo uses
    the address that the host's own name stands for. NCCL chooses by rules of its own; here it is
    the interface on the way to rank 0.
    """
    addresses = {}
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            with suppress(OSError):  # it has no address; 0x8915 is SIOCGIFADDR (netdevice(7))
                reply = fcntl.ioctl(probe, 0x8915, name.encode().ljust(40, b"\0"))
                addresses[name] = socket.inet_ntoa(reply[20:24])
        if named := os.environ.get(f"{backend}_SOCKET_IFNAME"):
            return named, addresses.get(named)
        try:
            address = socket.gethostbyname(socket.gethostname())
            if backend == "NCCL":
                probe.connect((os.environ["MASTER_ADDR"], 1))  # sends nothing
                address = probe.getsockname()[0]
        except OSError:
            return None, None
    names = [name for name, own in addresses.items() if own == address]
    return (names or ["lo" if address.startswith("127.") else None])[0], address


def link_speed(interface: str | None) -> float | None:
    """Bytes a second that the interface's link is made for; `None` where there is no such number.

    A virtual one has none: a veth pair claims 10 Gbit/s, which stand for nothing. It has neither a
    device nor, as bonds and VLANs do, another interface below it.
    """
    folder = Path("/sys/class/net") / (interface or "-")
    real = any([*folder.glob("device"), *folder.glob("lower_*")])
    with suppress(OSError, ValueError):
        megabits = int((folder / "speed").read_text())
        return megabits * 1e6 / 8 if real and megabits > 0 else None


def hash_of(program: str) -> str:
    """Eight digits that tell one version of a file, or of a folder's Python files, from another."""
    path = Path(program)
    files = sorted(path.rglob("*.py")) if path.is_dir() else [path]
    try:
        return hashlib.sha256(b"\0".join(file.read_bytes() for file in files)).hexdigest()[:8]
    except OSError as error:
        return f"unreadable ({error.strerror})"


def host_names(facts: Iterable[Mapping]) -> dict[int, str]:
    """The name of each rank's host; where two hosts have one name, with torchrun's number."""
    nodes = {(f["host"], f["node"]) for f in facts}
    often = Counter(host for host, _ in nodes)
    return {
        f["rank"]: f["host"] if often[f["host"]] == 1 else f"{f['host']} (node {f['node']})"
        for f in facts
    }


def host_table(facts: list[dict]) -> Table:
    """A row a host; columns that are empty on all hosts are left out."""
    names = host_names(facts)
    rows = []
    for host in dict.fromkeys(names.values()):
        here = [f for f in facts if names[f["rank"]] == host]
        ranks = [f["rank"] for f in here]
        row = {"host": host, "address": f"{here[0]['address']} ({here[0]['interface']})"}
        row["ranks"] = f"{ranks[0]}-{ranks[-1]}" if len(ranks) > 1 else f"{ranks[0]}"
        row["GPUs"] = f"{here[0]['gpus']} x {here[0]['GPU']}" if here[0]["GPU"] else None
        keys = ("driver", "torch", "CUDA", "NCCL", "Python", "torchladder", "program")
        rows.append(row | {key: " / ".join(sorted({str(f[key] or "–") for f in here})) for key in keys})
    kept = [key for key in rows[0] if any(row[key] not in (None, "–") for row in rows)]
    return Table(kept, [[row[key] or "–" for key in kept] for row in rows])


def disagreements(facts: list[dict]) -> tuple[list[str], list[str]]:
    """Problems and warnings: a sentence for each thing in which the hosts differ."""
    names = host_names(facts)
    problems, warnings = [], []
    for key, advice in (MUST_AGREE | SHOULD_AGREE).items():
        hosts: dict[str | None, dict[str, None]] = {}
        for f in facts:
            hosts.setdefault(f[key], {})[names[f["rank"]]] = None
        if key == "GPU" and None in hosts and len(hosts) > 1:
            without = " and ".join(hosts.pop(None))
            problems.append(
                f"{without} has no GPU that PyTorch sees, the others have: run torchladder doctor "
                "there to see why."
            )
        if len(hosts) > 1:
            common = max(hosts, key=lambda value: len(hosts[value]))
            rest = "the others" if len(hosts[common]) > 1 else next(iter(hosts[common]))
            told = [
                f"{' and '.join(where)} has {key} {value}"
                for value, where in hosts.items()
                if value != common
            ]
            sentence = f"{', '.join(told)}, {rest} {common}"
            if key in MUST_AGREE:
                problems.append(f"{sentence}: {advice}.")
            else:
                warnings.append(f"{sentence}{advice}.")
    for uuid, ranks in Counter(f["uuid"] for f in facts if f["uuid"]).items():
        if ranks > 1:
            where = [f["rank"] for f in facts if f["uuid"] == uuid]
            problems.append(
                f"ranks {_and(where)} on {names[where[0]]} share one GPU, which NCCL refuses "
                "('Duplicate GPU detected'): start no more ranks there than it has GPUs."
            )
    return problems, warnings


# --- who answers --------------------------------------------------------------------------------


def missing_ranks(store: dist.Store, key: str, ranks: Iterable[int], seconds: float) -> list[int]:
    """Those of `ranks` that have not written ``key/RANK`` into the store in `seconds`."""
    missing, end = list(ranks), time.monotonic() + seconds
    while missing := [r for r in missing if not store.check([f"{key}/{r}"])]:
        if time.monotonic() > end:  # not store.wait, which prints a warning of its own
            break
        time.sleep(0.1)
    return missing


def _lead(store: dist.Store, world: int, timeout: float, json_file: str | None) -> list[str]:
    """What rank 0 does: find out who is there, give the orders, print. Returns the problems."""
    ranks = range(world)
    silent = missing_ranks(store, "facts", ranks, timeout)
    facts = [json.loads(store.get(f"facts/{r}")) for r in ranks if r not in silent]
    names = host_names(facts)
    print(host_table(facts), end="\n\n")
    problems, warnings = disagreements(facts)
    problems += [
        f"rank {r} of {world} did not register within {timeout:g} s: check that its host was "
        "started, with the same world size, and reaches "
        f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}."
        for r in silent
    ]
    times, speeds, order = {}, {}, 0
    if not silent:
        own = all(f["gpus"] >= f["local_size"] for f in facts)
        backend = "nccl" if own and not any("share one GPU" in p for p in problems) else "gloo"
        join = {"do": "join", "backend": backend}
        _, failures = _ask(store, order := 0, join, facts, timeout)
        if not failures and world > 1:
            ask = {"do": "measure", "rounds": rounds(_parties(names)), "backend": backend}
            answers, failures = _ask(store, order := 1, ask, facts, timeout + 30)
            if not failures:
                times = {int(size): t for size, t in answers[0]["times"].items()}
                speeds = {(a, b): speed for x in answers.values() for a, b, speed in x["speeds"]}
                print(*report(times, speeds, facts), sep="\n", end="\n\n")
                warnings += slow_pairs(speeds, names)
        problems += failures
        order += 1
    last = verdict(facts, problems, warnings, times, speeds)
    print(*[f"WARNING  {warning}" for warning in warnings], last, sep="\n", flush=True)
    if json_file:
        found = {"facts": facts, "problems": problems, "warnings": warnings, "verdict": last}
        found["all_reduce_seconds"] = times
        found["pairs_bytes_per_second"] = [[*pair, speed] for pair, speed in speeds.items()]
        with atomic_file(json_file) as temporary:
            temporary.write_text(json.dumps(found, indent=1))
    store.set(f"order/{order}", json.dumps({"do": "end", "problems": problems}))
    missing_ranks(store, "bye", [r for r in ranks[1:] if r not in silent], GRACE)
    return problems


def _follow(store: dist.Store, rank: int, timeout: float) -> list[str]:
    """What the other ranks do: carry out rank 0's orders until it tells the end."""
    patience = 2 * timeout + GRACE  # rank 0 may itself come late, and wait for others
    for i in count():
        if missing_ranks(store, "order", [i], patience):
            problem = f"rank 0 did not answer rank {rank} within {patience:g} s: look at its host."
            print("PROBLEM ", problem, file=sys.stderr)
            return [problem]
        order = json.loads(store.get(f"order/{i}"))
        if order["do"] == "end":
            store.set(f"bye/{rank}", "")
            return order["problems"]
        _perform(store, i, rank, order, order["seconds"])
        patience = order["seconds"] + timeout + GRACE


def _ask(
    store: dist.Store, i: int, order: dict, facts: list[dict], seconds: float
) -> tuple[dict[int, dict], list[str]]:
    """Give the `i`-th order, carry it out here too; the answers by rank, and what went wrong."""
    end = time.monotonic() + seconds + GRACE
    store.set(f"order/{i}", json.dumps(order | {"seconds": seconds}))
    _perform(store, i, 0, order, seconds)
    ranks = [f["rank"] for f in facts]
    if store.check([f"failed/{i}"]):  # all stop at once
        end = time.monotonic() + GRACE
    silent = missing_ranks(store, f"answer/{i}", ranks, end - time.monotonic())
    answers = {r: json.loads(store.get(f"answer/{i}/{r}")) for r in ranks if r not in silent}
    return answers, blame(order, answers, silent, facts, seconds)


def _perform(store: dist.Store, i: int, rank: int, order: dict, seconds: float) -> None:
    """Carry out an order in a thread, for it may hang, and write what came of it."""
    answer: dict = {}

    def work() -> None:
        try:
            answer.update({"join": join, "measure": measure_links}[order["do"]](order))
        except Exception as error:
            answer["error"] = _short(error)

    thread = Thread(target=work, daemon=True)
    thread.start()
    end = time.monotonic() + seconds
    # Another rank's failure ends this too: without that rank there is nothing to wait for.
    while thread.is_alive() and time.monotonic() < end and not store.check([f"failed/{i}"]):
        thread.join(0.5)
    late = {"late": True} if thread.is_alive() else {}
    store.set(f"answer/{i}/{rank}", json.dumps(answer | late))
    if "error" in answer:
        store.set(f"failed/{i}", "")


def blame(
    order: Mapping,
    answers: Mapping[int, Mapping],
    silent: list[int],
    facts: list[dict],
    seconds: float,
) -> list[str]:
    """A sentence for each rank that is the cause, not for those that only noticed."""
    names, by_rank = host_names(facts), {f["rank"]: f for f in facts}
    errors = {r: answer["error"] for r, answer in answers.items() if "error" in answer}
    what = {"join": "join the process group", "measure": "measure"}[order["do"]]
    backend = order["backend"]
    check = f"{backend.upper()}_SOCKET_IFNAME, the firewall (all ports between the hosts, not only MASTER_PORT)"
    own = {r: e for r, e in errors.items() if not PEER_IS_GONE.search(e)}
    if silent and not own:
        return [
            f"rank {r} on {names[r]} registered and then hung or ended: it did not answer when told to "
            f"{what}. See what it prints, and what that host is doing."
            for r in silent
        ]
    sentences = [
        f"rank {r} on {names[r]} could not {what} ({backend}, interface {by_rank[r]['interface']} with "
        f"address {by_rank[r]['address']}; the host has {', '.join(by_rank[r]['interfaces'])}): "
        f"{error} Check {check}."
        for r, error in (own or errors).items()
    ]
    late = [r for r, answer in answers.items() if "late" in answer]
    if late and not sentences:
        used = ", ".join(dict.fromkeys(f"{f['address']} on {names[f['rank']]}" for f in facts))
        sentences = [
            f"{'ranks' if len(late) > 1 else 'rank'} {_and(late)} could not {what} ({backend}) within "
            f"{seconds:g} s. All reach the store, so look at the addresses used between ranks ({used}). "
            f"Check {check}."
        ]
    return sentences


# --- what is asked of them ----------------------------------------------------------------------


def join(order: Mapping) -> dict:
    """Join the process group, and do the first all-reduce; an error if its sum is wrong."""
    join_group(order["backend"])
    rank, world = dist.get_rank(), dist.get_world_size()
    total = torch.tensor([rank + 1.0], device=_device(order))
    dist.all_reduce(total)
    if total.item() != world * (world + 1) / 2:
        raise ArithmeticError(f"the ranks' sum is {total.item()} of 1 to {world}")
    return {}


def measure_links(order: Mapping) -> dict:
    """Time all-reduces of growing size, then each pair of ranks; every rank calls it."""
    device = _device(order)
    if device.type == "cuda":
        torch.cuda.set_device(device)  # it holds for one thread only
    times = all_reduce_times(device)
    size = max([s for s, t in times.items() if t < 0.02 and s < 20e6], default=SIZES[0])
    speeds = pair_speeds(order["rounds"], size, device)
    return {"times": times, "speeds": [[*pair, speed] for pair, speed in speeds.items()]}


def all_reduce_times(device: torch.device) -> dict[int, float]:
    """Median seconds of an all-reduce by its bytes; alike on all ranks."""
    times, left = {}, BUDGET
    for size in SIZES:
        tensor = torch.zeros(size // 4, device=device)
        timing = measure_across_ranks({"": lambda t=tensor: dist.all_reduce(t)}, device=device)[""]
        times[size] = timing.median
        left -= 1.2 * sum(timing.seconds)  # with the run that is not counted
        if 4 * 6 * timing.median > left:  # the next is four times as large
            break
    return times


def bus_bandwidth(size: float, seconds: float, ranks: int) -> float:
    """Bytes a second that each rank's link carries in an all-reduce of `size` bytes.

    As nccl-tests defines it, so that the number can be held against the link's, whatever the number
    of ranks: https://github.com/NVIDIA/nccl-tests/blob/master/doc/PERFORMANCE.md.

    Examples
    --------
    >>> bus_bandwidth(1e9, 2.0, ranks=4)
    750000000.0
    """
    return size / seconds * 2 * (ranks - 1) / ranks


def rounds(parties: list[int]) -> list[list[tuple[int, int]]]:
    """All pairs of ranks: one at a time if they are few, else as many at once as there can be.

    Examples
    --------
    >>> rounds([0, 1, 2])
    [[(0, 1)], [(0, 2)], [(1, 2)]]
    """
    if len(parties) <= 8:
        return [[pair] for pair in combinations(parties, 2)]
    # A tournament: the first stays, the others move on by a seat, and who sit opposite play.
    first, *circle = [*parties, *[-1] * (len(parties) % 2)]
    turns = []
    for _ in circle:
        seats = [first, *circle]
        opposite = zip(seats[: len(seats) // 2], reversed(seats), strict=False)
        turns.append([(min(pair), max(pair)) for pair in opposite if -1 not in pair])
        circle = [circle[-1], *circle[:-1]]
    return turns


def pair_speeds(
    turns: list[list[tuple[int, int]]], size: int, device: torch.device, repeats: int = 5
) -> dict[tuple[int, int], float]:
    """Bytes a second of a message to and fro, of the pairs in which this rank is the first."""
    rank, speeds = dist.get_rank(), {}
    tensor = torch.zeros(size // 4, device=device)
    clock = {"device": device, "repeats": repeats, "warmup": 1}

    def ping(peer: int) -> None:
        dist.send(tensor, peer)
        dist.recv(tensor, peer)

    def pong(peer: int) -> None:
        dist.recv(tensor, peer)
        dist.send(tensor, peer)

    for pairs in turns:
        dist.barrier()
        for first, second in pairs:
            if rank == first:
                seconds = measure(lambda peer=second: ping(peer), **clock).median
                speeds[first, second] = 2 * tensor.nbytes / seconds
            elif rank == second:
                measure(lambda peer=first: pong(peer), **clock)
    return speeds


# --- what comes of it ---------------------------------------------------------------------------


def report(times: Mapping, speeds: Mapping, facts: list[dict]) -> list[object]:
    """A table of the all-reduces, and a line for each kind of pair."""
    rows = [
        [in_bytes(size), f"{t * 1e3:.3g} ms", _speed(bus_bandwidth(size, t, len(facts)))]
        for size, t in times.items()
    ]
    lines = [Table(["all-reduce", "time", "bus bandwidth"], rows)]
    names = host_names(facts)
    for kind, pairs in _by_kind(speeds, names).items():
        slow, middle = min(pairs, key=pairs.get), median(pairs.values())
        lines.append(
            f"pairs {kind}: {len(pairs)}, median {_speed(middle)}, slowest {_pair(slow, names)} "
            f"{_speed(pairs[slow])} ({middle / pairs[slow]:.1f} times slower than the median)"
        )
        link = min((f["link"] for f in facts if f["link"]), default=None)
        if link and kind == "between hosts":
            lines.append(f"the link is made for {_speed(link)}: {max(pairs.values()) / link:.0%} used")
    return lines


def slow_pairs(speeds: Mapping, names: Mapping[int, str]) -> list[str]:
    """A warning for each pair that is less than half as fast as the median of its kind."""
    return [
        f"{_pair(pair, names)} is {median(pairs.values()) / speed:.1f} times slower than the median "
        f"pair {kind}: check its cable, port and interface."
        for kind, pairs in _by_kind(speeds, names).items()
        for pair, speed in pairs.items()
        if speed < median(pairs.values()) / 2
    ]


def verdict(
    facts: list[dict], problems: list[str], warnings: list[str], times: Mapping, speeds: Mapping
) -> str:
    """The last line: OK with the numbers to remember, or a line for each problem."""
    if problems:
        return "\n".join(f"PROBLEM  {problem}" for problem in problems)
    names = host_names(facts)
    hosts = len(set(names.values()))
    parts = [f"{_plural(len(facts), 'rank')} on {_plural(hosts, 'host')} agree"]
    if times:
        size = max(times)
        parts.append(f"all-reduce {_speed(bus_bandwidth(size, times[size], len(facts)))}")
    if speeds:
        kinds = _by_kind(speeds, names)
        pairs = kinds.get("between hosts") or kinds["within a host"]
        slow = min(pairs, key=pairs.get)
        parts.append(f"slowest pair {_pair(slow, names)} {_speed(pairs[slow])}")
    if warnings:
        parts.append(f"{_plural(len(warnings), 'warning')} above")
    return f"OK: {'; '.join(parts)}"


def _by_kind(speeds: Mapping, names: Mapping[int, str]) -> dict[str, dict]:
    """Pairs between hosts and within one, apart: they are not to be held against each other."""
    kinds: dict[str, dict] = {}
    for (a, b), speed in speeds.items():
        kind = "within a host" if names[a] == names[b] else "between hosts"
        kinds.setdefault(kind, {})[a, b] = speed
    return kinds


def _parties(names: Mapping[int, str]) -> list[int]:
    """The ranks to pair: all if they are few or on one host, else the first of each host."""
    first = {host: rank for rank, host in reversed(names.items())}
    return [*names] if len(names) <= 8 or len(first) == 1 else sorted(first.values())


def _pair(pair: tuple[int, int], names: Mapping[int, str]) -> str:
    a, b = pair
    hosts = names[a] if names[a] == names[b] else f"{names[a]} - {names[b]}"
    return f"{hosts} (ranks {a} and {b})"


def _device(order: Mapping) -> torch.device:
    nccl = order["backend"] == "nccl"
    return torch.device("cuda", int(os.environ["LOCAL_RANK"])) if nccl else torch.device("cpu")


def _speed(bytes_per_second: float) -> str:
    return f"{in_bytes(bytes_per_second)}/s"


def _and(things: list) -> str:
    return " and ".join([", ".join(map(str, things[:-1])), str(things[-1])]).removeprefix(" and ")


def _plural(number: int, thing: str) -> str:
    return f"{number} {thing}" + "s" * (number != 1)


def _short(error: Exception) -> str:
    """The error's first line, without the place in C++ where it was raised."""
    text = re.sub(r"^\[.*?\] ", "", f"{error}".partition("\n")[0])
    return f"{type(error).__name__}: {text[:300].rstrip('. ')}."


def _tell_torchrun(text: str) -> None:
    """Put the verdict where torchrun's own report, the last thing on the screen, shows it.

    The format is of torch.distributed.elastic.multiprocessing.errors.ErrorHandler, which has room
    only for an exception with its traceback.
    """
    if file := os.environ.get("TORCHELASTIC_ERROR_FILE"):
        more = {"py_callstack": text, "timestamp": str(int(time.time()))}
        Path(file).write_text(json.dumps({"message": {"message": text, "extraInfo": more}}))
