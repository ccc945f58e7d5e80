"""Real processes that are killed while they save, and real disks that are full."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import IO

import pytest
import torch

from ddp_runner.checkpoint.catalog import Catalog
from ddp_runner.checkpoint.store import CheckpointStore
from ddp_runner.kernel.rules.faults import FaultError, FaultKind
from ddp_runner.kernel.system.disk import RealDisk
from tests import ready
from tests.disks import small_disk

from .states import save, steps_in

ROOT = Path(__file__).parents[2]
SAVE_ABOUT_S = 0.03


@dataclass(frozen=True)
class Kill:
    """When a child is killed: so long after it announced so many checkpoints."""

    after_saves: int
    then_s: float


@dataclass(frozen=True)
class Saver:
    """The ways to and from a process that forks savers."""

    stdin: IO[str]
    stdout: IO[str]


# One test process has all of these tests, and starts it once.
pytestmark = pytest.mark.xdist_group("saver")


@pytest.fixture(scope="module")
def saver():
    """A process that forks savers, and is a fork of the ready one; it ends when its stdin closes."""
    given, stdin = os.pipe()
    stdout, output = os.pipe()
    program = [str(Path(__file__).with_name("saving_process.py"))]
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    with open(stdin, "w") as stdin, open(stdout) as stdout, open(output, "wb") as output:  # noqa: PTH123 - pipes
        process = ready.shared().start(
            program, cwd=ROOT, output=output, env=env, program_stdin=given
        )
        os.close(given)
        output.close()
        assert stdout.readline() == "ready\n"
        yield Saver(stdin, stdout)
        stdin.close()
        assert process.wait(timeout=100) == 0


def _until_ended(saver, mode: str, directory: Path, *, kill: Kill | None) -> list[str]:
    """Run a child to its end (or kill it); the lines that it and its parent said."""
    saver.stdin.write(f"{mode} {directory}\n")
    saver.stdin.flush()
    lines: list[str] = []
    while not lines or not lines[-1].startswith("ended"):
        line = saver.stdout.readline()
        assert line, "the forking process ended"
        lines.append(line.strip())
        pids = [int(said[4:]) for said in lines if said.startswith("pid")]
        if kill is not None and pids and len(lines) > kill.after_saves:
            time.sleep(kill.then_s)  # not a wait: the moment of the kill inside the next save
            os.kill(pids[0], signal.SIGKILL)
            kill = None
    return lines


@pytest.mark.parametrize("kills", [12, pytest.param(50, marks=pytest.mark.slow)])
@pytest.mark.parametrize("mode", ["loop", "beside"])
def test_sigkill_at_any_moment_loses_no_announced_checkpoint(saver, tmp_path, mode, kills):
    """After each of many kills the newest loads whole and is at least the newest announced."""
    moments = random.Random(20)
    announced = 0
    for _ in range(kills):
        kill = Kill(moments.randrange(3), moments.uniform(0, SAVE_ABOUT_S))
        lines = _until_ended(saver, mode, tmp_path, kill=kill)
        assert lines[-1] == f"ended {-signal.SIGKILL}"
        announced = max([announced, *(int(line[6:]) for line in lines if line.startswith("saved"))])
        loaded = CheckpointStore(tmp_path, keep_last=2).load()
        if announced:
            assert loaded.manifest.step >= announced
        if loaded is not None:
            assert loaded.rejected == ()
            assert loaded.state["step"] == loaded.manifest.step
            assert loaded.state["weight"].unique().tolist() == [float(loaded.manifest.step)]
    assert announced >= kills // 2
    Catalog(tmp_path).clean_leftovers()
    assert list(tmp_path.glob(".*")) == []


def _check_refused(directory: Path, cause: str, *words: str) -> None:
    """The old checkpoint stands alone, and the cause names path and reason."""
    for word in ("step_00000020.pt", *words):
        assert word in cause
    assert sorted(p.name for p in directory.iterdir() if not p.is_dir()) == [
        "last",
        "step_00000010.json",
        "step_00000010.pt",
    ]
    assert CheckpointStore(directory, keep_last=2).load().manifest.step == 10


def test_a_write_that_the_system_refuses_is_a_storage_fault(saver, tmp_path):
    """A file size limit in the middle of a save leaves the old checkpoint and no temporary file."""
    save(tmp_path, 10)
    lines = _until_ended(saver, "limited", tmp_path, kill=None)
    [said] = [line for line in lines if line.startswith("fault")]
    _check_refused(tmp_path, said, "storage_failed", "File too large")
    assert lines[-1] == "ended 0"


class _Boastful(RealDisk):
    """Claims room that is not there, as a quota or another writer makes any disk do."""

    def free_bytes(self, directory: Path) -> int:
        return 2**60


@pytest.mark.parametrize(
    "disk", [RealDisk(), _Boastful()], ids=["seen before", "met while writing"]
)
def test_a_full_disk_is_a_storage_fault(tmp_path, disk):
    """No room, whether seen beforehand or met while writing, leaves the old checkpoint as it was."""
    directory = tmp_path / "small"
    with small_disk(directory, size_kb=2048):
        save(directory, 10)
        with pytest.raises(FaultError) as caught:
            save(directory, 20, state={"weight": torch.zeros(2_000_000)}, disk=disk)
        fault = caught.value.fault
        assert (fault.kind, fault.step) == (FaultKind.STORAGE_FAILED, 20)
        free = "are free" if type(disk) is RealDisk else "No space left"
        _check_refused(directory, fault.cause, free)
        save(directory, 30)
        assert steps_in(directory) == [10, 30]


def test_too_little_room_is_seen_before_anything_is_written(tmp_path):
    """A disk without room for the tensors is refused with all figures; nothing is touched."""

    class Full(RealDisk):
        def free_bytes(self, directory: Path) -> int:
            return 50

    save(tmp_path, 10)
    with pytest.raises(FaultError, match=r"bytes are needed and 50 are free: free ") as caught:
        save(tmp_path, 20, disk=Full())
    _check_refused(tmp_path, caught.value.fault.cause)


def test_no_reserve_is_kept_from_a_save_that_fits(tmp_path):
    """A real disk of 64 kB takes a checkpoint of 60 bytes; one that is really full says what is missing."""
    with small_disk(tmp_path / "disk", size_kb=64):
        saved = save(tmp_path / "disk", 10)
        assert saved.path.stat().st_size < 64 * 1024
        filler = tmp_path / "disk" / "filler"
        with contextlib.suppress(OSError), filler.open("wb", buffering=0) as file:
            while True:
                file.write(b"x" * 4096)
        with pytest.raises(FaultError, match="No space left on device") as caught:
            save(tmp_path / "disk", 20)
        assert f"more in {tmp_path / 'disk'})" in caught.value.fault.cause
        filler.unlink()
        assert save(tmp_path / "disk", 20).path.is_file()


def test_a_system_that_cannot_say_what_is_free_is_asked_to_write(tmp_path, monkeypatch):
    """Some network file systems report no room at all; control: one that has none is believed."""
    monkeypatch.setattr("shutil.disk_usage", lambda _: SimpleNamespace(total=0, used=0, free=0))
    assert save(tmp_path, 10).path.is_file()
    monkeypatch.setattr("shutil.disk_usage", lambda _: SimpleNamespace(total=9, used=9, free=0))
    with pytest.raises(FaultError, match="are free"):
        save(tmp_path, 20)


def test_a_directory_that_is_a_file_is_a_storage_fault(tmp_path):
    """A path that cannot become a directory is reported, not raised raw."""
    (tmp_path / "file").write_text("x")
    with pytest.raises(FaultError, match=r"step_00000010\.pt"):
        save(tmp_path / "file", 10)


SCRIPT = """
import sys
from functools import partial
from pathlib import Path
import torch
from ddp_runner.checkpoint.background import BackgroundSaver
from ddp_runner.checkpoint.store import CheckpointStore
from tests.checkpoint.states import facts_of
weight = torch.ones(8_000_000)
write = partial(CheckpointStore(Path(sys.argv[1]), keep_last=1).save, facts=facts_of(7))
BackgroundSaver().begin({"weight": weight}, steady=[weight], write=write).prove()
raise ValueError("the script ends here")
"""


def test_a_script_that_ends_by_an_error_still_finishes_its_last_save(tmp_path):
    """The interpreter waits for the saving thread, which needs nothing that is closed by then."""
    script, saved = tmp_path / "script.py", tmp_path / "saved"
    script.write_text(SCRIPT, encoding="utf-8")
    ended = subprocess.run(
        [sys.executable, script, saved],
        env={**os.environ, **ready.environment(programs=True), ready.WHOLE_END: "1"},
        capture_output=True, text=True, check=False, timeout=200,
    )  # fmt: skip
    assert ended.returncode == 1
    # torch 2.15 may say behind it what of its own was not freed.
    assert "ValueError: the script ends here" in ended.stderr.splitlines()
    loaded = CheckpointStore(saved, keep_last=1).load()
    assert loaded.manifest.step == 7
    assert list(saved.glob(".*")) == []
