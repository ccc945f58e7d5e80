"""``run = ddp_runner.attach()``: what a loop of the user's own is given to call. Decides no repair."""

from __future__ import annotations

import atexit
import contextlib
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from types import TracebackType
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

from ddp_runner.core.settings import Settings
from ddp_runner.core.step_schedule import RunLength
from ddp_runner.kernel.rules.exits import EXIT_CODE_OF_STATUS, STATUS_OF_REASON, StopReason
from ddp_runner.kernel.rules.faults import FaultError, ReportedFaultError
from ddp_runner.kernel.rules.phases import Phase
from ddp_runner.kernel.step.engine import Engine
from ddp_runner.kernel.step.runtime import Runtime
from ddp_runner.kernel.wire.board import Cell
from ddp_runner.training.components.optimizer_state import hidden_state
from ddp_runner.training.components.sync_batchnorm import SyncedNorms
from ddp_runner.training.exactness.first_step import (
    note_carried,
    report_lost_carried,
    report_lost_local,
)
from ddp_runner.training.exactness.held_values import (
    CURE_IN_LOOP,
    DataWatch,
    HeldValues,
    watched_in,
)
from ddp_runner.training.figures.train_report import TrainReport
from ddp_runner.training.loading.loaders import waiting
from ddp_runner.training.local_state.by_value import KeptLocally
from ddp_runner.training.own_loop.batches import (
    GivenBatches,
    KeptLoader,
    length_of,
    why_alike,
    why_spawned,
)
from ddp_runner.training.own_loop.between_steps import BetweenSteps
from ddp_runner.training.own_loop.client import LoopClient, LoopSetup
from ddp_runner.training.own_loop.declared import KEEP_LOCAL, OwnLoop, Recurring, RepeatStep
from ddp_runner.training.own_loop.kept import KeptState
from ddp_runner.training.own_loop.loop_source import sets_late
from ddp_runner.training.own_loop.loop_variables import LoopVariables
from ddp_runner.training.own_loop.misuse import (
    is_guarded,
    misuse,
    user_frame,
    user_line,
)
from ddp_runner.training.own_loop.net import AttachedModule, refuse_unfit
from ddp_runner.training.own_loop.parts import LoopParts
from ddp_runner.training.prepare import begin_start, prepare
from ddp_runner.training.rank_client import engine_of
from ddp_runner.values.generators import seed_all

_Result = TypeVar("_Result")
_Function = TypeVar("_Function", bound=Callable[[], Any])
_DDP_OPTIONS = ("find_unused_parameters", "gradient_as_bucket_view", "bucket_cap_mb")
_CURE = (
    "use run.step_number, or put it into an object that run.keep() is given, or run.keep_local() if it"
    " differs by rank"
)
_CURE_OF_OPTIMIZERS = "put it into param_groups, or into state_dict() and load_state_dict()"


