"""``train``: trains as its words say, or tries out what would be trained. What can be wrong is found before."""

from __future__ import annotations

import gc
import os
import sys
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING

from ddp_runner.cli.command import TrainCommand
from ddp_runner.cli.extras import take_keys
from ddp_runner.cli.machine import allow_open_files, core_count
from ddp_runner.cli.parser import BATCH_SIZE, LEARNING_RATE, Finding, TrainArguments, parse_train
from ddp_runner.cli.planning import plan_launch
from ddp_runner.cli.stage_choice import alone
from ddp_runner.config import (
    refuse_without_supervisor,
)
from ddp_runner.core.errors import BadInputError
from ddp_runner.core.exits import ExitCode
from ddp_runner.core.launch_plan import LaunchPlan
from ddp_runner.core.modes import refuse_of_processes
from ddp_runner.core.node_options import ENGINE
from ddp_runner.core.plain_rank import plain_rank
from ddp_runner.observe.format import printable
from ddp_runner.system import parent_death
from ddp_runner.version import VERSION

if TYPE_CHECKING:
    from collections.abc import Sequence
    from types import ModuleType

    from ddp_runner.supervisor.processes.zygote_start import ZygoteAhead

_FINDERS = {BATCH_SIZE: "find_batch_size", LEARNING_RATE: "find_learning_rate"}


def run(words: Sequence[str], ahead: ZygoteAhead | None = None) -> int:
    """Train as ``words`` say; the exit code of the run. Raises BadInputError.

    ``ahead``: what imports torch meanwhile; the caller ends it.
    """
    arguments = parse_train(words)
    if arguments.page:
        print(_page(arguments.page))
        return 0
    if ENGINE in dict(arguments.nodes):
        return _by_engine(arguments, words)
    return _on_machines(arguments, words, ahead)


def _on_machines(arguments: TrainArguments, words: Sequence[str], ahead: ZygoteAhead | None) -> int:
    """Train on this machine, or on several that each start the command themselves."""
    rank = plain_rank(os.environ)
    not_trained = _not_trained(arguments)
    keys = take_keys(arguments.files)
    plan = plan_launch(arguments, words=words)
    plan = replace(plan, notes=(*keys, *plan.notes))
    if plan.nodes is not None and not_trained:
        raise BadInputError(not_trained, "", "is for one machine: give --nnodes 1 with it")
    if arguments.finding.option:
        return _find(alone(plan), arguments.finding, is_rank=rank is not None)
    if arguments.is_dry:
        return _dry_run(plan, is_rank=rank is not None)
    if rank is not None:
        # An outside launcher (torchrun, srun with its variables) has made this process a rank.
        refuse_without_supervisor(plan.settings, world_size=rank.world_size)
        refuse_of_processes(plan.settings, world_size=rank.world_size)
        outside = _rank_module()
        return int(outside.main(plan, rank, cores=core_count()))
    allow_open_files(plan.world_size)
    if plan.nodes is not None:
        from ddp_runner.cli.nodes import train_on_several  # noqa: PLC0415 - as below

        return train_on_several(plan, token_file=dict(arguments.nodes).get("--token-file", ""))
    # Imported here, so that --help and wrong input answer without loading the supervisor.
    from ddp_runner.supervisor.assembly import supervise  # noqa: PLC0415

    return supervise(plan, ahead=ahead)


def _not_trained(arguments: TrainArguments) -> str:
    """The option that asks for something else."""
    return arguments.finding.option or ("--dry-run" if arguments.is_dry else "")


def _by_engine(arguments: TrainArguments, words: Sequence[str]) -> int:
    """The machines are an engine's, and the settings are judged there once more."""
    if not_trained := _not_trained(arguments):
        raise BadInputError(not_trained, "", f"is for one machine: leave out {ENGINE}")
    if plain_rank(os.environ) is not None:
        raise BadInputError(ENGINE, "", "starts the ranks itself: start it without a launcher")
    driver = import_module("ddp_runner.cli.engines.ray_driver")
    return int(driver.train(words, arguments))


def _find(plan: LaunchPlan, finding: Finding, *, is_rank: bool) -> int:
    """Look for a setting by runs of a few steps."""
    if is_rank:
        expected = "starts its ranks itself: start it without a launcher"
        raise BadInputError(finding.option, "", expected)
    module = import_module(f"ddp_runner.cli.{_FINDERS[finding.option]}")
    return int(module.find(plan, finding))


