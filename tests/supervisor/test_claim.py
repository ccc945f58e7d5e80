"""What a run takes hold of: directories, their lock, the store's port, the board's memory."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
from pathlib import Path

import psutil
import pytest

from ddp_runner.core.board import Cell
from ddp_runner.core.faults import BadInputError
from ddp_runner.core.settings import RunSettings
from ddp_runner.directories import DirectoryLock, RunDirectories
from ddp_runner.supervisor.claim import BoardMemory, bind_store_port
from tests.disks import small_disk
from tests.processes import poll, ranks, run_ranks


def directories(folder, *, log_dir="logs", checkpoint_dir="deep/er"):
    return RunDirectories(
        RunSettings(log_dir=str(folder / log_dir), checkpoint_dir=str(folder / checkpoint_dir))
    )


def _hold(me, folder):
    lock = DirectoryLock(folder)
    lock.acquire()
    me.say(os.getpid())
    if me.hear() == "release":
        lock.release()
    me.say("done")
    me.hear()


def test_a_directory_in_use_is_refused_with_its_holder(tmp_path):
    """The message names option, directory and the holder's pid; letting go frees it."""
    with ranks(_hold, 1, tmp_path) as (holder,):
        pid = holder.hear()
        for attempt in (DirectoryLock(tmp_path).refuse_if_held, DirectoryLock(tmp_path).acquire):
            with pytest.raises(BadInputError, match=rf"--checkpoint-dir=.*pid {pid}\b") as caught:
                attempt()
            assert str(tmp_path) in str(caught.value)
        holder.say("release")
        holder.hear()
        lock = DirectoryLock(tmp_path)
        lock.acquire()
        lock.release()


def test_a_killed_holder_leaves_no_lock(tmp_path):
    """The kernel drops it: nothing stale, no file to delete by hand."""
    with ranks(_hold, 1, tmp_path) as (holder,):
        holder.hear()
        holder.signal(signal.SIGKILL)
        # Its end, not that of its line to us: the kernel closes one file after the other.
        poll(lambda: psutil.Process(holder.pid).status() == psutil.STATUS_ZOMBIE, what="its end")
        DirectoryLock(tmp_path).refuse_if_held()
        lock = DirectoryLock(tmp_path)
        lock.acquire()
        assert (tmp_path / ".lock").read_text() == f"{os.getpid()}\n"
        lock.release()


def test_looking_whether_it_is_held_creates_nothing(tmp_path):
    """Not even in a directory that does not exist yet."""
    DirectoryLock(tmp_path).refuse_if_held()
    DirectoryLock(tmp_path / "none").refuse_if_held()
    assert list(tmp_path.iterdir()) == []


def test_looking_does_not_hold(tmp_path):
    """Control: two may look, and one may still acquire."""
    first, second = DirectoryLock(tmp_path), DirectoryLock(tmp_path)
    first.acquire()
    first.release()
    first.refuse_if_held()
    second.refuse_if_held()
    second.acquire()
    second.release()


def test_releasing_twice_is_harmless(tmp_path):
    """An ending may come by two ways."""
    lock = DirectoryLock(tmp_path)
    lock.acquire()
    lock.release()
    lock.release()


@pytest.mark.parametrize("shared", ["log_dir", "checkpoint_dir"])
def test_claiming_makes_both_directories_and_locks_each(tmp_path, shared):
    """With parents; a second run on one of them is refused while the first one lives, and told which."""
    first = directories(tmp_path)
    first.claim()
    assert (tmp_path / "logs").is_dir()
    assert (tmp_path / "deep" / "er").is_dir()
    other = {"log_dir": "other", "checkpoint_dir": "other"}
    del other[shared]
    option = "--" + shared.replace("_", "-")
    for attempt in (
        directories(tmp_path, **other).refuse_if_held,
        directories(tmp_path, **other).claim,
    ):
        with pytest.raises(BadInputError, match=rf"{option}=.*another run \(pid {os.getpid()}\)"):
            attempt()
    first.release()
    second = directories(tmp_path, **other)
    second.claim()
    second.release()


