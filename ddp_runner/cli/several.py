"""The door to the feature that runs on several machines: its ``words.py`` has a ``SEVERAL``. Without it there is one machine."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from importlib import import_module
from typing import TYPE_CHECKING

from ddp_runner import installed
from ddp_runner.core.launch_plan import NNODES
from ddp_runner.kernel.rules.errors import BadInputError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from ddp_runner.cli.hardware.machine_checks import Check
    from ddp_runner.cli.parser import TrainArguments
    from ddp_runner.core.launch_plan import LaunchPlan, NodeOptions
    from ddp_runner.core.settings import Settings
    from ddp_runner.core.settings.declaration import Option


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


@dataclass(frozen=True, slots=True, kw_only=True)
class Several:
    """What the feature brings along beside its options of ``train``.

    ``asked``: makes of options, environment and settings which machines are asked for; None for this one alone, and it raises
    BadInputError. ``variables``: those that stand for each option. ``engine``: the option that has a cluster place the machines.
    ``of_run`` and ``of_doctor``: options of these two commands. ``unused``: a line on variables without a meaning for one
    machine. ``launching`` and ``checking``: modules with the functions that are called here.
    """

    variables: Mapping[str, tuple[str, ...]]
    engine: str
    of_run: tuple[Option, ...]
    of_doctor: tuple[Option, ...]
    asked: Callable[..., NodeOptions | None]
    unused: Callable[[Mapping[str, str]], str]
    launching: str
    checking: str

    def run(self, plan: LaunchPlan, *, token_file: str, script: object = None) -> int:
        """Run ``plan`` as the coordinator or as a follower, and return the exit code. Raises BadInputError.

        ``script``: what ``run`` runs as it is; None for a training.
        """
        module = import_module(self.launching)
        return int(module.run_on_several(plan, token_file=token_file, script=script))

    def by_engine(self, on_each: OnEach, arguments: TrainArguments) -> int:
        """Let the engine that the arguments name run ``on_each``; return the exit code. Raises BadInputError."""
        return int(import_module(self.launching).by_engine(on_each, arguments))

    def checks(self, values: Mapping[str, str], environment: Mapping[str, str]) -> Iterator[Check]:
        """Return what ``doctor`` checks, by the values of its options. Raises BadInputError."""
        found: Iterator[Check] = import_module(self.checking).checks_asked(values, environment)
        return found


def _refuse_several(
    options: Mapping[str, str], environment: Mapping[str, str], **_: object
) -> None:
    """Raise BadInputError if a launcher has started this command on several machines: each would train alone."""
    del options
    name = next((one for one in NNODES if environment.get(one)), "")
    if name and environment[name] not in ("1", "1:1"):
        expected = (
            "several machines are not supported by this installation: unset it, or set it to 1"
        )
        raise BadInputError(name, environment[name], expected)


_ALONE = Several(
    variables={},
    engine="",
    of_run=(),
    of_doctor=(),
    asked=_refuse_several,
    unused=lambda _: "",
    launching="",
    checking="",
)


@cache
def several_machines() -> Several:
    """Return what the feature brings along; where it is not installed, what there is of one machine."""
    found = (getattr(words, "SEVERAL", None) for words in installed.parts("words"))
    return next(filter(None, found), _ALONE)
