"""Writes down what ranks tell: journal, ledger and console together. Decides nothing."""

from __future__ import annotations

from collections.abc import Sequence

from ddp_runner.checkpoint.unreported import Published
from ddp_runner.core.launch_plan import LaunchPlan
from ddp_runner.core.messages import (
    Adjusted,
    Formed,
    MendedInPlace,
    Metrics,
    Noted,
    Proved,
    Ready,
    Saved,
)
from ddp_runner.supervisor.processes.rank_process import RankHandle
from ddp_runner.supervisor.reporting.accounting import Ledger, OpenFault
from ddp_runner.supervisor.reporting.completed_run import lines_of_kept
from ddp_runner.supervisor.reporting.outputs import Records
from ddp_runner.supervisor.reporting.run_facts import RunFacts, fault_fields, told


class Chronicle:
    """One line in each place for each thing that happened."""

    def __init__(
        self, *, facts: RunFacts, ledger: Ledger, records: Records, published: Published
    ) -> None:
        self._facts = facts
        self._ledger = ledger
        self._records = records
        self._published = published
        self._parts: dict[str, float] = {}  # seconds of the generation that forms

    def begun(self, plan: LaunchPlan, ready: Sequence[Ready]) -> None:
        """The run begins, with what its ranks have built. What all say is said once."""
        first = ready[0]
        self._published.begin()
        self._records.event(
            "run_begins",
            run_id=self._facts.run_id,
            command=list(plan.command),
            world_size=plan.world_size,
            resumed_step=first.committed_step,
            total_steps=first.total_steps,
        )
        for note in plan.notes:
            self._records.say(note)
        resumed = f", resumed at step {first.committed_step:,}" if first.committed_step else ""
        self._records.say(
            f"{first.parameters:,} parameters, {first.train_samples:,} samples, "
            f"{first.total_steps:,} steps{f', {first.precision}' if first.precision else ''}{resumed}"
        )
        if first.is_complete:  # but its summary is gone, and is made once more
            where = f"{first.committed_step:,} of {first.total_steps:,} steps"
            self._records.say(f"already complete: {where}, nothing to train")
        for note in first.notes:
            self._records.say(note)
        for other in ready[1:]:
            for note in other.notes:
                if note not in first.notes:
                    self._records.say(f"rank {other.rank}: {note}")

    def already_complete(self, plan: LaunchPlan, first: Ready) -> None:
        """There is nothing to train: the result stands, and what was asked for in vain is named."""
        lines = lines_of_kept(plan.settings, first)
        self._records.event(
            "already_complete",
            run_id=self._facts.run_id,
            command=list(plan.command),
            step=first.committed_step,
            total_steps=first.total_steps,
            text=lines,
        )
        for line in lines:
            self._records.say(line)

    def metrics(self, handle: RankHandle, message: Metrics) -> None:
        """A rank's newest figures."""
        handle.metrics = {**handle.metrics, **message.values, "step": message.step}
        self._records.metrics(message.step, message.rank, message.values)

    def saved(self, message: Saved, *, productive_ns: int) -> None:
        """A checkpoint is on disk."""
        self._facts.saved_any = True
        self._ledger.saved(message.step, message.path, productive_ns)
        if self._published.is_news(message):
            self._records.event(
                "checkpoint_saved",
                step=message.step,
                path=message.path,
                blocked_s=message.blocked_s,
                size_bytes=message.size_bytes,
            )

    def saved_untold(self) -> None:
        """Checkpoints that are on disk, of ranks that may not have lived to tell of them."""
        for manifest in self._published.find():
            path = str(self._published.directory / manifest.file)
            self._facts.saved_any = True
            # Another rank may have saved a later step since, and lived to tell of it.
            self._ledger.checkpoint_step, self._ledger.checkpoint = self._published.newest() or (
                manifest.step,
                path,
            )
            self._records.event(
                "checkpoint_saved",
                step=manifest.step,
                path=path,
                blocked_s=None,  # nobody has told
                size_bytes=manifest.size_bytes,
            )
            self._records.say(f"{path} is on disk; its rank has not told of it")

    def know_newest(self) -> None:
        """Where this launch has saved nothing, the checkpoint that it leaves is one of before."""
        newest = self._published.newest()
        if not self._ledger.checkpoint and newest is not None:
            self._ledger.checkpoint_step, self._ledger.checkpoint = newest

    def mended(self, message: MendedInPlace) -> None:
        """A rank, or all of them together, mended a fault within the generation."""
        fault = message.fault
        event_id = self._records.event(
            "fault", **fault_fields(fault, generation=self._facts.generation)
        )
        self._records.event(
            "mended",
            cause=event_id,
            remedy=message.remedy,
            seconds=round(message.seconds, 4),
            steps_lost=message.steps_lost,
        )
        self._ledger.mended(
            fault,
            seconds=message.seconds,
            steps_lost=message.steps_lost,
            generation=self._facts.generation,
        )
        self.not_exact(message.inexact_reason)

    def noted(self, message: Noted) -> None:
        """A fault costs what it costs: there is nothing to repair, so it is no entry of the ledger."""
        fields = fault_fields(message.fault, generation=self._facts.generation)
        self._records.event("noted", **fields, remedy=message.remedy)

    def proved(self, message: Proved) -> None:
        """A step was computed twice with the same bits; of ranks that tell of one step it counts once."""
        self._records.event("proved", rank=message.rank, step=message.step, what=message.what)
        self._facts.proved.setdefault(message.what, set()).add(message.step)

    def adjusted(self, message: Adjusted) -> None:
        """A rank changed how it computes."""
        self._records.event(
            "adjusted",
            rank=message.rank,
            step=message.step,
            remedy=message.remedy,
            inexact_reason=message.inexact_reason,
        )
        if message.in_peace and message.remedy:  # else it is told with the repair
            self._records.note(f"rank {message.rank}: {message.remedy}")
        self.not_exact(message.inexact_reason)

    def forming(self, now_s: float) -> None:
        """The ranks were told to form a generation."""
        self._ledger.forming(now_s)
        self._parts = dict.fromkeys(("group", "transfer", "rebuild"), 0.0)
        self._records.event("form", generation=self._facts.generation)

    def rank_formed(self, formed: Formed, *, pid: int | None) -> None:
        """A rank is in; the slowest one's seconds count."""
        self._records.event(
            "rank_formed",
            rank=formed.rank,
            pid=pid,
            generation=formed.generation,
            committed_step=formed.committed_step,
            source=formed.source,
            group_s=round(formed.group_s, 4),
            transfer_s=round(formed.transfer_s, 4),
            rebuild_s=round(formed.rebuild_s, 4),
        )
        times = {
            "group": formed.group_s,
            "transfer": formed.transfer_s,
            "rebuild": formed.rebuild_s,
        }
        self._parts = {name: max(self._parts[name], value) for name, value in times.items()}

    def world_formed(self, now_s: float, *, committed_step: int, productive_ns: int) -> None:
        """Every rank is in: the run begins, or an incident is over."""
        repaired = self._ledger.repaired(
            now_s=now_s,
            committed_step=committed_step,
            productive_ns=productive_ns,
            parts=self._parts,
        )
        if not repaired:
            self._records.event("world_formed", generation=self._facts.generation)
        for fault in repaired:
            self._tell_repaired(fault, took_s=now_s - fault.began_s, step=committed_step)
        if repaired:
            self.saved_untold()

    def _tell_repaired(self, fault: OpenFault, *, took_s: float, step: int) -> None:
        self._records.event(
            "repaired",
            cause=fault.event_id,
            generation=self._facts.generation,
            steps_lost=fault.steps_lost,
            seconds=round(took_s, 4),
        )
        where = f", going on from step {step}" if fault.steps_lost else ""
        self._records.say(
            f"{told(fault.incident.culprit)} -> {fault.outcome}{where}, "
            f"{fault.steps_lost} steps lost, {took_s:.2f} s"
        )

    @property
    def reasons(self) -> Sequence[str]:
        """Why the run is not exact, as far as it is known."""
        return self._facts.inexact_reasons

    def not_exact(self, reason: str) -> None:
        """From now on the run is not exact, unless ``reason`` is empty."""
        if reason and reason not in self._facts.inexact_reasons:
            self._facts.inexact_reasons.append(reason)
