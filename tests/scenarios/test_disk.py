"""Disks that are full, slow or damage what they keep: training goes on, and what counts survives."""

from __future__ import annotations

import contextlib
import signal
import subprocess
from pathlib import Path

import pytest

from ddp_runner.checkpoint.store import CheckpointStore
from tests.disks import small_disk

from .conftest import LONG, LONG_STEPS, NO_SPARE, PATIENT, STEPS
from .conftest import WITHOUT_WORKERS as SETTINGS
from .harness import WORKLOAD, Run, poll
from .test_trackers import WRITTEN, assert_same_points, stands
from .workload import HOLD_NAME, SLOW_DISK_NAME

pytestmark = pytest.mark.whole_run
SLOW = f"{Path(__file__).with_name('slow_disk.py')}:WritesSlowly"


def injected(*specs):
    return [word for spec in specs for word in ("--inject", spec)]


def finish(folder, *arguments, code=0, world=2):
    with Run(folder, *SETTINGS, *arguments, world=world) as run:
        assert run.wait() == code, run.console
        return run


def saved(run):
    return [event["step"] for event in run.events("checkpoint_saved")]


def verified_steps(run):
    """Every checkpoint in the folder, each read and checked."""
    catalog = CheckpointStore(run.checkpoints, keep_last=1).catalog
    entries = catalog.entries()
    assert [catalog.verify(entry) for entry in entries] == [None] * len(entries)
    return [entry.step for entry in entries]


def test_a_rank_lost_during_a_save_is_replaced_beside_the_save(fault_free, tmp_path):
    """Neither waits for the other: the save that began before the fault ends after the repair."""
    slow_disk = tmp_path / SLOW_DISK_NAME  # slower than the repair, however slow that is
    slow_disk.touch()
    # Rank 0 has ended the step before by then, so that its state is the newest.
    kill = injected("slow:rank=1,step=12,seconds=0.25", "kill:rank=1,step=12")
    with Run(tmp_path, *SETTINGS, *kill, task=SLOW) as run:
        run.wait_for_event("repaired")
        slow_disk.unlink()
        assert run.wait() == 0, run.console
    (fault,) = run.summary()["faults"]
    assert (fault["kind"], fault["rank"], fault["steps_lost"]) == ("rank_killed", 1, 0)
    events = [(event["event"], event.get("step")) for event in run.events()]
    assert events.index(("checkpoint_saved", 10)) > [name for name, _ in events].index("repaired")
    assert saved(run)[-1] == STEPS
    assert run.digest == fault_free(2).digest
    assert STEPS in verified_steps(run)


def test_a_save_that_its_rank_could_not_report_is_found_once(tmp_path):
    """Killed between the last rename and the word to the supervisor: who looks next says it."""
    asked = ("-b", 8, "--max-steps", 25, "save_every_steps=10", "save_interval=0", *PATIENT)
    task = f"{WORKLOAD}:DiesBeforeItReports"
    with Run(tmp_path, *asked, "num_workers=0", task=task) as run:
        assert run.wait() == 0, run.console
    (fault,) = run.summary()["faults"]
    assert (fault["kind"], fault["rank"]) == ("rank_killed", 0)
    steps = saved(run)
    # That of step 20 waits for the one before, where the disk is busy.
    assert (steps[0], steps[-1], len(steps)) == (10, 25, 3)
    newest = max(run.events("checkpoint_saved"), key=lambda event: event["step"])
    assert run.summary()["checkpoint"] == newest["path"] == str(max(run.checkpoints.glob("*.pt")))
    assert newest["size_bytes"] == Path(newest["path"]).stat().st_size


def is_being_written(run):
    return bool(list(run.checkpoints.glob(".*tmp*")))


