"""A terminal with a shell in it, in which a person types a command; then keys, or the window is closed.

``python terminal.py FOLDER COMMAND...``: what the command prints is printed; its exit code is this one's,
also where the shell has ended before it. Files in FOLDER are what the person does: ``keys`` is typed and
removed, ``close`` closes the window.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import pty
import select
import shlex
import sys
import time
from pathlib import Path

_BECOME_SUBREAPER = 36  # of prctl(2)
_LOOK_S = 0.02


def main(folder, command):
    """Until everything that was begun in the terminal has ended."""
    ctypes.CDLL(None).prctl(_BECOME_SUBREAPER, 1, 0, 0, 0)
    shell, terminal = pty.fork()
    if shell == 0:
        os.execvp("bash", ["bash", "--norc", "--noprofile", "-i"])
    code_file = folder / "code"
    line = f"{shlex.join(command)}; echo $? > {shlex.quote(str(code_file))}; exit\n"
    os.write(terminal, line.encode())
    code = None
    while True:
        _copy(terminal)
        terminal = _act(folder, terminal)
        with contextlib.suppress(ChildProcessError):
            pid, status = os.waitpid(-1, os.WNOHANG)
            if pid not in (0, shell) and code is None:
                # It has outlived its shell; what it leaves to us in turn ends after it.
                code = os.waitstatus_to_exitcode(status)
            continue
        break
    return int(code_file.read_text()) if code_file.exists() else code


def _copy(terminal):
    if terminal < 0:
        time.sleep(_LOOK_S)
    elif select.select([terminal], [], [], _LOOK_S)[0]:
        with contextlib.suppress(OSError):  # the shell has gone
            os.write(1, os.read(terminal, 4096))


def _act(folder, terminal):
    keys = folder / "keys"
    if terminal >= 0 and keys.exists():
        typed = keys.read_bytes()
        keys.unlink()
        for key in typed:
            os.write(terminal, bytes([key]))
            time.sleep(0.03)  # as a keyboard repeats
    if terminal >= 0 and (folder / "close").exists():
        os.close(terminal)
        return -1
    return terminal


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), sys.argv[2:]))
