"""All ranks end at once: the run goes on from what they have left in memory, with the same weights."""

from __future__ import annotations

import signal

from tests.processes import poll
from tests.scenarios.conftest import WITHOUT_WORKERS
from tests.scenarios.harness import Run
from tests.scenarios.test_all_ranks import newest_whole
from tests.scenarios.test_attached import LOOPS, fault_free, final, run_loop  # noqa: F401

NO_FILES = ("save_every_steps=0", "save_interval=0")


def kill_all(run, world=2):
    """At one moment; returns once the run has gone on from a copy."""
    before = len(run.events("copy_taken"))
    run.signals_at_once(*((signal.SIGKILL, run.rank_pid(rank)) for rank in range(world)))
    poll(lambda: len(run.events("copy_taken")) > before, what=f"a copy: {run.console}")


def test_a_loop_of_one_s_own_goes_on_from_memory_too(tmp_path, fault_free):  # noqa: F811
    """Its scheduler, average and plain values with it."""
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "harm_0_14_forward").write_text("import time; time.sleep(60)")
    with run_loop(tmp_path / "run", options=(*NO_FILES, "memory_every=4", "hang_min_s=30")) as run:
        poll((tmp_path / "run" / "done_harm_0_14_forward").exists, what="step 14")
        kill_all(run)
        assert run.wait() == 0, run.console
    # No copy is made while the one before is still being made, as on busy cores.
    assert run.events("copy_taken")[0]["step"] in (8, 12)
    assert run.summary()["exact"] is True
    assert final(tmp_path / "run") == fault_free()


def test_a_copy_that_does_not_fit_is_passed_over_for_a_file(tmp_path):
    """Two optimizers of the same parameters too: each has its own moments, and they share their groups."""
    loop, options = LOOPS / "sharpness.py", ("save_every_steps=6", "memory_every=2")
    with run_loop(tmp_path / "calm", loop=loop, options=options) as calm:
        assert calm.wait() == 0, calm.console
    folder = tmp_path / "run"
    folder.mkdir()
    for name in ("refuses", "wait_9", "wait_17"):
        (folder / name).touch()
    options = (*options, "hang_min_s=30", "--inject", "kill:rank=1,step=13")
    with run_loop(folder, loop=loop, options=options) as run:
        for step in (9, 17):
            poll((folder / f"waits_{step}").exists, what=f"step {step}: {run.console}")
            # On busy cores the copy of the step before is not whole yet.
            poll(
                lambda before=step - 1: newest_whole(run) == before, what=f"its copy: {run.console}"
            )
            run.signals_at_once(*((signal.SIGKILL, run.rank_pid(rank)) for rank in (0, 1)))
        assert run.wait() == 0, run.console
    assert "does not fit this run: steps cannot be loaded: the newest checkpoint" in run.console
    (copy,) = run.events("copy_taken")
    assert copy["step"] == 16, "the second time"
    assert run.summary()["exact"] is True
    assert final(folder) == final(tmp_path / "calm")


def test_without_copies_the_newest_file_is_taken(tmp_path, made_once):
    """Control: ``memory_every=0`` has no memory and no copy."""
    saves = ("save_every_steps=5",)
    with Run(tmp_path, *WITHOUT_WORKERS, "memory_every=0", *saves, "task.pace_s=0.1") as run:
        run.wait_for_checkpoint(5)
        run.wait_for_step(7)
        run.signals_at_once(*((signal.SIGKILL, run.rank_pid(rank)) for rank in (0, 1)))
        assert run.wait() == 0, run.console
    assert not run.events("copy_taken")
    assert run.digest == made_once(*WITHOUT_WORKERS, world=2).digest
    faults = run.summary()["faults"]
    assert len(faults) == 1, (faults, run.console)
    (fault,) = faults
    assert fault["steps_lost"] > 0
    assert fault["action"].endswith("from the newest checkpoint")
