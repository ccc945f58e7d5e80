"""Running failed tests once more: what passes alone is flaky, what fails again or was excused is not."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

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
