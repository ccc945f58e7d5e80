"""``train``: trains as its words say, or tries out what would be trained. What can be wrong is found before."""

from __future__ import annotations

import gc
import os
from dataclasses import replace
from functools import partial
from importlib import import_module
from typing import TYPE_CHECKING

from ddp_runner.cli.command import TrainCommand
from ddp_runner.cli.hardware.machine import allow_files, core_count
from ddp_runner.cli.parser import INSTEAD, TrainArguments, parse_train
from ddp_runner.cli.several import OnEach, several_machines
from ddp_runner.config import (
    refuse_without_supervisor,
)
from ddp_runner.core.modes import refuse_of_processes
from ddp_runner.core.plain_rank import PlainRank, launched_part, plain_rank
from ddp_runner.kernel.rules.errors import BadInputError
from ddp_runner.version import VERSION

if TYPE_CHECKING:
    from collections.abc import Sequence
    from types import ModuleType

    from ddp_runner.kernel.processes.zygote_start import ZygoteAhead


def run(words: Sequence[str], ahead: ZygoteAhead | None = None) -> int:
    """Train as ``words`` say; the exit code of the run. Raises BadInputError.

    ``ahead``: what imports torch meanwhile; the caller ends it.
    """
    arguments = parse_train(words)
    if arguments.page:
        print(_page(arguments.page), flush=True)
        return 0
    if several_machines().engine in dict(arguments.nodes):
        return several_machines().by_engine(OnEach(verb="train", options=tuple(words)), arguments)
    return _on_machines(arguments, words, ahead)


def _on_machines(arguments: TrainArguments, words: Sequence[str], ahead: ZygoteAhead | None) -> int:
    """Train on this machine, or on several that each start the command themselves."""
    # Imported here, so that --help and wrong words answer without loading what plans a launch.
    from ddp_runner.cli.extras import take_keys  # noqa: PLC0415
    from ddp_runner.cli.planning import plan_launch  # noqa: PLC0415

    rank = plain_rank(os.environ)
    keys = take_keys(arguments.files)
    plan = plan_launch(arguments, words=words)
    plan = replace(plan, notes=(*keys, *plan.notes))
    if plan.nodes is not None and arguments.instead:
        raise BadInputError(arguments.instead, "", "is for one machine: give --nnodes 1 with it")
    if arguments.instead:
        module = import_module(INSTEAD[arguments.instead].module)
        return int(module.perform(plan, arguments, is_rank=rank is not None))
    if rank is not None:
        # An outside launcher (torchrun, srun with its variables) has made this process a rank.
        refuse_without_supervisor(plan.settings, world_size=rank.world_size)
        refuse_of_processes(plan.settings, world_size=rank.world_size)
        return int(_rank_module(rank).main(plan, rank, cores=core_count()))
    allow_files(plan.world_size)
    if plan.nodes is not None:
        token_file = dict(arguments.nodes).get("--token-file", "")
        return several_machines().run(plan, token_file=token_file)
    # Imported here, so that --help and wrong input answer without loading the supervisor.
    from ddp_runner.supervisor.assembly import supervise  # noqa: PLC0415

    return supervise(plan, ahead=ahead)


def _rank_module(rank: PlainRank) -> ModuleType:
    """Import the module of a rank under another launcher, with torch, as fast as possible.

    Garbage collection during the import, and later in what was imported, takes a third of the time. The first
    optimizer would import torch._dynamo. By name, since a rank needs torch and the command line must not.
    """
    gc.disable()
    try:
        module = launched_part(rank)
        import_module("torch._dynamo")
        gc.freeze()
    finally:
        gc.enable()
    return module


def _page(option: str) -> str:
    if option == "--version":
        return f"ddp_runner {VERSION}"
    usage = import_module("ddp_runner.cli.usage")  # which a run does not need
    return str(usage.train_help() if option == "--help" else usage.settings_help())


DECLARATION = TrainCommand(help=partial(_page, "--help"), run=run)
