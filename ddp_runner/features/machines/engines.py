"""``--engine NAME`` lets an engine's cluster place the machines of a run, and runs a command on each of them."""

from __future__ import annotations

import os
from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING

from ddp_runner import installed
from ddp_runner.features.machines.rules.node_options import ENGINE
from ddp_runner.core.plain_rank import plain_rank
from ddp_runner.kernel.rules.errors import BadInputError

if TYPE_CHECKING:
    from ddp_runner.cli.parser import TrainArguments
    from ddp_runner.core.settings import Settings


@dataclass(frozen=True, slots=True, kw_only=True)
class OnEach:
    """Describes the command that runs on each machine: ``verb``, ``options``, the engine's options and ``program``.

    ``program``: the script or module of ``run`` with its own arguments; no option of ours is read after it.
    ``owner_option``: the option for the folder with the run's ``.owner``: that of the checkpoints, or that of the
    logs for a script with its own checkpoints. ``variables``: environment variables that the command reads, as
    torchrun does.
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
        """Return True if the same command resumes from the newest state. A script resumes by itself."""
        return self.owner_option == "--log-dir" or settings.run.resume == "auto"


def by_engine(on_each: OnEach, arguments: TrainArguments) -> int:
    """Let the engine that the arguments name run ``on_each``; return the exit code. Raises BadInputError.

    Each machine checks the settings once more.
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
