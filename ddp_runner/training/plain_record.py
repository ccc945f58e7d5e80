"""metrics.jsonl and summary.json of a training that nobody supervises. Stops no training, decides nothing."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from ddp_runner.core import events
from ddp_runner.core.board import Cell, Slot
from ddp_runner.core.classify import attribute
from ddp_runner.core.exits import EXIT_CODE_OF_STATUS, STATUS_OF_REASON, RunStatus
from ddp_runner.core.faults import Fault
from ddp_runner.core.messages import Finished, Message, Metrics
from ddp_runner.core.recovery import GiveUp, Incident
from ddp_runner.observe.accounting import RunAccounting
from ddp_runner.observe.journal import MetricsFile
from ddp_runner.observe.summary import EndOfRun, RunFindings, write_summary

SUMMARY = "summary.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordPlan:
    """Where the files of a training go, and of which run; ``began_s``: monotonic."""

    folder: Path
    name: str
    began_s: float


class PlainRecord:
    """Owned by rank 0's :class:`LocalRuntime`, which hands it each message.

    What it cannot write is a warning: no file is worth a training.
    """

    def __init__(
        self,
        plan: RecordPlan,
        *,
        run_id: str,
        world_size: int,
        steps_per_epoch: int,
        slot: Slot,
        warn: Callable[[str], None],
    ) -> None:
        self._path = plan.folder / SUMMARY
        self._metrics = MetricsFile(plan.folder / "metrics.jsonl", warn=warn)
        self._world_size = world_size
        self._slot = slot
        self._warn = warn
        self._findings = RunFindings(run_id=run_id, name=plan.name)
        self._accounting = RunAccounting(began_s=plan.began_s)
        self._steps_per_epoch = steps_per_epoch
        self._fault: Fault | None = None
        self._is_written = False

    def take(self, message: Message) -> None:
        """Record a report of this rank."""
        match message:
            case Metrics(step=step, rank=rank, values=values):
                self._metrics.write(step, rank, values)
            case events.RankFormed(generation=generation, committed_step=step):
                self._record(events.WorldFormed(generation=generation, step=step))
            case events.Faulted(fault=fault):
                self._fault = fault
            case events.Report():
                self._record(message.in_generation(1))
            case Finished():
                self._write(STATUS_OF_REASON[message.reason], finished=message)
            case _:
                pass

    def ended(self, error: BaseException) -> None:
        """Training has ended with ``error``, which is passed on."""
        if not self._is_written:
            is_wanted = isinstance(error, KeyboardInterrupt)
            self._write(RunStatus.INTERRUPTED if is_wanted else RunStatus.FAILED)

    def _record(self, event: events.Event) -> None:
        self._findings.take(event)
        self._accounting.take(event, now_s=time.monotonic())

    def _write(self, status: RunStatus, finished: Finished | None = None) -> None:
        self._is_written = True
        self._metrics.close()
        first_ns = self._slot.get(Cell.FIRST_STEP_NS)
        self._accounting.first_step_s = first_ns / 1e9 if first_ns else None
        now_s = time.monotonic()
        if self._fault is not None:
            self._accounting.incident(_ended_by(self._fault, now_s), event_id=-1)
        steps, own_ns = self._slot.get(Cell.OWN_STEPS), self._slot.get(Cell.OWN_NS)
        end = EndOfRun(
            status=status,
            exit_code=EXIT_CODE_OF_STATUS[status],
            reading=self._slot.read(),
            finished=[] if finished is None else [finished],
            now_s=now_s,
        )
        summary = self._accounting.summary(
            end,
            facts=self._findings,
            world_size=self._world_size,
            steps_per_epoch=self._steps_per_epoch,
            own_step_s={0: own_ns / 1e9 / steps if steps else None},
        )
        try:
            write_summary(self._path, summary)
        except OSError as error:
            self._warn(f"{self._path} could not be written: {error.strerror or error}")


def _ended_by(fault: Fault, now_s: float) -> events.Plan:
    """The fault that has ended the training, as the account of a run takes one in."""
    incident = Incident(
        attribution=attribute([fault]), at_s=now_s, committed_step=fault.step, ever_formed=True
    )
    return events.Plan(
        plan=GiveUp.__name__,
        culprit=fault.rank,
        kind=fault.kind.value,
        replaced=(),
        dropped=(),
        kept=None,
        all_ranks_dead=False,
        victims=(),
        incident=incident,
        began_s=fault.at_ns / 1e9,
        generation=1,
        since_s=fault.at_ns / 1e9,
        detect_s=None,
        action="none: nobody supervises this training",
    )
