"""Computes, in a drill's process, one rank's share of one step of a loop, as a replacement of that rank does.

The program runs from its top. Its loop receives the batch of the step. The process ends with the first backward, or, if
the rank has handed over its summed gradients, with the end of the block. There is no save and no other rank.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.optim.optimizer import register_optimizer_step_pre_hook

from ddp_runner.core.settings import Settings
from ddp_runner.kernel.step.runtime import Runtime
from ddp_runner.training.exactness.apart import stand_apart
from ddp_runner.training.exactness.own_share import OwnShare
from ddp_runner.training.exactness.own_update import Sums, after_backward
from ddp_runner.training.own_loop.attached_run import AttachedRun
from ddp_runner.training.own_loop.between_steps import BetweenSteps
from ddp_runner.training.own_loop.declared import OwnLoop
from ddp_runner.training.own_loop.misuse import misuse
from ddp_runner.training.own_loop.net import AttachedModule
from ddp_runner.training.own_loop.parts import LoopParts
from ddp_runner.training.own_loop.watched_step import LoopNotes
from ddp_runner.training.starting.resume import load_start
from ddp_runner.values.generators import seed_step


@dataclass(frozen=True, slots=True, kw_only=True)
class ShareWanted:
    """The share that is wanted, by the rank's number in its group. ``local``: what it has handed over of its own.

    ``sums``: what its update began with; None if no update is wanted. ``begins`` is called once the kept objects have the
    state; it may raise. ``checks`` is called with the share, and ends the process if that differs. The others end the
    process: ``ends`` if only the share is known, ``updated`` after the update, and ``fails`` if there is no share.
    """

    rank: int
    world_size: int
    local: Tensor | None = None
    sums: Sums | None = None
    begins: Callable[[LoopParts, OwnLoop], object]
    checks: Callable[[LoopParts, OwnShare], None]
    ends: Callable[[LoopParts], NoReturn]
    updated: Callable[[LoopParts], NoReturn]
    fails: Callable[[str], NoReturn]


class DrilledRun(AttachedRun):
    """Represents the run to a program in a drill's process, which gets it from :func:`ddp_runner.attach`."""

    def __init__(
        self, settings: Settings, runtime: Runtime, *, arguments: str, wanted: ShareWanted
    ) -> None:
        """``settings``: its checkpoint folder holds the state of the drill."""
        super().__init__(settings, runtime, arguments=arguments, on_end=lambda _: None)
        self._wanted = wanted
        self._lone: LoneBody | None = None  # once the batch is given
        self._is_inside = False

    def steps(
        self,
        batches: Iterable[Any],
        *,
        max_steps: int = 0,
        epochs: int = 0,
        accumulate: int = 1,
    ) -> Iterator[Any]:
        """Yield this rank's batch of the one step."""
        parts, _, accumulate = self._prepared(
            batches, max_steps=max_steps, epochs=epochs, accumulate=accumulate
        )
        self._held.callback(register_optimizer_step_pre_hook(self._before_update).remove)
        seed = self._settings.run.seed
        between = BetweenSteps(seed=seed, rank=self.rank, is_kept=lambda _: False, note=lambda _: 0)
        self._held.enter_context(between.around_loop(parts.loader, self))
        return self._one_step(parts, accumulate=accumulate)

    def _one_step(self, parts: LoopParts, *, accumulate: int) -> Iterator[Any]:
        if self._wanted.local is not None:
            parts.state.local.begin_with(self._wanted.local)
        # As a replaced rank, which receives the state with its first batch, and what it has of its own with it.
        if load_start(parts.settings, parts.workload, parts.state, parts.store) is None:
            raise FileNotFoundError(f"there is no state in {parts.store.directory}")
        wanted, step = self._wanted, parts.state.committed_step
        wanted.begins(parts, self._loop)
        batches = parts.loader.take(step)
        group = stand_apart(
            rank=wanted.rank, world_size=wanted.world_size, backend=parts.workload.backend
        )
        assert self._loop.net is not None, "it was looked for"
        self._lone = LoneBody(self._loop.net, parts, wanted)
        group.on_asked = self._lone.asked
        for batch in batches:
            self._lone.notes.batch(batch)
        seed_step(seed=self._settings.run.seed, step=step, rank=wanted.rank, micro_step=0)
        yield batches if accumulate > 1 else batches[0]
        raise misuse("the loop asks for another batch before it has made a step of the first one")

    def join(self) -> None:
        """Do nothing: the state comes with the batch."""

    def begin_step(self, *, keeps: bool = False) -> None:
        """Begin the body of the step, which is not repeated."""
        del keeps
        if self._lone is None or self._is_inside:
            raise misuse("run.step() needs a batch, and so does run.begin_step()")
        self._is_inside = True
        self._lone.begin()

    def end_step(self) -> None:
        """End the process at the end of the body. Does not return."""
        self._in_body().end()

    def fail_step(self, error: BaseException) -> bool:
        """Let the error end the program, unless the share is known already."""
        del error
        if self._lone is not None and self._lone.has_share:
            self._wanted.ends(self._lone.parts)
        return False

    def _before_update(
        self, optimizer: torch.optim.Optimizer, args: tuple[Any, ...], named: dict[str, Any]
    ) -> None:
        """End the share, or let the update be made: torch calls this hook before an optimizer's step."""
        del args, named
        if self._lone is None:
            return  # before the loop
        if all(optimizer is not one for one in self._loop.kept.optimizers.values()):
            self._refuse_kept_parameters(optimizer)
            return
        self._in_body().update_begins()

    def _in_body(self) -> LoneBody:
        if self._lone is None or not self._is_inside:
            raise misuse("outside of a step: with run.step(): ...")
        return self._lone


