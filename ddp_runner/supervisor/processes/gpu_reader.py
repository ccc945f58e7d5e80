"""Keeps the process that asks the GPU driver: starts it, ends it where it does not answer, never waits for it."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Callable

from ddp_runner import start
from ddp_runner.core.gpu_reading import GpuReading
from ddp_runner.core.tracking import backoff_s
from ddp_runner.observe.gpu_watch_process import NO_DRIVER
from ddp_runner.supervisor.processes.children import read_output
from ddp_runner.system.clock import Clock
from ddp_runner.system.run_files import from_json

_MODULE = "ddp_runner.observe.gpu_watch_process"
SILENT_MIN_S = (
    15.0  # without a reading: the driver's first answer takes seconds where many GPUs wake up
)
SILENT_INTERVALS = 4
FAILURES_MAX = 5  # in a row, without one reading: then the run goes on without
_READ_BYTES = 1 << 20
_LINE_BYTES_MAX = 1 << 20
Say = Callable[..., None]


class GpuReader:
    """Owned by a supervisor's loop, which calls :meth:`look` at each tick."""

    def __init__(self, interval_s: float, *, clock: Clock, say: Say) -> None:
        self._interval_s = interval_s
        self._silent_s = max(SILENT_MIN_S, SILENT_INTERVALS * interval_s)
        self._clock = clock
        self._say = say
        self._process: subprocess.Popen[bytes] | None = None
        self._errors = -1  # a file in memory that it says its last words to
        self._line = b""  # the begin of one that is not whole yet
        self._heard_at_s = 0.0  # from it, or it was started
        self._is_ending = False  # it was killed; a driver may keep it for ever
        self._has_warned = False
        self._start_at_s = 0.0
        self._failures = 0
        self._is_given_up = False
        self.gpus: tuple[GpuReading, ...] = ()  # the newest reading
        self.read_at_s: float | None = None  # when that came
        self.count = 0  # of readings

    @property
    def pid(self) -> int | None:
        """Of its process; None while there is none."""
        return None if self._process is None else self._process.pid

    def age_s(self, now_s: float) -> float | None:
        """How old the newest reading is; None before the first."""
        return None if self.read_at_s is None else max(0.0, now_s - self.read_at_s)

    def look(self) -> None:
        """Take in what has been read, and see to the process. Never waits."""
        now_s = self._clock.monotonic()
        if self._process is None:
            if not self._is_given_up and now_s >= self._start_at_s:
                self._start(now_s)
            return
        self._receive(now_s)
        if not self._is_ending and now_s > self._heard_at_s + self._silent_s:
            # INVARIANT reader-is-apart: no call into a GPU driver is made by a process that supervises.
            # Broken if: NVML is asked by the supervisor itself, or its reader is waited for.
            # Guarded by: test_a_driver_that_hangs_is_given_up_and_nobody_waits_for_it.
            self._is_ending = True
            if not self._has_warned:
                self._say(
                    f"the GPU driver has not answered for {self._silent_s:g} s: what it said last is shown"
                    " with its age, and training goes on; another process asks it again",
                    level="WARNING",
                )
            self._has_warned = True
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._process.pid, signal.SIGKILL)

    def ended(self, pid: int, *, how: str, exit_code: int | None) -> bool:
        """Whether the child that was reaped was the reader; then another one is due after a while."""
        if self._process is None or self._process.pid != pid:
            return False
        self._receive(self._clock.monotonic())
        said = read_output(self._errors).strip().rpartition("\n")[2]
        self._close()
        self._failures += 1
        self._start_at_s = self._clock.monotonic() + backoff_s(self._failures)
        if exit_code == NO_DRIVER:
            self._is_given_up = True
            self._say(f"no readings of GPUs: {said}")
        elif self._failures >= FAILURES_MAX:
            self._is_given_up = True
            last = f" ({said})" if said else ""
            self._say(f"no more readings of GPUs: their reader has ended: {how}{last}")
        return True

    def end(self) -> None:
        """The run has ended: kill it, and wait for nothing."""
        self._is_given_up = True
        if self._process is not None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._process.pid, signal.SIGKILL)

    def close(self) -> None:
        """Let go of what leads to it."""
        if self._process is not None:
            self._close()

    def _start(self, now_s: float) -> None:
        self._errors = os.memfd_create("gpu_reader", os.MFD_CLOEXEC)
        try:
            self._process = subprocess.Popen(  # noqa: S603 - our own interpreter and module
                [
                    *(sys.executable, start.__file__, _MODULE),
                    *(str(self._interval_s), str(os.getpid())),
                ],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._errors,
                start_new_session=True,  # a terminal's Ctrl-C is for the supervisor
                bufsize=0,
                env={**os.environ, "CUDA_DEVICE_ORDER": "PCI_BUS_ID"},
            )
        except OSError as error:
            os.close(self._errors)
            self._is_given_up = True
            self._say(f"no readings of GPUs: {error.strerror or error}")
            return
        assert self._process.stdout is not None
        os.set_blocking(self._process.stdout.fileno(), False)
        self._heard_at_s, self._is_ending, self._line = now_s, False, b""

    def _receive(self, now_s: float) -> None:
        assert self._process is not None
        assert self._process.stdout is not None
        with contextlib.suppress(BlockingIOError):
            self._line += os.read(self._process.stdout.fileno(), _READ_BYTES)
        lines = self._line.split(b"\n")
        self._line = lines.pop()[:_LINE_BYTES_MAX]
        for line in lines[-1:]:
            with contextlib.suppress(ValueError, TypeError, AttributeError):
                self.gpus = tuple(GpuReading.from_record(one) for one in from_json(line))
                self.read_at_s = self._heard_at_s = now_s
                self.count += 1
                self._failures = 0

    def _close(self) -> None:
        assert self._process is not None
        self._process.returncode = 0  # reaped with all others
        for stream in (self._process.stdin, self._process.stdout):
            if stream is not None:
                stream.close()
        os.close(self._errors)
        self._process = None
