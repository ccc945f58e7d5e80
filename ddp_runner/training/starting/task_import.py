"""Finds the task that ``--task`` names and makes it. Never trains, and never hides whose error it was.

Forms: a built-in name, ``FILE.py[:NAME]``, ``module:NAME``. NAME is a class, a factory function or
a ready instance. All that goes wrong here is for the user to correct, so it is a
:class:`~ddp_runner.kernel.rules.errors.BadInputError` whose ``__cause__`` is the user's own traceback.
"""

from __future__ import annotations

import contextlib
import difflib
import hashlib
import importlib
import importlib.util
import inspect
import json
import sys
import traceback
import types
from collections.abc import Callable, Collection, Iterable, Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Union, cast, get_args, get_origin

from ddp_runner.kernel.rules.errors import BadInputError
from ddp_runner.kernel.rules.secrets import masked, secret_texts, without_secrets
from ddp_runner.system.code_files import task_code
from ddp_runner.system.launch_folder import at_launch
from ddp_runner.training.task_methods import refuse_uncalled, slips

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from types import ModuleType

    from ddp_runner.core.settings import Settings
    from ddp_runner.training.task import Task


# Names, not imports: `tasks` stands above `training`.
BUILT_IN_TASKS = {
    "bytes": ("ddp_runner.tasks.bytes_lm", "BytesTask"),
    "synthetic": ("ddp_runner.tasks.synthetic", "SyntheticTask"),
}
_SHA256_OF_SPEC: dict[str, str] = {}
_MODULES_OF_SPEC: dict[str, Mapping[str, str]] = {}
TASK_METHODS = ("build_model", "build_datasets", "loss")


@dataclass(frozen=True, slots=True, kw_only=True)
class _TaskSpec:
    """``--task`` taken apart: exactly one of ``module`` and ``file``; ``name`` may be empty for a file."""

    text: str
    name: str
    module: str = ""
    file: Path | None = None


def load_task(settings: Settings) -> Task:
    """The task of ``settings.run.task``, made with ``settings.task`` as keyword arguments.

    A class marked ``takes_settings``, as the built-in ones are, is given all of ``settings``.
    Raises BadInputError if it cannot be found, imported or made, or is no task.
    """
    spec = _parse(settings.run.task)
    module = import_task_module(spec.text)
    target = _named(module, spec) if spec.name else _only_task_class(module, spec)
    if _is_ready_task(target):
        if settings.task:
            key, value = next(iter(settings.task.items()))
            raise BadInputError(f"task.{key}", value, f"{spec.text} is a ready task: no arguments")
        refuse_uncalled(target, spec.text)
        return cast("Task", target)
    if not callable(target):
        raise BadInputError("--task", spec.text, f"{spec.name} is neither a task nor callable")
    made = _make(target, settings, spec)
    if missing := _missing_methods(made):
        what = f"the task lacks {', '.join(missing)}{_slip(type(made))}"
        raise BadInputError("--task", spec.text, what)
    refuse_uncalled(made, spec.text)
    return cast("Task", made)


def import_task_module(spec: str) -> ModuleType:
    """Import the module that ``spec`` (as in ``--task``) needs, once per process; later calls find it.

    A file becomes a module of a name that is stable for its path, so that its classes pickle by
    reference in forked processes. Its folder, or for ``module:NAME`` the working directory, is
    searched last: a ``random.py`` that lies there takes no installed module's place. Raises
    BadInputError, with the user's exception as its cause.
    """
    parsed = _parse(spec)
    if parsed.file is not None:
        return _import_file(parsed.file, spec)
    try:
        with _also_searched("" if spec in BUILT_IN_TASKS else str(at_launch("").absolute())):
            module = importlib.import_module(parsed.module)
    except ModuleNotFoundError as error:
        wanted = error.name or ""
        if parsed.module == wanted or parsed.module.startswith(wanted + "."):
            raise BadInputError("--task", spec, f"no module {wanted!r} on the path") from error
        raise BadInputError("--task", spec, _import_failure(error, None)) from error
    except (Exception, SystemExit) as error:  # boundary: any user code may run at import
        raise BadInputError("--task", spec, _import_failure(error, None)) from error
    if spec not in BUILT_IN_TASKS:
        _SHA256_OF_SPEC.setdefault(spec, _sha256(getattr(module, "__file__", None)))
        _MODULES_OF_SPEC.setdefault(spec, _modules(spec))
    return module


