"""``train``: everything that can be wrong is found here, before any process starts."""

from __future__ import annotations

import gc
import os
import resource
import sys
import time
from collections import Counter
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from socket import gethostname
from typing import TYPE_CHECKING

from ddp_runner.cli.devices import find_gpus, plan_devices
from ddp_runner.cli.dry_stages import Handed, try_stages
from ddp_runner.cli.finding import BATCH_SIZE, LEARNING_RATE, Finding
from ddp_runner.cli.gpu_checks import installed_nccl, judge_nccl
from ddp_runner.cli.machine import core_count, has_nccl2, torch_has
from ddp_runner.cli.modes import choose, placed, with_shares
from ddp_runner.cli.page import how_to_install
from ddp_runner.cli.parser import TrainArguments, parse_train
from ddp_runner.cli.stage_choice import alone, at_its_begin, checked, in_mode, refuse_stages
from ddp_runner.cli.tracker_needs import refuse_missing, take_keys
from ddp_runner.cli.usage import settings_help, train_help
from ddp_runner.config import (
    RunFacts,
    check_relations,
    digest,
    facts_of_rank,
    home_files,
    refuse_without_supervisor,
    resolve,
    resume_key,
)
from ddp_runner.config.foreign_values import machines_said
from ddp_runner.core.batch_sizes import refuse_wrong_parts
from ddp_runner.core.errors import BadInputError
from ddp_runner.core.injection import parse_injection
from ddp_runner.core.launch_plan import NCCL_BACKENDS, DevicePlan, LaunchPlan, names_a_gpu_twice
from ddp_runner.core.modes import mode_problems, refuse_of_processes
from ddp_runner.core.node_options import (
    VARIABLES,
    NodeOptions,
    node_options,
    unused_on_one_machine,
)
from ddp_runner.core.placing import ENGINE, engine_options
from ddp_runner.core.plain_rank import PlainRank, plain_rank, what_is_ignored
from ddp_runner.core.secrets import masked_words
from ddp_runner.core.stopping import time_limit
from ddp_runner.core.threads import share_of_cores
from ddp_runner.observe.gpus import VisibleGpus
from ddp_runner.system.torch_versions import NCCL2, torch_build, untested
from ddp_runner.version import VERSION

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from types import ModuleType

    from ddp_runner.config.sources import Assignment
    from ddp_runner.core.settings import Settings
    from ddp_runner.supervisor.processes.zygote_start import ZygoteAhead

_FINDERS = {BATCH_SIZE: "find_batch_size", LEARNING_RATE: "find_learning_rate"}
OPEN_FILES_BASE, OPEN_FILES_PER_RANK = 64, 16  # of the process that has most: supervisor or rank


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
    from ddp_runner.supervisor.launch import supervise  # noqa: PLC0415

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
    asked = engine_options(dict(arguments.nodes), os.environ)
    arguments = replace(arguments, assignments=with_nproc(arguments.assignments, os.environ))
    settings = asked_settings(arguments, os.environ)
    if settings.run.gpus:
        raise BadInputError("--gpus", "", "Ray decides which GPUs: give their number by -n")
    driver = import_module("ddp_runner.cli.engines.ray_driver")
    return int(driver.train(words, asked=asked, settings=settings))


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
    os.environ.update(_environments().zygote_environment(plan, os.environ))  # torch reads it
    trial = import_module("ddp_runner.training.dry_run")
    return int(trial.main(plan, weights_to=handed.weights_to, named=handed.named))


def allow_open_files(world_size: int) -> None:
    """Raise this process's limit to what a run needs. Raises BadInputError where that is forbidden."""
    needed = OPEN_FILES_BASE + OPEN_FILES_PER_RANK * world_size
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY or soft >= needed:
        return
    if hard != resource.RLIM_INFINITY and hard < needed:
        raise BadInputError(
            "ulimit -n", hard, f"allows too few open files: {world_size} ranks need {needed}"
        )
    resource.setrlimit(resource.RLIMIT_NOFILE, (needed, hard))


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
    return train_help() if option == "--help" else settings_help()