def test_one_directory_may_be_for_both(tmp_path):
    """Control: a run is not in its own way, and two runs in directories of their own are not either."""
    runs = [directories(tmp_path, log_dir=name, checkpoint_dir=name) for name in ("one", "two")]
    for run in runs:
        run.refuse_if_held()
        run.claim()
    for run in runs:
        run.release()


@pytest.mark.parametrize(("name", "option"), [("logs", "--log-dir"), ("deep", "--checkpoint-dir")])
def test_a_file_where_a_directory_is_meant_is_refused(tmp_path, name, option):
    """The message names the option and what the system said."""
    (tmp_path / name).write_text("a file")
    with pytest.raises(BadInputError, match=option):
        directories(tmp_path).claim()


def test_a_lock_that_is_a_directory_is_refused(tmp_path):
    """Whatever stands in the way, it is an error of the option, not a traceback."""
    (tmp_path / "deep" / "er" / ".lock").mkdir(parents=True)
    with pytest.raises(BadInputError, match="--checkpoint-dir"):
        directories(tmp_path).claim()


def test_logs_that_cannot_be_locked_are_no_reason_not_to_train(tmp_path):
    """Such a disk takes no lines either; the checkpoints are locked all the same."""
    (tmp_path / "logs" / ".logs.lock").mkdir(parents=True)
    first = directories(tmp_path)
    first.refuse_if_held()
    first.claim()
    with pytest.raises(BadInputError, match=r"--checkpoint-dir=.*another run"):
        directories(tmp_path).claim()
    first.release()


def test_logs_on_a_full_disk_are_no_reason_not_to_train(tmp_path):
    """What has no room is the name of who holds it."""
    with small_disk(tmp_path / "logs", size_kb=64):
        with contextlib.suppress(OSError), (tmp_path / "logs" / "filler").open("wb", 0) as filler:
            while filler.write(b"x" * 4096):
                pass
        first = directories(tmp_path)
        first.claim()
        first.release()


def test_port_0_takes_a_free_one_on_loopback_only():
    """Two runs on one machine never meet, and nobody outside can connect."""
    with bind_store_port(0) as first, bind_store_port(0) as second:
        assert first.getsockname()[0] == second.getsockname()[0] == "127.0.0.1"
        assert first.getsockname()[1] != second.getsockname()[1]
        socket.create_connection(first.getsockname(), timeout=5).close()


def test_a_port_that_is_taken_is_refused():
    """With the option, the number, and what would be right."""
    with bind_store_port(0) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(BadInputError, match=rf"ddp.port={port}: .*0 takes any free one"):
            bind_store_port(port)


def test_a_port_is_free_again_right_after_its_run():
    """Connections of the run before, waiting for their end, do not block it."""
    with bind_store_port(0) as listening:
        port = listening.getsockname()[1]
        client = socket.create_connection(("127.0.0.1", port), timeout=5)
        server, _ = listening.accept()
        server.close()
        client.close()
    with bind_store_port(port) as again:
        assert again.getsockname()[1] == port


def _stamp_from_another_process(me):
    memory = BoardMemory(2)
    child = os.fork()
    if child == 0:
        import mmap

        from ddp_runner.core.board import Board

        theirs = Board(memoryview(mmap.mmap(memory.descriptor, 0)), 2)
        theirs.slot(1).set(Cell.COMMITTED_STEP, 42)
        os._exit(0)
    os.waitpid(child, 0)
    return memory.board.slot(0).read().committed_step, memory.board.slot(1).read().committed_step


def test_the_board_is_shared_with_whoever_has_its_descriptor():
    """A rank's store is the supervisor's load, and nobody else's slot changes."""
    assert run_ranks(_stamp_from_another_process, 1) == [(0, 42)]


def test_the_board_s_memory_has_no_name():
    """No file to leave behind; closed, its descriptor is gone."""
    memory = BoardMemory(1)
    target = str(Path(f"/proc/self/fd/{memory.descriptor}").readlink())
    assert target.endswith("(deleted)")
    assert not target.startswith("/dev/shm/")
    slot = memory.board.slot(0)
    slot.release()
    memory.close()
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(memory.descriptor)
