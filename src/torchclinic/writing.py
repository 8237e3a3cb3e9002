"""Write a file so that no crash, at any instant, costs the one that was there."""

import errno
import os
import secrets
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

LEFTOVER = ".torchclinic-tmp"  # how the name of a file that is being written ends


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
    path = Path(os.path.realpath(path))  # a link is written through, as open() would
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}{LEFTOVER}")
    try:
        old_mode = _mode_of(path)
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
        system_error = error.__context__
        if isinstance(system_error, OSError) and "unexpected pos" in str(error):
            raise system_error from None  # torch.save says only "unexpected pos 9728 vs 9680"
        raise
    if os.name != "nt":  # where folders cannot be opened
        _sync(path.parent)


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
