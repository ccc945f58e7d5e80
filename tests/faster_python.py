"""Prints the folder of the faster Python: `python3` of the path, or the system's of the same version.

    python3 tests/faster_python.py

Half of the suite's time is the interpreter's, and one that was built without an optimized profile, as version managers
do it, takes a quarter longer. Only the build may differ: which version is tested stays a matter of the path.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

SYSTEM = "/usr/bin/python3"
# An environment can be made from it, and programs compiled for it, as `torch.compile` does.
LOOK = """
import ensurepip, json, pathlib, sys, sysconfig, time, timeit, venv
assert pathlib.Path(sysconfig.get_path("include"), "Python.h").exists()
def work():
    found = {}
    for n in range(20000):
        found[str(n)] = found.get(str(n // 2), 0) + len(str(n))
seconds = min(timeit.repeat(work, timer=time.process_time, number=1, repeat=20))
print(json.dumps([sys.version_info[:2], seconds]))
"""


def looked_at(python: str) -> tuple[list[int], float] | None:
    """Return its version and the seconds that it takes for a little work; None if it is not fit."""
    try:
        done = subprocess.run(
            [python, "-I", "-c", LOOK], capture_output=True, text=True, check=True, timeout=60
        )
    except (OSError, subprocess.SubprocessError):
        return None
    version, seconds = json.loads(done.stdout)
    return version, seconds


def faster(usual: str, system: str) -> str:
    """Return the system's if it is of the same version and takes less than nine tenths of the time."""
    first, second = looked_at(usual), looked_at(system)
    if first is None or second is None or first[0] != second[0]:
        return usual
    return system if second[1] < 0.9 * first[1] else usual


if __name__ == "__main__":
    usual = shutil.which("python3") or sys.executable
    print(Path(faster(usual, SYSTEM)).parent)
