"""What training across two hosts does: measured, cut off and broken, for the book.

``python -m tools.two_hosts_record`` runs the scenarios of ``two_hosts.toml`` and measures links,
some twenty minutes, as root. Names of scenarios after it (or ``link``) record these again, and
keep the others. Under torchrun, this file is what measures the link.
"""

import datetime
import json
import os
import re
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from tools.two_hosts import NAMES, PORT, Job, torchrun, two_hosts

ROOT = Path(__file__).resolve().parent.parent
SCENARIOS = tomllib.loads((ROOT / "tools" / "two_hosts.toml").read_text())
DATA = ROOT / "src" / "torchladder" / "bundled" / "fashion_mnist_small.npz"
# Without it a host that joins later waits in vain: github.com/pytorch/pytorch/issues/135712
OWN_STORE = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
RATES = {None: None, "1gbit": 125e6, "100mbit": 12.5e6}  # bytes per second
DELAYS = (0.0, 0.001, 0.005)
SIZE = 4**11  # bytes of an all-reduce
# Of gpt.py: a batch that 1, 2 or 3 ranks can share, and a checkpoint every 8 steps.
TINY = "--layers 2 --width 32 --kv-heads 2 --batch 24 --steps 32 --warm-up 4 --peak 1"
TINY += " --log-every 8 --save-every 8 --out ../shared --export gpt.safetensors"
GIVE_UP = 240  # seconds after which a fault that is still silent is recorded so
LISTEN = "import socket, time; s = socket.create_server(('', 29500)); print('up'); time.sleep(999)"
ROW = r"(epoch|step) (\d+): loss ([\d.]+), (test|validation) ([\d.]+)"
NOISE = re.compile(
    r"(\[\w*rank\d+\]: )?(\s|$|Traceback|frame #|Exception raised|<omitting|The above exc|\s*\^)"
    r"|.*socket.cpp:\d+\] \[c10d\] The hostname of the client|\[Gloo\] Rank"
    r"|.*No CUDA runtime is found|[-=*]{9}|Failures:$|Root Cause|\[\d+\]:$"
)


# --- the program that measures ------------------------------------------------------------------


