"""What a run takes hold of: directories, their lock, the store's port, the board's memory."""

from __future__ import annotations

import os
import signal
import socket
from pathlib import Path

import pytest

from ddp_runner.core.board import Cell
from ddp_runner.core.faults import BadInputError
from ddp_runner.core.settings import CheckpointSettings, RunSettings, Settings
from ddp_runner.supervisor.claim import (
    BoardMemory,
    DirectoryLock,
    bind_store_port,
    claim_directories,
)
from tests.processes import ranks, run_ranks


def settings(folder):
    return Settings(
        run=RunSettings(log_dir=str(folder / "logs"), checkpoint_dir=str(folder / "deep" / "er")),
        checkpoint=CheckpointSettings(),
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
        holder.connection.poll(10)
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


def test_claiming_makes_both_directories_and_locks_one(tmp_path):
    """With parents; a second claim on the same checkpoints is refused while the first one lives."""
    first = DirectoryLock(tmp_path / "deep" / "er")
    claim_directories(settings(tmp_path), first)
    assert (tmp_path / "logs").is_dir()
    with pytest.raises(BadInputError, match="another run"):
        claim_directories(settings(tmp_path), DirectoryLock(tmp_path / "deep" / "er"))
    first.release()


@pytest.mark.parametrize(("name", "option"), [("logs", "--log-dir"), ("deep", "--checkpoint-dir")])
def test_a_file_where_a_directory_is_meant_is_refused(tmp_path, name, option):
    """The message names the option and what the system said."""
    (tmp_path / name).write_text("a file")
    with pytest.raises(BadInputError, match=option):
        claim_directories(settings(tmp_path), DirectoryLock(tmp_path / "deep" / "er"))


def test_a_lock_that_is_a_directory_is_refused(tmp_path):
    """Whatever stands in the way, it is an error of the option, not a traceback."""
    (tmp_path / "deep" / "er" / ".lock").mkdir(parents=True)
    with pytest.raises(BadInputError, match="--checkpoint-dir"):
        claim_directories(settings(tmp_path), DirectoryLock(tmp_path / "deep" / "er"))


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
