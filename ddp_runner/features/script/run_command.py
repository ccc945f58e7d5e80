"""``run``: supervise any script that torchrun can start. What can be wrong is found before a process starts."""

from __future__ import annotations

import importlib.util
import os
import re
import shlex
import shutil
import sys
import textwrap
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from ddp_runner.cli.command import TrainCommand, option_lines
from ddp_runner.cli.hardware.machine import allow_files
from ddp_runner.cli.parser import LONG_OF_SHORT, OPTIONS, is_config_name, parse_train
from ddp_runner.cli.several import OnEach, several_machines
from ddp_runner.config.foreign_values import is_fact, is_foreign_switch
from ddp_runner.config.run_names import name_of_task
from ddp_runner.config.sources import named_file
from ddp_runner.config.suggest import nearest
from ddp_runner.core.launch_plan import OpaqueProgram
from ddp_runner.core.plain_rank import plain_rank
from ddp_runner.core.settings.declaration import Option
from ddp_runner.features.script.accelerate_config import ON_CPU, accelerate_variables
from ddp_runner.features.script.rules import GRACE_AT_STOP_S, RANK, ResumeWith, ScriptPlan
from ddp_runner.features.script.run_loop import attaches, may_be_run, source_of, with_loop
from ddp_runner.features.script.run_options import (
    ACCEPTED_VALUES,
    ALSO_CALLED,
    EXAMPLES,
    OF_ATTACHED,
    OF_ENVIRONMENT,
    OF_SCRIPTS,
    OF_TASKS,
    OWN_OPTIONS,
    PYTHON_ONLY,
    REFUSED,
    REFUSED_SWITCHES,
    SAYS_OF_SHARED,
    SHARED,
    WHICH_STREAMS,
)
from ddp_runner.kernel.rules.errors import BadInputError
from ddp_runner.kernel.rules.secrets import masked_words
from ddp_runner.start import COMMAND
from ddp_runner.version import VERSION

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from ddp_runner.cli.parser import TrainArguments
    from ddp_runner.core.launch_plan import LaunchPlan
    from ddp_runner.core.settings import Settings

_WIDTH = 79
OWN = {option.long: option for option in OWN_OPTIONS}
_LONG_OF_SHORT = {
    **{option.short: long for long, option in OWN.items() if option.short},
    **{short: long for short, long in LONG_OF_SHORT.items() if long in SHARED},
    "-r": "--redirects",
}
# Host and port of rank 0, as launchers name them that know no endpoint.
_OF_MASTER = ("--master-addr", "--master-port")
_OF_DEVICE = ("--cpu", "--gpus", "device=", "run.device=", "gpus=", "run.gpus=")
_OF_ALL = "--num-processes"  # accelerate's word for the ranks of all machines together
_CPU_WORDS = ("--cpu", "device=cpu", "run.device=cpu")
_DEVICE_OF = {"cpu": "cpu", "gpu": "cuda"}  # torchrun's words for as many ranks as there are


@dataclass(slots=True, kw_only=True)
class _Words:
    """The words of a command line, sorted."""

    shared: list[str]
    own: dict[str, str]
    resume_with: list[str]
    rest: list[str]


