"""Carries out injected faults inside a rank, at the very phase of the step that they name."""

from __future__ import annotations

import ctypes
import os
import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ddp_runner.core.injection import BIT, KINDS_IN_LOSS, Injection, InjectKind, parse_injection
from ddp_runner.core.settings import Settings
from ddp_runner.data.by_number import sample_at
from ddp_runner.data.order import SampleOrder
from ddp_runner.features.faults.faulty_disk import FaultyDisk, shared_trouble
from ddp_runner.kernel.rank.runtime import SupervisedRuntime
from ddp_runner.kernel.replica.loss import Loss, Weighted
from ddp_runner.kernel.rules.phases import Moment, Phase
from ddp_runner.kernel.wire.board import Cell, Slot
from ddp_runner.kernel.wire.events import Injected
from ddp_runner.kernel.wire.fork_specs import RankSpec, SaverSpec
from ddp_runner.kernel.wire.messages import Inject
from ddp_runner.system.launch_folder import at_launch

FOREVER_S = 1e6
SPIKE_FACTOR = 1e4
HIDDEN_FACTOR = 1.25  # of a loss that depends on hidden state
UNHEARD_OF_BYTES = 1 << 62  # more than any address space: the system refuses it at once


def surround_rank(runtime: SupervisedRuntime, settings: Settings, spec: RankSpec) -> None:
    """Have a rank of a run with ``--inject`` carry out what is still to come; nothing in any other run."""
    if not settings.run.inject:
        return
    rank, slot = runtime.rank_info.rank, runtime.slot
    disk = FaultyDisk(
        runtime.may_not_publish,
        trouble=shared_trouble(spec.saver_trouble) if rank == 0 else None,
        folder=at_launch(settings.run.checkpoint_dir),
    )

    def announce(number: int, kind: InjectKind) -> None:
        step, phase = slot.get(Cell.STEP), slot.read().phase.label
        runtime.report(Injected(rank=rank, number=number, kind=kind.value, step=step, phase=phase))

    injecting = InjectingSlot(
        slot,
        _still_to_come(settings, spec),
        announce=announce,
        loader_pids=lambda: runtime.loader_pids,
        disk=disk,
    )

    def inject(message: Inject) -> None:
        injecting.inject_soon(InjectKind(message.kind), number=message.number)

    runtime.disk, runtime.slot, runtime.change_loss = disk, injecting, injecting.ruinous
    runtime.answer[Inject] = inject


def disk_of_saver(spec: SaverSpec) -> FaultyDisk | None:
    """Return the disk of the process that writes for a rank with injected faults; None where nothing is shared."""
    trouble = shared_trouble(spec.saver_trouble)
    return None if trouble is None else FaultyDisk(trouble=trouble, folder=Path(spec.folder))


def _still_to_come(settings: Settings, spec: RankSpec) -> dict[int, Injection]:
    """Return the injections of ``--inject`` that this rank has left, but for those that the data holds."""
    return {
        number: replace(injection, times=left)
        for number, left in spec.injections_left.items()
        if isinstance(
            injection := parse_injection(settings.run.inject[number], world_size=spec.world_size),
            Injection,
        )
        and injection.kind is not InjectKind.BAD_SAMPLE  # training/loading/loaders.py
    }


class InjectedError(RuntimeError):
    """The exception that the injection ``raise`` raises."""


