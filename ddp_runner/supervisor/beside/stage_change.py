"""Changes from one stage of a run to the next: it says what new ranks must train. Decides nothing else.

The change is a planned loss of all ranks: they have ended, or are ended, and the first of their successors
reads the checkpoint at which the stage begins. So a rank that is killed meanwhile is replaced as usual.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial

from ddp_runner.core.launch_plan import LaunchPlan
from ddp_runner.core.run_stages import refused_line
from ddp_runner.kernel.parent.ports import EventRecorder, Observer
from ddp_runner.kernel.parent.rank_handle import RankHandle
from ddp_runner.kernel.processes.node import Node
from ddp_runner.kernel.recovery.repair import Repair
from ddp_runner.kernel.rules.exits import StopReason
from ddp_runner.kernel.rules.faults import Fault, FaultKind
from ddp_runner.kernel.system.clock import Clock
from ddp_runner.kernel.wire import events
from ddp_runner.kernel.wire.messages import Finished, OtherStage, Ready
from ddp_runner.supervisor.node_plans import node_plan

LED_BACK_MAX = 3  # in a row, with no stage ended that had not ended before


class StageChange(Observer):
    """Holds the plan in force, of the stage that is trained. ``others``: who hears that all ranks are replaced."""

    hears_while_ending = False

    def __init__(
        self,
        plan: LaunchPlan,
        node: Node,
        *,
        repair: Repair,
        recorder: EventRecorder,
        others: Sequence[Observer],
        clock: Clock,
    ) -> None:
        self.plan = plan
        self._node = node
        self._repair = repair
        self._recorder = recorder
        self._others = tuple(others)
        self._clock = clock
        # The ranks of a stage have been asked for, and not yet formed: who has finished has another one.
        self.is_changing = False
        self._said = False  # what they have built
        self._notes: set[str] = set()  # that were shown, in any stage
        self._led_back = 0  # so often in a row
        self._led_from = 0  # the stage that was left then

    def hears(self) -> Mapping[type[object], Callable[..., None]]:
        """Hear of a checkpoint that is of another stage."""
        return {OtherStage: self._other}

    @property
    def refusal(self) -> Callable[[str], str] | None:
        """Puts into words that the stage in hand cannot be trained; None where there are no stages."""
        stage, has_trained = self.plan.settings.stage, self._recorder.facts.ever_formed
        return None if stage is None else partial(refused_line, stage, has_trained=has_trained)

    def why_the_run_ends(self, finished: Finished, *, stop: StopReason | None) -> StopReason | None:
        """Return the reason once all ranks have finished, or None where the next stage follows."""
        if finished.reason is not StopReason.COMPLETED or self.plan.is_last_stage:
            return finished.reason
        return stop

    def begin_next(self, finished: Finished) -> None:
        """Take in that a stage before the last is over, and start the ranks of the next one."""
        for other in self._others:
            other.restarts()
        stage = self.plan.settings.stage
        assert stage is not None, "there are stages"
        report = finished.report
        if stage.number >= self._led_from:
            self._led_back = 0
        self._recorder.record(
            events.StageEnds(
                stage=stage.name,
                step=finished.step,
                loss=_number(report.get("loss")),
                stop_reason=str(report.get("stop_reason") or "end"),
            )
        )
        self._enter(stage.number + 1, first_step=finished.step)

    def _other(self, message: OtherStage, handle: RankHandle) -> None:
        """A rank has found that the newest checkpoint is of another stage: all go on there."""
        del handle
        for other in self._others:
            other.restarts()
        stage = self.plan.settings.stage
        assert stage is not None, "there are stages"
        self._led_from = max(stage.number, self._led_from if self._led_back else 0)
        self._led_back += 1
        if self._led_back > LED_BACK_MAX:
            cause = f"what stage {stage.name} begins with could not be read {self._led_back} times in a row"
            self._repair.report(self._unreadable(message.first_step, cause))
        else:
            self._enter(message.number, first_step=message.first_step)

    def _unreadable(self, step: int, cause: str) -> Fault:
        return Fault(
            kind=FaultKind.CHECKPOINT_BAD,
            rank=-1,
            step=step,
            cause=cause,
            at_ns=self._clock.monotonic_ns(),
            may_retry=False,
        )

    def _enter(self, number: int, *, first_step: int) -> None:
        self.plan = self.plan.in_stage(
            number,
            first_step=first_step,
            first_generation=self._recorder.facts.generation + 1,
        )
        self.is_changing, self._said = True, False
        self._node.train(node_plan(self.plan))
        self._repair.start_again(self._clock.monotonic())

    def formed(self, first: Ready | None) -> None:
        """Record and say once that the ranks of a stage form for the first time."""
        self.is_changing = False
        stage = self.plan.settings.stage
        if self._said or stage is None or first is None:
            return
        self._said = True
        is_begin = self._recorder.facts.generation == 0  # whose lines stand at the begin of the run
        new = [note for note in first.notes if note not in self._notes]
        self._notes.update(new)
        self._recorder.record(
            events.StageBegins(
                stage=stage.name,
                number=stage.number,
                of=len(stage.names),
                first_step=stage.first_step,
                step=first.committed_step,
                total_steps=first.total_steps,
                lines=() if is_begin else (*first.block, *new),
            )
        )


def _number(value: object) -> float | None:
    return float(value) if isinstance(value, (int, float)) else None