def test_a_file_is_finished_though_its_writer_and_rank_0_are_killed(fault_free, tmp_path):
    """The writer is replaced and begins again, the next rank 0 reports what it has not begun itself."""
    slow_disk = tmp_path / SLOW_DISK_NAME
    slow_disk.touch()
    with Run(tmp_path, *SETTINGS, task=SLOW) as run:
        poll(lambda: is_being_written(run), what="a save that is being written")
        writer = run.named("ddp:saver").pid
        run.signal(signal.SIGKILL, writer)
        run.wait_for_event("saver_ended")
        poll(lambda: run.named("ddp:saver").pid != writer, what="another writer")
        run.signal(signal.SIGKILL, run.rank_pid(0))
        run.wait_for_event("repaired")
        assert saved(run) == []
        slow_disk.unlink()
        assert run.wait() == 0, run.console
        run.assert_nothing_left()
    (ended,) = run.events("saver_ended")
    assert (ended["signal"], ended["step"]) == (signal.SIGKILL, 10)
    assert "another one takes its place, and continues with that of step 10" in run.console
    assert saved(run).count(10) == 1
    assert (saved(run)[-1], run.digest) == (STEPS, fault_free(2).digest)
    assert STEPS in verified_steps(run)
    assert list(run.checkpoints.glob(".*tmp*")) == []


def test_a_run_that_gives_up_waits_for_the_file_in_hand(tmp_path):
    """Nobody is left who has the state but the process that writes."""
    slow_disk = tmp_path / SLOW_DISK_NAME
    slow_disk.touch()
    with Run(tmp_path, *SETTINGS, "--max-restarts", 0, task=SLOW) as run:
        poll(lambda: is_being_written(run), what="a save that is being written")
        run.signals_at_once(*((signal.SIGKILL, run.rank_pid(rank)) for rank in (0, 1)))
        run.wait_for_event("fault")
        poll(lambda: "ddp:rank0" not in {one.name for one in run.processes()}, what="no rank")
        slow_disk.unlink()
        assert run.wait() == 3, run.console
        run.assert_nothing_left()
    assert (saved(run), verified_steps(run)) == ([10], [10])


def test_a_supervisor_killed_beside_a_save_leaves_disk_and_memory_clean(fault_free, tmp_path):
    """Its copies are gone with it, the writer too; the next launch removes what was half written."""
    slow_disk = tmp_path / SLOW_DISK_NAME
    slow_disk.touch()
    with Run(tmp_path, *SETTINGS, task=SLOW) as run:
        poll(lambda: is_being_written(run), what="a save that is being written")
        run.signal(signal.SIGKILL)
        run.assert_gone()
        run.assert_machine_clean()
    assert verified_steps(run) == []
    slow_disk.unlink()
    with Run(tmp_path, *SETTINGS, NO_SPARE, task=SLOW) as run:
        assert run.wait() == 0, run.console
    assert "which a writer that was killed had left" in run.console
    assert list(run.checkpoints.glob(".*tmp*")) == []
    assert run.digest == fault_free(2).digest


def test_a_rank_killed_inside_its_own_save_leaves_nothing_behind(fault_free, tmp_path):
    """Without copies it writes itself. What was half written is gone, every file that is left verifies."""
    specs = ("slow_disk:rank=0,step=9,seconds=30", "kill:rank=0,step=12")
    run = finish(tmp_path, *injected(*specs), "memory_every=0")
    assert 10 not in saved(run)
    assert run.digest == fault_free(2).digest
    assert STEPS in verified_steps(run)
    assert list(run.checkpoints.glob(".*tmp*")) == []


def test_a_last_save_that_fails_is_exit_1_and_names_the_file(tmp_path):
    """Work that no place takes is no success, reported in one line; the checkpoint before is untouched."""
    last = f"step={STEPS - 1},phase=optimizer,seconds=1000"
    hold = tmp_path / HOLD_NAME
    hold.write_text(str(STEPS - 5))
    harm = (*injected(f"disk_full:rank=0,{last}"), NO_SPARE, "recovery.checkpoint_timeout_s=2")
    with Run(tmp_path, *SETTINGS, *harm) as run:
        run.wait_for_checkpoint(10)
        hold.unlink()
        assert run.wait() == 1, run.console
    assert f"step_{STEPS:08d}.pt" in run.console
    (error,) = [line for line in run.console.splitlines() if line.startswith("ERROR")]
    assert error.count("File too large") == 2
    assert "nor elsewhere" in error
    assert f"step {STEPS} could not be saved: the disk refuses it; newest checkpoint" in run.console
    assert "Traceback" not in run.console, run.console
    log = (run.logs / "rank_0.log").read_text(encoding="utf-8")
    assert log.count("Traceback (most recent call last)") >= 1, "where it failed is in the file"
    # How far the later saves had come when the disk was full is its matter.
    assert verified_steps(run)[0] in range(10, STEPS)


