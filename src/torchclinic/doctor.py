"""Are these hosts fit for a long run? ``torchclinic doctor --distributed``, under torchrun.

Each rank writes what it is into torchrun's store, the one place that all reach before there is a
process group. There rank 0 orders them to join and to measure, and each rank writes what came of
it. So a rank that is silent is known by name. A collective cannot tell: in it, all ranks wait.
"""

import hashlib
import json
import os
import platform
import re
import socket
import sys
import time
from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from statistics import median
from threading import Thread
from typing import Any

import torch
import torch.cuda.nccl
import torch.distributed as dist

from torchclinic import UserError, __version__
from torchclinic.process_group import GROUP, PEER_IS_GONE
from torchclinic.tables import Table, in_bytes

SIZES = [1000 * 4**i for i in range(1, 9)]  # bytes of an all-reduce: 4 kB to 66 MB
ENOUGH = 0.2  # seconds; an all-reduce that takes longer is the last
RUNS = 5  # of each size; one more before them is not counted
GRACE = 5.0  # seconds for answers that are on their way
MEASURING = 30.0  # seconds that measuring may take, besides
JOIN, MEASURE = "join the process group", "time all-reduces"  # what a rank is doing
# What a rank says that cannot reach another, which may be the fault of either.
EFFECT = re.compile(PEER_IS_GONE.pattern + "|connectFullMesh|[Tt]ime(d |-)?out")
# How the files end, of a folder with a program, that must be alike: not data, logs or weights.
PROGRAMS = {".py", ".pyx", ".sh", ".yaml", ".yml", ".json", ".toml", ".ini", ".cfg", ".conf"}
PROGRAMS |= {".jinja", ".c", ".cc", ".cpp", ".h", ".hpp", ".cu", ".cuh"}
# If hosts differ in one of these, it is a problem, and this is what to do.
MUST_AGREE = {
    "WORLD_SIZE": "start all hosts with the same --nnodes and --nproc-per-node",
    **dict.fromkeys(["torchclinic", "torch"], "install the same on every host"),
    **dict.fromkeys(["CUDA", "NCCL"], "install the same build of torch on every host"),
    "program": "copy the same files to every host",
    "GPU": "torchclinic doctor says there why there is none",
}


def run(timeout: float, program: str | None = None) -> int:
    """Check the ranks of this torchrun; rank 0 prints what it finds. The exit status, 0 or 1.

    Parameters
    ----------
    timeout : float
        Seconds that a rank may take to register, and again to join the others.
    program : str, optional
        A file or folder, such as the training program: its contents must be alike on all hosts.

    Raises
    ------
    UserError
        If no launcher has told this process its rank.
    """
    if missing := [name for name in GROUP if name not in os.environ]:
        raise UserError(
            f"{', '.join(missing)} not set. Start it as you start a training, by torchrun: "
            "torchrun --nproc-per-node=2 -m torchclinic doctor --distributed"
        )
    rank = int(os.environ["RANK"])
    # Before PyTorch 2.12, gloo announces its connections on the stdout of every rank.
    sys.stdout = os.fdopen(os.dup(1), "w", buffering=1, errors="replace")
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    try:
        store = connect(timeout)
        store.set(f"facts/{rank}", json.dumps(facts_of_rank(program)))
        problems = _lead(store, timeout) if rank == 0 else _follow(store, rank, timeout)
    except (dist.DistError, ConnectionError) as error:
        place = f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
        problems = [
            f"rank {rank} on {socket.gethostname()} has no connection to rank 0's store at {place} "
            f"({_short(error)}): check the address, the port, the firewall, and that rank 0 runs."
        ]
        print(*_marked(problems), file=sys.stderr)
    if problems:
        _tell_torchrun("\n".join(_marked(problems)))
    return 1 if problems else 0


