"""A file is written whole or not at all and keeps its permissions; nothing else is replaced."""

import os
import socket
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from torchclinic.writing import LEFTOVER, atomic_file


def test_a_block_that_fails_leaves_the_old_file_and_nothing_else(tmp_path):
    path = tmp_path / "model.pt"
    path.write_text("old")

    def fail(kind):
        with atomic_file(path) as temporary:
            assert temporary.parent == tmp_path
            temporary.write_text("half of the new")
            raise kind

    for kind in (ValueError, KeyboardInterrupt):
        with pytest.raises(kind):
            fail(kind)
        assert (path.read_text(), os.listdir(tmp_path)) == ("old", ["model.pt"])


def test_contents_reach_the_disk_before_the_name_and_the_name_before_the_end(tmp_path, monkeypatch):
    calls, fsync, replace = [], os.fsync, os.replace

    def noted_fsync(descriptor):
        kind = "folder" if stat.S_ISDIR(os.fstat(descriptor).st_mode) else "file"
        calls.append(f"fsync {kind} of {os.fstat(descriptor).st_size if kind == 'file' else ''}")
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", noted_fsync)
    monkeypatch.setattr(os, "replace", lambda *args: (calls.append("replace"), replace(*args)))
    with atomic_file(tmp_path / "new.txt") as temporary:
        temporary.write_text("all of it")
    assert calls == ["fsync file of 9", "replace", "fsync folder of "]


def test_a_link_is_written_through_and_a_private_file_stays_private(tmp_path):
    path, link = tmp_path / "model.pt", tmp_path / "latest.pt"
    path.write_text("old")
    path.chmod(0o600)
    link.symlink_to(path)
    with atomic_file(link) as temporary:
        temporary.write_text("new")
    assert link.is_symlink()
    assert path.read_text() == "new"
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_a_new_file_has_the_rights_of_any_other(tmp_path):
    with atomic_file(tmp_path / "one") as temporary:
        temporary.touch()
    (tmp_path / "other").touch()
    assert (tmp_path / "one").stat().st_mode == (tmp_path / "other").stat().st_mode


@pytest.mark.slow
def test_leftovers_of_the_dead_are_removed_but_not_files_of_the_living(tmp_path):
    script = (
        "import sys, time\n"
        "from torchclinic.writing import atomic_file\n"
        "with atomic_file(sys.argv[1]) as temporary:\n"
        "    temporary.write_text('half')\n"
        "    print(temporary, flush=True)\n"
        "    time.sleep(600)\n"
    )
    command = [sys.executable, "-c", script, tmp_path / "theirs"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as other:
        try:
            theirs = Path(other.stdout.readline().strip())
            assert (theirs.name[0], theirs.suffix) == (".", LEFTOVER)
            with atomic_file(tmp_path / "mine") as temporary:
                temporary.touch()
            assert sorted(os.listdir(tmp_path)) == [theirs.name, "mine"]
        finally:
            other.kill()
    with atomic_file(tmp_path / "mine") as temporary:
        temporary.touch()
    assert os.listdir(tmp_path) == ["mine"]


@pytest.mark.parametrize(
    ("name", "message"),
    [("no/folder/x.pt", r"Cannot write \(No such file"), (".", "this is a folder; name a file")],
)
def test_a_place_that_cannot_be_written_is_named(tmp_path, name, message):
    with pytest.raises(OSError, match=message) as raised, atomic_file(tmp_path / name):
        pytest.fail("the block ran")
    assert raised.value.filename == os.path.realpath(tmp_path / name)


@pytest.mark.parametrize("mode", [0o600, 0o640, 0o400])
def test_while_it_is_written_nobody_can_read_what_was_private(tmp_path, mode):
    path = tmp_path / "model.pt"
    path.write_text("old")
    path.chmod(mode)
    with atomic_file(path) as temporary:
        during = stat.S_IMODE(temporary.stat().st_mode)
        temporary.write_text("new")
    assert during & ~mode in (0, stat.S_IWUSR)
    assert stat.S_IMODE(path.stat().st_mode) == mode


def fifo(path):
    os.mkfifo(path)


def unix_socket(path):
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(str(path))


def null_device(path):
    try:
        os.mknod(path, stat.S_IFCHR | 0o600, os.makedev(1, 3))
    except PermissionError:
        pytest.skip("only root makes devices")


def link_to_itself(path):
    path.symlink_to(path)


@pytest.mark.parametrize("linked", [False, True])
@pytest.mark.parametrize("make", [fifo, unix_socket, null_device, link_to_itself])
def test_what_is_no_regular_file_is_refused_and_stays(tmp_path, monkeypatch, make, linked):
    monkeypatch.chdir(tmp_path)  # a socket's path may have 107 characters
    path = Path("target")
    make(path)
    before = path.lstat()
    if linked:
        Path("link").symlink_to(path)
    with (
        pytest.raises(OSError, match="regular file") as raised,
        atomic_file("link" if linked else path),
    ):
        pytest.fail("the block ran")
    assert raised.value.filename == str(tmp_path / "target")
    assert (path.lstat().st_mode, path.lstat().st_ino) == (before.st_mode, before.st_ino)
    assert sorted(os.listdir()) == (["link", "target"] if linked else ["target"])
