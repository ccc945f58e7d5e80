"""Finds the files of a user's own loop, and says in one line, with the line of its file, what it does wrong."""

from __future__ import annotations

import ast
import hashlib
import linecache
import os
import sys
from pathlib import Path
from types import FrameType

from ddp_runner.kernel.rules.errors import BadInputError
from ddp_runner.system.code_files import INSTALLED, is_users_file

_IS_INSTALLED = {*INSTALLED, "ddp_runner"}


def misuse(expected: str) -> BadInputError:
    """An error that names the line of the user's file that has led here; ``expected``: what is wrong."""
    return BadInputError(user_line(), "", expected)


def user_line() -> str:
    """``train.py:31``: where the innermost frame is that is neither ours nor torch's."""
    frame = user_frame()
    if frame is None:
        return "the loop"
    return f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}"


def user_frame() -> FrameType | None:
    """The innermost frame that is neither ours nor that of anything installed."""
    frame: FrameType | None = sys._getframe(1)  # noqa: SLF001 - as warnings.warn finds the caller
    while frame is not None and not is_users_file(frame.f_code.co_filename):
        frame = frame.f_back
    return frame


def is_guarded() -> bool:
    """Return True if the program's main module got here under ``if __name__ == ...``, or has no known source."""
    frame: FrameType | None = sys._getframe(1)  # noqa: SLF001 - as above
    while frame is not None and frame.f_globals.get("__name__") != "__main__":
        frame = frame.f_back
    while frame is not None and frame.f_code.co_name != "<module>":
        frame = frame.f_back
    if frame is None:
        return True
    try:
        lines = linecache.getlines(frame.f_code.co_filename, frame.f_globals)
        tree = ast.parse("".join(lines))
    except (SyntaxError, ValueError):
        return True
    tests = [
        node.test
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and node.lineno <= frame.f_lineno <= (node.end_lineno or 0)
    ]
    return not tree.body or any("__name__" in ast.unparse(test) for test in tests)


def program_files(*, since: int = 0) -> dict[str, str]:
    """The program's script, and its files beside it -> a hash of what is there now; by their paths from it.

    Of the script that runs, whatever has become of its file. ``since``: leaves out so many modules, imported before.
    """
    main, folder = sys.modules.get("__main__"), _folder_of_program()
    script = getattr(main, "__file__", None)
    found = {}
    if script and not since and (lines := linecache.getlines(script)):
        found[Path(script).name] = _digest("".join(lines).encode(errors="surrogatepass"))
    inside: dict[
        str, Path | None
    ] = {}  # of each folder: a program has imported thousands of modules
    for module in list(sys.modules.values())[since:]:
        path = getattr(module, "__dict__", {}).get("__file__")  # a lazy module would import others
        if not isinstance(path, str) or not path.endswith(".py") or module is main:
            continue
        place, name = os.path.split(path)
        if place not in inside:
            inside[place] = _inside(place, folder)
        if (at := inside[place]) is not None and (digest := digest_there(str(at / name))):
            found[str(at / name)] = digest
    return found


def digest_there(name: str) -> str:
    """Return the hash of a file of the program, named as :func:`program_files` does; empty if it is not there."""
    try:
        return _digest((_folder_of_program() / name).read_bytes())
    except OSError:
        return ""


def _folder_of_program() -> Path:
    script = getattr(sys.modules.get("__main__"), "__file__", None)
    return Path(script).resolve().parent if script else Path.cwd()


def _digest(text: bytes) -> str:
    return hashlib.sha256(text).hexdigest()[:16]


def _inside(place: str, folder: Path) -> Path | None:
    """Return the path of ``place`` from ``folder``; None where it is elsewhere, or of an installed package."""
    if not _IS_INSTALLED.isdisjoint(place.split("/")):
        return None
    real = Path(place).resolve()
    is_inside = real.is_relative_to(folder) and _IS_INSTALLED.isdisjoint(real.parts)
    return real.relative_to(folder) if is_inside else None