def connect(timeout: float) -> dist.Store:
    """The store at ``MASTER_ADDR``: torchrun's, or one that rank 0 opens there.

    Unlike `init_process_group`, it does not wait for the other ranks.
    """
    environment, end = os.environ, time.monotonic() + timeout
    place = environment["MASTER_ADDR"], int(environment["MASTER_PORT"])
    torchruns = environment.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    opens = environment["RANK"] == "0" and not torchruns
    while not opens:  # TCPStore would print its C++ stack if nobody answers
        try:
            socket.create_connection(place, timeout).close()
            break
        except OSError as error:
            if time.monotonic() > end:
                raise ConnectionError(f"for {timeout:g} s, {error}") from None
            time.sleep(0.2)
    limit, choices = timedelta(seconds=timeout), {"wait_for_workers": False, "multi_tenant": True}
    store = dist.TCPStore(*place, is_master=opens, timeout=limit, **choices)
    attempt = environment.get("TORCHELASTIC_RESTART_COUNT", "0")
    return dist.PrefixStore(f"torchclinic/doctor/{attempt}", store)


# --- what a rank is -----------------------------------------------------------------------------


def facts_of_rank(program: str | None = None) -> dict:
    """What is to be known of this rank, as JSON can hold it; nothing is joined for it."""
    names = ("RANK", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "WORLD_SIZE")
    rank, local_rank, local_size, world = (int(os.environ[name]) for name in names)
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    gpu = torch.cuda.get_device_properties(local_rank % gpus) if gpus else None
    driver = Path("/proc/driver/nvidia/version")
    driver = re.search(r"\d+\.\d[\d.]*", driver.read_text()) if driver.exists() else None
    nccl = torch.cuda.nccl.version() if dist.is_nccl_available() else ()
    interface, address = interface_used("NCCL" if gpus >= local_size else "GLOO")
    return {
        "rank": rank, "local_size": local_size, "WORLD_SIZE": world,
        "host": socket.gethostname(), "node": os.environ.get("GROUP_RANK", address),
        "interface": interface, "address": address,
        "interfaces": [name for _, name in socket.if_nameindex()],
        "gpus": gpus, "GPU": gpu and gpu.name, "uuid": gpu and str(gpu.uuid),
        "driver": driver and driver[0], "torch": torch.__version__,
        "CUDA": torch.version.cuda or torch.version.hip,
        "NCCL": ".".join(map(str, nccl)) or None, "Python": platform.python_version(),
        "torchclinic": __version__, "program": program and hash_of(program),
    }  # fmt: skip


def interface_used(backend: str) -> tuple[str | None, str | None]:
    """The interface for the ranks' messages and its IPv4 address; `None` for what is not known.

    It is the one that ``GLOO_SOCKET_IFNAME`` or ``NCCL_SOCKET_IFNAME`` names. Without it, gloo uses
    the address that the host's own name stands for. NCCL chooses by rules of its own; told here is
    the interface on the way to rank 0.
    """
    import fcntl  # which Windows lacks

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


