"""Finds out at a launch's first step what a step of the task changes, and whether it can be repeated.

Each rank rehearses the step alone before making it; everything that the rehearsal has changed is restored,
and followed from then on (``side_state``, ``buffers``). Nothing here changes what is trained.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, NoReturn

import torch

from ddp_runner.checkpoint.entry_names import bare_name
from ddp_runner.core.run_stages import is_first_generation
from ddp_runner.data.loader import MicroBatch
from ddp_runner.kernel.group.group import Group
from ddp_runner.kernel.group.waits import waiting_for_peers
from ddp_runner.kernel.rules.errors import BadInputError
from ddp_runner.kernel.rules.faults import rank_list
from ddp_runner.kernel.wire.board import Cell
from ddp_runner.kernel.wire.events import Proved, TuningChanged
from ddp_runner.observe.format import byte_size
from ddp_runner.training.beside_steps import NOTHING
from ddp_runner.training.components.tensor_hash import state_hashes
from ddp_runner.training.exactness.own_share import SAMPLES, OwnShare, first_difference
from ddp_runner.training.rank_context import RankParts, TaskParts
from ddp_runner.training.saves.save_room import ROOM_SHARE_MAX
from ddp_runner.training.state import TrainState
from ddp_runner.training.step import SparseGradientError, Stepper, StepRules, own_share

NAMES_SHOWN = 3
NOT_DONE = "-"  # instead of the place where two computations differ


class FirstStep:
    """Checks the first step of one generation on one rank. Every rank calls its methods at the same places."""

    def __init__(self, parts: TaskParts, group: Group) -> None:
        self._parts = parts
        self._state = parts.state
        self._group = group
        self._runtime = parts.runtime
        self._rehearsed: OwnShare | None = None
        self._repeated: OwnShare | None = None
        self._changed: list[str] = []
        self._is_first = False  # generation of a launch, as all ranks know it

    def rehearse(self, rules: StepRules, *, take: Callable[[int], list[MicroBatch]]) -> None:
        """Compute the next step's share once, see what that changes, and put it back.

        Before DDP wraps the model, where some rank has not done so yet in this launch. Raises what the
        task raises, and BadInputError for a model that DDP would not keep the same on all ranks.
        """
        answers = self._exchange("rehearsed", json.dumps(self._state.is_rehearsed))
        if all(map(json.loads, answers)):
            return
        lacks_bytes = self._lacks_bytes()
        if self._parts.workload.norms.names:  # where one does not, nobody can
            lacks_bytes = max(map(int, self._exchange("lacks room", str(lacks_bytes))))
        written = self._rehearse_alone(rules, take=take, lacks_bytes=lacks_bytes)
        every = [json.loads(one) for one in self._exchange("written", json.dumps(written))]
        known = [one for one in every if one is not None]
        names = dict.fromkeys(name for one in known for name in one)
        parted = [name for name in names if len({one.get(name) for one in known}) > 1]
        # Later on no run is ended for what may be a repair's doing: the replicas are compared.
        stage = self._parts.settings.stage
        if parted and is_first_generation(self._group.membership.generation, stage):
            self._refuse(
                f"{parted[0]} is written by forward or loss, with other values on each rank, which DDP"
                " does not make one: write the same on all of them"
            )

    def _lacks_bytes(self) -> int:
        """The memory that it takes to put back what a rehearsal changes; 0 where there is room for it."""
        needed_bytes = self._state.buffers.hold_all_bytes() + self._state.side.hold_bytes()
        room_bytes = ROOM_SHARE_MAX * self._parts.memory.room_bytes()
        is_short = needed_bytes > room_bytes / self._runtime.rank_info.local_world_size
        return needed_bytes if is_short else 0

    def _rehearse_alone(
        self, rules: StepRules, *, take: Callable[[int], list[MicroBatch]], lacks_bytes: int
    ) -> dict[str, str] | None:
        """The same without the other ranks; a hash of each parameter that was written, by name.

        None where that was not done.
        """
        # INVARIANT unanswered-is-asked-again: a first step that a fault interrupts is rehearsed again, until ranks have compared.
        # Broken if: a rank is lost in the rehearsal or in the step, and state in a global that changes the step goes unreported.
        # Guarded by: test_a_first_step_that_is_interrupted_is_rehearsed_again.
        state = self._state
        state.is_rehearsed, self._is_first = False, True
        settings, device = self._parts.settings.run, self._parts.workload.device
        varies = why_a_device_varies(
            device,
            is_deterministic=settings.deterministic,
            devices=len(self._parts.workload.devices),
        )
        if varies and self._group.rank == 0:
            report_inexact(self._parts, varies)
        if lacks_bytes:
            self._runtime.logger.info(
                "the first step is not computed twice to see whether it can be repeated: that takes"
                f" {byte_size(lacks_bytes)} more memory"
            )
            return None
        known, came = _known_in(state), []
        held_side, held = state.side.hold(), state.buffers.hold_all()
        try:
            self._rehearsed = own_share(
                state,
                self._runtime.training_loss(self._parts.workload.loss),
                take(state.committed_step),
                rules=rules,
                slot=self._runtime.slot,
                step=state.committed_step,
            )
        except SparseGradientError as error:
            self._refuse(str(error))
        finally:
            came = [name for name in state.weights() if name not in known]
            hashes = state_hashes(dict(state.named_parameters()))
            changed = [f"model.{name}" for name in state.buffers.follow_changed_since(held)]
            state.buffers.drop()
            state.buffers.keep()
            self._changed = changed + state.side.follow_changed_since(held_side)
            state.local.put_back()
            state.train_unfrozen()
        if state.side.opaque and self._group.rank == 0:
            self._runtime.logger.warning(
                f"{named(state.side.opaque)}, which steps use, is kept nowhere: after a repair or a resume the run"
                " is not known to be exact; keep its position as a number instead, and rebuild it from that"
            )
        if came:
            self._refuse(
                f"{came[0]} came into the model with its first forward, when optimizer, DDP and checkpoints"
                " know what there is: make it in build_model()"
            )
        return {name: one for name, one in hashes.items() if f"model.{name}" in changed}

    def _refuse(self, what: str) -> NoReturn:
        raise BadInputError("--task", self._parts.settings.run.task, what)

    def watched(self, stepper: Stepper) -> AbstractContextManager[None]:
        """Return a context for making a step, in which the results of the rehearsed one are recorded."""
        return NOTHING if self._rehearsed is None else self._noted(stepper)

    @contextlib.contextmanager
    def _noted(self, stepper: Stepper) -> Iterator[None]:
        with stepper.noted() as notes:
            yield
            if self._repeated is None:
                self._repeated = notes.share()

    def compare(self, step: int) -> None:
        """Report after a step whether the rehearsed one was repeated."""
        if self._is_first:
            self._compare_shares(step)
            self._state.is_rehearsed = True
            self._is_first, self._rehearsed = False, None

    def _compare_shares(self, step: int) -> None:
        where = NOT_DONE
        if self._rehearsed is not None and self._repeated is not None:
            names = [name for name, _ in self._state.named_parameters()]
            where = first_difference(self._rehearsed, self._repeated, names=names)
        answers = self._exchange(f"repeated/{step}", where)
        if self._group.rank != 0:
            return
        if not any(answers):
            report_repeated(self._parts, step - 1)
        elif finding := not_repeated(answers, unseen=self._state.side.opaque):
            seen = (
                f"; a step also changes {named(self._changed)}, which is put back"
                if self._changed
                else ""
            )
            report_inexact(self._parts, finding + seen)

    def _exchange(self, name: str, value: str) -> list[str]:
        with waiting_for_peers(self._runtime.slot):
            return self._group.exchange(name, value)


def report_repeated(parts: RankParts, step: int) -> None:
    """Report that every rank has computed ``step`` twice, with the same bits."""
    rank = parts.runtime.rank_info.rank
    parts.runtime.report(Proved(rank=rank, step=step, what="repeated"))


def not_repeated(answers: Sequence[str], *, unseen: Sequence[str] = ()) -> str:
    """Return why a step cannot be repeated, from each rank's first difference; an empty text if no rank has one.

    ``unseen``: names of what steps use and cannot be looked into, such as an iterator.
    """
    differing = {rank: what for rank, what in enumerate(answers) if what not in ("", NOT_DONE)}
    if not differing:
        return ""
    ranks = sorted(differing)
    first = differing[ranks[0]]
    differ = "differ" if first == SAMPLES else "differs"
    suspects = "a kernel that is not deterministic, or a state that cannot be seen: in a global, a closure, a file"
    if unseen:
        suspects = f"steps use {named(unseen)}, which is kept nowhere"
    return (
        f"the first step cannot be repeated: computed twice from the same state, {first} {differ}"
        f" on {rank_list(ranks)} ({suspects})"
    )


def _known_in(state: TrainState) -> set[str]:
    """Return the names in the model's state dict, and those of buffers that are None until a forward sets them."""
    found = set(state.weights())
    for path, module in state.model.named_modules():
        prefix = f"{path}." if path else ""
        found |= {bare_name(state.model, prefix + key) for key in module._buffers.keys()}  # noqa: SLF001, SIM118
    return found


