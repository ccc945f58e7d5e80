"""Reads tensors where they lie in another process of this machine: one copy, by the kernel. Knows no group."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import secrets
from array import array
from collections.abc import Iterator, Sequence
from functools import partial
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from ddp_runner.kernel.system.threads import in_threads

PARTS_MAX = 1024  # of one call: IOV_MAX of Linux
READ_BYTES_MAX = 16 * 1024 * 1024  # of one call, which nothing can cut short
_WORD_BYTES = 16
_PR_SET_PTRACER = 0x59616D61  # of linux/prctl.h
_PR_SET_PTRACER_ANY = ctypes.c_ulong(-1)
_LIBC = ctypes.CDLL(None, use_errno=True)


class Shown(NamedTuple):
    """The addresses of tensors, for another process. ``word``: random bytes, stored at ``word_at``."""

    pid: int
    word_at: int
    word: bytes
    addresses: bytes  # of the tensors, as an array of "Q"


class Part(NamedTuple):
    """``size`` bytes ``source`` of the other process, which are to lie at ``target`` of this one."""

    source: int
    target: int
    size: int


class _Vector(ctypes.Structure):
    """The kernel's ``struct iovec``."""

    _fields_ = (("base", ctypes.c_void_p), ("size", ctypes.c_size_t))


@contextlib.contextmanager
def showing(tensors: Sequence[Tensor]) -> Iterator[Shown | None]:
    """Let processes of this user read ``tensors``, within the block. None where they are not all plain memory.

    They must stay as they are in there.
    """
    if not all(one.is_cpu and one.is_contiguous() for one in tensors):
        yield None
        return
    word = torch.frombuffer(bytearray(secrets.token_bytes(_WORD_BYTES)), dtype=torch.uint8)
    # Where Yama restricts that to a process's ancestors; refused, and of no use, where there is none.
    _LIBC.prctl(_PR_SET_PTRACER, _PR_SET_PTRACER_ANY, 0, 0, 0)
    try:
        yield Shown(
            pid=os.getpid(),
            word_at=word.data_ptr(),
            word=bytes(word.tolist()),
            addresses=array("Q", [one.data_ptr() for one in tensors]).tobytes(),
        )
    finally:
        _LIBC.prctl(_PR_SET_PTRACER, 0, 0, 0, 0)


def can_read(shown: Shown) -> bool:
    """Return True if the process behind ``shown`` runs on this machine and its memory may be read.

    The word proves it: on another machine or in another container, another process may have the same pid.
    """
    room = torch.zeros(_WORD_BYTES, dtype=torch.uint8)
    part = Part(source=shown.word_at, target=room.data_ptr(), size=_WORD_BYTES)
    return _read(shown.pid, [part]) == _WORD_BYTES and bytes(room.tolist()) == shown.word


def read(shown: Shown, parts: Sequence[Part]) -> None:
    """Copy ``parts`` out of the process behind ``shown``. Raises DistNetworkError where it is gone.

    A word of it, read afterwards with :func:`can_read`, shows that it was still that process.
    """
    in_threads(partial(_read_whole, shown.pid), list(_calls(parts)), name="read-memory")


def _calls(parts: Sequence[Part]) -> Iterator[list[Part]]:
    """The same bytes, in what one call takes."""
    together: list[Part] = []
    together_bytes = 0
    for part in parts:
        for start in range(0, part.size, READ_BYTES_MAX):
            size = min(READ_BYTES_MAX, part.size - start)
            if together and (len(together) == PARTS_MAX or together_bytes + size > READ_BYTES_MAX):
                yield together
                together, together_bytes = [], 0
            together.append(Part(part.source + start, part.target + start, size))
            together_bytes += size
    if together:
        yield together


def _read_whole(pid: int, parts: Sequence[Part]) -> None:
    size_bytes = sum(part.size for part in parts)
    found = _read(pid, parts)
    if found != size_bytes:
        why = os.strerror(ctypes.get_errno()) if found < 0 else f"{found} of {size_bytes} bytes"
        raise dist.DistNetworkError(f"the memory of process {pid} cannot be read: {why}")


def _read(pid: int, parts: Sequence[Part]) -> int:
    """The bytes that were read; -1 for none, with the reason in errno."""
    call = getattr(_LIBC, "process_vm_readv", None)
    if call is None:
        ctypes.set_errno(errno.ENOSYS)
        return -1
    call.restype = ctypes.c_ssize_t
    here, there = (_Vector * len(parts))(), (_Vector * len(parts))()
    for number, part in enumerate(parts):
        here[number] = _Vector(part.target, part.size)
        there[number] = _Vector(part.source, part.size)
    count = ctypes.c_ulong(len(parts))
    return int(call(ctypes.c_int(pid), here, count, there, count, ctypes.c_ulong(0)))
