"""Runs a user's program in the drill's process as a replaced rank does, and compares the share that its loop computes.

The process ends with the first backward of the loop, without unwinding: no ``finally`` of the program, no exit function
and no save runs there.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NoReturn, Protocol

from ddp_runner.core.settings import Settings
from ddp_runner.features.proof.comparison import handed_local, with_state
from ddp_runner.features.proof.loop_notes import BESIDE, CARRIED, PROGRAM, explanation
from ddp_runner.features.proof.rules import SHARE_FILE
from ddp_runner.kernel.step.runtime import RankInfo
from ddp_runner.kernel.system.run_files import read_small
from ddp_runner.kernel.wire.fork_specs import Program
from ddp_runner.observe.logger import DDPLogger
from ddp_runner.rank import attach
from ddp_runner.rank.main_program import run_as_main
from ddp_runner.training.exactness.own_share import OwnShare, first_difference
from ddp_runner.training.local_runtime import Aside
from ddp_runner.training.own_loop.declared import OwnLoop
from ddp_runner.training.own_loop.drilled_run import ShareWanted
from ddp_runner.training.own_loop.parts import LoopParts


class End(Protocol):
    """Reports the result of the drill, and ends this process."""

    def __call__(self, *, differs: str = "", problem: str = "") -> NoReturn:
        """``differs``: the first difference of the two computations; ``problem``: why there is no result."""
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
    """Run the program up to the share of ``rank_info`` in the step in ``folder``, which ends the process.

    If the program fails or ends before that, raises the program's own error, or RuntimeError.
    """
    noted: dict[str, Any] = json.loads(read_small(folder / SHARE_FILE))
    settings = with_state(settings, folder)

    beside: dict[str, str] = {}

    def begins(parts: LoopParts, loop: OwnLoop) -> None:
        if changed := changed_file(noted[PROGRAM], loop.program):
            end(problem=f"{changed} has changed on disk since the run began")
        # Its samples are those of before: what was found bad in that very step is known by now.
        parts.state.quarantine.merge(noted["quarantine"])
        beside.update(parts.state.side.digests())

    def ends(parts: LoopParts, share: OwnShare) -> NoReturn:
        names = [name for name, _ in parts.state.named_parameters()]
        differs = first_difference(OwnShare.from_record(noted["share"]), share, names=names)
        _end_workers(parts)
        if differs and (why := explanation(noted[CARRIED], noted[BESIDE], beside)):
            end(problem=why)
        end(differs=differs)

    def fails(problem: str) -> NoReturn:
        end(problem=problem)

    wanted = ShareWanted(
        rank=int(noted["rank"]),
        world_size=int(noted["world_size"]),
        local=handed_local(noted, folder),
        begins=begins,
        ends=ends,
        fails=fails,
    )
    attach.be_drilled(settings, Aside(rank_info, logger), wanted)
    errors: list[BaseException] = []
    try:
        run_as_main(
            program.path,
            program.module,
            list(program.arguments),
            source=Path(program.source).read_bytes() if program.source else None,
            on_error=errors.append,
        )
    except SystemExit as error:
        raise RuntimeError(
            f"the program ended before its step, by SystemExit({error.code})"
        ) from error
    raise errors[0] if errors else RuntimeError("the program ended before its step")


def _end_workers(parts: LoopParts) -> None:
    """End the workers of the loop's loader: no exit function runs here."""
    with contextlib.suppress(Exception):  # a loader of the program may raise anything
        parts.loader.close()


def changed_file(before: Mapping[str, str], now: Mapping[str, str]) -> str:
    """Return a file of the program that has changed since the drilled rank read it; an empty text if none has."""
    return next((name for name in before if now.get(name, before[name]) != before[name]), "")
