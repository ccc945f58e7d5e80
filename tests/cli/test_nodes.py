"""Which machine coordinates, before any process: names that are known late, or never."""

from __future__ import annotations

import socket

import pytest

from ddp_runner.cli import nodes
from ddp_runner.core.faults import BadInputError
from ddp_runner.core.node_options import NodeOptions
from tests.nodes.conftest import free_port


@pytest.fixture
def late_name(monkeypatch):
    """A name that is asked for twice before the machine knows it, as that of a pod is."""
    real, asked = socket.getaddrinfo, []

    def getaddrinfo(host, *arguments, **named):
        asked.append(host)
        if len(asked) < 3:
            raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")
        return real("127.0.0.1", *arguments, **named)

    monkeypatch.setattr(nodes.socket, "getaddrinfo", getaddrinfo)
    monkeypatch.setattr(nodes, "_LOOK_AGAIN_S", 0.01)
    return asked


def _options(**how):
    return NodeOptions(least=2, most=2, host="train-0.train", port=free_port(), **how)


def test_the_coordinator_waits_for_its_own_name(late_name):
    """Which a pod may get some seconds after it has been started."""
    door = nodes.coordinators_door(_options(node_rank=0))
    with door.listening:
        assert (door.address, len(late_name)) == ("127.0.0.1", 3)


@pytest.mark.parametrize("how", [{}, {"node_rank": 0, "join_timeout_s": 0.0}])
def test_a_name_that_nobody_knows_is_wrong_input(late_name, how):
    """At once where it may be misspelled, for it may be any machine's; else when the time is over."""
    with pytest.raises(BadInputError, match="is no name that this machine can resolve"):
        nodes.coordinators_door(_options(**how))
    assert len(late_name) == 1
