"""Waits for our own collectives on the CPU, which an abort ends whatever has become of those.

gloo forgets a message that it could not write, or has begun to read, when its connection ends
(gloo, transport/tcp: Pair::signalException goes through those that have not begun): who waits for it
is held for the group's whole timeout, and nothing that can be reached from outside frees him. It takes
no more than a rank that gets no CPU for a moment while its peer dies.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator, Sequence
from datetime import timedelta
from typing import Any, Protocol

import torch.distributed as dist
from torch import Tensor

from ddp_runner.kernel.rules.phases import Phase
from ddp_runner.kernel.wire.board import Cell, Slot

LOOK_EVERY_S = 0.25
_LOOK_EVERY = timedelta(seconds=LOOK_EVERY_S)


@contextlib.contextmanager
def waiting_for_peers(slot: Slot) -> Iterator[None]:
    """Wait in the block as one waits in a reduction: whoever lets the others wait is late alone.

    Not for all ranks of a transfer at once: it may take longer than a step. A rank whose wait fails
    stays where it is on the board, as one whose reduction fails does.
    """
    before = Phase(slot.get(Cell.PHASE))
    slot.stamp(Phase.REDUCE, time.monotonic_ns())
    yield
    slot.stamp(before, time.monotonic_ns())


class Waits:
    """The waits of one generation, on the CPU. ``abort`` may be called from any thread."""

    def __init__(self) -> None:
        self._is_aborted = threading.Event()

    def abort(self) -> None:
        """End those that are under way, and those to come. Idempotent."""
        self._is_aborted.set()

    # INVARIANT nobody-waits-inside-gloo: the training thread waits for a collective in pieces, and looks
    # whether it is aborted. Broken if: it calls work.wait() without a time, or a collective that blocks.
    # Guarded by: test_a_rank_that_was_stopped_while_its_peer_died_is_freed,
    # test_the_reducer_s_own_collectives_end_with_the_abort.
    def for_collective(self, work: dist.Work) -> None:
        """Return when ``work`` is done. Raises what it raised, or ConnectionError after an abort."""
        while not self._is_done(work):
            if self._is_aborted.is_set():
                raise ConnectionError("the generation was aborted")

    @staticmethod
    def _is_done(work: dist.Work) -> bool:
        try:
            work.wait(_LOOK_EVERY)
        except RuntimeError:
            pass
        else:
            return True
        if not work.is_completed():
            return False
        work.wait()  # it became so since, or this raises what it raised
        return True

    def for_messages(self, works: Sequence[dist.Work | None]) -> None:
        """The same for messages to and from peers, whose own wait fails the whole group when it ends.

        After an abort a thread still waits in the place of this one.
        """
        ended = threading.Event()
        errors: list[BaseException] = []

        def wait() -> None:
            try:
                for work in works:
                    if work is not None:
                        work.wait()
            except BaseException as error:  # noqa: BLE001 - the other thread raises it
                errors.append(error)
            finally:
                ended.set()

        try:
            threading.Thread(target=wait, name="messages", daemon=True).start()
        except RuntimeError:  # no memory for its stack
            wait()
        while not ended.wait(LOOK_EVERY_S):
            if self._is_aborted.is_set():
                raise ConnectionError("the generation was aborted")
        try:
            if errors:
                raise errors[0]
        finally:
            errors.clear()  # else it would hold itself, and with it the group's connections


class SumsOfBuckets(Protocol):
    """The bucket sums of the current backward."""

    def sum_map(self, used: Tensor) -> dist.Work | None:
        """Sum the map of the ``used`` parameters, and wait for all buckets; None: that is to be done here."""
        ...

    def finish(self) -> None:
        """Wait for all buckets."""
        ...


class GroupOfReducer(dist.ProcessGroup):
    """The group that DDP's reducer is given: its own small collectives are waited for like all others.

    The reducer would wait for them in C++: for the map of the used parameters in every step that looks
    for unused ones, and once for the layout of its buckets. torch supports groups written in Python
    (torch, test/distributed/test_c10d_pypg.py).
    """

    def __init__(self, group: dist.ProcessGroup, waits: Waits, sums: SumsOfBuckets) -> None:
        super().__init__(group.rank(), group.size())  # type: ignore[call-arg] # not in torch's stub
        self._group = group
        self._waits = waits
        self._sums = sums

    def getBackendName(self) -> str:  # noqa: N802 - torch's name
        """Return a name for DDP's log; with a name of torch's, DDP would look for that backend inside."""
        return "ddp_runner"

    def allreduce(  # type: ignore[override] # C++ calls it in this one way
        self, tensors: list[Tensor], *options: Any
    ) -> dist.Work:
        """Sum the reducer's map of the used parameters, after the last bucket.

        The reducer waits for the map next, so this call waits for it.
        """
        work = self._sums.sum_map(tensors[0])
        if work is None:
            work = self._group.allreduce(tensors, *options)
            self._sums.finish()
        return self._done(work)

    def broadcast(  # type: ignore[override] # the same
        self, tensors: list[Tensor], *options: Any
    ) -> dist.Work:
        """Broadcast in the wrapped group, and wait for it."""
        return self._done(self._group.broadcast(tensors, *options))

    def _done(self, work: dist.Work) -> dist.Work:
        self._waits.for_collective(work)
        return work