def run(words: Sequence[str]) -> int:
    """Run a script as ``words`` say; the exit code. Raises BadInputError."""
    sorted_words = _sort(words)
    if "--help" in sorted_words.own:
        print(run_help())
        return 0
    if "--version" in sorted_words.own:
        print(f"ddp_runner {VERSION}")
        return 0
    if plain_rank(os.environ) is not None:
        raise BadInputError(
            "run",
            "",
            "starts the ranks itself, and this process is one already; torchrun starts the script",
        )
    _take_of_environment(sorted_words, os.environ)
    script = _script(sorted_words)
    said = _take_of_accelerate(sorted_words, script)
    arguments = _with_master(parse_train(_settings(sorted_words, script)), sorted_words.own)
    script = replace(script, rdzv_id=_rdzv_id(arguments, os.environ))
    is_loop = attaches(script)
    (_refuse_of_scripts if is_loop else _refuse_of_loops)(sorted_words)
    if several_machines().engine in dict(arguments.nodes):
        on_each = _on_each(words, sorted_words, is_loop=is_loop)
        return several_machines().by_engine(on_each, arguments)
    # Imported here, so that --help and wrong words answer without loading what plans a launch, and below what supervises it.
    from ddp_runner.cli.extras import take_keys  # noqa: PLC0415
    from ddp_runner.cli.planning import plan_launch  # noqa: PLC0415
    from ddp_runner.cli.stage_choice import refuse_stages  # noqa: PLC0415

    keys = take_keys(arguments.files)
    plan = plan_launch(arguments, words=words, has_modes=False)
    refuse_stages(plan.settings, "are for a task")
    _refuse_of_optimizer(plan)
    plan = replace(plan, notes=(*keys, *said, *plan.notes))
    token_file = dict(arguments.nodes).get("--token-file", "")
    if plan.nodes is not None:
        plan = _on_several(plan, sorted_words.own)
    if plan.origins["recovery.max_restarts"] not in ("default", "preset"):
        script = replace(script, restarts=plan.settings.recovery.max_restarts > 0)
    if is_loop:
        return _supervise(with_loop(plan, script), words, None, token_file)
    if plan.nodes is not None and script.path:  # each machine has its own working folder
        script = replace(script, path=sorted_words.rest[0])
    plan = _with_script(plan, script, sorted_words.own)
    return _supervise(plan, words, script, token_file)


def _on_each(words: Sequence[str], found: _Words, *, is_loop: bool) -> OnEach:
    """Return the command for the machines that an engine places: ``words``, split where the program begins."""
    cut = len(words) - len(found.rest)
    if (
        "--module" in found.own
    ):  # the option and its value are the last words before it: one word or two
        cut -= 1 if "=" in words[cut - 1] or words[cut - 1].startswith("-") else 2
    elif words[cut - 1 : cut] == ["--"]:
        cut -= 1
    return OnEach(
        verb="run",
        options=tuple(words[:cut]),
        program=tuple(words[cut:]),
        owner_option="--checkpoint-dir" if is_loop else "--log-dir",
        variables=tuple(map(_variable_of, OF_ENVIRONMENT)),
    )


def _with_script(plan: LaunchPlan, script: ScriptPlan, own: Mapping[str, str]) -> LaunchPlan:
    """``plan`` for a program that is run as it is."""
    settings = plan.settings
    _refuse_mode(settings, ranks=plan.world_size)
    # There is no checkpoint of ours, and one folder: what looks for both finds it.
    of_run = replace(settings.run, checkpoint_dir=settings.run.log_dir)
    recovery = replace(settings.recovery, warm_spare=False, drill_at=None)
    return replace(
        plan,
        settings=replace(settings, run=of_run, recovery=recovery),
        notes=(
            *plan.notes,
            *_thread_notes(plan.threads_per_rank),
            *_torchrun_notes(own),
        ),
        opaque=OpaqueProgram(
            name=script.name,
            module=RANK,
            may_restart=script.restarts,
            preload=script.preload,
            code="" if script.is_program else script.path or f"{script.module}:",
            arguments=script.arguments,
        ),
    )


def settings_of(words: Sequence[str]) -> Settings:
    """The settings of the run that ``words`` ask for. Raises BadInputError."""
    from ddp_runner.cli.planning import asked_settings  # noqa: PLC0415 - as above

    found = _sort(words)
    return asked_settings(parse_train(_settings(found, _script(found))), dict(os.environ)).settings


def _supervise(
    plan: LaunchPlan, words: Sequence[str], script: ScriptPlan | None, token_file: str
) -> int:
    """``script``: None where it is a loop that attaches, and its run a training."""
    plan = replace(plan, command=(*plan.command[:3], "run", *masked_words(words)))
    allow_files(plan.world_size)
    from ddp_runner.features.script import parent  # noqa: PLC0415 - as above

    return parent.supervise(plan, script, token_file=token_file)


