"""``run --preload``: what is imported once for all ranks, and what does not suit for that."""

from __future__ import annotations

import json
import os

import pytest

from tests.features.spare.test_cuda_driver import DRIVER, build_library, needs_compiler

from .harness import ROOT
from .test_scripts import run_script

SCRIPT = """
import json, os, sys, threading
found = {name: name in sys.modules for name in ("calm", "busy", "starts_cuda")}
import calm, busy
found["pids"] = [calm.pid, busy.pid, os.getpid()]
found["threads"] = sorted(t.name for t in threading.enumerate())
found["native"] = len(os.listdir("/proc/self/task"))
found["changed"] = os.environ.get("CHANGED_BY_BUSY_IN", "")
json.dump(found, open(f"found_{os.environ['RANK']}.json", "w"))
"""
BUSY = """
import os, threading
pid = os.getpid()
os.environ["CHANGED_BY_BUSY_IN"] = f"{os.environ.get('CHANGED_BY_BUSY_IN', '')} {pid}".strip()
threading.Thread(target=threading.Event().wait, daemon=True, name="busy").start()
"""
STARTS_CUDA = """
import ctypes
assert ctypes.CDLL("libcuda.so.1").cuInit(0) == 0
"""


@pytest.fixture
def modules(tmp_path):
    """Modules of a user's beside the script, on the search path of every process."""
    (tmp_path / "calm.py").write_text("import os\npid = os.getpid()\n")
    (tmp_path / "busy.py").write_text(BUSY)
    (tmp_path / "starts_cuda.py").write_text(STARTS_CUDA)
    script = tmp_path / "own.py"
    script.write_text(SCRIPT)
    return script


def found_by(folder, rank):
    return json.loads((folder / f"found_{rank}.json").read_text())


@needs_compiler
def test_what_starts_a_thread_or_cuda_is_left_to_each_rank(tmp_path, modules):
    """It is named, the others are there all the same, and nothing of it is left in the ranks.

    CUDA by a stand-in for NVIDIA's library, which a compiler makes here: no GPU is needed.
    """
    folder = tmp_path / "nvidia"
    folder.mkdir()
    build_library(folder, "libcuda.so.1", DRIVER % 1)
    variables = {
        "PYTHONPATH": f"{ROOT}{os.pathsep}{tmp_path}",
        "LD_LIBRARY_PATH": str(folder),
    }
    options = ("--preload", "calm,busy,starts_cuda")
    with run_script(tmp_path, modules, options=options, variables=variables) as run:
        assert run.wait() == 0, run.console
    for name, why in (("busy", "2 threads run"), ("starts_cuda", "CUDA is in use")):
        line = f"--preload: {name} is left to each rank: after importing it {why}"
        assert run.console.count(line) == 1, run.console
    for rank in range(2):
        found = found_by(tmp_path, rank)
        assert (found["calm"], found["busy"], found["starts_cuda"]) == (True, False, False)
        calm_pid, busy_pid, own_pid = found["pids"]
        assert calm_pid == found_by(tmp_path, 0)["pids"][0] != own_pid, "imported once"
        assert busy_pid == own_pid
        assert found["changed"] == str(own_pid), "what it did to the zygote's environment is gone"
        assert found["threads"] == ["MainThread", "busy", "control"]