class InjectingSlot(Slot):
    """A board slot that looks, at each stamp, whether a fault is due. Used only with ``--inject``."""

    __slots__ = (
        *("_announce", "_bit", "_disk", "_hides", "_left", "_loader_pids", "_pending", "_ruined"),
    )

    def __init__(
        self,
        slot: Slot,
        injections: dict[int, Injection],
        *,
        announce: Callable[[int, InjectKind], None],
        loader_pids: Callable[[], tuple[int, ...]],
        disk: FaultyDisk,
    ) -> None:
        super().__init__(slot._ints, slot._floats, 0)  # noqa: SLF001 - another view of the same cells
        self._base = slot._base  # noqa: SLF001
        self._left = injections
        self._announce = announce
        self._loader_pids = loader_pids
        self._disk = disk
        self._pending: list[tuple[InjectKind, int]] = []
        self._ruined: set[InjectKind] = set()  # what happens to the step in progress
        self._bit = BIT  # which flips in it
        self._hides = False  # the loss depends on this process, and a replacement lacks that state

    def inject_soon(self, kind: InjectKind, *, number: int) -> None:
        """Have ``kind`` happen at the next stamp, as injection ``number``. For the control thread."""
        self._pending.append((kind, number))

    def stamp(self, phase: Phase, now_ns: int) -> None:
        """Stamp, then perform the injections that are due."""
        super().stamp(phase, now_ns)
        self._look(phase.label)

    def reach(self, moment: Moment) -> None:
        """Perform the injections that are due at ``moment``."""
        self._look(moment.value)

    def set(self, cell: Cell, value: int) -> None:
        """Store; the board turns dirty at :attr:`Moment.COMMIT`."""
        super().set(cell, value)
        # A new generation stores it too, before the step is done again.
        if cell is Cell.COMMITTED_STEP and value > self.get(Cell.STEP):
            self._ruined.clear()
        if cell is Cell.DIRTY and value:
            self.reach(Moment.COMMIT)

    def ruinous(self, loss: Loss) -> Loss:
        """Return ``loss`` with the injected damage; a repeated step is damaged again."""

        def ruined_loss(model: nn.Module, batch: Any) -> Any:
            if InjectKind.DIVERGE in self._ruined:
                self._ruined.discard(InjectKind.DIVERGE)
                flip_a_bit(model)
            if InjectKind.WRONG_GRADIENT in self._ruined:
                flip_in_next_gradient(model, self._bit)
            value = (
                _without_last_module(loss, model, batch)
                if InjectKind.UNUSED in self._ruined
                else loss(model, batch)
            )
            if InjectKind.NAN in self._ruined:
                value = _times(value, float("nan"))
            if self._hides and model.training:
                value = _times(value, HIDDEN_FACTOR)
            return _times(value, SPIKE_FACTOR) if InjectKind.SPIKE in self._ruined else value

        return ruined_loss

    def _look(self, place: str) -> None:
        step = self.get(Cell.STEP)
        for number, injection in list(self._left.items()):
            # A step has several micro-batches and may be redone: it is ruined once for all of them.
            if injection.kind in self._ruined:
                continue
            due = injection.phase == place and injection.is_at(step)
            if due and self._can_inject(injection.kind, place):
                self._bit = injection.bit
                self._count_down(number, injection)
                self._announce(number, injection.kind)
                self._inject(injection.kind, injection.seconds)
        waits = place in (Phase.STARTUP.label, Phase.FORMING.label)
        for pending in () if waits else tuple(self._pending):
            kind, number = pending
            if self._can_inject(kind, place):
                self._pending.remove(pending)
                # Numbered: two injections at one step are two errors, not one that repeats itself.
                self._inject(kind, 1.0, said=f"an injected exception, number {number}")

    def _can_inject(self, kind: InjectKind, place: str) -> bool:
        if kind is InjectKind.CORRUPT_CHECKPOINT and not self._disk.has_checkpoint:
            return False
        if kind in (InjectKind.LOADER_KILL, InjectKind.LOADER_STOP) and not self._loader_pids():
            return False  # the rank loads by itself: it is said at the end that it was never caused
        if kind in KINDS_IN_LOSS:
            return place == Phase.FORWARD.label
        return True

    def _count_down(self, number: int, injection: Injection) -> None:
        if injection.times > 1:
            self._left[number] = replace(injection, times=injection.times - 1)
        else:
            del self._left[number]

    def _inject(  # noqa: C901, PLR0912 - a row a kind
        self, kind: InjectKind, seconds: float, said: str = "an injected exception"
    ) -> None:
        match kind:
            case InjectKind.KILL:
                os.kill(os.getpid(), signal.SIGKILL)
            case InjectKind.STOP:
                os.kill(os.getpid(), signal.SIGSTOP)
            case InjectKind.EXIT:
                os._exit(0)
            case InjectKind.RAISE:
                raise InjectedError(said)
            case InjectKind.HANG:
                time.sleep(FOREVER_S)
            case InjectKind.SPIN:
                while True:
                    pass
            case InjectKind.GIL:
                ctypes.PyDLL(None).pause()  # a PyDLL call keeps the GIL
            case InjectKind.SLOW:
                time.sleep(seconds)
            case InjectKind.LOADER_KILL | InjectKind.LOADER_STOP:
                number = signal.SIGKILL if kind is InjectKind.LOADER_KILL else signal.SIGSTOP
                for pid in self._loader_pids()[:1]:
                    os.kill(pid, number)
            case InjectKind.OOM:
                torch.empty(UNHEARD_OF_BYTES, dtype=torch.uint8)
            case InjectKind.DISK_FULL:
                self._disk.fill(seconds=seconds)
            case InjectKind.DISK_ERROR:
                self._disk.fail_next_sync()
            case InjectKind.SLOW_DISK:
                self._disk.slow_down(seconds=seconds)
            case InjectKind.CORRUPT_CHECKPOINT:
                self._disk.damage_newest()
            case InjectKind.HIDDEN_STATE:
                self._hides = True
            case (
                InjectKind.UNUSED
                | InjectKind.NAN
                | InjectKind.SPIKE
                | InjectKind.DIVERGE
                | InjectKind.WRONG_GRADIENT
            ):
                self._ruined.add(kind)
            case InjectKind.BAD_SAMPLE:
                raise AssertionError("a bad sample is in the data, not in the rank")


