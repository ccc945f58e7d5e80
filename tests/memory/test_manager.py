"""MemoryManager: scripts of readings in; levels, reactions, messages and faults out."""

import gc
import weakref
from dataclasses import replace
from types import SimpleNamespace

import pytest

from ddp_runner.core.settings import MemorySettings, Settings
from ddp_runner.kernel.rules.faults import FaultError, FaultKind
from ddp_runner.memory import manager as managers
from ddp_runner.memory.manager import HEAP_SHARE, Level, MemoryManager
from ddp_runner.memory.readings import Reading, SystemReader
from ddp_runner.training.loading import loaders

GB = 1_000_000_000
CALM = Reading(
    rss_bytes=GB,
    rss_peak_bytes=GB,
    loader_bytes=0,
    available_bytes=9 * GB,
    ceiling_bytes=10 * GB,
    ceiling_source="memory.max",
    oom_kills=0,
)


class Bench:
    """A manager over a reading that the test sets; records what comes out."""

    def __init__(self, **settings):
        self.reading = CALM
        self.looks = 0
        self.shrinks = 0
        self.freed_bytes = 0  # by a reaction
        self.lines = []
        self.loader_pids_seen = None
        self.manager = MemoryManager(
            MemorySettings(**settings),
            rank=1,
            loader=SimpleNamespace(worker_pids=(11, 12), shrink_prefetch=self.shrink),
            log=lambda level, text: self.lines.append((level, text)),
            read=self.read,
            least_gap_s=0.0,
        )

    def read(self, loader_pids):
        self.looks += 1
        self.loader_pids_seen = loader_pids
        return self.reading

    def shrink(self):
        self.shrinks += 1
        self.reading = replace(self.reading, rss_bytes=self.reading.rss_bytes - self.freed_bytes)

    def look(self, **changes):
        """One look at the calm reading with ``changes``."""
        self.reading = replace(CALM, **changes)
        self.manager.after_step(10)

    def texts(self, start):
        return [text for _, text in self.lines if text.startswith(start)]


def used(share):
    return {"available_bytes": int((1 - share) * 10 * GB)}


def test_looks_only_at_its_interval():
    """Between checks a step costs no reading."""
    bench = Bench(memory_check_interval=10)
    for step in range(1, 101):
        bench.manager.after_step(step)
    assert bench.looks == 10
    assert bench.loader_pids_seen == (11, 12)
    assert bench.lines == []


def test_levels_follow_the_pressure_and_are_reported_once():
    """Each change of level is one line; a lasting level is not repeated."""
    bench = Bench()
    for share in (0.5, 0.85, 0.85, 0.82, 0.78, 0.5):
        bench.look(**used(share))
    assert [(level, text.split(":")[0]) for level, text in bench.lines] == [
        ("warning", "memory warn"),
        ("info", "memory ok"),
    ]
    assert "8.50 GB used of 10.00 GB (85% of memory.max)" in bench.lines[0][1]


def test_warn_does_not_react():
    """Control: at WARN nothing is freed and the loader keeps its prefetch."""
    bench = Bench()
    bench.look(**used(0.85))
    assert (bench.manager.level, bench.shrinks) == (Level.WARN, 0)
    assert bench.texts("memory reaction") == []


def test_react_frees_garbage_and_shrinks_prefetch():
    """At REACT cyclic garbage is gone and the loader has been asked for less."""

    class Node:
        pass

    node = Node()
    node.itself = node
    alive = weakref.ref(node)
    gc.disable()
    try:
        del node
        bench = Bench()
        bench.look(**used(0.95))
    finally:
        gc.enable()
    assert alive() is None
    assert bench.shrinks == 1
    assert len(bench.texts("memory reaction: rank 1 gave back")) == 1


def test_a_lasting_level_reacts_again_but_seldom():
    """A reaction costs a collection, so a lasting REACT reacts once in ten looks."""
    bench = Bench()
    for _ in range(23):
        bench.look(**used(0.95))
    assert bench.shrinks == 3


def test_a_rise_to_limit_reacts_at_once_and_is_an_error_line():
    """LIMIT does not wait for the pause between reactions, and raises nothing by itself."""
    bench = Bench()
    bench.look(**used(0.95))
    bench.look(**used(0.99))
    assert bench.shrinks == 2
    assert [level for level, text in bench.lines if text.startswith("memory limit")] == ["error"]


def test_device_pressure_leaves_the_loader_alone():
    """Prefetched batches are in host memory: shrinking them frees nothing on the device."""
    bench = Bench()
    bench.look(
        device_allocated_bytes=9 * GB,
        device_reserved_bytes=9 * GB,
        device_free_bytes=GB // 2,
        device_total_bytes=10 * GB,
    )
    assert (bench.manager.level, bench.shrinks) == (Level.REACT, 0)
    assert "95% of device memory" in bench.lines[0][1]


def test_cached_device_blocks_are_no_pressure():
    """Control: blocks in torch's own cache are free for this rank."""
    bench = Bench()
    bench.look(
        device_allocated_bytes=GB,
        device_reserved_bytes=9 * GB,
        device_free_bytes=GB // 2,
        device_total_bytes=10 * GB,
    )
    assert bench.manager.level is Level.OK


def test_the_hard_limit_ends_in_a_fault_that_names_the_figures():
    """More than max_memory_gb after a clean-up is OUT_OF_MEMORY with a text for people."""
    bench = Bench(max_memory_gb=3.0)
    with pytest.raises(FaultError) as raised:
        bench.look(rss_bytes=int(2.9 * GB), loader_bytes=int(0.3 * GB))
    fault = raised.value.fault
    assert (fault.kind, fault.rank, fault.step) == (FaultKind.OUT_OF_MEMORY, 1, 10)
    assert fault.cause.startswith("rank 1 uses 3.20 GB of max_memory_gb=3 (2.90 GB itself, 0.30 GB")
    assert bench.shrinks == 1


