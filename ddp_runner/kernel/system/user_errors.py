"""An exception that a user's code raised, as text with their frames and not ours. Handles none."""

from __future__ import annotations

import sysconfig
import traceback
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

_PACKAGE = Path(__file__).resolve().parents[2]
_TASKS = str(_PACKAGE / "tasks")  # examples of a user's
_LIBRARIES = tuple(
    f"{folder}/"
    for name, folder in sysconfig.get_paths().items()
    if name.endswith(("lib", "stdlib"))
)


def traceback_text(error: BaseException) -> str:
    """The traceback, with the user's frame last and without ours; whole where the error is not the user's."""
    found = traceback.TracebackException.from_exception(error)
    left, seen = [found], set()
    while left:
        one = left.pop()
        if id(one) in seen:
            continue
        seen.add(id(one))
        if (frames := _of_user(one.stack)) is not None:
            one.stack = traceback.StackSummary.from_list(frames)
        left += [other for other in (one.__cause__, one.__context__) if other is not None]
    return "".join(found.format())


def user_place(error: BaseException) -> str:
    """The file and line where the user's code was: ``task.py:31``; empty where the error is not the user's."""
    frames = _of_user(traceback.extract_tb(error.__traceback__))
    if frames is None:
        return ""
    return f"{Path(frames[-1].filename).name}:{frames[-1].lineno}"


def _of_user(
    stack: Sequence[traceback.FrameSummary],
) -> list[traceback.FrameSummary] | None:
    """Return the stack from the user's first frame to the last, without ours; None if the user's code did not raise."""
    known = [n for n, frame in enumerate(stack) if not _is_library(frame)]
    if not known or _is_ours(stack[known[-1]]):
        return None
    first = next(n for n in known if not _is_ours(stack[n]))
    return [frame for frame in stack[first : known[-1] + 1] if not _is_ours(frame)]


def _is_ours(frame: traceback.FrameSummary) -> bool:
    name = frame.filename
    return name.startswith(f"{_PACKAGE}/") and not name.startswith(f"{_TASKS}/")


def _is_library(frame: traceback.FrameSummary) -> bool:
    name = frame.filename
    if name.startswith(f"{_PACKAGE}/"):
        return False  # wherever it is installed
    return name.startswith(("<frozen", *_LIBRARIES)) or "/site-packages/" in name