def test_an_io_error_costs_one_save(fault_free, tmp_path):
    """Reported with the file, the next one left out, then all is as before, to the last bit."""
    error = injected("disk_error:rank=0,step=9,phase=checkpoint")
    run = finish(
        tmp_path, *error, NO_SPARE, "evaluate_interval=1"
    )  # which is followed by a save, at step 12
    assert "step_00000010.pt: Input/output error; training continues" in run.console
    assert not {10, 12} & set(saved(run))
    assert saved(run)[-1] == STEPS
    assert run.digest == fault_free(2).digest
    assert STEPS in verified_steps(run)


@contextlib.contextmanager
def read_only(directory):
    """The directory as the kernel leaves one after an error, for whoever opens something in it."""
    mount = ("mount", "--bind", str(directory), str(directory))
    done = subprocess.run(mount, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        pytest.skip(f"mounting is not permitted: {done.stderr.strip()}")
    try:
        # Refused while a file is open for writing through it.
        remount = ("mount", "-o", "remount,bind,ro", str(directory))
        poll(lambda: subprocess.run(remount, check=False).returncode == 0, what="a read-only disk")
        yield
    finally:
        subprocess.run(["umount", "--lazy", str(directory)], check=True)


def test_a_disk_turned_read_only_fails_the_last_save_and_no_step(tmp_path):
    """Every step is trained; then exit 1 with the file, and what was saved before is whole."""
    few = (
        "--max-steps",
        36,
        "save_interval=0",
        "task.pace_s=0.1",
        "checkpoint_timeout_s=3",
        NO_SPARE,
    )
    hold = tmp_path / HOLD_NAME
    hold.write_text("20")  # before the next save
    with Run(tmp_path, *SETTINGS, *few) as run:
        poll(lambda: run.events("checkpoint_saved"), what="a save that is whole")
        with read_only(run.checkpoints):
            hold.unlink()
            assert run.wait() == 1, run.console
    assert "Read-only file system; training continues" in run.console
    (rescued,) = run.logs.glob("rescued_*/step_00000036.pt")
    assert f"resume from it with --resume {rescued}" in run.console
    assert sorted(run.audit(2)[0]) == list(range(1, 37))
    assert max(verified_steps(run)) < 36


@contextlib.contextmanager
def full(directory):
    """The directory's disk with no byte left, until the block ends."""
    filler = directory / "filler"
    with contextlib.suppress(OSError), filler.open("wb", buffering=0) as file:
        while True:
            file.write(b"x" * 4096)
    yield
    filler.unlink()


FEW = ("--max-steps", 24, "save_every_steps=0", "save_interval=0", NO_SPARE)


def test_a_finished_run_waits_for_a_disk_that_is_full(made_once, tmp_path):
    """Said with what to free and where; freed in time, nothing is lost but that time."""
    hold = tmp_path / HOLD_NAME
    hold.write_text("12")
    with small_disk(tmp_path / "checkpoints", size_kb=512):
        with Run(tmp_path, *SETTINGS, *FEW) as run:
            run.wait_for_step(8)
            with full(run.checkpoints):
                hold.unlink()
                poll(lambda: "tried again for 600 s" in run.console, what="the line that says so")
            assert run.wait() == 0, run.console
        assert f"more in {run.checkpoints})" in run.console
        assert verified_steps(run) == [24]
        assert run.digest == made_once(*SETTINGS, *FEW).digest


def test_a_finished_run_is_kept_elsewhere_where_its_disk_stays_full(made_once, tmp_path):
    """Where --rescue-dir says; exit 1, and the last line has the option that goes on from the file."""
    hold = tmp_path / HOLD_NAME
    hold.write_text("12")
    rescue = ("--rescue-dir", tmp_path / "spare_disk")
    with small_disk(tmp_path / "checkpoints", size_kb=256):
        with Run(tmp_path, *SETTINGS, *FEW, *rescue, "checkpoint_timeout_s=2") as run:
            run.wait_for_step(8)
            with full(run.checkpoints):
                hold.unlink()
                assert run.wait() == 1, run.console
        assert "room for" in run.console, "in the start block"
        (rescued,) = (tmp_path / "spare_disk").glob("rescued_*/step_00000024.pt")
        assert run.summary()["checkpoint"] == str(rescued)
        assert run.summary()["checkpoint_step"] == 24
        words = f"resume from it with --resume {rescued}"
        assert run.console.index("ERROR") < run.console.rindex(words)
        with Run(tmp_path, *SETTINGS, NO_SPARE, "--max-steps", 30, "--resume", rescued) as again:
            assert again.wait() == 0, again.console
        assert "resumed at step 24" in again.console


def test_a_damaged_checkpoint_is_passed_over_when_all_ranks_are_lost(fault_free, tmp_path):
    """The one before it is taken, the bad one is set aside with its reason; a copy in memory would be taken instead."""
    specs = injected("corrupt_checkpoint:rank=0,step=22", "kill:rank=0,step=23")
    hold = tmp_path / HOLD_NAME
    hold.write_text("12")
    with Run(tmp_path, *SETTINGS, "save_interval=0", "memory_every=0", *specs, world=1) as run:
        run.wait_for_checkpoint(10)
        hold.write_text("22")
        run.wait_for_checkpoint(20)  # which is written beside the next steps
        hold.unlink()
        assert run.wait() == 0, run.console
    assert "step_00000020.pt is unusable: its SHA-256" in run.console
    assert (run.checkpoints / "step_00000020.pt.bad.reason").exists()
    assert "pointer" not in run.console, "that they name it needs no line of its own"
    (noted,) = run.events("fault_tolerated")
    assert (noted["kind"], "_00000020.pt " in noted["text"]) == ("checkpoint_bad", True)
    assert run.digest == fault_free(1).digest


def test_logs_that_cannot_be_written_cost_lines_only(fault_free, tmp_path):
    """Audit, log, journal, status and trackers on a full disk: said once on the console, never a fault.

    With room again, a resume gives each tracker what it lacks of what could be written, and once.
    """
    hold = tmp_path / HOLD_NAME
    hold.write_text("12")
    with small_disk(tmp_path / "logs", size_kb=1024):
        with Run(tmp_path, *SETTINGS, *LONG, *WRITTEN, *injected("kill:rank=1,step=40")) as run:
            run.wait_for_step(8)
            poll(lambda: (8, 0) in stands(run.logs), what="a line of that step")
            with contextlib.suppress(OSError), (tmp_path / "logs" / "filler").open("wb") as filler:
                while True:
                    filler.write(b"x" * 4096)
                    filler.flush()
            hold.unlink()
            assert run.wait() == 0, run.console
            assert "cannot be written (No space left on device)" in run.console
        lines = (run.logs / "audit_rank_0.jsonl").read_text(encoding="utf-8").splitlines()
        assert 8 <= len(lines) < LONG_STEPS
        loaded = CheckpointStore(run.checkpoints, keep_last=1).load()
        reference = CheckpointStore(fault_free(2, *LONG).checkpoints, keep_last=1).load()
        assert loaded.manifest.step == LONG_STEPS
        for name, tensor in reference.state["model"].items():
            assert loaded.state["model"][name].equal(tensor)
        (run.logs / "filler").unlink()
        with Run(tmp_path, *SETTINGS, NO_SPARE, *WRITTEN, "--max-steps", LONG_STEPS + 6) as run:
            assert run.wait() == 0, run.console
        written = {step for step, rank in stands(run.logs) if rank == 0}
        assert written >= {*range(1, 9), *range(LONG_STEPS + 1, LONG_STEPS + 7)}
        assert_same_points(run)
