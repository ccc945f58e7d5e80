"""A checkpoint that a person waits for: kept over repairs until one is reported. Decides nothing else."""

from __future__ import annotations

from ddp_runner.core import events
from ddp_runner.core.messages import Checkpoint
from ddp_runner.supervisor.reporting.recorder import Recorder
from ddp_runner.supervisor.reporting.run_facts import RunFacts
from ddp_runner.supervisor.world import World


class SaveRequest:
    """Of the step at which it was asked for, or a later one."""

    def __init__(self, facts: RunFacts, *, world: World, recorder: Recorder) -> None:
        self._facts = facts
        self._world = world
        self._recorder = recorder
        self._from_step: int | None = None  # None: nobody waits

    def ask(self) -> None:
        """Have one made after the step in hand."""
        self._from_step = self._facts.committed_step
        self._recorder.record(events.SaveAsked())
        self.pass_on()

    def accept_from(self, step: int) -> None:
        """A roll-back may have led behind the step at which one was asked for."""
        if self._from_step is not None:
            self._from_step = min(self._from_step, step)

    def saved(self, step: int) -> None:
        """There is one of this step."""
        if self._from_step is not None and step >= self._from_step:
            self._from_step = None

    def pass_on(self) -> None:
        """Ask the rank that saves, which may be another one than before."""
        if self._from_step is not None:
            self._world.send(self._world.present[0], Checkpoint())
