"""``run``: any script that torchrun starts, supervised. What can be wrong is found before a process starts."""

from __future__ import annotations

import importlib.util
import os
import shlex
import sys
import textwrap
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from ddp_runner.cli.options import LONG_OF_SHORT, OPTIONS, Option
from ddp_runner.cli.parser import parse_train
from ddp_runner.cli.train import allow_open_files, plan_launch
from ddp_runner.config.run_names import name_of_task
from ddp_runner.core.faults import BadInputError
from ddp_runner.core.plain_rank import plain_rank
from ddp_runner.core.script import GRACE_AT_STOP_S, ResumeWith, ScriptPlan
from ddp_runner.core.secrets import masked_words
from ddp_runner.start import COMMAND
from ddp_runner.version import VERSION

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

_WIDTH, _INDENT = 79, 28
# Options of ``train`` that mean the same here.
_SHARED = (
    *("--nproc-per-node", "--gpus", "--cpu", "--name", "--log-dir"),
    *("--config", "--max-restarts", "--debug"),
)
# Where they mean a little less.
_SAYS = {
    "--name": "of this run: it writes to logs/NAME [the script's]",
    "--max-restarts": "restarts of all ranks within an hour; without it none",
}
_OWN = {
    option.long: option
    for option in (
        Option(
            long="--module", short="-m", metavar="MODULE", says="run a module, as python -m does"
        ),
        Option(
            long="--grace-period",
            metavar="SECONDS",
            says="from SIGTERM to SIGKILL when the run is asked to stop [30]",
        ),
        Option(
            long="--hang-timeout",
            metavar="SECONDS",
            says="from the first step on: without a step, a collective, a line or "
            "ddp_runner.heartbeat() of any rank it is a fault [no limit]",
        ),
        Option(
            long="--preload",
            metavar="A,B",
            says="modules to import once, before the ranks are forked, such as transformers",
        ),
        Option(
            long="--master-port", key="ddp.port", metavar="PORT", says="of the store [any free]"
        ),
        Option(
            long="--resume-with",
            metavar="GLOB:WORDS",
            says="words that are added at each start at which such a file exists, as in "
            "'out/ckpt.pt:--resume out/ckpt.pt'; may be repeated",
        ),
        Option(
            long="--from-scratch",
            says="a restart may begin at the beginning, though an attempt before has saved",
        ),
        Option(
            long="--plain-saves", says="leave torch.save as it is: else a file is replaced whole"
        ),
        Option(long="--standalone", says="accepted: there is one machine"),
    )
}
_SHORT = {
    "-m": "--module",
    **{short: long for short, long in LONG_OF_SHORT.items() if long in _SHARED},
}
# Of torchrun, with no meaning here, or none that could be kept.
_ONE_MACHINE_ONLY = "is for several machines, which are not in this version"
_REFUSED = {
    "--nnodes": f"must be 1: more {_ONE_MACHINE_ONLY}",
    "--node-rank": _ONE_MACHINE_ONLY,
    "--rdzv-endpoint": _ONE_MACHINE_ONLY,
    "--rdzv-id": _ONE_MACHINE_ONLY,
    "--rdzv-conf": _ONE_MACHINE_ONLY,
    "--rdzv-backend": _ONE_MACHINE_ONLY,
    "--no-python": "is not in this version: give a Python file, or -m MODULE",
    "--start-method": "is not needed: ranks are forked from a process that has torch imported",
    "--redirects": "is not needed: each rank has its own log file below --log-dir",
    "--tee": "is not needed: rank 0 is shown, and each rank has its own log file",
}
_EXAMPLES = (
    ("train.py --lr 1e-3", "two ranks on the CPU, or one per GPU"),
    ("-n 4 train.py", "as torchrun --nproc-per-node 4 train.py"),
    ("--max-restarts 3 train.py", "started again from its own checkpoint"),
    ("-m package.train --epochs 3", "a module, as python -m"),
)


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
    script = _script(sorted_words)
    plan = plan_launch(parse_train(_settings(sorted_words, script)), words=words)
    if plan.origins["recovery.max_restarts"] not in ("default", "preset"):
        script = replace(script, restarts=True)
    settings = plan.settings
    # There is no checkpoint of ours, and one folder: what looks for both finds it.
    of_run = replace(settings.run, checkpoint_dir=settings.run.log_dir)
    recovery = replace(settings.recovery, warm_spare=False, drill_at=None)
    plan = replace(
        plan,
        settings=replace(settings, run=of_run, recovery=recovery),
        command=(*plan.command[:3], "run", *masked_words(words)),
        notes=(*plan.notes, *_thread_notes(plan.threads_per_rank)),
        script=script,
    )
    allow_open_files(plan.world_size)
    # Imported here, so that --help and wrong input answer without loading the supervisor.
    from ddp_runner.supervisor.loop import supervise  # noqa: PLC0415

    return supervise(plan)


