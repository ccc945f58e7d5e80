"""The restarts of one job as one run: what its ranks reported, replayed into the account of a run. Pure.

Under an outside launcher nobody watches the ranks. What is known of an earlier restart is what its
ranks reported before they ended; a rank that reported nothing of a fault is the one that was lost.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import zip_longest

from ddp_runner.kernel.rules.classify import attribute
from ddp_runner.kernel.rules.divergence import inexact_by
from ddp_runner.kernel.rules.faults import Fault, FaultKind
from ddp_runner.kernel.rules.recovery import Incident, ReplaceRanks
from ddp_runner.kernel.wire import events
from ddp_runner.kernel.wire.board import SlotReading
from ddp_runner.kernel.wire.messages import Finished, Message, RestartProgress
from ddp_runner.observe.accounting import RunAccounting
from ddp_runner.observe.summary import RunFindings

SPENT = ("productive", "data_wait", "checkpoint", "comparison", "evaluation")
# What one rank reported, by the number of the restart.
_ByRestart = Mapping[int, Sequence[Message]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Restart:
    """One of them, by what its rank 0 reported; ``shift_ns`` brings its times to the newest one's clock."""

    progress: tuple[RestartProgress, ...]
    shift_ns: int

    @property
    def generation(self) -> int:
        """Its number, from 1 on."""
        return self.progress[0].generation

    @property
    def began_s(self) -> float:
        """When its process began."""
        return (self.progress[0].began_ns + self.shift_ns) / 1e9

    @property
    def formed_s(self) -> float | None:
        """When its ranks began to train; None where they never did."""
        formed_ns = self.progress[-1].formed_ns
        return self.at_s(formed_ns) if formed_ns else None

    @property
    def first_step_s(self) -> float | None:
        """When its first step began; None where none did."""
        first_ns = self.progress[-1].first_step_ns
        return self.at_s(first_ns) if first_ns else None

    @property
    def first_step(self) -> int:
        """The step that it went on from; 0 where it never trained."""
        return next((latest.step for latest in self.progress if latest.formed_ns), 0)

    def at_s(self, at_ns: int) -> float:
        """A time of its own; never before it began, for a rank may be on another machine."""
        return max((at_ns + self.shift_ns) / 1e9, self.began_s)


@dataclass(slots=True)
class Replay:
    """The replayed account of a job's restarts, as a supervisor would have kept it."""

    accounting: RunAccounting
    findings: RunFindings = field(default_factory=RunFindings)
    spent_ns: Counter[str] = field(default_factory=Counter)  # where the time of all went, by share

    def reading_of_all(self, newest: SlotReading) -> SlotReading:
        """Return the reading that rank 0's slot would have, had it outlived all restarts."""
        return replace(
            newest,
            productive_ns=self.spent_ns["productive"],
            data_wait_ns=self.spent_ns["data_wait"],
            checkpoint_ns=self.spent_ns["checkpoint"],
            comparison_ns=self.spent_ns["comparison"],
            evaluation_ns=self.spent_ns["evaluation"],
        )

    def record(self, event: events.Event, at_s: float) -> None:
        """Something has happened."""
        self.findings.take(event)
        self.accounting.take(event, now_s=at_s)


def replay(messages_by_rank: Mapping[int, Sequence[Message]]) -> Replay:
    """Record all that the ranks of a job reported, oldest restart first. Rank 0 has reported something."""
    first = min(
        message.generation
        for messages in messages_by_rank.values()
        for message in messages
        if isinstance(message, RestartProgress)
    )
    reported = {
        rank: _by_restart(messages, otherwise=first)
        for rank, messages in sorted(messages_by_rank.items())
    }
    restarts = _restarts(reported.values())
    run = Replay(RunAccounting(began_s=restarts[0].began_s))
    run.accounting.first_step_s = next(
        (one.first_step_s for one in restarts if one.first_step_s is not None), None
    )
    for restart, after in zip_longest(restarts, restarts[1:]):
        _form(run, restart)
        for at_s, event in _events_within(restart, reported, before_ns=run.spent_ns["productive"]):
            run.record(event, at_s)
        if after is not None and (plan := _what_ended(restart, reported)) is not None:
            run.record(plan, plan.began_s)
        run.spent_ns.update(restart.progress[-1].spent_ns)
    return run


def _by_restart(messages: Iterable[Message], *, otherwise: int) -> _ByRestart:
    """Group a rank's reports by restart: each group begins with the rank's first sign of life there."""
    found: dict[int, list[Message]] = {}
    number = otherwise
    for message in messages:
        if isinstance(message, RestartProgress):
            number = message.generation
        found.setdefault(number, []).append(message)
    return found


