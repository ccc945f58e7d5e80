"""Finds or makes the Python environment; the standard library is all it needs.

``start.py ddp_runner.cli.python_environment`` prints the interpreter to run with on standard output and
everything for people on standard error; with ``--run WORDS...`` it becomes the command instead. It never changes an
environment that it did not make.

Order: ``$DDP_RUNNER_PYTHON`` (an error if it does not satisfy the requirements), the active virtual or conda
environment, the repository's complete ``.venv``, the interpreter this runs in, a new ``.venv``. One line names
an active environment that is passed over, the reason, and the command that makes it fit. A new ``.venv`` gets the
versions of ``constraints.txt``, which are tested; an environment of the user's may have any that the
requirements allow.
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import hashlib
import os
import pwd
import re
import shlex
import shutil
import subprocess
import sys
from functools import cache
from importlib import import_module, invalidate_caches
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

PYTHON_MIN = (3, 10)
REPOSITORY = Path(__file__).resolve().parents[2]
_OURS = "ddp_runner_made_this"
_RUN = "--run"  # all words behind it are the command's
_REQUIREMENT = re.compile(r"^([A-Za-z0-9][A-Za-z0-9._-]*)\s*(\[[^\]]*\])?\s*([^;#]*)")
_INSTALLED = re.compile(r"(.+)-([^-]+)\.dist-info")
_CLAUSE = re.compile(r"^(===|~=|==|!=|<=|>=|<|>)\s*([^\s]+)$")


class EnvironmentUnfitError(Exception):
    """No usable environment; the text is one line that says what would be right."""


def requirement_lines(text: str) -> list[str]:
    """The requirements in a requirements file: no comments, no options of pip."""
    lines = (line.split(" #")[0].strip() for line in text.splitlines())
    return [line for line in lines if line and not line.startswith(("#", "-"))]


def extra_lines(pyproject: str, extra: str) -> list[str]:
    """The requirements of one extra of ``pyproject.toml``, which Python 3.10 cannot parse."""
    table = pyproject.partition("[project.optional-dependencies]")[2].partition("\n[")[0]
    found = re.search(rf"^{re.escape(extra)}\s*=\s*\[(.*?)^\]", table, re.DOTALL | re.MULTILINE)
    return re.findall(r'"([^"]+)"', found.group(1)) if found else []


def release(version: str) -> tuple[int, ...]:
    """``2.13.0+cpu`` -> ``(2, 13)``: the numbers that requirements compare, trailing zeros cut."""
    numbers = re.match(r"^v?(?:\d+!)?(\d+(?:\.\d+)*)", version)
    parts = [int(part) for part in numbers.group(1).split(".")] if numbers else []
    while parts and parts[-1] == 0:
        parts.pop()
    return tuple(parts)


# Not by ``packaging``: this file decides before anything is installed, and Python brings no such module. The copy inside
# pip is pip's own business (it says so), is missing where pip is (environments by uv, Debian without python3-pip), and
# takes longer to import than the whole of this check. A test compares the two where packaging is there.
def satisfies(version: str, clauses: str) -> bool:
    """Return True if ``version`` meets clauses such as ``>=2.6,<2.14``; pre-release tags do not count.

    A clause that this short reading of PEP 440 does not know counts as not met.
    """
    return all(_meets(version, clause.strip()) for clause in clauses.split(",") if clause.strip())


def _meets(version: str, clause: str) -> bool:
    match = _CLAUSE.match(clause)
    if match is None:
        return False
    sign, wanted_text = match.groups()
    have, wanted = release(version), release(wanted_text.removesuffix(".*"))
    if wanted_text.endswith(".*"):
        depth = wanted_text.count(".")
        same = _padded(have, depth) == _padded(wanted, depth)
        return same if sign == "==" else not same if sign == "!=" else False
    if sign == "~=":
        fixed = wanted_text.count(".")
        return have >= wanted and _padded(have, fixed) == _padded(wanted, fixed)
    return {
        "===": version == wanted_text,
        "==": have == wanted,
        "!=": have != wanted,
        "<=": have <= wanted,
        ">=": have >= wanted,
        "<": have < wanted,
        ">": have > wanted,
    }[sign]


def _padded(parts: tuple[int, ...], length: int) -> tuple[int, ...]:
    return (*parts, *(0 for _ in range(length)))[:length]


def unmet(requirements: Sequence[str]) -> list[str]:
    """A few words for each requirement that this interpreter does not satisfy; imports nothing."""
    problems = []
    if sys.version_info < PYTHON_MIN:
        problems.append(f"Python {sys.version.split()[0]} is older than 3.10")
    for line in requirements:
        match = _REQUIREMENT.match(line)
        if match is None:
            problems.append(f"{line!r} is not understood")
            continue
        name, _, clauses = match.groups()
        version = installed_version(name)
        if not version:
            problems.append(f"{name} is missing")
            continue
        if not satisfies(version, clauses):
            problems.append(f"{name} is {version}, and {clauses.strip()} is needed")
    return problems


def installed_version(name: str) -> str:
    """Return the version of an installed package; empty if there is none."""
    if version := _installed().get(_normal(name)):
        return version
    # In an unusual form, if at all. Imported here, since that takes longer than all the rest of a check.
    metadata = import_module("importlib.metadata")
    try:
        return str(metadata.version(name) or "")  # an uninstall may leave a folder without it
    except (metadata.PackageNotFoundError, KeyError):
        return ""


@cache
def _installed() -> dict[str, str]:
    """Return name to version, by the names of the folders that installers make."""
    found: dict[str, str] = {}
    for folder in sys.path:
        with contextlib.suppress(OSError):
            for entry in os.listdir(folder or "."):  # noqa: PTH208 - it may have thousands
                is_one = _INSTALLED.fullmatch(entry)
                if is_one and os.path.exists(os.path.join(folder, entry, "METADATA")):  # noqa: PTH110, PTH118
                    found.setdefault(_normal(is_one[1]), is_one[2])
    return found


def _normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


class Repository:
    """The checkout whose environment is wanted: its requirement files and its ``.venv``."""

    def __init__(self, root: Path, *, extra: str) -> None:
        self.root = root
        self.venv = root / ".venv"
        self.python = self.venv / "bin" / "python"
        self.file = root / "requirements.txt"
        self._file_text = self.file.read_text(encoding="utf-8")
        self.requirements = requirement_lines(self._file_text)
        self.constraints = root / "constraints.txt"
        self.extra_requirements: list[str] = []
        if extra:
            pyproject = (root / "pyproject.toml").read_text(encoding="utf-8")
            self.extra_requirements = extra_lines(pyproject, extra)
        self._marker = self.venv / f"ddp_runner_complete{'_' + extra if extra else ''}"

    @property
    def wanted(self) -> list[str]:
        """Every requirement, with those of the extra."""
        return [*self.requirements, *self.extra_requirements]

    def _digest(self) -> str:
        # Constraints are no part of it: they choose among versions that all satisfy the requirements.
        text = "\n".join([self._file_text, *self.extra_requirements])
        return hashlib.sha256(text.encode()).hexdigest()

    def is_complete(self) -> bool:
        """Return True if ``.venv`` was finished for exactly these requirements."""
        try:
            marked = self._marker.read_text(encoding="utf-8")
        except OSError:
            return False
        return marked == self._digest() and os.access(self.python, os.X_OK)

    def mark_complete(self) -> None:
        """Publish that ``.venv`` satisfies these requirements."""
        # INVARIANT marker-last: the marker appears only after pip has succeeded.
        # Broken if: mark_complete() is called before install() has returned.
        # Guarded by: test_an_interrupted_venv_is_made_again.
        temporary = self._marker.with_suffix(".tmp")
        temporary.write_text(self._digest(), encoding="utf-8")
        temporary.replace(self._marker)

    def is_foreign(self) -> bool:
        """Return True if ``.venv`` exists and was made by another program."""
        return self.venv.exists() and any(self.venv.iterdir()) and not (self.venv / _OURS).exists()

    def missing_in(self, python: Path) -> str:
        """Return what ``python`` lacks, in words; empty if it satisfies everything."""
        start = str(REPOSITORY / "ddp_runner" / "start.py")
        command = [
            str(python),
            start,
            "ddp_runner.cli.python_environment",
            "--check",
            "--",
            *self.wanted,
        ]
        environment = {**os.environ, "PYTHONPATH": str(REPOSITORY)}
        try:
            answer = subprocess.run(  # noqa: S603 - the interpreter that the user chose
                command, env=environment, capture_output=True, text=True, check=False, timeout=60
            )
        except (OSError, subprocess.TimeoutExpired) as error:
            return f"it does not start ({error})"
        if answer.returncode == 0:
            return ""
        return answer.stdout.strip() or f"it does not start ({answer.stderr.strip()[-200:]})"


def find_python(repository: Repository) -> Path:
    """The interpreter to run with, made if need be. Raises EnvironmentUnfitError."""
    chosen = os.environ.get("DDP_RUNNER_PYTHON", "")
    here = Path(sys.executable)
    if chosen:
        if lacking := "; ".join(unmet(repository.wanted)):
            raise EnvironmentUnfitError(f"DDP_RUNNER_PYTHON={chosen}: {lacking}")
        return Path(chosen)
    missing = unmet(repository.wanted)
    if not missing and _is_active():
        return here
    if missing and _is_active():
        _say_passed_over(repository, missing)
    if repository.is_complete():
        return repository.python
    return _made(repository) if missing else here


def _is_active() -> bool:
    """Return True if this interpreter is in a virtual environment, or in the activated conda environment."""
    conda = os.environ.get("CONDA_PREFIX")
    return sys.prefix != sys.base_prefix or bool(
        conda and Path(conda).resolve() == Path(sys.prefix).resolve()
    )


def _say_passed_over(repository: Repository, missing: Sequence[str]) -> None:
    """Name the active environment that is not used, why, and what would make it usable."""
    if Path(sys.prefix).resolve() == repository.venv.resolve():
        return
    words = [shlex.quote(str(repository.file)), *map(shlex.quote, repository.extra_requirements)]
    _say(
        f"the active environment {sys.prefix} does not fit: {'; '.join(missing)} "
        f"(to use it: pip install -r {' '.join(words)}); using {repository.venv} instead"
    )


def _made(repository: Repository) -> Path:
    with _only_maker(repository.root):
        if repository.is_complete():
            return repository.python
        _refuse_closed(repository.venv, os.R_OK | os.X_OK)
        if repository.is_foreign():
            if missing := repository.missing_in(repository.python):
                raise EnvironmentUnfitError(
                    f"{repository.venv}: was not made by this script and {missing}; "
                    "install into it, remove it or set DDP_RUNNER_PYTHON"
                )
            return repository.python
        _refuse_closed(repository.venv, os.R_OK | os.W_OK | os.X_OK)
        _create(repository)
        _install(repository)
        repository.mark_complete()
        return repository.python


def _refuse_closed(venv: Path, needed: int) -> None:
    """Raise EnvironmentUnfitError where another user has made ``venv``, and this one may not use it so."""
    if not venv.exists() or os.access(venv, needed):
        return
    owner = str(venv.stat().st_uid)
    with contextlib.suppress(KeyError):
        owner = pwd.getpwuid(int(owner)).pw_name
    raise EnvironmentUnfitError(
        f"{venv}: {owner} made it, and this user may not use or change it; have {owner} run "
        "./launch_training.sh environment, remove it or set DDP_RUNNER_PYTHON"
    )


@contextlib.contextmanager
def _only_maker(root: Path) -> Iterator[None]:
    """Hold the lock on the repository's folder, which a crash cannot leave behind."""
    descriptor = os.open(root, os.O_RDONLY)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            _say("another launch is making .venv; waiting for it")
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def _create(repository: Repository) -> None:
    """A virtual environment with pip; one that was made here before and works is kept."""
    venv = repository.venv
    if os.access(repository.python, os.X_OK) and (venv / _OURS).read_text() == "with pip":
        _say(f"bringing {venv} up to date")
        return
    _say(f"making {venv} (once) with Python {sys.version.split()[0]}")
    try:
        if venv.exists():
            shutil.rmtree(venv)
        venv.mkdir()
        (venv / _OURS).write_text("")
    except OSError as error:
        raise EnvironmentUnfitError(
            f"{venv}: cannot be made ({error.strerror}); set DDP_RUNNER_PYTHON to a Python "
            "that satisfies requirements.txt"
        ) from error
    try:
        made = subprocess.run(  # noqa: S603 - our own interpreter
            [sys.executable, "-I", "-m", "venv", str(venv)],
            capture_output=True,
            text=True,
            check=False,
        )
    except OSError as error:
        shutil.rmtree(venv, ignore_errors=True)
        raise EnvironmentUnfitError(f"{venv}: cannot be made: {error}") from error
    if made.returncode != 0:
        shutil.rmtree(venv, ignore_errors=True)
        output = (made.stdout + made.stderr).strip()
        cure = "install the python3-venv package" if "ensurepip" in output else output[-200:]
        raise EnvironmentUnfitError(f"{venv}: cannot be made: {' '.join(cure.split())}")
    (venv / _OURS).write_text("with pip")