def task_sha256(spec: str) -> str:
    """Return the digest of the file that ``spec`` was imported from in this process, or in the one it was forked from.

    Empty for a built-in task, and for a module without a file.
    """
    return _SHA256_OF_SPEC.get(spec, "")


def task_modules(spec: str) -> Mapping[str, str]:
    """Return the digests of the uninstalled files that the task's file imports, by name; as :func:`task_sha256`."""
    return _MODULES_OF_SPEC.get(spec, {})


def _modules(spec: str) -> dict[str, str]:
    files, own = task_code(spec, folder=at_launch("")).files, _SHA256_OF_SPEC[spec]
    return {name: digest for name, digest in files.items() if not own.startswith(digest)}


def _sha256(file: str | Path | None) -> str:
    try:
        return hashlib.sha256(Path(file).read_bytes()).hexdigest() if file else ""
    except OSError:
        return ""


@contextlib.contextmanager
def _also_searched(folder: str) -> Iterator[None]:
    """``folder`` at the end of ``sys.path``, for good unless the import fails."""
    is_new = bool(folder) and folder not in sys.path
    if is_new:
        sys.path.append(folder)
    try:
        yield
    except BaseException:
        if is_new:
            sys.path.remove(folder)
        raise


def _parse(text: str) -> _TaskSpec:
    """Take ``--task`` apart; raises BadInputError if it has none of the known forms."""
    if text in BUILT_IN_TASKS:
        module, name = BUILT_IN_TASKS[text]
        return _TaskSpec(text=text, module=module, name=name)
    head, colon, name = text.rpartition(":")
    if text.endswith(".py"):
        return _TaskSpec(text=text, file=at_launch(Path(text).expanduser()), name="")
    if head.endswith(".py"):
        return _TaskSpec(text=text, file=at_launch(Path(head).expanduser()), name=name)
    if colon and name.isidentifier() and all(part.isidentifier() for part in head.split(".")):
        return _TaskSpec(text=text, module=head, name=name)
    forms = f"{', '.join(BUILT_IN_TASKS)}, FILE.py[:NAME] or module:NAME"
    raise BadInputError("--task", text, f"must be {forms}{_nearest(text, BUILT_IN_TASKS)}")


def _import_file(file: Path, spec: str) -> ModuleType:
    if not file.is_file():
        found = "that is a folder" if file.is_dir() else "no such file"
        raise BadInputError("--task", spec, f"{found}; must be FILE.py[:NAME]")
    file = file.resolve()
    name = _module_name(file)
    if name in sys.modules:
        return sys.modules[name]
    import_spec = importlib.util.spec_from_file_location(name, file)
    assert import_spec is not None, "a .py file always has a loader"
    assert import_spec.loader is not None, "a .py file always has a loader"
    module = importlib.util.module_from_spec(import_spec)
    # Before it runs, and once: whoever edits it while the run trains changes nothing of this run.
    _SHA256_OF_SPEC[spec] = _sha256(file)
    _MODULES_OF_SPEC[spec] = _modules(spec)
    sys.modules[name] = module  # before it runs: dataclasses and pickle look it up by name
    try:
        with _also_searched(str(file.parent)):
            import_spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:  # boundary: the user's file runs here
        del sys.modules[name]
        raise BadInputError("--task", spec, _import_failure(error, file)) from error
    return module


def _module_name(file: Path) -> str:
    """A module name that two files never share and one file always gets."""
    stem = "".join(c if c.isalnum() else "_" for c in file.stem)
    return f"ddp_runner_task_{stem}_{hashlib.sha256(str(file).encode()).hexdigest()[:12]}"


def _import_failure(error: BaseException, file: Path | None) -> str:
    return f"importing it raised {_described(error, file)}{_hidden_helper(error, file)}"


def _hidden_helper(error: BaseException, file: Path | None) -> str:
    """A hint where an installed module was imported instead of the one that lies beside the task."""
    if file is None or not isinstance(error, ImportError) or not error.name or not error.path:
        return ""
    name = error.name.partition(".")[0]
    beside = (file.parent / f"{name}.py", file.parent / name)
    if not any(path.exists() for path in beside) or Path(error.path).is_relative_to(file.parent):
        return ""
    return f"; {error.path} hides the {name} beside the task: rename yours"


