"""The process that asks the GPU driver, with real processes: it may hang, die or find nobody to ask."""

from __future__ import annotations

import os
import signal
import time
from dataclasses import replace

import pytest

from ddp_runner.features.gpu_watch.parent import GPU_READER, GpuReader
from ddp_runner.kernel.processes.children import Ended
from ddp_runner.kernel.system.clock import SYSTEM_CLOCK
from tests.observe.nvml import H100, Driver
from tests.processes import poll


@pytest.fixture
def driver(tmp_path, monkeypatch):
    found = Driver(tmp_path)
    path = os.pathsep.join([found.environment["PYTHONPATH"], os.environ.get("PYTHONPATH", "")])
    monkeypatch.setenv("PYTHONPATH", path.strip(os.pathsep))
    monkeypatch.setenv("FAKE_NVML", found.environment["FAKE_NVML"])
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    return found


class Kept:
    """A reader, driven as a supervisor's loop drives it."""

    def __init__(self, interval_s=0.05, **changes):
        self.said = []
        role = replace(GPU_READER, **changes)
        self.reader = GpuReader(interval_s, clock=SYSTEM_CLOCK, say=self._say, role=role)

    def _say(self, text, level="INFO"):
        self.said.append((level, text))

    def turn(self):
        self.reader.look()
        if self.reader.pid is not None:
            pid, status = os.waitpid(self.reader.pid, os.WNOHANG)
            if pid:
                code = os.waitstatus_to_exitcode(status)
                exit_code, number = (None, -code) if code < 0 else (code, None)
                ended = Ended(pid=pid, exit_code=exit_code, signal_number=number, at_ns=0)
                assert self.reader.took(ended)

    def until(self, is_so, timeout_s=20.0):
        def turn():
            self.turn()
            return is_so(self.reader)

        poll(turn, what="the reader", timeout_s=timeout_s)

    def end(self):
        self.reader.end()
        if self.reader.pid is not None:
            os.waitpid(self.reader.pid, 0)
        self.reader.close()


@pytest.fixture
def kept(request):
    found = Kept(**getattr(request, "param", {}))
    yield found
    found.end()


def test_readings_come_from_a_process_of_their_own(driver, kept):
    """Each is the newest, with its age; one that is killed is replaced, and what was read stays."""
    kept.until(lambda reader: reader.gpus)
    assert kept.reader.gpus[0].use == 0.93
    driver.write({**H100, "percent": 50})
    kept.until(lambda reader: reader.gpus[0].use == 0.5)
    killed = kept.reader.pid
    assert killed != os.getpid()
    os.kill(killed, signal.SIGKILL)
    driver.write({**H100, "percent": 20})
    kept.until(lambda reader: reader.pid is None)
    assert kept.reader.gpus[0].use == 0.5
    kept.until(lambda reader: reader.gpus[0].use == 0.2)
    assert kept.reader.age_s(SYSTEM_CLOCK.monotonic()) < 15
    assert kept.said == []


@pytest.mark.parametrize("kept", [{"silent_s": 1.5}], indirect=True)
def test_a_driver_that_hangs_is_given_up_and_nobody_waits_for_it(driver, kept):
    """As after an Xid: each turn of the loop is short, the last reading stays with its age, and it is said once."""
    kept.until(lambda reader: reader.gpus)
    stuck = kept.reader.pid
    driver.write(H100, hang=True)
    slowest_s = 0.0
    until_s = time.monotonic() + 20.0
    while kept.reader.pid == stuck and time.monotonic() < until_s:
        began_s = time.monotonic()
        kept.turn()
        slowest_s = max(slowest_s, time.monotonic() - began_s)
        time.sleep(0.01)
    assert kept.reader.pid != stuck
    assert slowest_s < 0.5
    assert kept.reader.gpus[0].use == 0.93
    assert kept.reader.age_s(SYSTEM_CLOCK.monotonic()) >= 1.5
    driver.write({**H100, "percent": 10})
    kept.until(lambda reader: reader.gpus[0].use == 0.1)
    ((level, text),) = kept.said
    assert level == "WARNING"
    assert "training continues" in text


def test_nobody_to_ask_is_said_once_and_not_tried_again(driver, kept):
    """No driver, or no nvidia-ml-py: another process would find the same."""
    driver.write(no_driver=True)
    kept.until(lambda reader: reader.is_given_up)
    kept.turn()
    assert kept.reader.pid is None
    assert kept.said == [("INFO", "no readings of GPUs: NVML: Driver Not Loaded")]


@pytest.mark.parametrize(
    "kept",
    [{"pauses_s": (0.0,), "tries": 2, "module": "ddp_runner.no_such_module"}],
    indirect=True,
)
def test_a_reader_that_always_fails_is_given_up(driver, kept):
    """A run does not start a process every few seconds for nothing."""
    kept.until(lambda reader: reader.is_given_up)
    ((_, text),) = kept.said
    assert "their reader has ended" in text
    assert "no_such_module" in text