def plan_launch(
    arguments: TrainArguments, *, words: Sequence[str], has_modes: bool = True
) -> LaunchPlan:
    """Decide devices, preset and settings. Touches nothing. Raises BadInputError.

    ``has_modes``: this runs a task, which may also be one rank over several devices.
    """
    environment = dict(os.environ)
    several, choice = None, None
    share_notes: tuple[str, ...] = ()
    of_launcher = plain_rank(environment)
    is_rank = of_launcher is not None
    if not is_rank:  # who is one rank has its machines from its launcher
        said = _said_of_machines(arguments, environment) if has_modes else {}
        several = node_options(dict(arguments.nodes), environment, settings=said)
    if several is not None:
        arguments = replace(arguments, assignments=with_nproc(arguments.assignments, environment))
    at_home = home_files(environment)
    # Devices choose the preset, and no preset chooses devices: so those come first.
    asked = asked_settings(arguments, environment)
    cores = core_count()
    found = VisibleGpus()
    if asked.run.device != "cpu":
        found = find_gpus(environment, torch_build())
    devices = _planned(asked, found=found, cores=cores)
    if has_modes and not is_rank:
        choice = choose(asked, devices, machines=1 if several is None else several.most)
        devices = placed(devices, choice.mode)
    resolved = resolve(
        files=(*at_home, *arguments.files),
        environment=environment,
        command_line=arguments.assignments,
        preset=preset_name(devices, is_test=asked.run.test, is_task=has_modes),
    )
    stages, notes = checked(resolved if choice is None else in_mode(resolved, choice))
    settings = at_its_begin(stages)
    for one in stages:
        _refuse_lacking(one)
    refuse_missing(settings, environment)
    if several is not None or is_rank:
        refuse_stages(settings, "are for one machine, and for ranks that this command starts")
    own_devices = devices
    # All machines have as many ranks, on devices of the same names.
    devices = devices * (1 if several is None else several.most)
    world_size = len(devices)
    if not is_rank:
        settings, share_notes = with_shares(settings, devices, is_alone=several is None)
        stages = stages if settings.stages else (settings,)
    computing = sum(1 + len(place.others) for place in devices)
    for one in () if is_rank else stages:  # of which each rank knows by itself how many there are
        refuse_wrong_parts(one.data, ranks=world_size, devices=computing)
    facts = RunFacts(
        starter="train" if has_modes else "run",
        ranks=world_size,
        mode="" if choice is None else choice.mode.value,
        own_host=gethostname(),
        is_dry=arguments.is_dry,
        files=tuple(map(str, arguments.files)),
    )
    is_asked = has_modes and not is_rank
    given = resolved.facts if is_asked else _of_run(resolved.facts, at_home)
    replace(resolved, facts=_held_against_run(given, arguments, environment)).refuse_untrue(
        _with_launcher(facts, several, of_launcher, environment)
    )
    for spec in settings.run.inject:
        parse_injection(spec, world_size=world_size)
    return LaunchPlan(
        settings=settings,
        origins=resolved.origin,
        devices=devices,
        world_size=world_size,
        threads_per_rank=threads_per_rank(settings, devices=own_devices, cores=cores),
        resume_key=resume_key(settings, world_size=computing),
        settings_digest=digest(settings),
        time_limit=time_limit(
            max_time_s=settings.run.max_time,
            job_end=environment.get("SLURM_JOB_END_TIME", ""),
            now_utc_s=time.time(),
            stop_timeout_s=settings.recovery.stop_timeout_s,
        ),
        command=(sys.executable, "-m", "ddp_runner", "train", *masked_words(words)),
        nodes=several,
        mode="" if choice is None else choice.words,
        stages=stages if settings.stages else (),
        written=resolved.settings if settings.stages else None,
        notes=(
            *(() if is_rank else _of_environment(environment, is_alone=several is None)),
            *place_notes(own_devices, found=found, cores=cores),
            *_kept_variables(settings, devices, environment),
            *version_notes(),
            *nccl_notes(settings, devices),
            *spare_notes(settings, devices),
            *page_notes(settings),
            *(f"{path} lies under these settings" for path in at_home),
            *files_not_read(arguments.files),
            *resolved.notes,
            *notes,
            *share_notes,
        ),
    )


