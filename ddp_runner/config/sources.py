"""Reads what the user wrote: YAML files (at home, in ``presets/``), environment, command line. Judges no value."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import yaml

from ddp_runner.config.fields import ALIASES, TASK_SECTION, sections
from ddp_runner.config.foreign import HEADINGS
from ddp_runner.config.suggest import nearest
from ddp_runner.kernel.rules.errors import BadInputError

Origin = Literal["default", "preset", "file", "environment", "command line"]

ENVIRONMENT_PREFIX = "DDP_RUNNER_"
FILE_BYTES_MAX = 10_000_000
VALUES_MAX = 100_000  # in one file; aliases can make billions of a few lines
_OPEN = -1  # the size of a value that is being counted
_SHOWN_MAX = 40
_OF_NO_HEADING = ("name",)  # under a heading of others it is the name of something else
_RESOLVED_OTHERWISE = frozenset(
    f"tag:yaml.org,2002:{kind}" for kind in ("float", "int", "timestamp")
)
# Read by launch_training.sh and cli/from_code/launch.py, or set by the run for its own processes.
RESERVED_VARIABLES = frozenset(
    {
        "DDP_RUNNER_PYTHON",
        "DDP_RUNNER_COMMAND",
        "DDP_RUNNER_LAUNCHED",
        "DDP_RUNNER_FOLDERS",
        "DDP_RUNNER_PLAIN_RANK",
        "DDP_RUNNER_MARK",
        "DDP_RUNNER_TOKEN",
        "DDP_RUNNER_ENDPOINT_FD",
        "DDP_RUNNER_ENV_FILE_NAMES",
    }
)
PRESETS_FOLDER = "presets"
HOME_FILE = ".config/ddp_runner.yaml"  # in the home folder; lies under all other files


@dataclass(frozen=True, slots=True, kw_only=True)
class Assignment:
    """``name`` shall be ``value``. ``written`` is how a message names it to the person."""

    written: str
    name: str
    value: object
    origin: Origin


class _Loader(yaml.SafeLoader):
    """YAML as people mean it: 1e-4 and 010 are decimal, 1:30 and dates stay text, a key stands once."""

    yaml_implicit_resolvers = {  # noqa: RUF012 - PyYAML's own shape
        first: [(tag, pattern) for tag, pattern in resolvers if tag not in _RESOLVED_OTHERWISE]
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

    def construct_decimal(self, node: yaml.ScalarNode) -> int:
        """An integer; 010 is ten, as on the command line, not the eight of YAML 1.1."""
        text = self.construct_scalar(node).replace("_", "")
        base = 10 if text.lstrip("+-").isdigit() else 0
        try:
            return int(text, base)
        except ValueError:
            raise yaml.constructor.ConstructorError(
                problem=f"{text[:_SHOWN_MAX]!r} is not an integer, or is too long",
                problem_mark=node.start_mark,
            ) from None


_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:int",
    re.compile(r"^[-+]?([0-9][0-9_]*|0b[01_]+|0x[0-9a-fA-F_]+)$"),
    list("-+0123456789"),
)
_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float",
    re.compile(
        r"^[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?$"
        r"|^[-+]?\.(inf|Inf|INF)$|^\.(nan|NaN|NAN)$"
    ),
    list("-+0123456789."),
)
_Loader.add_constructor("tag:yaml.org,2002:int", _Loader.construct_decimal)


def parse_yaml(text: str) -> object:
    """The value that ``text`` holds. Raises yaml.YAMLError, also where it is too large."""
    loader = _Loader(text)
    try:
        root = loader.get_single_node()
        if root is None:
            return None
        _refuse_bomb(root)
        return loader.construct_document(root)
    except RecursionError as error:
        raise yaml.YAMLError from error
    except (ValueError, LookupError, AttributeError) as error:  # as PyYAML answers '!!bool 3'
        raise yaml.constructor.ConstructorError(problem="a tag does not fit its value") from error
    finally:
        loader.dispose()


def _refuse_bomb(root: yaml.Node) -> None:
    """Raise ConstructorError where aliases (``*name``) make too many values, or a value holds itself."""
    sizes: dict[int, int] = {}

    def size_of(node: yaml.Node) -> int:
        known = sizes.get(id(node))
        if known == _OPEN:
            raise yaml.constructor.ConstructorError(
                problem="a value holds itself by an alias", problem_mark=node.start_mark
            )
        if known is not None:
            return known
        sizes[id(node)] = _OPEN
        inner: list[yaml.Node] = []
        if isinstance(node, yaml.MappingNode):
            inner = [one for pair in node.value for one in pair]
        elif isinstance(node, yaml.SequenceNode):
            inner = node.value
        size = 1 + sum(map(size_of, inner))
        if size > VALUES_MAX:
            raise yaml.constructor.ConstructorError(
                problem=f"it has more than {VALUES_MAX:,} values, counted with aliases",
                problem_mark=node.start_mark,
            )
        sizes[id(node)] = size
        return size

    size_of(root)


def from_file(path: Path) -> list[Assignment]:
    """The assignments of one YAML file. Raises BadInputError if it is not a mapping of settings."""
    try:
        with path.open("rb") as file:  # a device, such as /dev/zero, never ends
            data = file.read(FILE_BYTES_MAX + 1)
        if len(data) > FILE_BYTES_MAX:
            raise BadInputError("--config", path, f"has more than {FILE_BYTES_MAX:,} bytes")
        content = parse_yaml(data.decode())
    except FileNotFoundError:
        raise BadInputError("--config", path, "no such file") from None
    except IsADirectoryError:
        raise BadInputError("--config", path, "is a folder; give a YAML file") from None
    except UnicodeDecodeError:
        raise BadInputError("--config", path, "is not text; give a YAML file in UTF-8") from None
    except OSError as error:
        raise BadInputError("--config", path, f"cannot be read: {error.strerror}") from error
    except yaml.YAMLError as error:
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
        elif isinstance(value, Mapping) and name in HEADINGS:
            for inner, item in value.items():
                written, known = (
                    f"{prefix}{name}.{inner}",
                    HEADINGS[name].get(str(inner), str(inner)),
                )
                if known in _OF_NO_HEADING:
                    raise BadInputError(written, item, f"belongs to the section run: run.{known}")
                yield Assignment(written=written, name=known, value=item, origin=origin)
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


def home_files(environment: Mapping[str, str]) -> tuple[Path, ...]:
    """The file of settings in the home folder that ``environment`` names, if it is there."""
    home = environment.get("HOME", "")
    path = Path(home, HOME_FILE)
    return (path,) if home and path.is_file() else ()


def named_file(name: str) -> Path:
    """The file of settings that is called so, with or without its ending."""
    path = Path(name)
    endings = (path, *(Path(f"{name}{ending}") for ending in (".yaml", ".yml")))
    return next((one for one in endings if one.is_file()), path)


def preset_file(name: str) -> Path:
    """``presets/NAME.yaml`` in the working directory. Raises BadInputError where there is none."""
    folder = Path(PRESETS_FOLDER)
    path = folder / f"{name}.yaml"
    known = sorted(one.stem for one in folder.glob("*.yaml"))
    if name in known and path.is_file():
        return path
    if not known:
        raise BadInputError("--preset", name, f"no such file {path}")
    near = nearest(name, known)
    hint = f"did you mean {near}?" if near else f"there are {', '.join(known)}"
    raise BadInputError("--preset", name, f"no such file {path}; {hint}")
