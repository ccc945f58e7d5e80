"""One formed generation on one rank: trains step by step and attends to what is due between steps."""

from __future__ import annotations

import contextlib
import json
import time
from dataclasses import replace
from functools import partial

from ddp_runner.collective.group import Group, collectives_begun
from ddp_runner.collective.replica import Replica
from ddp_runner.collective.waiting import waiting_for_peers
from ddp_runner.core.board import Cell
from ddp_runner.core.exits import StopReason
from ddp_runner.core.faults import Fault, FaultError, FaultKind
from ddp_runner.core.messages import Adjusted, Metrics
from ddp_runner.core.phases import Phase
from ddp_runner.core.step_schedule import DueActions, due_after
from ddp_runner.data.loader import MicroBatch
from ddp_runner.data.stream import StreamLoader
from ddp_runner.training.audit import audit_line, open_audit
from ddp_runner.training.batch_copy import copy_ahead
from ddp_runner.training.components.loss_monitor import Verdict
from ddp_runner.training.components.tuning import AdaptRules, adapt
from ddp_runner.training.evaluation import evaluate
from ddp_runner.training.exactness.first_step import FirstStep
from ddp_runner.training.exactness.stream_check import StreamWatch
from ddp_runner.training.guard import NumericsGuard
from ddp_runner.training.helpers import Helpers
from ddp_runner.training.loaders import make_validation_loader
from ddp_runner.training.rank_context import RankParts
from ddp_runner.training.saving import INTERVAL
from ddp_runner.training.step import FlagsChangedError, Stepper, StepResult, StepRules, Votes

WRAPS_MAX = 3  # of one step