def _dry_run(plan: LaunchPlan, *, is_rank: bool) -> int:
    """Run the dry run in this process as the only rank; a run in stages uses one process for each."""
    if is_rank:
        raise BadInputError("--dry-run", "", "is for one process: start it without a launcher")
    return try_stages(plan, _try_out) if plan.stages else _try_out(plan, Handed())


def _try_out(plan: LaunchPlan, handed: Handed) -> int:
    environments = import_module("ddp_runner.supervisor.processes.environment")
    os.environ.update(environments.zygote_environment(plan, os.environ))  # torch reads it
    trial = import_module("ddp_runner.training.dry_run")
    return int(trial.main(plan, weights_to=handed.weights_to, named=handed.named))


def _rank_module() -> ModuleType:
    """Import the module of a rank under another launcher, with torch, as fast as possible.

    Garbage collection during the import, and later in what was imported, takes a third of the time. The first
    optimizer would import torch._dynamo. By name, since a rank needs torch and the command line must not.
    """
    gc.disable()
    try:
        module = import_module("ddp_runner.rank.external_launcher")
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Handed:
    """The exchange of weights between stages. ``names``: of paths, for people.

    ``weights_to``: the file for the next stage; None: no file.
    """

    weights_to: Path | None = None
    names: Mapping[str, str] = field(default_factory=dict)

    def named(self, text: str) -> str:
        """Return ``text`` with names in place of the temporary paths."""
        for path, name in self.names.items():
            text = text.replace(path, name)
        return text


TryOne = Callable[["LaunchPlan", Handed], int]


def try_stages(plan: LaunchPlan, try_one: TryOne) -> int:
    """Try the stages from the run's first to its last. A stage that fails ends the trial, with its exit code."""
    begin = plan.settings.stage
    assert begin is not None, "there are stages"
    source, names = "", dict[str, str]()
    with tempfile.TemporaryDirectory(prefix="ddp_dry_run_") as folder:
        for number, name in list(enumerate(begin.names))[begin.number :]:
            trial = plan if number == begin.number else _later(plan, number, source)
            print(f"stage {name} ({number + 1} of {len(begin.names)})", flush=True)
            path = Path(folder, f"{number}.pt")
            code = _in_a_child(try_one, alone(trial), Handed(weights_to=path, names=names))
            if code != ExitCode.DONE:
                return code
            print(flush=True)
            source, names = str(path), {str(path): f"stage {name}, as it is built"}
    return ExitCode.DONE


def _later(plan: LaunchPlan, number: int, source: str) -> LaunchPlan:
    """Return the plan of a stage that begins with the weights that the stage before built, if it uses any of them."""
    trial = plan.in_stage(number, first_step=0, first_generation=1)
    trial = replace(trial, notes=())  # they have been shown with the first
    place = trial.settings.stage
    assert place is not None, "of a stage"
    if not place.begins_with:
        return trial
    run = replace(trial.settings.run, init_from=source)
    settings = replace(trial.settings, run=run, stage=replace(place, begins_with=""))
    return replace(trial, settings=settings)


def _in_a_child(try_one: TryOne, plan: LaunchPlan, handed: Handed) -> int:
    """So that no stage finds what another has imported."""
    parent = os.getpid()
    pid = os.fork()
    if pid:
        _, status = os.waitpid(pid, 0)
        code = os.waitstatus_to_exitcode(status)
        if code < 0:
            print(f"ddp_runner: error: the dry run was ended by signal {-code}", file=sys.stderr)
        return code if code >= 0 else ExitCode.FAILED
    code = ExitCode.FAILED
    try:
        parent_death.die_with_parent(parent)
        code = ExitCode(try_one(plan, handed))
    except BadInputError as error:
        code = ExitCode.BAD_USAGE
        for line in printable(handed.named(str(error))).split("\n"):
            print(f"ddp_runner: error: {line}", file=sys.stderr)
    except KeyboardInterrupt:
        code = ExitCode.INTERRUPTED
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


DECLARATION = TrainCommand(make_help=partial(_page, "--help"), perform=run)
