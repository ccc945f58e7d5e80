"""What is known of a run's result: whether it is exact, what proves that, and who is slow. Decides nothing."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from ddp_runner.core import events


@dataclass(frozen=True, slots=True, kw_only=True)
class StageRecord:
    """A stage in summary.json. ``last_step`` and ``loss``: with which it has ended; None where it has not."""

    name: str
    first_step: int
    last_step: int | None = None
    loss: float | None = None


@dataclass(slots=True, kw_only=True)
class RunFindings:
    """Filled by the events of a run; the summary has it from here."""

    run_id: str = ""
    name: str = ""
    stages: list[StageRecord] = field(
        default_factory=list
    )  # that this launch has trained, in order
    inexact_reasons: list[str] = field(default_factory=list)
    stragglers: dict[int, float] = field(default_factory=dict)  # rank -> factor over the others
    # With several machines: how often each was lost in this launch.
    machines_lost: dict[str, int] = field(default_factory=dict)
    # Steps of this launch that were computed twice with the same bits: "repeated", "drilled".
    proved: dict[str, set[int]] = field(default_factory=dict)

    @property
    def stage(self) -> str:
        """The stage that is trained; empty without stages."""
        return self.stages[-1].name if self.stages else ""

    def own_steps(self, steps: int) -> int:
        """Of so many steps of the run those of the stage that is trained; all, without stages."""
        return steps - (self.stages[-1].first_step if self.stages else 0)

    def take(self, event: events.Event) -> None:
        """What an event says of the result."""
        match event:
            case events.StageBegins(stage=stage, first_step=first_step):
                self.stages.append(StageRecord(name=stage, first_step=first_step))
            case events.StageEnds(step=step, loss=loss) if self.stages:
                self.stages[-1] = replace(self.stages[-1], last_step=step, loss=loss)
            case events.Straggler(rank=rank, factor=factor):
                self.stragglers[rank] = factor
            case events.Proved(what=what, step=step):
                # Of ranks that report one step it counts once.
                self.proved.setdefault(what, set()).add(step)
            case (
                events.Plan(inexact_reason=reason)
                | events.TuningChanged(inexact_reason=reason)
                | events.RepairedInPlace(inexact_reason=reason)
                | events.Drill(inexact_reason=reason)
                | events.NotProved(inexact_reason=reason)
            ):
                if reason and reason not in self.inexact_reasons:
                    self.inexact_reasons.append(reason)
            case _:
                pass