class Session:
    """Trains inside one generation until the run's end, a stop, or a fault that leaves as exception."""

    def __init__(self, parts: RankParts, *, group: Group) -> None:
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
        self._saving = parts.saving
        self._drills = parts.drills
        self._group = group
        self._guard = NumericsGuard(parts, group)
        self._adapt_rules = AdaptRules.of(settings)
        state.buffers.form_anew()
        self._first = FirstStep(parts, group)
        if not self._at_end():
            self._first.rehearse(self._rules(), take=self._take_copy)
        parts.device.begin(group.membership.generation)
        self._wrap()
        self._helpers = Helpers(workload.task, warn=self._warn_once)
        self._rank = parts.runtime.place.rank  # the slot: what files and messages are named by
        self._audit = open_audit(settings, self._rank, warn=parts.runtime.logger.warning)
        self._logged_at_ns = time.monotonic_ns()
        self._trained_samples = 0  # since then; those of the state go back with it
        self._waited_ns = 0
        self._streams = StreamWatch(group, parts.runtime, first_step=state.committed_step)
        parts.runtime.slot.begin_between(state.committed_step)
        if group.rank != 0:
            self._saving.settle()  # a save of a former rank 0 ends before the new one saves anything

    def close(self) -> None:
        """Unwrap the model and close the audit file; what was not proven to be sound is not saved."""
        self._guard.close()
        self._replica.close()
        if self._audit is not None:
            self._audit.close()

    def _wrap(self) -> None:
        """A new DDP replica around the same model, as the tuning has it. On all ranks alike."""
        tuning, workload = self._state.tuning, self._workload
        self._replica = Replica(
            self._state.model,
            self._runtime.training_loss(workload.task.loss),
            group=self._group,
            settings=replace(
                self._settings.ddp, find_unused_parameters=tuning.find_unused_parameters
            ),
            slot=self._runtime.slot,
            is_relaid=self._state.buffers.is_relaid,
            device=self._parts.device,
        )
        self._stepper = Stepper(
            self._state, self._replica, rules=self._rules(), slot=self._runtime.slot
        )

    def _rules(self) -> StepRules:
        workload = self._workload
        return StepRules(
            seed=self._settings.run.seed,
            rank=self._group.rank,
            global_batch=workload.global_batch,
            total_steps=workload.length.total_steps,
            optim=self._settings.optim,
            device=workload.device,
            watch_use=self._adapt_rules.watch_use(self._state.tuning),
        )

    def settle(self) -> None:
        """Bring DDP's bucket layout to its final form where that needs a first backward."""
        for _ in range(WRAPS_MAX):
            if self._state.tuning.find_unused_parameters or self._at_end():
                return
            try:
                self._stepper.settle(self._take_copy(self._state.committed_step))
            except FlagsChangedError:
                self._wrap_anew()
            else:
                return
        raise _flips()

    def _wrap_anew(self) -> None:
        """After forward has changed which parameters require a gradient, which DDP does not expect."""
        self._state.drop_unfinished_step()
        self._state.train_unfrozen()
        self._replica.close()
        self._wrap()

    def train(self) -> StopReason:
        """Train to the end of the run or to a stop that the ranks agreed on."""
        if self._state.monitor.target_reached:  # by the run that is being resumed
            return StopReason.COMPLETED
        self._runtime.slot.set(Cell.COLLECTIVES, collectives_begun())
        stop, wraps = self._attend_to_unattended(), 0
        while stop is None and not self._at_end():
            self._adapt()
            began_ns = time.monotonic_ns()
            slot = self._runtime.slot
            if slot.get(Cell.FIRST_STEP_NS) == 0:
                slot.set(Cell.FIRST_STEP_NS, began_ns)
            micro_batches = self._take(self._state.committed_step)
            waited_ns = int(self._loader.waited_s * 1e9)
            votes = Votes(stop=self._runtime.stop_asked(), save=self._wants_save())
            aside_ns = self._aside_ns()
            try:
                with (
                    self._drills.beside(self._stepper, self._group),
                    self._first.watched(self._stepper),
                ):
                    result = self._stepper.run(
                        micro_batches,
                        votes=votes,
                        may_commit=self._guard.may_commit,
                        while_reducing=self._send_next,
                    )
            except FlagsChangedError:
                wraps += 1
                if wraps == WRAPS_MAX:
                    raise _flips() from None
                self._wrap_anew()
                self.settle()
                continue
            wraps = 0
            slot.set(Cell.COLLECTIVES, collectives_begun())
            if result is None:  # the state is an older one
                continue
            aside_ns = self._aside_ns() - aside_ns
            self._account(began_ns, result, waited_ns=waited_ns, aside_ns=aside_ns)
            if result.save:
                is_first = self._group.rank == 0
                self._saving.save_requests.heard(result.step, is_mine=votes.save, fulfils=is_first)
            stop = self._after(result, micro_batches)
        return stop or StopReason.COMPLETED

    def _wants_save(self) -> bool:
        """Whether this rank votes for a save: again and again, until all have heard of it."""
        if self._runtime.save_asked():
            self._saving.save_requests.ask()
        return self._saving.asks() if self._group.rank == 0 else self._saving.save_requests.is_open

    def _aside_ns(self) -> int:
        """What of steps was given to saves and comparisons, so far."""
        slot = self._runtime.slot
        return slot.get(Cell.CHECKPOINT_NS) + slot.get(Cell.COMPARISON_NS)

    def _adapt(self) -> None:
        """Try what may be faster, on all ranks at the same step; a fault takes it back."""
        state = self._state
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
            self._runtime.logger.info(change.remedy, step=state.committed_step)
            self._runtime.tell(
                Adjusted(
                    rank=self._rank,
                    step=state.committed_step,
                    remedy=change.remedy,
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

    def finish(self, reason: StopReason) -> bool:
        """Compare the replicas, evaluate (at the end of the run only), save. True if that is all.

        False after a roll-back: there is more to train. Raises FaultError if the save fails.
        """
        # Before the last save: what is saved is what a majority has.
        if self._guard.compare_replicas():
            return False
        self._count_done()
        if reason is StopReason.COMPLETED:
            self._evaluate()
            self._state.boundary_done_step = self._state.committed_step
        # Who has nothing to save waits for rank 0's disk, under the deadline of a save.
        self._runtime.slot.stamp(Phase.CHECKPOINT, time.monotonic_ns())
        if self._group.rank == 0:
            self._saving.finish(reason.value, compare_s=self._guard.compared_s)
            self._count_done()
        return True

    def _count_done(self) -> None:
        """At the end of a run no step can be committed: to have come further than before is progress."""
        self._runtime.slot.count_done(self._state.committed_step)

    def _at_end(self) -> bool:
        return self._state.committed_step >= self._workload.length.total_steps

    def _own_gradient_norm(self, step: int) -> float | None:
        """Of ``step``, from what it was given; None where that cannot be had again in short time."""
        if not self._loader.gives_again(step):
            return None
        return self._stepper.own_gradient_norm(self._take(step))

    def _take(self, step: int) -> list[MicroBatch]:
        self._turn_to_data(step)
        return self._arrived(self._loader.take(step))

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

    def _account(self, began_ns: int, result: StepResult, *, waited_ns: int, aside_ns: int) -> None:
        now_ns = time.monotonic_ns()
        slot = self._runtime.slot
        if self._group.rank == 0:
            self._saving.stepped((now_ns - began_ns - aside_ns) / 1e9)
        slot.add(Cell.OWN_NS, now_ns - began_ns - result.waited_ns - aside_ns)
        slot.add(Cell.OWN_STEPS, 1)
        slot.add(Cell.PRODUCTIVE_NS, now_ns - began_ns - waited_ns - aside_ns)
        slot.add(Cell.DATA_WAIT_NS, waited_ns)
        slot.set(Cell.STEP_NS, now_ns - began_ns)
        slot.set(Cell.BUSY_NS, now_ns - began_ns - waited_ns - result.waited_ns)
        slot.set(Cell.REDUCE_NS, result.waited_ns)
        slot.set(Cell.LAST_COMMIT_NS, now_ns)
        slot.set(Cell.SAMPLES, self._state.samples)
        self._waited_ns += waited_ns
        self._trained_samples += self._workload.global_batch

    def _after(self, result: StepResult, micro_batches: list[MicroBatch]) -> StopReason | None:
        epoch = self._workload.length.epoch_of(result.step - 1)
        verdict = self._state.monitor.observe(
            step=result.step,
            epoch=epoch,
            loss=result.loss,
            applied=result.applied,
            overflowed=result.overflowed,
        )
        self._progress.loss = result.loss
        self._first.compare(result.step)
        self._runtime.slot.set_loss(result.loss)
        self._write_audit(result, epoch, micro_batches)
        if not result.applied and self._guard.skipped(
            result,
            verdict,
            micro_batches,
            recompute=partial(self._own_gradient_norm, result.step - 1),
        ):
            return result.stop
        self._memory.after_step(result.step)
        if verdict is Verdict.TARGET_REACHED:
            self._runtime.logger.info(
                f"target loss {self._settings.run.target_loss:g} reached", step=result.step
            )
            return StopReason.COMPLETED
        due = self._due(result.step)
        if isinstance(self._loader, StreamLoader):
            self._streams.compare(self._loader, step=result.step, is_due=due.compare)
        if due.log:
            self._log(result, epoch)
        if result.stop is not None or self._at_end():
            return result.stop  # the end of the run compares, evaluates and saves by itself
        save_now = self._may_save(wanted=due.save or result.save)
        return self._attend(evaluate_now=due.evaluate, save_now=save_now, compare_now=due.compare)

    def _may_save(self, *, wanted: bool) -> bool:
        """Not amid skipped steps: a roll-back would lead into them again. It is made up for later."""
        if wanted and not self._state.monitor.is_calm:
            if self._group.rank == 0:
                self._saving.put_off(INTERVAL)
            return False
        return wanted

    def _due(self, step: int) -> DueActions:
        return due_after(
            step,
            self._workload.length,
            log=self._settings.log,
            checkpoint=self._settings.checkpoint,
            replica_check_steps=self._settings.recovery.replica_check_steps,
        )

    def _attend_to_unattended(self) -> StopReason | None:
        """Make up for an evaluation or save that a fault or a stop cut short, on all ranks alike."""
        step = self._state.committed_step
        saves, wanted_step = self._group.rank == 0, self._saving.save_requests.wanted_step
        makes_up = saves and self._saving.has_to_make_up()
        covered_step = self._saving.covered_step() if saves else 0
        mine = json.dumps([self._state.boundary_done_step, makes_up, wanted_step, covered_step])
        with waiting_for_peers(self._runtime.slot):
            answers = [json.loads(answer) for answer in self._group.exchange("attended", mine)]
        if self._at_end():
            return None
        due = self._due(step)
        unattended = min(attended for attended, *_ in answers) < step
        is_lost = (
            max(wanted for _, _, wanted, _ in answers) > answers[0][3]
        )  # with the rank 0 before
        save_now = self._may_save(wanted=(unattended and due.save) or answers[0][1] or is_lost)
        return self._attend(
            evaluate_now=unattended and due.evaluate, save_now=save_now, compare_now=False
        )

    def _attend(
        self, *, evaluate_now: bool, save_now: bool, compare_now: bool
    ) -> StopReason | None:
        """What is due at this boundary. What is to be saved is compared too."""
        if evaluate_now:
            stop = self._evaluate()
            if stop is not None:
                return stop
        self._state.boundary_done_step = self._state.committed_step
        if save_now and self._group.rank == 0:
            self._saving.due(INTERVAL)
        if save_now or compare_now:
            self._guard.begin_comparison()
        return None

    def _evaluate(self) -> StopReason | None:
        if not self._workload.validation_samples:
            return None
        began_ns = time.monotonic_ns()
        slot = self._runtime.slot
        slot.stamp(Phase.EVALUATE, began_ns)
        ema, model = self._state.ema, self._state.model
        self._state.side.look()
        with (
            contextlib.nullcontext() if ema is None else ema.swapped_in(model),
            make_validation_loader(self._parts, self._group) as loader,
            self._memory.beside(lambda: loader.worker_pids),
        ):
            evaluation = evaluate(
                self._workload.task,
                model,
                loader,
                replica=self._replica,
                precision=self._state.precision,
                seed=self._settings.run.seed,
                step=self._state.committed_step,
                stop_asked=self._runtime.stop_asked,
                after_round=partial(self._memory.in_evaluation, self._state.committed_step),
                round_done=self._count_done,
            )
        # What is saved, and compared at the end, is what the steps made.
        self._state.drop_evaluation()
        slot.add(Cell.EVALUATION_NS, time.monotonic_ns() - began_ns)
        if evaluation.loss is None:
            return evaluation.stop
        self._progress.validation_loss = evaluation.loss
        self._progress.figures = self._figures(evaluation.loss)
        self._report_evaluation(time.monotonic_ns() - began_ns)
        return None

    def _figures(self, loss: float) -> dict[str, float]:
        figures = self._helpers.figures(loss)
        return {"validation_loss": loss} | {f"validation_{name}": v for name, v in figures.items()}

    def _warn_once(self, text: str) -> None:
        """What holds on every rank alike is said by one."""
        if self._group.rank == 0:
            self._runtime.logger.warning(text)

    def _report_evaluation(self, took_ns: int) -> None:
        if self._group.rank != 0:
            return
        step = self._state.committed_step
        shown = "  ".join(f"{name} {value:.4f}" for name, value in self._progress.figures.items())
        self._runtime.logger.info(f"evaluated: {shown}  ({took_ns / 1e9:.1f} s)", step=step)
        self._runtime.tell(Metrics(rank=self._rank, step=step, values=dict(self._progress.figures)))

    def _log(self, result: StepResult, epoch: int) -> None:
        now_ns = time.monotonic_ns()
        seconds = max(1e-9, (now_ns - self._logged_at_ns) / 1e9)
        values = {
            "loss": result.loss,
            "learning_rate": result.learning_rate,
            "grad_norm": result.grad_norm,
            "epoch": float(epoch),
            "samples_per_s": self._trained_samples / seconds,
            "data_wait_share": min(1.0, self._waited_ns / 1e9 / seconds),
            "step_s": self._runtime.slot.get(Cell.STEP_NS) / 1e9,
        }
        self._logged_at_ns, self._trained_samples, self._waited_ns = now_ns, 0, 0
        self._runtime.tell(Metrics(rank=self._rank, step=result.step, values=values))
        self._runtime.logger.progress(
            f"loss {result.loss:.4f}  lr {result.learning_rate:.2e}  grad {result.grad_norm:.3f}  "
            f"{values['samples_per_s']:.0f} samples/s  data {values['data_wait_share']:.0%}",
            step=result.step,
        )

    def _write_audit(self, result: StepResult, epoch: int, micro_batches: list[MicroBatch]) -> None:
        if self._audit is None:
            return
        line = audit_line(
            generation=self._group.membership.generation,
            step=result.step,
            epoch=epoch,
            indices=[index for micro_batch in micro_batches for index in micro_batch.indices],
            loss=result.loss,
        )
        self._audit.append(line)


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
