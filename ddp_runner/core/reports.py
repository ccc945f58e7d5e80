"""What a rank reports of itself, as the events that it stands for. Pure."""

from __future__ import annotations

from collections.abc import Iterator

from ddp_runner.core import events, messages

Reported = (
    messages.TuningChanged | messages.RepairedInPlace | messages.FaultTolerated | messages.Proved
)


def events_of(message: Reported, *, generation: int) -> Iterator[events.Event]:
    """In their order, each the cause of the next. ``generation``: that of the rank."""
    match message:
        case messages.TuningChanged():
            yield events.TuningChanged(
                rank=message.rank,
                step=message.step,
                action=message.action,
                inexact_reason=message.inexact_reason,
                fault_free=message.fault_free,
                plain_retry=message.plain_retry,
            )
        case messages.Proved():
            yield events.Proved(rank=message.rank, step=message.step, what=message.what)
        case messages.FaultTolerated():
            common = events.of_fault(message.fault, generation=generation)
            yield events.FaultTolerated(**common, action=message.action)
        case messages.RepairedInPlace():
            common = events.of_fault(message.fault, generation=generation)
            yield events.Fault(**common, is_repaired=True)
            yield events.RepairedInPlace(
                action=message.action,
                seconds=round(message.seconds, 4),
                steps_lost=message.steps_lost,
                fault=message.fault,
                generation=generation,
                inexact_reason=message.inexact_reason,
            )
