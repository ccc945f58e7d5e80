"""Reads what the user wrote: YAML files, environment, command line. Judges no value."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import yaml

from ddp_runner.config.fields import TASK_SECTION, sections
from ddp_runner.config.foreign import ALIASES
from ddp_runner.core.faults import BadInputError

if TYPE_CHECKING:
    from pathlib import Path

Origin = Literal["default", "preset", "file", "environment", "command line"]

ENVIRONMENT_PREFIX = "DDP_RUNNER_"
# Read by launch_training.sh and cli/launch.py, or set by the run for its own processes.
RESERVED_VARIABLES = frozenset(
    {
        "DDP_RUNNER_PYTHON",
        "DDP_RUNNER_LAUNCHED",
        "DDP_RUNNER_FOLDERS",
        "DDP_RUNNER_PLAIN_RANK",
        "DDP_RUNNER_MARK",
        "DDP_RUNNER_TOKEN",
        "DDP_RUNNER_ENDPOINT_FD",
        "DDP_RUNNER_ENV_FILE_NAMES",
    }
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Assignment:
    """``name`` shall be ``value``. ``written`` is how a message names it to the person."""

    written: str
    name: str
    value: object
    origin: Origin


class _Loader(yaml.SafeLoader):
    """YAML as people mean it: 1e-4 is a number, a date stays text, a repeated key is an error."""

    yaml_implicit_resolvers = {  # noqa: RUF012 - PyYAML's own shape
        first: [
            (tag, pattern)
            for tag, pattern in resolvers
            if tag not in ("tag:yaml.org,2002:float", "tag:yaml.org,2002:timestamp")
        ]
        for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen = set()
        for key_node, _ in node.value:
            if isinstance(key_node, yaml.ScalarNode) and key_node.value in seen:
                raise yaml.constructor.ConstructorError(
                    problem=f"{key_node.value!r} is given twice", problem_mark=key_node.start_mark
                )
            seen.add(key_node.value if isinstance(key_node, yaml.ScalarNode) else id(key_node))
        return super().construct_mapping(node, deep=deep)


_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float",
    re.compile(
        r"^[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?$"
        r"|^[-+]?\.(inf|Inf|INF)$|^\.(nan|NaN|NAN)$"
    ),
    list("-+0123456789."),
)


def parse_yaml(text: str) -> object:
    """The value that ``text`` holds. Raises yaml.YAMLError."""
    return yaml.load(text, Loader=_Loader)  # noqa: S506 - _Loader is a SafeLoader


def from_file(path: Path) -> list[Assignment]:
    """The assignments of one YAML file. Raises BadInputError if it is not a mapping of settings."""
    try:
        content = parse_yaml(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise BadInputError("--config", path, "no such file") from None
    except IsADirectoryError:
        raise BadInputError("--config", path, "is a folder; give a YAML file") from None
    except UnicodeDecodeError:
        raise BadInputError("--config", path, "is not text; give a YAML file in UTF-8") from None
    except OSError as error:
        raise BadInputError("--config", path, f"cannot be read: {error.strerror}") from error
    except (yaml.YAMLError, RecursionError) as error:
        raise BadInputError("--config", path, _syntax_words(error)) from error
    if content is None:
        return []
    if not isinstance(content, Mapping):
        raise BadInputError(
            "--config", path, "is not a mapping; write lines such as 'batch_size: 16'"
        )
    return list(from_mapping(content, prefix=f"{path}: ", origin="file"))


def _syntax_words(error: Exception) -> str:
    mark = getattr(error, "problem_mark", None)
    where = f" in line {mark.line + 1}" if mark is not None else ""
    problem = getattr(error, "problem", None) or "cannot be parsed"
    return f"is not valid YAML{where}: {problem}"


def from_mapping(
    content: Mapping[Any, object], *, prefix: str, origin: Origin
) -> Iterator[Assignment]:
    """Sections (nested), dotted and flat keys, in any mixture. Raises BadInputError."""
    for key, value in content.items():
        name = str(key)
        is_section = name in sections() or name == TASK_SECTION
        if isinstance(value, Mapping) and is_section:
            for inner, item in value.items():
                dotted = f"{name}.{inner}"
                yield Assignment(written=prefix + dotted, name=dotted, value=item, origin=origin)
        elif value is None and is_section:
            continue  # a heading with nothing under it
        elif name in sections() and name not in ALIASES:
            raise BadInputError(prefix + name, value, f"is a section; write {name}.NAME: VALUE")
        else:
            yield Assignment(written=prefix + name, name=name, value=value, origin=origin)


def from_environment(environment: Mapping[str, str]) -> Iterator[Assignment]:
    """``DDP_RUNNER_SECTION__KEY`` or ``DDP_RUNNER_KEY``, in any case. Empty means not set."""
    for variable, text in environment.items():
        if not variable.upper().startswith(ENVIRONMENT_PREFIX) or not text:
            continue
        if variable.upper() in RESERVED_VARIABLES:
            continue
        name = variable[len(ENVIRONMENT_PREFIX) :].lower().replace("__", ".", 1)
        value = _free_value(variable, name, text)
        yield Assignment(written=variable, name=name, value=value, origin="environment")


def from_command_line(
    command_line: Mapping[str, object] | Sequence[tuple[str, str]],
) -> Iterator[Assignment]:
    """Pairs of a name (with or without leading dashes) and a value; a mapping may be nested."""
    if isinstance(command_line, Mapping):
        yield from from_mapping(
            {key.removeprefix("--"): value for key, value in command_line.items()},
            prefix="",
            origin="command line",
        )
        return
    for written, text in command_line:
        name = written.removeprefix("--")
        value = _free_value(written, name, text)
        yield Assignment(written=written, name=name, value=value, origin="command line")


def _free_value(written: str, name: str, text: str) -> object:
    """The value of a user's own ``task.X``, which has no known type; other text stays text."""
    if not name.startswith(f"{TASK_SECTION}."):
        return text
    try:
        return parse_yaml(text)
    except yaml.YAMLError as error:
        raise BadInputError(written, text, _syntax_words(error)) from error
