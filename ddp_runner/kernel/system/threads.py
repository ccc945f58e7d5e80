"""Does bulk work in several threads at once: copies and hashes, which need no interpreter. Starts no lasting thread."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

# One core copies slower than memory is; more threads than that gain little.
THREADS_MAX = 4

_Part = TypeVar("_Part")
_Found = TypeVar("_Found")


def cores_here() -> int:
    """Return the number of cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def in_threads(
    call: Callable[[_Part], _Found], parts: Sequence[_Part], *, name: str
) -> list[_Found]:
    """Return what ``call`` gives for each part, in their order. Raises what a call raises, once all have ended.

    Where no thread can be started, this one makes all calls, some of them a second time.
    """
    count = min(THREADS_MAX, cores_here(), len(parts))
    if count > 1:
        with ThreadPoolExecutor(count, thread_name_prefix=name) as pool:
            try:
                begun = [pool.submit(call, part) for part in parts]
            except RuntimeError:
                pool.shutdown(cancel_futures=True)
                begun = []
        if begun:
            return [one.result() for one in begun]
    return [call(part) for part in parts]