def hash_of(program: str) -> str:
    """Eight digits that tell one version of a file, or of a folder's `PROGRAMS`, from another."""
    path = Path(program)
    inside = (f for f in path.rglob("*") if f.suffix in PROGRAMS and f.is_file())
    files = sorted(inside) if path.is_dir() else [path]
    parts = []
    for name in files:
        with open(name, "rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
        parts.append((str(name.relative_to(path)), digest))
    return hashlib.sha256(repr(parts).encode()).hexdigest()[:8]


# --- what they are together ---------------------------------------------------------------------


def host_names(facts: Iterable[Mapping]) -> dict[int, str]:
    """The name of each rank's host; where several have one name, with torchrun's number."""
    nodes = {(f["host"], f["node"]) for f in facts}
    often = Counter(host for host, _ in nodes)
    name = "{host} (node {node})".format_map
    return {f["rank"]: name(f) if often[f["host"]] > 1 else f["host"] for f in facts}


def host_table(facts: list[dict]) -> Table:
    """A row a host; columns that are empty on all hosts are left out."""
    names, rows = host_names(facts), []
    versions = ["driver", "torch", "CUDA", "NCCL", "Python", "torchclinic", "program"]
    for host in dict.fromkeys(names.values()):
        here = [f for f in facts if names[f["rank"]] == host]
        first, last = here[0], here[-1]
        address = f"{first['address'] or 'none'} ({first['interface']})"
        ranks = f"{first['rank']}" + f"-{last['rank']}" * (len(here) > 1)
        gpus = f"{first['gpus']} x {first['GPU']}" if first["gpus"] else "–"
        told = (" / ".join(dict.fromkeys(f[key] or "–" for f in here)) for key in versions)
        rows.append([host, address, ranks, gpus, *told])
    columns = zip(["host", "address", "ranks", "GPUs", *versions], *rows, strict=True)
    header, *rows = zip(*(c for c in columns if {*c[1:]} != {"–"}), strict=True)
    return Table(header, rows)


def disagreements(facts: list[dict]) -> list[str]:
    """A sentence for each thing in which the hosts differ and must not, and for each shared GPU."""
    names = host_names(facts)
    problems, differing = [], set()
    for key, advice in MUST_AGREE.items():
        hosts: dict[str | None, dict[str, None]] = {}
        for f in facts:
            hosts.setdefault(f[key], {})[names[f["rank"]]] = None
        # Another torch has another CUDA and NCCL, of course.
        if len(hosts) == 1 or (key in ("CUDA", "NCCL") and "torch" in differing):
            continue
        if key == "GPU" and None not in hosts:  # two kinds train together, at the slower one's pace
            continue
        differing.add(key)
        rare, *others = sorted(hosts, key=lambda value: len(hosts[value]))
        values = [f"{value or 'none'} on {_and(hosts[value])}" for value in (rare, *others[:-1])]
        values = f"{', '.join(values)}, {others[-1] or 'none'} on the others"
        problems.append(f"{key}: {values}; {advice}.")
    for uuid in dict.fromkeys(f["uuid"] for f in facts if f["uuid"]):
        ranks = [f["rank"] for f in facts if f["uuid"] == uuid]
        if len(ranks) > 1:
            problems.append(
                f"ranks {_and(ranks)} on {names[ranks[0]]} share one GPU, which NCCL refuses "
                "('Duplicate GPU detected'): start no more ranks there than it has GPUs."
            )
    return problems


# --- who answers --------------------------------------------------------------------------------


def _hear(store: dist.Store, key: str, ranks: Collection[int], seconds: float) -> dict[int, Any]:
    """What each of `ranks` says within `seconds`, as ``key/RANK``; one that is silent is left out.

    Not by store.wait: when time is up, it prints warnings of its own.
    """
    heard, end = {}, time.monotonic() + seconds
    while len(heard) < len(ranks) and time.monotonic() < end:
        time.sleep(0.1)
        come = [r for r in ranks if r not in heard and store.check([f"{key}/{r}"])]
        heard |= {r: json.loads(store.get(f"{key}/{r}")) for r in come}
    return dict(sorted(heard.items()))


def _lead(store: dist.Store, timeout: float) -> list[str]:
    """What rank 0 does: see who is there, give the order, print. Returns the problems."""
    ranks = range(int(os.environ["WORLD_SIZE"]))
    heard = _hear(store, "facts", ranks, timeout)
    silent, facts = [r for r in ranks if r not in heard], [*heard.values()]
    names = host_names(facts)
    print(host_table(facts), end="\n\n")
    problems = disagreements(facts) + [
        f"rank {r} of {len(ranks)} did not register within {timeout:g} s: check that its host was "
        f"started and reaches {os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}."
        for r in silent
    ]
    backend, times = None, {}
    if not silent and len(ranks) > 1:
        alone = all(f["gpus"] >= f["local_size"] for f in facts)
        alone &= len({f["uuid"] for f in facts}) == len(ranks)
        backend = "nccl" if alone else "gloo"
    store.set("order/0", json.dumps(backend))
    if backend:
        _perform(store, 0, backend, timeout)
        heard = _hear(store, "answer", ranks, GRACE)
        failures = blame(backend, heard, facts)
        problems += failures
        if not failures:
            times = {int(size): seconds for size, seconds in heard[0]["times"].items()}
            print(all_reduce_table(times, len(ranks)), end="\n\n")
    print(*_marked(problems) or [verdict(names, times)], sep="\n", flush=True)
    store.set("end/0", json.dumps(problems))
    _hear(store, "bye", heard.keys() - {0}, GRACE)  # then the store may go
    return problems


def _follow(store: dist.Store, rank: int, timeout: float) -> list[str]:
    """What the other ranks do: carry out rank 0's order, if there is one, and hear the problems."""

    def from_rank_0(key: str, patience: float) -> Any:
        if not (heard := _hear(store, key, [0], patience)):
            raise ConnectionError(f"rank 0 said nothing for {patience:g} s")
        return heard[0]

    # Rank 0 may come as late as any, and then wait for others.
    if backend := from_rank_0("order", 2 * timeout + GRACE):
        _perform(store, rank, backend, timeout)
    problems = from_rank_0("end", timeout + 2 * GRACE)
    store.set(f"bye/{rank}", "null")
    return problems


def _perform(store: dist.Store, rank: int, backend: str, timeout: float) -> None:
    """Join and measure in a thread, for it may hang, and write what came of it."""
    answer: dict = {"doing": JOIN}

    def work() -> None:
        try:
            join(backend)
            answer["doing"] = MEASURE
            answer["times"] = all_reduce_times(_device(backend))
        except Exception as error:
            answer["error"] = _short(error)

    thread = Thread(target=work, daemon=True)
    thread.start()
    end = {JOIN: time.monotonic() + timeout, MEASURE: time.monotonic() + timeout + MEASURING}
    # Another rank's failure ends this too: there is nothing left to wait for.
    while thread.is_alive() and time.monotonic() < end[answer["doing"]]:
        if store.check(["failed"]):
            break
        thread.join(0.5)
    if thread.is_alive():
        answer = {"doing": answer["doing"], "error": "time-out, though all reach the store"}
    store.set(f"answer/{rank}", json.dumps(answer))
    if "error" in answer:
        store.set("failed", "")


def blame(backend: str, answers: Mapping[int, Mapping], facts: list[dict]) -> list[str]:
    """A sentence for each rank that is the cause; the others have only noticed."""
    names = host_names(facts)
    errors = {r: answer["error"] for r, answer in answers.items() if "error" in answer}
    causes = {r: error for r, error in errors.items() if not EFFECT.search(error)}
    if not causes and len(answers) < len(names):
        return [
            f"rank {r} on {name} registered, then did not answer: it hangs or has ended. See "
            "what it printed, and how its host is."
            for r, name in names.items()
            if r not in answers
        ]
    variable = f"{backend.upper()}_SOCKET_IFNAME"
    check = f"Check {variable}, and that the firewall opens all ports between the hosts."
    local = {names[f["rank"]]: 0 for f in facts if (f["address"] or "").startswith("127.")}
    if local and len(set(names.values())) > 1:
        check += (
            f" A loopback address is of no use to another host: on {_and(local)} set {variable} to "
            "the interface that leads to the others."
        )
    return [
        f"rank {r} on {names[r]} could not {answers[r]['doing']} ({backend}): {error}. Interface "
        f"tried: {facts[r]['interface']} ({facts[r]['address'] or 'no address'}); that host has "
        f"{_and(facts[r]['interfaces'])}. {check}"
        for r, error in (causes or errors).items()
    ]


# --- what they are asked to do ------------------------------------------------------------------


def join(backend: str) -> None:
    """Join the process group and do the first all-reduce; an error if its sum is wrong."""
    device = _device(backend)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    dist.init_process_group(backend, device_id=device if backend == "nccl" else None)
    world = dist.get_world_size()
    total = torch.tensor([dist.get_rank() + 1.0], device=device)
    dist.all_reduce(total)
    if total.item() != world * (world + 1) / 2:
        raise ArithmeticError(f"an all-reduce of 1 to {world} gave {total.item()}")


def all_reduce_times(device: torch.device) -> dict[int, float]:
    """Median seconds of an all-reduce by its bytes; the same on all ranks."""
    times = {}
    for size in SIZES:
        tensor, seconds = torch.zeros(size // 4, device=device), []
        for _ in range(1 + RUNS):
            start = time.perf_counter()
            dist.all_reduce(tensor)
            if device.type == "cuda":
                torch.cuda.synchronize(device)
            seconds.append(time.perf_counter() - start)
        slowest = torch.tensor(median(seconds[1:]), dtype=torch.float64, device=device)
        dist.all_reduce(slowest, dist.ReduceOp.MAX)
        times[size] = slowest.item()
        if times[size] > ENOUGH:  # the next would take four times as long
            break
    return times


def bus_bandwidth(size: float, seconds: float, world_size: int) -> str:
    """How many bytes a second go over each rank's link in an all-reduce of `size` bytes.

    As nccl-tests defines it, so that it can be held against the link's own speed, however many
    ranks there are: https://github.com/NVIDIA/nccl-tests/blob/master/doc/PERFORMANCE.md.

    Examples
    --------
    >>> bus_bandwidth(1e9, 2.0, world_size=4)
    '750.0 MB/s'
    """
    return f"{in_bytes(size / seconds * 2 * (world_size - 1) / world_size)}/s"


# --- what comes of it ---------------------------------------------------------------------------


def all_reduce_table(times: Mapping[int, float], world_size: int) -> Table:
    """A row for each size."""
    rows = [
        [in_bytes(size), f"{t * 1e3:.3g} ms", bus_bandwidth(size, t, world_size)]
        for size, t in times.items()
    ]
    return Table(["all-reduce", "time", "bus bandwidth"], rows)


def verdict(names: Mapping[int, str], times: Mapping) -> str:
    """The last line if there is no problem."""
    ranks, hosts = len(names), len(set(names.values()))
    line = f"OK: {ranks} rank{'s' * (ranks > 1)} on {hosts} host{'s' * (hosts > 1)} agree"
    if times:
        line += f"; all-reduce {bus_bandwidth(max(times), times[max(times)], ranks)}"
    return line


def _marked(problems: list[str]) -> list[str]:
    return [f"PROBLEM  {problem}" for problem in problems]


def _and(things: Iterable) -> str:
    *most, last = map(str, things)
    return f"{', '.join(most)} and {last}" if most else last


def _device(backend: str) -> torch.device:
    return torch.device(f"cuda:{os.environ['LOCAL_RANK']}" if backend == "nccl" else "cpu")


def _short(error: Exception) -> str:
    """The error's first line, without places in C++."""
    text = re.sub(r"\[[^][]*\.cc:\d+\] ?", "", str(error).partition("\n")[0])
    return f"{type(error).__name__}: {text[:300].rstrip('. ')}"


def _tell_torchrun(text: str) -> None:
    """Put the problems into torchrun's own report, which is the last thing on every host's screen.

    The file is as torch.distributed.elastic.multiprocessing.errors.ErrorHandler writes it.
    """
    if file := os.environ.get("TORCHELASTIC_ERROR_FILE"):
        more = {"py_callstack": text, "timestamp": str(int(time.time()))}
        Path(file).write_text(json.dumps({"message": {"message": text, "extraInfo": more}}))
