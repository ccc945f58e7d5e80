"""A machine that cannot reach itself."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys

import pytest

from ddp_runner.kernel.system.reach import why_unreachable
from tests.scenarios.harness import PYTHON_M, ROOT

SANDBOX = ("unshare", "-Urn")  # a network whose loopback interface is down, as in many sandboxes
TOKEN = "0123456789abcdef"


@pytest.fixture
def in_sandbox(tmp_path):
    """Run a command where the loopback interface is down: its exit code and what it said."""
    with contextlib.suppress(OSError):
        if not subprocess.run([*SANDBOX, "true"], capture_output=True, check=False).returncode:
            environment = {**os.environ, "PYTHONPATH": str(ROOT), "DDP_RUNNER_TOKEN": TOKEN}
            return lambda *command: subprocess.run(
                [*SANDBOX, *command],
                cwd=tmp_path,
                env=environment,
                capture_output=True,
                text=True,
                check=False,
                timeout=60,
            )
    pytest.skip("this machine lets nobody make a network namespace")


@pytest.mark.parametrize(
    "words",
    [
        ("train", "--task", "synthetic", "--cpu", "-n", "2"),
        ("run", "-n", "1", str(ROOT / "docs" / "examples" / "my_loop.py")),
        ("train", "--cpu", "-n", "2", "--nnodes", "2", "--rdzv-endpoint", "localhost:15000"),
        (
            *("train", "--cpu", "-n", "2", "--nnodes", "2", "--node-rank", "1"),
            *("--rdzv-endpoint", "localhost:15000"),
        ),
    ],
)
def test_a_loopback_that_is_down_is_one_line_and_exit_2(in_sandbox, words, tmp_path):
    """On one machine, and on either side of several, before any process or folder."""
    ended = in_sandbox(*PYTHON_M, *words)
    assert ended.returncode == 2, ended.stderr
    assert ended.stderr == (
        "ddp_runner: error: 127.0.0.1: cannot be reached from this machine itself (Network is "
        "unreachable); the loopback interface is down: run `ip link set lo up`, or give the "
        "sandbox one\n"
    )
    assert not list(tmp_path.iterdir())


OWN_ADDRESS = """
ip link add end0 type veth peer name end1 && ip addr add 10.9.0.1/24 dev end0 || exit 9
ip link set end0 up && ip link set end1 up || exit 9
"$0" -c 'from ddp_runner.kernel.system.reach import why_unreachable; print(why_unreachable("10.9.0.1"))'
"""


def test_an_address_of_a_network_needs_the_loopback_too(in_sandbox):
    """A machine reaches itself over it by each address; where it is up nothing is said."""
    said = in_sandbox("sh", "-c", OWN_ADDRESS, sys.executable)
    if said.returncode == 9:
        pytest.skip("there is no ip command, or no veth")
    assert said.stdout.startswith("cannot be reached from this machine itself"), said.stderr
    assert "the loopback interface is down" in said.stdout
    assert why_unreachable("127.0.0.1") == ""
