"""What continuous integration does about tests: failed ones run once more, and the faster Python runs all."""

import json
import subprocess
import sys
import sysconfig
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.faster_python import faster, looked_at

SCRIPT = Path(__file__).with_name("run_again.py")
TESTS = """
from pathlib import Path

def test_passes_the_second_time():
    marker = Path(__file__).with_name("ran")
    first = not marker.exists()
    marker.touch()
    assert not first

def test_always_fails():
    assert False
"""


@pytest.fixture
def run_again(tmp_path):
    """Runs the tests named in a folder of its own, where the first one has failed once already."""
    (tmp_path / "test_two.py").write_text(TESTS)
    (tmp_path / "ran").touch()

    def call(*names, known=""):
        failed = [f"test_two.py::{name}" for name in names]
        (tmp_path / "lastfailed").write_text(json.dumps(dict.fromkeys(failed, True)))
        (tmp_path / "known.txt").write_text(known)
        command = [sys.executable, SCRIPT, "lastfailed", "known.txt"]
        return subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)

    return call


def test_a_test_that_passes_alone_is_named_flaky_and_excused(run_again):
    ended = run_again("test_passes_the_second_time")
    assert "FLAKY test_two.py::test_passes_the_second_time" in ended.stdout
    assert ended.returncode == 0


def test_a_test_that_has_a_group_runs_again_by_its_name(run_again):
    ended = run_again("test_passes_the_second_time@group")
    assert "FLAKY test_two.py::test_passes_the_second_time\n" in ended.stdout
    assert ended.returncode == 0


@pytest.mark.xdist_group("named")
def test_a_group_is_in_the_names_of_its_tests(request):
    """By which xdist gives all of them to one process."""
    is_shared_out = getattr(request.config.option, "loadgroup", False)
    assert request.node.nodeid.endswith("@named") is is_shared_out


def test_a_test_that_fails_again_fails(run_again):
    ended = run_again("test_passes_the_second_time", "test_always_fails")
    assert "FAILED test_two.py::test_always_fails" in ended.stdout
    assert ended.returncode == 1


def test_a_test_is_not_excused_twice(run_again):
    name = "test_two.py::test_passes_the_second_time"
    ended = run_again("test_passes_the_second_time", known=f"# before\n{name}  # 2026-01-01\n")
    assert "it was excused before" in ended.stdout
    assert ended.returncode == 1


def test_many_failures_are_no_accident(run_again):
    ended = run_again(*(f"test_{number}" for number in range(4)))
    assert "too many" in ended.stdout
    assert ended.returncode == 1


@pytest.fixture
def pythons(tmp_path):
    """Make a program that answers as a Python of that version and speed would."""

    def make(name, *, version, seconds, code=0):
        program = tmp_path / name
        program.write_text(f"#!/bin/sh\necho '[[3, {version}], {seconds}]'\nexit {code}\n")
        program.chmod(0o755)
        return str(program)

    return make


def test_ci_takes_the_faster_build_of_the_same_python(pythons):
    """The usual one stays where the other is hardly faster, of another version, or unfit for an environment."""
    usual = pythons("usual", version=11, seconds=0.10)
    quick = pythons("quick", version=11, seconds=0.08)
    assert faster(usual, quick) == quick
    assert faster(usual, pythons("same", version=11, seconds=0.095)) == usual
    assert faster(usual, pythons("other", version=12, seconds=0.05)) == usual
    assert faster(usual, pythons("unfit", version=11, seconds=0.05, code=1)) == usual
    assert faster(usual, "/nonexistent") == usual
    is_fit = Path(sysconfig.get_path("include"), "Python.h").exists() and find_spec("ensurepip")
    assert bool(looked_at(sys.executable)) is bool(is_fit)
