"""What a follower has in the place of recorder and repair: the coordinator records, and decides."""

from __future__ import annotations

from collections.abc import Callable

from ddp_runner.core import events
from ddp_runner.core.node_messages import NodeMessage, Said
from ddp_runner.supervisor.rank_handle import RankHandle
from ddp_runner.supervisor.reporting.run_facts import RunFacts

Report = Callable[[NodeMessage], None]


class Herald:
    """In the place of a recorder: what is worth a line is said here and to the coordinator."""

    def __init__(self, facts: RunFacts, report: Report, show: Callable[[str, str], None]) -> None:
        self.facts = facts
        self._report = report
        self._show = show

    def record(self, event: events.Event, *, cause: int | None = None) -> int:
        """What happens to the processes beside the ranks stays here."""
        del event, cause
        return -1

    def say(self, text: str, *, level: str = "INFO") -> None:
        """A line for people."""
        self._show(text, level)
        self._report(Said(text=text, level=level))

    def imported(self, seconds: float) -> None:
        """The zygote is ready; the coordinator sees that by what can be forked."""


class Reporter:
    """In the place of a repair: that a rank needs another process is the coordinator's to decide."""

    def __init__(self) -> None:
        self.never_came: list[RankHandle] = []

    def schedule_respawn(self, handle: RankHandle) -> None:
        """No process came of what was asked for, or the one that did is about to be ended."""
        if not handle.is_alive:
            self.never_came.append(handle)