def _with_master(arguments: TrainArguments, own: Mapping[str, str]) -> TrainArguments:
    """``arguments`` with what torchrun's static rendezvous is given, for a run on several machines."""
    given = tuple((option, own[option]) for option in _OF_MASTER if own.get(option))
    return replace(arguments, nodes=(*arguments.nodes, *given))


def _rdzv_id(arguments: TrainArguments, environment: Mapping[str, str]) -> str:
    return dict(arguments.nodes).get("--rdzv-id", "") or environment.get("PET_RDZV_ID", "")


def _on_several(plan: LaunchPlan, own: Mapping[str, str]) -> LaunchPlan:
    """``plan`` for several machines: a port of the endpoint's is not that of the store."""
    assert plan.nodes is not None
    if _OF_ALL in own:
        expected = "counts the ranks of all machines: give those of each, as --nproc-per-node"
        raise BadInputError(_OF_ALL, own[_OF_ALL], expected)
    if "--standalone" in own:
        raise BadInputError("--standalone", "", f"is for one machine, and not {plan.nodes.most}")
    if plan.settings.ddp.port != plan.nodes.port:
        return plan
    settings = replace(plan.settings, ddp=replace(plan.settings.ddp, port=0))
    return replace(plan, settings=settings)


def _refuse_of_scripts(words: _Words) -> None:
    given = [*words.own, *(["--resume-with"] if words.resume_with else [])]
    for option in given:
        if option in OF_SCRIPTS and _variable_of(option) not in os.environ:
            expected = f"is for other scripts: a loop that calls attach() {OF_SCRIPTS[option]}"
            raise BadInputError(option, "", expected)


def _refuse_of_loops(words: _Words) -> None:
    if refused := sorted(set(OF_ATTACHED) & {one.partition("=")[0] for one in words.shared}):
        expected = "needs a loop that calls ddp_runner.attach(), which the script does not"
        raise BadInputError(refused[0], "", expected)


def _refuse_of_optimizer(plan: LaunchPlan) -> None:
    given = sorted(
        name
        for name, origin in plan.origins.items()
        if name.startswith("optim.") and origin == "command line"
    )
    if given:
        value = getattr(plan.settings.optim, given[0].removeprefix("optim."))
        expected = "is for a task: the program makes its own optimizer"
        raise BadInputError(given[0], value, expected)


def _refuse_mode(settings: Settings, *, ranks: int) -> None:
    """A script decides by itself what its processes do with their devices."""
    mode = settings.run.mode
    if mode == "data_parallel" or (mode == "single" and ranks > 1):
        has = "1 rank" if ranks == 1 else f"{ranks} ranks"
        expected = f"is for a task; the script has {has}, a process each: leave it out, or give -n"
        raise BadInputError("run.mode", mode, expected)


def _thread_notes(threads: int) -> tuple[str, ...]:
    own = os.environ.get("OMP_NUM_THREADS")
    if own:
        return (f"OMP_NUM_THREADS={own} of your environment is kept",)
    return (
        f"OMP_NUM_THREADS={threads} in each rank: the cores divided by the ranks; torchrun sets 1",
    )


def _torchrun_notes(own: Mapping[str, str]) -> tuple[str, ...]:
    """Return notes about torchrun's options that behave differently here."""
    notes = []
    if "--monitor-interval" in own:
        _seconds(own, "--monitor-interval", otherwise=0.0)
        notes.append("--monitor-interval: the end of a rank is noticed at once, not in intervals")
    if {"1", "2"} & set(re.findall(r"(?:^|:)([0-3])", own.get("--tee", ""))):
        notes.append("--tee: stdout and stderr of a rank are one file here; both are shown")
    return tuple(notes)


