"""What runs out: open files and /dev/shm. Each in a process of its own, with real limits."""

from __future__ import annotations

import os
import resource
import subprocess
import sys

import pytest
import torch

from ddp_runner.data.workers.pool import let_go_of_devices
from ddp_runner.data.workers.system_limits import raise_open_file_limit
from ddp_runner.kernel.rules.faults import FaultKind
from tests.data.failing import indices_of, make
from tests.processes import run_ranks


def _raise_the_limit(me):
    resource.setrlimit(resource.RLIMIT_NOFILE, (100, 200))
    first = raise_open_file_limit()
    return first, resource.getrlimit(resource.RLIMIT_NOFILE), raise_open_file_limit()


def test_open_file_limit_is_raised_to_the_hard_one():
    """The soft limit becomes the hard one, and the second call finds nothing to do."""
    assert run_ranks(_raise_the_limit, 1) == [((100, 200), (200, 200), (200, 200))]


class Many:
    """Samples of so many tensors."""

    def __init__(self, tensors):
        self._tensors = tensors

    def __getitem__(self, index):
        return [torch.full((1000,), index) for _ in range(self._tensors)]  # too large for copies


def _load_with_few_files(me, tensors):
    resource.setrlimit(resource.RLIMIT_NOFILE, (80, 80))
    reported = []
    with make(Many(tensors), num_workers=1, on_repaired=reported.append) as loader:
        for step in range(6):
            (taken,) = loader.take(step)
            assert len(taken.batch) == tensors
            for tensor in taken.batch:
                assert [row[0].item() for row in tensor] == list(indices_of(step)), tensor
        assert loader.workers == 1
    return [(repaired.fault.kind, repaired.fault.cause, repaired.action) for repaired in reported]


@pytest.mark.parametrize("tensors", [2, 100], ids=["enough", "too few"])
def test_without_open_files_batches_come_through_a_pipe(tensors):
    """One clear line, the same batches; the control has files enough and hears nothing."""
    (reported,) = run_ranks(_load_with_few_files, 1, tensors)
    if tensors == 2:
        assert reported == []
        return
    ((kind, cause, action),) = reported
    assert kind is FaultKind.LOADER_WORKER_DIED
    assert cause.startswith("too many open files (ulimit -n is 80): ")
    assert action.endswith("batches are copied through a pipe, which needs no open files")


def _load_with_many_workers(me, workers):
    resource.setrlimit(resource.RLIMIT_NOFILE, (120, 120))
    reported = []
    with make(Many(2), num_workers=workers, on_repaired=reported.append) as loader:
        for step in range(6):
            (taken,) = loader.take(step)
            assert [row[0].item() for row in taken.batch[0]] == list(indices_of(step))
        left = loader.workers
    return left, [
        (repaired.fault.kind, repaired.fault.cause, repaired.action) for repaired in reported
    ]


def test_more_workers_than_there_are_files_for_are_fewer_and_said():
    """A number that is asked for is kept as far as they can be started; the control can."""
    assert run_ranks(_load_with_many_workers, 1, 4) == [(4, [])]
    ((left, reported),) = run_ranks(_load_with_many_workers, 1, 40)
    assert 0 < left < 40
    for kind, cause, action in reported:
        assert kind is FaultKind.LOADER_WORKER_DIED
        assert "workers could not be started: OSError" in cause, cause
        assert "workers" in action


SMALL_SHARED_MEMORY = """
import os
import tests.data.failing as t
class Large(t.Plain):
    def __getitem__(self, index):
        return t.torch.full((500_000,), index)
assert os.statvfs("/dev/shm").f_blocks * 4096 <= 256 * 1024
reported = []
with t.make(Large(), num_workers=1, on_repaired=reported.append) as loader:
    for step in range(6):
        assert loader.take(step)[0].batch[:, 7].tolist() == list(t.indices_of(step))
assert reported == [], reported
{fill}
with t.make(Large(), num_workers=1, on_repaired=reported.append) as loader:
    assert loader.take(0)[0].batch[:, 7].tolist() == list(t.indices_of(0))
print(reported[0].fault.cause, reported[-1].action, sep="; ")
"""
FILL = """
with open("/dev/shm/full", "wb", buffering=0) as file:
    while True:
        try:
            file.write(bytes(4096))
        except OSError:
            break
"""


def test_batches_take_no_room_in_shared_memory():
    """16 MB of batches pass a /dev/shm of 256 KB; a full one is named, and loading goes on without."""
    mount = "mount -t tmpfs -o size=256k none /dev/shm"
    if subprocess.run(["unshare", "-m", "sh", "-c", mount], check=False).returncode:
        pytest.skip("needs the right to mount")
    code = SMALL_SHARED_MEMORY.format(fill=FILL)
    done = subprocess.run(
        ["unshare", "-m", "sh", "-c", f'{mount} && exec "$0" -c "$1"', sys.executable, code],
        check=False,
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert done.returncode == 0, done.stderr
    assert "/dev/shm has 0.0 MB free of 0.2 MB" in done.stdout
    assert "loading in the rank itself" in done.stdout
    assert "Traceback" not in done.stderr  # of torch, of what it had not begun


def test_a_worker_lets_go_of_the_devices_that_its_rank_has_opened(tmp_path):
    """Others' descriptors stay; what it holds open would keep a dead rank's memory."""
    device, other = tmp_path / "nvidia0", tmp_path / "data"
    kept, let_go = (os.open(path, os.O_CREAT | os.O_RDWR) for path in (other, device))
    try:
        let_go_of_devices(prefix=str(tmp_path / "nvidia"))
        assert os.fstat(kept)
        with pytest.raises(OSError, match="Bad file descriptor"):
            os.fstat(let_go)
    finally:
        os.close(kept)