def flip_a_bit(model: nn.Module) -> None:
    """Flip one bit in the fraction of the model's first weight, as bad memory would."""
    weight = next(model.parameters()).data
    itemsize = weight.element_size()
    # Little-endian: this bit belongs to the fraction of every floating-point type of 2 to 8 bytes.
    weight[(0,) * weight.dim()].unsqueeze(0).view(torch.uint8)[max(0, itemsize - 2)] ^= 1 << 3


def flip_in_next_gradient(model: nn.Module, bit: int) -> None:
    """Flip ``bit`` of the first number in the next gradient of the first weight, as a faulty device would.

    The bit flips while the gradient is computed, before it is noted or summed. ``bit`` wraps round at the width of
    the number.
    """
    weight = next(one for one in model.parameters() if one.requires_grad)

    def flipped(gradient: torch.Tensor) -> torch.Tensor:
        handle.remove()
        wrong = gradient.clone()
        place = bit % (8 * wrong.element_size())
        # Little-endian: the lowest byte comes first.
        wrong[(0,) * wrong.dim()].unsqueeze(0).view(torch.uint8)[place // 8] ^= 1 << place % 8
        return wrong

    handle = weight.register_hook(flipped)  # type: ignore[no-untyped-call]


def _without_last_module(loss: Loss, model: nn.Module, batch: Any) -> Any:
    """The loss, its graph leaving out the parameters of the last module that has some."""
    named = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    module = named[-1][0].rpartition(".")[0]
    left_out = [p for name, p in named if name.rpartition(".")[0] == module]
    for parameter in left_out:
        parameter.requires_grad = False
    try:
        return loss(model, batch)
    finally:
        for parameter in left_out:
            parameter.requires_grad = True


class InjectedSampleError(ValueError):
    """What such a sample raises."""


class WithBadSamples:
    """``dataset``, where the samples of ``find_bad`` raise whenever they are loaded, whoever loads them.

    They are found when the first sample is loaded: only then is the order of the run known.
    """

    def __init__(self, dataset: Any, find_bad: Callable[[], frozenset[int]]) -> None:
        self._dataset = dataset
        self._find_bad = find_bad
        self._found: frozenset[int] | None = None
        self.deterministic = bool(getattr(dataset, "deterministic", False))

    @property
    def _bad(self) -> frozenset[int]:
        if self._found is None:
            self._found = self._find_bad()
        return self._found

    def __len__(self) -> int:
        return len(self._dataset)

    def __getitem__(self, index: int) -> Any:
        if index in self._bad:
            raise InjectedSampleError(f"an injected bad sample, {index}")
        return sample_at(self._dataset, index)

    def __getitems__(self, indices: Sequence[int]) -> list[Any]:
        """The samples at ``indices``, as the dataset itself would give them."""
        if self._bad.isdisjoint(indices) and hasattr(self._dataset, "__getitems__"):
            return list(self._dataset.__getitems__(list(indices)))
        return [self[index] for index in indices]


def bad_samples(
    dataset: Any,
    places: Sequence[tuple[int, int]],
    *,
    order: Callable[[], SampleOrder],
    world_size: int,
) -> Any:
    """``dataset`` with a bad sample at each ``(rank, step)`` of ``places``: the rank's first there.

    ``order`` gives that of the run, once samples are loaded.
    """
    if not places:
        return dataset

    def find_bad() -> frozenset[int]:
        found = order()
        shares = [found.share_of(step, rank=rank, world_size=world_size) for rank, step in places]
        return frozenset(int(mine[0]) for mine in shares if len(mine))

    return WithBadSamples(dataset, find_bad)


def _times(value: Any, factor: float) -> Any:
    """Return the result of ``loss()`` with its loss multiplied by ``factor``."""
    if isinstance(value, tuple):
        return (_times(value[0], factor), *value[1:])
    if isinstance(value, Weighted):
        return Weighted(value.total * factor, value.weight)
    return value * factor
