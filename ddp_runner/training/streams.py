"""Whether all ranks read the same stream. One that shards itself loses data without an error."""

from __future__ import annotations

import json
import time

from ddp_runner.collective.group import Group
from ddp_runner.collective.waiting import waiting_for_peers
from ddp_runner.core.faults import Fault, FaultError, FaultKind
from ddp_runner.data.stream import StreamLoader
from ddp_runner.training.runtime import Runtime

WHOLE_STREAM = (
    "Every rank must read the whole stream: it keeps its own share of each step's samples"
)


class StreamWatch:
    """Compares, now and then, where the ranks of one generation stand in an iterable dataset."""

    def __init__(self, group: Group, runtime: Runtime) -> None:
        self._group = group
        self._runtime = runtime
        self._has_warned = False

    def compare(self, loader: StreamLoader, *, step: int, is_due: bool) -> None:
        """After ``step``, on all ranks; at steps 1, 2, 4, 8 and so on, and where it ``is_due``.

        Warns once of streams that give other items at the same place; raises FaultError where they
        do not stand at the same place, as streams of different lengths do after an epoch.
        """
        is_power_of_two = step & (step - 1) == 0
        if not (is_due or is_power_of_two) or self._group.world_size == 1:
            return
        mine = loader.position()
        with waiting_for_peers(self._runtime.slot):
            told = self._group.exchange(f"stream/{step}", json.dumps(mine))
        answers = [json.loads(answer) for answer in told]
        if len({(epoch, items) for epoch, items, _ in answers}) > 1:
            places = ", ".join(f"item {items} of epoch {epoch}" for epoch, items, _ in answers)
            raise FaultError(
                Fault(
                    kind=FaultKind.RANK_RAISED,
                    rank=self._runtime.place.rank,
                    step=step,
                    cause=f"the ranks' streams are not of one length, they stand at {places}. "
                    f"{WHOLE_STREAM}",
                    at_ns=time.monotonic_ns(),
                    may_retry=False,
                )
            )
        if _differ([first for _, _, first in answers]) and not self._has_warned:
            self._has_warned = True
            if self._group.rank == 0:
                self._runtime.logger.warning(
                    f"the ranks' streams differ. {WHOLE_STREAM}", step=step
                )


def _differ(firsts: list[tuple[int, int, str]]) -> bool:
    """Whether two ranks had other items at one place; a rank that was replaced began elsewhere."""
    found: dict[tuple[int, int], set[str]] = {}
    for epoch, item, content in firsts:
        found.setdefault((epoch, item), set()).add(content)
    return any(len(contents) > 1 for contents in found.values())
