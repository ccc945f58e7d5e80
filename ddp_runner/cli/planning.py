"""Plans a launch: who starts the ranks, on which devices, with which settings. Starts and touches nothing.

Everything that can be wrong with it is found here, before any process starts.
"""

from __future__ import annotations

import contextlib
import os
import sys
import time
from collections import Counter
from dataclasses import dataclass, replace
from pathlib import Path
from socket import gethostname
from typing import TYPE_CHECKING

from ddp_runner.checkpoint.catalog import Catalog
from ddp_runner.cli.extras import page_missing, refuse_missing
from ddp_runner.cli.hardware.devices import choose, find_gpus, placed, plan_devices, with_shares
from ddp_runner.cli.hardware.machine import core_count, share_of_cores
from ddp_runner.cli.parser import TrainArguments
from ddp_runner.cli.several import several_machines
from ddp_runner.cli.stage_choice import at_its_begin, checked, in_mode, refuse_stages
from ddp_runner.config import (
    RunFacts,
    check_relations,
    digest,
    facts_of_rank,
    home_files,
    resolve,
    resume_key,
)
from ddp_runner.config.foreign_values import machines_said
from ddp_runner.config.ways_on import no_checkpoint
from ddp_runner.core.batch_sizes import refuse_wrong_parts
from ddp_runner.core.injection import InjectKind, parse_injection, refuse_of_tasks
from ddp_runner.core.launch_plan import (
    NCCL_BACKENDS,
    DevicePlan,
    LaunchPlan,
    NodeOptions,
    names_a_gpu_twice,
    time_limit,
)
from ddp_runner.core.modes import mode_problems
from ddp_runner.core.plain_rank import PlainRank, plain_rank, what_is_ignored
from ddp_runner.kernel.rules.errors import BadInputError
from ddp_runner.kernel.rules.phases import Phase
from ddp_runner.kernel.rules.secrets import masked_words
from ddp_runner.observe.gpus import VisibleGpus
from ddp_runner.system.torch_versions import (
    NCCL2,
    has_nccl2,
    installed_nccl,
    nccl_trouble,
    torch_build,
    torch_has,
    untested,
)

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from types import ModuleType

    from ddp_runner.config import Resolved
    from ddp_runner.config.sources import Assignment
    from ddp_runner.core.modes import ModeChoice
    from ddp_runner.core.settings import Settings


