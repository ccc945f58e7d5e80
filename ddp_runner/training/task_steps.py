"""A Task in one formed generation on one rank: its replica, batches and steps, and what each step says.

Never decides when a step comes, nor what else is due: ``session.py`` does.
"""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Sequence
from dataclasses import replace
from functools import partial

from ddp_runner.core.run_stages import is_first_generation, uses_best
from ddp_runner.core.step_schedule import due_by_settings
from ddp_runner.data.loader import MicroBatch
from ddp_runner.kernel.group.group import Group
from ddp_runner.kernel.group.waits import waiting_for_peers
from ddp_runner.kernel.replica.replica import Replica
from ddp_runner.kernel.rules.exits import StopReason
from ddp_runner.kernel.rules.faults import Fault, FaultError, FaultKind
from ddp_runner.kernel.rules.phases import DueActions, Phase
from ddp_runner.kernel.step.runtime import Runtime
from ddp_runner.kernel.step.session import Outcome, StepInHand, StepResult, Votes, WrapAgainError
from ddp_runner.kernel.wire.board import Cell, Slot
from ddp_runner.kernel.wire.events import TuningChanged
from ddp_runner.kernel.wire.messages import Metrics
from ddp_runner.training.audit import open_audit
from ddp_runner.training.beside_steps import NOTHING, BesideSteps
from ddp_runner.training.components.loss_monitor import Verdict
from ddp_runner.training.components.sync_batchnorm import Peers
from ddp_runner.training.components.tuning import AdaptRules, adapt
from ddp_runner.training.exactness.first_step import (
    FirstStep,
    note_counted,
    report_inexact,
    report_large_local,
    report_lost_carried,
    report_lost_local,
)
from ddp_runner.training.exactness.held_values import DataWatch
from ddp_runner.training.figures.evaluation import Validation
from ddp_runner.training.figures.phase_times import phase_values
from ddp_runner.training.figures.use_figures import UseFigures, tokens_per_sample
from ddp_runner.training.guard import NumericsGuard
from ddp_runner.training.helpers import call_hook
from ddp_runner.training.loading.batch_copy import copy_ahead
from ddp_runner.training.loading.equal_shares import refuse_unequal
from ddp_runner.training.local_state.gathering import gather_local
from ddp_runner.training.rank_context import TaskParts
from ddp_runner.training.step import Stepper, StepRules
from ddp_runner.training.task import EndsEpochs, EpochContext

WRAPS_MAX = 3  # of one step


