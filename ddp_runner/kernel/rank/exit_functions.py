"""Runs the exit functions that user code has registered, for a rank that ends by ``os._exit``."""

from __future__ import annotations

import atexit
import weakref


def run_exit_functions() -> None:
    """Run what user code has registered, as multiprocessing does in its processes; torch's libraries stay.

    At a usual end each of torch's operators that is written in Python is taken back, one by one. In a fork of
    the zygote that is 50 ms in which it copies memory that it shares, of a process that is gone a moment later.
    """
    registered: tuple[weakref.finalize, ...] = tuple(getattr(weakref.finalize, "_registry", ()))  # type: ignore[type-arg]
    for ending in registered:
        about = ending.peek()
        if about is not None and getattr(about[1], "__module__", None) == "torch.library":
            ending.atexit = False
    atexit._run_exitfuncs()  # noqa: SLF001 - there is no other way to run them