class AttachedRun:
    """One rank of a run whose loop is the user's own. Made by :func:`ddp_runner.attach`.

    ``rank``, ``world_size`` and ``device`` (a torch.device) are as of the launcher.
    """

    def __init__(
        self,
        settings: Settings,
        runtime: Runtime,
        *,
        arguments: str,
        on_end: Callable[[TrainReport], object],
    ) -> None:
        """``arguments``: of the program, as text; ``on_end`` is given the report of a training that ended."""
        self._settings = settings
        self._runtime = runtime
        self._arguments = arguments
        self._on_end = on_end
        info = runtime.rank_info
        self.rank = info.rank
        self.world_size = info.world_size
        self.device = torch.device(info.device)
        if self.device.type == "cuda":
            torch.cuda.set_device(self.device)
        # A static graph would have to be learnt from a backward without no_sync(), which is the loop's.
        ddp = replace(settings.ddp, find_unused_parameters=False, static_graph=False)
        self._loop = OwnLoop(ddp=ddp)
        self._engine: Engine | None = None
        self._client: LoopClient | None = None
        self._held = contextlib.ExitStack()  # what is to be closed when the loop ends
        self._length: RunLength | None = None
        self._state: KeptState | None = None
        self._parts: LoopParts | None = None
        self._is_given = False  # a batch was given, and its step has not begun
        self._was_made = True  # the newest step, or there was none
        self._was_broken = False
        self._watched: list[tuple[HeldValues, str]] = []
        self._looked_in = 0  # generation
        self.left_at = ""  # the line at which the loop was left before its end
        seed_all(settings.run.seed)

    @property
    def has_ended(self) -> bool:
        """True if training has ended regularly: the last step is made, or a stop was agreed on."""
        return self._client is not None and self._client.reason is not None

    @property
    def has_begun(self) -> bool:
        """True if the loop's iterator was made."""
        return self._engine is not None

    @property
    def is_first(self) -> bool:
        """True on rank 0, which prints and writes what is wanted once."""
        return self.rank == 0

    @property
    def step_number(self) -> int:
        """The number of committed optimizer steps: within a step, its index from 0."""
        return 0 if self._state is None else max(0, self._state.committed_step)

    @property
    def epoch(self) -> int:
        """The epoch, from 0, of the step in hand."""
        return 0 if self._length is None else self._length.epoch_of(self.step_number)

    def ddp(self, module: nn.Module, **options: Any) -> AttachedModule:
        """Wrap ``module`` as DistributedDataParallel would: gradients are averaged over ranks.

        ``options``: ``find_unused_parameters``, ``gradient_as_bucket_view``, ``bucket_cap_mb``, as of DDP.
        Raises BadInputError for a second module, and where a process group exists already.
        """
        self._refuse_late("ddp()")
        if dist.is_available() and dist.is_initialized():
            raise misuse(
                "a process group exists already: attach() makes it, so leave out init_process_group()"
            )
        if self._loop.net is not None:
            raise misuse("ddp() is called a second time: put both into one nn.Module")
        unknown = [name for name in options if name not in _DDP_OPTIONS]
        if unknown:
            raise misuse(f"ddp({unknown[0]}=...) is none of {', '.join(_DDP_OPTIONS)}")
        if isinstance(module, AttachedModule):
            raise misuse("ddp() is given what it has wrapped already")
        self._loop.ddp = replace(self._loop.ddp, **options)
        self._loop.net = AttachedModule(module)
        return self._loop.net

    def keep(self, **objects: Any) -> None:
        """Have these saved, sent to replaced ranks and put back where a step is done again, by name.

        Modules, optimizers, schedulers, a GradScaler, an AveragedModel, any object with ``state_dict()``
        and ``load_state_dict()`` of tensors and plain values. Raises BadInputError for others, and after
        the first step.
        """
        self._refuse_late("keep()")
        for name, value in objects.items():
            module = value.module if isinstance(value, AttachedModule) else value
            if name in self._loop.local or any(module is one for one in self._loop.local.values()):
                raise misuse(
                    f"keep({name}=...): run.keep_local() has this already, as each rank's own"
                )
            self._loop.kept.add(name, module)

    def keep_local(self, **objects: Any) -> None:
        """Keep objects of this rank alone at each step, by name: an environment, a replay buffer, a generator.

        A replacement of this rank receives them, a repeated step puts them back, and checkpoints hold them by rank.
        An object has ``state_dict()`` and ``load_state_dict()``, or is a dict, list, deque, set, array, tensor,
        generator or another object whose attributes pickle can copy. Change the objects before ``optimizer.step()``. Raises
        BadInputError for other objects, and after the first step.
        """
        self._refuse_late("keep_local()")
        for name, value in objects.items():
            if name in self._loop.local:
                raise misuse(f"keep_local({name}=...) is kept already")
            if name in self._loop.kept or any(value is one for one in self._loop.kept.values()):
                raise misuse(
                    f"keep_local({name}=...): run.keep() has this object already, as equal on all ranks"
                )
            KeptLocally({name: value}, option=KEEP_LOCAL)
            self._loop.local[name] = value

    def watch(
        self, values: Callable[[], Mapping[str, Any]], *, is_apart: Callable[[Any], bool], cure: str
    ) -> None:
        """Have what changes of ``values()``, by name, said to be not kept. For a loop that is not yours.

        It is asked between steps, now and then, and objects are looked into, except where ``is_apart(value)``.
        ``cure`` is said with a name. Once such a value is lost, the run is not exact.
        """
        self._refuse_late("watch()")
        self._watched.append((HeldValues(values, is_apart=is_apart), cure))

    def loader(
        self,
        dataset: Any,
        *,
        batch_size: int,
        accumulate: int = 1,
        collate_fn: Callable[[list[Any]], Any] | None = None,
        shuffle: bool = True,
        num_workers: int | None = None,
    ) -> KeptLoader:
        """Batches of ``batch_size`` samples for this rank, from a loader that repairs itself.

        Of a map-style dataset, loaded by ``num_workers`` processes, or as many as the setting says. They are replaced when
        they die or hang, and samples that cannot be loaded by others. With ``accumulate`` above 1 each step is given a
        list of so many batches.
        """
        return KeptLoader(
            dataset=dataset,
            batch_size=batch_size,
            accumulate=accumulate,
            collate_fn=collate_fn,
            shuffle=shuffle,
            num_workers=num_workers,
        )

    def every(self, *, steps: int = 0, epochs: int = 0) -> Callable[[_Function], _Function]:
        """Call the function between steps, on every rank: after each so many steps, or epochs.

        What has collectives, and what changes kept objects outside of a step, belongs there. After a
        fault it may be called once more for the same step.
        """
        self._refuse_late("every()")
        if bool(steps) is bool(epochs) or steps < 0 or epochs < 0:
            raise misuse("every() needs steps= or epochs=, one of them, above 0")

        def registered(function: _Function) -> _Function:
            self._loop.recurring.append(Recurring(call=function, steps=steps, epochs=epochs))
            return function

        return registered

    def note(self, **values: Any) -> None:
        """Have these numbers logged: tensors of one element, or floats.

        ``loss`` is the mean over ranks: of this step where it is noted before backward, else of the one before.
        """
        self._loop.note(values)

    def from_ranks(self, ask: Callable[[], Tensor]) -> Tensor:
        """Return ``ask()``, a tensor that ranks compute together in a step; a drill gets what its rank has got."""
        return self._loop.from_ranks(ask)

    def stop(self) -> None:
        """End the loop on all ranks: after this step, or after the next one where backward has begun.

        The state is saved, and the code after the loop runs.
        """
        self._loop.wants_stop = True

    def alive(self) -> None:
        """Say that this rank works, within a part of a step that takes unusually long."""
        self._runtime.slot.set(Cell.PHASE_SINCE_NS, time.monotonic_ns())

    def steps(
        self, batches: Iterable[Any], *, max_steps: int = 0, epochs: int = 0, accumulate: int = 1
    ) -> Iterator[Any]:
        """Give this rank's batch of each step, until the end; the same batch where a step is done again.

        ``batches``: a DataLoader, any iterable that can be begun again, or :meth:`loader`. With
        ``accumulate`` above 1, or that of :meth:`loader`, a list of batches. Either ``max_steps`` or
        ``epochs`` says how long, from the run's very first step. To be called once, after :meth:`keep`.
        Raises BadInputError for what cannot be trained, and FaultError for a fault that no repair ends.
        """
        self._refuse_late("steps()")
        parts, run_id, accumulate = self._prepared(
            batches, max_steps=max_steps, epochs=epochs, accumulate=accumulate
        )
        is_kept = partial(_is_kept, self._kept_ids())
        self._variables = LoopVariables(
            is_kept=is_kept,
            functions=lambda: [one.call for one in self._loop.recurring],
            modules=self._loop.kept.modules.values(),
            epochs=lambda: {parts.workload.length.epoch_of(self.step_number - n) for n in (0, 1)},
        )
        kept = self._loop.kept
        held = HeldValues(
            lambda: hidden_state(kept.optimizers, kept.others) | kept.not_in_states(),
            is_apart=is_kept,
        )
        self._watched.append((held, _CURE_OF_OPTIMIZERS))
        parts.loader.watch = DataWatch(watched_in(batches), is_kept=is_kept, note=self._name_data)
        self._loop.between = BetweenSteps(
            seed=self._settings.run.seed, rank=self.rank, is_kept=is_kept, note=self._name_data
        )
        self._client = LoopClient(parts, run_id, self._loop)
        self._held.callback(register_optimizer_step_pre_hook(self._before_update).remove)
        self._held.enter_context(self._loop.between.around_loop(parts.loader, self))
        # Where the program ends in the midst of it: before multiprocessing waits for a loader's workers.
        atexit.register(self._leave)
        self._engine = self._held.enter_context(engine_of(self._client, parts))
        return _Steps(self, self._engine.steps(), accumulate=accumulate)

    def _prepared(
        self, batches: Iterable[Any], *, max_steps: int, epochs: int, accumulate: int
    ) -> tuple[LoopParts, str, int]:
        """Return the rank's parts, the id of the run that it resumes, and the batches per step. Raises as :meth:`steps`."""
        self._check_kept()
        if isinstance(batches, KeptLoader):
            accumulate = batches.accumulate
        if spawned := why_spawned(batches, is_guarded=is_guarded):
            raise misuse(spawned)
        warning = why_alike(batches) if self.world_size > 1 else ""
        if warning:
            self._runtime.logger.warning(f"{user_line()}: {warning}")
        self._length = self._length_of(
            batches, accumulate=accumulate, max_steps=max_steps, epochs=epochs
        )
        self._loop.note_files()
        stages = begin_start(self._runtime)
        setup = LoopSetup(
            self._settings,
            self._runtime,
            self._loop,
            GivenBatches(batches=batches, length=self._length, accumulate=accumulate),
            arguments=self._arguments,
            on_wait=waiting(
                self._runtime,
                is_leaving=lambda: self._engine is not None and self._engine.is_leaving,
            ),
        )
        parts, run_id = prepare(setup, self._runtime, stages=stages, ending=self._held)
        self._held.callback(parts.device.close)
        self._runtime.slot.stamp(Phase.STARTUP, time.monotonic_ns())
        self._state, self._parts = parts.state, parts
        return parts, run_id, accumulate

    def join(self) -> None:
        """Join the other ranks before the first batch, and receive their state if this rank is a replacement.

        Use it in a loop that calls :meth:`together`: a replaced rank then knows whether the others are in such a call.
        Call it once, after :meth:`steps`. Raises BadInputError before :meth:`steps`.
        """
        self._between(lambda: None)

    def together(self, function: Callable[[], _Result]) -> _Result:
        """Call ``function``, which may use collectives, on all ranks between two steps, and return its result.

        Use it for the evaluation of a loop that is not yours. If a rank is lost meanwhile, all ranks call ``function``
        again, with the kept objects as of the start of this call. ``function`` must not change weights. A replaced rank
        must make the same call before its first batch: see :meth:`join`. Raises BadInputError before :meth:`steps`.
        """

        def called() -> _Result:
            assert self._state is not None, "there are steps"
            slot, step = self._runtime.slot, self._state.committed_step
            slot.stamp(Phase.EVALUATE, time.monotonic_ns())
            with self._loop.between.drawing(step):
                found = function()
            slot.count_done(step)
            self._state.calls += 1
            return found

        return self._between(called)

    def _between(self, function: Callable[[], _Result]) -> _Result:
        if self._engine is None or self._engine.has_ended:
            raise misuse("run.join() and run.together() come after run.steps(), before its end")
        self._keep_between()
        self._loop.calls_together = self._loop.is_between = True
        try:
            with self.ending():
                return self._engine.between(function)
        finally:
            self._loop.is_between = False

    @contextlib.contextmanager
    def ending(self) -> Iterator[None]:
        """Return a context that turns a fault which this process does not survive into its end."""
        try:
            yield
        except ReportedFaultError:
            raise SystemExit(1) from None  # it has been reported, with its traceback
        except FaultError as error:
            raise (self.own_error or error) from None

    def step(self) -> _Block:
        """Return a context for the body of one optimizer step, which repairs faults and repeats the step."""
        return _Block(self)

    def begin_step(self, *, keeps: bool = False) -> None:
        """Begin the body of the step whose batch :meth:`steps` has given last.

        With :meth:`end_step` and :meth:`fail_step` it does what ``with run.step():`` does, for a loop that is not yours and
        only calls hooks. ``keeps``: the loop has run code since that batch, and does not run it again if the step is repeated.
        Raises BadInputError within a step, and where no batch was given.
        """
        if self._is_in_body:
            raise misuse("a step begins within another one: run.end_step() comes first")
        if self._client is None or self._client.steps is None or not self._is_given:
            raise misuse(
                "run.step() needs a batch, and so does run.begin_step():"
                " for batch in run.steps(...): with run.step(): ..."
            )
        assert self._engine is not None, "there are steps"
        assert self._state is not None, "as above"
        self._is_given = False
        if keeps:
            self._state.keep_between()
        self._client.steps.begin_body(self._engine.in_hand.votes)

    def end_step(self) -> None:
        """End the body that :meth:`begin_step` has begun. If it returns, the step is committed.

        Raises RepeatStep if the step is to be made again, with the batch that :meth:`steps` gives next, and
        BadInputError outside of a step. Without a supervisor it raises what broke the step.
        """
        if not self._is_in_body:
            raise misuse("run.end_step() without run.begin_step()")
        if not self._end_body(None):
            raise RepeatStep

    def fail_step(self, error: BaseException) -> bool:
        """End a body that ``error`` has left, and return True if the loop continues with the next batch.

        False means that the error must be raised again: it ends the program, as SystemExit does, or it does not
        come from a step. Without a supervisor an error of a step is raised here, as nobody can repair it.
        """
        if not self._is_in_body:
            return isinstance(error, RepeatStep)  # of end_step(), which has ended the body
        if not isinstance(error, (Exception, RepeatStep)):
            return False
        self._end_body(error if isinstance(error, Exception) else None)
        return True

    def _length_of(
        self, batches: Iterable[Any], *, accumulate: int, max_steps: int, epochs: int
    ) -> RunLength:
        if isinstance(batches, KeptLoader):
            batches = range(batches.count(self.world_size))
        return length_of(batches, accumulate=accumulate, max_steps=max_steps, epochs=epochs)

    def _refuse_late(self, what: str) -> None:
        if self._engine is not None:
            raise misuse(
                f"{what} comes after run.steps(): what it says must be known before the first step"
            )

    def _check_kept(self) -> None:
        if self._loop.net is None:
            raise misuse("no net: wrap the model with run.ddp(model) before run.steps()")
        self._loop.kept.check()
        kept = {
            id(one) for module in self._loop.kept.modules.values() for one in module.parameters()
        }
        lost = [
            name for name, one in self._loop.net.module.named_parameters() if id(one) not in kept
        ]
        if lost:
            raise misuse(f"{lost[0]} of the net is in no kept module: run.keep(model=model, ...)")
        if self.world_size > 1:
            self._refuse_unsummed()
        refuse_unfit(self._loop.net, ranks=self.world_size)
        self._loop.norms = SyncedNorms(self._loop.net.module, is_wanted=False, device=self.device)

    def _refuse_unsummed(self) -> None:
        """A parameter that is trained and is not in the net would differ from rank to rank, under DDP too."""
        assert self._loop.net is not None, "it was looked for"
        summed = {id(one) for one in self._loop.net.module.parameters()}
        trained = {
            id(one)
            for optimizer in self._loop.kept.optimizers.values()
            for group in optimizer.param_groups
            for one in group["params"]
            if one.requires_grad
        }
        for name, module in self._loop.kept.modules.items():
            for path, one in module.named_parameters():
                if id(one) in trained - summed:
                    raise misuse(
                        f"{name}.{path} is trained and is not in the net, so no gradient of it is summed over ranks:"
                        " put both modules into one, and wrap that with run.ddp()"
                    )

    def _before_update(
        self, optimizer: torch.optim.Optimizer, args: tuple[Any, ...], named: dict[str, Any]
    ) -> None:
        """A hook of torch's, called by each optimizer before it steps."""
        if self._engine is None or self._client is None or self._client.reason is not None:
            return  # before the loop, or after it
        if all(optimizer is not one for one in self._loop.kept.optimizers.values()):
            self._refuse_kept_parameters(optimizer)
            return
        if self._client.steps is None:
            raise RepeatStep
        # torch calls hooks with the optimizer itself as first argument too.
        self._client.steps.before_update(args[1:], named)

    def _refuse_kept_parameters(self, optimizer: torch.optim.Optimizer) -> None:
        """Raise an error if an optimizer that is not kept updates kept parameters: its state would be lost."""
        kept = self._loop.kept.modules.values()
        known = {id(one) for module in kept for one in module.parameters()}
        for group in optimizer.param_groups:
            if any(id(one) in known for one in group["params"]):
                kind = type(optimizer).__name__
                raise misuse(
                    f"{kind}.step() of an optimizer that is not kept: run.keep(name=optimizer)"
                )

    # What the iterator and the block of a step ask for.

    def begin_next(self) -> None:
        """Prepare the next step: changes that the loop has made since the last one become part of the state."""
        self._keep_between()
        if self._loop.rehearses is None:
            self._loop.rehearses = not sets_late(user_frame())
        if self.step_number and (self._variables.is_due(or_if=True) or self._is_last_chance()):
            self._look_at_variables()

    def _is_last_chance(self) -> bool:
        """Return True after a repair and at the end: a change since the last check could be missed otherwise."""
        # INVARIANT looked-behind-a-repair: a variable that a loop changed before a repair is named after it, if a survivor sees it.
        # Broken if: variables are checked at powers of two of steps only, and one changes once between two checks.
        # Guarded by: test_what_a_replaced_rank_of_two_cannot_have_is_named.
        before, self._looked_in = self._looked_in, self._runtime.slot.get(Cell.GENERATION)
        assert self._length is not None, "there are steps"
        return self._looked_in != before or self.step_number >= self._length.total_steps

    def _keep_between(self) -> None:
        if self._is_given:
            raise misuse("a batch was given and no step made of it: with run.step(): ...")
        if self._is_in_body:
            raise misuse("a batch is asked for within a step: run.end_step() comes first")
        assert self._state is not None, "there are steps"
        if self._was_broken:  # what was done behind that block has been for nothing
            self._was_broken = False
            self._state.drop_unfinished_step()
        elif self._was_made:
            self._state.keep_between()
            assert self._parts is not None, "there are steps"
            report_lost_local(self._parts)

    def _look_at_variables(self) -> None:
        """Name the variables that the loop carries from step to step without keeping them."""
        assert self._state is not None, "there are steps"
        assert self._parts is not None, "as above"
        frame = user_frame()
        self._name_carried([] if frame is None else self._variables.look(frame), _CURE)
        for watched, cure in self._watched:
            self._name_carried(watched.look(), cure)
        report_lost_carried(self._parts)

    def _name_data(self, names: list[str]) -> None:
        """Name what an epoch, or the body of the loop, has changed in the data."""
        self._name_carried(names, CURE_IN_LOOP, when="during training")
        assert self._parts is not None, "there are steps"
        report_lost_carried(self._parts)

    def _name_carried(self, names: list[str], cure: str, *, when: str = "each step") -> None:
        assert self._state is not None, "there are steps"
        line = note_carried(self._state, names, cure=cure, when=when)
        if line and self.is_first:
            self._runtime.logger.warning(line)

    def _kept_ids(self) -> set[int]:
        """Return the ids that are no variables of the loop: the run's own objects, and kept ones with their parts."""
        assert self._state is not None, "there are steps"
        own = (self, self._loop.net, *self._state.local.inner())
        return {id(one) for one in own} | self._loop.kept.ids()

    @property
    def own_error(self) -> Exception | None:
        """The error that has ended the loop, if it was not repaired."""
        return None if self._engine is None else self._engine.error

    def given(self) -> None:
        """A step's batch is given to the loop."""
        assert self._client is not None, "there are steps"
        assert self._client.steps is not None, "one of them is in hand"
        self._client.steps.seed()
        self._is_given = True

    @property
    def _is_in_body(self) -> bool:
        """True if a step's body has begun and has not ended."""
        steps = None if self._client is None else self._client.steps
        return steps is not None and steps.in_body

    def _end_body(self, error: Exception | None) -> bool:
        """The body has ended, by ``error`` or without one; whether its step is committed.

        Raises what broke the step where nobody repairs it.
        """
        assert self._engine is not None, "a body has begun"
        assert self._client is not None, "as above"
        steps = self._client.steps
        failure: Exception | None = None
        with self._engine.step() as step:
            assert steps is not None, "a body has begun"
            try:
                step.result = steps.end_body(error)
            except Exception as found:
                failure = found
                raise
        self._was_made, self._was_broken = step.result is not None, failure is not None
        if failure is not None and not self._runtime.is_watched:
            self._leave()
            raise failure  # there is nobody to form the next generation
        if failure is not None and not self._engine.goes_on:
            # It was reported; what is behind the body must not see a half update.
            raise SystemExit(1)
        return self._was_made

    def ended(self) -> None:
        """Training has ended. Ends the process, by SystemExit, where it was asked to stop."""
        assert self._client is not None, "there were steps"
        self._held.close()
        reason = self._client.reason
        assert reason is not None, "the loop was concluded"
        assert self._client.report is not None, "as above"
        self._on_end(self._client.report)
        if reason is not StopReason.COMPLETED:
            raise SystemExit(int(EXIT_CODE_OF_STATUS[STATUS_OF_REASON[reason]]))

    def _leave(self) -> None:
        """The loop is over, though training had not ended; a second time there is nothing to leave."""
        error = RuntimeError("the loop was left")
        self._held.__exit__(type(error), error, None)


