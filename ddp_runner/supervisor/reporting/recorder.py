"""Records what happens, in one place; every file and line about it is derived from there."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ddp_runner.checkpoint.unreported import Published
from ddp_runner.kernel.parent.run_facts import RunFacts
from ddp_runner.kernel.rules.faults import Fault
from ddp_runner.kernel.rules.recovery import Incident
from ddp_runner.kernel.system.clock import Clock
from ddp_runner.kernel.wire import events
from ddp_runner.observe.accounting import RunAccounting
from ddp_runner.observe.files import read_tail
from ddp_runner.observe.history.json_lines import epoch_s, parsed
from ddp_runner.observe.history.table_rows import FaultRow, FaultRows
from ddp_runner.observe.loss_history import LossHistory
from ddp_runner.observe.summary import FaultRecord, RunFindings, RunSummary
from ddp_runner.supervisor.reporting.event_log import EventLog
from ddp_runner.supervisor.reporting.outputs import Outputs

LOSS = "loss"
STEP_SECONDS = "step_s"  # stands in each line of a step


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluated:
    """The results of an evaluation after ``step``, by name."""

    step: int
    figures: Mapping[str, float]


def _no_host(rank: int) -> str:
    """Return no name: there is one machine."""
    del rank
    return ""


class Recorder:
    """Owned by the supervisor's loop. Hands each event to its sinks: facts, accounting, journal and console.

    What is no event (how far a start has come, advice) is said only.
    """

    def __init__(
        self,
        outputs: Outputs,
        *,
        name: str,
        facts: RunFacts | None = None,
        published: Published,
        clock: Clock,
        host_of: Callable[[int], str] = _no_host,
    ) -> None:
        """``name`` is that of the run; ``host_of`` names the machine of a rank."""
        self.outputs = outputs
        self._clock = clock
        self.facts = facts = facts or RunFacts()
        self.findings = RunFindings(name=name, inexact_reasons=facts.inexact_reasons)
        self.kept: RunSummary | None = (
            None  # of the run, where that was complete before this launch
        )
        self.accounting = RunAccounting(began_s=clock.monotonic())
        self._event_log = EventLog(outputs)
        self.published = published
        self.losses = LossHistory()
        self.evaluated: Evaluated | None = None  # the newest of this launch and stage
        self.observers: list[Callable[[events.Event], None]] = []  # each hears every event, once
        # Each gives figures of a rank that stand in a logged step beside what the rank has reported.
        self.readings: list[Callable[[int], Mapping[str, float]]] = []
        self._host_of = host_of

    @property
    def may_write(self) -> bool:
        """True if files are open."""
        return self.outputs.may_write

    @property
    def hidden(self) -> Sequence[str]:
        """Texts that no line and no record may hold."""
        return self.outputs.hidden

    @property
    def history(self) -> Sequence[Incident]:
        """The incidents so far, oldest first."""
        return self.accounting.history

    def record(self, event: events.Event, *, cause: int | None = None) -> int:
        """Something has happened, because of event ``cause``; returns its id."""
        event = self._completed(event.without(self.outputs.hidden))
        self.facts.saved_any |= isinstance(event, events.CheckpointSaved)
        self.findings.take(event)
        self.accounting.take(event, now_s=self._clock.monotonic(), cause=cause)
        if isinstance(event, events.StageBegins):
            self.evaluated = None  # its data is another
        for observer in self.observers:
            observer(event)
        return self._event_log.take(event, cause=cause)

    def _completed(self, event: events.Event) -> events.Event:
        """Add what is not known where a fault is noticed: the generation of the run, and the machine."""
        if not isinstance(event, events.OfFault):
            return event
        fault = event.fault
        if not fault.host:
            fault = replace(fault, host=self._host_of(fault.rank))
        return replace(event, fault=fault, generation=self.facts.generation)

    def shown(self, fault: Fault) -> Fault:
        """``fault`` as it may be known: what the supervisor makes of a process's words may hold secrets."""
        return fault.without(self.outputs.hidden)

    def say(self, text: str, *, level: str = "INFO") -> None:
        """A line of the supervisor's own, on the console and in its log."""
        self.outputs.say(text, level=level)

    def keep_words(self, rank: int, text: str) -> None:
        """Put what a rank said before it had a log file into that file, now that it has ended."""
        self.outputs.keep_words(rank, text)

    def metrics(self, step: int, rank: int, values: Mapping[str, float]) -> None:
        """One logged step, or what an evaluation after it has found."""
        if LOSS in values:
            self.losses.add(step, values[LOSS])
        is_step = STEP_SECONDS in values  # an evaluation's line has its own figures alone
        more: dict[str, float] = {}
        if is_step:
            for reading in self.readings:
                more.update(reading(rank))
        else:
            self.evaluated = Evaluated(step=step, figures=dict(values))
        self.outputs.metrics(step, rank, {**values, **more}, stage=self.findings.stage)

    def reported(self, report: events.Report) -> None:
        """Record what a rank reports of itself; of a repair the fault comes first, as its cause."""
        cause = None
        if isinstance(report, events.RepairedInPlace):
            cause = self.record(events.Faulted(fault=report.fault))
        self.record(report, cause=cause)

    def saved(self, saved: events.CheckpointSaved) -> None:
        """A rank reports a checkpoint, of which it may have been recorded that nobody has."""
        if self.published.is_news(saved):
            self.record(saved)
        else:
            self.accounting.take(saved, now_s=self._clock.monotonic())

    def saved_unreported(self) -> None:
        """Checkpoints that are on disk, of ranks that may not have lived to report them."""
        for manifest in self.published.find():
            path = str(self.published.directory / manifest.file)
            self.record(
                events.CheckpointSaved(
                    step=manifest.step, path=path, blocked_s=None, size_bytes=manifest.size_bytes
                )
            )
            # Another rank may have saved a later step since, and lived to report it.
            self.accounting.newest_checkpoint(self.published.newest())

    def know_newest(self) -> None:
        """Take the newest checkpoint of an earlier launch if this launch has saved none."""
        if not self.accounting.checkpoint:
            self.accounting.newest_checkpoint(self.published.newest())

    def world_formed(self, now_s: float, *, committed_step: int, productive_ns: int) -> None:
        """Every rank is in: the run begins, or incidents are over."""
        generation = self.facts.generation
        repairs = self.accounting.repairs_at(
            now_s, generation=generation, step=committed_step, productive_ns=productive_ns
        )
        if not repairs:
            self.record(events.WorldFormed(generation=generation, step=committed_step))
            return
        for repaired, cause in repairs:
            self.record(repaired, cause=cause)
        self.saved_unreported()


