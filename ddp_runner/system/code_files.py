"""The files of code that a task consists of, found by its import statements; runs none of them."""

from __future__ import annotations

import ast
import contextlib
import hashlib
import importlib.util
import sys
import sysconfig
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib import metadata
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path

from ddp_runner.start import PACKAGE_PARENT

FILES_MAX = 1000  # of a task; what it imports beyond is not followed
_DIGITS = 12  # of a SHA-256 that stands for a file
_OWN = "ddp_runner"
INSTALLED = ("site-packages", "dist-packages")
_STANDARD = tuple({f"{sysconfig.get_paths()[one]}/" for one in ("stdlib", "platstdlib")})
_OURS = f"{Path(__file__).resolve().parents[1]}/"


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskCode:
    """The files of a task by their names below the folder that they are imported from, with their digests.

    ``packages``: the installed distributions that they import, by version.
    """

    files: Mapping[str, str]
    packages: Mapping[str, str]


def is_users_file(path: str) -> bool:
    """Return True if the file contains code of the user's: not ours, nor Python's, nor an installed package's."""
    torch = getattr(sys.modules.get("torch"), "__file__", None)  # perhaps built from its source
    foreign = (_OURS, "<frozen", "<string>", *([f"{Path(torch).parent}/"] if torch else []))
    if path.startswith(foreign) or any(f"/{one}/" in path for one in INSTALLED):
        return False
    main = getattr(sys.modules.get("__main__"), "__file__", None)
    program = f"{Path(main).absolute().parent}/" if main else ""
    standard = max((one for one in _STANDARD if path.startswith(one)), key=len, default="")
    # A program may lie in a folder below the library's.
    return not standard or (path.startswith(program) and len(program) > len(standard))


def task_code(spec: str, *, folder: Path) -> TaskCode:
    """Return the code of a task named as in ``--task``, FILE.py[:NAME] or module:NAME; empty for another word.

    ``folder``: the working directory. A file that cannot be read or parsed counts as one without imports.
    """
    head, colon, name = spec.rpartition(":")
    written = spec if spec.endswith(".py") else head
    if written.endswith(".py"):
        return _code_of_file(folder / Path(written).expanduser())
    return _code_of_modules([head] if colon and name else [], folder)


def program_code(spec: str, *, folder: Path) -> TaskCode:
    """Return the code of a program of the user's in the same way: a file of any name, ``module:``, or nothing."""
    if spec.endswith(":"):
        return _code_of_modules([spec[:-1], f"{spec[:-1]}.__main__"], folder)
    return _code_of_file(folder / spec) if spec else _code_of_modules([], folder)


def _code_of_file(path: Path) -> TaskCode:
    path = path.resolve()
    search = _Search([*sys.path, str(path.parent)])
    search.follow_file(path.name, path, package="")
    return TaskCode(files=search.files, packages=_versions(search.installed))


def _code_of_modules(names: Sequence[str], folder: Path) -> TaskCode:
    search = _Search([*sys.path, str(folder)])
    for name in names:
        search.follow_module(name)
    return TaskCode(files=search.files, packages=_versions(search.installed))


def own_code() -> dict[str, str]:
    """The files of this package, in the form of :attr:`TaskCode.files`."""
    parent = Path(PACKAGE_PARENT)
    return {
        str(path.relative_to(parent)): digest
        for path in sorted((parent / _OWN).rglob("*.py"))
        if (digest := _digest_of(path))
    }


def digest_of(files: Mapping[str, str]) -> str:
    """One short digest for all of them."""
    text = "\n".join(f"{name} {digest}" for name, digest in sorted(files.items()))
    return hashlib.sha256(text.encode()).hexdigest()[:6]


class _Search:
    """Follows import statements, those inside functions too, through files that are not installed packages."""

    def __init__(self, path: Sequence[str]) -> None:
        self._path = list(path)
        self.files: dict[str, str] = {}
        self.installed: set[str] = set()
        self._known: set[str] = set()

    def follow_module(self, name: str) -> None:
        """Also the packages that it is in."""
        parts = name.split(".")
        if parts[0] in sys.stdlib_module_names or parts[0] == _OWN:
            return
        path, above = self._path, ""
        for part in parts:
            above = f"{above}.{part}" if above else part
            spec = self._found(above, path)
            if spec is None:
                return
            origin = Path(spec.origin) if spec.has_location and spec.origin else None
            places = [str(place) for place in spec.submodule_search_locations or ()]
            if any(one in INSTALLED for one in Path(origin or (places or [""])[0]).parts):
                self.installed.add(parts[0])
                return
            if origin is not None and above not in self._known and len(self.files) < FILES_MAX:
                self._known.add(above)
                depth = above.count(".") + 1 + bool(places)
                label = "/".join(origin.parts[-depth:])
                self.follow_file(
                    label, origin, package=above if places else above.rpartition(".")[0]
                )
            path = places
            if not path:
                return

    def _found(self, name: str, path: Sequence[str]) -> ModuleSpec | None:
        with contextlib.suppress(ImportError, ValueError, AttributeError):
            if "." not in name and (found := importlib.util.find_spec(name)) is not None:
                return found
            return PathFinder.find_spec(name, path)
        return None

    def follow_file(self, label: str, path: Path, *, package: str) -> None:
        """``package``: whose modules a relative import there means."""
        if not (digest := _digest_of(path)):
            return
        self.files[label] = digest
        if path.suffix != ".py":
            return
        try:
            tree = ast.parse(path.read_bytes())
        except (SyntaxError, ValueError, RecursionError, OSError):  # importing it says so
            return
        for name in _imported(tree, package):
            self.follow_module(name)


def _imported(tree: ast.AST, package: str) -> Iterator[str]:
    """Each module that may be meant: of ``from a import b`` both ``a`` and ``a.b``."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (one.name for one in node.names)
        elif isinstance(node, ast.ImportFrom):
            above = package.split(".")[: len(package.split(".")) - node.level + 1]
            parts = [*(above if node.level else ()), *((node.module or "").split("."))]
            base = ".".join(filter(None, parts))
            yield base
            yield from (f"{base}.{one.name}" for one in node.names if base and one.name != "*")


def _digest_of(path: Path) -> str:
    try:
        return hashlib.sha256(path.read_bytes()).hexdigest()[:_DIGITS]
    except OSError:
        return ""


def _versions(modules: set[str]) -> dict[str, str]:
    """Return the versions of the distributions that contain these top-level modules."""
    found = {name: version for name in modules if (version := version_of(name))}
    if missing := modules - found.keys():  # a distribution of another name: cv2, PIL, sklearn
        owners = metadata.packages_distributions()
        named = {owner for name in missing for owner in owners.get(name, ())}
        found |= {owner: version_of(owner) for owner in named}
    return found


def version_of(name: str) -> str:
    """Return the version of an installed distribution; empty where there is none of that name."""
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return ""
