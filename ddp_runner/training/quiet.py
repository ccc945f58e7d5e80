"""Keeps torch's advice about settings that are this runner's own choice off a program's output."""

from __future__ import annotations

import contextlib
import ctypes
import os
from pathlib import Path

import torch

_VARIABLE = "TORCH_CPP_LOG_LEVEL"
_ERROR = 2  # of torch's C++ log: information, warning, error


def quiet_torch() -> None:
    """Let torch's C++ part log errors only, unless the user has set its level.

    Ranks of a supervisor have the variable in their environment; it is read when torch is imported,
    which is long past where a trainer is made by hand.
    """
    if _VARIABLE in os.environ:
        return
    library = Path(torch.__file__).parent / "lib" / "libc10.so"
    with contextlib.suppress(OSError, ValueError):  # another build of torch: it says what it says
        level = ctypes.c_int.in_dll(ctypes.CDLL(str(library)), "FLAGS_caffe2_log_level")
        level.value = max(level.value, _ERROR)
