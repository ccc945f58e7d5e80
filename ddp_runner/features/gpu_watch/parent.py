"""Has the newest reading of GPUs that a process of its own has got of their driver. Waits for nothing."""

from __future__ import annotations

import contextlib
import os
from dataclasses import replace

from ddp_runner.core.gpu_reading import GpuReading
from ddp_runner.features.gpu_watch.driver_process import NO_DRIVER
from ddp_runner.kernel.processes.children import Ended
from ddp_runner.kernel.processes.keeper import Keeper
from ddp_runner.kernel.rules.helper_roles import DOUBLED_S, Role
from ddp_runner.kernel.system.clock import Clock
from ddp_runner.kernel.system.run_files import from_json
from ddp_runner.supervisor.reporting.program import Given, Program, Programs, Say

GPU_READER = Role(
    name="gpu_reader",
    module=f"{__package__}.driver_process",
    # The driver's first answer takes seconds where many GPUs wake up.
    silent_s=15.0,
    pauses_s=DOUBLED_S,
    tries=5,
)
SILENT_INTERVALS = 4  # without a reading
_LINE_BYTES_MAX = 1 << 20


def reader_of_gpus(interval_s: float, *, clock: Clock, say: Say) -> GpuReader:
    """Return who asks the driver of this machine's GPUs."""
    return GpuReader(interval_s, clock=clock, say=say)


class GpuReader:
    """Has the newest that the GPU driver said; the process that asks it is ended where it does not answer."""

    def __init__(
        self, interval_s: float, *, clock: Clock, say: Say, role: Role = GPU_READER
    ) -> None:
        self._interval_s = interval_s
        silent_s = max(role.silent_s, SILENT_INTERVALS * interval_s)
        self._clock = clock
        self._say = say
        self._programs = Programs()
        self._keeper = Keeper(replace(role, silent_s=silent_s), self._programs)
        self._line = b""  # the begin of one that is not whole yet
        self._has_warned = False
        self.gpus: tuple[GpuReading, ...] = ()  # the newest reading
        self.read_at_s: float | None = None  # when that came
        self.count = 0  # of readings

    @property
    def pid(self) -> int | None:
        """The pid of its process; None if there is none."""
        program = self._keeper.process
        return None if program is None else program.pid

    @property
    def is_given_up(self) -> bool:
        """True if the driver is not asked any more."""
        return self._keeper.is_given_up

    def age_s(self, now_s: float) -> float | None:
        """Return the age of the newest reading; None before the first."""
        return None if self.read_at_s is None else max(0.0, now_s - self.read_at_s)

    def look(self) -> None:
        """Take in what has been read, and see to the process. Never waits."""
        now_s = self._clock.monotonic()
        program = self._keeper.process
        if program is None:
            if self._keeper.is_due(now_s):
                self._start(now_s)
            return
        self._receive(program, now_s)
        # INVARIANT reader-is-apart: no call into a GPU driver is made by a process that supervises.
        # Broken if: NVML is asked by the supervisor itself, or its reader is waited for.
        # Guarded by: test_a_driver_that_hangs_is_given_up_and_nobody_waits_for_it.
        if self._keeper.look(now_s) is not None and not self._has_warned:
            self._has_warned = True
            self._say(
                f"the GPU driver has not answered for {self._keeper.role.silent_s:g} s: its last reading is"
                " shown with its age, and training continues; another process asks it again",
                level="WARNING",
            )

    def took(self, ended: Ended) -> bool:
        """Return True if a reaped child was the reader; another one is due after a while."""
        program = self._keeper.process
        if program is None or program.pid != ended.pid:
            return False
        self._receive(program, self._clock.monotonic())
        said = program.last_line()
        self._programs.forget(self._keeper.role)
        self._keeper.ended(self._clock.monotonic())
        if ended.exit_code == NO_DRIVER:
            self._keeper.give_up()
            self._say(f"no readings of GPUs: {said}")
        elif self._keeper.is_given_up:
            last = f" ({said})" if said else ""
            self._say(f"no more readings of GPUs: their reader has ended: {ended.how}{last}")
        return True

    def end(self) -> None:
        """The run has ended: kill it, and wait for nothing."""
        self._keeper.give_up()
        self._keeper.kill()

    def close(self) -> None:
        """Let go of what leads to it."""
        self._programs.forget(self._keeper.role)

    def _start(self, now_s: float) -> None:
        environment = {**os.environ, "CUDA_DEVICE_ORDER": "PCI_BUS_ID"}
        words = (str(self._interval_s), str(os.getpid()))
        self._line = b""
        try:
            self._keeper.start(now_s, Given(words=words, answers=True, environment=environment))
        except OSError as error:
            self._keeper.give_up()
            self._say(f"no readings of GPUs: {error.strerror or error}")

    def _receive(self, program: Program, now_s: float) -> None:
        lines = (self._line + program.read()).split(b"\n")
        self._line = lines.pop()[:_LINE_BYTES_MAX]
        for line in lines[-1:]:
            with contextlib.suppress(ValueError, TypeError, AttributeError):
                self.gpus = tuple(GpuReading.from_record(one) for one in from_json(line))
                self.read_at_s = now_s
                self.count += 1
                self._keeper.heard(now_s)