def _install(repository: Repository) -> None:
    _say("installing the requirements; this can take some minutes")
    command = [str(repository.python), "-I", "-m", "pip", "install", "--disable-pip-version-check"]
    command += ["--no-input", "-r", str(repository.file), *repository.extra_requirements]
    if repository.constraints.exists():
        command += ["-c", str(repository.constraints)]
    # pip draws its progress on standard error here: standard output carries our one answer.
    if subprocess.run(command, stdout=sys.stderr, check=False).returncode != 0:  # noqa: S603
        raise EnvironmentUnfitError(
            "pip could not install the requirements (see its reason above); with no network, "
            "set DDP_RUNNER_PYTHON to a Python that satisfies requirements.txt"
        )
    # `python train.py` finds the package too, behind whatever the environment has, and nothing beside the package.
    package = repository.root / "ddp_runner"
    folder = package / "on_path"
    for packages in repository.venv.glob("lib/python*/site-packages"):
        (packages / "ddp_runner.pth").write_text(f"{folder}\n", encoding="utf-8")
    # As pip does for what it installs: else a launch takes a second longer where PYTHONDONTWRITEBYTECODE is set.
    compiled = [str(repository.python), "-I", "-m", "compileall", "-q", str(package)]
    subprocess.run(compiled, stdout=sys.stderr, check=False)  # noqa: S603


