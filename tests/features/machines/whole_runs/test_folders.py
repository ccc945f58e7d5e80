"""Folders of two machines: the same ones, found out and not assumed, and ones of each machine's own."""

from __future__ import annotations

import os
import shutil
import signal
import stat

from ddp_runner.cli.hardware.machine_checks import Verdict
from ddp_runner.features.machines.node_checks import Asked, node_checks
from tests.features.machines.whole_runs.test_two_nodes import SLOW
from tests.scenarios.harness import assert_every_sample_once, ended, poll


def what_doctor_says(port, checkpoint_dir, *, log_dir="", token_file=""):
    asked = Asked(
        host="127.0.0.1",
        port=port,
        local_addr="",
        token_file=token_file,
        checkpoint_dir=str(checkpoint_dir),
        log_dir=log_dir,
    )
    return {check.name: check.verdict for check in node_checks(asked, {})}


def test_a_token_in_the_shared_folder_lets_the_second_machine_in(nodes, one_machine):
    """It comes first and waits; audits in one folder have every sample, also those of the lost."""
    nodes.ranks, shared = 1, nodes.folder / "shared"
    words = (SLOW, "-c", shared / "kept", "-l", shared / "logs")
    second = nodes.start(1, *words, has_token=False)
    poll(lambda: "which the coordinator creates" in second.console, what="its wait")
    first = nodes.start(0, *words, has_token=False)
    first.logs, first.checkpoints = shared / "logs", shared / "kept"
    second.checkpoints = first.checkpoints
    first.wait_for_step(12)
    pids = first.rank_pid(0), second.rank_pid(1)
    assert what_doctor_says(nodes.port, shared / "kept") == {
        "interface": Verdict.WARN,  # no other machine reaches 127.0.0.1
        "endpoint": Verdict.OK,
        "token": Verdict.OK,
        "run": Verdict.OK,
        "checkpoints there": Verdict.OK,
        "logs there": Verdict.OK,
    }
    own = what_doctor_says(nodes.port, shared / "kept", log_dir=str(nodes.folder))
    assert own["logs there"] is Verdict.WARN
    wrong = what_doctor_says(nodes.port, shared / "kept", token_file=str(nodes.token))
    assert (wrong["endpoint"], wrong["token"]) == (Verdict.OK, Verdict.FAIL)
    assert what_doctor_says(nodes.port, nodes.folder)["token"] is Verdict.WARN
    assert (first.rank_pid(0), second.rank_pid(1)) == pids
    os.kill(second.rank_pid(1), signal.SIGKILL)
    assert ended(first, second) == (0, 0), first.console + second.console
    assert first.summary()["exact"]
    assert first.digest == one_machine(2)
    assert_every_sample_once(first, 2, samples=192)
    assert "of its own" not in first.console
    assert "of its own" not in second.console
    token = (first.checkpoints / ".token").read_text().strip()
    assert stat.S_IMODE((first.checkpoints / ".token").stat().st_mode) == 0o600
    assert not list(shared.rglob(".probe-*"))
    kept = [path for path in shared.rglob("*") if path.is_file() and path.name != ".token"]
    assert not [path for path in kept if token.encode() in path.read_bytes()]
    assert token not in first.console + second.console


def test_a_new_machine_in_the_first_ones_place_loses_nothing(nodes, one_machine):
    """The second has the newest checkpoint, of a time when it was the first; it is the only one with any."""
    nodes.ranks = 1
    first, second = nodes.start(0, SLOW), nodes.start(1, SLOW)
    poll(lambda: "has checkpoints and logs of its own" in first.console, what="what is shared")
    own = f"has a checkpoint folder ({second.checkpoints}) and a log folder ({second.logs}) of its own"
    poll(lambda: own in second.console, what="the same on the machine that has them")
    first.wait_for_checkpoint(20)
    os.kill(second.rank_pid(1), signal.SIGKILL)
    first.wait_for_step(30)
    first.signal(signal.SIGTERM)
    assert ended(first, second) == (75, 75), first.console + second.console
    assert not list(first.logs.glob("audit_rank_1*")), "a record of the other machine's"
    shutil.move(first.checkpoints, second.checkpoints)  # its .owner is a coordinator's of before
    begun = max(int(path.stem.removeprefix("step_")) for path in second.checkpoints.glob("*.pt"))
    first, second = nodes.start(0, SLOW), nodes.start(1, SLOW)
    first.wait_for_checkpoint(begun)
    assert ended(first, second) == (0, 0), first.console + second.console
    assert f"a newer checkpoint, of step {begun}" in first.console
    assert first.events("run_begins")[-1]["resumed_step"] == begun
    assert (first.summary()["exact"], first.digest) == (True, one_machine(2))
