"""``run`` with training loops that others own: accelerate, Lightning, transformers' Trainer, killed and finished.

They are an extra (``pip install ddp-runner[frameworks]``) and take ten seconds each; run by hand.
"""

from __future__ import annotations

import importlib.util
import signal

import pytest

from .harness import poll
from .test_scripts import SCRIPTS, run_script

pytestmark = pytest.mark.slow
# By name: what is there once there is something to resume, and what it says when it does.
FRAMEWORKS = {
    "accelerate": ("out/checkpoints/checkpoint_1", "resumed at epoch"),
    "lightning": ("out/last.ckpt", "Restored all states from the checkpoint"),
    "transformers": ("out/checkpoint-32/trainer_state.json", "resumes out/checkpoint-"),
}
NEEDS = {"transformers": ("transformers", "accelerate")}


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("name", FRAMEWORKS)
def test_a_framework_s_script_is_killed_and_finishes(tmp_path, name, rank):
    """As its documentation has it, without a word about this runner; from its own checkpoint."""
    needed = NEEDS.get(name, (name,))
    missing = [one for one in needed if importlib.util.find_spec(one) is None]
    if missing:
        pytest.skip(f"not installed: {', '.join(missing)} (extra frameworks)")
    saved, says = FRAMEWORKS[name]
    script = SCRIPTS / f"with_{name}.py"
    options = ("--max-restarts", 2, "--hang-timeout", 30)
    with run_script(tmp_path, script, options=options) as run:
        poll((tmp_path / saved).exists, what="a checkpoint")
        run.signal(signal.SIGKILL, run.rank_pid(rank))
        assert run.wait() == 0, run.console
    first, second = run.summary()["attempts"]
    assert (first["rank"], first["exit_code"], second["exit_code"]) == (rank, 137, None)
    assert says in (run.logs / "attempt_1" / "rank_0.log").read_text()
    assert second["steps"] > 0


@pytest.mark.parametrize("name", FRAMEWORKS)
def test_a_framework_s_script_stops_when_it_is_asked_to(tmp_path, name):
    """By SIGTERM, whatever the framework makes of that."""
    if importlib.util.find_spec(name) is None:
        pytest.skip(f"not installed: {name} (extra frameworks)")
    with run_script(tmp_path, SCRIPTS / f"with_{name}.py", options=("--grace-period", 5)) as run:
        poll((tmp_path / FRAMEWORKS[name][0]).exists, what="a checkpoint")
        run.signal(signal.SIGTERM)
        assert run.wait() == 143, run.console
