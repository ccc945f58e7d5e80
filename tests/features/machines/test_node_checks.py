"""`doctor --rdzv-endpoint` where no run answers; tests/features/machines/whole_runs has one that does."""

from __future__ import annotations

import json
import socket
import threading

import pytest

from ddp_runner.__main__ import main
from ddp_runner.cli.hardware.machine_checks import Verdict
from ddp_runner.features.machines.node_checks import (
    Asked,
    check_endpoint,
    check_interface,
    node_checks,
)

TOKEN = {"DDP_RUNNER_TOKEN": "0123456789abcdef"}


def asked(**named):
    names = ("local_addr", "token_file", "checkpoint_dir", "log_dir")
    return Asked(**{"host": "127.0.0.1", "port": 1, **dict.fromkeys(names, ""), **named})


def verdicts(environment=TOKEN, **named):
    return {check.name: check for check in node_checks(asked(**named), environment)}


def test_where_nobody_listens_yet_there_is_a_warning_and_no_failure():
    """It is asked before the run as well as beside it."""
    found = verdicts()
    assert found["endpoint"].verdict is Verdict.WARN
    assert "nobody listens at 127.0.0.1:1 yet" in found["endpoint"].found
    assert found["token"].verdict is Verdict.OK
    assert verdicts(environment={})["token"].verdict is Verdict.WARN


def test_who_listens_there_and_is_none_of_ours_is_named():
    """Such as a web server, or another run's store."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]

        def answer():
            connection, _ = server.accept()
            with connection:
                connection.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")
                connection.recv(1024)

        thread = threading.Thread(target=answer)
        thread.start()
        found = verdicts(port=port)
        thread.join()
    assert found["endpoint"].verdict is Verdict.OK
    assert found["coordinator"].verdict is Verdict.FAIL
    assert "no node of this version" in found["coordinator"].found


def test_a_name_that_does_not_resolve_and_a_wrong_address_fail():
    """Each with what to do."""
    _, endpoint = check_endpoint(asked(host="no.such.host.invalid"))
    assert endpoint.verdict is Verdict.FAIL
    assert endpoint.cure
    interface = check_interface(asked(local_addr="10.254.254.254"))
    assert (interface.verdict, interface.found) == (
        Verdict.FAIL,
        "10.254.254.254 is no address of this machine",
    )
    named = check_interface(asked(host="localhost", local_addr="localhost"))
    assert named.verdict is Verdict.WARN
    assert "which no other machine reaches" in named.found


def test_doctor_says_it_beside_its_own_checks(capsys, monkeypatch, tmp_path):
    """With its exit code, and the folders that it is given."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv(*next(iter(TOKEN.items())))
    words = ["doctor", "--quick", "--cpu", "--json", "--rdzv-endpoint", "127.0.0.1:1"]
    assert main(words) == 0
    said = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [check["name"] for check in said[-3:]] == ["interface", "endpoint", "token"]
    assert TOKEN["DDP_RUNNER_TOKEN"] not in str(said)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (("--rdzv-endpoint", "host:0"), "--rdzv-endpoint=host:0: must have a port"),
        (("--rdzv-endpoint", "host", "--token-file", "none"), "No such file"),
        (("--local-addr", "10.0.0.1"), "is for --rdzv-endpoint, which is not given"),
    ],
)
def test_what_cannot_be_asked_is_one_line(capsys, words, line):
    """Before any check."""
    assert main(["doctor", "--quick", *words]) == 2
    said = capsys.readouterr()
    assert line in said.err
    assert not said.out
