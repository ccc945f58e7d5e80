"""Takes one rank through all its generations, around a training loop that is not the engine's.

    for micro_batches in engine.steps():
        with engine.step() as step:
            step.result = ...

It decides nothing about repair: it reports a Fault to the runtime, which gives it the next generation.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

import torch

from ddp_runner.kernel.group.device import prove_device
from ddp_runner.kernel.group.group import Group, joined
from ddp_runner.kernel.rules.classify import VICTIM_KINDS
from ddp_runner.kernel.rules.election import EMPTY_STEP
from ddp_runner.kernel.rules.exits import StopReason
from ddp_runner.kernel.rules.faults import REPAIRED_BY_RANK, Fault, FaultKind, ReportedFaultError
from ddp_runner.kernel.rules.phases import Phase
from ddp_runner.kernel.step.agreeing import Peer, bring_to_newest
from ddp_runner.kernel.step.commit import State
from ddp_runner.kernel.step.durable import Durable, Trust
from ddp_runner.kernel.step.failure import drop_frames, fault_of
from ddp_runner.kernel.step.runtime import Generation, Runtime
from ddp_runner.kernel.step.session import Makers, Session, StepInHand, WrapAgainError
from ddp_runner.kernel.wire.board import Cell
from ddp_runner.kernel.wire.events import Faulted, RankFormed
from ddp_runner.kernel.wire.messages import Ready

if TYPE_CHECKING:
    from types import TracebackType

    from typing_extensions import Self

# For these kinds our own traceback helps nobody; the plan's line names the place.
OF_NO_USE = {FaultKind.STORAGE_FAILED, FaultKind.STORE_TAMPERED, FaultKind.BAD_INPUT}

_Found = TypeVar("_Found")


class Client(Protocol):
    """Knows what is trained, for the engine: a task, or a user's loop. Every rank calls its methods at the same places.

    ``is_first``: this process has trained in no generation yet.
    """

    def ready(self, *, is_first: bool) -> Ready:
        """Return the message with which this rank offers to join the next generation."""
        ...

    def compare(self, group: Group) -> None:
        """Compare with the other ranks what must be equal before a state is transferred."""
        ...

    def share(
        self, group: Group, peers: Sequence[Peer], *, is_source: bool, is_first: bool
    ) -> None:
        """Prepare the transfer of the newest state, which this rank sends if ``is_source``."""
        ...

    def agree(self, group: Group, *, is_first: bool) -> None:
        """Agree on everything else that must be equal; all ranks have the same state by now."""
        ...

    def enter(self, group: Group) -> Makers:
        """Wrap the model, and return what makes steps in this generation."""
        ...

    def repaired(self, fault: Fault) -> Fault:
        """Remove the cause of ``fault`` if this process can, and return the fault as it is then."""
        ...

    def recovered(self) -> None:
        """Free what the broken step has left on the device, which answers again."""
        ...

    def conclude(self, group: Group, reason: StopReason) -> None:
        """Conclude the training, together with the other ranks."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """The device of a rank, and how it joins groups: no collective waits for longer than ``timeout_s``."""

    device: torch.device
    backend: str
    timeout_s: float


class _Block:
    """The block in which a step is made. A generator as a context takes ten times as long, in every step."""

    __slots__ = ("_end", "_step")

    def __init__(self, step: StepInHand, end: Callable[[Exception | None], None]) -> None:
        self._step, self._end = step, end

    def __enter__(self) -> StepInHand:
        return self._step

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> bool:
        if error is not None and not isinstance(error, Exception):
            return False
        self._end(error)
        return True


class Engine:
    """Forms, repairs and ends what ``client`` trains. To be closed, as a context manager."""

    def __init__(
        self, client: Client, *, state: State, runtime: Runtime, durable: Durable, place: Place
    ) -> None:
        """``state``: the one that ``client`` trains."""
        self._client = client
        self._state = state
        self._runtime = runtime
        self._durable = durable
        self._place = place
        self._rank = runtime.rank_info.rank
        self._generation: Generation | None = None  # the newest, also after this rank has left it
        self._session: Session | None = None  # None while this rank is in no generation
        self._step: StepInHand | None = None  # of that session, until the next one begins
        self._held = contextlib.ExitStack()  # closed when this rank leaves its generation
        self._fault: Fault | None = None  # that ended the last generation; it was reported
        # The error that ended the newest generation, for a run without a supervisor.
        self.error: Exception | None = None
        self._has_trained = False
        self._has_ended = False

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Leave the generation that this rank is in: with Ctrl-C, say, or where its loop was left."""
        self._held.__exit__(kind, error, trace)

    @property
    def is_leaving(self) -> bool:
        """True if this rank has to leave its generation, if it is still in it."""
        return self._generation is not None and self._generation.switch.tripped

    @property
    def goes_on(self) -> bool:
        """True if this process joins another generation after the step that has just failed."""
        return self._fault is None or self._runtime.survives(self._fault)

    @property
    def has_ended(self) -> bool:
        """True once all steps are made, or the run has been stopped: no generation is joined any more."""
        return self._has_ended

    @property
    def in_hand(self) -> StepInHand:
        """The step that :meth:`steps` has yielded."""
        assert self._step is not None, "steps() has yielded one"
        return self._step

    @property
    def _newest(self) -> Generation:
        assert self._generation is not None, "there is none before the first"
        return self._generation

    def steps(self) -> Iterator[list[Any]]:
        """Yield this rank's share of each step, until the end of the run or an agreed stop.

        Whatever is due between steps is done before. After a step that broke, the next generation is
        joined, its state received where this rank is behind, and the step of that state yielded.
        Raises FaultError for a fault that this process does not survive, or where the run ends without it.
        """
        while not self._has_ended:
            if self._session is None:
                self._get_over_fault()
                self._generation = self._next_generation()
            self._step = self._next_step()
            if self._step is not None:
                yield self._step.micro_batches

    def between(self, function: Callable[[], _Found]) -> _Found:
        """Call ``function`` between two steps, within a generation, and return its result.

        After a fault in it the next generation is joined, and the function is called again. Every rank calls
        this at the same place. Raises FaultError like :meth:`steps`.
        """
        while True:
            if self._session is None:
                self._get_over_fault()
                self._generation = self._next_generation()
            try:
                if self._session is None:
                    self._form(self._newest)
                return function()
            except Exception as error:  # noqa: BLE001 - as in a step
                self._break_off(error)

    def step(self) -> AbstractContextManager[StepInHand]:
        """Return a context for making the step that was yielded; the caller sets its result.

        An error in the block is reported and goes no further: a ``for`` hands no exception to its
        iterator, so this does, and :meth:`steps` continues from there.
        """
        assert self._session is not None, "a step is made where steps() has yielded it"
        return _Block(self.in_hand, self._end_step)

    def _end_step(self, error: Exception | None) -> None:
        """End the step in hand, whose block has raised ``error``, or nothing."""
        if error is None:
            try:
                assert self._session is not None, "as in step()"
                self._session.end(self.in_hand)
            except Exception as found:  # noqa: BLE001 - the step boundary: becomes a Fault
                error = found
        if isinstance(error, WrapAgainError):
            self.in_hand.must_wrap = True  # it is begun again
        elif error is not None:
            self._break_off(error)

    def _next_generation(self) -> Generation:
        generation = self._runtime.next_generation(
            self._client.ready(is_first=not self._has_trained)
        )
        if generation is None:
            fault = self._durable.end(None)
            assert fault is not None, "the run is given up"
            raise ReportedFaultError(fault)
        return generation

    def _next_step(self) -> StepInHand | None:
        """The next step, begun; None once training has ended, or the generation has broken."""
        try:
            session = self._session or self._form(self._newest)
            step = session.begin()
            if step is None:
                self._conclude(session)
        except Exception as error:  # noqa: BLE001 - as in a step
            self._break_off(error)
            return None
        return step

    def _form(self, generation: Generation) -> Session:
        """Join ``generation``, receive the newest state if this rank is behind, and prepare the first step."""
        slot, is_first = self._runtime.slot, not self._has_trained
        began_s = time.monotonic()
        slot.set(Cell.GENERATION, generation.membership.generation)
        slot.stamp(Phase.FORMING, time.monotonic_ns())
        group = self._held.enter_context(
            joined(
                generation.membership,
                link=generation.link,
                backend=self._place.backend,
                device=self._place.device,
                timeout_s=self._place.timeout_s,
                switch=generation.switch,
            )
        )
        joined_s = time.monotonic()
        self._client.compare(group)
        source = bring_to_newest(
            group,
            self._state,
            self._runtime,
            self._durable,
            share=partial(self._client.share, group, is_first=is_first),
        )
        transferred_s = time.monotonic()
        self._client.agree(group, is_first=is_first)
        number = generation.membership.generation
        session = self._open_session(group)
        slot.stamp(Phase.FORMING, time.monotonic_ns())
        self._runtime.report(
            RankFormed(
                rank=self._rank,
                generation=number,
                committed_step=self._state.committed_step,
                source=source,
                group_s=joined_s - began_s,
                transfer_s=transferred_s - joined_s,
                rebuild_s=time.monotonic() - transferred_s,
            )
        )
        # The deadline of forming ends here.
        slot.stamp(Phase.COMPARE, time.monotonic_ns())
        return session

    def _open_session(self, group: Group) -> Session:
        """Open the session of ``group``, which is closed when this rank leaves the generation."""
        makers = self._client.enter(group)
        self._session = session = Session(
            self._state, self._runtime, self._durable, group=group, makers=makers
        )
        self._held.callback(self._close_session)
        self._has_trained = True
        makers.maker.settle()
        makers.side.report_lost()
        return session

    def _close_session(self) -> None:
        session, self._session = self._session, None
        if session is not None:
            session.close()

    def _conclude(self, session: Session) -> None:
        """End training: close the session, conclude with the other ranks, and leave the group."""
        self._close_session()
        self._client.conclude(session.group, session.reason)
        self._held.close()
        self._has_ended = True

    def _break_off(self, error: Exception) -> None:
        """Leave the generation because of ``error``, undo the unfinished step, and report the fault."""
        # Without a supervisor the error itself ends the program.
        self.error = None if self._runtime.is_watched else error
        fault = self._leave(error)
        self._state.drop_unfinished_step()
        self._durable.judge(Trust.UNKNOWN)
        self._fault = self._repaired(fault)
        self._log(self._fault)
        number = self._newest.membership.generation
        self._runtime.report(Faulted(generation=number, fault=self._fault))

    def _leave(self, error: Exception) -> Fault:
        """Leave the generation, and free what the broken step holds; return the fault."""
        slot, step = self._runtime.slot, self._state.committed_step
        try:
            self._held.__exit__(type(error), error, error.__traceback__)
        except Exception as other:  # noqa: BLE001 - what breaks in leaving takes its place
            error = other
        fault = fault_of(
            error,
            rank=self._rank,
            step=slot.get(Cell.COMMITTED_STEP) if step == EMPTY_STEP else step,
            phase=slot.read().phase.label,
            aborted=self._newest.switch.aborted,
        )
        # INVARIANT nothing-held: what a step that broke had in memory is free before its repair asks for
        # it: the loop that broke still has its error and its batches. Broken if: a frame keeps its tensors.
        # Guarded by: test_a_step_that_broke_holds_nothing_when_its_fault_is_reported.
        drop_frames(error)
        if self._step is not None:
            self._step.micro_batches.clear()
            self._step = None
        return fault

    def _repaired(self, fault: Fault) -> Fault:
        """Remove the cause of the fault if this process can, and return the fault as it is then."""
        if not fault.may_retry:
            return fault
        if fault.kind is FaultKind.REPLICA_DIVERGED:
            self._state.committed_step = EMPTY_STEP  # to receive what the majority has
            return fault
        if fault.kind not in REPAIRED_BY_RANK or self._runtime.slot.get(Cell.DIRTY):
            return fault  # inside the optimizer this process ends, and the next one asks for less
        return self._client.repaired(fault)

    def _log(self, fault: Fault) -> None:
        """Log a cause with its traceback, also on the console, and a consequence in the file only."""
        logger = self._runtime.logger
        for_file = fault.kind in VICTIM_KINDS | OF_NO_USE
        for_file |= fault.kind is FaultKind.RANK_RAISED and not fault.may_retry
        if for_file or (fault.kind in REPAIRED_BY_RANK and fault.may_retry):
            logger.progress(f"left the generation: {fault.cause}\n{fault.detail}", step=fault.step)
        else:
            logger.error(f"{fault.cause}\n{fault.detail}", step=fault.step)

    def _get_over_fault(self) -> None:
        """Check this process and its device before another generation. Raises FaultError."""
        fault, self._fault = self._fault, None
        if fault is None:
            return
        if not self._runtime.survives(fault):
            raise ReportedFaultError(fault)
        prove_device(self._place.device, rank=self._rank, step=self._state.committed_step)
        self._client.recovered()
