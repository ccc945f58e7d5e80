"""The tests marked ``gpu``, of the files that have some."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

TESTS = Path(__file__).resolve().parents[1]
MARK = "pytest.mark.gpu"


def files():
    """Those with such a test; this folder only speaks of it."""
    found = [path for path in sorted(TESTS.rglob("test_*.py")) if path.parent.name != "gpu"]
    return [path for path in found if MARK in path.read_text(encoding="utf-8")]


def measure(facts):
    """How many passed and failed, and the lines that pytest ends with."""
    chosen = files()
    facts.note("files", [str(path.relative_to(TESTS)) for path in chosen])
    words = [sys.executable, "-m", "pytest", "-q", "-m", "gpu", "-p", "no:cacheprovider"]
    words += ["-W", "default", *(str(path) for path in chosen)]
    done = subprocess.run(
        words,
        cwd=TESTS.parent,
        capture_output=True,
        text=True,
        timeout=max(1.0, facts.left_s),
        check=False,
    )
    print(done.stdout, done.stderr, flush=True)
    facts.note("last_lines", done.stdout.splitlines()[-12:])
    facts.note("exit", done.returncode)
    for name in ("passed", "failed", "skipped", "error"):
        count = re.search(rf"(\d+) {name}", done.stdout)
        facts.note(name if name != "error" else "errors", int(count[1]) if count else 0)
    if done.returncode not in (0, 5):  # 5: none were chosen
        facts.outcome("failed", f"pytest ended with {done.returncode}")
