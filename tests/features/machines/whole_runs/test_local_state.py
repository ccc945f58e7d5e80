"""What each rank has of its own, where whole machines are lost: the other machine has it."""

from __future__ import annotations

import signal

import pytest

from tests.features.machines.whole_runs.test_loops import start, wait_for_step
from tests.scenarios.harness import ended
from tests.scenarios.test_attached import plant, run_loop
from tests.scenarios.test_local_state import PLAYING, WAIT, finals

WAITS = ("recovery.coordinator_wait_s=60",)


@pytest.mark.slow
def test_a_lost_machine_gets_its_ranks_state_from_the_other_one(nodes):
    """First the one that does not coordinate, then the coordinator: each with its supervisor and all it keeps."""
    folders = [nodes.folder / f"node{number}" for number in (0, 1)]
    for folder in folders:
        folder.mkdir()
    plant(folders[0], r0_s8_between=WAIT)
    plant(folders[1], r1_s16_between=WAIT)
    program = {"words": (), "world": 1, "loop": PLAYING.read_text(encoding="utf-8")}
    runs = [start(nodes, number, *WAITS, **program) for number in (0, 1)]
    for lost, step in ((1, 8), (0, 16)):
        wait_for_step(runs[0], step)
        runs[lost].signal(signal.SIGKILL)
        runs[lost].assert_gone()
        runs[lost] = start(nodes, lost, *WAITS, **program)
        (folders[1 - lost] / "go").touch()
    assert ended(*runs) == (0, 0), runs[0].console + runs[1].console
    summary = runs[0].summary()
    assert summary["exact"], summary["inexact_reasons"]
    with run_loop(nodes.folder, loop=PLAYING) as calm:
        assert calm.wait() == 0, calm.console
    expected = finals(nodes.folder)
    for folder in folders:
        for path in folder.glob("final_*.pt"):
            path.rename(nodes.folder / path.name)
    assert finals(nodes.folder) == expected