def _sort(words: Sequence[str]) -> _Words:
    """Options and settings up to the script, or the module; what follows is the script's."""
    found = _Words(shared=[], own={}, resume_with=[], rest=[])
    rest = list(words)
    while rest:
        word = rest.pop(0)
        if word == "--":
            found.rest = rest
            return found
        if word.startswith("-") and word != "-":
            if _is_last(word, rest, found):
                found.rest = rest
                return found
        elif "=" in word and not Path(word).exists():
            found.shared.append(word)
        else:
            found.rest = [word, *rest]
            return found
    return found


def _take_of_environment(found: _Words, environment: Mapping[str, str]) -> None:
    """Add what variables of torchrun's say where the words do not."""
    words = [*found.own, *(word.partition("=")[0] for word in found.shared)]
    given = {word.lstrip("-").replace("-", "_").rpartition(".")[2] for word in words}
    if given & {"nproc", "num_processes", "num_gpus"}:
        given.add("nproc_per_node")
    of_environment = _Words(shared=[], own={}, resume_with=[], rest=[])
    for option in OF_ENVIRONMENT:
        value = environment.get(_variable_of(option), "")
        if value and option[2:].replace("-", "_") not in given:
            _is_last(f"{option}={value}", [], of_environment)
    found.shared[:0] = of_environment.shared
    found.own.update(of_environment.own)


def _take_of_accelerate(words: _Words, script: ScriptPlan) -> tuple[str, ...]:
    """Put what accelerate's launcher would hand over into the environment of the ranks; lines about it."""
    given = [word for word in words.shared if word.startswith(_OF_DEVICE)]
    is_on_cpu = given[-1].lower() in _CPU_WORDS if given else None
    found, said = accelerate_variables(
        b"" if script.is_program else source_of(script),
        asked=words.own.get("--mixed-precision", "").lower(),
        is_on_cpu=is_on_cpu,
        environment=os.environ,
    )
    os.environ.update(found)
    if found.get(ON_CPU) and is_on_cpu is None:
        words.shared.append("run.device=cpu")
    return said


def _variable_of(option: str) -> str:
    """The variable that torchrun reads in place of an option."""
    return f"PET_{option[2:].replace('-', '_').upper()}"


def _is_last(word: str, rest: list[str], found: _Words) -> bool:
    """Take an option, and its value off ``rest``. True for one behind which none of ours comes."""
    name, _, attached = word.partition("=")
    if not word.startswith("--"):
        name, attached = word[:2], word[2:].removeprefix("=")
    long = _LONG_OF_SHORT.get(name, name.replace("_", "-").lower())
    long = ALSO_CALLED.get(long, long)
    if long in ("--help", "-h", "--version"):
        found.own["--help" if long == "-h" else long] = ""
        return True
    if long in REFUSED or (is_fact(long[2:]) and long not in (*OWN, *SHARED)):
        _take_of_others(long, attached, rest, found)
        return False
    is_of_all = name.replace("_", "-").lower() == _OF_ALL
    option = OWN.get(long) or (OPTIONS[long] if long in SHARED else None)
    if option is None:
        near = nearest(name, (*OWN, *SHARED))
        hint = f"did you mean {near}?" if near else "run --help lists them."
        unknown = f"unknown option; {hint} The script's own words follow it"
        raise BadInputError(word, "", OF_TASKS.get(long, unknown))
    value = _value(option, attached, rest, is_named=is_config_name(name))
    if option.long == "--nproc-per-node" and value in ("cpu", "gpu"):
        found.shared.append(f"run.device={_DEVICE_OF[value]}")
        value = str(os.cpu_count()) if value == "cpu" else "auto"
    found.own.update({_OF_ALL: value} if is_of_all else {})
    if option.long == "--resume-with":
        found.resume_with.append(value)
    elif option.long in OWN:
        found.own[option.long] = value
    if option.key and option.long in OWN:
        found.shared.append(f"{option.key}={value}")
    elif option.long not in OWN:
        found.shared.append(f"{option.long}={value}" if option.metavar else option.long)
    return option.long == "--module"


