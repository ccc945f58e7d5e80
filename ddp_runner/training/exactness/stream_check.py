"""Whether all ranks read the same stream. One that shards itself loses data without an error."""

from __future__ import annotations

import json
import time

from ddp_runner.collective.group import Group
from ddp_runner.collective.waiting import waiting_for_peers
from ddp_runner.core.faults import Fault, FaultError, FaultKind
from ddp_runner.core.messages import TuningChanged
from ddp_runner.data.stream import StreamLoader
from ddp_runner.training.runtime import Runtime

STREAMS_DIFFER = "the ranks' streams differ"
WHOLE_STREAM = (
    "Every rank must read the whole stream: it keeps its own share of each step's samples"
)


class StreamWatch:
    """Compares, now and then, where the ranks of one generation stand in an iterable dataset."""

    def __init__(self, group: Group, runtime: Runtime, *, first_step: int) -> None:
        self._group = group
        self._runtime = runtime
        self._first_step = first_step  # of the generation: somebody may have just opened the stream
        self._has_warned = False

    def compare(self, loader: StreamLoader, *, step: int, is_due: bool) -> None:
        """After ``step``, on all ranks; at a generation's steps 1, 2, 4, 8 and so on, and where it ``is_due``.

        Warns once of streams that give other items at the same place, which is not exact; raises
        FaultError where they do not stand at the same place, as streams of different lengths do after
        an epoch.
        """
        done = step - self._first_step
        is_power_of_two = done & (done - 1) == 0
        if not (is_due or is_power_of_two) or self._group.world_size == 1:
            return
        mine = loader.position()
        with waiting_for_peers(self._runtime.slot):
            texts = self._group.exchange(f"stream/{step}", json.dumps(mine))
        answers = [json.loads(answer) for answer in texts]
        if len({(epoch, items) for epoch, items, _ in answers}) > 1:
            places = ", ".join(f"item {items} of epoch {epoch}" for epoch, items, _ in answers)
            raise FaultError(
                Fault(
                    kind=FaultKind.RANK_RAISED,
                    rank=self._runtime.rank_info.rank,
                    step=step,
                    cause=f"the ranks' streams are not of one length, they stand at {places}. "
                    f"{WHOLE_STREAM}",
                    at_ns=time.monotonic_ns(),
                    may_retry=False,
                )
            )
        if len({newest for _, _, newest in answers if newest}) > 1 and not self._has_warned:
            self._has_warned = True
            if self._group.rank == 0:
                self._runtime.logger.warning(f"{STREAMS_DIFFER}. {WHOLE_STREAM}", step=step)
                self._runtime.report(
                    TuningChanged(
                        rank=self._runtime.rank_info.rank,
                        step=step,
                        action="",
                        inexact_reason=STREAMS_DIFFER,
                    )
                )
