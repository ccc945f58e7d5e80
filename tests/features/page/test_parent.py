"""The page beside a run: started once, with a token that is written nowhere, and a run that needs none of it."""

from __future__ import annotations

import json
import os
import re
import socket
from dataclasses import replace

import pytest

from ddp_runner.cli import extras
from ddp_runner.cli.planning import page_notes
from ddp_runner.config import check_relations, refuse_without_supervisor, resolve
from ddp_runner.core.settings import LogSettings
from ddp_runner.features.page import parent
from ddp_runner.features.page.parent import PAGE, PORTS_TRIED, PageKeeper, free_port
from ddp_runner.kernel.processes.children import Ended
from ddp_runner.kernel.rules.errors import BadInputError
from ddp_runner.kernel.system.clock import SYSTEM_CLOCK
from tests import processes

TAKEN_S = 20.0


def settings(*assignments):
    return resolve(command_line=list(assignments)).settings


@pytest.fixture
def made(tmp_path, monkeypatch):
    """(keeper, lines that were said, lines that were announced) over a stand-in for the page."""
    monkeypatch.setattr(parent, "find_spec", lambda name: name)
    said, announced = [], []

    def make(**given):
        return PageKeeper(
            LogSettings(page=True, **given),
            tmp_path,
            clock=SYSTEM_CLOCK,
            role=replace(PAGE, module="tests.features.page.echo_page"),
            say=lambda text, **_: said.append(text),
            announce=announced.append,
        )

    return make, said, announced


def test_the_page_is_started_once_with_a_token_of_its_own(made, tmp_path):
    """On a free port; the token goes through a pipe: neither command line nor log has it."""
    make, said, announced = made
    keeper = make(page_can_inject=True)
    keeper.look()
    keeper.look()
    (line,) = announced
    port, token = re.fullmatch(
        r"page: http://127\.0\.0\.1:(\d+)/run/~\?token=(\S{20,})", line
    ).groups()
    given = processes.poll(
        lambda: (tmp_path / "given.json").exists() and json.loads((tmp_path / "given.json").read_text()),
        timeout_s=TAKEN_S,
        what="the stand-in",
    )  # fmt: skip
    folder, _, *rest = given["words"]
    assert [folder, *rest] == [str(tmp_path), str(os.getpid()), "1"]
    assert given["port"] == int(port)
    assert (given["token"], given["rest"]) == (token, "")
    pid, _ = os.wait()
    ended = Ended(pid=pid, exit_code=0, signal_number=None, at_ns=0)
    assert said == []
    assert not keeper.took(replace(ended, pid=pid + 1))
    assert keeper.took(ended)
    assert "the run continues" in said[0]
    assert token not in said[0]
    keeper.look()
    assert len(announced) == 1
    assert (tmp_path / "page.log").read_text() == ""


def test_a_port_that_is_taken_is_passed_over():
    """The next free one; None where so many in a row are taken."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with free_port(port) as found, socket.socket() as early:
            assert port < found.getsockname()[1] < port + PORTS_TRIED
            early.connect(found.getsockname())  # who is early waits until the page is ready
    assert free_port(65_536) is None


def test_a_page_that_cannot_be_started_is_one_line(made, monkeypatch):
    """And the run goes on."""
    make, said, announced = made
    monkeypatch.setattr(parent, "free_port", lambda first: None)
    make(page_port=9000).look()
    monkeypatch.undo()
    assert said == ["no page: ports 9000 to 9019 are taken"]
    assert announced == []


def test_without_the_extra_a_run_says_how_to_install_it(tmp_path, monkeypatch):
    """As a line at its start; nothing is started, and nothing refused."""
    monkeypatch.setattr(extras, "find_spec", lambda name: None)
    wanted = settings(("log.page", "true"))
    (line,) = page_notes(wanted)
    assert line.startswith("no page, the run continues without it: NiceGUI is not installed")
    assert "environment --extra page" in line
    assert page_notes(settings()) == ()
    monkeypatch.setattr(parent, "find_spec", lambda name: None)
    PageKeeper(
        wanted.log, tmp_path, clock=SYSTEM_CLOCK, say=pytest.fail, announce=pytest.fail
    ).look()
    assert list(tmp_path.iterdir()) == []


def test_what_has_no_page_beside_it_refuses_what_is_of_one():
    """One line with the cure."""
    with pytest.raises(BadInputError, match=r"log\.page_can_inject=true: .*give --page too"):
        check_relations(settings(("log.page_can_inject", "true")))
    with pytest.raises(BadInputError, match=r"log\.page=true: needs a supervisor"):
        refuse_without_supervisor(settings(("log.page", "true")), world_size=1)
    with pytest.raises(BadInputError, match=r"log\.page_port=0"):
        settings(("log.page_port", "0"))