def _thread_notes(threads: int) -> tuple[str, ...]:
    own = os.environ.get("OMP_NUM_THREADS")
    if own:
        return (f"OMP_NUM_THREADS={own} of your environment is kept",)
    return (f"OMP_NUM_THREADS={threads} for each rank: the cores, shared out; torchrun sets 1",)


def _sort(words: Sequence[str]) -> _Words:
    """Options and settings up to the script, or the module; what follows is the script's."""
    found = _Words(shared=[], own={}, resume_with=[], rest=[])
    rest = list(words)
    while rest:
        word = rest.pop(0)
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


def _is_last(word: str, rest: list[str], found: _Words) -> bool:
    """Take an option, and its value off ``rest``. True for one behind which none of ours comes."""
    name, _, attached = word.partition("=")
    if not word.startswith("--"):
        name, attached = word[:2], word[2:].removeprefix("=")
    long = _SHORT.get(name, name.replace("_", "-").lower())
    if long in ("--help", "-h", "--version"):
        found.own["--help" if long == "-h" else long] = ""
        return True
    if long in _REFUSED:
        value = attached or (rest.pop(0) if rest and not rest[0].startswith("-") else "")
        if (long, value) not in (("--nnodes", "1"), ("--nnodes", "1:1")):
            raise BadInputError(long, value, _REFUSED[long])
        return False
    option = _OWN.get(long) or (OPTIONS[long] if long in _SHARED else None)
    if option is None:
        raise BadInputError(
            word, "", "unknown option; run --help lists them. The script's own words follow it"
        )
    value = _value(option, attached, rest)
    if option.long == "--resume-with":
        found.resume_with.append(value)
    elif option.long in _OWN:
        found.own[option.long] = value
    if option.key and option.long in _OWN:
        found.shared.append(f"{option.key}={value}")
    elif option.long not in _OWN:
        found.shared.append(f"{option.long}={value}" if option.metavar else option.long)
    return option.long == "--module"


def _value(option: Option, attached: str, rest: list[str]) -> str:
    if not option.metavar:
        return ""
    if attached:
        return attached
    if not rest:
        raise BadInputError(option.long, "", f"needs a value: {option.long} {option.metavar}")
    return rest.pop(0)


def _script(words: _Words) -> ScriptPlan:
    module = words.own.get("--module", "")
    path, arguments = "", words.rest
    if not module:
        if not words.rest:
            raise BadInputError("run", "", f"needs a script: {COMMAND} run [OPTIONS] train.py ARGS")
        path, arguments = words.rest[0], words.rest[1:]
        _check_file(path)
        path = str(Path(path).absolute())
    elif not _is_found(module):
        raise BadInputError("-m", module, "no module of this name is found from here")
    return ScriptPlan(
        path=path,
        module=module,
        arguments=tuple(arguments),
        restarts=bool(words.resume_with),
        grace_period_s=_seconds(words.own, "--grace-period", otherwise=GRACE_AT_STOP_S),
        hang_timeout_s=_seconds(words.own, "--hang-timeout", otherwise=0.0),
        resume_with=tuple(map(_resume_with, words.resume_with)),
        from_scratch="--from-scratch" in words.own,
        plain_saves="--plain-saves" in words.own,
        preload=_preload(words.own.get("--preload", "")),
    )


