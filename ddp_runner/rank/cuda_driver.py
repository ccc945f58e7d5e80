"""Starts CUDA's driver and loads its libraries without a context, so that no memory of a GPU is held.

Asks the driver by its C functions, because torch opens the device with most of what it is asked.
Never called in the zygote: a driver that has been started is of no use to a fork.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
from pathlib import Path

CUDA = "libcuda.so.1"
# torch's CUDA library brings most others along. cuDNN's loads its parts when a convolution asks for
# them; they lie beside it, whether it came with torch or with the system.
_LOADS_MORE = "libcudnn.so"
_PARTS = "libcudnn_*.so*"


class CudaDriverError(RuntimeError):
    """The driver refused; the message says what, and its number."""


class CudaDriver:
    """The driver, started in this process by making one of these. Raises OSError where there is none."""

    def __init__(self, library: str = CUDA) -> None:
        self._library = ctypes.CDLL(library)
        self._call("cuInit", 0)

    def _call(self, name: str, *arguments: object) -> None:
        error = int(getattr(self._library, name)(*arguments))
        if error:
            raise CudaDriverError(f"{name}: CUDA error {error}")

    def _device(self, index: int) -> ctypes.c_int:
        device = ctypes.c_int()
        self._call("cuDeviceGet", ctypes.byref(device), index)
        return device

    def device_count(self) -> int:
        """How many GPUs this process sees."""
        count = ctypes.c_int()
        self._call("cuDeviceGetCount", ctypes.byref(count))
        return count.value

    def opened(self) -> list[int]:
        """The GPUs on which this process has a context, which is some hundred MB of their memory."""
        found = []
        for index in range(self.device_count()):
            flags, is_active = ctypes.c_uint(), ctypes.c_int()
            self._call(
                "cuDevicePrimaryCtxGetState",
                self._device(index),
                ctypes.byref(flags),
                ctypes.byref(is_active),
            )
            found += [index] * bool(is_active.value)
        return found


def load_libraries() -> list[str]:
    """Load what the libraries that are loaded would load on first use; returns the files."""
    loaded = {line.split()[-1] for line in _maps() if "/" in line}
    folders = {Path(path).parent for path in loaded if Path(path).name.startswith(_LOADS_MORE)}
    files = sorted(str(path.resolve()) for folder in folders for path in folder.glob(_PARTS))
    found = []
    for file in dict.fromkeys(files):
        # One that needs what is not there is one that a rank could not use either.
        with contextlib.suppress(OSError):
            ctypes.CDLL(file, mode=os.RTLD_LAZY)
            found.append(file)
    return found


def _maps() -> list[str]:
    return (
        Path("/proc/self/maps").read_text(encoding="utf-8", errors="surrogateescape").splitlines()
    )