def _said_of_machines(
    arguments: TrainArguments, environment: Mapping[str, str]
) -> dict[str, tuple[str, str]]:
    """Return the settings about machines from files, variables and words."""
    files = (*home_files(environment), *arguments.files)
    found = resolve(files=files, environment=environment, command_line=arguments.assignments)
    return machines_said(found.facts)


def _held_against_run(
    facts: tuple[Assignment, ...], arguments: TrainArguments, environment: Mapping[str, str]
) -> tuple[Assignment, ...]:
    """``facts`` but for what options and variables of machines win over, as they do over settings."""
    variables = {option for option, names in VARIABLES.items() if any(map(environment.get, names))}
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


def _with_launcher(
    facts: RunFacts,
    several: NodeOptions | None,
    rank: PlainRank | None,
    environment: Mapping[str, str],
) -> RunFacts:
    """The same with the machines of a run on several, or with what another launcher has decided."""
    if rank is not None:
        return replace(facts_of_rank(rank, environment), is_dry=facts.is_dry, files=facts.files)
    if several is None:
        return facts
    return replace(
        facts,
        machines=several.most,
        least_machines=several.least,
        node_rank=several.node_rank,
        host=several.host,
        port=str(several.port),
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
    unused = unused_on_one_machine(environment) if is_alone else ""
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


def asked_settings(arguments: TrainArguments, environment: Mapping[str, str]) -> Settings:
    """The settings without what devices make of them. Raises BadInputError."""
    files = (*home_files(environment), *arguments.files)
    return resolve(
        files=files, environment=environment, command_line=arguments.assignments
    ).settings


def _kept_variables(
    settings: Settings, devices: Sequence[DevicePlan], environment: Mapping[str, str]
) -> tuple[str, ...]:
    """Return the variables of the user's environment that stay although GPUs need other values."""
    if devices[0].visible_index is None:
        return ()
    kept: tuple[str, ...] = _environments().kept_against_advice(
        environment, is_deterministic=settings.run.deterministic
    )
    return kept


def _environments() -> ModuleType:
    """Return the module that sets the variables of a run's processes. Imported late, as the supervisor is."""
    from ddp_runner.supervisor.processes import environment  # noqa: PLC0415

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
    judged = judge_nccl(version, cuda=build.cuda)
    return (f"NCCL {judged.found}: {judged.cure}",) if version and judged.cure else ()


def spare_notes(settings: Settings, devices: Sequence[DevicePlan]) -> tuple[str, ...]:
    """Return a note if ``recovery.warm_spare`` does not do what its value says."""
    wanted = settings.recovery.warm_spare
    if isinstance(wanted, bool) or devices[0].visible_index is None:
        return ()
    return (f"recovery.warm_spare={wanted} is for the CPU; on GPUs it means true",)


def page_notes(settings: Settings) -> tuple[str, ...]:
    """Return a note if the page cannot be shown; the run continues without it."""
    missing = how_to_install() if settings.log.page else ""
    return (f"no page, the run goes on without it: {missing}",) if missing else ()


def _planned(settings: Settings, *, found: VisibleGpus, cores: int) -> tuple[DevicePlan, ...]:
    """The devices; a contradiction between settings is reported before a missing GPU is."""
    run = settings.run
    is_shared = names_a_gpu_twice(run.gpus) and settings.ddp.backend in NCCL_BACKENDS
    if (run.gpus and run.device == "cpu") or is_shared or mode_problems(settings):
        check_relations(settings)
    return plan_devices(settings, found=found, cores=cores)


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
                f"GPU {index} is shared by {count} ranks over gloo: for trying out, slow"
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
