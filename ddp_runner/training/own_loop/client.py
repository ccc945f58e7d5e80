"""A loop of the user's own as the engine's client: what its ranks compare, agree on and end with.

Its steps in one generation are ``steps.py``'s.
"""

from __future__ import annotations

import hashlib
import json
import time
from dataclasses import replace

from ddp_runner.collective.group import Group
from ddp_runner.collective.waiting import waiting_for_peers
from ddp_runner.core.errors import BadInputError
from ddp_runner.core.exits import StopReason
from ddp_runner.core.faults import Fault, FaultKind, rank_list
from ddp_runner.core.phases import Phase
from ddp_runner.training.agreeing import agree_on_weights
from ddp_runner.training.components.tuning import free_memory
from ddp_runner.training.exactness.first_step import report_inexact
from ddp_runner.training.own_loop.declared import OwnLoop
from ddp_runner.training.own_loop.parts import LoopParts
from ddp_runner.training.own_loop.steps import LoopSteps
from ddp_runner.training.rank_client import RankClient, change_tuning, exchange_tuning
from ddp_runner.training.session import Makers
from ddp_runner.training.train_report import TrainReport, finished_message, report_of


class LoopClient(RankClient):
    """Implements :class:`~ddp_runner.training.engine.Client` for a loop, from the rank's start to its end."""

    _parts: LoopParts

    def __init__(self, parts: LoopParts, run_id: str, loop: OwnLoop) -> None:
        super().__init__(parts, run_id)
        self._loop = loop
        self.steps: LoopSteps | None = None  # of the newest generation
        self.reason: StopReason | None = None  # why training has ended, once it has
        self.report: TrainReport | None = None  # of that

    def compare(self, group: Group) -> None:
        """Compare program, kept objects and length. Raises BadInputError where ranks have other ones."""
        state, length = self._parts.state, self._parts.workload.length
        shapes = [(name, list(one.shape), str(one.dtype)) for name, one in state.named_parameters()]
        mine = {
            **{f"the file {name}": digest for name, digest in self._loop.program.items()},
            "what is kept": [*self._loop.kept.names()],
            "the shapes of parameters": hashlib.sha256(json.dumps(shapes).encode()).hexdigest(),
            "the length of the run": [length.steps_per_epoch, length.total_steps],
        }
        with waiting_for_peers(self._runtime.slot):
            found = [json.loads(one) for one in group.exchange("loop", json.dumps(mine))]
        for what in dict.fromkeys(key for one in found for key in one):
            # A file that not all of them have imported is the program's own choice.
            having = [rank for rank, one in enumerate(found) if what in one]
            values = {rank: found[rank][what] for rank in having}
            odd = next((rank for rank in having if values[rank] != values[having[0]]), None)
            if odd is None:
                continue
            if what.startswith("the file"):
                expected = (
                    f"{what.removeprefix('the file ')} has changed on disk since the run began: two"
                )
                raise BadInputError(
                    "run.steps", "", f"{expected} programs must not train one model"
                )
            shown = f": {values[having[0]]} and {values[odd]}" if "length" in what else ""
            raise BadInputError(
                "run.steps", "", f"ranks {having[0]} and {odd} differ in {what}{shown}"
            )

    def agree(self, group: Group, *, is_first: bool) -> None:
        """Agree on whether DDP looks for unused parameters."""
        super().agree(group, is_first=is_first)
        state, learnt = self._parts.state, self._learnt(is_first=is_first)
        state.tuning = exchange_tuning(group, state.tuning, changed=learnt)
        self._changed = None
        self._compare_data(group)

    def _compare_data(self, group: Group) -> None:
        """Compare what each rank has as data with what that rank had before, in this launch or the last one."""
        state = self._parts.state
        with waiting_for_peers(self._runtime.slot):
            found = group.exchange("data", self._parts.data_digest)
        before, state.data_of = state.data_of, list(found)
        pairs = enumerate(zip(before, found, strict=False))
        other = [rank for rank, (was, now) in pairs if was != now]
        if other and state.committed_step > 0 and group.rank == 0:
            report_inexact(
                self._parts,
                f"{rank_list(other)} made other data than before: make it behind attach(), which seeds all random"
                " numbers, or seed what makes it",
            )

    def enter(self, group: Group) -> Makers:
        """Wrap the module for the steps of a generation."""
        guard = self._guard(group)
        self.steps = steps = LoopSteps(self._parts, self._loop, group=group, guard=guard)
        return Makers(maker=steps, guard=guard, side=self._side(group))

    def repaired(self, fault: Fault) -> Fault:
        """Have DDP look for unused parameters; a lack of memory is not this process's to repair."""
        self.steps = None
        free_memory()
        if fault.kind is FaultKind.OUT_OF_MEMORY:
            return replace(fault, may_retry=False)
        self._changed = change_tuning(self._parts.state, self._runtime, fault, samples=1)
        return fault if self._changed is not None else replace(fault, may_retry=False)

    def conclude(self, group: Group, reason: StopReason) -> None:
        """Make the report. Raises FaultError where the replicas ended with different weights."""
        report = report_of(self._parts, reason)
        agree_on_weights(group, self._parts.state, self._runtime, report.weights_sha256)
        self._runtime.slot.stamp(Phase.FINISHED, time.monotonic_ns())
        self._runtime.report(finished_message(report, self._runtime.rank_info.rank))
        self.reason, self.report = reason, report
