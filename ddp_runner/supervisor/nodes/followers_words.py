"""A follower's substitutes for recorder and repair: the coordinator records and decides."""

from __future__ import annotations

from collections.abc import Callable

from ddp_runner.core import events
from ddp_runner.core.node_messages import NodeMessage, Said
from ddp_runner.supervisor.rank_handle import RankHandle
from ddp_runner.supervisor.run_facts import RunFacts

Report = Callable[[NodeMessage], None]


class Herald:
    """Replaces the recorder: shows lines here and sends them to the coordinator."""

    def __init__(self, facts: RunFacts, report: Report, show: Callable[[str, str], None]) -> None:
        self.facts = facts
        self._report = report
        self._show = show

    def record(self, event: events.Event, *, cause: int | None = None) -> int:
        """Ignore the event: what happens to processes other than the ranks is not reported to the coordinator."""
        del event, cause
        return -1

    def say(self, text: str, *, level: str = "INFO") -> None:
        """A line for people."""
        self._show(text, level)
        self._report(Said(text=text, level=level))

    def imported(self, seconds: float) -> None:
        """The zygote is ready; the coordinator sees that by what can be forked."""


class Reporter:
    """Replaces the repair: collects the ranks without a process, which the coordinator decides about."""

    def __init__(self) -> None:
        self.never_came: list[RankHandle] = []

    def schedule_respawn(self, handle: RankHandle) -> None:
        """No process came of what was asked for, or the one that did is about to be ended."""
        if not handle.is_alive:
            self.never_came.append(handle)