def measure() -> None:
    """The time of an all-reduce; rank 0 prints it as JSON."""
    import torch
    import torch.distributed as dist

    from torchladder.measuring import measure_across_ranks

    dist.init_process_group("gloo")
    exchange = {"it": partial(dist.all_reduce, torch.zeros(SIZE // 4))}
    seconds = measure_across_ranks(exchange, repeats=10)["it"].median
    if dist.get_rank() == 0:
        print(json.dumps({"all_reduce": [{"bytes": SIZE, "seconds": seconds}]}), flush=True)
    dist.destroy_process_group()


def record_links() -> dict:
    """Times of an all-reduce on links of several rates and delays."""
    settings = []
    for rate, bandwidth in RATES.items():
        for delay in DELAYS if rate else DELAYS[:1]:
            with two_hosts(rate=rate, delay=delay) as hosts:
                jobs = [
                    host.start([*torchrun(host), "-m", __spec__.name], cwd=ROOT) for host in hosts
                ]
                if sum(job.wait(300) for job in jobs):
                    raise RuntimeError("".join(job.text for job in jobs))
            found = next(json.loads(line) for _, line in jobs[0].lines if line.startswith("{"))
            settings.append({"rate": rate, "bytes_per_second": bandwidth, "delay": delay} | found)
    return {"settings": settings}


# --- a scenario ---------------------------------------------------------------------------------


def play(
    folder: Path, *, gpt: str = "", epochs: int = 1,
    host1: Sequence[str] = (), host2: Sequence[str] = (), interfaces: Sequence[str] = (),
    own_address: str | None = None, busy: bool = False, other: bool = False,
    lose: int | None = None, silent: bool = False, back: Sequence[str] | None = None,
    like: str = "", what: str = "",
) -> dict:  # fmt: skip
    """A scenario of ``two_hosts.toml``: what was printed, when, and how it ended.

    Of a host that is lost, the processes are killed and the link goes down, as soon as gpt.py has
    its second checkpoint. The rendezvous is on the host that stays: who loses that one loses all.
    """
    folder.mkdir()
    program = "gpt.py" if gpt else "4_ddp.py"
    text = (ROOT / "rungs" / program).read_text()
    texts = [text, text.replace("400, 120", "400, 128").replace("(120,", "(128,")]
    words = [program, "--data", DATA]
    words += ["--lr", 0.1, "--epochs", epochs, "--batch-size", 64, "--save", "lenet.pt"]
    if gpt:
        words[3:] = ["--parallel", gpt, *TINY.split()]
    stays = f"--rdzv-endpoint={NAMES[0 if lose else 1]}:{PORT}"
    meet = ["--max-restarts=3", stays] if lose is not None else []
    with two_hosts(own_address=own_address) as hosts:

        def start(i: int, options: Sequence[str]) -> Job:
            place = folder / NAMES[i]  # which only this host uses
            place.mkdir(exist_ok=True)
            (place / program).write_text(texts[other and i])
            env = {"GLOO_SOCKET_IFNAME": interfaces[i]} if interfaces else {}
            env |= OWN_STORE if gpt else {}
            command = [*torchrun(hosts[i], *meet, *options), *words]
            return hosts[i].start(command, cwd=place, env=env)

        if busy:
            hosts[0].start([sys.executable, "-uc", LISTEN]).until("up", 60)
        begin = time.time()
        jobs = {i: start(i, more) for i, more in enumerate((host1, host2)) if more != "off"}
        started = list(jobs.values())
        if lose is not None:  # rank 0 is on the host whose name sorts first
            del jobs[lose]
            started[0].until("step 16:", 600)
            while not (folder / "shared/step-00000016/.metadata").exists():  # written meanwhile
                time.sleep(0.02)
            begin = time.time()
            if not silent:
                hosts[lose].kill()
                time.sleep(0.5)
            hosts[lose].cut()
            hosts[lose].kill()
            if back is not None:
                time.sleep(5)
                hosts[lose].join()
                jobs[lose] = start(lose, back)
                started.append(jobs[lose])
        limit = GIVE_UP if what else 1200
        ends = {NAMES[i]: ended(job, begin, limit) for i, job in jobs.items()}
    if what:
        return {"what": what, "ended": ends}
    done = [row for job in started for row in rows_of(job, begin)]
    result: dict[str, Any] = {"rows": done, "ended": ends}
    if lose is not None:
        result["timeline"] = timeline(started[1 - lose], NAMES[1 - lose], begin, done)
    if like:
        result["largest_difference"] = difference(folder, folder.parent / like)
        result["same_state_dict"] = result["largest_difference"] == 0
    return result


def rows_of(job: Job, start: float) -> list[dict]:
    """What rank 0 printed after an epoch or some steps, as numbers."""
    rows = []
    for when, line in job.lines:
        if found := re.match(ROW, line):
            unit, number, loss, kind, value = found.groups()
            row = {unit: int(number), "loss": float(loss), kind: float(value)}
            rows.append(row | {"seconds": round(when - start, 1)})
    return rows


def ended(job: Job, start: float, limit: float) -> dict:
    """How a job ended: its status, after how many seconds, and its words without the traces."""
    try:
        status = job.wait(max(0.1, start + limit - time.time()))
        seconds = round((job.ended or time.time()) - start, 1)
    except subprocess.TimeoutExpired:
        status, seconds = None, None  # it still runs
    lines = {}
    for when, line in list(job.lines):
        if not NOISE.match(line):
            lines.setdefault(line[:400], round(when - start, 1))
    printed = [[when, line] for line, when in lines.items()]
    some = printed[:6] + printed[6:][-6:]
    return {"status": status, "seconds": seconds, "printed": some}


def timeline(stayed: Job, name: str, cut: float, rows: list) -> list[dict]:
    """Seconds from the cut until the host that stayed notices, and until it has done more steps."""
    failed = next(when for when, line in stayed.lines if when > cut and "RuntimeError" in line)
    done = next(row for row in rows if row["seconds"] > 0)
    return [
        {"seconds": round(failed - cut, 1), "what": f"a rank on {name} fails"},
        {"seconds": done["seconds"], "what": f"step {done['step']} is done"},
    ]


def difference(one: Path, other: Path) -> float:
    """Of the weights that two runs have saved, the largest."""
    import torch
    from safetensors.torch import load_file

    both = ([*run.glob("host*/*.pt"), *run.glob("host*/*.safetensors")][0] for run in (one, other))
    first, second = (torch.load(f) if f.suffix == ".pt" else load_file(f) for f in both)
    return max((first[key] - second[key]).abs().max().item() for key in second)


# --- the record ---------------------------------------------------------------------------------


def main(*again: str, file: Path = ROOT / "book/runs/two_hosts.json") -> None:
    """Run all experiments, or only these parts or scenarios again, and write what they gave."""
    from tools.machine_facts import machine_facts
    from tools.record import cleaner
    from tools.refresh import write_text

    # What the program under torchrun imports.
    os.environ["PYTHONPATH"] = f"{ROOT / 'src'}:{os.environ.get('PYTHONPATH', '')}".rstrip(":")
    facts, today = machine_facts(), datetime.date.today().isoformat()
    result = json.loads(file.read_text()) if again else {"machine": facts, "date": today}
    if result["machine"] != facts:
        sys.exit(f"{file} was recorded on another machine or version: record all of it")
    dates = sorted({*result["date"].split(", "), today})
    result |= {"date": ", ".join(dates), "torch": facts["torch"]}
    for part, scenarios in SCENARIOS.items():
        chosen = {n: how for n, how in scenarios.items() if not again or {part, n} & {*again}}
        with tempfile.TemporaryDirectory() as folder:
            found = {name: play(Path(folder, name), **how) for name, how in chosen.items()}
            text = json.dumps(found, ensure_ascii=False).replace(f"{folder}/", "")
        result[part] = result.get(part, {}) | json.loads(cleaner()(text))
        print(f"{part}: {', '.join(chosen)} recorded", flush=True)
    train = result["train"]
    train["same_state_dict_as_two_ranks_on_one_host"] = train["two_hosts"]["same_state_dict"]
    if not again or "link" in again:
        result["link"] = record_links()
    write_text(json.dumps(result, indent=1, ensure_ascii=False) + "\n", file)


if __name__ == "__main__":
    measure() if "RANK" in os.environ else main(*sys.argv[1:])
