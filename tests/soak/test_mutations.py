"""Each invariant is broken once, in a copy: a test that guards it fails, or it is no guard.

By hand: ``pytest -m soak tests/soak/test_mutations.py``; ``-k cut-off-parks`` runs those of one invariant. All of them
take about an hour on two cores. ``MUTATIONS_REPORT=FILE`` appends a line for each: what was broken, and what noticed it.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
import uuid
from functools import partial
from pathlib import Path

import pytest

from ddp_runner.kernel.system.parent_death import die_with_parent
from tests.scenarios.leftovers import processes_with
from tests.soak.mutations import LEFT_OUT, MUTATIONS, PACKAGE, ROOT, invariants, place_of, sources

LIMIT_S = 400.0  # a break that makes a test wait for ever is noticed as well
MARK = "MUTATION_RUN"
_FAILED = re.compile(r"^(?:FAILED|ERROR) \S*::(test_\w+)", re.MULTILINE)
_NOT_RUN = (
    2,
    3,
    4,
    5,
)  # pytest: interrupted, an error of its own, of its use, or no test was found

pytestmark = [pytest.mark.timeout(12 * LIMIT_S)]


@pytest.fixture(scope="module")
def files():
    return sources()


@pytest.fixture(scope="module")
def copy_of_all(tmp_path_factory):
    """A folder with a copy of what the tests need, in which one file at a time is changed."""
    folder = tmp_path_factory.mktemp("mutated")
    for name in ("ddp_runner", "tests", "docs", "benchmarks"):
        shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
    for path in ROOT.iterdir():
        if path.is_file():
            shutil.copy(path, folder)
    return folder


@pytest.fixture(scope="module")
def places_of_tests():
    """Where a test of that name stands, as ``file::name``."""
    found = {}
    for path in sorted((ROOT / "tests").rglob("test_*.py")):
        text = path.read_text(encoding="utf-8")
        for name in re.findall(r"^def (test_\w+)\(", text, re.MULTILINE):
            found.setdefault(name, []).append(f"{path.relative_to(ROOT)}::{name}")
    return found


def test_each_invariant_is_broken_by_a_mutation_that_applies(files, places_of_tests):
    for mutation in MUTATIONS:
        place = place_of(mutation, files)
        compile(place.text, str(place.path), "exec")
        missing = [name for name in place.tests if name not in places_of_tests]
        assert place.tests, f"{mutation.invariant}: no test guards it"
        assert not missing, f"{mutation.invariant}: {missing}"
    named = {one.name for one in invariants(files)}
    assert named == {mutation.invariant for mutation in MUTATIONS} | LEFT_OUT.keys()


def run_tests(folder, tests, output, *, limit_s=LIMIT_S):
    """The exit code of pytest over these tests in that folder; None where the time was over. Nothing is left."""
    mark = uuid.uuid4().hex
    temporary = folder / "tmp"
    temporary.mkdir(exist_ok=True)
    with output.open("wb") as file:
        process = subprocess.Popen(
            [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", *tests],
            cwd=folder,
            env={
                **os.environ,
                "PYTHONPATH": str(folder),
                "TMPDIR": str(temporary),
                MARK: mark,
            },
            stdout=file,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            # SIGTERM ends this process without what stands under "finally".
            preexec_fn=partial(die_with_parent, os.getpid()),  # noqa: PLW1509
        )
        try:
            return process.wait(limit_s)
        except subprocess.TimeoutExpired:
            return None
        finally:
            for left in processes_with(f"{MARK}={mark}"):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(left.pid, signal.SIGKILL)
            process.wait()
            shutil.rmtree(temporary, ignore_errors=True)


@pytest.mark.soak
def test_every_guard_passes_while_nothing_is_broken(files, copy_of_all, places_of_tests, tmp_path):
    names = {name for mutation in MUTATIONS for name in place_of(mutation, files).tests}
    output = tmp_path / "output.txt"
    tests = [at for name in sorted(names) for at in places_of_tests[name]]
    assert run_tests(copy_of_all, tests, output, limit_s=10 * LIMIT_S) == 0, output.read_text()


@pytest.mark.soak
@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda mutation: mutation.id)
def test_a_broken_invariant_is_noticed(mutation, files, copy_of_all, places_of_tests, tmp_path):
    place = place_of(mutation, files)
    changed = copy_of_all / place.path.relative_to(PACKAGE.parent)
    tests = [at for name in place.tests for at in places_of_tests[name]]
    output = tmp_path / "output.txt"
    began_s = time.monotonic()
    changed.write_text(place.text, encoding="utf-8")
    try:
        code = run_tests(copy_of_all, tests, output)
    finally:
        changed.write_text(files[place.path], encoding="utf-8")
    said = output.read_text(errors="replace")
    noticed = "the time" if code is None else ", ".join(_FAILED.findall(said))
    _report(mutation, code=code, noticed=noticed, seconds=time.monotonic() - began_s)
    assert code not in _NOT_RUN, said[-4000:]
    assert code != 0, f"{tests} pass with {mutation.old!r} as {mutation.new!r}"


def _report(mutation, *, code, noticed, seconds):
    if path := os.environ.get("MUTATIONS_REPORT"):
        line = {
            "invariant": mutation.invariant,
            "new": mutation.new,
            "code": code,
            "noticed_by": noticed,
            "seconds": round(seconds, 1),
        }
        with Path(path).open("a") as file:
            file.write(json.dumps(line) + "\n")
