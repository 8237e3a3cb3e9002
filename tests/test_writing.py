"""A file is written whole or not at all and keeps its permissions; nothing else is replaced."""

import os
import socket
import stat
from pathlib import Path
from unittest import mock

import pytest
import torch

from torchclinic.writing import LEFTOVER, LOCK, atomic_file, sole_use


def test_a_block_that_fails_leaves_the_old_file_and_nothing_else(tmp_path):
    path = tmp_path / "model.pt"
    path.write_text("old")

    def fail(kind):
        with atomic_file(path) as temporary:
            assert (temporary.parent, temporary.suffix) == (tmp_path, LEFTOVER)
            temporary.write_text("half of the new")
            raise kind

    for kind in (ValueError, KeyboardInterrupt):
        with pytest.raises(kind):
            fail(kind)
        assert (path.read_text(), os.listdir(tmp_path)) == ("old", ["model.pt"])


class Ending:
    """A file whose fifth write raises an error."""

    def __init__(self, file, error):
        self.file, self.writes = file, iter([False] * 4 + [error])

    def write(self, part):
        if error := next(self.writes):
            raise error
        return self.file.write(part)


@pytest.mark.parametrize("error", [KeyboardInterrupt(), SystemExit(143), OSError("disk full")])
def test_what_ends_torch_save_is_told_and_not_that_a_position_was_unexpected(tmp_path, error):
    def save():
        with atomic_file(tmp_path / "model.pt") as temporary, temporary.open("wb") as file:
            torch.save({"weight": torch.zeros(100_000)}, Ending(file, error))

    with pytest.raises(type(error)) as raised:
        save()
    assert raised.value is error
    assert os.listdir(tmp_path) == []


def test_contents_reach_the_disk_before_the_name_and_the_name_before_the_end(tmp_path, monkeypatch):
    calls, fsync, replace = [], os.fsync, os.replace

    def noted_fsync(descriptor):
        kind = "folder" if stat.S_ISDIR(os.fstat(descriptor).st_mode) else "file"
        calls.append(f"fsync {kind} of {os.fstat(descriptor).st_size if kind == 'file' else ''}")
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", noted_fsync)
    monkeypatch.setattr(os, "replace", lambda *args: (calls.append("replace"), replace(*args)))
    with atomic_file(tmp_path / f"{'né' * 80}.txt") as temporary:  # of 244 bytes
        temporary.write_text("all of it")
    assert calls == ["fsync file of 9", "replace", "fsync folder of "]


def test_a_link_is_written_through_and_rights_stay_as_they_were(tmp_path):
    path, link = tmp_path / "model.pt", tmp_path / "latest.pt"
    link.symlink_to(path)
    path.touch()
    for mode in (path.stat().st_mode, 0o600, 0o640, 0o400):
        path.chmod(mode)
        with atomic_file(link) as temporary:
            during = stat.S_IMODE(temporary.stat().st_mode)
            temporary.write_text("new")
        assert during & ~mode in (0, stat.S_IWUSR)
        assert stat.S_IMODE(path.stat().st_mode) == stat.S_IMODE(mode)
        assert (link.is_symlink(), path.read_text()) == (True, "new")
    (tmp_path / "other").touch()
    with atomic_file(tmp_path / "one") as temporary:
        temporary.touch()
    assert (tmp_path / "one").stat().st_mode == (tmp_path / "other").stat().st_mode


def test_what_is_no_regular_file_is_refused_and_stays(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # a socket's path may have 107 characters
    os.mkdir("folder")
    os.mkfifo("pipe")
    Path("itself").symlink_to("itself")
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind("socket")
    Path("link").symlink_to("pipe")
    names = {name: name for name in ("folder", "pipe", "itself", "socket")} | {"link": "pipe"}
    cases = {name: ("name a regular file", home) for name, home in names.items()}
    Path("there").touch()
    Path("by way of nowhere").symlink_to("no/../there")
    cases |= {"no/file": ("No such", "no/file"), "no/../new": ("No such", "new")}
    cases |= dict.fromkeys(("no/../there", "by way of nowhere"), ("No such", "there"))
    there = {path: path.lstat().st_ino for path in Path().iterdir()}
    for name, (message, home) in cases.items():
        with pytest.raises(OSError, match=message) as raised, atomic_file(name):
            pytest.fail("the block ran")
        assert raised.value.filename == str(tmp_path / home)
    assert {path: path.lstat().st_ino for path in Path().iterdir()} == there


def test_a_lock_that_another_run_removes_at_this_instant_is_no_file_of_the_users(tmp_path):
    lock, exists = tmp_path / LOCK, Path.exists

    def then_gone(path, **options):
        found = exists(path, **options)
        if path == lock:
            lock.unlink(missing_ok=True)
        return found

    lock.touch()
    with mock.patch.object(Path, "exists", then_gone), sole_use(tmp_path):
        assert os.listdir(tmp_path) == [LOCK]
