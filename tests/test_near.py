"""``tests/run --near FILE`` finds the tests of a file wherever they stand."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.near import ROOT, near


def found(file):
    return [str(path.relative_to(ROOT / "tests")) for path in near(ROOT / "ddp_runner" / file)]


@pytest.mark.parametrize(
    ("file", "test"),
    [
        ("kernel/group/transfer.py", "kernel/group/test_transfer.py"),
        ("kernel/rules/recovery.py", "kernel/rules/test_recovery.py"),
        ("kernel/parent/loop.py", "supervisor/test_repairs.py"),
    ],
)
def test_what_imports_a_file_or_has_its_name_is_near(file, test):
    assert test in found(file)


def test_its_own_tests_come_first():
    assert found("kernel/rules/faults.py")[0].startswith("kernel/rules/")
    assert found("kernel/group/transfer.py")[0] == "kernel/group/test_transfer.py"


def test_what_is_no_file_of_the_package_is_one_line():
    command = [sys.executable, "-m", "tests.near", "tests/near.py"]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert ended.returncode == 1
    assert ended.stderr == "--near tests/near.py: must be a file of ddp_runner/\n"
