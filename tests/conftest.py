"""Fixtures that tests of several folders ask for."""

from __future__ import annotations

import gc
import os
import signal
import sys
from pathlib import Path

import hypothesis
import pytest

from tests.huge_pages import use_huge_pages

# The same examples every time, and no limit on how long one takes: that is the machine's matter. Its
# own profile for continuous integration is alike, but only where a variable says that this is one.
hypothesis.settings.register_profile(
    "steady",
    deadline=None,
    derandomize=True,
    suppress_health_check=[hypothesis.HealthCheck.too_slow],
)
hypothesis.settings.load_profile("steady")

# What a developer has set for runs of their own is not what tests are about.
if Path("~/.config/ddp_runner.yaml").expanduser().exists():
    os.environ["HOME"] = "/nonexistent"

# Started in the background (`&`, nohup), tests would hand ignored signals on to the runs they start.
for number, usual in (
    (signal.SIGINT, signal.default_int_handler),
    (signal.SIGHUP, signal.SIG_DFL),
    (signal.SIGQUIT, signal.SIG_DFL),
):
    if signal.getsignal(number) is signal.SIG_IGN:
        signal.signal(number, usual)


# Collecting keeps what it makes: to look for garbage would take half of its time.
gc.disable()


def pytest_collection_finish(session):
    """One thread each: the test processes share the cores, where torch's threads wait for each other.

    What has been collected stays to the end, and no later search for garbage goes through it.
    """
    gc.freeze()
    gc.enable()
    if "torch" in sys.modules:
        sys.modules["torch"].set_num_threads(1)
    use_huge_pages()


# Of the tests that compute, so many at least stand behind the last whole run: the end is of short tests.
_SHORT_AT_THE_END = 10  # in a hundred


@pytest.hookimpl(trylast=True)  # after those that mark whole runs
def pytest_collection_modifyitems(items):
    """Long tests first: what a process still has to do when the others are done is short then.

    A whole run waits for half of its time, and other tests keep a core busy: they stand between the whole runs, so
    that neither are alone at any time.
    """
    _name_groups(items)
    turns = [[], [], []]
    for item in items:
        turns[_turn(item)].append(item)
    long, runs, others = turns
    places = len(runs) * 100 // (100 - _SHORT_AT_THE_END) + 1
    ranked = [(number / places, 0, number, item) for number, item in enumerate(runs)]
    ranked += [(number / len(others), 1, number, item) for number, item in enumerate(others)]
    items[:] = [*long, *(item for *_, item in sorted(ranked, key=lambda one: one[:3]))]


def _name_groups(items):
    """Have the groups of tests in their names, by which xdist shares them out: where xdist 3.8 writes, pytest 9.2 does not read."""
    for item in items:
        named = getattr(item, "_nodeid", item.nodeid)
        if named != item.nodeid:
            item._id = type(item._id).parse(named)


def _turn(item):
    limit = item.get_closest_marker("timeout")
    if limit is not None and limit.args[0] > 300:
        return 0
    return 1 if item.get_closest_marker("whole_run") else 2


@pytest.fixture
def clean_imports(monkeypatch):
    """Nothing that a test imports as a user's task, or puts on the path, outlives it."""
    monkeypatch.setattr(sys, "path", list(sys.path))
    before = set(sys.modules)
    yield
    for name in set(sys.modules) - before:
        if name.startswith(("ddp_runner_task_", "loading_")):
            del sys.modules[name]


@pytest.fixture(scope="session")
def huge_metrics(tmp_path_factory):
    """The metrics of eight ranks and a hundred thousand steps, a tenth of which were done twice.

    Tests that ask for it are of one ``xdist_group``, and leave it as it is: it is written once.
    """
    path = tmp_path_factory.mktemp("huge") / "metrics.jsonl"
    form = '{"step":%d,"rank":%d,"utc":"2026-11-23T08:00:00.000Z","loss":%.1f,"step_s":0.5}\n'
    with path.open("w") as file:
        for launch, steps in ((0, range(1, 50_001)), (1, range(40_001, 100_001))):
            for step in steps:
                loss = -5.0 if step == 77_777 else step + launch / 2
                file.write("".join([form % (step, rank, loss) for rank in range(8)]))
    yield path
    path.unlink()
