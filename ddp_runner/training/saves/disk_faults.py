"""Reports what the disk refused or damaged, to people and to the supervisor. Training goes on."""

from __future__ import annotations

import time
from dataclasses import replace

from ddp_runner.checkpoint.store import CheckpointStore, Loaded
from ddp_runner.kernel.rules.faults import Fault, FaultKind
from ddp_runner.kernel.rules.phases import Phase
from ddp_runner.kernel.step.runtime import Runtime
from ddp_runner.kernel.wire.events import FaultTolerated
from ddp_runner.training.state import TrainState


class DiskFaults:
    """Owned by :class:`Saving`. Each fault is reported with what is done about it."""

    def __init__(self, state: TrainState, runtime: Runtime) -> None:
        self._state = state
        self._runtime = runtime

    def storage_failed(self, cause: str) -> Fault:
        """A save that failed, of the step as it is now."""
        return self._fault(FaultKind.STORAGE_FAILED, cause)

    def warn(self, fault: Fault, action: str) -> None:
        """Report the fault; the supervisor shows its line, because this rank's log may be on the full disk."""
        self._note(fault, action)

    def report_unusable(self, store: CheckpointStore, loaded: Loaded) -> None:
        """Newer checkpoints that were passed over, and why."""
        for remark in store.remarks(loaded):
            self._runtime.logger.warning(remark)
        for path, why in loaded.rejected:
            fault = self._fault(FaultKind.CHECKPOINT_BAD, f"{path} is unusable: {why}")
            self._note(fault, f"{loaded.path.name} was loaded instead")

    def _fault(self, kind: FaultKind, cause: str) -> Fault:
        return Fault(
            kind=kind,
            rank=-1,
            step=self._state.committed_step,
            cause=cause,
            phase=Phase.CHECKPOINT.label,
            at_ns=time.monotonic_ns(),
        )

    def _note(self, fault: Fault, action: str) -> None:
        rank = self._runtime.rank_info.rank
        self._runtime.report(
            FaultTolerated(rank=rank, fault=replace(fault, rank=rank), action=action)
        )
