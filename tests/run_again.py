"""Runs the tests that failed once more, each alone, and says which of them pass then.

    python tests/run_again.py LASTFAILED KNOWN

``LASTFAILED`` is the file in which pytest keeps the names of failed tests; ``KNOWN`` names those that
were excused before, one a line, with comments after ``#``. Exit code 0 only if all pass and none is known.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

FAILED_MAX = 3  # more than these are no accident


def excused_before(known: Path) -> set[str]:
    lines = known.read_text(encoding="utf-8").splitlines()
    return {name for line in lines if (name := line.partition("#")[0].strip())}


def without_group(name: str) -> str:
    """By what pytest finds the test: xdist writes its group behind it."""
    return name.rpartition("@")[0] if name.rfind("@") > name.rfind("]") else name


def main(lastfailed: Path, known: Path) -> int:
    names = sorted(map(without_group, json.loads(lastfailed.read_text(encoding="utf-8"))))
    repeated = excused_before(known).intersection(names)
    for name in sorted(repeated):
        print(f"FAILED {name}: it was excused before", flush=True)
    if repeated or not names:
        return 1
    if len(names) > FAILED_MAX:
        print(f"FAILED {len(names)} tests: too many to run again", flush=True)
        return 1
    still = 0
    for name in names:
        again = subprocess.run([sys.executable, "-m", "pytest", "-n", "0", name], check=False)
        print(f"{'FAILED' if again.returncode else 'FLAKY'} {name}", flush=True)
        still |= again.returncode
    return 1 if still else 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), Path(sys.argv[2])))