def _say(text: str) -> None:
    sys.stderr.write(f"ddp_runner: {text}\n")
    sys.stderr.flush()


def main(arguments: Sequence[str] | None = None) -> int:
    """The command; 0 with the interpreter's path printed, else 1 or 2 with one line of reason."""
    parser = argparse.ArgumentParser(prog="launch_training.sh environment")
    parser.add_argument("--extra", default="", help="also satisfy this extra of pyproject.toml")
    parser.add_argument("--check", nargs="*", metavar="REQUIREMENT", help="only test these, here")
    parser.add_argument("rest", nargs="*", help=argparse.SUPPRESS)
    words = sys.argv[1:] if arguments is None else list(arguments)
    is_run = _RUN in words
    own = words[: words.index(_RUN)] if is_run else words
    options = parser.parse_args(own)
    if options.check is not None:
        problems = unmet([*options.check, *options.rest])
        sys.stdout.write("; ".join(problems))
        return 1 if problems else 0
    try:
        python = find_python(Repository(REPOSITORY, extra=options.extra))
    except EnvironmentUnfitError as error:
        sys.stderr.write(f"ddp_runner: error: {error}\n")
        return 2
    except KeyboardInterrupt:
        return 130
    if is_run:
        return _become_command(python, words[len(own) + 1 :])
    sys.stdout.write(f"{python}\n")
    return 0


def _become_command(python: Path, words: list[str]) -> int:
    """Run the command in ``python``: in this process, if that is its interpreter."""
    name = "ddp_runner.__main__"
    if python != Path(sys.executable):
        start = str(REPOSITORY / "ddp_runner" / "start.py")
        os.execv(python, [str(python), start, name, *words])  # noqa: S606 - which find_python() chose
    invalidate_caches()  # packages may have been installed since this process began
    sys.argv[1:] = words
    return int(import_module(name).main(words))


if __name__ == "__main__":
    sys.exit(main())
