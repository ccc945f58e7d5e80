"""Carries out injected faults inside a rank, at the very phase of the step that they name."""

from __future__ import annotations

import ctypes
import os
import signal
import time
from collections.abc import Callable
from dataclasses import replace

from ddp_runner.core.board import Cell, Slot
from ddp_runner.core.injection import COMMIT, Injection, InjectKind
from ddp_runner.core.phases import Phase

FOREVER_S = 1e6


class InjectedError(RuntimeError):
    """What ``raise`` raises."""


class InjectingSlot(Slot):
    """A board slot that looks, at each stamp, whether a fault is due. Used only with ``--inject``."""

    __slots__ = ("_announce", "_left", "_loader_pids", "_pending")

    def __init__(
        self,
        slot: Slot,
        injections: dict[int, Injection],
        *,
        announce: Callable[[int, InjectKind], None],
        loader_pids: Callable[[], tuple[int, ...]],
    ) -> None:
        super().__init__(slot._ints, slot._floats, 0)  # noqa: SLF001 - another view of the same cells
        self._base = slot._base  # noqa: SLF001
        self._left = injections
        self._announce = announce
        self._loader_pids = loader_pids
        self._pending: list[InjectKind] = []

    def strike_soon(self, kind: InjectKind) -> None:
        """Have ``kind`` happen at the next stamp. Called from the control thread."""
        self._pending.append(kind)

    def stamp(self, phase: Phase, now_ns: int) -> None:
        """Stamp, then do what is due."""
        super().stamp(phase, now_ns)
        self._look(phase.label)

    def set(self, cell: Cell, value: int) -> None:
        """Store; the moment at which the board turns dirty is the place called ``commit``."""
        super().set(cell, value)
        if cell is Cell.DIRTY and value:
            self._look(COMMIT)

    def _look(self, place: str) -> None:
        step = self.get(Cell.STEP)
        for number, injection in list(self._left.items()):
            if injection.phase == place and step >= injection.step:
                self._count_down(number, injection)
                self._announce(number, injection.kind)
                self._strike(injection.kind, injection.seconds)
        while self._pending and place not in (Phase.STARTUP.label, Phase.FORMING.label):
            self._strike(self._pending.pop(), 1.0)

    def _count_down(self, number: int, injection: Injection) -> None:
        if injection.times > 1:
            self._left[number] = replace(injection, times=injection.times - 1)
        else:
            del self._left[number]

    def _strike(self, kind: InjectKind, seconds: float) -> None:  # noqa: C901 - a row a kind
        match kind:
            case InjectKind.KILL:
                os.kill(os.getpid(), signal.SIGKILL)
            case InjectKind.STOP:
                os.kill(os.getpid(), signal.SIGSTOP)
            case InjectKind.EXIT:
                os._exit(0)
            case InjectKind.RAISE:
                raise InjectedError("an injected exception")
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