def _described(error: BaseException, file: Path | None) -> str:
    """``Type: message (line N)``: the line of ``file``, or of where it was raised outside it."""
    said = str(error)
    if isinstance(error, SyntaxError):
        said, place = error.msg, _place(error.filename or "?", error.lineno or 0, file)
    else:
        frames = [
            (frame.filename, frame.lineno or 0)
            for frame in traceback.extract_tb(error.__traceback__)
            if frame.filename != __file__ and not frame.filename.startswith("<frozen")
        ]
        users = [frame for frame in frames if frame[0] == str(file)] or frames
        place = _place(*users[-1], file) if users else ""
    return f"{type(error).__name__}{': ' if said else ''}{said}{place}"


def _place(filename: str, line: int, file: Path | None) -> str:
    return f" (line {line})" if filename == str(file) else f" ({Path(filename).name} line {line})"


def _only_task_class(module: ModuleType, spec: _TaskSpec) -> type:
    found = _task_classes(module)
    if len(found) == 1:
        return found[0]
    if not found:
        what = f"no class in this file has all of {', '.join(TASK_METHODS)}"
        slip = next(filter(None, map(_slip, _own_classes(module))), "")
        raise BadInputError("--task", spec.text, what + slip)
    names = ", ".join(kind.__name__ for kind in found)
    raise BadInputError("--task", spec.text, f"several tasks in this file, add :NAME of {names}")


def _task_classes(module: ModuleType) -> list[type]:
    """The classes defined in ``module``, not imported into it, that have a task's methods."""
    own = _own_classes(module)
    return [kind for kind in own if not inspect.isabstract(kind) and not _missing_methods(kind)]


def _own_classes(module: ModuleType) -> list[type]:
    own = {
        kind: None  # a dict keeps order and drops second names of one class
        for kind in vars(module).values()
        if inspect.isclass(kind) and kind.__module__ == module.__name__
    }
    return list(own)


def _slip(kind: type) -> str:
    """``; T.build_dataset: did you mean build_datasets?`` for what a task must have, else nothing."""
    found = [(name, hook) for name, hook in slips(kind) if hook in TASK_METHODS]
    return "".join(f"; {kind.__name__}.{name}: did you mean {hook}?" for name, hook in found[:1])


def _named(module: ModuleType, spec: _TaskSpec) -> object:
    if hasattr(module, spec.name):
        return getattr(module, spec.name)
    names = [kind.__name__ for kind in _task_classes(module)]
    has = f"; it has {', '.join(names)}" if names else ""
    raise BadInputError("--task", spec.text, f"there is no {spec.name!r} in it{has}")


def _missing_methods(candidate: object) -> list[str]:
    return [name for name in TASK_METHODS if not callable(getattr(candidate, name, None))]


def _is_ready_task(target: object) -> bool:
    return not inspect.isclass(target) and not _missing_methods(target)


def _make(factory: Callable[..., Any], settings: Settings, spec: _TaskSpec) -> object:
    takes_settings = getattr(factory, "takes_settings", False)
    if takes_settings and settings.task:
        key, value = next(iter(settings.task.items()))
        raise BadInputError(f"task.{key}", value, f"the task {spec.text} takes no task.* arguments")
    if not takes_settings:
        _check_arguments(factory, settings.task, spec)
    try:
        return factory(settings) if takes_settings else factory(**settings.task)
    except BadInputError:
        raise
    except Exception as error:  # boundary: the user's constructor runs here
        made = f"making it raised {_described(error, spec.file and spec.file.resolve())}"
        made = without_secrets(made, secret_texts(settings.task))
        raise BadInputError("--task", spec.text, made) from error


