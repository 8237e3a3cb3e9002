"""Which tests a busy machine makes fail: ``make stress`` calls this.

Each round runs ``make notebooks package`` beside a process on every core that only computes, while
ranks are stopped for a moment now and then. In the end stands what fell, and how often.
"""

import random
import subprocess
import sys
import time
from collections import Counter
from contextlib import ExitStack, suppress
from pathlib import Path
from xml.etree import ElementTree

import psutil

ROOT = Path(__file__).resolve().parent.parent
COMMAND = ["make", "-k", "notebooks", "package"]
REPORTS = [ROOT / "_build" / "reports" / f"{part}.xml" for part in COMMAND[2:]]
BURNER = [sys.executable, "-c", "while True: pass"]


def is_rank(process: psutil.Process) -> bool:
    """By the variable of one that torchrun starts; those of `launch` are the fork server's."""
    above = process.parent()
    of_launch = above is not None and "forkserver" in " ".join(above.cmdline())
    return of_launch or "RANK" in process.environ()


def stop_one_rank(test: psutil.Process, seconds: float) -> None:
    """Stop one of the processes under `test` that is a rank, if there is one, for so long."""
    for process in random.sample(under := test.children(recursive=True), len(under)):
        with suppress(psutil.Error):  # it has ended meanwhile
            stopped = process.status() == psutil.STATUS_STOPPED  # by its test: it must stay so
            if is_rank(process) and not stopped:
                process.suspend()
                try:
                    time.sleep(seconds)
                finally:
                    process.resume()
                return


def one_round() -> list[str]:
    """The tests that failed, by their names; what ended without a report is one too."""
    for report in REPORTS:
        report.unlink(missing_ok=True)
    with ExitStack() as ended:
        for _ in range(psutil.cpu_count() or 1):
            burner = subprocess.Popen(BURNER)
            ended.callback(burner.wait)
            ended.callback(burner.kill)
        run = psutil.Popen(COMMAND, cwd=ROOT, stdout=subprocess.DEVNULL)
        while run.poll() is None:
            time.sleep(random.uniform(0, 4))
            with suppress(psutil.Error):
                stop_one_rank(run, random.uniform(0.1, 2))
    failed = [f"no {report.name}" for report in REPORTS if not report.exists()]
    for report in filter(Path.exists, REPORTS):
        for case in ElementTree.parse(report).iter("testcase"):
            if case.find("failure") is not None or case.find("error") is not None:
                failed.append(f"{case.get('classname')}::{case.get('name')}")
    return failed


def main(rounds: int = 5) -> None:
    fell = Counter()
    for number in range(1, rounds + 1):
        start = time.monotonic()
        fell.update(failed := one_round())
        minutes = (time.monotonic() - start) / 60
        print(f"round {number} of {rounds}: {len(failed)} fell, {minutes:.0f} minutes", flush=True)
    for name, count in fell.most_common():
        print(f"{count} of {rounds}: {name}")
    sys.exit(1 if fell else 0)


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
