"""CUDA's driver as a spare uses it, with stand-ins for NVIDIA's libraries, which a compiler makes here."""

from __future__ import annotations

import os
import shutil
import subprocess

import pytest

from ddp_runner.features.spare.rules import SPARE
from ddp_runner.kernel.wire.events import SpareReady
from ddp_runner.kernel.wire.fork_specs import SpareKind
from ddp_runner.kernel.wire.messages import Ready
from ddp_runner.system.torch_versions import torch_build
from tests.processes import run_ranks
from tests.rank.supervising import PlayedSupervisor

COMPILER = shutil.which("cc")
needs_compiler = pytest.mark.skipif(not COMPILER, reason="there is no C compiler")
BUILD = torch_build()
needs_no_cuda = pytest.mark.skipif(
    BUILD is None or bool(BUILD.cuda),
    reason="this torch has CUDA's own libraries, which come before the stand-ins",
)
GPUS = 3
# What the driver says when it is asked before cuInit is 3, as cuda.h has it.
DRIVER = """
#include <stdlib.h>
static int started;
int cuInit(unsigned flags) { started = !getenv("FAKE_CUDA_REFUSES"); return started ? 0 : 999; }
int cuDeviceGetCount(int *count) { *count = %d; return started ? 0 : 3; }
int cuDeviceGet(int *device, int index) { *device = 100 + index; return started ? 0 : 3; }
int cuDevicePrimaryCtxGetState(int device, unsigned *flags, int *active) {
    const char *opened = getenv("FAKE_CUDA_OPENED");
    *active = opened && atoi(opened) == device - 100;
    return started && device >= 100 ? 0 : 101;
}
"""


def build_library(folder, name, source="int unused;"):
    (folder / f"{name}.c").write_text(source, encoding="utf-8")
    file = folder / name
    subprocess.run(
        [COMPILER, "-shared", "-fPIC", f"-Wl,-soname,{name}", "-o", file, f"{folder}/{name}.c"],
        check=True,
    )
    return file


@pytest.fixture(scope="module")
def nvidia(tmp_path_factory):
    """A folder with a driver for three GPUs, and cuDNN as it is shipped."""
    folder = tmp_path_factory.mktemp("nvidia")
    build_library(folder, "libcuda.so.1", DRIVER % GPUS)
    for name in ("libcudnn.so.9", "libcudnn_ops.so.9", "libcudnn_cnn.so.9"):
        build_library(folder, name)
    (folder / "libcudnn_broken.so.9").write_bytes(b"no library")
    return folder


def _use(me, folder, changes):
    import ctypes

    from ddp_runner.features.spare import child as spare
    from ddp_runner.kernel.rank import zygote

    os.environ.update(changes)
    name = str(folder / "libcuda.so.1")
    facts = {"started": [zygote.driver_has_started(name)]}
    try:
        driver = spare.CudaDriver(name)
    except spare.CudaDriverError as error:
        return {**facts, "error": str(error)}
    facts["started"].append(zygote.driver_has_started(name))
    facts["count"], facts["opened"] = driver.device_count(), driver.opened()
    facts["without"] = spare.load_libraries()
    ctypes.CDLL(str(folder / "libcudnn.so.9"))
    facts["loaded"] = sorted(os.path.basename(file) for file in spare.load_libraries())  # noqa: PTH119
    facts["mapped"] = [name in _maps() for name in ("libcudnn_ops.so.9", "libcudnn_cnn.so.9")]
    return facts


def _maps():
    with open("/proc/self/maps", encoding="utf-8") as file:  # noqa: PTH123
        return file.read()


@needs_no_cuda
@needs_compiler
@pytest.mark.parametrize("opened", [None, 1])
def test_the_driver_is_started_and_says_what_is_open(nvidia, opened):
    """Which are open is asked without opening a GPU."""
    changes = {} if opened is None else {"FAKE_CUDA_OPENED": str(opened)}
    (facts,) = run_ranks(_use, 1, nvidia, changes)
    assert facts == {
        "started": [False, True],
        "count": GPUS,
        "opened": [] if opened is None else [opened],
        "without": [],
        "loaded": ["libcudnn_cnn.so.9", "libcudnn_ops.so.9"],
        "mapped": [True, True],
    }


@needs_compiler
def test_a_driver_that_refuses_is_reported_with_its_number(nvidia):
    """As one does that is of another version than its kernel module."""
    (facts,) = run_ranks(_use, 1, nvidia, {"FAKE_CUDA_REFUSES": "1"})
    assert facts["error"] == "cuInit: CUDA error 999"


def _spare(me, folder, nvidia, changes):
    """A spare of a real zygote, which finds the stand-in as it would find the driver."""
    os.environ.update(changes, LD_LIBRARY_PATH=str(nvidia))
    played = PlayedSupervisor(folder, 2)
    played.until(lambda: played.world.can_fork)
    played.spawn_spare(SpareKind.LIBRARIES)
    played.until(lambda: played.node.helper(SPARE) is None or played.node.helper(SPARE).pid)
    pid = played.node.helper(SPARE).pid
    played.until(lambda: played.count(SpareReady) or played.node.helper(SPARE) is None)
    facts = {"ready": played.count(SpareReady), "zygote_has_it": _has_driver(played.zygote_pid)}
    if not facts["ready"]:
        return {**facts, "ended": [ended[1:] for ended in played.ended if ended[0] == pid]}
    facts["has_it"] = _has_driver(pid)
    played.spawn_store()
    handle = played.world.ranks[1]
    played.spawn_rank(handle, loads=False)
    played.until(lambda: played.count(Ready) == 1)
    return {**facts, "is_it": handle.pid == pid and handle.was_spare}


def _has_driver(pid):
    with open(f"/proc/{pid}/maps", encoding="utf-8") as file:  # noqa: PTH123
        return "libcuda.so.1" in file.read()


@needs_no_cuda
@needs_compiler
def test_a_spare_with_libraries_starts_the_driver_itself_and_becomes_a_rank(nvidia, tmp_path):
    """Not the zygote, whose forks could not use CUDA any more."""
    (facts,) = run_ranks(_spare, 1, tmp_path, nvidia, {})
    assert facts == {
        "ready": 1,
        "zygote_has_it": False,
        "has_it": True,
        "is_it": True,
    }


@needs_no_cuda
@needs_compiler
@pytest.mark.parametrize("variable", ["FAKE_CUDA_OPENED", "FAKE_CUDA_REFUSES"])
def test_a_spare_with_libraries_ends_rather_than_hold_memory_of_a_gpu(nvidia, tmp_path, variable):
    """Or where there is no driver to start: the run does without."""
    (facts,) = run_ranks(_spare, 1, tmp_path, nvidia, {variable: "1"})
    assert facts == {"ready": 0, "zygote_has_it": False, "ended": [(1, None)]}
