"""Runs one part in a process of its own: hears its facts, and ends it and all it started at its limit."""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import subprocess
import time
from dataclasses import dataclass

LOOK_EVERY_S = 0.05
STACKS_S = 0.5  # for a part that is late to write its stacks
GONE_WITHIN_S = 10.0  # of SIGKILL; a process inside the driver may take its time
STACKS_SIGNAL = signal.SIGUSR1


@dataclass(frozen=True, slots=True, kw_only=True)
class Ended:
    """``outcome`` is ok, failed, timeout or skipped."""

    outcome: str
    seconds: float
    why: str = ""


def conduct(words, *, env, cwd, limit_s, log, on_fact):
    """Run ``words`` with the number of a descriptor behind them, to which facts are written, a line each."""
    reading, writing = os.pipe()
    os.set_blocking(reading, False)
    begun_s = time.monotonic()
    process = subprocess.Popen(
        [*words, str(writing)],
        cwd=cwd,
        env=env,
        stdin=subprocess.DEVNULL,
        stdout=log,
        stderr=subprocess.STDOUT,
        pass_fds=(writing,),
        start_new_session=True,
    )
    os.close(writing)
    said = _Lines(reading, on_fact)
    try:
        while not _has_ended(process.pid) and time.monotonic() < begun_s + limit_s:
            said.read(LOOK_EVERY_S)
        is_late = not _has_ended(process.pid)
        if is_late:
            _ask_for_stacks(process.pid)
    finally:
        # It is not reaped yet, so that its number is nobody else's; what it has left goes with it.
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
    lasts = ""
    try:
        code = process.wait(GONE_WITHIN_S)
    except subprocess.TimeoutExpired:
        code, lasts = None, f"; it has not ended {GONE_WITHIN_S:g} s after SIGKILL"
    said.read(0.0)
    os.close(reading)
    seconds = round(time.monotonic() - begun_s, 2)
    if is_late:
        why = f"killed at its limit of {limit_s:g} s{lasts}"
        return Ended(outcome="timeout", seconds=seconds, why=why)
    if code:
        return Ended(outcome="failed", seconds=seconds, why=said.why or _in_words(code))
    return Ended(outcome=said.outcome or "ok", seconds=seconds, why=said.why)


class _Lines:
    """What a part writes: ``["fact", path, value]`` or ``["outcome", outcome, why]``."""

    def __init__(self, descriptor, on_fact):
        self._descriptor = descriptor
        self._on_fact = on_fact
        self._buffer = b""
        self._is_open = True
        self.outcome = self.why = ""

    def read(self, timeout_s):
        """Hand over what has come; wait for some at most so long."""
        if not self._is_open:
            time.sleep(timeout_s)
            return
        select.select([self._descriptor], [], [], timeout_s)
        with contextlib.suppress(BlockingIOError):
            while data := os.read(self._descriptor, 2**16):
                self._buffer += data
            self._is_open = False
        *lines, self._buffer = self._buffer.split(b"\n")
        for line in lines:
            with contextlib.suppress(ValueError, TypeError):  # half a line of one that was killed
                kind, first, second = json.loads(line)
                if kind == "outcome":
                    self.outcome, self.why = first, second
                else:
                    self._on_fact(first, second)


def _has_ended(pid):
    """Whether the child has ended; it stays to be reaped."""
    return os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None


def _ask_for_stacks(pid):
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, STACKS_SIGNAL)
    time.sleep(STACKS_S)


def _in_words(code):
    if code >= 0:
        return f"exit code {code}"
    with contextlib.suppress(ValueError):
        return f"killed by {signal.Signals(-code).name}"
    return f"killed by signal {-code}"
