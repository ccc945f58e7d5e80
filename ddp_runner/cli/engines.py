"""``--engine NAME``: has an engine's cluster place the machines of a run, and run a command on each of them."""

from __future__ import annotations

import os
from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING

from ddp_runner import installed
from ddp_runner.core.machines.node_options import ENGINE
from ddp_runner.core.plain_rank import plain_rank
from ddp_runner.kernel.rules.errors import BadInputError

if TYPE_CHECKING:
    from ddp_runner.cli.parser import TrainArguments
    from ddp_runner.core.settings import Settings


@dataclass(frozen=True, slots=True, kw_only=True)
class OnEach:
    """The command that runs on each machine: ``verb``, ``options``, what the engine decides, and ``program``.

    ``program``: the script or module of ``run`` with its own words, behind which no option of ours is read.
    ``owner_option``: the option for the folder with the run's ``.owner``, which lies in its checkpoints
    or, for a script that has its own, in its logs. ``variables``: read by this command, as torchrun does.
    """

    verb: str
    options: tuple[str, ...]
    program: tuple[str, ...] = ()
    owner_option: str = "--checkpoint-dir"
    variables: tuple[str, ...] = ()

    def owner_folder(self, settings: Settings) -> str:
        """Return the folder that ``owner_option`` names."""
        run = settings.run
        return run.log_dir if self.owner_option == "--log-dir" else run.checkpoint_dir

    def resumes(self, settings: Settings) -> bool:
        """Return whether the same command goes on from the newest state. A script resumes by itself."""
        return self.owner_option == "--log-dir" or settings.run.resume == "auto"


def by_engine(on_each: OnEach, arguments: TrainArguments) -> int:
    """Have the engine that the arguments name run ``on_each``; the exit code. Raises BadInputError.

    The settings are judged once more on each machine.
    """
    if arguments.instead:
        raise BadInputError(arguments.instead, "", f"is for one machine: leave out {ENGINE}")
    if plain_rank(os.environ) is not None:
        raise BadInputError(ENGINE, "", "starts the ranks itself: start it without a launcher")
    engines = {
        name: module
        for part in installed.parts("words")
        for name, module in getattr(part, "ENGINES", {}).items()
    }
    engine = dict(arguments.nodes)[ENGINE]
    if engine not in engines:
        raise BadInputError(
            ENGINE,
            engine,
            f"must be {' or '.join(engines)}; under SLURM, Kubernetes and ssh each machine starts "
            "the command itself",
        )
    return int(import_module(engines[engine]).place(on_each, arguments))
