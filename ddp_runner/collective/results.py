"""Results of a group's collectives, which an abort ends whatever has become of the collective itself.

gloo forgets a message that it could not write, or has begun to read, when its connection ends
(gloo, transport/tcp: Pair::signalException goes through those that have not begun): who waits for it
is held for the group's whole timeout, and nothing that can be reached from outside frees him. It takes
no more than a rank that gets no CPU for a moment while its peer dies. So no rank of ours waits for the
collective: it waits for a future of our own, which the collective completes, or the abort.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

Gate = torch.futures.Future[None]


class Results:
    """Of one generation's collectives. ``abort`` may come from any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._open: set[Gate] = set()
        self._is_aborted = False

    # INVARIANT nobody-waits-inside-gloo: the training thread waits for a result, never for one of
    # gloo's collectives. Broken if: anything calls work.wait() on one, or a collective that blocks.
    # Guarded by: test_a_rank_that_was_stopped_while_its_peer_died_is_freed.
    def of(self, work: dist.Work) -> torch.futures.Future[Tensor]:
        """The first tensor of ``work``, a collective on the CPU, once it is there.

        The future holds what the collective raised, or ConnectionError after an abort; ``wait`` raises
        either as RuntimeError.
        """
        gate: Gate = torch.futures.Future()
        done: torch.futures.Future[list[Tensor]] = work.get_future()
        result: torch.futures.Future[Tensor] = gate.then(lambda _gate: _value_of(done))
        self._add(gate)
        done.add_done_callback(lambda _done: self._complete(gate))
        return result

    def until_sent(self, works: Sequence[dist.Work | None]) -> None:
        """Return when ``works`` have ended, messages to peers: those have no futures.

        Raises what they raise, or ConnectionError after an abort; a thread then waits in their place.
        """
        gate: Gate = torch.futures.Future()
        ended: list[RuntimeError | None] = []

        def wait() -> None:
            try:
                for work in works:
                    if work is not None:
                        work.wait()
            except RuntimeError as error:
                ended.append(error)
            else:
                ended.append(None)
            self._complete(gate)

        self._add(gate)
        threading.Thread(target=wait, name="sent", daemon=True).start()
        gate.wait()
        if not ended:
            raise ConnectionError("the generation was aborted")
        if ended[0] is not None:
            raise ended[0]

    def abort(self) -> None:
        """Complete all that are open, and those to come at once. Idempotent."""
        with self._lock:
            self._is_aborted = True
            left = list(self._open)
        for gate in left:
            self._complete(gate)

    def _add(self, gate: Gate) -> None:
        with self._lock:
            self._open.add(gate)
            is_late = self._is_aborted
        if is_late:
            self._complete(gate)

    def _complete(self, gate: Gate) -> None:
        with self._lock:
            if gate not in self._open:
                return  # the other side was faster
            self._open.remove(gate)
        gate.set_result(None)


def _value_of(done: torch.futures.Future[list[Tensor]]) -> Tensor:
    if not done.done():
        raise ConnectionError("the generation was aborted")
    return first_value(done)


def first_value(done: torch.futures.Future[list[Tensor]]) -> Tensor:
    """The one tensor of a collective that is done. Raises what the collective raised."""
    value = done.value()
    return value[0] if isinstance(value, list) else value


class GroupOfReducer(dist.ProcessGroup):
    """What DDP's reducer takes for the group: its own small collectives, with results of ours.

    The reducer waits for them in C++: for the map of the used parameters in every step that looks
    for unused ones, and once for the order of its buckets. torch supports groups written in Python
    (torch, test/distributed/test_c10d_pypg.py).
    """

    def __init__(self, group: dist.ProcessGroup, results: Results) -> None:
        super().__init__(group.rank(), group.size())  # type: ignore[call-arg] # not in torch's stub
        self._group = group
        self._results = results
        self._work: _Work | None = None  # C++ alone would keep half of it alive

    def getBackendName(self) -> str:  # noqa: N802 - torch's name
        """For DDP's log; the name of one of torch's own would have it look for that one inside."""
        return "ddp_runner"

    def allreduce(  # type: ignore[override] # C++ calls it in this one way
        self, tensors: list[Tensor], *options: Any
    ) -> dist.Work:
        """As the group does."""
        return self._own(self._group.allreduce(tensors, *options))

    def broadcast(  # type: ignore[override] # the same
        self, tensors: list[Tensor], *options: Any
    ) -> dist.Work:
        """As the group does."""
        return self._own(self._group.broadcast(tensors, *options))

    def _own(self, work: dist.Work) -> dist.Work:
        self._work = _Work(self._results.of(work))
        return self._work


class _Work(dist.Work):
    def __init__(self, result: torch.futures.Future[Tensor]) -> None:
        super().__init__()
        self._result = result

    def wait(self, _timeout: timedelta | None = None) -> bool:
        """Return once it is done. Raises what the collective raised, or RuntimeError after an abort."""
        self._result.wait()
        return True
