"""Lives tied by the kernel: children end with their parent, and orphans come to who adopts them."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import psutil
import pytest

from ddp_runner.kernel.system import parent_death
from tests.processes import poll, ranks, run_ranks

pytestmark = pytest.mark.skipif(
    not hasattr(os, "memfd_create"), reason="the kernel's death signal is Linux's"
)


def is_gone(pid, *, created):
    """Whether the process that was ``pid`` has ended (a zombie has)."""
    try:
        process = psutil.Process(pid)
        return process.create_time() != created or process.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def _parent_of_some(me, ties):
    """Fork a child and a grandchild that sleep; the child holds no lock and runs no Python."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        if ties:
            parent_death.die_with_parent(os.getppid())
        own = os.getpid()
        if os.fork() == 0:
            if ties:
                parent_death.die_with_parent(own)
            os.write(writer, os.getpid().to_bytes(8, "little"))
        signal.pause()
    me.say([child, int.from_bytes(os.read(reader, 8), "little")])
    signal.pause()


def test_children_and_grandchildren_die_with_a_killed_parent():
    """Nobody has to notice anything: SIGKILL runs downhill."""
    with ranks(_parent_of_some, 1, True) as (parent,):
        pids = parent.hear()
        created = {pid: psutil.Process(pid).create_time() for pid in pids}
        parent.signal(signal.SIGKILL)
        poll(lambda: all(is_gone(pid, created=created[pid]) for pid in pids), what="the ends")


def _orphan_that_stays(me):
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        grandchild = os.fork()
        if grandchild == 0:
            signal.pause()
        os.write(writer, grandchild.to_bytes(8, "little"))
        os._exit(0)
    os.waitpid(child, 0)
    grandchild = int.from_bytes(os.read(reader, 8), "little")
    alive = Path(f"/proc/{grandchild}").exists()
    os.kill(grandchild, signal.SIGKILL)
    return alive


def test_a_child_that_was_not_tied_outlives_its_parent():
    """Control: it is the tie that ends it."""
    assert run_ranks(_orphan_that_stays, 1) == [True]


def _tie_to_a_dead_parent(me):
    """The child's parent ends before the child ties itself."""
    parent_death.adopt_orphans()
    reader, writer = os.pipe()
    middle = os.fork()
    if middle == 0:
        own = os.getpid()
        child = os.fork()
        if child == 0:
            while os.getppid() == own:
                time.sleep(0.001)
            parent_death.die_with_parent(own)
            os._exit(0)  # not reached
        os.write(writer, child.to_bytes(8, "little"))
        os._exit(0)
    os.waitpid(middle, 0)
    child = int.from_bytes(os.read(reader, 8), "little")
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def test_a_child_whose_parent_has_ended_already_ends_too():
    """A death signal set too late would never come."""
    assert run_ranks(_tie_to_a_dead_parent, 1) == [1]


def _adopt(me, adopts):
    if adopts:
        assert parent_death.adopt_orphans()
    reader, writer = os.pipe()
    middle = os.fork()
    if middle == 0:
        child = os.fork()
        if child == 0:
            os.read(reader, 1)
            os._exit(7)
        me.say(child)
        os._exit(0)
    os.waitpid(middle, 0)
    os.write(writer, b"x")
    try:
        return os.waitstatus_to_exitcode(os.waitpid(-1, 0)[1])
    except ChildProcessError:
        return None


@pytest.mark.parametrize(("adopts", "status"), [(True, 7), (False, None)])
def test_an_adopter_can_reap_its_orphaned_descendants(adopts, status):
    """With it their exit status reaches us; without, they are init's."""
    with ranks(_adopt, 1, adopts) as (adopter,):
        adopter.hear()
        assert adopter.result() == status


def _name(me, name):
    parent_death.set_process_name(name)
    return Path("/proc/self/comm").read_text(encoding="utf-8").strip()


@pytest.mark.parametrize(
    ("name", "shown"), [("ddp:rank7", "ddp:rank7"), ("ddp:" + "x" * 40, "ddp:" + "x" * 11)]
)
def test_a_process_is_named_for_ps(name, shown):
    """Fifteen bytes are kept."""
    assert run_ranks(_name, 1, name) == [shown]
