"""Measures a walk: in how many files of the package a function is called while something is done."""

from __future__ import annotations

import contextlib
import sys
from pathlib import Path

from ddp_runner import installed
from ddp_runner.__main__ import main
from ddp_runner.supervisor import assembly

PACKAGE = str(Path(__file__).parents[1] / "ddp_runner") + "/"


class Walk:
    """The files, relative to the package, in which a function was called. Importing one does not count."""

    def __init__(self):
        self.files = set()

    @contextlib.contextmanager
    def watched(self):
        """Watch this thread for the length of the block."""
        sys.setprofile(self._called)
        try:
            yield self
        finally:
            sys.setprofile(None)

    def _called(self, frame, event, _):
        code = frame.f_code
        if event == "call" and code.co_filename.startswith(PACKAGE) and code.co_name != "<module>":
            self.files.add(code.co_filename.removeprefix(PACKAGE))


def _walk_to_supervise(words):
    """What the command calls before it supervises; ends there."""
    walk = Walk()

    class ReachedError(BaseException):
        pass

    def reached(*_, **__):
        raise ReachedError

    assembly.supervise = reached
    installed.parts("parent")  # as assembly: what is imported only to supervise does not count
    with contextlib.suppress(ReachedError), walk.watched():
        main(words)
    return walk


if __name__ == "__main__":
    print("\n".join(sorted(_walk_to_supervise(sys.argv[1:]).files)))
