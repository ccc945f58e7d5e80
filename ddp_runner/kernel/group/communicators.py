"""The part of a group that ends in silence when it is aborted: NCCL's communicators.

An aborted kernel of NCCL's still posts its remaining steps to its neighbours (NCCL 2.21 to 2.30,
prims_simple.h: postPeer), so that a peer that is not aborted yet comes to the end of a wrong sum and
hears of no error. Hence two phases (NCCL's guide on fault tolerance: agree first, abort then): every
rank hears of the abort and commits nothing from then on, and only then communicators are aborted.
"""

from __future__ import annotations

import contextlib
import threading
import traceback
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ddp_runner.kernel.group.abort import AbortSwitch

ABORT_TIMEOUT_S = 30.0  # for the device to let go of an aborted generation
INSIDE_TIMEOUT_S = 5.0  # for a thread of this rank's to come back from a call into the backend


def ends_in_silence(backend: str) -> bool:
    """Return True if an aborted collective of ``backend`` looks as if it had completed."""
    return "nccl" in backend


class Communicators:
    """The communicators of one generation. ``abort`` may be called from any thread; it returns at once."""

    def __init__(self, group: dist.ProcessGroup, switch: AbortSwitch, device: torch.device) -> None:
        self._group = group
        self._switch = switch
        self._device = device
        self._inside = threading.RLock()
        self._has_begun = threading.Lock()
        self._has_ended = threading.Event()
        self._failure = ""
        switch.on_cut(self.abort)

    @contextlib.contextmanager
    def entered(self) -> Iterator[None]:
        """Call into the backend in the block. Raises ConnectionError once the generation was aborted."""
        # INVARIANT nobody-inside-while-aborting: no thread of this rank is inside NCCL while its
        # communicators are aborted. Broken if: something is enqueued outside this block.
        # Guarded by: test_nothing_is_enqueued_while_communicators_are_aborted.
        with self._inside:
            if self._switch.tripped:
                raise ConnectionError("the generation was aborted")
            yield

    def abort(self) -> None:
        """Begin to abort them, in a thread of its own: it may take as long as the group's timeout."""
        if self._has_begun.acquire(blocking=False):
            threading.Thread(target=self._abort, name="abort communicators", daemon=True).start()

    def await_aborted(self) -> str:
        """Return once they are aborted: "", or why they may not be."""
        if not self._has_ended.wait(ABORT_TIMEOUT_S):
            return f"aborting the communicators has not ended within {ABORT_TIMEOUT_S:g} s"
        return self._failure

    def _abort(self) -> None:
        is_alone = self._inside.acquire(timeout=INSIDE_TIMEOUT_S)
        try:
            # Never torch's own world with it, which the training thread may be about to use.
            self._group._get_backend(self._device).abort()  # noqa: SLF001 - there is no public name
        except Exception as error:  # noqa: BLE001 - top of a thread: reported to who waits
            self._failure = f"aborting the communicators failed: {error}"
            traceback.print_exc()
        finally:
            if is_alone:
                self._inside.release()
            self._has_ended.set()


class EnteredGroup(dist.ProcessGroup):
    """The group that DDP's reducer is given: its own small collectives are registered like all others."""

    def __init__(self, group: dist.ProcessGroup, communicators: Communicators) -> None:
        super().__init__(group.rank(), group.size())  # type: ignore[call-arg] # not in torch's stub
        self._group = group
        self._communicators = communicators
        self._work: dist.Work | None = None  # C++ alone would keep half of one written in Python

    def getBackendName(self) -> str:  # noqa: N802 - torch's name
        """Return a name for DDP's log; with a name of torch's, DDP would look for that backend inside."""
        return "ddp_runner"

    def allreduce(  # type: ignore[override] # C++ calls it in this one way
        self, tensors: list[Tensor], *options: Any
    ) -> dist.Work:
        """Start an all-reduce in the wrapped group."""
        with self._communicators.entered():
            self._work = self._group.allreduce(tensors, *options)
        return self._work

    def broadcast(  # type: ignore[override] # the same
        self, tensors: list[Tensor], *options: Any
    ) -> dist.Work:
        """Start a broadcast in the wrapped group."""
        with self._communicators.entered():
            self._work = self._group.broadcast(tensors, *options)
        return self._work
