"""The tests near one file of the package: those that import it, and those that have its name. For ``tests/run --near``.

Whole runs are left out: near tests answer within a minute. What imports a file that half of the package
imports is too much for that; then those of its own folder come first, and the line says how many are left out.
"""

from __future__ import annotations

import ast
import functools
import os
import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
FILES_MAX = 12
WHOLE_RUNS = {"gpu", "kubernetes", "whole_runs", "scenarios", "slurm", "soak", "strangers"}
ABOVE_ROOMS = {"kernel", "features"}  # their folders are rooms
LEFT_OUT = "not whole_run and not slow and not soak and not gpu and not slurm and not ray"


def module_of(path: Path) -> str:
    """The dotted name of a file below the root."""
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


@functools.cache
def imports_of(path: Path) -> set[str]:
    """The modules that a file names in its imports; of ``from a import b`` both ``a`` and ``a.b``."""
    found = set()
    package = module_of(path).split(".")[:-1]
    for node in ast.walk(ast.parse(text_of(path))):
        if isinstance(node, ast.Import):
            found |= {one.name for one in node.names}
        elif isinstance(node, ast.ImportFrom):
            begin = package[: len(package) - node.level + 1] if node.level else []
            base = ".".join([*begin, *(node.module or "").split(".")]).strip(".")
            found |= {base, *(f"{base}.{one.name}" for one in node.names)}
    return found


@functools.cache
def text_of(path: Path) -> str:
    """What stands in a file."""
    return path.read_text(encoding="utf-8")


@functools.cache
def sources() -> tuple[Path, ...]:
    """Every file of the package and of the tests, without those of whole runs."""
    found = [*(ROOT / "ddp_runner").rglob("*.py"), *(ROOT / "tests").rglob("*.py")]
    return tuple(path for path in found if WHOLE_RUNS.isdisjoint(path.relative_to(ROOT).parts))


@functools.cache
def importers_of(path: Path) -> set[Path]:
    """Who imports the module that stands in ``path``."""
    name = module_of(path)
    word = name.rpartition(".")[2]  # who imports it says so: to parse all files takes seconds
    return {one for one in sources() if word in text_of(one) and name in imports_of(one)}


def near(file: Path) -> list[Path]:
    """The files of tests near ``file``, the nearest first."""
    named, rooms = f"test_{file.stem}.py", {*file.relative_to(ROOT).parts[1:-1]} - ABOVE_ROOMS
    direct = importers_of(file)
    # What tests have in common stands in files beside them; a shard is tested through who imports it.
    behind = {
        test
        for path in direct
        if not is_test(path) and (is_of_tests(path) or not any(map(is_test, direct)))
        for test in importers_of(path)
    }
    found = {path for path in sources() if is_test(path)}
    distance = dict.fromkeys(found & behind, 3) | dict.fromkeys(found & direct, 2)
    distance |= {path: 1 for path in distance if rooms & {*path.relative_to(ROOT).parts[1:-1]}}
    distance |= {path: 0 for path in found if path.name == named}
    return sorted(distance, key=lambda path: (distance[path], path))


def is_of_tests(path: Path) -> bool:
    """Whether it stands below the folder of the tests."""
    return path.relative_to(ROOT).parts[0] == "tests"


def is_test(path: Path) -> bool:
    """Whether pytest collects it."""
    return is_of_tests(path) and path.name.startswith("test_")


def main(words: list[str]) -> None:
    """Show the tests near the file, and become pytest over them."""
    file = Path(words[0]).resolve()
    if not file.is_relative_to(ROOT / "ddp_runner") or not file.is_file():
        sys.exit(f"--near {words[0]}: must be a file of ddp_runner/")
    found = near(file)
    if not found:
        sys.exit(f"--near {words[0]}: no test imports it, nor what imports it; see CONTRIBUTING.md")
    chosen = [str(path.relative_to(ROOT)) for path in found[:FILES_MAX]]
    left = f", and {len(found) - FILES_MAX} more" if len(found) > FILES_MAX else ""
    print(f"near {words[0]}: {' '.join(chosen)}{left}", flush=True)
    guards = re.findall(r"\btest_\w+", " ".join(_comments(file)))
    if guards:
        print(f"its invariants are guarded by: {', '.join(dict.fromkeys(guards))}", flush=True)
    asked = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", LEFT_OUT]
    os.execv(sys.executable, [*asked, *chosen, *words[1:]])


def _comments(file: Path) -> list[str]:
    return [line for line in text_of(file).splitlines() if line.lstrip().startswith("#")]


if __name__ == "__main__":
    main(sys.argv[1:])
