"""A supervised rank whose loop is the trainer's: reads its settings, and hands the process over to it."""

from __future__ import annotations

import contextlib
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch.autograd.profiler import record_function

from ddp_runner import config, installed
from ddp_runner.core.settings import Settings
from ddp_runner.kernel.rank import process
from ddp_runner.kernel.rank.runtime import SupervisedRuntime
from ddp_runner.kernel.rank.zygote import Ahead
from ddp_runner.kernel.rules.helper_roles import FORKED
from ddp_runner.kernel.wire import events
from ddp_runner.kernel.wire.fork_specs import RankSpec
from ddp_runner.kernel.wire.messages import Fork
from ddp_runner.observe.logger import DDPLogger, install_root_handler
from ddp_runner.system.launch_folder import at_launch, begin_here
from ddp_runner.training.loading.loaders import collective_timeout_s
from ddp_runner.training.starting.built_ahead import BuiltAhead
from ddp_runner.training.starting.fork_safety import make_forks_safe
from ddp_runner.training.starting.task_import import import_task_module
from ddp_runner.training.trainer import DDPTrainer
from ddp_runner.values.word_sums import odd_numbers

# What a rank needs before its first step. torch._dynamo costs a second, and the first optimizer of
# a process imports it; gloo's backend is looked up on first use.
IMPORTED_AHEAD = (
    "torch",
    "torch._dynamo",
    "torch.distributed",
    "torch.nn.parallel.distributed",
    "torch.utils.data",
    *(role.module for role in FORKED),
)


def ahead(task: str) -> Ahead:
    """Return what is imported before ranks that train ``task``, as in ``--task``; empty: each imports its own.

    A user's task that cannot be imported is left to the ranks, which report it properly.
    """
    is_built_in = task in ("bytes", "synthetic")
    return Ahead(
        ours=(*IMPORTED_AHEAD, *(("ddp_runner.tasks.transformer",) if is_built_in else ())),
        settle=_settle,
        theirs=() if is_built_in or not task else (task,),
        take=_import_task,
        says="the task is imported by each rank, not ahead of them: after importing it {left}",
    )


def _settle() -> None:
    begin_here()
    installed.parts("child")
    make_forks_safe()
    compute_once()


def compute_once() -> None:
    """Do what each rank would do once before its first step.

    The factors of its hashes take it 7 ms and 2 MB. DDP's first forward enters a region of torch's profiler, for which
    torch 2.13 imports for 4 ms.
    """
    odd_numbers()
    with record_function("ahead"):
        pass


def _import_task(task: str) -> None:
    with contextlib.suppress(Exception):  # the ranks import it again, and report it
        import_task_module(task)


def main(
    request: Fork,
    descriptors: list[int],
    built: BuiltAhead | None = None,
    settings: Settings | None = None,
) -> int:
    """Run one rank; returns its exit status. ``descriptors``: control channel, board, output.

    ``built``, ``settings``: what this process has built before it was a rank, and those of its request.
    """
    settings, runtime = begin(request, descriptors, settings)

    def train() -> None:
        DDPTrainer(
            rank=runtime.rank_info.rank,
            world_size=runtime.rank_info.world_size,
            config=settings,
            runtime=runtime,
            built=built,
        ).train()

    return process.run_to_end(runtime, train)


def begin(
    request: Fork, descriptors: list[int], settings: Settings | None = None
) -> tuple[Settings, SupervisedRuntime]:
    """Become the rank that ``request`` says; with what it resumes. The arguments are those of :func:`main`."""
    *link, output_descriptor = descriptors
    spec = request.spec
    assert isinstance(spec, RankSpec)
    settings = settings or config.from_record(spec.settings)
    log = at_launch(settings.run.log_dir) / f"rank_{request.rank}.log"
    output = process.become(request, output_descriptor, log=log)
    logger = DDPLogger(rank=request.rank, debug=settings.run.debug, seal=spec.log_seal)
    install_root_handler(logger)
    runtime = process.linked(
        request,
        link,
        logger=logger,
        output=output,
        folder=at_launch(settings.run.checkpoint_dir),
        timeout_s=collective_timeout_s(settings, is_watched=True),
        surround=lambda runtime: _surround(runtime, settings, spec),
    )
    _report_outages(logger, runtime, log)
    return config_with_resume(settings, spec.resume), runtime


def _report_outages(logger: DDPLogger, runtime: SupervisedRuntime, log: Path) -> None:
    """Have the supervisor say that lines of this rank are lost, which its log cannot say."""
    pid, rank = os.getpid(), runtime.rank_info.rank

    def warn(text: str) -> None:
        if os.getpid() == pid:  # a loader worker has the logger, but no channel
            runtime.report(events.LogOutage(rank=rank, text=text))

    logger.report_outages(log, warn)


def _surround(runtime: SupervisedRuntime, settings: Settings, spec: RankSpec) -> None:
    """Let features change what the rank is surrounded by: ``surround_rank()`` of a ``child.py``."""
    for part in installed.parts("child"):
        if hasattr(part, "surround_rank"):
            part.surround_rank(runtime, settings, spec)


def config_with_resume(settings: Any, resume: str) -> Any:
    """The settings with what this process is to resume from."""
    if settings.run.resume == resume:  # as nearly always: each new object is checked again
        return settings
    return replace(settings, run=replace(settings.run, resume=resume))
