"""Readings of real processes."""

import gc
import mmap
import os
import signal
import subprocess
import sys
from contextlib import contextmanager

import psutil
import pytest

from ddp_runner.kernel.processes.memory_limits import Limit
from ddp_runner.memory.readings import SystemReader
from ddp_runner.memory.reclaim import reclaim, trim_heap

MB = 1_000_000


class Time:
    def __init__(self):
        self.now_s = 0.0

    def __call__(self):
        return self.now_s


@contextmanager
def worker(code):
    """A child process that runs ``code`` around ``wait()``, which lasts until it gets a line."""
    source = f"import sys\ndef wait():\n print('ready', flush=True); sys.stdin.readline()\n{code}"
    process = subprocess.Popen(
        [sys.executable, "-c", source], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    try:
        assert process.stdout.readline() == "ready\n"
        yield process
    finally:
        process.kill()
        process.communicate()


def proceed(process):
    process.stdin.write("\n")
    process.stdin.flush()
    assert process.stdout.readline() == "ready\n"


def test_rss_of_this_process_grows_with_a_touched_allocation():
    """Touched pages appear in the RSS and stay in the peak after they are freed."""
    read = SystemReader()
    gc.collect()  # now, not between two looks
    before = read(())
    block = mmap.mmap(-1, 64 * MB)
    block.write(b"x" * (64 * MB))
    during = read(())
    block.close()
    after = read(())
    assert during.rss_bytes - before.rss_bytes > 60 * MB
    assert after.rss_bytes < during.rss_bytes - 60 * MB
    assert after.rss_peak_bytes >= during.rss_bytes - 4 * MB  # the kernel counts in batches


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="USS of a child is Linux only")
def test_a_forked_worker_counts_only_what_is_its_own():
    """Pages that a worker shares with the rank that forked it are counted once, with the rank."""
    block = mmap.mmap(-1, 64 * MB, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    block.write(b"x" * (64 * MB))
    start, end = os.pipe()
    pid = os.fork()
    if pid == 0:  # only async-signal-safe work: the test process may have threads
        os.read(start, 1)
        os._exit(0)
    try:
        rss = psutil.Process(pid).memory_info().rss
        assert rss > 60 * MB
        assert SystemReader()((pid,)).loader_bytes < rss / 2
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        os.close(start)
        os.close(end)
        block.close()


@pytest.mark.parametrize("later_s", [1.0, 60.0], ids=["between full looks", "at a full look"])
def test_growth_of_a_worker_is_seen_at_the_next_look(later_s):
    """A worker's new pages count at once, not only every 30 s when its USS is read."""
    now = Time()
    read = SystemReader(now_s=now)
    with worker("wait(); x = b'x' * 50_000_000; wait()") as process:
        before = read((process.pid,)).loader_bytes
        proceed(process)
        now.now_s = later_s
        grown = read((process.pid,)).loader_bytes - before
    assert 45 * MB < grown < 60 * MB


def test_a_worker_that_has_ended_counts_nothing():
    """Neither a worker that ended between looks nor an unknown pid is an error."""
    read = SystemReader()
    with worker("wait()") as process:
        assert read((process.pid,)).loader_bytes > 0
    assert read((process.pid,)).loader_bytes == 0


def test_a_container_limit_is_the_ceiling(tmp_path):
    """Available memory is what the container leaves, when that is less than the machine's."""
    (tmp_path / "memory.current").write_text("600000000\n")
    limit = Limit(bytes=700 * MB, source="memory.max", directory=tmp_path)
    reading = SystemReader(limit=limit)(())
    assert (reading.ceiling_bytes, reading.available_bytes) == (700 * MB, 100 * MB)
    assert reading.ceiling_source == "memory.max"


def test_a_limit_beyond_physical_memory_does_not_count(tmp_path):
    """Control: the real ceiling is the smaller of container and machine."""
    limit = Limit(bytes=2**59, source="memory.max", directory=tmp_path)
    reading = SystemReader(limit=limit)(())
    assert reading.ceiling_bytes == psutil.virtual_memory().total
    assert reading.ceiling_source == "physical memory"
    assert 0 < reading.available_bytes < reading.ceiling_bytes


def test_no_device_gives_no_device_figures():
    """Control: without a device its fields are None, and torch is not imported."""
    reading = SystemReader()(())
    assert reading.device_total_bytes is None
    assert reading.device_allocated_bytes is None


def test_reclaim_collects_cycles():
    """Garbage in cycles is gone after a reclaim, with automatic collection off."""
    gc.collect()
    gc.disable()
    try:
        for _ in range(1000):
            cycle = []
            cycle.append(cycle)
        del cycle
        assert reclaim(device=None).objects >= 1000
    finally:
        gc.enable()


@pytest.mark.skipif("glibc" not in os.confstr("CS_GNU_LIBC_VERSION").lower(), reason="glibc only")
def test_trim_returns_freed_small_blocks_to_the_system():
    """Freed blocks below the mmap threshold go back; kept ones among them do not prevent it."""
    process = psutil.Process()
    blocks = [bytearray(20_000) for _ in range(5_000)]
    kept = blocks[::100]
    full = process.memory_info().rss
    del blocks
    gc.collect()
    trim_heap()
    assert full - process.memory_info().rss > 80 * MB
    assert len(kept) == 50


FREED_AND_TAKEN = """
import resource
from ddp_runner.memory.reclaim import keep_freed_heap

def faults_of_steps():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(20):
        blocks = [bytearray(b"x") * 100_000 for _ in range(100)]
        del blocks
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

faults_of_steps()
print(faults_of_steps(), keep_freed_heap(100_000_000), faults_of_steps() and faults_of_steps())
"""


@pytest.mark.skipif("glibc" not in os.confstr("CS_GNU_LIBC_VERSION").lower(), reason="glibc only")
@pytest.mark.parametrize(
    "chosen", ["", "MALLOC_TRIM_THRESHOLD_=131072", "GLIBC_TUNABLES=glibc.malloc.top_pad=131072"]
)
def test_steps_take_kept_memory_without_faults(chosen):
    """What a step frees the next one takes without a fault for each page, unless the user has set the heap up."""
    name, _, value = chosen.partition("=")
    environment = {**os.environ, **({name: value} if name else {})}
    found = subprocess.run(
        [sys.executable, "-c", FREED_AND_TAKEN],
        env=environment,
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    before, is_kept, after = found.stdout.split()
    assert int(before) > 10_000
    assert is_kept == str(not chosen)
    assert int(after) < 1_000 if is_kept == "True" else int(after) > 10_000
