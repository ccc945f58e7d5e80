"""``configure``: asks for the settings that matter most and writes them to a file. Starts nothing."""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import yaml
from rich.console import Console
from rich.prompt import InvalidResponse, Prompt
from rich.text import Text

from ddp_runner.cli.arguments import parse_small
from ddp_runner.cli.devices import find_gpus, plan_devices
from ddp_runner.cli.doctor import check_gpus, check_memory
from ddp_runner.cli.machine import core_count
from ddp_runner.cli.train import preset_name
from ddp_runner.config import SettingsError, check_relations, resolve
from ddp_runner.config.fields import find_key, known_fields
from ddp_runner.config.sources import from_file
from ddp_runner.config.user_files import HOME_FILE, PRESETS_FOLDER
from ddp_runner.core.errors import BadInputError
from ddp_runner.core.exits import ExitCode
from ddp_runner.observe.gpus import VisibleGpus
from ddp_runner.start import COMMAND
from ddp_runner.system.run_files import replace_file
from ddp_runner.system.torch_versions import torch_build

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from ddp_runner.core.settings import Settings

HELP = f"""Usage:  {COMMAND} configure [--preset NAME]

Asks for the ten settings that matter most and writes them to a file; Enter keeps
what stands in brackets. Nothing is written before the last answer.

      --preset NAME         write presets/NAME.yaml, for --preset NAME
                            [~/{HOME_FILE}, for every run]"""
_PRESET = ("--preset", "--preset")
QUESTIONS: Mapping[str, str] = {
    "run.task": "What is trained: bytes, synthetic, FILE.py[:NAME] or module:NAME",
    "data.path": "File or folder of text, for the task bytes; empty: Python's own library",
    "run.device": "Where to compute: auto, cpu or cuda",
    "run.nproc_per_node": "Ranks: a number, or auto",
    "data.batch_size": "Samples of each rank and step",
    "run.epochs": "Passes over the data",
    "optim.learning_rate": "Highest learning rate",
    "optim.precision": "Precision: auto, fp32, bf16 or fp16",
    "data.num_workers": "Loader workers of each rank: a number, or auto",
    "checkpoint.keep_last": "Checkpoints to keep, beside the best",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """What ``doctor`` knows of it that answers depend on."""

    gpus: VisibleGpus
    cores: int

    def usual(self, answers: Mapping[str, str]) -> Settings:
        """What the settings are where only these are given. Raises BadInputError as a run would."""
        given = list(answers.items())
        asked = resolve(command_line=given).settings
        devices = plan_devices(asked, found=self.gpus, cores=self.cores)
        preset = preset_name(devices, is_test=False)
        return resolve(command_line=given, preset=preset).settings


def run(words: Sequence[str]) -> int:
    """Ask and write. Raises BadInputError, also where nobody can be asked."""
    arguments = parse_small(words, valued=(_PRESET,))
    if arguments.wants_help:
        print(HELP)
        return ExitCode.DONE
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
        raise BadInputError("--preset", preset or "''", "must be a plain name, as of a file")
    return Path(PRESETS_FOLDER, f"{preset}.yaml")


def _use(preset: str | None) -> str:
    if preset is None:
        return "every run takes it, below all that is given otherwise"
    return f"{COMMAND} --preset {preset} takes it"


def _known(path: Path) -> tuple[dict[str, object], dict[str, str]]:
    """Of a file that is there: what is not asked for, which stays, and the answers of then."""
    kept: dict[str, object] = {}
    answers: dict[str, str] = {}
    if not path.is_file():
        return kept, answers
    resolve(files=[path])  # what is wrong in it is reported now, and not lost
    for given in from_file(path):
        key = find_key(given.written, given.name, list(known_fields()))
        if key in QUESTIONS and given.name in (key, key.rpartition(".")[2]):
            answers[key] = str(given.value)
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
    """Every question, again until the answers fit each other; only answers that change something."""
    answers = dict(known)
    while True:
        for key, question in QUESTIONS.items():
            usual = _text(_without(machine, answers, key), key)
            answer = ask(key, question, answers.get(key, usual))
            if answer == usual:
                answers.pop(key, None)
            else:
                answers[key] = answer
        try:
            check_relations(machine.usual(answers))
        except BadInputError as problem:
            problems = problem.problems if isinstance(problem, SettingsError) else (problem,)
            for one in problems:
                say(str(one))
            continue
        return answers


def _without(machine: Machine, answers: Mapping[str, str], key: str) -> Settings:
    """The settings where ``key`` is not given; of the default device where the others do not fit it."""
    others = {one: value for one, value in answers.items() if one != key}
    try:
        return machine.usual(others)
    except BadInputError:
        return resolve(command_line=list(others.items())).settings


def _text(settings: Settings, key: str) -> str:
    section, _, name = key.partition(".")
    return str(getattr(getattr(settings, section), name))


def _asking(console: Console) -> Callable[[str, str, str], str]:
    def ask(key: str, question: str, default: str) -> str:
        class Legal(Prompt):
            """Asks again until the setting takes the answer."""

            def process_response(self, value: str) -> str:
                text = value.strip()
                try:
                    resolve(command_line=[(key, text)])
                except BadInputError as problem:
                    raise InvalidResponse(f"  {problem}") from None
                return text

            def on_validate_error(self, value: str, error: InvalidResponse) -> None:
                del value
                self.console.print(Text(str(error.message)), soft_wrap=True)

        return Legal.ask(Text(question), console=console, default=default)

    return ask


def written(answers: Mapping[str, str], kept: Mapping[str, object], *, machine: Machine) -> str:
    """The file: what was answered, what is usual as comments, and what stood there besides."""
    settings = machine.usual(answers)
    lines = [f"# {COMMAND} configure; a line with # is as it is anyway."]
    for key in QUESTIONS:
        section, _, name = key.partition(".")
        value = getattr(getattr(settings, section), name)
        line = yaml.safe_dump({key: value}, allow_unicode=True, width=10_000).strip()
        lines.append(line if key in answers else f"# {line}")
    rest = yaml.safe_dump(dict(kept), allow_unicode=True, sort_keys=False) if kept else ""
    return "\n".join(lines) + "\n" + rest
