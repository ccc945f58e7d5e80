"""``launch_async()``: runs training for a program with an event loop, which continues meanwhile."""

from __future__ import annotations

import asyncio
import codecs
import contextlib
import signal
import sys
from typing import TYPE_CHECKING, Literal, TypeVar

from ddp_runner.cli.from_code.launch import (
    Prepared,
    RunResult,
    child_command,
    child_environment,
    prepared,
    refuse_in_rank,
    writes_to_descriptor_1,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Mapping, Sequence

_OUTPUT_BYTES = 1 << 16
_T = TypeVar("_T")


async def launch_async(
    task: str | type | None = None,
    *,
    nproc: int | Literal["auto"] = "auto",
    config: Mapping[str, object] | None = None,
    arguments: Sequence[str] = (),
) -> RunResult:
    """Launch a run for ``await``, with the same arguments, result and errors as :func:`launch`.

    The event loop continues meanwhile, and several runs may be awaited at once, each with its own folders. A
    cancelled call (``task.cancel()``, ``asyncio.wait_for``, Ctrl-C under ``asyncio.run``) asks its run to finish the
    step, save and end, as SIGTERM would, waits for that, and raises CancelledError; a second cancellation ends the
    run at once. No signal handler of the program is changed, and its input is not read. The run dies
    with the thread of this loop.

    Raises BadInputError for wrong settings and RuntimeError when called by the ranks themselves.
    """
    refuse_in_rank("launch_async()")
    with contextlib.ExitStack() as held:
        preparing = prepared(task, nproc=nproc, config=config, arguments=arguments)
        # It asks for GPUs and reads files: not in the thread of the loop.
        ready = await _to_its_end(
            asyncio.to_thread(held.enter_context, preparing), when_cancelled=lambda: None
        )
        child = _Child(ready)
        return ready.result(await _to_its_end(child.run(), when_cancelled=child.end_sooner))


async def _to_its_end(work: Coroutine[None, None, _T], *, when_cancelled: Callable[[], None]) -> _T:
    """Await ``work`` to its end. A cancelled call calls ``when_cancelled``, and is cancelled once the work has ended."""
    # INVARIANT nothing-left-behind: nobody but the work itself ends it, however often the call is cancelled.
    # Broken if: the work is awaited as it is; its thread then leaves the configuration with its
    # secrets behind, or its process goes on unseen.
    # Guarded by: test_a_call_that_is_cancelled_early_leaves_nothing.
    task = asyncio.ensure_future(work)
    cancelled: asyncio.CancelledError | None = None
    while not task.done():
        try:
            await asyncio.wait({task})
        except asyncio.CancelledError as error:  # noqa: PERF203 - each one asks for more
            cancelled = error
            when_cancelled()
    if cancelled is None:
        return task.result()
    raise cancelled from task.exception()


class _Child:
    """The process of a run, and the stops that it was asked for."""

    def __init__(self, ready: Prepared) -> None:
        self._ready = ready
        self._process: asyncio.subprocess.Process | None = None
        self._asked: list[signal.Signals] = []

    def end_sooner(self) -> None:
        """Have it save and end; the second time end; after that it is killed."""
        order = (signal.SIGTERM, signal.SIGQUIT, signal.SIGKILL)
        self._asked.append(order[min(len(self._asked), 2)])
        if self._process is not None:
            self._send(self._process, self._asked[-1])

    async def run(self) -> int:
        """Start it, copy its output until it ends; its exit code."""
        inherits = writes_to_descriptor_1()
        self._process = process = await asyncio.create_subprocess_exec(
            *child_command(self._ready.words),
            env=child_environment(self._ready.config_file),
            start_new_session=True,  # a terminal's Ctrl-C is for this program
            stdin=asyncio.subprocess.DEVNULL,
            stdout=None if inherits else asyncio.subprocess.PIPE,
            stderr=None if inherits else asyncio.subprocess.STDOUT,
        )
        for number in self._asked:
            self._send(process, number)
        if process.stdout is not None:
            text = codecs.getincrementaldecoder("utf-8")(errors="replace")
            while chunk := await process.stdout.read(_OUTPUT_BYTES):
                sys.stdout.write(text.decode(chunk))
        return await process.wait()

    @staticmethod
    def _send(process: asyncio.subprocess.Process, number: signal.Signals) -> None:
        with contextlib.suppress(ProcessLookupError):
            process.send_signal(number)