def why_a_device_varies(device: torch.device, *, is_deterministic: bool, devices: int = 1) -> str:
    """Why steps computed twice on ``device``, one of so many of a rank, may differ in their last bits; or ""."""
    if device.type == "cpu":
        return ""
    if is_deterministic and devices > 1:
        return (
            f"{devices} GPUs of one rank finish their backward in another order each time, in which the"
            " gradients of a weight that is used in two places are added"
        )
    if is_deterministic:
        return ""
    return (
        "kernels of a GPU add in another order each time (attention, scatters, NCCL's choice of an"
        " algorithm); run.deterministic=true has them repeat"
    )


class SideComparison:
    """Compares state outside the model that steps change on a generation's ranks, and a replacement may lack."""

    def __init__(self, parts: RankParts, *, is_first: bool) -> None:
        """``is_first``: this rank says what all of them find."""
        self._parts = parts
        self._side = parts.state.side
        self._is_first = is_first

    @property
    def has_news(self) -> bool:
        """True if a step has changed something that no comparison has covered."""
        return self._side.has_news

    def report_lost(self) -> None:
        """Say what of a step that is done again, or of a rank that is replaced, could not be kept."""
        parts, side = self._parts, self._side
        report_lost_local(parts)
        if lost := parts.state.take_lost():
            report_lost_names(parts, lost)
        if side.took_over:
            report_inexact(parts, not_its_own(side.took_over, _what_came(parts)))
        if side.doubtful:
            be = "is" if len(side.doubtful) == 1 else "are"
            unseen = f"which {be} kept nowhere, may have been used before {_what_came(parts)}"
            report_inexact(parts, f"{named(side.doubtful)}, {unseen}")
        side.took_over, side.doubtful = [], []

    def mine(self) -> dict[str, Any]:
        """Return the facts about this rank that the other ranks need."""
        self._side.look_again(whole=True)
        return {"digests": self._side.digests(), "was_received": self._side.was_received}

    def compare(self, answers: Sequence[Mapping[str, Any]]) -> None:
        """Remember what two ranks have differently, by all ranks' :meth:`mine`; say what is new of it."""
        side = self._side
        all_digests = [answer["digests"] for answer in answers]
        names = {name for digests in all_digests for name in digests}
        known = {n: [digests[n] for digests in all_digests if n in digests] for n in names}
        differing = {name for name, found in known.items() if len(set(found)) > 1}
        new = sorted(differing - side.differing)
        side.differing |= differing
        # INVARIANT alike-when-received: ranks that have just received one state are alike, whatever a lost rank had.
        # Broken if: such a comparison counts, and a difference that the next step shows is no reason.
        # Guarded by: test_state_of_each_rank_is_lost_before_any_save.
        if not side.is_as_received:
            side.has_news = side.was_received = False
        # What one rank alone has seen change says nothing yet: all follow it, and compare once more.
        side.follow(name for name, found in known.items() if len(found) < len(all_digests))
        if not new or not self._is_first:
            return
        self._parts.runtime.logger.info(
            f"each rank has its own {named(new)}, which steps change: a rank that is"
            " replaced continues with another rank's",
            step=self._parts.state.committed_step,
        )
        if any(answer["was_received"] for answer in answers):
            report_inexact(self._parts, not_its_own(new, _what_came(self._parts)))