def _restarts(reported: Iterable[_ByRestart]) -> list[Restart]:
    """The restarts, oldest first, on one clock: that of the newest."""
    progress: dict[int, tuple[RestartProgress, ...]] = {}
    for own in reported:  # rank 0's count, and those of the next one where it has none
        for number, messages in own.items():
            found = tuple(one for one in messages if isinstance(one, RestartProgress))
            progress[number] = progress.get(number) or found
    restarts: list[Restart] = []
    for _, ours in sorted(progress.items(), reverse=True):
        shift_ns = 0
        if restarts:
            after = restarts[-1]
            same = ours[-1].clock == after.progress[0].clock
            # Another machine, or boot: nobody knows how long nothing ran, so it counts as no time.
            after_began_ns = after.progress[0].began_ns + after.shift_ns
            shift_ns = after.shift_ns if same else after_began_ns - ours[-1].at_ns
        restarts.append(Restart(progress=ours, shift_ns=shift_ns))
    return restarts[::-1]


def _form(run: Replay, restart: Restart) -> None:
    """Its ranks begin to train, which ends what the restarts before it broke off for."""
    if restart.formed_s is None:
        return
    repairs = run.accounting.repairs_at(
        restart.formed_s,
        generation=restart.generation,
        step=restart.first_step,
        productive_ns=run.spent_ns["productive"],
    )
    if not repairs:
        formed = events.WorldFormed(generation=restart.generation, step=restart.first_step)
        run.record(formed, restart.formed_s)
    for repaired, _ in repairs:
        run.record(repaired, restart.formed_s)


def _events_within(
    restart: Restart, reported: Mapping[int, _ByRestart], *, before_ns: int
) -> list[tuple[float, events.Event]]:
    """Return the events that the restart's ranks reported, by time; ``before_ns``: productive time of earlier restarts."""
    found: list[tuple[float, events.Event]] = []
    for rank, own in reported.items():
        latest = restart.progress[0]
        for message in own.get(restart.generation, ()):
            match message:
                case RestartProgress():
                    latest = message
                case events.CheckpointSaved():
                    productive_ns = before_ns + latest.spent_ns.get("productive", 0)
                    # The run's is rank 0's.
                    saved = replace(message, productive_ns=None if rank else productive_ns)
                    found.append((restart.at_s(latest.at_ns), saved))
                case events.Report():
                    at_s = _when(message, restart, latest)
                    found.append((at_s, message.in_generation(restart.generation)))
                case _:
                    pass
    return sorted(found, key=lambda timed: timed[0])


def _when(message: events.Report, restart: Restart, latest: RestartProgress) -> float:
    match message:
        case events.RepairedInPlace(fault=fault, seconds=seconds):
            return restart.at_s(fault.at_ns) + seconds
        case events.FaultTolerated(fault=fault):
            return restart.at_s(fault.at_ns)
        case _:
            return restart.at_s(latest.at_ns)


def _what_ended(restart: Restart, reported: Mapping[int, _ByRestart]) -> events.Plan | None:
    """The incident that ended a restart, and what the launcher did; None where it ended in order."""
    faults = _faults(restart, reported)
    if not faults:
        return None
    attribution = attribute(faults)
    culprit = attribution.culprit
    at_s = restart.at_s(culprit.at_ns)
    has_formed = restart.formed_s is not None
    odd = [fault for fault in faults if fault.kind is FaultKind.REPLICA_DIVERGED]
    return events.Plan(
        plan=ReplaceRanks.__name__,
        culprit=culprit.rank,
        kind=culprit.kind.value,
        replaced=tuple(reported),
        dropped=(),
        kept=None,
        all_ranks_dead=has_formed,
        victims=tuple(fault.rank for fault in attribution.victims),
        incident=Incident(
            attribution=attribution,
            at_s=at_s,
            committed_step=culprit.step,
            ever_formed=has_formed,
            generation=restart.generation,
        ),
        began_s=at_s,
        generation=restart.generation,
        since_s=at_s,
        detect_s=None,
        action="all ranks restarted by the launcher",
        inexact_reason="; ".join(dict.fromkeys(map(inexact_by, odd))),
    )


def _faults(restart: Restart, reported: Mapping[int, _ByRestart]) -> list[Fault]:
    """Return the faults that the restart's ranks reported as they ended, and one for ranks that reported nothing."""
    faults: list[Fault] = []
    silent: list[int] = []
    for rank, by_restart in reported.items():
        own = by_restart.get(restart.generation, ())
        faults += [one.fault for one in own if isinstance(one, events.Faulted)]
        if own and not any(isinstance(one, (events.Faulted, Finished)) for one in own):
            silent.append(rank)
    if silent:
        newest = restart.progress[-1]
        who = f"rank {silent[0]}" if len(silent) == 1 else f"ranks {','.join(map(str, silent))}"
        lost = Fault(
            kind=FaultKind.RANK_EXITED,
            rank=silent[0] if len(silent) == 1 else -1,
            step=max((fault.step for fault in faults), default=max(0, newest.step)),
            cause=f"{who} ended without reporting an error: killed, or exited",
            at_ns=min((fault.at_ns for fault in faults), default=newest.at_ns),
        )
        faults.append(lost)
    return faults
