"""What stands in a run's folders under its names, and is none of its files, is refused and not touched."""

from __future__ import annotations

import os
import socket
import stat

import pytest

from ddp_runner.kernel.system import run_files
from ddp_runner.kernel.system.run_files import RefusedFileError

OPENERS = {
    "read": run_files.open_to_read,
    "append": run_files.open_to_append,
    "change": run_files.open_to_change,
    "lock": run_files.open_lock,
}
SECRET = b"12345\n"  # also a lock could have it


@pytest.fixture
def planted(tmp_path):
    """``planted(kind)``: something of that kind under a name of ours."""
    victim = tmp_path / "victim"
    victim.write_bytes(SECRET)
    made = []

    def plant(kind):
        path = tmp_path / "ours"
        if kind == "link":
            path.symlink_to(victim)
        elif kind == "dangling link":
            path.symlink_to(tmp_path / "not there")
        elif kind == "pipe":
            os.mkfifo(path)
        elif kind == "socket":
            made.append(socket.socket(socket.AF_UNIX))
            made[0].bind(str(path))
        elif kind == "folder":
            path.mkdir()
        else:
            path.symlink_to("/dev/full")
        return path

    yield plant
    assert victim.read_bytes() == SECRET
    assert not (tmp_path / "not there").exists()
    for one in made:
        one.close()


@pytest.mark.parametrize("opens", OPENERS)
@pytest.mark.parametrize(
    "kind", ["link", "dangling link", "link to a device", "pipe", "socket", "folder"]
)
def test_nothing_but_a_regular_file_is_opened(planted, opens, kind):
    """At once, with the reason; a pipe is not waited for, and nothing appears behind a link."""
    path = planted(kind)
    with pytest.raises(OSError, match=r"symbolic link|is not a regular file|Is a directory"):
        OPENERS[opens](path)


@pytest.mark.parametrize("kind", ["link", "pipe", "folder"])
def test_a_whole_read_refuses_the_same(planted, kind):
    """Of a small file, and line by line."""
    path = planted(kind)
    with pytest.raises(OSError):
        run_files.read_small(path)
    with pytest.raises(OSError):
        list(run_files.read_lines(path))


def test_a_path_that_the_user_named_may_be_a_link(planted):
    """Control: the user's own links lead somewhere; only what is not a regular file is refused."""
    descriptor = run_files.open_given(planted("link"))
    assert os.read(descriptor, 100) == SECRET
    os.close(descriptor)


def test_a_given_path_that_is_no_file_is_not_waited_for(planted):
    """A pipe has no size and may never end."""
    with pytest.raises(RefusedFileError, match="is not a regular file"):
        run_files.open_given(planted("pipe"))


def test_a_regular_file_is_read_appended_to_and_changed(tmp_path):
    """Control: the files of a run are opened as they always were."""
    path = tmp_path / "ours"
    descriptor = run_files.open_to_append(path)
    os.write(descriptor, b"one\n")
    assert os.get_blocking(descriptor)
    os.close(descriptor)
    descriptor = run_files.open_to_append(path)
    os.write(descriptor, b"two\n")
    os.close(descriptor)
    assert run_files.read_small(path) == b"one\ntwo\n"
    assert list(run_files.read_lines(path)) == [b"one\n", b"two\n"]
    descriptor = run_files.open_to_change(path)
    os.ftruncate(descriptor, 4)
    os.close(descriptor)
    assert path.read_bytes() == b"one\n"


def test_a_file_that_is_far_too_large_is_not_read(tmp_path):
    """The bound is exact; a sparse file of a terabyte costs nothing."""
    path = tmp_path / "ours"
    path.write_bytes(b"x" * 10)
    assert run_files.read_small(path, bytes_max=10) == b"x" * 10
    with pytest.raises(OSError, match="is larger than 9 bytes"):
        run_files.read_small(path, bytes_max=9)
    os.truncate(path, 1 << 40)
    with pytest.raises(OSError, match="is larger than"):
        run_files.read_small(path)


def test_a_new_file_must_be_new(tmp_path):
    """Neither a file nor a dangling link is written through."""
    (tmp_path / "there").write_text("kept")
    (tmp_path / "link").symlink_to(tmp_path / "elsewhere")
    for name in ("there", "link"):
        with pytest.raises(FileExistsError):
            run_files.open_new(tmp_path / name)
    assert not (tmp_path / "elsewhere").exists()


def test_a_lock_is_for_its_user_alone(tmp_path):
    """Who may open it may hold it: also where an earlier version made it for everybody to read."""
    path = tmp_path / ".lock"
    path.write_bytes(SECRET)
    path.chmod(0o644)
    os.close(run_files.open_lock(path))
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_what_is_no_lock_is_not_emptied_as_one(tmp_path):
    """A second name of somebody's file looks like a regular file; its content does not."""
    precious = tmp_path / "precious"
    precious.write_text("3 years of work\n")
    (tmp_path / ".lock").hardlink_to(precious)
    with pytest.raises(RefusedFileError, match="is no lock file"):
        run_files.open_lock(tmp_path / ".lock")
    assert precious.read_text() == "3 years of work\n"


def test_a_file_is_replaced_through_a_name_that_nobody_foresees(tmp_path, monkeypatch):
    """Two writes in a row never use the same temporary name, and a link at the target is replaced."""
    victim = tmp_path / "victim"
    victim.write_bytes(SECRET)
    path = tmp_path / "status.json"
    path.symlink_to(victim)
    names = []
    opens = run_files.open_new
    monkeypatch.setattr(run_files, "open_new", lambda at: (names.append(at.name), opens(at))[1])
    run_files.replace_file(path, b"1")
    run_files.replace_file_synced(path, b"2")
    assert path.read_bytes() == b"2"
    assert not path.is_symlink()
    assert victim.read_bytes() == SECRET
    assert len(set(names)) == 2
    assert sorted(one.name for one in tmp_path.iterdir()) == ["status.json", "victim"]
