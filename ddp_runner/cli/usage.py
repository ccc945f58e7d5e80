"""The help texts, made from the tables of options and settings. Every line fits 80 columns."""

from __future__ import annotations

import textwrap

from ddp_runner.cli.command import HELP_COLUMNS, entry
from ddp_runner.cli.commands import commands
from ddp_runner.cli.parser import GROUPS, OPTIONS
from ddp_runner.config.fields import FieldSpec, known_fields
from ddp_runner.config.meanings import meanings
from ddp_runner.config.presets import PRESETS, RECIPES
from ddp_runner.core.injection import PHASES, InjectKind
from ddp_runner.core.settings.declaration import OnResume, Option
from ddp_runner.start import COMMAND

EXAMPLES = (
    ("", "train on this machine's own text"),
    ("--test", "check that everything works here"),
    ("--data ~/books -e 3", "your text, three passes"),
    ("--gpus 0,2 -b 64", "two GPUs, 64 samples on each"),
    ("--task my.py lr=3e-4", "your own task"),
    ("--config run.yaml", "settings from a file"),
    ("--config run.yaml --stage tune", "start at its stage tune"),
    ("--engine ray --nnodes 2:4", "on machines of a Ray cluster"),
    ("--task my.py --find-batch-size", "largest batch that fits"),
    ("--task my.py --find-lr", "find a learning rate"),
)
_EXIT_CODES = (
    "0 done · 1 failed · 2 bad usage or configuration · 3 gave up",
    "75 preempted and saved: run the same command again · 130 interrupted, saved",
)


_ON_RESUME = {
    OnResume.REFUSED: " Refused on resume.",
    OnResume.REPORTED: " Reported on resume.",
    OnResume.CANNOT_MATTER: "",
}
INJECTIONS = (
    ("  kinds", ", ".join(kind.value for kind in InjectKind)),
    ("  rank=N|all", "the rank [the last one]"),
    ("  step=N", "the step, counted from 0 [10]"),
    ("  phase=PHASE", ", ".join(PHASES) + " [forward]"),
    ("  times=N", "number of times on each rank [1]"),
    ("  seconds=S", "duration of slow, disk_full and slow_disk [1]"),
    ("  bit=N", "bit that wrong_gradient flips, counted from the lowest [12]"),
    (
        "  random:KEY=VALUE,...",
        (
            "at random moments, the same for the same seed: mean gap mtbf_s=S [10], seed=N [0], "
            "kinds=KIND+KIND [kill+stop+raise], times=N [0: no limit]"
        ),
    ),
)


def train_help() -> str:
    """The text of ``--help``."""
    lines = [
        "ddp_runner - training that keeps going.",
        "",
        f"Usage:  {COMMAND} [OPTIONS] [SECTION.KEY=VALUE ...]",
        f"        {COMMAND} COMMAND [--help]",
        "",
        "Ctrl-C finishes the step, saves and ends; run the same command again to resume.",
    ]
    for group in GROUPS:
        lines += ["", f"{group.title}:"]
        for option in group.options:
            lines += entry(
                _flags(option),
                option.says + (f" [{default}]" if (default := default_of(option)) else ""),
            )
    lines += ["", "Faults on request: --inject KIND:KEY=VALUE,..."]
    for left, right in INJECTIONS:
        lines += entry(left, right)
    lines += ["", "Settings:"]
    lines += textwrap.wrap(
        "Any setting can be given as SECTION.KEY=VALUE, or without its section where only one "
        "section has such a key: num_workers=2 save_every_steps=50 hidden_size=256. Arguments of "
        "your own task are task.NAME=VALUE. Order: default < ~/.config/ddp_runner.yaml < --preset "
        "< --config < environment (DDP_RUNNER_DATA__BATCH_SIZE=8) < command line.",
        HELP_COLUMNS,
        initial_indent="  ",
        subsequent_indent="  ",
    )
    lines += ["", "Commands:"]
    for name, row in commands().items():
        lines += entry(f"  {name}", row.says)
    lines += ["", "Examples:"]
    lines += [
        f"  {f'{COMMAND} {words}':<43} {says}" for words, says in EXAMPLES if _is_known(words)
    ]
    lines += ["", "Exit codes:", *(f"  {line}" for line in _EXIT_CODES)]
    return "\n".join(lines)


def _is_known(example: str) -> bool:
    """Return False for an example with an option of a feature that was deleted."""
    return all(word in OPTIONS for word in example.split() if word.startswith("--"))


def settings_help() -> str:
    """The text of ``--help-settings``: every setting with its default, meaning and legal values."""
    lines = textwrap.wrap(
        "Every setting with its default and meaning. A change that is refused on resume needs "
        "another run; after a change that is reported, the run continues and is not exact.",
        HELP_COLUMNS,
    )
    section = ""
    for key, spec in known_fields().items():
        this_section, _, name = key.partition(".")
        if this_section != section:
            section = this_section
            lines += ["", f"{section}:"]
        lines.append(f"  {name} = {shown_default(spec)}")
        says = f"{meanings()[key]} Legal: {spec.expected()}.{_ON_RESUME[spec.on_resume]}"
        lines += textwrap.wrap(
            says,
            HELP_COLUMNS,
            initial_indent=" " * 6,
            subsequent_indent=" " * 6,
            break_on_hyphens=False,
        )
    return "\n".join(lines)


def _flags(option: Option) -> str:
    short = f"{option.short}, " if option.short else "    "
    return f"  {short}{option.long}{' ' + option.metavar if option.metavar else ''}"


def default_of(option: Option) -> str:
    """The default that the help shows; empty for a switch, and where it is nothing."""
    if option.default:
        return option.default
    spec = known_fields().get(option.key)
    if spec is None or not option.metavar or spec.default in ("", ()):
        return ""
    return shown_default(spec)


def shown_default(spec: FieldSpec) -> str:
    """The default, and what presets and the recipes of built-in tasks make of it, as people write them."""
    found = f"{_shown(spec.default)}"
    for preset, where in (("gpu", "on GPUs"), ("cpu", "on the CPU")):
        if PRESETS[preset].get(spec.key, spec.default) != spec.default:
            found += f"; {where} {_shown(PRESETS[preset][spec.key])}"
        for value, tasks in _by_recipe(spec, preset).items():
            found += f"; {where} {_shown(value)} for {' and '.join(tasks)}"
    return found


def _by_recipe(spec: FieldSpec, preset: str) -> dict[object, list[str]]:
    """The built-in tasks that have another default, by what it is."""
    found: dict[object, list[str]] = {}
    for task, recipe in RECIPES.get(preset, {}).items():
        if recipe.get(spec.key, spec.default) != spec.default:
            found.setdefault(recipe[spec.key], []).append(task)
    return found


def _shown(value: object) -> str:
    if isinstance(value, tuple) and value:
        return ",".join(str(item) for item in value)
    if value in ("", ()):
        return "(empty)"
    return str(value).lower() if value is None or isinstance(value, bool) else str(value)
