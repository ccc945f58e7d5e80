"""The token of a run on several machines: in a file that the user names, or in its shared checkpoint folder.

The one in the folder is for those that are given none. Only its owner can read it. It is made once for each
folder and kept: a coordinator that is started again, and machines that are there already, have the same one.
Nothing of a token is ever shown.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import stat
from pathlib import Path

from ddp_runner.kernel.rules.errors import BadInputError
from ddp_runner.kernel.system.run_files import RefusedFileError, open_to_read, temporary_path

TOKEN_NAME = ".token"  # noqa: S105 - a name
_TOKEN_BYTES = 32
_FILE_MODE = 0o600
_OF_OTHERS = stat.S_IRWXG | stat.S_IRWXO
_FILE_BYTES = 2 * _TOKEN_BYTES + 1  # hexadecimal digits and the end of the line
_GIVEN_BYTES_MAX = 64 * 1024
_OTHERWISE = "or give all machines DDP_RUNNER_TOKEN or --token-file"


def make_token(folder: Path) -> bytes:
    """Return the token in ``folder``; make it, and the folder, if needed.

    Raises BadInputError if it cannot be made, or another user can read it.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        found = shared_token(folder)
        if found is None:
            _publish(folder / TOKEN_NAME)
            found = shared_token(folder)
    except OSError as error:
        raise _refused(
            folder, f"takes no token: {error.strerror or error}; {_OTHERWISE}"
        ) from error
    if found is None:
        path = folder / TOKEN_NAME
        raise _refused(folder, f"has a token that is not whole: remove {path}, {_OTHERWISE}")
    return found


def shared_token(folder: Path) -> bytes | None:
    """Return the token in ``folder``; None while there is no complete one.

    Raises BadInputError if another user can read it, or may have made it.
    """
    path = folder / TOKEN_NAME
    try:
        with os.fdopen(open_to_read(path), "rb") as file:
            found = os.fstat(file.fileno())
            content = file.read(_FILE_BYTES + 1)
    except FileNotFoundError:
        return None
    except RefusedFileError as error:
        raise _refused(folder, f"{TOKEN_NAME} in it {error.strerror}: remove it") from error
    except PermissionError as error:
        raise _refused(folder, f"its token is of another user; {_OTHERWISE}") from error
    # INVARIANT own-token: a token that others can read, or may have put there, is never used. Broken
    # if: the content is taken before owner and mode of the very file that was opened are looked at.
    # Guarded by: test_a_token_that_others_can_read_or_made_is_refused.
    if found.st_uid != os.geteuid():
        raise _refused(folder, f"its token is of another user; {_OTHERWISE}")
    if found.st_mode & _OF_OTHERS:
        mode = f"{stat.S_IMODE(found.st_mode):04o}"
        cure = f"remove {path}, so that a new one is made, {_OTHERWISE}"
        raise _refused(folder, f"others may have read its token (mode {mode}): {cure}")
    is_whole = len(content) == _FILE_BYTES and content.endswith(b"\n")
    return content.strip() if is_whole else None


def given_token_in(path: Path) -> bytes:
    """Return the token in a file that the user names; a link, a pipe and a file of an administrator's are read, too.

    Raises BadInputError if it cannot be read, or if others can read it.
    """
    try:
        with path.open("rb") as file:
            found = os.fstat(file.fileno())
            content = file.read(_GIVEN_BYTES_MAX)
    except OSError as error:
        raise BadInputError("--token-file", path, f"{error.strerror}") from error
    if why := why_not_secret(owner=found.st_uid, mode=found.st_mode, mine=os.geteuid()):
        raise BadInputError("--token-file", path, why)
    return content.strip()


def why_not_secret(*, owner: int, mode: int, mine: int) -> str:
    """Return why a file that a user of id ``mine`` names is no secret, in words; empty if it is one."""
    is_roots = owner == 0
    if not is_roots and owner != mine:
        return "is of another user, who knows it"
    # Clusters mount a secret as root's file, which a group may read: the one of those who are to have it.
    if mode & (_OF_OTHERS & ~stat.S_IRGRP if is_roots else _OF_OTHERS):
        shown = f"{stat.S_IMODE(mode):04o}"
        return (
            f"others may have read it (mode {shown}): give all machines a new token, with chmod 600"
        )
    return ""


def _publish(path: Path) -> None:
    """Put a new token there, whole, unless another process was faster. Raises OSError."""
    temporary = temporary_path(path)
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    descriptor = os.open(temporary, flags, _FILE_MODE)
    try:
        with os.fdopen(descriptor, "wb") as file:
            os.fchmod(file.fileno(), _FILE_MODE)
            file.write(f"{secrets.token_hex(_TOKEN_BYTES)}\n".encode())
            file.flush()
            os.fsync(file.fileno())
        try:
            with contextlib.suppress(FileExistsError):
                os.link(temporary, path)  # which replaces nothing
        except OSError:  # a file system without links: who comes last has it
            temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def _refused(folder: Path, expected: str) -> BadInputError:
    return BadInputError("--checkpoint-dir", folder, expected)
