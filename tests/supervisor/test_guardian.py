"""Whom the guardian takes for its run's: real processes, distinguished by their environment and session."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from ddp_runner.kernel.processes import guardian_process
from ddp_runner.kernel.processes.guardian import Guardian
from ddp_runner.kernel.processes.guardian_process import belongs, end
from ddp_runner.kernel.system import parent_death

NAME = "A_MARK_OF_THIS_TEST"
MARK = f"{NAME}=right"


@contextlib.contextmanager
def sleeper(*, mark="", new_session=False):
    """A process that says when it has begun, and sleeps."""
    process = subprocess.Popen(
        [sys.executable, "-S", "-c", "print(1, flush=True); import time; time.sleep(600)"],
        env={NAME: mark} if mark else {},
        stdout=subprocess.PIPE,
        start_new_session=new_session,
    )
    try:
        assert process.stdout.readline() == b"1\n"
        yield process
    finally:
        process.kill()
        process.communicate()


@pytest.mark.parametrize("mark", ["right", "outer,right", "right,right.123"])
def test_who_carries_the_mark_is_ended(mark):
    """Also in a run inside another one's rank, and behind a rank's own mark."""
    with sleeper(mark=mark, new_session=True) as process:
        assert end(process.pid, MARK, ())
        assert process.wait(60) == -signal.SIGKILL
        assert not end(process.pid, MARK, ()), "it has ended"


@pytest.mark.parametrize("mark", ["", "wrong", "right.123", "righ", "wrong,rightly"])
def test_who_carries_another_mark_or_none_is_left_alone(mark):
    """A mark counts as a whole."""
    with sleeper(mark=mark, new_session=True) as process:
        assert not end(process.pid, MARK, (1, os.getsid(0)))
        assert process.poll() is None


def test_who_is_in_the_session_of_a_rank_is_ended():
    """Whatever its environment."""
    with sleeper(new_session=True) as process:
        assert belongs(process.pid, MARK, {process.pid})
        assert end(process.pid, MARK, {process.pid})
        assert process.wait(60) == -signal.SIGKILL


TOKEN = "0123456789abcdef"
HAS_A_SOCKET = """
import signal
from multiprocessing.connection import Listener
from ddp_runner.kernel.system import parent_death
parent_death.mark_own_children()
with Listener(family="AF_UNIX"):
    print("has one", flush=True)
    signal.pause()
"""


def _killed_with_a_socket(temporary):
    """The folder that a rank leaves below ``temporary``, killed while its program had a socket."""
    environment = {**os.environ, "TMPDIR": str(temporary), parent_death.MARK_VARIABLE: TOKEN}
    program = [sys.executable, "-c", HAS_A_SOCKET]
    with subprocess.Popen(program, env=environment, stdout=subprocess.PIPE, text=True) as rank:
        assert rank.stdout.readline() == "has one\n"
        rank.kill()
    (folder,) = temporary.iterdir()
    assert list(folder.iterdir())
    return folder


@pytest.fixture
def left(monkeypatch):
    """A folder for temporary ones, with a short path, in which a killed rank has left one."""
    with tempfile.TemporaryDirectory(dir="/tmp") as path:
        monkeypatch.setenv("TMPDIR", path)
        assert _killed_with_a_socket(Path(path)).name.startswith("pymp-0123456789ab-")
        Path(path, "pymp-another").mkdir()
        yield Path(path)


def test_the_folder_of_sockets_goes_with_the_run(left):
    """The rank was killed, and removes nothing; control: the folder of another program stays."""
    Guardian(TOKEN).close()
    assert [one.name for one in left.iterdir()] == ["pymp-another"]


def test_the_guardian_removes_it_after_a_killed_supervisor(left):
    """It is given the beginning of the name while the supervisor lives."""
    said = f"folders {parent_death.temporary_prefix(TOKEN)}\n"
    program = [sys.executable, "-I", "-S", guardian_process.__file__]
    subprocess.run(program, input=said, text=True, timeout=60, check=True)
    assert [one.name for one in left.iterdir()] == ["pymp-another"]


def test_a_long_temporary_folder_leaves_room_for_the_sockets():
    """A socket's path has 107 bytes: the longer name of the folder is given up before the socket is."""
    with tempfile.TemporaryDirectory(dir="/tmp") as path:
        folder = Path(path, "x" * (70 - len(path)))
        folder.mkdir()
        assert re.fullmatch(r"pymp-[^-]{8}", _killed_with_a_socket(folder).name)


def test_a_rank_that_ends_removes_its_folder_itself():
    """As multiprocessing does; it is made once something asks for it."""
    made = (
        "import os; from multiprocessing import util; from ddp_runner.kernel.system import parent_death\n"
        "parent_death.mark_own_children(); before = os.listdir(os.environ['TMPDIR'])\n"
        "print(before, os.path.basename(util.get_temp_dir())[:11], os.path.isdir(util.get_temp_dir()))"
    )
    program = [sys.executable, "-c", made]
    with tempfile.TemporaryDirectory(dir="/tmp") as path:
        environment = {**os.environ, "TMPDIR": path, parent_death.MARK_VARIABLE: "abcdef"}
        ended = subprocess.run(program, env=environment, capture_output=True, text=True, check=True)
        assert ended.stdout == "[] pymp-abcdef True\n"
        assert not [*Path(path).iterdir()]
