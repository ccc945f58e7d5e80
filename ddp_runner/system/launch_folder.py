"""The working directory of a launch: a run's relative paths mean it, wherever user code goes. Changes no directory."""

from __future__ import annotations

from pathlib import Path


class _Launch:
    """``folder``: of the newest launch in this process, or in the one that it was forked from; empty: none yet."""

    folder = Path()


def begin_here() -> None:
    """Note the working directory, before any code of the user's can change it."""
    try:
        _Launch.folder = Path.cwd()
    except OSError:  # it was removed
        _Launch.folder = Path()


def at_launch(path: str | Path) -> Path:
    """Return ``path`` as it was meant at the launch: absolute, so that ``os.chdir`` in user code moves nothing."""
    return _Launch.folder / path


def as_given(path: Path, *folders: str) -> Path:
    """Return ``path``, which one of ``folders`` may hold, as people have named that folder."""
    for folder in filter(None, folders):
        if path.is_relative_to(at_launch(folder)):
            return Path(folder) / path.relative_to(at_launch(folder))
    return path
