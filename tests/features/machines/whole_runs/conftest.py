"""Two machines, or what stands for them: supervisors of their own that know each other by an address only."""

from __future__ import annotations

import contextlib
import random
import socket
from pathlib import Path

import pytest

from tests.scenarios import conftest as scenarios
from tests.scenarios.conftest import made_once
from tests.scenarios.harness import Run

__all__ = ["made_once"]

STEPS = 60
TOKEN = "0123456789abcdef"
PORTS = (15_000, 30_000)
SETTINGS = (
    *("-b", 8, "--max-steps", STEPS, "num_workers=0", "save_every_steps=20", "--audit"),
    *("evaluate_interval=0", "evaluate_every_steps=0", "log.display=plain", *scenarios.PATIENT),
)


def pytest_collection_modifyitems(items):
    """What starts nodes is a whole run."""
    folder = f"{Path(__file__).parent}/"
    for item in items:
        if str(item.path).startswith(folder) and "nodes" in item.fixturenames:
            item.add_marker(pytest.mark.whole_run)


def free_port():
    """Below those that the system hands out: nobody else takes it between here and its use."""
    while True:
        port = random.randrange(*PORTS)
        with contextlib.suppress(OSError), socket.create_server(("127.0.0.1", port)):
            return port


class Nodes:
    """The nodes of one run: node ``k`` has its folder, and is started by :meth:`start`."""

    def __init__(self, folder, *, ranks=2):
        self.folder = folder
        self.ranks = ranks
        self.port = free_port()
        self.runs = []
        self.token = folder / "token"
        self.token.write_text(TOKEN)
        self.token.chmod(0o600)

    def start(
        self, number, *arguments, nnodes="2", ranks=None, has_token=True, gives_number=True, **how
    ):
        """A supervisor in the folder of node ``number``; the same folder again is the same node."""
        words = ("--nnodes", nnodes, "--rdzv-endpoint", f"127.0.0.1:{self.port}")
        words += ("--token-file", str(self.token)) if has_token else ()
        words += ("--node-rank", number) if gives_number else ()
        run = Run(
            self.folder / f"node{number}",
            *(*SETTINGS, *words, *arguments),
            world=self.ranks if ranks is None else ranks,
            **how,
        )
        self.runs.append(run)
        return run

    def end(self):
        """Whatever a test has left."""
        for run in self.runs:
            run.__exit__(None, None, None)


@pytest.fixture
def nodes(tmp_path):
    made = Nodes(tmp_path)
    yield made
    made.end()


@pytest.fixture
def one_machine(made_once):
    """The weights of the same ranks on one machine."""
    return lambda world: made_once(*SETTINGS, world=world).digest