def _preload(text: str) -> tuple[str, ...]:
    names = tuple(name for name in text.split(",") if name)
    for name in names:
        if importlib.util.find_spec(name.partition(".")[0]) is None:
            raise BadInputError("--preload", name, "no module of this name is installed")
    return names


def _resume_with(text: str) -> ResumeWith:
    pattern, colon, words = text.partition(":")
    split = shlex.split(words)
    if not (pattern and colon and split):
        raise BadInputError(
            "--resume-with", text, "must be a file and words for the script: GLOB:WORDS"
        )
    return ResumeWith(pattern=pattern, words=tuple(split))


def _check_file(path: str) -> None:
    if not Path(path).is_file():
        raise BadInputError(
            "run", path, "no such file; what comes before the script are options and KEY=VALUE"
        )
    try:
        compile(Path(path).read_bytes(), path, "exec")
    except (SyntaxError, ValueError) as error:
        where = f", line {error.lineno}" if isinstance(error, SyntaxError) and error.lineno else ""
        raise BadInputError(
            "run", path, f"is no Python that can be read{where}: {error}"
        ) from error
    except OSError as error:
        raise BadInputError("run", path, f"cannot be read: {error.strerror}") from error


def _is_found(module: str) -> bool:
    """Whether ``python -m`` would find it; only its parents are imported, as there."""
    sys.path.insert(0, str(Path.cwd()))
    try:
        return importlib.util.find_spec(module) is not None
    except (ImportError, ValueError):
        return False
    finally:
        del sys.path[0]


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
    """What is parsed as settings: a run is called as the script is."""
    names = (
        []
        if any(w.startswith("--name") for w in words.shared)
        else [f"--name={name_of_task(script.name)}"]
    )
    return [*names, "task=bytes", *words.shared]


def run_help() -> str:
    """The text of ``run --help``."""
    lines = [
        "ddp_runner run - any script that torchrun starts, supervised.",
        "",
        f"Usage:  {COMMAND} run [OPTIONS] [KEY=VALUE ...] train.py ARGS",
        f"        {COMMAND} run [OPTIONS] [KEY=VALUE ...] -m MODULE ARGS",
        "",
        *textwrap.wrap(
            "Each rank finds the variables that torchrun sets. A rank that is lost ends the others, and with "
            "--max-restarts all start again, from the script's own checkpoint: what it did since then is lost, "
            "and it must resume by itself.",
            _WIDTH,
        ),
        "",
        "Options:",
    ]
    for option in (*(OPTIONS[long] for long in _SHARED), *_OWN.values()):
        flags = f"  {option.short}, {option.long}" if option.short else f"      {option.long}"
        if option.metavar:
            flags += f" {option.metavar}"
        lines += _entry(flags, _SAYS.get(option.long, option.says))
    lines += ["", "Examples:"]
    for words, says in _EXAMPLES:
        lines += [f"  {COMMAND} run {words}", f"      {says}"]
    lines += [
        "",
        "Exit codes:",
        "  0 done · 2 bad usage · 3 restart budget spent · 130, 143 asked to stop",
        "  else that of the rank that failed first; 128 and the number of its signal",
    ]
    return "\n".join(lines)


def _entry(left: str, right: str) -> list[str]:
    wrapped = textwrap.wrap(right, _WIDTH - _INDENT)
    first = f"{left:<{_INDENT}}{wrapped[0]}" if len(left) < _INDENT else left
    rest = wrapped[1:] if len(left) < _INDENT else wrapped
    return [first, *(" " * _INDENT + line for line in rest)]
