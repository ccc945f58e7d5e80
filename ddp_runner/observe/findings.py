"""What is known of a run's result: whether it is exact, what proves that, and who is slow. Decides nothing."""

from __future__ import annotations

from dataclasses import dataclass, field

from ddp_runner.core import events


@dataclass(slots=True, kw_only=True)
class RunFindings:
    """Filled by the events of a run; the summary has it from here."""

    run_id: str = ""
    name: str = ""
    inexact_reasons: list[str] = field(default_factory=list)
    stragglers: dict[int, float] = field(default_factory=dict)  # rank -> factor over the others
    # Steps of this launch that were computed twice with the same bits: "repeated", "drilled".
    proved: dict[str, set[int]] = field(default_factory=dict)

    def take(self, event: events.Event) -> None:
        """What an event says of the result."""
        match event:
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
            ):
                if reason and reason not in self.inexact_reasons:
                    self.inexact_reasons.append(reason)
            case _:
                pass
