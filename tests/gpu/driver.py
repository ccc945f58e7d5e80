"""What the NVIDIA driver says without torch: whether there is a device, and how much of it is taken."""

from __future__ import annotations

import contextlib
import ctypes
import os
import subprocess
import time

ASK_TIMEOUT_S = 20.0
NO_DEVICE = "no CUDA device"


class _Memory(ctypes.Structure):
    _fields_ = (
        ("total", ctypes.c_ulonglong),
        ("free", ctypes.c_ulonglong),
        ("used", ctypes.c_ulonglong),
    )


def why_no_device():
    """Why nothing can be measured; "" where a device is there.

    A fork asks: nobody can fork a process any more, and use CUDA there, that has started the driver.
    """
    try:
        ctypes.CDLL("libcuda.so.1", mode=os.RTLD_LAZY)
    except OSError:
        return f"{NO_DEVICE} (no libcuda.so.1)"
    pid = os.fork()
    if pid == 0:
        os._exit(_count())
    by_s = time.monotonic() + ASK_TIMEOUT_S
    while time.monotonic() < by_s:
        ended, status = os.waitpid(pid, os.WNOHANG)
        if ended:
            count = os.waitstatus_to_exitcode(status)
            return "" if 0 < count < 100 else f"{NO_DEVICE} (the driver says {count})"
        time.sleep(0.01)
    os.kill(pid, 9)
    return f"{NO_DEVICE} (the driver does not answer)"


def _count():
    """How many there are, as an exit code; 100 and more for an error."""
    with contextlib.suppress(Exception):
        driver = ctypes.CDLL("libcuda.so.1")
        error = driver.cuInit(0)
        if error:
            return min(255, 100 + error)
        count = ctypes.c_int()
        error = driver.cuDeviceGetCount(ctypes.byref(count))
        return min(255, 100 + error) if error else min(99, count.value)
    return 255


class Usage:
    """How much of the first GPU's memory is taken by anybody, in MB: by NVML, else by nvidia-smi."""

    def __init__(self):
        self._library = self._handle = None
        self._pid = 0

    def _ask_for_it(self):
        """Once a process: what a fork inherits may not work there."""
        if self._pid == os.getpid():
            return
        self._library, self._pid = None, os.getpid()
        with contextlib.suppress(OSError, AttributeError):
            library = ctypes.CDLL("libnvidia-ml.so.1")
            handle = ctypes.c_void_p()
            if library.nvmlInit_v2() == 0:
                error = library.nvmlDeviceGetHandleByIndex_v2(0, ctypes.byref(handle))
                if error == 0:
                    self._library, self._handle = library, handle

    @property
    def source(self):
        """Who says so."""
        self._ask_for_it()
        return "NVML" if self._library else "nvidia-smi"

    def mb(self):
        """-1 where nobody says."""
        self._ask_for_it()
        if self._library:
            memory = _Memory()
            if self._library.nvmlDeviceGetMemoryInfo(self._handle, ctypes.byref(memory)) == 0:
                return memory.used / 2**20
        return smi_mb()


def smi_mb():
    """By nvidia-smi; -1 where it does not say."""
    words = ("nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits", "-i", "0")
    with contextlib.suppress(OSError, ValueError, subprocess.TimeoutExpired):
        said = subprocess.run(words, capture_output=True, text=True, timeout=10, check=False)
        return float(said.stdout.split()[0]) if said.stdout.split() else -1.0
    return -1.0
