"""What a measuring process reports, fact by fact, and the forks in which it measures. Imports no torch.

Each measurement fails for itself: its error is the fact. One that may crash, hang or change the
process is made in a fork with a limit.
"""

from __future__ import annotations

import contextlib
import faulthandler
import json
import os
import signal
import sys
import time
import traceback

from ddp_runner.kernel.system import parent_death
from tests.gpu.conducting import STACKS_SIGNAL

LINE_BYTES_MAX = 4000  # a pipe takes so many at once from several writers
TEXT_MAX = 400
ENOUGH_S = 2.0  # a measurement is not begun with less time left
REHEARSAL = "GPU_FACTS_REHEARSAL"  # everything on the CPU, to try out the command itself


def rehearses():
    """Whether there is no GPU, and none is wanted: the numbers mean nothing."""
    return bool(os.environ.get(REHEARSAL))


def device_name():
    """Where measurements compute."""
    return "cpu" if rehearses() else "cuda:0"


def error_text(error):
    """An exception in one line."""
    return f"{type(error).__name__}: {error}"[:TEXT_MAX]


class Facts:
    """A place in the tree of facts; ``path`` leads there."""

    def __init__(self, descriptor, *, deadline_s, path=()):
        self._descriptor = descriptor
        self._deadline_s = deadline_s
        self._path = path

    @property
    def left_s(self):
        """Seconds until the part is ended."""
        return self._deadline_s - time.monotonic()

    def under(self, name):
        """The place ``name`` below this one."""
        path = (*self._path, name)
        return Facts(self._descriptor, deadline_s=self._deadline_s, path=path)

    def note(self, name, value):
        """Report a fact: anything that JSON knows."""
        line = self._line(name, value)
        if len(line) > LINE_BYTES_MAX:
            line = self._line(name, {"cut": str(value)[: LINE_BYTES_MAX // 3]})
        os.write(self._descriptor, line)

    def _line(self, name, value):
        path = [*self._path, name]
        return json.dumps(["fact", path, _rounded(value)], default=str).encode() + b"\n"

    def outcome(self, outcome, why):
        """Report how the part ends, where that is not to be seen from its exit."""
        line = json.dumps(["outcome", outcome, str(why)[:TEXT_MAX]])
        os.write(self._descriptor, line.encode() + b"\n")

    def measure(self, name, function, *arguments, **options):
        """Report what ``function`` returns, if anything, or why it could not. Gives it back, or None."""
        if not self._has_time(name):
            return None
        try:
            value = function(*arguments, **options)
        except Exception as error:  # noqa: BLE001 - the error is the fact
            traceback.print_exc()
            self.note(name, {"error": error_text(error)})
            return None
        if value is not None:
            self.note(name, value)
        return value

    def forked(self, name, function, *arguments, limit_s, **environment):
        """Have ``function(facts, *arguments)`` run in a fork, whose facts are below ``name``."""
        fork = self.start(name, function, *arguments, **environment)
        return fork is not None and fork.finish(limit_s)

    def start(self, name, function, *arguments, **environment):
        """Begin that; None where there is no time left, or no fork to be had."""
        if not self._has_time(name):
            return None
        try:
            return Fork(self.under(name), function, arguments, environment)
        except OSError as error:
            self.note(name, {"error": error_text(error)})
            return None

    def _has_time(self, name):
        if self.left_s < ENOUGH_S:
            self.note(name, {"error": "not begun: no time left"})
            return False
        return True


class Fork:
    """One measurement in a process of its own, of this process's group."""

    def __init__(self, facts, function, arguments=(), environment=None):
        self._facts = facts
        self._begun_s = time.monotonic()
        parent = os.getpid()
        sys.stdout.flush()
        sys.stderr.flush()
        self.pid = os.fork()
        if self.pid == 0:
            _be_fork(parent, facts, function, arguments, environment or {})

    def finish(self, limit_s):
        """Wait until it has ended, at most so long from its start; then it is ended. Whether it is well."""
        by_s = min(self._begun_s + limit_s, time.monotonic() + self._facts.left_s)
        while time.monotonic() < by_s:
            ended, status = os.waitpid(self.pid, os.WNOHANG)
            if ended:
                code = os.waitstatus_to_exitcode(status)
                if code < 0:
                    self._facts.note("ended", f"by signal {signal.Signals(-code).name}")
                elif code:
                    self._facts.note("ended", f"with exit code {code}")
                return code == 0
            time.sleep(0.005)
        os.kill(self.pid, STACKS_SIGNAL)  # into the log
        time.sleep(0.3)
        os.kill(self.pid, signal.SIGKILL)
        after_s = time.monotonic() - self._begun_s
        self._facts.note("ended", f"killed: still there after {after_s:.1f} s")
        self._reap(5.0)
        return False

    def kill(self):
        """End it; report nothing."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGKILL)
        self._reap(5.0)

    def _reap(self, timeout_s):
        by_s = time.monotonic() + timeout_s
        while time.monotonic() < by_s:
            with contextlib.suppress(ChildProcessError):
                if os.waitpid(self.pid, os.WNOHANG)[0] == 0:
                    time.sleep(0.01)
                    continue
            return


def _be_fork(parent, facts, function, arguments, environment):
    code = 1
    try:
        parent_death.die_with_parent(parent)
        faulthandler.enable()
        faulthandler.register(STACKS_SIGNAL, all_threads=True)
        for name, value in environment.items():
            os.environ.pop(name, None) if value is None else os.environ.update({name: value})
        function(facts, *arguments)
        code = 0
    except BaseException as error:  # noqa: BLE001 - the error is the fact
        traceback.print_exc()
        with contextlib.suppress(OSError):
            facts.note("error", error_text(error))
    finally:
        with contextlib.suppress(OSError, ValueError):
            sys.stdout.flush()
            sys.stderr.flush()
        # No finalisers: those of libraries may wait for what the fork has left.
        os._exit(code)


def _rounded(value):
    """Numbers as people want to read them, deep down."""
    if isinstance(value, float):
        return float(f"{value:.4g}")
    if isinstance(value, dict):
        return {str(key): _rounded(one) for key, one in value.items()}
    if isinstance(value, (list, tuple)):
        return [_rounded(one) for one in value]
    return value


class Timed:
    """The seconds of a block: ``with Timed() as t: ...; t.s``."""

    s = 0.0

    def __enter__(self):
        self._begun_s = time.perf_counter()
        return self

    def __exit__(self, *exception):
        self.s = time.perf_counter() - self._begun_s


def spread(values):
    """First, median and largest of some seconds."""
    if not values:
        return {"count": 0}
    middle = sorted(values)[len(values) // 2]
    return {"count": len(values), "first": values[0], "median": middle, "max": max(values)}
