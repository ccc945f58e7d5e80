"""The token that a coordinator makes in a shared checkpoint folder, and who may take it from there."""

from __future__ import annotations

import os
import stat
import threading
import time

import pytest

from ddp_runner.core.launch_plan import NodeOptions
from ddp_runner.features.machines import token_file
from ddp_runner.features.machines.launching import TOKEN_BYTES_MIN, await_token, given_token
from ddp_runner.features.machines.token_file import (
    TOKEN_NAME,
    make_token,
    shared_token,
    why_not_secret,
)
from ddp_runner.kernel.rules.errors import BadInputError

NOBODY_LISTENS = NodeOptions(least=2, most=2, host="127.0.0.1", port=1, join_timeout_s=0.2)


def test_a_token_is_made_once_and_only_its_owner_can_read_it(tmp_path):
    """Whole or not at all, and nothing else is left; the folder is made with it."""
    folder = tmp_path / "kept"
    token = make_token(folder)
    assert len(token) >= 4 * TOKEN_BYTES_MIN
    assert make_token(folder) == token == shared_token(folder)
    assert [path.name for path in folder.iterdir()] == [TOKEN_NAME]
    assert stat.S_IMODE((folder / TOKEN_NAME).stat().st_mode) == 0o600
    assert make_token(tmp_path / "other") != token


def test_of_two_that_make_a_token_at_once_both_have_the_same(tmp_path):
    """Whoever comes second takes the first one's."""
    found = []
    each = [
        threading.Thread(target=lambda: found.append(make_token(tmp_path / "kept")))
        for _ in range(8)
    ]
    for one in each:
        one.start()
    for one in each:
        one.join()
    assert len(found) == 8
    assert len(set(found)) == 1


def test_a_file_system_without_links_has_a_token_too(tmp_path, monkeypatch):
    """There it is renamed to its place."""

    def refuse(*_):
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(token_file.os, "link", refuse)
    assert make_token(tmp_path) == shared_token(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == [TOKEN_NAME]


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o660])
def test_a_token_that_others_can_read_or_made_is_refused(tmp_path, mode):
    """The line says what to do, and shows nothing of it."""
    token = make_token(tmp_path).decode()
    path = tmp_path / TOKEN_NAME
    path.chmod(mode)
    for ask in (make_token, shared_token):
        with pytest.raises(BadInputError, match=f"mode {mode:04o}.*remove") as refused:
            ask(tmp_path)
        assert token not in str(refused.value)
    path.chmod(0o600)
    path.rename(tmp_path / "elsewhere")
    path.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(BadInputError, match="is a symbolic link: remove it"):
        shared_token(tmp_path)


def test_a_token_of_another_user_is_refused(tmp_path, monkeypatch):
    """Whoever put it there knows it."""
    make_token(tmp_path)
    monkeypatch.setattr(token_file.os, "geteuid", lambda: os.getuid() + 1)
    with pytest.raises(BadInputError, match="of another user; or give all machines"):
        shared_token(tmp_path)


def test_half_a_token_is_waited_for_and_never_replaced(tmp_path):
    """It may be on its way; what stays half is nobody's to guess."""
    (tmp_path / TOKEN_NAME).write_bytes(b"0123456789abcdef")
    (tmp_path / TOKEN_NAME).chmod(0o600)
    assert shared_token(tmp_path) is None
    with pytest.raises(BadInputError, match="is not whole: remove"):
        make_token(tmp_path)


def test_who_comes_first_waits_for_the_token_and_says_so(tmp_path):
    """Until the coordinator makes it, within join_timeout."""
    said = []
    made = []

    def make():
        while not said:
            time.sleep(0.01)
        made.append(make_token(tmp_path))

    maker = threading.Thread(target=make)
    maker.start()
    options = NodeOptions(least=2, most=2, host="127.0.0.1", port=1, join_timeout_s=60.0)
    found = await_token(tmp_path, options, say=said.append)
    maker.join()
    assert [found] == made
    assert said == [f"waiting for {tmp_path / TOKEN_NAME}, which the coordinator creates"]


def test_without_any_token_there_is_one_line(tmp_path):
    """It names all three ways; nothing is made."""
    with pytest.raises(BadInputError) as refused:
        await_token(tmp_path, NOBODY_LISTENS, say=lambda _: None)
    for way in ("DDP_RUNNER_TOKEN", "--token-file", f"made none in {tmp_path}"):
        assert way in str(refused.value)
    assert not list(tmp_path.iterdir())


def test_a_file_given_by_name_comes_before_the_variable(tmp_path):
    """And an empty one is no token."""
    file = tmp_path / "token"
    file.write_text("of the file, long enough\n")
    file.chmod(0o600)
    environment = {"DDP_RUNNER_TOKEN": "of the variable, long enough"}
    assert given_token(environment, str(file)) == b"of the file, long enough"
    assert given_token(environment, "") == b"of the variable, long enough"
    assert given_token({}, "") == b""
    file.write_text("\n")
    with pytest.raises(BadInputError, match="at least 16 characters"):
        given_token(environment, str(file))


def test_a_given_file_that_others_can_read_is_refused(tmp_path):
    """As the folder's own is; nothing of it is shown."""
    file = tmp_path / "token"
    file.write_text("of the file, long enough\n")
    file.chmod(0o604)
    with pytest.raises(BadInputError, match=r"mode 0604.*chmod 600") as refused:
        given_token({}, str(file))
    assert "long enough" not in str(refused.value)


@pytest.mark.parametrize(
    ("owner", "mode", "is_secret"),
    [
        (7, 0o600, True),
        (7, 0o400, True),
        (7, 0o640, False),
        (7, 0o604, False),
        (8, 0o600, False),
        (0, 0o440, True),
        (0, 0o444, False),
        (0, 0o460, False),
    ],
)
def test_who_may_read_a_given_file_decides(owner, mode, is_secret):
    """User 7's own, another's, and root's, as a cluster mounts it for the group of a container."""
    assert (why_not_secret(owner=owner, mode=0o100000 | mode, mine=7) == "") is is_secret
