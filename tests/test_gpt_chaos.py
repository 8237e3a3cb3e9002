"""A hundred mishaps, one after the other: no run of `rungs/gpt.py` is lost, none is mixed."""

import contextlib
import json
import os
import random
import resource
import signal
import subprocess
import sys
import time
from functools import partial

import psutil
import pytest
from running import wait_until
from safetensors.torch import load_file
from test_gpt import PROGRAM, SMALL, tokens  # noqa: F401

ROUNDS = int(os.environ.get("ROUNDS", "100"))
OPTIONS = [*SMALL, "--steps", 400, "--save-every", 7, "--log-every", 20, "--dropout", 0.1]
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
MISHAPS = ["a rank", "all ranks", "torchrun", "SIGHUP", "SIGTERM", "SIGINT", "SIGINT twice"]
MISHAPS += ["full disk", "cut", "flipped", "missing", ".metadata"]


def start(out, data, rung, ranks, **how):
    command = [*TORCHRUN, f"--nproc-per-node={ranks}"] if rung != "none" else [sys.executable]
    command += [PROGRAM, "--out", out, "--data", data, "--parallel", rung, *OPTIONS]
    command += ["--export", out.with_suffix(".safetensors")]
    env = os.environ | {"OMP_NUM_THREADS": "1", "PET_RUN_PATH": "1", "PET_START_METHOD": "fork"}
    log = out.with_suffix(".log").open("w")
    how |= {"stdout": log, "stderr": log, "start_new_session": True, "env": env}
    return subprocess.Popen(list(map(str, command)), **how)


def strike(process, mishap, chance):
    """Let it happen; the processes that have to end."""
    everybody = [psutil.Process(process.pid)]
    everybody += everybody[0].children(recursive=True)
    number = getattr(signal, mishap.split()[0], signal.SIGKILL)
    if mishap.startswith("SIGINT"):
        for _ in range(1 + mishap.endswith("twice")):
            os.killpg(process.pid, signal.SIGINT)
            time.sleep(chance.uniform(0, 0.3))
    else:
        of = {"a rank": [chance.choice(everybody[1:] or everybody)], "all ranks": everybody[::-1]}
        for one in of.get(mishap, everybody[:1]):
            with contextlib.suppress(psutil.NoSuchProcess):
                one.send_signal(number)
    return everybody


def trains(process, out):
    return process.poll() is not None or "from step" in out.with_suffix(".log").read_text()


def damage(out, mishap, chance):
    """One file of the newest checkpoint, if there is an older one to go on from."""
    whole = sorted(file.parent for file in out.glob("step-????????/.metadata"))
    if len(whole) < 2:
        return False
    file = chance.choice(sorted(whole[-1].glob("*.distcp")))
    file = whole[-1] / ".metadata" if mishap == ".metadata" else file
    data = bytearray(file.read_bytes())
    if mishap == "missing":
        file.unlink()
    elif mishap == "flipped":
        at = chance.randrange(len(data))
        data[at : at + 400] = (byte ^ 255 for byte in data[at : at + 400])
        file.write_bytes(data)
    else:
        os.truncate(file, chance.randrange(len(data)))
    return True


@pytest.fixture(scope="module")
def unbroken(tokens, tmp_path_factory):  # noqa: F811
    def run(rung, ranks):
        if (rung, ranks) not in done:
            out = tmp_path_factory.mktemp("unbroken") / f"{rung}{ranks}"
            assert start(out, tokens, rung, ranks).wait(600) == 0
            done[rung, ranks] = out
        return done[rung, ranks]

    done = {}
    return run


@pytest.mark.long
@pytest.mark.parametrize(("rung", "ranks"), [("none", 1), ("ddp", 3), ("fsdp", 2), ("fsdp", 3)])
def test_no_run_is_lost_or_mixed(unbroken, tokens, tmp_path, rung, ranks):  # noqa: F811
    chance, left, told = random.Random(ranks), ROUNDS // 4, []
    signal.signal(signal.SIGHUP, signal.SIG_DFL)  # also if the tests were started by nohup
    for number in range(ROUNDS):
        out = tmp_path / str(number)
        while True:
            mishap = chance.choice(MISHAPS) if left > 0 else None
            how, damaged = {}, False
            if mishap == "full disk":
                size = chance.choice([100, 20_000, 60_000])
                how["preexec_fn"] = lambda n=size: resource.setrlimit(resource.RLIMIT_FSIZE, (n, n))
            elif mishap in MISHAPS[8:]:
                damaged = damage(out, mishap, chance)
            with start(out, tokens, rung, ranks, **how) as process:
                everybody = []
                if mishap in MISHAPS[:7]:
                    if chance.random() < 0.8:  # else while it starts
                        wait_until(partial(trains, process, out), limit=300)
                    time.sleep(chance.uniform(0, 3))
                    if process.poll() is None:
                        everybody = strike(process, mishap, chance)
                process.wait(600)
            wait_until(lambda those=everybody: not any(p.is_running() for p in those), limit=120)
            assert not any(one.is_running() for one in everybody), mishap
            left -= mishap is not None
            words = out.with_suffix(".log").read_text()
            told.append((mishap, damaged, process.returncode, words[-1500:]))
            assert not damaged or "is damaged (" in words or "flipped" in mishap, words
            if process.returncode == 0:
                break
            assert mishap is not None, words
        whole = unbroken(rung, ranks)
        one, other = (load_file(run.with_suffix(".safetensors")) for run in (whole, out))
        assert all(one[name].equal(other[name]) for name in one)
        rows = [list(map(json.loads, (o / "log.jsonl").open())) for o in (whole, out)]
        assert [row["step"] for row in rows[0]] == [row["step"] for row in rows[1]]
        losses = [[row["loss"] for row in one] for one in rows]
        assert losses[0] == losses[1]
        if left <= 0:
            break
    tmp_path.joinpath("told.json").write_text(json.dumps(told, indent=1))
    print(f"{len(told)} starts, {number + 1} runs")
