"""``ddp_runner.attach()``: finds out which launcher started this process, and gives its loop a run."""

from __future__ import annotations

import multiprocessing
import os
import shlex
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any

import torch

from ddp_runner import config as configuration
from ddp_runner.config.run_names import name_of_task
from ddp_runner.core.plain_rank import PlainRank, launched_part, plain_rank
from ddp_runner.core.settings import Settings
from ddp_runner.kernel.rules.errors import BadInputError
from ddp_runner.kernel.rules.exits import ExitCode
from ddp_runner.kernel.step.runtime import Runtime
from ddp_runner.system import heartbeat
from ddp_runner.training.figures.train_report import TrainReport
from ddp_runner.training.local_runtime import local_runtime
from ddp_runner.training.own_loop.attached_run import AttachedRun
from ddp_runner.training.own_loop.batches import leave_deaths_to_loaders
from ddp_runner.training.own_loop.drilled_run import DrilledRun, ShareWanted
from ddp_runner.training.own_loop.misuse import misuse

_ALONE = PlainRank(rank=0, world_size=1, local_rank=0, local_world_size=1)


@dataclass(slots=True)
class _Process:
    """The role of this process, once it is known."""

    settings: Settings | None = None  # of the supervisor that has started it
    runtime: Runtime | None = None
    wanted: ShareWanted | None = None  # set in a drill's process
    run: AttachedRun | None = None


_this = _Process()


def be_supervised(settings: Settings, runtime: Runtime) -> None:
    """Give this supervisor's runtime to the program's later ``attach()``; call it before the program begins."""
    _this.settings, _this.runtime = settings, runtime


def be_drilled(settings: Settings, runtime: Runtime, wanted: ShareWanted) -> None:
    """Have a later ``attach()`` of the program compute one share of one step. Call this before the program begins."""
    be_supervised(settings, runtime)
    _this.wanted = wanted


def is_supervised() -> bool:
    """Return whether this process is a rank that ``ddp_runner run`` repairs in place, by :func:`attach`."""
    return _this.runtime is not None


def has_ended() -> bool:
    """Return whether the training of this process has ended properly."""
    return _this.run is not None and _this.run.has_ended


def left_early() -> str:
    """Why this program must not have ended yet; empty where it may."""
    run = _this.run
    if run is None or run.has_ended or not run.has_begun:
        return ""
    return f"{run.left_at or 'the program'}: the loop was left before its end; run.stop() ends it on all ranks"


def _answer_bad_input() -> None:
    """Have a BadInputError that ends this program be one line, with exit code 2."""
    before = sys.excepthook

    def answer(
        kind: type[BaseException], error: BaseException, trace: TracebackType | None
    ) -> None:
        if not isinstance(error, BadInputError):
            before(kind, error, trace)
            return
        sys.stderr.write(f"ddp_runner: error: {error}\n")
        raise SystemExit(ExitCode.BAD_USAGE)  # of a hook it is the program's exit code

    sys.excepthook = answer


def attach(config: Mapping[str, Any] | None = None) -> AttachedRun:
    """Give the loop of this program the repair in place; to be called once, before the model is made.

    Under ``ddp_runner run`` a rank that is lost is replaced while the others keep their process. Under
    torchrun all ranks start again from our checkpoints, and plain ``python`` is one rank. ``config``:
    settings by their names, for those two; ``run`` takes them on its command line. Python's, NumPy's and
    torch's random numbers are seeded. Raises BadInputError for settings that are wrong.
    """
    if getattr(multiprocessing.current_process(), "_inheriting", False):
        # Of a process that multiprocessing spawns, which imports the program first: a loader's worker, say.
        expected = (
            "a process that multiprocessing has spawned calls attach(): put what starts the run under"
            ' if __name__ == "__main__":'
        )
        sys.stderr.write(f"ddp_runner: error: {misuse(expected)}\n")
        raise SystemExit(ExitCode.BAD_USAGE)
    if _this.run is not None:
        raise misuse("attach() is called a second time: keep what the first call gave")
    if _this.runtime is not None and _this.settings is not None:
        settings, runtime = _this.settings, _this.runtime
        if _this.wanted is not None:
            arguments = shlex.join(sys.argv[1:])
            _this.run = DrilledRun(settings, runtime, arguments=arguments, wanted=_this.wanted)
            return _this.run
        if config:
            runtime.logger.info("run was given the settings: those of attach() are not used")
        _this.run = _attached(settings, runtime)
        return _this.run
    if heartbeat.are_counted():
        expected = (
            "run saw no attach() in the file that it was given: call ddp_runner.attach() there"
        )
        sys.stderr.write(f"ddp_runner: error: {misuse(expected)}\n")
        raise SystemExit(ExitCode.BAD_USAGE)
    _answer_bad_input()
    settings = _settings(config or {})
    as_rank = plain_rank(os.environ)
    facts = configuration.facts_of_rank(as_rank or _ALONE, os.environ)
    configuration.refuse_untrue(config or {}, facts)
    if as_rank is None:
        _this.run = _attached(settings, local_runtime(settings, 0, 1))
        return _this.run
    is_on_gpu = settings.run.device != "cpu" and torch.cuda.is_available()
    launched = launched_part(as_rank)
    settings, outside = launched.begin(
        settings, as_rank, is_on_gpu=is_on_gpu, cores=len(os.sched_getaffinity(0))
    )
    _this.run = _attached(settings, outside, on_end=partial(launched.conclude, settings, outside))
    return _this.run


def _attached(
    settings: Settings, runtime: Runtime, on_end: Callable[[TrainReport], object] = lambda _: None
) -> AttachedRun:
    leave_deaths_to_loaders()
    return AttachedRun(settings, runtime, arguments=shlex.join(sys.argv[1:]), on_end=on_end)


def _settings(config: Mapping[str, Any]) -> Settings:
    """Return the given settings, with the program's name as the run's. Raises BadInputError."""
    named = dict(config)
    if not {"name", "run.name"} & named.keys():
        named["name"] = name_of_task(Path(sys.argv[0] or "program").name)
    settings = configuration.from_flat(named)
    configuration.refuse_for_loops(settings)
    return settings