def _take_of_others(long: str, attached: str, rest: list[str], found: _Words) -> None:
    """Take a foreign option: settings that define the run are kept, others must match what holds anyway."""
    if long in REFUSED:
        _refuse_unless_so_anyhow(long, attached, rest)
        return
    value = attached or ("true" if is_foreign_switch(long[2:]) else "")
    if not value and not rest:
        raise BadInputError(long, "", f"needs a value: {long} VALUE")
    found.shared.append(f"{long}={value or rest.pop(0)}")


def _refuse_unless_so_anyhow(long: str, attached: str, rest: list[str]) -> None:
    """Refuse an option of torchrun's by its name, but for a value that is so in any case."""
    value = attached
    if not value and rest and not rest[0].startswith("-") and long not in REFUSED_SWITCHES:
        value = rest.pop(0)
    if long not in ACCEPTED_VALUES or not re.fullmatch(ACCEPTED_VALUES[long], value):
        raise BadInputError(long, value, REFUSED[long])


def _value(option: Option, attached: str, rest: list[str], *, is_named: bool) -> str:
    """``is_named``: it is a file of settings, whose ending may be left out."""
    if not option.metavar:
        return ""
    if not attached and not rest:
        raise BadInputError(option.long, "", f"needs a value: {option.long} {option.metavar}")
    value = attached or rest.pop(0)
    return str(named_file(value)) if is_named else value


def _script(words: _Words) -> ScriptPlan:
    module, is_program = words.own.get("--module", ""), "--no-python" in words.own
    path, arguments = "", words.rest
    if is_program:
        _refuse_with_program(words.own)
    if not module:
        if not words.rest:
            raise BadInputError("run", "", f"needs a script: {COMMAND} run [OPTIONS] train.py ARGS")
        path, arguments = words.rest[0], words.rest[1:]
        if not is_program:
            _check_file(path)
            path = str(Path(path).absolute())
        elif shutil.which(path) is None:
            raise BadInputError("--no-python", path, "no program of this name can be run")
    elif not may_be_run(module):
        raise BadInputError("-m", module, "no module of this name is found from here")
    if "--in-place" in words.own and find_spec("transformers") is None:
        expected = "needs transformers: pip install 'ddp_runner[transformers]'"
        raise BadInputError("--in-place", "", expected)
    shown, marks_lines = _shown(words.own)
    return ScriptPlan(
        in_place="--in-place" in words.own,
        path=path,
        module=module,
        is_program=is_program,
        shown_ranks=shown,
        marks_lines=marks_lines,
        arguments=tuple(arguments),
        restarts=bool(words.resume_with),
        grace_period_s=_seconds(words.own, "--grace-period", otherwise=GRACE_AT_STOP_S),
        hang_timeout_s=_seconds(words.own, "--hang-timeout", otherwise=0.0),
        resume_with=tuple(map(_resume_with, words.resume_with)),
        from_scratch="--from-scratch" in words.own,
        plain_saves="--plain-saves" in words.own,
        preload=_preload(words.own.get("--preload", "")),
        role=words.own.get("--role", "default"),
    )


def _refuse_with_program(own: Mapping[str, str]) -> None:
    for option in PYTHON_ONLY:
        if option in own:
            raise BadInputError(
                option, own[option], "is for Python: it has no use with --no-python"
            )


def _shown(own: Mapping[str, str]) -> tuple[tuple[int, ...] | None, bool]:
    """Return the ranks that the console shows (None: all), and whether each line names its rank."""
    shown: tuple[int, ...] | None = (0,)
    tee = own.get("--tee", "0")
    if re.fullmatch(r"[0-3]", tee):
        shown = None if tee != "0" else shown
    elif re.fullmatch(WHICH_STREAMS, tee):
        each = [one.split(":") for one in tee.split(",")]
        shown = tuple(int(rank) for rank, streams in each if streams != "0")
    else:
        raise BadInputError("--tee", tee, "must be 0 to 3, or rank:0 to 3 for some, as in 0:3,1:3")
    only = own.get("--local-ranks-filter", "")
    if only:
        if not re.fullmatch(r"\d+(,\d+)*", only):
            raise BadInputError("--local-ranks-filter", only, "must be ranks, as in 0,1")
        ranks = tuple(map(int, only.split(",")))
        is_teed = "--tee" in own and shown is not None
        shown = tuple(rank for rank in ranks if rank in (shown or ())) if is_teed else ranks
    return shown, "--tee" in own and tee != "0"


