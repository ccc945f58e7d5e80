"""``configure``: asks for the settings that matter most and writes them to a file. Starts nothing."""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import yaml
from rich.console import Console
from rich.prompt import Prompt
from rich.text import Text

from ddp_runner.cli.command import Arguments, SmallCommand
from ddp_runner.cli.hardware.devices import find_gpus, plan_devices
from ddp_runner.cli.hardware.machine import core_count
from ddp_runner.cli.hardware.machine_checks import check_gpus, check_memory
from ddp_runner.cli.planning import preset_name
from ddp_runner.cli.several import several_machines
from ddp_runner.config import SettingsError, check_relations, resolve
from ddp_runner.config.fields import find_key, known_fields
from ddp_runner.config.foreign_values import is_fact
from ddp_runner.config.sources import HOME_FILE, PRESETS_FOLDER, from_file
from ddp_runner.core.settings.declaration import Option
from ddp_runner.kernel.rules.errors import BadInputError
from ddp_runner.kernel.rules.exits import ExitCode
from ddp_runner.kernel.system.run_files import replace_file
from ddp_runner.observe.gpus import VisibleGpus
from ddp_runner.start import COMMAND
from ddp_runner.system.torch_versions import torch_build

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from ddp_runner.core.settings import Settings

_EMPTY = "-"
# No settings: a run has them from the command line, or from such a file. With what they are without a word.
_MACHINES = {"nnodes": "1", "node_rank": "", "rdzv_endpoint": ""}
_OF_MACHINES = {
    "nnodes": "Machines: a number, or a range such as 2:4",
    "node_rank": "Number of this machine, from 0; empty: in the order of joining",
    "rdzv_endpoint": "Address where the machines meet: HOST or HOST:PORT, the same on all",
}
QUESTIONS: Mapping[str, str] = {
    "run.task": "Task: bytes, synthetic, FILE.py[:NAME] or module:NAME",
    "data.path": "File or folder of text to learn; empty: Python's own library",
    "run.device": "Device: auto, cpu or cuda",
    "run.gpus": "GPUs, such as 0,1; empty: all",
    "run.nproc_per_node": "Ranks of this machine: a number, or auto",
    **(_OF_MACHINES if several_machines().variables else {}),
    "data.batch_size": "Samples of each rank and step",
    "run.epochs": "Passes over the data",
    "optim.learning_rate": "Highest learning rate",
    "optim.precision": "Precision: auto, fp32, bf16 or fp16",
    "run.compile": "Compile the model with torch.compile: true or false",
    "data.num_workers": "Loader workers of each rank: a number, or auto",
    "checkpoint.keep_last": "Checkpoints to keep, in addition to the best",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """The facts of ``doctor`` about the machine that answers depend on."""

    gpus: VisibleGpus
    cores: int

    def usual(self, answers: Mapping[str, str]) -> Settings:
        """Return the settings that a run has if only these answers are given. Raises BadInputError as a run would."""
        given = list(answers.items())
        asked = resolve(command_line=given).settings
        devices = plan_devices(asked, found=self.gpus, cores=self.cores)
        preset = preset_name(devices, is_test=False)
        return resolve(command_line=given, preset=preset).settings


def _run(arguments: Arguments) -> int:
    """Ask and write. Raises BadInputError, also if there is no terminal to ask at."""
    path = _file(arguments.values.get("--preset"), os.environ.get("HOME", ""))
    if not (sys.stdin.isatty() and sys.stdout.isatty()):
        raise BadInputError(
            "configure", "", f"needs a terminal to ask on; without one, write {path} by hand"
        )
    machine = Machine(gpus=find_gpus(dict(os.environ), torch_build()), cores=core_count())
    console = Console(highlight=False)
    for line in (check_gpus(machine.gpus).found, f"{machine.cores} cores", check_memory().found):
        console.print(Text(f"  {line}"), soft_wrap=True)
    console.print()
    kept, answers = _known(path)
    try:
        answers = ask_all(
            machine, answers, ask=_asking(console), say=lambda text: console.print(Text(text))
        )
    except EOFError:
        raise KeyboardInterrupt from None  # Ctrl-D: nothing is written
    path.parent.mkdir(parents=True, exist_ok=True)
    replace_file(path, written(answers, kept, machine=machine).encode())
    console.print()
    console.print(
        Text(f"{path} is written; {_use(arguments.values.get('--preset'))}"), soft_wrap=True
    )
    return ExitCode.DONE


def _file(preset: str | None, home: str) -> Path:
    if preset is None:
        if not home:
            raise BadInputError("HOME", "''", "names no home folder: give --preset NAME")
        return Path(home, HOME_FILE)
    if not preset or Path(preset).name != preset or preset.startswith(".") or "\0" in preset:
        raise BadInputError("--preset", preset or "''", "must be a plain file name")
    return Path(PRESETS_FOLDER, f"{preset}.yaml")


def _use(preset: str | None) -> str:
    if preset is None:
        return "every run uses it, and all other sources override it"
    return f"{COMMAND} --preset {preset} takes it"


def _known(path: Path) -> tuple[dict[str, object], dict[str, str]]:
    """Return the content of an existing file: the settings that are not asked for, and the earlier answers."""
    kept: dict[str, object] = {}
    answers: dict[str, str] = {}
    if not path.is_file():
        return kept, answers
    resolve(files=[path])  # what is wrong in it is reported now, and not lost
    for given in from_file(path):
        known = list(known_fields())
        key = given.name if is_fact(given.name) else find_key(given.written, given.name, known)
        if key in QUESTIONS and given.name in (key, key.rpartition(".")[2]):
            answers[key] = _words(given.value)
        else:
            kept[given.name] = given.value
    return kept, answers


def ask_all(
    machine: Machine,
    known: Mapping[str, str],
    *,
    ask: Callable[[str, str, str], str],
    say: Callable[[str], object],
) -> dict[str, str]:
    """Every question, each until its answer fits those before it; only answers that change something."""
    answers: dict[str, str] = {}
    left = dict(known)  # of the questions that come
    for key, question in QUESTIONS.items():
        default = left.pop(key, None)
        if key in _MACHINES and key != "nnodes" and "nnodes" not in answers:
            continue  # there is one
        usual = _text(_without(machine, {**left, **answers}, key), key)
        default = usual if default is None else default
        answer = ask(key, question, default)
        while wrong := _wrong(machine, answers, key, answer):
            for line in wrong:
                say(f"  {line}")
            answer = ask(key, question, default)
        if answer != usual:
            answers[key] = answer
    return answers


def _wrong(machine: Machine, before: Mapping[str, str], key: str, answer: str) -> list[str]:
    """Return the problems that ``key`` with this answer adds; problems from before, as of a folder, are left out."""
    known = _problems(machine, before, knows_place=False)
    return [
        one
        for one in _problems(machine, {**before, key: answer}, knows_place=key == "rdzv_endpoint")
        if one not in known
    ]


def _problems(machine: Machine, answers: Mapping[str, str], *, knows_place: bool) -> list[str]:
    """Return the problems of a run with these answers, a line each. ``knows_place``: the machines' endpoint is given."""
    try:
        resolve(command_line=list(answers.items()))
        if answers.get("nnodes", "1") != "1":
            said = {f"--{key.replace('_', '-')}": (key, answers.get(key, "")) for key in _MACHINES}
            if not knows_place:  # it is asked for next, or was checked
                said["--rdzv-endpoint"] = ("rdzv_endpoint", "localhost")
            given = {option: one for option, one in said.items() if one[1]}
            several_machines().asked({}, {}, settings=given, own_host="")
        check_relations(machine.usual(answers))
    except BadInputError as problem:
        found = problem.problems if isinstance(problem, SettingsError) else (problem,)
        return [str(one) for one in found]
    return []


def _without(machine: Machine, answers: Mapping[str, str], key: str) -> Settings:
    """The settings where ``key`` is not given; of the default device where the others do not fit it."""
    others = {one: value for one, value in answers.items() if one != key}
    try:
        return machine.usual(others)
    except BadInputError:
        return resolve(command_line=list(others.items())).settings


def _text(settings: Settings, key: str) -> str:
    return _MACHINES[key] if key in _MACHINES else _words(_value(settings, key))


def _value(settings: Settings, key: str) -> object:
    section, _, name = key.partition(".")
    return getattr(getattr(settings, section), name)


def _words(value: object) -> str:
    """Return the value as a person types it."""
    if isinstance(value, (list, tuple)):
        return ",".join(map(str, value))
    if value is None:
        return ""
    return str(value).lower() if isinstance(value, bool) else str(value)


def _asking(console: Console) -> Callable[[str, str, str], str]:
    class Shown(Prompt):
        """Shows an empty default as such, so that an answer may clear it."""

        def render_default(self, default: object) -> Text:
            return Text(f"({default})" if default else "(empty)", "prompt.default")

        def process_response(self, value: str) -> str:
            text = value.strip()
            return "" if text == _EMPTY else text

    def ask(key: str, question: str, default: str) -> str:
        del key
        return Shown.ask(Text(question), console=console, default=default)

    return ask


def written(answers: Mapping[str, str], kept: Mapping[str, object], *, machine: Machine) -> str:
    """Return the file: the answers, the defaults as comments, and the file's other content."""
    settings = machine.usual(answers)
    lines = [f"# {COMMAND} configure; a line with # shows a default."]
    for key in QUESTIONS:
        is_machine = key in _MACHINES
        value = answers.get(key, _MACHINES[key]) if is_machine else _value(settings, key)
        flow = (
            None if isinstance(value, tuple) else False
        )  # a list on one line, as a comment needs it
        line = yaml.safe_dump(
            {key: value}, allow_unicode=True, width=10_000, default_flow_style=flow
        ).strip()
        lines.append(line if key in answers else f"# {line}")
    rest = yaml.safe_dump(dict(kept), allow_unicode=True, sort_keys=False) if kept else ""
    return "\n".join(lines) + "\n" + rest


DECLARATION = SmallCommand(
    usage=f"""Usage:  {COMMAND} configure [--preset NAME]

Asks for the most important settings and writes them to a file. Enter keeps the
value in brackets, - empties it. Each answer is checked at once.
The file is written after the last answer.""",
    options=(
        Option(
            "--preset",
            metavar="NAME",
            says=f"write presets/NAME.yaml, for --preset NAME [~/{HOME_FILE}, for every run]",
        ),
    ),
    perform=_run,
)