def _check_arguments(
    factory: Callable[..., Any], arguments: Mapping[str, object], spec: _TaskSpec
) -> None:
    """Raise BadInputError for an argument that ``factory`` does not know or lacks, or of another type."""
    parameters = parameters_of(factory)
    named = [p for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
    known = [p.name for p in named]
    if not any(p.kind is p.VAR_KEYWORD for p in parameters):
        for key, value in arguments.items():
            if key not in known:
                takes = f"it takes {', '.join(known)}" if known else "it takes none"
                hint = _nearest(key, known)
                raise BadInputError(
                    f"task.{key}", value, f"{spec.text} has no such argument; {takes}{hint}"
                )
    for parameter in named:
        value = arguments.get(parameter.name)
        if parameter.name in arguments and (wanted := unfit(value, parameter)):
            expected = f"{spec.text} takes {wanted}"
            shown = json.dumps(masked(value, parameter.name))
            raise BadInputError(f"task.{parameter.name}", shown, expected)
    lacking = [p.name for p in named if p.default is p.empty and p.name not in arguments]
    if lacking:
        wanted = ", ".join(f"task.{name}=VALUE" for name in lacking)
        raise BadInputError("--task", spec.text, f"it also needs {wanted}")


def _nearest(word: str, known: Iterable[str]) -> str:
    """``; did you mean X?`` where something known is spelled alike, else nothing."""
    near = difflib.get_close_matches(word, known, n=1)
    return f"; did you mean {near[0]}?" if near else ""


# Whether a task's arguments are of the types that its constructor names. Changes none of them.
# An annotation is believed; without one the type of a default is a hint, and only what can
# hardly be meant is refused. What has no plain meaning (a class of the user's own, a type
# variable) is let by.

_LISTS = (list, tuple, set, frozenset, Sequence, Iterable, Collection)
_MAPPINGS = (dict, Mapping, MutableMapping)


def parameters_of(factory: Callable[..., Any]) -> list[inspect.Parameter]:
    """Its parameters, annotations as objects; left out where one names what is not there."""
    made = getattr(factory, "__init__", None) if inspect.isclass(factory) else factory
    names = getattr(inspect.unwrap(made), "__globals__", {}) if callable(made) else {}
    return [_evaluated(one, names) for one in inspect.signature(factory).parameters.values()]


def _evaluated(parameter: inspect.Parameter, names: dict[str, Any]) -> inspect.Parameter:
    if not isinstance(parameter.annotation, str):
        return parameter
    try:
        found = eval(parameter.annotation, names)  # noqa: S307 - as Python would, of the same file
    except Exception:  # noqa: BLE001 - any code; what only a type checker imports is not there
        found = parameter.empty
    return parameter.replace(annotation=found)


def unfit(value: object, parameter: inspect.Parameter) -> str:
    """Return what ``value`` should be for ``parameter``, in words; empty if it fits."""
    annotation, default = parameter.annotation, parameter.default
    if annotation is not parameter.empty:
        return "" if _fits(value, annotation) or value is default else _in_words(annotation)
    if default is parameter.empty or value is None:
        return ""
    hint = {bool: bool, int: float, float: float}.get(type(default))
    if hint is None or _fits(value, hint):
        return ""
    return f"{_in_words(hint)}, as its default {default!r} is"


def _fits(value: object, wanted: Any) -> bool:  # noqa: PLR0911 - one row a form of annotation
    origin, inner = get_origin(wanted), get_args(wanted)
    if origin in (Union, types.UnionType):
        return any(_fits(value, one) for one in inner)
    if origin is Literal:
        return any(type(value) is type(one) and value == one for one in inner)
    if wanted in (None, type(None)):
        return value is None
    if wanted is bool:
        return isinstance(value, bool)
    if wanted is int:
        return isinstance(value, int) and not isinstance(value, bool)
    if wanted is float:
        return isinstance(value, (int, float)) and not isinstance(value, bool)
    if wanted in (str, Path):
        return isinstance(value, (str, wanted))
    kind = origin or wanted
    if kind in _LISTS:
        is_list = isinstance(value, (list, tuple))
        items: Iterable[object] = value if isinstance(value, (list, tuple)) else ()
        return is_list and all(_fits_some(item, inner) for item in items)
    if kind in _MAPPINGS:
        return isinstance(value, Mapping)
    return True


def _fits_some(item: object, inner: tuple[Any, ...]) -> bool:
    return not inner or any(one is Ellipsis or _fits(item, one) for one in inner if one is not ...)


def _in_words(wanted: Any) -> str:
    origin, inner = get_origin(wanted), get_args(wanted)
    if origin in (Union, types.UnionType):
        return " or ".join(dict.fromkeys(_in_words(one) for one in inner))
    if origin is Literal:
        return f"one of {', '.join(str(one) for one in inner)}"
    words: Mapping[Any, str] = {
        bool: "true or false",
        int: "a whole number",
        float: "a number",
        str: "text (write '\"123\"' for digits)",
        Path: "a path",
        None: "null",
        type(None): "null",
    }
    if wanted in words:
        return words[wanted]
    return "a mapping, {key: value}" if (origin or wanted) in _MAPPINGS else "a list, [a, b]"