def report_lost_local(parts: RankParts) -> None:
    """Report per-rank state that could not be restored."""
    for line in parts.state.local.take_lost():
        report_inexact(parts, line)


def report_large_local(parts: RankParts) -> None:
    """Log the cost of keeping per-rank state once, if it is high."""
    if line := parts.state.local.cost_line():
        parts.runtime.logger.info(line, step=parts.state.committed_step)


def note_carried(
    state: TrainState, names: Sequence[str], *, cure: str, when: str, of_data: bool = False
) -> str:
    """Take note that ``names`` change from step to step and are not kept; return a warning of those that are new."""
    found = [one for one in names if one not in state.carried]
    state.note_carried(found, of_data=of_data)
    if not found:
        return ""
    shown, change, be = found[0], "changes", "is"
    if len(found) > 1:
        shown, change, be = f"{', '.join(found[:-1])} and {found[-1]}", "change", "are"
    return (
        f"{shown} {change} {when} and {be} not kept: {cure}."
        " A run that is repaired or resumed is not exact otherwise"
    )


def note_counted(parts: RankParts, names: Sequence[str]) -> None:
    """Take note of numbers that loads count up in the dataset, in this process or in its workers."""
    if names:
        parts.state.note_carried([f"data.{name}" for name in names], of_data=True)
        report_lost_carried(parts)