class TaskSteps:
    """Makes the steps of a Task in one generation. Every rank calls its methods at the same places."""

    def __init__(
        self,
        parts: TaskParts,
        *,
        group: Group,
        guard: NumericsGuard,
        beside: Sequence[BesideSteps],
        data: DataWatch,
    ) -> None:
        settings, workload, state = parts.settings, parts.workload, parts.state
        self._parts = parts
        self._settings = settings
        self._workload = workload
        self._state = state
        self._loader = parts.loader
        self._copies = copy_ahead(workload.device, parts.loader)
        self._memory = parts.memory
        self._runtime = parts.runtime
        self._progress = parts.progress
        self._beside = tuple(beside)
        self._group = group
        self._guard = guard
        self._adapt_rules = AdaptRules.of(settings, devices=len(workload.devices))
        state.buffers.forget_agreement()
        if workload.norms.names:
            refuse_unequal(
                workload.global_batch,
                world_size=group.world_size,
                micro_batch_size=state.tuning.micro_batch_size,
                shares=parts.loader.shares,
            )
            workload.norms.peers = Peers(group=group, slot=parts.runtime.slot)
        self._turn_compiler(parts)
        # As far as the state has come: a rank may have left the one before amid a change.
        workload.layers.unfreeze(state.model, step=state.own_step)
        state.train_unfrozen()
        self._data = data
        self._first = FirstStep(parts, group)
        guard.went_back.append(self._go_back)
        self._peers = _Peers(group, parts.runtime.slot)
        self._loader.agree(self._peers, step=state.committed_step)
        if not self.at_end:
            self._first.rehearse(self._rules(), take=self._take_copy)
        parts.device.begin(group.membership.generation)
        self._wrap()
        self._wraps = 0  # in a row, of the step in hand
        self._validation = Validation(parts, group)
        self._rank = parts.runtime.rank_info.rank  # the slot: what files and messages are named by
        self._audit = open_audit(settings, self._rank, warn=parts.runtime.logger.warning)
        self._logged_at_ns = time.monotonic_ns()
        self._trained_samples = 0  # since then; those of the state go back with it
        self._waited_ns = 0
        self._has_epoch_hook = isinstance(workload.task, EndsEpochs)
        self._streams = StreamWatch(group, parts.runtime, first_step=state.committed_step)

    def close(self) -> None:
        """Unwrap the model and close the audit file."""
        self._parts.profile.leave()
        self._state.local.leave()
        self._workload.norms.peers = None
        self._parts.compiler.turn(on=False)
        self._replica.close()
        if self._audit is not None:
            self._audit.close()

    @property
    def at_end(self) -> bool:
        """True if all steps of the run are made."""
        return self._state.committed_step >= self._workload.length.total_steps

    def make(self, micro_batches: list[MicroBatch], *, votes: Votes) -> StepResult | None:
        """Make one step of ``micro_batches``; None where the state is now an older one.

        Raises WrapAgainError where the step is to be begun again, after :meth:`wrap_again`.
        """
        around = [one.beside(self._stepper, self._group, micro_batches) for one in self._beside]
        around = [
            one for one in (*around, self._first.watched(self._stepper)) if one is not NOTHING
        ]
        if (
            not around
        ):  # as nearly always: an empty stack of contexts takes longer than all the rest here
            result = self._run(micro_batches, votes)
        else:
            with contextlib.ExitStack() as entered:
                for one in around:
                    entered.enter_context(one)
                result = self._run(micro_batches, votes)
        if result is not None:
            self._state.local.settle()
            report_large_local(self._parts)
        self._wraps = 0
        return result

    def _run(self, micro_batches: list[MicroBatch], votes: Votes) -> StepResult | None:
        return self._stepper.run(
            micro_batches,
            votes=votes,
            may_commit=self._guard.may_commit,
            while_reducing=self._send_next,
        )

    def take(self, step: int) -> list[MicroBatch]:
        """Give this rank's share of ``step``, also of a former one; blocks until it is loaded."""
        if step == self._state.committed_step:  # not a former one, which is computed once more
            self._parts.profile.before(step)
        self._turn_to_data(step)
        self._data.draws()
        batches = self._loader.take(step)
        self._data.drawn()
        note_counted(self._parts, self._loader.counted)
        return self._arrived(batches)

    def settle(self) -> None:
        """Have DDP learn a static graph, which needs a first backward."""
        ddp = self._settings.ddp
        for _ in range(WRAPS_MAX):
            is_learnt = not ddp.static_graph or self._state.tuning.find_unused_parameters
            if is_learnt or self.at_end:
                return
            try:
                # From a reduced backward: of the last micro-batch alone.
                self._stepper.settle(self._take_copy(self._state.committed_step)[-1:])
            except WrapAgainError:
                self._wrap_as_it_is()
            else:
                return
        raise _flips()

    def wrap_again(self) -> None:
        """Wrap the model after forward has changed which parameters require a gradient, which DDP does not expect.

        Raises FaultError if a step does so again and again.
        """
        self._wraps += 1
        if self._wraps == WRAPS_MAX:
            raise _flips()
        self._wrap_as_it_is()
        self.settle()

    def adapt(self) -> None:
        """Unfreeze layers that are due, and try what may be faster, on all ranks at the same step."""
        state = self._state
        unfrozen = self._workload.layers.unfreeze(state.model, step=state.own_step)
        if unfrozen:
            if self._group.rank == 0:
                self._runtime.logger.info(unfrozen, step=state.committed_step)
            self._wrap_as_it_is()
            self.settle()
        change = adapt(
            state.tuning,
            self._adapt_rules,
            committed_step=state.committed_step,
            all_used_steps=state.all_used_steps,
        )
        if change is None:
            return
        rewraps = change.tuning.find_unused_parameters != state.tuning.find_unused_parameters
        state.tuning = change.tuning
        if self._group.rank == 0:
            self._runtime.logger.detail(change.action, step=state.committed_step)
            self._runtime.report(
                TuningChanged(
                    rank=self._rank,
                    step=state.committed_step,
                    action=change.action,
                    inexact_reason=change.inexact_reason,
                    fault_free=True,
                )
            )
        if rewraps:
            self._replica.close()
            self._wrap()
            self.settle()
        else:
            self._loader.assign(
                rank=self._group.rank,
                world_size=self._group.world_size,
                micro_batch_size=state.tuning.micro_batch_size,
            )

    @property
    def waited_s(self) -> float:
        """Seconds that the newest :meth:`take` has waited."""
        return self._loader.waited_s

    def due(self, step: int) -> DueActions:
        """Say what the settings and the task's hooks have due once ``step`` steps are committed."""
        length = self._workload.length
        due = due_by_settings(self._settings, length, step)
        ends = self._has_epoch_hook and length.ends_epoch(step)
        return replace(due, end_epoch=True) if ends else due

    def after(self, step: StepInHand, result: StepResult, *, due: DueActions) -> Outcome:
        """Take in a step that was made; may say so, skip it for good or go back to an older state."""
        self._parts.profile.after(result.step)
        self._waited_ns += step.waited_ns
        self._trained_samples += self._workload.global_batch
        epoch = self._workload.length.epoch_of(result.step - 1)
        verdict = self._state.monitor.observe(
            step=result.step,
            epoch=epoch,
            loss=result.loss,
            applied=result.applied,
            overflowed=result.overflowed or result.without_weight,
        )
        if not result.without_weight:
            self._progress.loss = result.loss
            self._runtime.slot.set_loss(result.loss)
        self._watch_scale(result)
        self._write_audit(result, epoch, step.micro_batches)
        if due.log:  # before what waits for peers: the step is committed, whoever is lost there
            self._log(result, epoch)
        self._first.compare(result.step)
        if not result.applied and self._guard.skipped(
            result,
            verdict,
            step.micro_batches,
            recompute=partial(self._own_gradient_norm, result.step - 1),
        ):
            return Outcome.WENT_BACK
        self._memory.after_step(result.step)
        if verdict is Verdict.TARGET_REACHED:
            self._runtime.logger.info(
                f"target loss {self._settings.run.target_loss:g} reached", step=result.step
            )
            return Outcome.ALL_DONE
        self._streams.compare(self._loader.place(), step=result.step, is_due=due.compare)
        if self._loader.gathers(result.step):
            self.gather()
        return Outcome.GOES_ON

    def gather(self) -> None:
        """Have all ranks know how far each one's shards are, where they read a stream of such."""
        self._loader.gather(self._peers, step=self._state.committed_step)
        gather_local(self._state.local, self._group, step=self._state.committed_step)

    def _go_back(self) -> None:
        """Reset the loader after a roll-back: the state may have other ranks' shards than this generation."""
        self._loader.go_back(self._peers, step=self._state.committed_step)
        report_lost_local(self._parts)
        report_lost_carried(self._parts, went_back=True)

    def evaluate(self, *, is_again: bool = False) -> StopReason | None:  # noqa: ARG002
        """Evaluate the state as it is; why that was left early, if it was."""
        stop = self._validation.evaluate(self._replica)
        if stop is None and self._workload.validation_samples:
            self._call_hook("on_evaluation_end")
        return self._watch_improvement() if stop is None else stop

    def end_epoch(self) -> None:
        """Call ``on_epoch_end``. The exchange makes a rank that is lost before its call have it called again."""
        step = self._state.committed_step
        self._runtime.slot.stamp(Phase.EVALUATE, time.monotonic_ns())
        self._call_hook("on_epoch_end")
        self._runtime.slot.count_done(step)
        self._peers.exchange(f"epoch_end/{step}", "")

    def _call_hook(self, name: str) -> None:
        state, length, rank = self._state, self._workload.length, self._group.rank
        loss = {} if state.monitor.last is None else {"loss": state.monitor.last}
        warn = self._runtime.logger.warning if rank == 0 else lambda _: None
        context = EpochContext(
            epoch=length.epoch_of(max(length.first_step, state.committed_step - 1)),
            step=state.committed_step,
            total_steps=length.total_steps,
            rank=rank,
            world_size=self._group.world_size,
            metrics={**loss, **state.figures},
            model=state.model,
        )
        with self._data.around_call():
            call_hook(self._workload.task, name, context, state, warn=warn)

    def must_keep(self) -> bool:
        """Return True if the present evaluation has found the best so far, and the run's end or a later stage uses it.

        False for the state that a run or a stage begins with: it is in another file.
        """
        state = self._state
        is_best = state.best.step == state.committed_step and state.own_step > 0
        settings = self._settings
        return is_best and uses_best(settings.stage, load_best_at_end=settings.run.load_best_at_end)

    def _watch_improvement(self) -> StopReason | None:
        """Return COMPLETED after an evaluation if the figure has not improved for too long; the same on all ranks."""
        state, monitor = self._state, self._workload.monitor
        value = state.monitored(monitor)
        if value is None:
            return None
        news = state.improvement.observe(step=state.committed_step, value=value)
        if monitor.by_evaluations and state.own_step > 0:
            state.judge(value, monitor=monitor)
        if news and self._group.rank == 0:
            self._runtime.logger.info(news, step=state.committed_step)
            self._runtime.report(
                TuningChanged(
                    rank=self._rank,
                    step=state.committed_step,
                    action=news,
                    inexact_reason="",
                    fault_free=True,
                )
            )
        return StopReason.COMPLETED if state.improvement.is_over else None

    def _turn_compiler(self, parts: TaskParts) -> None:
        compiler, is_on = parts.compiler, parts.state.tuning.may_compile
        compiler.turn(on=is_on)
        generation, place = self._group.membership.generation, self._settings.stage
        if self._group.rank != 0 or not is_first_generation(generation, place):
            return
        if compiler.is_wanted and not is_on:
            self._runtime.logger.warning("not compiled: that has failed in this run before")
        elif compiler.inexact_reason:
            report_inexact(parts, compiler.inexact_reason)

    def bucket_sizes(self) -> str:
        """Return the bucket sizes of the replica."""
        return self._replica.bucket_sizes()

    def _wrap(self) -> None:
        """A new DDP replica around the same model, as the tuning has it. On all ranks alike."""
        tuning, workload = self._state.tuning, self._workload
        self._replica = Replica(
            self._state.model,
            self._runtime.training_loss(workload.loss),
            group=self._group,
            settings=replace(
                self._settings.ddp, find_unused_parameters=tuning.find_unused_parameters
            ),
            slot=self._runtime.slot,
            is_relaid=self._state.buffers.is_relaid,
            device=self._parts.device,
            form=tuning.loss_form,
            others=workload.other_devices,
        )
        self._stepper = Stepper(
            self._state, self._replica, rules=self._rules(), slot=self._runtime.slot
        )
        self._use = UseFigures(self._parts, world_size=self._group.world_size)

    def _rules(self) -> StepRules:
        workload = self._workload
        return StepRules(
            seed=self._settings.run.seed,
            rank=self._group.rank,
            global_batch=workload.global_batch,
            total_steps=workload.length.total_steps,
            first_step=workload.length.first_step,
            optim=self._settings.optim,
            device=workload.device,
            others=workload.other_devices,
            watch_use=self._adapt_rules.watch_use(self._state.tuning),
            tokens_per_sample=tokens_per_sample(workload.task),
            turn_to=partial(workload.loss.turn_to, is_training=True),
        )

    def _wrap_as_it_is(self) -> None:
        """Wrap the model with the parameters that require a gradient by now."""
        self._state.drop_unfinished_step()
        self._state.train_unfrozen()
        self._replica.close()
        self._wrap()

    def _own_gradient_norm(self, step: int) -> float | None:
        """Return the gradient norm of ``step`` from its own batches; None if these cannot be loaded again soon."""
        if self._workload.norms.names or not self._loader.gives_again(step):
            return None  # of layers over ranks also where one rank has no batches any more
        return self._stepper.own_gradient_norm(self.take(step))

    def _take_copy(self, step: int) -> list[MicroBatch]:
        self._turn_to_data(step)
        return self._arrived(self._loader.take_copy(step))

    def _arrived(self, batches: list[MicroBatch]) -> list[MicroBatch]:
        if self._copies is not None:
            self._copies.arrive(batches)
        return batches

    def _send_next(self) -> None:
        if self._copies is not None:
            self._copies.send(self._state.committed_step + 1)

    def _turn_to_data(self, step: int) -> None:
        slot = self._runtime.slot
        slot.set(Cell.STEP, step)
        slot.set(Cell.EPOCH, self._workload.length.epoch_of(step))
        slot.stamp(Phase.DATA, time.monotonic_ns())
        self._runtime.logger.step = step
        self._loader.use_order(self._state.order_version)

    def _log(self, result: StepResult, epoch: int) -> None:
        now_ns = time.monotonic_ns()
        seconds = max(1e-9, (now_ns - self._logged_at_ns) / 1e9)
        values = {
            "loss": result.loss,
            **result.parts,
            "learning_rate": result.learning_rate,
            "grad_norm": result.grad_norm,
            "epoch": float(epoch),
            "samples_per_s": self._trained_samples / seconds,
            "data_wait_share": min(1.0, self._waited_ns / 1e9 / seconds),
            "step_s": self._runtime.slot.get(Cell.STEP_NS) / 1e9,
        }
        if result.loss_scale is not None:
            values["loss_scale"] = result.loss_scale
        if self._group.rank == 0:
            line = self._loader.slow_line(values["data_wait_share"])
            if line:
                self._runtime.logger.warning(line, step=result.step)
        if self._state.tokens is not None:
            values["tokens"] = self._state.tokens
        values.update(self._use.take(seconds=seconds))
        values |= phase_values(
            self._runtime.slot, self._trained_samples // self._workload.global_batch
        )
        self._logged_at_ns, self._trained_samples, self._waited_ns = now_ns, 0, 0
        parts = "".join(f"{name} {number:.4f}  " for name, number in result.parts.items())
        self._runtime.report(Metrics(rank=self._rank, step=result.step, values=values))
        self._runtime.logger.progress(
            f"loss {result.loss:.4f}  {parts}lr {result.learning_rate:.2e}  grad {result.grad_norm:.3f}  "
            f"{values['samples_per_s']:.0f} samples/s  data {values['data_wait_share']:.0%}",
            step=result.step,
        )

    def _watch_scale(self, result: StepResult) -> None:
        """Warn once if the loss scale of fp16 only falls; it is the same on all ranks."""
        if result.loss_scale is None:
            return
        warning = self._state.precision.watch(step=result.step, before=result.loss_scale)
        if warning and self._group.rank == 0:
            self._runtime.logger.warning(warning, step=result.step)

    def _write_audit(self, result: StepResult, epoch: int, micro_batches: list[MicroBatch]) -> None:
        if self._audit is None:
            return
        self._audit.write(
            generation=self._group.membership.generation,
            step=result.step,
            epoch=epoch,
            indices=[index for micro_batch in micro_batches for index in micro_batch.indices],
            loss=result.loss,
        )


