"""Folders of two machines: the same ones, found out and not assumed, and ones of each machine's own."""

from __future__ import annotations

import os
import shutil
import signal
import stat

from tests.nodes.test_two_nodes import SLOW
from tests.scenarios.harness import assert_every_sample_once, poll


def test_a_token_in_the_shared_folder_lets_the_second_machine_in(nodes, one_machine):
    """It comes first and waits; audits in one folder have every sample, also those of the lost."""
    shared = nodes.folder / "shared"
    words = (SLOW, "-c", shared / "kept", "-l", shared / "logs")
    second = nodes.start(1, *words, has_token=False)
    poll(lambda: "which the coordinator makes" in second.console, what="its wait")
    first = nodes.start(0, *words, has_token=False)
    first.logs, first.checkpoints = shared / "logs", shared / "kept"
    second.checkpoints = first.checkpoints
    first.wait_for_step(12)
    os.kill(second.rank_pid(3), signal.SIGKILL)
    assert (first.wait(), second.wait()) == (0, 0), first.console + second.console
    assert first.summary()["exact"]
    assert first.digest == one_machine(4)
    assert_every_sample_once(first, 4, samples=192)
    assert "of its own" not in first.console
    token = (first.checkpoints / ".token").read_text().strip()
    assert stat.S_IMODE((first.checkpoints / ".token").stat().st_mode) == 0o600
    assert not list(shared.rglob(".probe-*"))
    kept = [path for path in shared.rglob("*") if path.is_file() and path.name != ".token"]
    assert not [path for path in kept if token.encode() in path.read_bytes()]
    assert token not in first.console + second.console


def test_a_new_machine_in_the_first_ones_place_loses_nothing(nodes, one_machine):
    """The second has the newest checkpoint, of a time when it was the first; it is the only one with any."""
    first, second = nodes.start(0, SLOW), nodes.start(1, SLOW)
    poll(lambda: "has checkpoints and logs of its own" in first.console, what="what is shared")
    first.wait_for_checkpoint(20)
    os.kill(second.rank_pid(2), signal.SIGKILL)
    first.wait_for_step(30)
    first.signal(signal.SIGTERM)
    assert (first.wait(), second.wait()) == (75, 75), first.console + second.console
    assert not list(first.logs.glob("audit_rank_[23]*")), "a record of the other machine's"
    shutil.move(first.checkpoints, second.checkpoints)  # its .owner is a coordinator's of before
    begun = max(int(path.stem.removeprefix("step_")) for path in second.checkpoints.glob("*.pt"))
    first, second = nodes.start(0, SLOW), nodes.start(1, SLOW)
    first.wait_for_checkpoint(begun)
    assert (first.wait(), second.wait()) == (0, 0), first.console + second.console
    assert f"a newer checkpoint, of step {begun}" in first.console
    assert first.events("run_begins")[-1]["resumed_step"] == begun
    assert (first.summary()["exact"], first.digest) == (True, one_machine(4))
