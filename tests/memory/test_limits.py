"""The container's limit, use and kills, from made folders and from this machine."""

from pathlib import Path

import pytest

from ddp_runner.kernel.processes.memory_limits import (
    container_limit,
    container_usage,
    oom_kill_count,
)

GIB = 2**30


@pytest.fixture
def lay_out(tmp_path):
    """Write the files of a made container, path -> text."""

    def write(files):
        for name, text in files.items():
            path = tmp_path / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        return tmp_path

    return write


def test_v2_limit_is_found_in_the_own_cgroup(lay_out):
    """memory.max of the process's own cgroup is the limit, and the source names the file."""
    root = lay_out(
        {
            "proc/self/cgroup": "0::/job/train\n",
            "sys/fs/cgroup/job/train/memory.max": f"{2 * GIB}\n",
            "sys/fs/cgroup/job/train/memory.high": "max\n",
        }
    )
    limit = container_limit(root)
    assert limit is not None
    assert limit.bytes == 2 * GIB
    assert limit.source.endswith("job/train/memory.max")


def test_v2_the_smallest_limit_of_all_ancestors_counts(lay_out):
    """A parent's smaller limit wins over the process's own."""
    root = lay_out(
        {
            "proc/self/cgroup": "0::/pod/job/train\n",
            "sys/fs/cgroup/pod/job/train/memory.max": f"{8 * GIB}\n",
            "sys/fs/cgroup/pod/memory.max": f"{3 * GIB}\n",
        }
    )
    limit = container_limit(root)
    assert limit is not None
    assert (limit.bytes, limit.directory.name) == (3 * GIB, "pod")


def test_v2_high_below_max_is_the_limit(lay_out):
    """Beyond memory.high allocations stall, so it is the ceiling."""
    root = lay_out(
        {
            "proc/self/cgroup": "0::/\n",
            "sys/fs/cgroup/memory.max": f"{4 * GIB}\n",
            "sys/fs/cgroup/memory.high": f"{3 * GIB}\n",
        }
    )
    limit = container_limit(root)
    assert limit is not None
    assert limit.bytes == 3 * GIB
    assert limit.source.endswith("memory.high")


@pytest.mark.parametrize("path", ["/docker/0123abcd", "/../../host/slice"])
def test_a_path_of_the_host_without_a_mount_leads_there(lay_out, path):
    """Inside a container the mount itself is the container's cgroup."""
    root = lay_out(
        {
            "proc/self/cgroup": f"5:memory:{path}\n",
            "sys/fs/cgroup/memory/memory.limit_in_bytes": "512000000\n",
        }
    )
    limit = container_limit(root)
    assert limit is not None
    assert limit.bytes == 512_000_000


def test_v1_limit_is_found_among_several_controllers(lay_out):
    """A v1 line may name several controllers; others do not matter."""
    root = lay_out(
        {
            "proc/self/cgroup": "9:name=systemd:/x\n4:memory,hugetlb:/job\n1:cpu:/\n0::/\n",
            "sys/fs/cgroup/memory/job/memory.limit_in_bytes": f"{GIB}\n",
            "sys/fs/cgroup/memory/memory.limit_in_bytes": "9223372036854771712\n",
        }
    )
    limit = container_limit(root)
    assert limit is not None
    assert limit.bytes == GIB


@pytest.mark.parametrize(
    "files",
    [
        {},
        {"proc/self/cgroup": "0::/\n"},
        {"proc/self/cgroup": "0::/a\n", "sys/fs/cgroup/a/memory.max": "max\n"},
        {
            "proc/self/cgroup": "4:memory:/\n",
            "sys/fs/cgroup/memory/memory.limit_in_bytes": "9223372036854771712\n",
        },
        {"proc/self/cgroup": "not a cgroup file\n"},
    ],
    ids=["no cgroups", "root only", "v2 max", "v1 unlimited", "unreadable text"],
)
def test_no_limit_is_none(lay_out, files):
    """Control: a machine without a limit has no container limit and no kill count."""
    root = lay_out(files)
    assert container_limit(root) is None
    assert oom_kill_count(root) is None


def test_usage_leaves_out_page_cache_that_can_be_dropped(lay_out):
    """Reading a large data file fills the cache, which is not pressure."""
    for mount, usage, limit_file, key in (
        ("sys/fs/cgroup/a", "memory.current", "memory.max", "inactive_file"),
        (
            "sys/fs/cgroup/memory/b",
            "memory.usage_in_bytes",
            "memory.limit_in_bytes",
            "total_inactive_file",
        ),
    ):
        line = "0::/a\n" if "memory/b" not in mount else "3:memory:/b\n"
        root = lay_out(
            {
                "proc/self/cgroup": line,
                f"{mount}/{limit_file}": "1000\n",
                f"{mount}/{usage}": "900\n",
                f"{mount}/memory.stat": f"anon 500\n{key} 300\nactive_file 7\n",
            }
        )
        limit = container_limit(root)
        assert limit is not None
        assert container_usage(limit) == 600


@pytest.mark.parametrize(
    ("line", "file", "text"),
    [
        ("0::/a\n", "sys/fs/cgroup/a/memory.events", "low 0\nhigh 4\nmax 9\noom 3\noom_kill 2\n"),
        ("3:memory:/a\n", "sys/fs/cgroup/memory/a/memory.oom_control", "under_oom 0\noom_kill 2\n"),
    ],
    ids=["v2", "v1"],
)
def test_kills_by_the_kernel_are_counted(lay_out, line, file, text):
    """oom_kill counts kills, not the times that the limit was met."""
    assert oom_kill_count(lay_out({"proc/self/cgroup": line, file: text})) == 2


def test_this_machine_can_be_read():
    """The real files of this machine are understood, whatever its container is."""
    limit = container_limit()
    assert limit is None or (limit.bytes > 0 and Path(limit.source).exists())
    assert limit is None or (container_usage(limit) or 0) > 0
    assert (oom_kill_count() or 0) >= 0