def _flips() -> FaultError:
    """The error of a loss that changes requires_grad to something else each time it is called."""
    return FaultError(
        Fault(
            kind=FaultKind.RANK_RAISED,
            rank=-1,
            step=0,
            cause="loss() changes requires_grad of parameters each time it is called, also for one step",
            at_ns=time.monotonic_ns(),
            may_retry=False,
        )
    )


class _Peers:
    """The group, as the loader asks it: the board says that this rank waits for the others meanwhile."""

    def __init__(self, group: Group, slot: Slot) -> None:
        self._group, self._slot = group, slot

    def exchange(self, name: str, value: str) -> list[str]:
        """Exchange values through the group."""
        with waiting_for_peers(self._slot):
            return self._group.exchange(name, value)


# Whether all ranks read the same stream. One that shards itself loses data without an error.

STREAMS_DIFFER = "the ranks' streams differ"
WHOLE_STREAM = (
    "Every rank must read the whole stream: it keeps its own share of each step's samples"
)


class StreamWatch:
    """Compares, now and then, where the ranks of one generation stand in an iterable dataset."""

    def __init__(self, group: Group, runtime: Runtime, *, first_step: int) -> None:
        self._group = group
        self._runtime = runtime
        self._first_step = first_step  # of the generation: somebody may have just opened the stream
        self._has_warned = False

    def compare(self, place: tuple[int, int, str] | None, *, step: int, is_due: bool) -> None:
        """Compare all ranks' streams after ``step``: at a generation's steps 1, 2, 4, 8 ..., and if it ``is_due``.

        ``place``: see :meth:`Source.place`; of None nothing is compared.
        Warns once of streams that give other items at the same place, which is not exact; raises
        FaultError if they are not at the same place, as streams of different lengths are after
        an epoch.
        """
        done = step - self._first_step
        is_power_of_two = done & (done - 1) == 0
        if place is None or not (is_due or is_power_of_two) or self._group.world_size == 1:
            return
        with waiting_for_peers(self._runtime.slot):
            texts = self._group.exchange(f"stream/{step}", json.dumps(place))
        answers = [json.loads(answer) for answer in texts]
        if len({(epoch, items) for epoch, items, _ in answers}) > 1:
            places = ", ".join(f"item {items} of epoch {epoch + 1}" for epoch, items, _ in answers)
            raise FaultError(
                Fault(
                    kind=FaultKind.RANK_RAISED,
                    rank=self._runtime.rank_info.rank,
                    step=step,
                    cause=f"the ranks' streams are not of one length, they stand at {places}. "
                    f"{WHOLE_STREAM}",
                    at_ns=time.monotonic_ns(),
                    may_retry=False,
                )
            )
        if len({newest for _, _, newest in answers if newest}) > 1 and not self._has_warned:
            self._has_warned = True
            if self._group.rank == 0:
                self._runtime.logger.warning(f"{STREAMS_DIFFER}. {WHOLE_STREAM}", step=step)
                self._runtime.report(
                    TuningChanged(
                        rank=self._runtime.rank_info.rank,
                        step=step,
                        action="",
                        inexact_reason=STREAMS_DIFFER,
                    )
                )
