"""Runs the dry run of ``--dry-run``, of a run in stages one for each. Imports torch only in the process that tries."""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING

from ddp_runner.cli.stage_choice import alone
from ddp_runner.core.launch_plan import LaunchPlan
from ddp_runner.kernel.rules.errors import BadInputError
from ddp_runner.kernel.rules.exits import ExitCode
from ddp_runner.kernel.system import parent_death
from ddp_runner.observe.format import printable

if TYPE_CHECKING:
    from ddp_runner.cli.parser import TrainArguments


def perform(plan: LaunchPlan, arguments: TrainArguments, *, is_rank: bool) -> int:
    """Run the dry run in this process as the only rank; a run in stages uses one process for each."""
    del arguments
    if is_rank:
        raise BadInputError("--dry-run", "", "is for one process: start it without a launcher")
    return try_stages(plan, _try_out) if plan.stages else _try_out(plan, Handed())


def _try_out(plan: LaunchPlan, handed: Handed) -> int:
    plans = import_module("ddp_runner.supervisor.node_plans")
    os.environ.update(plans.zygote_environment(plan, os.environ))  # torch reads it
    trial = import_module("ddp_runner.features.tuning.dry_run")
    return int(trial.main(plan, weights_to=handed.weights_to, named=handed.named))


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