def report_lost_carried(parts: RankParts, *, went_back: bool = False) -> None:
    """Report what is carried from step to step and is lost by now: all of it if this process ``went_back``."""
    parts.state.began_again |= went_back
    if lost := parts.state.take_carried():
        report_lost_names(parts, lost)


def report_lost_names(parts: RankParts, lost: list[str]) -> None:
    """Say that these are not what they would be without a repair, or a resume."""
    came = _what_came(parts)
    report_inexact(parts, f"{named(lost)}, which steps change, could not be kept over {came}")


def not_its_own(names: Sequence[str], came: str) -> str:
    """Return why a run is not exact in which a rank has received state that each rank has its own of."""
    return f"each rank had its own {named(names)}: since {came} a rank has another rank's"


def _what_came(parts: RankParts) -> str:
    """Why the state is another process's: the first generation of a launch has it from a file, and no repair before."""
    number = parts.runtime.slot.get(Cell.GENERATION)
    return "a resume" if is_first_generation(number, parts.settings.stage) else "a repair"


def report_inexact(parts: RankParts, reason: str) -> None:
    """Why the run is not exact from here on."""
    step = parts.state.committed_step
    parts.runtime.logger.warning(reason, step=step)
    parts.runtime.report(
        TuningChanged(
            rank=parts.runtime.rank_info.rank,
            step=step,
            action="",
            inexact_reason=reason,
            fault_free=True,
        )
    )


def named(names: Sequence[str]) -> str:
    """A few of them."""
    more = f" and {len(names) - NAMES_SHOWN} more" if len(names) > NAMES_SHOWN else ""
    return ", ".join(names[:NAMES_SHOWN]) + more