class LoneBody:
    """Implements :class:`~ddp_runner.training.own_loop.net.Wrapping` without other ranks, and ends with share or update.

    It notes a gradient at the point where DDP would take it for its first sum: when it is accumulated, after a call of
    the net outside of ``no_sync()``.
    """

    def __init__(
        self,
        net: AttachedModule,
        parts: LoopParts,
        wanted: ShareWanted,
    ) -> None:
        self.notes = LoopNotes.of(parts.state)
        self._net = net
        self.parts = parts
        self._wanted = wanted
        self.has_share = False  # the same as the rank's; the gradients are the sums then
        self._has_updated = False
        self._is_in_backward = False
        self._is_summed = True  # the next call of the net is outside of no_sync()
        self._hooked: dict[int, Tensor] = {}  # once such a call has come

    def begin(self) -> None:
        """Begin the body: from here on this object handles calls of the net."""
        self._net.use(self)

    def forward(self, *args: Any, **named: Any) -> Any:
        """Return the net's outputs."""
        if self._is_summed:
            self._hook()
        return self._net.module(*args, **named)

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Have calls of the net inside the block begin no sum over ranks."""
        before, self._is_summed = self._is_summed, False
        try:
            yield
        finally:
            self._is_summed = before

    def update_begins(self) -> None:
        """Prepare the update, or end without one if the gradients are not the sums over ranks."""
        if not self.has_share:
            self.end()
        sums, buffers = self._wanted.sums, self.parts.state.buffers
        assert sums is not None, "they are in the gradients"
        if not self._has_updated:
            sums.give_buffers(buffers.live())
        self._has_updated = True

    def end(self) -> NoReturn:
        """End the process with all that is known so far."""
        if self._has_updated:
            self._wanted.updated(self.parts)
        if not self.has_share:
            self._check_share()
        self._wanted.ends(self.parts)

    def _check_share(self) -> None:
        """Check the gradients so far: those of parameters that the backward did not use were accumulated before."""
        for parameter in self._hooked.values():
            if parameter.grad is not None and not self.notes.has(parameter):
                self.notes.gradient(parameter, parameter.grad)
        self._wanted.checks(self.parts, self.notes.share())

    def asked(self, what: str) -> NoReturn:
        """End when the body communicates with other ranks: its later results would differ from a rank's.

        After the first backward the share is complete, and counts.
        """
        if self.has_share:
            self._wanted.ends(self.parts)
        if any(map(self.notes.has, self._hooked.values())):
            self.end()
        self._wanted.fails(f"the loop asks the other ranks for something ({what})")

    def _hook(self) -> None:
        for parameter in self._net.module.parameters():
            if parameter.requires_grad and id(parameter) not in self._hooked:
                self._hooked[id(parameter)] = parameter
                parameter.register_post_accumulate_grad_hook(self._take)  # type: ignore[no-untyped-call]

    def _take(self, parameter: Tensor) -> None:
        if parameter.grad is not None and not self.notes.has(parameter):
            self.notes.gradient(parameter, parameter.grad)
        if self._wanted.sums is None:
            if all(map(self.notes.has, self._hooked.values())):
                self.end()  # what follows would need the sum over ranks
        elif not self._is_in_backward and not self.has_share:
            self._is_in_backward = True
            after_backward(self._give_sums)

    def _give_sums(self) -> None:
        """Put the sums in at the point where DDP has them: it has a gradient of each parameter, or need not wait for more."""
        self._is_in_backward = False
        state, sums = self.parts.state, self._wanted.sums
        is_whole = all(map(self.notes.has, self._hooked.values()))
        if sums is not None and (is_whole or state.tuning.find_unused_parameters):
            self._check_share()
            sums.give_gradients(state)
            self.has_share = True
