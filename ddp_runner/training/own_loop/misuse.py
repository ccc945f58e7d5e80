"""One line about what a loop of the user's own does wrong, with the line of the user's file."""

from __future__ import annotations

import ast
import linecache
import sys
from pathlib import Path
from types import FrameType

from ddp_runner.kernel.rules.errors import BadInputError

_OURS = str(Path(__file__).resolve().parents[2])
_FOREIGN = ("/torch/", "/site-packages/", "/contextlib.py", "<frozen", "<string>")


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
    while frame is not None and not is_users(frame.f_code.co_filename):
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


def is_users(path: str) -> bool:
    """Return True if the file contains the program's own code."""
    return not path.startswith(_OURS) and not any(part in path for part in _FOREIGN)