@dataclass(frozen=True, slots=True, kw_only=True)
class Starter:
    """Who starts the ranks: this command, here or on several machines, or a launcher that has made this process one.

    ``is_task``: they train a task, which may also be one rank over several devices.
    """

    is_task: bool
    launcher: PlainRank | None
    several: NodeOptions | None

    @classmethod
    def of(
        cls,
        arguments: TrainArguments,
        environment: Mapping[str, str],
        *,
        asked: Resolved,
        is_task: bool,
    ) -> Starter:
        """Find out; ``asked``: what was given. Raises BadInputError for options of machines that are wrong."""
        launcher = plain_rank(environment)
        several = None
        if launcher is None:  # who is one rank has its machines from its launcher
            several = several_machines().asked(
                dict(arguments.nodes),
                environment,
                settings=machines_said(asked.facts),
                own_host="" if is_task else gethostname(),
            )
        return cls(is_task=is_task, launcher=launcher, several=several)

    @property
    def is_rank(self) -> bool:
        """Return whether this process is a rank of another launcher."""
        return self.launcher is not None

    @property
    def machines(self) -> int:
        """Return the number of machines, at most."""
        return 1 if self.several is None else self.several.most

    def facts(
        self, places: Places, arguments: TrainArguments, environment: Mapping[str, str]
    ) -> RunFacts:
        """Return what is so in any case, against which foreign settings and options are held."""
        facts = RunFacts(
            starter="train" if self.is_task else "run",
            ranks=len(places.all),
            mode="" if places.choice is None else places.choice.mode.value,
            own_host=gethostname(),
            is_dry=arguments.is_dry,
            files=tuple(map(str, arguments.files)),
        )
        if self.launcher is not None:
            known = facts_of_rank(self.launcher, environment)
            return replace(known, is_dry=facts.is_dry, files=facts.files)
        if (several := self.several) is None:
            return facts
        return replace(
            facts,
            machines=several.most,
            least_machines=several.least,
            node_rank=several.node_rank,
            host=several.host,
            port=str(several.port),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Places:
    """The devices of this machine's ranks, and what they were chosen from. All machines have the same."""

    own: tuple[DevicePlan, ...]
    machines: int
    found: VisibleGpus
    cores: int
    choice: ModeChoice | None = None

    @classmethod
    def choose(cls, asked: Settings, starter: Starter, environment: Mapping[str, str]) -> Places:
        """Choose them, and the mode of a task. Raises BadInputError."""
        cores, found = core_count(), VisibleGpus()
        if asked.run.device != "cpu":
            found = find_gpus(environment, torch_build())
        run = asked.run
        is_shared = names_a_gpu_twice(run.gpus) and asked.ddp.backend in NCCL_BACKENDS
        if (run.gpus and run.device == "cpu") or is_shared or mode_problems(asked):
            check_relations(asked)  # a contradiction is reported before a missing GPU is
        own = plan_devices(asked, found=found, cores=cores)
        choice = None
        if starter.is_task and not starter.is_rank:
            choice = choose(asked, own, machines=starter.machines)
            own = placed(own, choice.mode)
        return cls(own=own, machines=starter.machines, found=found, cores=cores, choice=choice)

    @property
    def all(self) -> tuple[DevicePlan, ...]:
        """Return the devices of all ranks, one place a rank."""
        return self.own * self.machines

    @property
    def computing(self) -> int:
        """Return the number of devices that compute."""
        return sum(1 + len(place.others) for place in self.all)


@dataclass(frozen=True, slots=True, kw_only=True)
class Settled:
    """The settings of the stage in which the launch begins, of all stages (or the only one), and notes."""

    settings: Settings
    stages: tuple[Settings, ...]
    notes: tuple[str, ...]
    share_notes: tuple[str, ...] = ()

    @classmethod
    def by(
        cls, resolved: Resolved, starter: Starter, places: Places, environment: Mapping[str, str]
    ) -> Settled:
        """Check each stage against what is installed and where it runs. Raises BadInputError."""
        choice = places.choice
        stages, notes = checked(resolved if choice is None else in_mode(resolved, choice))
        settings = at_its_begin(stages)
        # With several machines, another one's folder may have it.
        if starter.several is None and not starter.is_rank:
            _refuse_no_checkpoint(settings)
        for one in stages:
            _refuse_lacking(one)
        refuse_missing(settings, environment)
        if starter.several is not None or starter.is_rank:
            refuse_stages(settings, "are for one machine, and for ranks that this command starts")
        share_notes: tuple[str, ...] = ()
        if not starter.is_rank:
            settings, share_notes = with_shares(
                settings, places.all, is_alone=starter.several is None
            )
            stages = stages if settings.stages else (settings,)
            for one in stages:  # a rank of a launcher knows by itself how many there are
                refuse_wrong_parts(one.data, ranks=len(places.all), devices=places.computing)
        return cls(settings=settings, stages=stages, notes=notes, share_notes=share_notes)


def plan_launch(
    arguments: TrainArguments, *, words: Sequence[str], has_modes: bool = True
) -> LaunchPlan:
    """Decide devices, preset and settings. Touches nothing. Raises BadInputError.

    ``has_modes``: this runs a task, which may also be one rank over several devices.
    """
    environment = dict(os.environ)
    # Devices choose the preset, and no preset chooses devices: so those come first.
    asked = asked_settings(arguments, environment)
    starter = Starter.of(arguments, environment, asked=asked, is_task=has_modes)
    if starter.several is not None:
        arguments = replace(arguments, assignments=with_nproc(arguments.assignments, environment))
        asked = asked_settings(arguments, environment)
    places = Places.choose(asked.settings, starter, environment)
    resolved = resolve(
        files=(*home_files(environment), *arguments.files),
        environment=environment,
        command_line=arguments.assignments,
        preset=preset_name(places.own, is_test=asked.settings.run.test, is_task=has_modes),
    )
    settled = Settled.by(resolved, starter, places, environment)
    _refuse_untrue(resolved, starter, places, arguments, environment)
    settings, staged = settled.settings, bool(settled.settings.stages)
    for spec in settings.run.inject:
        parse_injection(spec, world_size=len(places.all))
    if has_modes and settings.run.inject:
        _refuse_what_never_comes(settings, settled.stages, world_size=len(places.all))
    return LaunchPlan(
        settings=settings,
        origins=resolved.origin,
        devices=places.all,
        world_size=len(places.all),
        threads_per_rank=threads_per_rank(settings, devices=places.own, cores=places.cores),
        resume_key=resume_key(settings, world_size=places.computing),
        settings_digest=digest(settings),
        time_limit=time_limit(
            max_time_s=settings.run.max_time,
            job_end=environment.get("SLURM_JOB_END_TIME", ""),
            now_utc_s=time.time(),
            stop_timeout_s=settings.recovery.stop_timeout_s,
        ),
        command=(sys.executable, "-m", "ddp_runner", "train", *masked_words(words)),
        nodes=starter.several,
        mode="" if places.choice is None else places.choice.words,
        stages=settled.stages if staged else (),
        written=resolved.settings if staged else None,
        notes=(
            *_notes(settings, starter, places, environment),
            *(f"{path} is included in these settings" for path in home_files(environment)),
            *files_not_read(arguments.files),
            *resolved.notes,
            *settled.notes,
            *settled.share_notes,
        ),
    )


def _refuse_no_checkpoint(settings: Settings) -> None:
    """Raise BadInputError if the settings need a checkpoint and there is none."""
    folder, resume = Path(settings.run.checkpoint_dir), settings.run.resume
    if resume in ("auto", "none"):
        return
    with contextlib.suppress(OSError):  # which the claim of the folder says
        if not Catalog(folder).resolve(resume):
            raise no_checkpoint(resume, folder)


def _refuse_what_never_comes(
    settings: Settings, stages: Sequence[Settings], *, world_size: int
) -> None:
    """Raise BadInputError for an injected fault that no rank can meet with these settings."""
    never: dict[str, str] = {}
    parts = stages if settings.stages else (settings,)
    if not any(one.data.num_workers or one.data.workers_total for one in parts):
        kinds = (InjectKind.LOADER_KILL, InjectKind.LOADER_STOP)
        never |= dict.fromkeys((kind.value for kind in kinds), "data.num_workers=0")
    if not any(one.log.profile for one in parts):
        never[Phase.PROFILE.label] = "log.profile is not set"
    refuse_of_tasks(
        settings.run.inject,
        world_size=world_size,
        total_steps=0 if settings.stages else settings.run.max_steps,
        never=never,
    )


def _refuse_untrue(
    resolved: Resolved,
    starter: Starter,
    places: Places,
    arguments: TrainArguments,
    environment: Mapping[str, str],
) -> None:
    """Raise BadInputError where what was said in other launchers' words is not so."""
    given = resolved.facts
    if starter.is_rank:  # its machines are not chosen here
        given = _of_run(given, home_files(environment))
    held = replace(resolved, facts=_held_against_run(given, arguments, environment))
    held.refuse_untrue(starter.facts(places, arguments, environment))


def _notes(
    settings: Settings, starter: Starter, places: Places, environment: Mapping[str, str]
) -> tuple[str, ...]:
    """Return lines on the machine and what is installed, in the order in which they are shown."""
    is_alone = starter.several is None
    return (
        *(() if starter.is_rank else _of_environment(environment, is_alone=is_alone)),
        *place_notes(places.own, found=places.found, cores=places.cores),
        *_kept_variables(settings, places.all, environment, is_alone=is_alone),
        *version_notes(),
        *nccl_notes(settings, places.all),
        *spare_notes(settings, places.all),
        *page_notes(settings),
    )


def _held_against_run(
    facts: tuple[Assignment, ...], arguments: TrainArguments, environment: Mapping[str, str]
) -> tuple[Assignment, ...]:
    """``facts`` but for what options and variables of machines win over, as they do over settings."""
    variables = {
        option
        for option, names in several_machines().variables.items()
        if any(map(environment.get, names))
    }
    over = {*dict(arguments.nodes), *variables}
    if "--nnodes" in over:  # for so many the rest was not meant
        return tuple(one for one in facts if not machines_said([one]))
    return tuple(one for one in facts if not {*machines_said([one])} & over)


def _of_run(facts: tuple[Assignment, ...], at_home: Sequence[Path]) -> tuple[Assignment, ...]:
    """``facts`` without what the files ``at_home`` say of machines, for a run whose machines that cannot choose."""
    begins = tuple(f"{path}: " for path in at_home)
    return tuple(
        one for one in facts if not (machines_said([one]) and one.written.startswith(begins))
    )


def files_not_read(files: Sequence[Path]) -> Iterator[str]:
    """A line on a file of settings in the working folder, where no file was given."""
    for name in ("config.yaml", "config.yml"):
        if not files and Path(name).is_file():
            yield f"{name} is here, and is not read: --config {name} reads it"


def with_nproc(
    assignments: tuple[tuple[str, str], ...], environment: Mapping[str, str]
) -> tuple[tuple[str, str], ...]:
    """``assignments``, and ranks of a machine by PET_NPROC_PER_NODE where they say nothing of that."""
    found = environment.get("PET_NPROC_PER_NODE", "")
    names = {name.lstrip("-").replace("-", "_").rpartition(".")[2] for name, _ in assignments}
    if not found or names & {"nproc_per_node", "nproc", "num_processes", "num_gpus"}:
        return assignments
    return (("run.nproc_per_node", "auto" if found == "gpu" else found), *assignments)


def _of_environment(environment: Mapping[str, str], *, is_alone: bool) -> tuple[str, ...]:
    """Return notes on a launcher's variables, which a shell may have inherited: a line each."""
    unused = several_machines().unused(environment) if is_alone else ""
    return tuple(line for line in (what_is_ignored(environment), unused) if line)


def _refuse_lacking(settings: Settings) -> None:
    """Raises BadInputError for what the installed torch does not have."""
    if settings.optim.optimizer == "muon" and not torch_has("optim._muon"):
        build = torch_build()
        found = f"torch {build.version}" if build else "this torch"
        expected = f"{found} has none, it came with 2.9: take a newer torch, or adamw"
        raise BadInputError("optim.optimizer", "muon", expected)
    if settings.ddp.backend == "nccl2" and not has_nccl2():
        build = torch_build()
        found = f"torch {build.version}" if build else "this torch"
        expected = f"{found} has no {NCCL2}, it came with 2.14: take a newer torch, or nccl"
        raise BadInputError("ddp.backend", "nccl2", expected)


def asked_settings(arguments: TrainArguments, environment: Mapping[str, str]) -> Resolved:
    """Return the settings without what devices make of them. Raises BadInputError."""
    files = (*home_files(environment), *arguments.files)
    return resolve(files=files, environment=environment, command_line=arguments.assignments)


def _kept_variables(
    settings: Settings,
    devices: Sequence[DevicePlan],
    environment: Mapping[str, str],
    *,
    is_alone: bool,
) -> tuple[str, ...]:
    """Return the variables of the user's environment that stay although GPUs need other values.

    ``is_alone``: all ranks are on this machine.
    """
    if devices[0].visible_index is None:
        return ()
    kept: tuple[str, ...] = _environments().kept_against_advice(
        environment, is_deterministic=settings.run.deterministic, is_alone=is_alone
    )
    return kept


def _environments() -> ModuleType:
    """Return the module that sets the variables of a run's processes. Imported late, as the supervisor is."""
    from ddp_runner.system import environment  # noqa: PLC0415

    return environment


def version_notes() -> tuple[str, ...]:
    """A line where the installed torch is newer than all that were tested; it is used."""
    build = torch_build()
    said = untested(build.version) if build else ""
    return (said,) if said else ()


def nccl_notes(settings: Settings, devices: Sequence[DevicePlan]) -> tuple[str, ...]:
    """A line where repairs on GPUs rest on a version of NCCL that is known to abort badly."""
    build = torch_build()
    on_gpus = devices[0].visible_index is not None
    if build is None or build.hip or not on_gpus or settings.ddp.backend == "gloo":
        return ()
    version = installed_nccl()
    trouble = nccl_trouble(version, cuda=build.cuda) if version else None
    return (f"NCCL {trouble.what}: {trouble.cure}",) if trouble else ()


def spare_notes(settings: Settings, devices: Sequence[DevicePlan]) -> tuple[str, ...]:
    """Return a note if ``recovery.warm_spare`` does not do what its value says."""
    wanted = settings.recovery.warm_spare
    if isinstance(wanted, bool) or devices[0].visible_index is None:
        return ()
    return (f"recovery.warm_spare={wanted} is for the CPU; on GPUs it means true",)


def page_notes(settings: Settings) -> tuple[str, ...]:
    """Return a note if the page cannot be shown; the run continues without it."""
    missing = page_missing() if settings.log.page else ""
    return (f"no page, the run continues without it: {missing}",) if missing else ()


def preset_name(devices: Sequence[DevicePlan], *, is_test: bool, is_task: bool = True) -> str:
    """The preset for these devices; that of a program of the user's has no recipe of a built-in task."""
    base = "cpu" if devices[0].visible_index is None else "gpu"
    if is_test:
        return f"{base}_test"
    return base if is_task or base == "gpu" else "cpu_program"


def threads_per_rank(
    settings: Settings,
    *,
    devices: Sequence[DevicePlan],
    cores: int,
    environment: Mapping[str, str] | None = None,
) -> int:
    """Intra-op threads of each rank: as set, else as OMP_NUM_THREADS has it, else the cores shared out."""
    if settings.run.threads_per_rank:
        return settings.run.threads_per_rank
    on_cpu = devices[0].visible_index is None
    own = (os.environ if environment is None else environment).get("OMP_NUM_THREADS", "")
    return share_of_cores(cores, ranks=len(devices), on_cpu=on_cpu, own=own)


def place_notes(
    devices: Sequence[DevicePlan], *, found: VisibleGpus, cores: int
) -> tuple[str, ...]:
    """Lines that say where each rank computes, and what about that may surprise."""
    if devices[0].visible_index is not None:
        ranks_of = Counter(place.visible_index for place in devices)
        return (
            *(
                f"rank {rank} -> GPU {place.visible_index} ({place.name})"
                + (f" and {', '.join(place.others)}" if place.others else "")
                for rank, place in enumerate(devices)
            ),
            *(
                f"GPU {index} is shared by {count} ranks over gloo: slow, for tests only"
                for index, count in ranks_of.items()
                if count > 1
            ),
        )
    notes = []
    if found.is_surprising:
        notes.append(f"training on the CPU: {found.why_none}")
    if len(devices) > cores:
        notes.append(f"{len(devices)} ranks share {cores} cores: fewer ranks would be faster")
    return tuple(notes)