# What the journal says of the launches before: the faults of those whose ranks a coordinator has taken over,
# and whether their repairs are proved. Never raises for a file.

_READ_BYTES_MAX = 16 << 20  # of the end of a journal
_TELL = (b"repairs_proved", b"world_formed", b"run_begins")  # the events that say what is proved


def faults_before(path: Path, *, run_id: str) -> tuple[FaultRecord, ...]:
    """Return the faults of the newest launch in the journal, and of those it took over from; oldest first."""
    launches: list[list[Mapping[str, Any]]] = []
    for event in parsed(read_tail(path, _READ_BYTES_MAX)):
        if event.get("event") == "run_begins":
            launches.append([])
        if launches:
            launches[-1].append(event)
    found: list[FaultRecord] = []
    for ago, launch in enumerate(reversed(launches), start=1):
        if launch[0].get("run_id") != run_id:
            break
        found = [*_faults_of(launch, ago), *found]
        if not launch[0].get("took_over"):
            break
    return tuple(found)


def has_open_repairs(path: Path, *, run_id: str) -> bool:
    """Return whether the newest launch of this run, in the journal, has ended with a repair that no drill has proved.

    A launch that was killed has left no summary.json, and one that has not formed changes nothing.
    """
    proved: Mapping[str, Any] | None = None
    has_formed = False
    lines = read_tail(path, _READ_BYTES_MAX).splitlines()
    telling = [line for line in lines if any(word in line for word in _TELL)]
    for event in reversed(parsed(b"\n".join(telling))):
        match event.get("event"):
            case "repairs_proved":
                proved = proved or event
            case "world_formed":
                has_formed = True
            case "run_begins" if event.get("run_id") != run_id:
                return False
            case "run_begins" if proved is not None or has_formed:
                break
    return proved is not None and proved.get("proved") != proved.get("repairs")


def _faults_of(launch: list[Mapping[str, Any]], ago: int) -> Iterator[FaultRecord]:
    rows = FaultRows()
    for event in launch:
        rows.add(event)
    for row in rows.rows:
        if not row.is_tolerated:
            yield _record(row, ago, began_s=epoch_s(launch[0].get("utc")) or 0.0)


def _record(row: FaultRow, ago: int, *, began_s: float) -> FaultRecord:
    detected_s, repair_s = round(row.at_s - began_s, 3), row.repair_s
    return FaultRecord(
        kind=row.kind,
        rank=row.rank,
        step=row.step,
        cause=row.text,
        detected_s=detected_s,
        recovered_s=None if repair_s is None else round(detected_s + repair_s, 3),
        steps_lost=row.steps_lost,
        generation=row.generation,
        detail=row.detail,
        victims=row.victims,
        all_ranks_dead=row.all_ranks_dead,
        seconds={} if repair_s is None else {"total": repair_s},
        phase=row.phase,
        action=row.plan,
        host=row.host,
        launches_ago=ago,
    )