def _preload(text: str) -> tuple[str, ...]:
    names = tuple(name for name in text.split(",") if name)
    for name in names:
        above = name.partition(".")[0]
        if not above or importlib.util.find_spec(above) is None or not _may_be_imported(name):
            raise BadInputError("--preload", name, "no module of this name is installed")
    return names


def _may_be_imported(name: str) -> bool:
    """Return True as for ``-m``; some modules below others have no file of their own, such as os.path."""
    return name in sys.modules or may_be_run(name)


def _resume_with(text: str) -> ResumeWith:
    pattern, colon, words = text.partition(":")
    try:
        split = shlex.split(words)
    except ValueError as error:  # a quotation mark without its second
        raise BadInputError("--resume-with", text, f"its words: {error}") from error
    if not (pattern and colon and split):
        raise BadInputError(
            "--resume-with", text, "must be a file and words for the script: GLOB:WORDS"
        )
    return ResumeWith(pattern=pattern, words=tuple(split))


def _check_file(path: str) -> None:
    if not Path(path).is_file():
        why = "is a folder" if Path(path).is_dir() else "no such file"
        raise BadInputError(
            "run", path, f"{why}; what comes before the script are options and KEY=VALUE"
        )
    try:
        compile(Path(path).read_bytes(), path, "exec")
    except (SyntaxError, ValueError) as error:
        where = f", line {error.lineno}" if isinstance(error, SyntaxError) and error.lineno else ""
        raise BadInputError("run", path, f"is not valid Python{where}: {error}") from error
    except OSError as error:
        raise BadInputError("run", path, f"cannot be read: {error.strerror}") from error


def _seconds(own: Mapping[str, str], option: str, *, otherwise: float) -> float:
    text = own.get(option, "")
    if not text:
        return otherwise
    try:
        seconds = float(text)
    except ValueError:
        seconds = -1.0
    if not 0 <= seconds < float("inf"):
        raise BadInputError(option, text, "must be a number of seconds, 0 or more")
    return seconds


def _settings(words: _Words, script: ScriptPlan) -> list[str]:
    """Return the words to parse as settings; the script names the run unless a name is given."""
    names = (
        []
        if any(w.startswith("--name") for w in words.shared)
        else [f"--name={name_of_task(script.name)}"]
    )
    return [*names, "task=bytes", *words.shared]


def run_help() -> str:
    """The text of ``run --help``."""
    lines = [
        "ddp_runner run - supervise any script that torchrun can start.",
        "",
        f"Usage:  {COMMAND} run [OPTIONS] [KEY=VALUE ...] train.py ARGS",
        f"        {COMMAND} run [OPTIONS] [KEY=VALUE ...] -m MODULE ARGS",
        "",
        *textwrap.wrap(
            "Each rank gets the variables that torchrun sets. A lost rank ends the others. With --max-restarts all "
            "ranks restart, and the script must resume from its own checkpoint: its work since then is lost.",
            _WIDTH,
        ),
        "",
        "Options:",
    ]
    for option in (*(OPTIONS[long] for long in SHARED), *OWN.values()):
        lines += option_lines(option, SAYS_OF_SHARED.get(option.long, ""))
    lines += ["", "Examples:"]
    for words, says in EXAMPLES:
        lines += [f"  {COMMAND} run {words}", f"      {says}"]
    lines += [
        "",
        "Exit codes:",
        "  0 done · 2 bad usage · 3 gave up (--max-restarts) · 130, 143 asked to stop",
        "  75 a machine is missing, or its coordinator (several machines)",
        "  otherwise that of the rank that failed first, or 128 plus its signal number",
    ]
    return "\n".join(lines)


DECLARATION = TrainCommand(help=run_help, run=run)
