"""Runs a user's program in the drill's process as a replaced rank does, and compares the share that its loop computes.

The process ends with the first backward of the loop, or with the block of that step, without unwinding: no ``finally`` of
the program, no exit function and no save runs there.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NoReturn, Protocol

from ddp_runner.core.settings import Settings
from ddp_runner.features.proof.comparison import handed_local, handed_sums, with_state
from ddp_runner.features.proof.loop_notes import (
    BESIDE,
    CARRIED,
    PROGRAM,
    RECEIVED,
    explanation,
    from_record,
)
from ddp_runner.features.proof.rules import AFTER, SHARE_FILE
from ddp_runner.kernel.step.runtime import RankInfo
from ddp_runner.kernel.system.run_files import read_small
from ddp_runner.kernel.wire.fork_specs import Program
from ddp_runner.observe.logger import DDPLogger
from ddp_runner.rank import attach
from ddp_runner.rank.main_program import run_attached
from ddp_runner.training.exactness.own_share import OwnShare, first_difference
from ddp_runner.training.exactness.own_update import first_unlike, hashes_after
from ddp_runner.training.local_runtime import Aside
from ddp_runner.training.own_loop.declared import OwnLoop
from ddp_runner.training.own_loop.drilled_run import ShareWanted
from ddp_runner.training.own_loop.parts import LoopParts


class End(Protocol):
    """Reports the result of the drill, and ends this process."""

    def __call__(self, *, differs: str = "", updated: bool = False, problem: str = "") -> NoReturn:
        """``differs``: the first difference, in the update if ``updated``; ``problem``: why there is no result."""
        ...


def compare_loop(
    program: Program,
    settings: Settings,
    rank_info: RankInfo,
    *,
    folder: Path,
    logger: DDPLogger,
    end: End,
) -> None:
    """Run the program up to the share or the update of ``rank_info`` in the step in ``folder``; end the process there.

    If the program fails or ends before that, raises the program's own error, or RuntimeError.
    """
    noted: dict[str, Any] = json.loads(read_small(folder / SHARE_FILE))
    settings = with_state(settings, folder)
    found = _Comparison(noted, end)
    wanted = ShareWanted(
        rank=int(noted["rank"]),
        world_size=int(noted["world_size"]),
        local=handed_local(noted, folder),
        sums=handed_sums(noted, folder),
        begins=found.begins,
        checks=found.checks,
        ends=found.ends,
        updated=found.updated,
        fails=found.fails,
    )
    attach.be_drilled(settings, Aside(rank_info, logger), wanted)
    errors: list[BaseException] = []
    ended = ""
    try:
        run_attached(program, on_error=errors.append)
    except SystemExit as error:
        ended = f", by SystemExit({error.code})"
    if found.is_alike:
        end()  # an error of the program after its share does not count
    raise errors[0] if errors else RuntimeError(f"the program ended before its step{ended}")


class _Comparison:
    """Compares what the program computes with the notes of the rank, and ends the process with what it finds."""

    def __init__(self, noted: Mapping[str, Any], end: End) -> None:
        self._noted = noted
        self._end = end
        # Digests of the state outside the model, as the step begins.
        self._beside: dict[str, str] = {}
        self.is_alike = False  # the share is the same

    def begins(self, parts: LoopParts, loop: OwnLoop) -> None:
        if changed := changed_file(self._noted[PROGRAM], loop.program):
            self._end(problem=f"{changed} has changed on disk since the run began")
        loop.handed = from_record(self._noted[RECEIVED], parts.workload.device)
        # Its samples are those of before: what was found bad in that very step is known by now.
        parts.state.quarantine.merge(self._noted["quarantine"])
        self._beside = parts.state.side.digests()

    def checks(self, parts: LoopParts, share: OwnShare) -> None:
        names = [name for name, _ in parts.state.named_parameters()]
        noted = OwnShare.from_record(self._noted["share"])
        differs = first_difference(noted, share, names=names)
        self.is_alike = not differs
        if differs:
            _end_workers(parts)
            if why := self._explanation():
                self._end(problem=why)
            self._end(differs=differs)

    def ends(self, parts: LoopParts) -> NoReturn:
        _end_workers(parts)
        self._end()

    def updated(self, parts: LoopParts) -> NoReturn:
        differs = first_unlike(self._noted[AFTER], hashes_after(parts.state))
        _end_workers(parts)
        if differs and self._explanation():
            self._end()  # the run has named the cause already
        self._end(differs=differs, updated=True)

    def fails(self, problem: str) -> NoReturn:
        self._end(problem=problem)

    def _explanation(self) -> str:
        return explanation(self._noted[CARRIED], self._noted[BESIDE], self._beside)


def _end_workers(parts: LoopParts) -> None:
    """End the workers of the loop's loader: no exit function runs here."""
    with contextlib.suppress(Exception):  # a loader of the program may raise anything
        parts.loader.close()


def changed_file(before: Mapping[str, str], now: Mapping[str, str]) -> str:
    """Return a file of the program that has changed since the drilled rank read it; an empty text if none has."""
    return next((name for name in before if now.get(name, before[name]) != before[name]), "")