def test_the_hard_limit_forgives_what_a_reaction_frees():
    """Control: over the limit, but not after the clean-up, is no fault."""
    bench = Bench(max_memory_gb=3.0)
    bench.freed_bytes = 2 * GB
    bench.look(rss_bytes=4 * GB)
    assert bench.texts("memory reaction: rank 1 gave back 2000 MB")


def test_without_a_hard_limit_nothing_raises():
    """Control: a full machine is reported and reacted to, never made a fault by us."""
    bench = Bench()
    bench.look(rss_bytes=50 * GB, **used(1.0))
    assert bench.manager.level is Level.LIMIT


def test_the_workers_of_an_evaluation_count_while_it_lasts():
    """For the hard limit too; they are no leak, and afterwards only training's are asked for."""
    bench = Bench(max_memory_gb=3.0)
    bench.reading = replace(CALM, rss_bytes=GB, loader_bytes=GB)
    with bench.manager.beside(lambda: (21,)):
        for step in range(0, 1000, 10):
            loaders = GB + step * 10**5
            bench.reading = replace(CALM, rss_bytes=GB, loader_bytes=loaders)
            bench.manager.in_evaluation(step)
        assert bench.loader_pids_seen == (11, 12, 21)
        bench.reading = replace(CALM, rss_bytes=GB, loader_bytes=3 * GB)
        with pytest.raises(FaultError, match=r"uses 4\.00 GB of max_memory_gb=3"):
            bench.manager.in_evaluation(1000)
    assert bench.manager.suspected_leaks == ()
    assert bench.manager.peaks()["peak_loader_bytes"] == 3 * GB
    assert bench.loader_pids_seen == (11, 12)


def test_peaks_are_the_highest_ever_seen():
    """Peaks keep the high-water marks of the system and the highest look at the loaders."""
    bench = Bench()
    bench.look(
        rss_bytes=2 * GB,
        rss_peak_bytes=3 * GB,
        loader_bytes=GB,
        device_peak_bytes=7,
        device_total_bytes=80 * GB,
        device_taken_peak_bytes=60 * GB + 1,
    )
    bench.look()
    assert bench.manager.peaks() == {
        "peak_rss_bytes": 3 * GB,
        "peak_loader_bytes": GB,
        "peak_device_bytes": 7,
        "peak_device_permille": 751,
    }


@pytest.mark.parametrize(
    ("field", "name"),
    [
        ("rss_bytes", "this rank"),
        ("loader_bytes", "its loader workers"),
        ("device_allocated_bytes", "its device allocations"),
    ],
)
def test_a_leak_is_reported_once_per_window_with_its_rate(field, name):
    """Growth of 100 MB per 1000 steps over 2000 steps gives one or two lines with the rate."""
    bench = Bench(cleanup_interval=0)
    for step in range(10, 2001, 10):
        bench.reading = replace(CALM, **{field: GB + step * 100_000})
        bench.manager.after_step(step)
    lines = bench.texts(f"suspected memory leak: {name} (rank 1)")
    assert 1 <= len(lines) <= 2
    assert "100 MB per 1000 steps since step" in lines[0]
    assert len(bench.lines) == len(lines)


def test_kills_by_the_kernel_are_reported():
    """A kill in this container since the last look is a line; kills from before are not."""
    bench = Bench()
    for kills in (4, 4, 6, 6):
        bench.look(oom_kills=kills)
    assert bench.texts("the kernel killed") == [
        "the kernel killed 2 process(es) of this container for memory"
    ]


def test_periodic_clean_up_collects_garbage():
    """At the clean-up interval cyclic garbage goes, without any pressure."""

    class Node:
        pass

    bench = Bench(cleanup_interval=7, memory_check_interval=1000)
    node = Node()
    node.itself = node
    alive = weakref.ref(node)
    gc.disable()
    try:
        del node
        bench.manager.after_step(6)
        assert alive() is not None
        bench.manager.after_step(7)
        assert alive() is None
    finally:
        gc.enable()


def test_clean_up_off_never_collects():
    """Control: cleanup_interval=0 leaves collection to Python."""
    bench = Bench(cleanup_interval=0)
    gc.disable()
    before = gc.get_stats()[2]["collections"]
    try:
        for step in range(1, 50):
            bench.manager.after_step(step)
    finally:
        gc.enable()
    assert gc.get_stats()[2]["collections"] == before


def test_the_default_reader_works_on_this_machine():
    """Without a fake, peaks are real figures of this process."""
    manager = MemoryManager(
        MemorySettings(), rank=0, loader=SimpleNamespace(worker_pids=()), log=print
    )
    manager.after_step(10)
    assert manager.peaks()["peak_rss_bytes"] > 10_000_000


@pytest.mark.parametrize(("device", "shares"), [("cpu", [4]), ("cuda:0", [])])
def test_ranks_on_cpus_share_the_memory_that_they_keep(monkeypatch, device, shares):
    """Each rank of a machine may keep its part of a share of the memory; ranks on GPUs keep nothing."""
    kept = []
    monkeypatch.setattr(managers, "keep_freed_heap", kept.append)
    rank_info = SimpleNamespace(rank=0, local_world_size=4, device=device)
    runtime = SimpleNamespace(rank_info=rank_info, is_watched=True)
    loaders.watch_memory(Settings(), SimpleNamespace(worker_pids=()), runtime)
    share_bytes = HEAP_SHARE * SystemReader()(()).ceiling_bytes
    assert kept == [int(share_bytes / one) for one in shares]