def _is_kept(kept: set[int], value: Any) -> bool:
    """Return True for what is no variable of the loop: kept by its id, ours, or accelerate's wrapper of a kept optimizer.

    Other wrappers may have state of their own, as the slow weights of a Lookahead.
    """
    if id(value) in kept or isinstance(value, (_Steps, AttachedModule)):
        return True
    is_wrapper = type(value).__module__.startswith("accelerate.")
    return is_wrapper and id(getattr(value, "optimizer", None)) in kept


class _Steps:
    """The iterator of :meth:`AttachedRun.steps`. A class, since a generator would swallow what its end raises."""

    def __init__(self, run: AttachedRun, drawn: Iterator[list[Any]], *, accumulate: int) -> None:
        self._run = run
        self._drawn = drawn
        self._accumulate = accumulate

    def __iter__(self) -> Iterator[Any]:
        return self

    def __del__(self) -> None:
        """A ``break``, or an error: who ends the program says which."""
        if not self._run.has_ended:
            self._run.left_at = user_line()

    def __next__(self) -> Any:
        self._run.begin_next()
        try:
            with self._run.ending():
                batches = next(self._drawn)
        except StopIteration:
            self._run.ended()
            raise
        self._run.given()
        return batches if self._accumulate > 1 else batches[0]


class _Block:
    """The context manager of :meth:`AttachedRun.step`: its three calls around a block of the loop."""

    def __init__(self, run: AttachedRun) -> None:
        self._run = run

    def __enter__(self) -> None:
        self._run.begin_step()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> bool:
        if error is not None:
            return self._run.fail_step(error)
        with contextlib.suppress(RepeatStep):  # the loop's next batch is this one again
            self._run.end_step()
        return False
