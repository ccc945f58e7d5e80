"""``bench``: what its own words are, and what it shows of a real run."""

from __future__ import annotations

import json

import pytest

from ddp_runner.__main__ import main
from ddp_runner.core.step_times import STEP
from ddp_runner.features.tuning.bench import DECLARATION, STEPS, Asked, measured
from ddp_runner.kernel.rules.phases import PHASE_NAMES
from tests.scenarios.harness import Run


def asked_by(*words):
    return Asked.by(DECLARATION.parse(words))


def test_its_own_words_are_split_from_those_of_train():
    """All others are train's, in their order."""
    asked = asked_by("--task", "my.py", "--steps", "12", "-b", "8", "--json")
    assert (asked.words, asked.steps, asked.is_json) == (("--task", "my.py", "-b", "8"), 12, True)
    assert asked_by("--steps=7").steps == 7
    assert asked_by().steps == STEPS


@pytest.mark.parametrize(
    ("words", "reported"),
    [
        (["--steps", "many"], "must be a whole number from 5"),
        (["--steps", "1"], "must be a whole number from 5"),
        (["--steps"], "needs a value"),
        (["--cpu", "--dry-run"], "are two commands"),
        (["--cpu", "--find-lr"], "are two commands"),
        (["--cpu", "--nnodes", "2", "--rdzv-endpoint", "a:1"], "is for one machine"),
        (["--cpu", "--no-such"], "--no-such"),
    ],
)
def test_wrong_words_are_one_line_and_exit_code_2(words, reported, capsys):
    """Nothing is started."""
    assert main(["bench", *words]) == 2
    said = capsys.readouterr().err
    assert reported in said
    assert said.count("\n") == 1


def test_first_steps_and_evaluations_are_not_measured(tmp_path):
    """They are slower, or no steps; of each step that counts there is a record for each rank."""
    lines = [
        {"step": step, "rank": rank, "learning_rate": 0.1, "step_s": 0.2, "data_ms": 1.0}
        for step in (4, 5, 6, 7)
        for rank in (0, 1)
    ]
    lines.append({"step": 7, "rank": 0, "validation_loss": 3.0})
    text = "".join(json.dumps(line) + "\n" for line in lines)
    (tmp_path / "metrics.jsonl").write_text(text, encoding="utf-8")
    assert [(one["step"], one["rank"]) for one in measured(tmp_path)] == [
        (6, 0),
        (6, 1),
        (7, 0),
        (7, 1),
    ]


@pytest.mark.whole_run
def test_a_real_run_is_measured_and_leaves_nothing(tmp_path):
    """Two ranks: each part has a time, the step is no shorter than its parts, and no file is left."""
    words = ("--steps", 6, "--json", "task.pace_s=0.01", "num_workers=0")
    with Run(tmp_path, *words, verb="bench") as run:
        assert run.wait(hurries=False) == 0, run.console
    found = json.loads(run.console.strip().splitlines()[-1])
    parts = {part["name"]: part for part in found["parts"]}
    assert list(parts) == [*PHASE_NAMES, STEP]
    assert parts["forward_ms"]["median_ms"] >= 10.0
    assert parts[STEP]["median_ms"] >= parts["forward_ms"]["median_ms"]
    assert all(part["median_ms"] > 0 for part in parts.values())
    assert found["bound"] in {"computation", "communication", "a slow rank", "data"}, (
        "of a busy machine"
    )
    assert found["tries"]
    assert not run.logs.exists()
    assert not run.checkpoints.exists()
