"""Write a file so that no crash, at any instant, costs the one that was there."""

import errno
import os
import re
import secrets
import socket
import stat
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO

with suppress(ImportError):  # Windows has none
    import fcntl

LEFTOVER = ".torchclinic-tmp"  # how the name of a file that is being written ends
LOCK = ".run.lock"  # the file that says which run is writing to its folder; rungs/gpt.py has it too
HOLDER = re.compile(r"process \d+ on \S+, since [\d-]+ [\d:]+")  # all that is in it


@contextmanager
def atomic_file(path: str | os.PathLike) -> Iterator[Path]:
    """Write all of `path` or nothing of it: the block writes to the path that this yields.

    When the block ends, the new file is on the disk and takes the old one's place in one step. If
    it raises, the process is killed or the power fails, `path` is as it was. What a killed process
    leaves beside it ends in ``.torchclinic-tmp`` and can be deleted.

    Raises
    ------
    OSError
        If the folder is missing or cannot be written, or `path` is there and is no regular file.

    Examples
    --------
    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     with atomic_file(f"{folder}/notes.txt") as temporary:
    ...         _ = temporary.write_text("all of it")
    ...     print(os.listdir(folder))
    ['notes.txt']
    """
    given, path = path, Path(os.path.realpath(path))  # a link is written through, as open() would
    # Of a long name only the beginning: with more, no file system would take it.
    temporary = path.with_name(f".{path.name[:50]}.{secrets.token_hex(4)}{LEFTOVER}")
    try:
        old_mode = _mode_of(path)
        # To realpath, nosuch/../x is x: open() refuses that name.
        os.stat(os.path.dirname(given) or "." if old_mode is None else given)
        # Nobody may read it while it is written who may not read the old file.
        mode = 0o666 if old_mode is None else 0o600
        os.close(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode))
    except OSError as error:
        raise type(error)(error.errno, f"Cannot write ({error.strerror})", str(path)) from None
    try:
        yield temporary
        with open(temporary, "rb+") as file:
            if old_mode is not None:
                temporary.chmod(old_mode)
            os.fsync(file.fileno())  # contents before name: else the name may be there without them
        os.replace(temporary, path)
    except BaseException as error:
        temporary.unlink(missing_ok=True)
        first = error.__context__
        if "unexpected pos" in str(error) and first and not isinstance(first, RuntimeError):
            raise first from None  # torch.save says only "unexpected pos 9728 vs 9680"
        raise
    if os.name != "nt":  # where folders cannot be opened
        _sync(path.parent)


@contextmanager
def sole_use(folder: str | os.PathLike) -> Iterator[None]:
    """Keep other runs from `folder` while the block runs, by a lock that dies with this process.

    It is the system's (``flock``) on ``folder/.run.lock``, which names the holder. On Windows, and
    on file systems without such locks, nobody is kept from anything.

    Raises
    ------
    BlockingIOError
        If another run holds it: the message says which process on which host, and since when.
    OSError
        If a link, a pipe or a file of somebody's own has the lock's name.
    """
    path = Path(folder, LOCK)
    lock = _locked(path)
    _held.append(lock)
    holder = f"process {os.getpid()} on {socket.gethostname()}, {time.strftime('since %F %T')}"
    try:
        try:
            os.write(lock.fileno(), holder.encode())
        except OSError as error:  # which names no file
            raise type(error)(error.errno, error.strerror, str(path)) from None
        yield
    finally:
        if lock in _held:  # not in a fork
            path.unlink(missing_ok=True)
            _let_go(lock)


_held: list[IO[str]] = []  # files whose lock this process has


def _let_go(*locks: IO[str]) -> None:
    for lock in locks or _held.copy():
        _held.remove(lock)
        lock.close()


# A data loader's worker outlives a killed run by seconds: the lock is not the worker's.
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_let_go)


def _locked(path: Path) -> IO[str]:
    not_ours = OSError(errno.EEXIST, "it is no lock of a run; move it away", str(path))
    while True:
        with suppress(FileNotFoundError):  # one look: another run may remove it at any instant
            if not stat.S_ISREG(path.lstat().st_mode):
                raise not_ours
        # For writing, as NFS wants it; closed with the lock.
        lock = open(path, "a+", encoding="utf-8", errors="replace")  # noqa: SIM115
        lock.seek(0)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            holder = HOLDER.fullmatch(lock.read(200))
            what = f"another run is writing there ({holder[0] if holder else 'it has just begun'})"
            lock.close()
            advice = "name another folder, or end that run first"
            raise BlockingIOError(error.errno, f"{what}: {advice}", str(path.parent)) from None
        except (NameError, OSError):  # Windows; a file system without locks
            pass
        text = lock.read(200)
        if text and not HOLDER.fullmatch(text):
            lock.close()
            raise not_ours
        with suppress(FileNotFoundError):  # who had it removes it before letting go
            if os.path.samestat(os.fstat(lock.fileno()), os.stat(path)):
                lock.truncate(0)
                return lock
        lock.close()


def _mode_of(path: Path) -> int | None:
    """The file's permissions; None if there is no file."""
    if not os.path.lexists(path):
        return None
    mode = path.lstat().st_mode
    if not stat.S_ISREG(mode):  # it would be replaced, not written to
        raise OSError(errno.EINVAL, "this is a folder, a device or the like; name a regular file")
    return stat.S_IMODE(mode)


def _sync(folder: Path) -> None:
    """Wait until the folder's list of names is on the disk."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno != errno.EINVAL:  # the file system cannot
            raise
    finally:
        os.close(descriptor)
