"""A fork inherits the models of the settings: built in a rank that replaces one, they cost its peers 30 ms."""

from __future__ import annotations

import subprocess
import sys

import pytest

_ARE_BUILT = (
    "from ddp_runner.core.settings import RunSettings, Settings\n"
    "print(all(kind.__pydantic_complete__ for kind in (Settings, RunSettings)))"
)


@pytest.mark.parametrize(
    ("first", "built"), [("", False), ("import ddp_runner.rank.trained\n", True)]
)
def test_who_imports_a_rank_has_the_models_built(first, built):
    """The control: pydantic leaves them to their first use."""
    script = [sys.executable, "-c", first + _ARE_BUILT]
    answer = subprocess.run(script, capture_output=True, text=True, check=True, timeout=200)
    assert answer.stdout.strip() == str(built)
