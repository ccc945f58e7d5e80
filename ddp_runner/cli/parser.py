"""The options of ``train`` as a table, and its words read by it: files and assignments. ``config`` judges values.

The option of a setting stands at its field, in ``core.settings``; here are those that are no settings.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from ddp_runner import installed
from ddp_runner.config.fields import ForeignNameError, find_key, key_of, known_fields
from ddp_runner.config.foreign_values import is_fact, is_foreign_switch
from ddp_runner.config.sources import named_file, preset_file
from ddp_runner.config.suggest import nearest
from ddp_runner.core.settings.declaration import SWITCH, TEXT, Option, OptionGroup
from ddp_runner.kernel.rules.errors import BadInputError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ddp_runner.cli.command import Instead

_ASSIGNMENT = re.compile(r"^([A-Za-z_][\w.-]*)=(.*)$", re.DOTALL)
_NEGATIVE_NUMBER = re.compile(r"^-\.?\d")
_SEE_HELP = "; --help lists the options"
_DRY_RUN = "--dry-run"
_PAGES = ("--help", "--help-settings", "--version")


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """Options that the help shows under one heading."""

    title: str
    options: tuple[Option, ...]


# Of features: what is done instead of training, by the option that asks for it.
INSTEAD: dict[str, Instead] = {
    one.option.long: one
    for words in installed.parts("words")
    for one in getattr(words, "INSTEAD", ())
}
_OF_FEATURES: tuple[Option, ...] = (
    *(option for words in installed.parts("words") for option in getattr(words, "OPTIONS", ())),
    *(one.option for one in INSTEAD.values()),
)
# Those that are neither a setting nor done instead of training: of a run on several machines.
OF_NODES = tuple(one.long for one in _OF_FEATURES if not one.key and one.long not in INSTEAD)
_OWN = (
    Option(
        "--preset",
        metavar="NAME",
        group=OptionGroup.FILES,
        says="settings of presets/NAME.yaml; --config overrides them",
    ),
    Option(
        "--config",
        metavar="FILE",
        aliases=("--config-name",),
        group=OptionGroup.FILES,
        says="YAML file of settings; may be repeated, later files override earlier ones",
    ),
    *_OF_FEATURES,
    Option("--help", short="-h", group=OptionGroup.HELP, says="show this text"),
    Option(
        "--help-settings",
        group=OptionGroup.HELP,
        says="show every setting: meaning, default, legal values",
    ),
    Option("--version", group=OptionGroup.HELP, says="show the version"),
)
_OF_SETTINGS = tuple(option for spec in known_fields().values() for option in spec.options)
_OWN_FIRST = (
    OptionGroup.MACHINES,
)  # where the others are about a run of which these say that there is one


def _group(heading: OptionGroup) -> Group:
    """Return the group, in the order of the settings."""
    own, others = ([one for one in some if one.group is heading] for some in (_OWN, _OF_SETTINGS))
    options = (*own, *others) if heading in _OWN_FIRST else (*others, *own)
    return Group(title=heading.value, options=options)


GROUPS = tuple(_group(heading) for heading in OptionGroup)
OPTIONS = {option.long: option for group in GROUPS for option in group.options}
LONG_OF_SHORT = {option.short: option.long for option in OPTIONS.values() if option.short}
LONG_OF_ALIAS = {alias: option.long for option in OPTIONS.values() for alias in option.aliases}


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """The search that is asked for. ``option``: its name, "" for none; ``value``: its text; ``words``: all other words."""

    option: str = ""
    value: str = ""
    words: tuple[str, ...] = ()


NOTHING = Finding()


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainArguments:
    """The parsed arguments. ``page`` is the help option that was given, "" for training.

    ``assignments`` are pairs of a name as the user wrote it (long form) and its text, in order.
    ``is_dry``: nothing is trained, nor written. ``finding``: what is looked for instead of training.
    ``nodes``: the options of a run on several machines.
    """

    files: tuple[Path, ...] = ()
    assignments: tuple[tuple[str, str], ...] = ()
    page: str = ""
    is_dry: bool = False
    finding: Finding = NOTHING
    nodes: tuple[tuple[str, str], ...] = ()

    @property
    def instead(self) -> str:
        """The option that asks for something else than training; empty for training."""
        return self.finding.option or (_DRY_RUN if self.is_dry else "")


def parse_train(words: Sequence[str]) -> TrainArguments:
    """Parse the words behind ``train``. Raises BadInputError for the first not understood."""
    files: list[Path] = []
    presets: list[Path] = []
    assignments: list[tuple[str, str]] = []
    nodes: list[tuple[str, str]] = []
    page = ""
    finding = split_off_finding(words)
    rest = list(finding.words)
    only_settings = is_dry = False
    while rest:
        word = rest.pop(0)
        if word == "--":
            only_settings = True
        elif word.startswith("-") and word != "-" and not only_settings:
            option, attached = _option(word)
            if option.long in _PAGES:
                page = page or option.long
            elif option.long in INSTEAD:  # a switch: those with a value were split off
                if attached is not None:
                    raise BadInputError(option.long, attached, "takes no value")
                is_dry = True
            elif option.long in OF_NODES:
                nodes.append((option.long, _given(option.long, "", _value(option, attached, rest))))
            elif option.long == "--config":
                text = _given(option.long, "", _value(option, attached, rest))
                files.append(named_file(text) if is_config_name(word) else Path(text))
            elif option.long == "--preset":
                name = _given(option.long, "", _value(option, attached, rest))
                presets.append(preset_file(name))
            else:
                text = _value(option, attached, rest)
                assignments.append((_name(option), _given(option.long, option.key, text)))
        else:
            name, text = _setting(word)
            assignments.append((name, _given(name, name, text)))
    _refuse_both(finding, is_dry=is_dry)
    return TrainArguments(
        files=(*presets, *files),
        assignments=tuple(assignments),
        page=page,
        is_dry=is_dry,
        finding=finding,
        nodes=tuple(nodes),
    )


def is_config_name(word: str) -> bool:
    """Return True if ``word`` is Hydra's option for a file, whose ending may be left out."""
    return word.partition("=")[0].replace("_", "-").lower() == "--config-name"


