"""Write a file so that no crash, at any instant, costs the one that was there."""

from __future__ import annotations

import errno
import fcntl
import os
import secrets
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

LEFTOVER = ".torchclinic-tmp"  # how the name of a file that is being written ends


@contextmanager
def atomic_file(path: str | os.PathLike) -> Iterator[Path]:
    """Write all of `path` or nothing of it: the block writes to the path that this yields.

    When the block ends, the new file is on the disk and takes the old one's place in one step. If
    it raises, the process is killed or the power fails, `path` is as it was. What a killed process
    leaves behind is removed by the next writer to the same folder.

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
    path = Path(os.path.realpath(path))  # a link is written through, as open() would
    try:
        old_mode = _mode_of(path)
        _remove_leftovers(path.parent)
        # Nobody may read it while it is written who may not read the old file.
        temporary, lock = _new_temporary(path, 0o666 if old_mode is None else 0o600)
    except OSError as error:
        raise type(error)(error.errno, f"Cannot write ({error.strerror})", str(path)) from None
    try:
        yield temporary
        if old_mode is not None:
            temporary.chmod(old_mode)
        _sync(temporary)  # contents before name: else the name may be there without them
        os.replace(temporary, path)
    except BaseException as error:
        temporary.unlink(missing_ok=True)
        system_error = error.__context__
        if isinstance(system_error, OSError) and "unexpected pos" in str(error):
            raise system_error from None  # torch.save says only "unexpected pos 9728 vs 9680"
        raise
    finally:
        os.close(lock)
    _sync(path.parent)


def _mode_of(path: Path) -> int | None:
    """The file's permissions; None if there is no file.

    A device or a FIFO is refused: it would be replaced, not written to.
    """
    if not os.path.lexists(path):
        return None
    mode = path.lstat().st_mode
    if stat.S_ISDIR(mode):
        raise IsADirectoryError(errno.EISDIR, "this is a folder; name a file in it")
    if not stat.S_ISREG(mode):
        raise OSError(errno.EINVAL, "this is a device, a FIFO or the like; name a regular file")
    return stat.S_IMODE(mode)


def _new_temporary(path: Path, mode: int) -> tuple[Path, int]:
    """A new empty file beside `path`, and the open descriptor that holds its lock.

    The system lets go of the lock when the process dies, however it dies. A process id in the
    name would mean nothing to another container or machine.
    """
    while True:
        temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}{LEFTOVER}")
        lock = os.open(temporary, os.O_RDWR | os.O_CREAT | os.O_EXCL, mode)
        with suppress(OSError):  # some network file systems have no locks
            fcntl.flock(lock, fcntl.LOCK_EX)
        if temporary.exists():  # else another writer cleaned it up before it was locked
            return temporary, lock
        os.close(lock)


def _remove_leftovers(folder: Path) -> None:
    """Remove unfinished files of writers that no longer live."""
    for path in folder.glob(f".*{LEFTOVER}"):
        with suppress(OSError):  # its writer lives, or another one was faster
            descriptor = os.open(path, os.O_RDWR)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                path.unlink()
            finally:
                os.close(descriptor)


def _sync(path: Path) -> None:
    """Wait until the file, or the folder's list of names, is on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno != errno.EINVAL:  # the file system cannot (some cannot for folders)
            raise
    finally:
        os.close(descriptor)
