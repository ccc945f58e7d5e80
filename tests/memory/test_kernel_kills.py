"""Whose end was the kernel's doing, from made containers whose counters rise."""

from __future__ import annotations

import pytest

from ddp_runner.kernel.processes.memory_limits import KernelKills

LAYOUTS = {
    "v2": ("0::/job\n", "sys/fs/cgroup/job/memory.events", "low 0\noom 9\noom_kill {}\n"),
    "v1": (
        "4:memory:/job\n",
        "sys/fs/cgroup/memory/job/memory.oom_control",
        "oom_kill_disable 0\nunder_oom 0\noom_kill {}\n",
    ),
}


@pytest.fixture(params=LAYOUTS)
def container(request, tmp_path):
    """A made container with two kills in its past; called with a number, it sets the count."""
    own, events, text = LAYOUTS[request.param]
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/self/cgroup").write_text(own)
    (tmp_path / events).parent.mkdir(parents=True)

    def count(kills):
        (tmp_path / events).write_text(text.format(kills))
        return tmp_path

    count(2)
    return count


def test_each_kill_is_claimed_by_one_process(container):
    """Two kills, three processes that ended of SIGKILL: the third is somebody's doing."""
    kills = KernelKills(container(2))
    container(4)
    assert [kills.claim(5.0) for _ in range(3)] == [True, True, False]


def test_a_kill_is_left_to_who_is_likelier_to_be_its_own(container):
    """One kill and a larger process that has not asked yet; with two kills there is one for both."""
    kills = KernelKills(container(2))
    container(3)
    assert not kills.claim(5.0, before_it=1)
    container(4)
    assert [kills.claim(5.0, before_it=1), kills.claim(5.0), kills.claim(5.0)] == [
        True,
        True,
        False,
    ]


def test_kills_before_the_run_are_none_of_its_own(container):
    """Control: a counter that stands still, however high, claims nothing."""
    kills = KernelKills(container(2))
    assert not kills.claim(1.0)


def test_a_kill_is_noticed_before_its_process_has_ended(container):
    """A large process takes its time to go; the kill is still its own."""
    kills = KernelKills(container(2))
    container(3)
    kills.look_sometimes(100.0)
    assert kills.claim(106.0)


def test_an_old_kill_of_somebody_else_is_not_claimed(container):
    """Control: a loader worker was killed for memory; a minute later someone kills a rank by hand."""
    kills = KernelKills(container(2))
    container(3)
    kills.look_sometimes(100.0)
    assert not kills.claim(160.0)


def test_without_a_container_nothing_is_claimed(tmp_path):
    """Control: no counter to read."""
    assert not KernelKills(tmp_path).claim(1.0)
