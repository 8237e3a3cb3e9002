"""Two hosts on one Linux machine, to try what training does across hosts and when one is lost.

A network namespace each, joined by a link of their own, with an address, a host name and a hosts
file. There is no route out. Needs root, ``ip`` and, for a slower link, ``tc``; for one with a
delay, a kernel with ``netem``.

>>> with two_hosts() as (first, second):                                       # doctest: +SKIP
...     jobs = [host.start([*torchrun(host), "rungs/4_ddp.py"]) for host in (first, second)]
...     second.kill()
...     print(jobs[0].wait(timeout=60), jobs[0].text)
"""

import contextlib
import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

NAMES = ("host1", "host2")
ADDRESSES = ("10.231.7.1", "10.231.7.2")
PREFIX = "torchladder-"  # of the namespaces; then the id of the process that made them
DEVICE = "eth0"  # what the network interface is called on both hosts
PORT = 29500
# In the mount and host name spaces of one command only.
ENTER = 'hostname "$0" && mount --bind "$1" /etc/hosts && shift && exec "$@"'


class Job:
    """A command that runs on a host; every line that it prints is kept with its time."""

    def __init__(self, command: Sequence[str], inside: Sequence[str], **options):
        self.lines: list[tuple[float, str]] = []
        self.ended: float | None = None  # when its output was closed
        self.process = subprocess.Popen(
            [*inside, *command], **options, text=True, errors="replace", stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        )  # fmt: skip
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None  # it is a pipe
        with self.process.stdout as stream:
            for line in stream:
                self.lines.append((time.time(), line.rstrip("\n")))
        self.ended = time.time()

    @property
    def text(self) -> str:
        return "".join(f"{line}\n" for _, line in self.lines)

    def wait(self, timeout: float) -> int:
        """The exit status; negative if a signal ended the command."""
        status = self.process.wait(timeout)
        self._reader.join(timeout)
        return status

    def until(self, pattern: str, timeout: float) -> None:
        """Wait for a line with `pattern`."""
        end = time.time() + timeout
        while time.time() < end:
            over = self.process.poll() is not None and not self._reader.is_alive()
            if re.search(pattern, self.text):
                return
            if over:
                break
            time.sleep(0.02)
        raise TimeoutError(f"no line with {pattern!r} in {timeout} s; there are:\n{self.text}")


class Host:
    """One of the two; `two_hosts` makes them."""

    def __init__(self, number: int, hosts_file: Path):
        self.name, self.address = NAMES[number], ADDRESSES[number]
        self.namespace = f"{PREFIX}{os.getpid()}-{self.name}"
        self.hosts_file = hosts_file

    def start(self, command: Sequence, *, env: dict | None = None, cwd: Path | None = None) -> Job:
        """Start a command here, with this host's name and network, and do not wait for it."""
        inside = ["ip", "netns", "exec", self.namespace, "unshare", "--uts"]
        inside += ["sh", "-c", ENTER, self.name, str(self.hosts_file)]
        env = os.environ | {"OMP_NUM_THREADS": "1", "TQDM_DISABLE": "1"} | (env or {})
        return Job([str(word) for word in command], inside, env=env, cwd=cwd)

    def kill(self) -> None:
        """End every process on this host at once, as a power cut would."""
        _kill(self.namespace)

    def cut(self) -> None:
        """Take the link down; processes go on and hear nothing."""
        self.ip("link", "set", DEVICE, "down")

    def join(self) -> None:
        """Bring the link up again."""
        self.ip("link", "set", DEVICE, "up")

    def ip(self, *words: str) -> str:
        """``ip``, of this host's network."""
        return _out("ip", "-n", self.namespace, *words)


def torchrun(host: Host, *options: str) -> list[str]:
    """The start of a torchrun command for this host; `options` replace these or follow them."""
    usual = ["--nnodes=2", "--nproc-per-node=1", "--rdzv-backend=c10d", "--rdzv-id=ladder"]
    usual += [f"--rdzv-endpoint={NAMES[0]}:{PORT}"]
    if "--rdzv-backend=static" in options:  # where hosts do not agree on their ranks
        usual.append(f"--node-rank={NAMES.index(host.name)}")
    kept = [] if "--standalone" in options else usual
    return [sys.executable, "-m", "torch.distributed.run", *kept, *options]


@contextlib.contextmanager
def two_hosts(
    *, rate: str | None = None, delay: float = 0.0, own_address: str | None = None
) -> Iterator[tuple[Host, Host]]:
    """Make two hosts, and remove them and all that runs on them in the end.

    Parameters
    ----------
    rate : str, optional
        What the link carries in each direction, as ``tc`` writes it: ``1gbit``, ``100mbit``.
    delay : float
        Seconds that each packet takes from one host to the other.
    own_address : str, optional
        What each host's own name stands for in its hosts file, in place of its address on the
        link. Debian writes ``127.0.1.1``.

    Raises
    ------
    PermissionError
        Not root, or a machine that does not allow network namespaces.
    """
    with tempfile.TemporaryDirectory(prefix=PREFIX) as folder, contextlib.ExitStack() as stack:
        hosts = Host(0, Path(folder, NAMES[0])), Host(1, Path(folder, NAMES[1]))
        for host in hosts:
            own = {host.name: own_address or host.address}
            known = dict(zip(NAMES, ADDRESSES, strict=True)) | own | {"localhost": "127.0.0.1"}
            host.hosts_file.write_text("".join(f"{at} {name}\n" for name, at in known.items()))
            stack.callback(_remove, host.namespace)
            _out("ip", "netns", "add", host.namespace)
            host.ip("link", "set", "lo", "up")
        ends = [["name", DEVICE, "netns", host.namespace] for host in hosts]
        _out("ip", "link", "add", *ends[0], "type", "veth", "peer", *ends[1])
        for host, other in zip(hosts, reversed(hosts), strict=True):
            host.ip("address", "add", host.address, "peer", other.address, "dev", DEVICE)
            host.join()
            # A small bucket: what fits into it is sent at full speed.
            limits = [f"root handle 1: tbf rate {rate} burst 20kb limit 8mb"] * bool(rate)
            if delay:
                limits.append(
                    f"{'parent 1:1' if rate else 'root'} netem delay {delay}s limit 10000"
                )
            for limit in limits:
                _out("tc", "-n", host.namespace, *f"qdisc replace dev {DEVICE} {limit}".split())
        yield hosts


def possible() -> bool:
    """Whether this process may make network namespaces."""
    try:
        with two_hosts():
            return True
    except OSError:  # not root, or there is no ``ip``
        return False


def namespaces() -> list[str]:
    """The names of all network namespaces."""
    return [line.split()[0] for line in _out("ip", "netns", "list").splitlines() if line.strip()]


def _kill(namespace: str) -> None:
    for _ in range(500):  # what is started meanwhile is ended, too
        pids = _out("ip", "netns", "pids", namespace).split()
        if not pids:
            return
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(int(pid), signal.SIGKILL)
        time.sleep(0.02)
    raise TimeoutError(f"processes {', '.join(pids)} in {namespace} do not end")


def _remove(namespace: str) -> None:
    if namespace in namespaces():  # else it could not be made
        _kill(namespace)
        _out("ip", "netns", "delete", namespace)


def _out(*command: str) -> str:
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        why = f"{' '.join(command)}: {done.stderr.strip()}"
        refused = "not permitted" in why or "Permission denied" in why
        raise PermissionError(why) if refused else OSError(why)
    return done.stdout
