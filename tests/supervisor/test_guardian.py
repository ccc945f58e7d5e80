"""Whom the guardian takes for its run's: real processes, distinguished by their environment and session."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys

import pytest

from ddp_runner.kernel.processes.guardian_process import belongs, end

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
