"""Changes from one stage of a run to the next: it says what new ranks must train. Decides nothing else.

The change is a planned loss of all ranks: they have ended, or are ended, and the first of their successors
reads the checkpoint at which the stage begins. So a rank that is killed meanwhile is replaced as usual.
"""

from __future__ import annotations

from ddp_runner.core import events
from ddp_runner.core.exits import StopReason
from ddp_runner.core.faults import Fault, FaultKind
from ddp_runner.core.launch_plan import LaunchPlan
from ddp_runner.core.messages import Finished, OtherStage, Ready
from ddp_runner.supervisor.processes.node import Node
from ddp_runner.supervisor.recovery.repair import Repair
from ddp_runner.supervisor.reporting.recorder import Recorder
from ddp_runner.system.clock import Clock

LED_BACK_MAX = 3  # in a row, with no stage ended that had not ended before


class StageChange:
    """Driven by :class:`Supervisor`."""

    def __init__(self, node: Node, *, repair: Repair, recorder: Recorder, clock: Clock) -> None:
        self._node = node
        self._repair = repair
        self._recorder = recorder
        self._clock = clock
        # The ranks of a stage have been asked for, and not yet formed: who has finished has another one.
        self.is_changing = False
        self._said = False  # what they have built
        self._led_back = 0  # so often in a row
        self._led_from = 0  # the stage that was left then

    def why_the_run_ends(
        self, plan: LaunchPlan, finished: Finished, *, stop: StopReason | None
    ) -> StopReason | None:
        """Return why the run ends once all ranks have finished; None if a stage follows. ``stop``: as requested."""
        if finished.reason is not StopReason.COMPLETED or plan.is_last_stage:
            return finished.reason
        return stop

    def ended(self, plan: LaunchPlan, finished: Finished) -> LaunchPlan:
        """A stage that is not the last is over; the plan of the next one, whose ranks are being started."""
        stage = plan.settings.stage
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
        return self._enter(plan, stage.number + 1, first_step=finished.step)

    def other(self, plan: LaunchPlan, message: OtherStage) -> LaunchPlan:
        """A rank has found that the newest checkpoint is of another stage: all go on there. The plan of it."""
        stage = plan.settings.stage
        assert stage is not None, "there are stages"
        self._led_from = max(stage.number, self._led_from if self._led_back else 0)
        self._led_back += 1
        if self._led_back > LED_BACK_MAX:
            cause = f"what stage {stage.name} begins with could not be read {self._led_back} times in a row"
            self._repair.report(self._unreadable(message.first_step, cause))
            return plan
        return self._enter(plan, message.number, first_step=message.first_step)

    def _unreadable(self, step: int, cause: str) -> Fault:
        return Fault(
            kind=FaultKind.CHECKPOINT_BAD,
            rank=-1,
            step=step,
            cause=cause,
            at_ns=self._clock.monotonic_ns(),
            may_retry=False,
        )

    def _enter(self, plan: LaunchPlan, number: int, *, first_step: int) -> LaunchPlan:
        plan = plan.in_stage(
            number,
            first_step=first_step,
            first_generation=self._recorder.facts.generation + 1,
        )
        self.is_changing, self._said = True, False
        self._node.train(plan)
        self._repair.start_again(self._clock.monotonic())
        return plan

    def formed(self, plan: LaunchPlan, first: Ready | None) -> None:
        """The ranks of a stage form for the first time: it is recorded and said, once."""
        self.is_changing = False
        stage = plan.settings.stage
        if self._said or stage is None or first is None:
            return
        self._said = True
        is_begin = self._recorder.facts.generation == 0  # whose lines stand at the begin of the run
        self._recorder.record(
            events.StageBegins(
                stage=stage.name,
                number=stage.number,
                of=len(stage.names),
                first_step=stage.first_step,
                step=first.committed_step,
                total_steps=first.total_steps,
                lines=() if is_begin else (*first.block, *first.notes),
            )
        )


def _number(value: object) -> float | None:
    return float(value) if isinstance(value, (int, float)) else None