def _refuse_both(finding: Finding, *, is_dry: bool) -> None:
    if is_dry and finding.option:
        expected = f"trains nothing, and {finding.option} trains: give one of them"
        raise BadInputError(_DRY_RUN, "", expected)


def _given(written: str, name: str, text: str) -> str:
    """``text``; refused where it is empty and would name something: as of a variable that is not set.

    What is left out has a default; an empty path or task would be that in silence.
    """
    if text:
        return text
    try:
        spec = known_fields().get(find_key(written, name.removeprefix("--"), list(known_fields())))
    except BadInputError:  # reported with all others that are wrong
        spec = None
    if written in ("--config", "--preset", *OF_NODES) or (
        spec is not None and spec.written is TEXT
    ):
        raise BadInputError(written, "''", "is empty; give a value, or leave it out")
    return text


def _name(option: Option) -> str:
    """Return the name of the option's setting for messages: the option, if that names the same setting."""
    same = key_of(option.long[2:], list(known_fields())) == option.key
    return option.long if same else option.key


def _setting(word: str) -> tuple[str, str]:
    match = _ASSIGNMENT.match(word)
    if match is None:
        raise BadInputError(
            word or "''", "", f"unexpected word{_meant_option(word)}; settings are KEY=VALUE"
        )
    return match.group(1), match.group(2)


def _meant_option(word: str) -> str:
    """A hint for an option whose dashes were forgotten, such as ``debug`` or ``epochs 3``."""
    long = f"--{word.replace('_', '-')}"
    return f"; did you mean {long}?" if long in OPTIONS else ""


def _option(word: str) -> tuple[Option, str | None]:
    """The option that ``word`` names and the value attached to it (``--x=1``, ``-b8``), if any."""
    if word.startswith("--"):
        written, has_value, value = word.partition("=")
        attached = value if has_value else None
        long = written.replace("_", "-").lower()
        long = LONG_OF_ALIAS.get(long, long)
        return OPTIONS.get(long) or _setting_as_option(written), attached
    option = OPTIONS.get(LONG_OF_SHORT.get(word[:2], ""))
    if option is None:
        raise BadInputError(word, "", f"unknown option{_nearest(word) or _SEE_HELP}")
    attached = word[2:].removeprefix("=") if len(word) > 2 else None
    if attached is not None and not option.metavar:
        raise BadInputError(word, "", f"unknown option{_nearest(word) or _SEE_HELP}")
    return option, attached


def _setting_as_option(written: str) -> Option:
    """``--num-workers 2`` and ``--data.num_workers 2``: any setting may be written as an option."""
    name = written[2:]
    if is_foreign_switch(name) or is_fact(name):
        return Option(f"--{name}", key=f"--{name}", metavar="VALUE", says="")
    try:
        key = find_key(written, name, list(known_fields()))
    except ForeignNameError as foreign:
        answer = foreign.expected.replace("setting", "option", 1)
        raise BadInputError(written, "", answer) from None
    except BadInputError as unknown:
        hint = _nearest(written)
        if not hint:
            hint = unknown.expected.removeprefix("unknown setting") or _SEE_HELP
        raise BadInputError(written, "", f"unknown option{hint}") from None
    return Option(f"--{name}", key=f"--{name}", metavar="VALUE", says=key)


def _nearest(written: str) -> str:
    near = nearest(written, OPTIONS)
    return f"; did you mean {near}?" if near else ""


def _value(option: Option, attached: str | None, rest: list[str]) -> str:
    """The option's text: attached, a switch's constant, or the next word."""
    if attached is not None:
        if not option.metavar and option.constant != "true":
            raise BadInputError(option.long, attached, "takes no value")
        return attached
    if not option.metavar:
        return option.constant
    spec = known_fields().get(option.says)
    if rest and (not rest[0].startswith("-") or _NEGATIVE_NUMBER.match(rest[0]) or rest[0] == "-"):
        return rest.pop(0)
    if is_foreign_switch(option.long[2:]) or (spec is not None and spec.written is SWITCH):
        return "true"
    raise BadInputError(option.long, "", f"needs a value: {option.long} {option.metavar}")


def split_off_finding(words: Sequence[str]) -> Finding:
    """Find such an option. Raises BadInputError for two of them, and for an empty value."""
    option, value = "", ""
    others: list[str] = []
    rest = list(words)
    while rest:
        word = rest.pop(0)
        written, has_value, attached = word.partition("=")
        long = written.replace("_", "-").lower()
        if word == "--":
            others += [word, *rest]
            break
        pattern = INSTEAD[long].value if long in INSTEAD else None
        if pattern is None:
            others.append(word)
            continue
        if option and long != option:
            raise BadInputError(long, "", f"and {option} are two commands: give one of them")
        if has_value and not attached:
            raise BadInputError(long, "''", "is empty; give a value, or leave it out")
        if not has_value and rest and pattern.fullmatch(rest[0]):
            attached = rest.pop(0)
        option, value = long, attached
    return Finding(option=option, value=value, words=tuple(others))
