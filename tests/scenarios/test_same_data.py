"""That ranks, replacements and later launches train on the same data, or the run says so and ends."""

from __future__ import annotations

import json
import signal
from pathlib import Path

import pytest
import torch

from tests.scenarios.conftest import NO_SPARE
from tests.scenarios.harness import Run, poll
from tests.scenarios.test_order import rewritten

TASKS = Path(__file__).with_name("differing.py")
SETTINGS = (
    *("-b", 8, "run.seed=7", "--audit", "save_interval=0", "evaluate_interval=0"),
    *("schedule=constant", "warmup_steps=0", "log.display=plain"),
)


SPARE = "recovery.warm_spare=process"  # one that builds ahead has the data of before


def start(folder, name, *arguments, steps=40, workers=1, **kept):
    words = (f"num_workers={workers}", "--max-steps", steps, NO_SPARE)
    return Run(folder, *SETTINGS, *words, *arguments, task=f"{TASKS}:{name}", **kept)


def write(folder, begin):
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "data.txt").write_text(str(begin), encoding="utf-8")


def error_lines(run):
    return [line for line in run.console.splitlines() if "ddp_runner: error:" in line]


def test_an_order_that_differs_between_ranks_is_refused(tmp_path):
    with start(tmp_path, "Unsorted") as run:
        assert run.wait() == 2, run.console
    (line,) = error_lines(run)
    assert "rank 1 has other data than the other ranks: samples 0, " in line
    assert "listdir" in line
    assert "Traceback" not in run.console
    assert not list(run.checkpoints.glob("step_*"))


def test_ranks_that_differ_go_on_where_that_is_only_to_be_reported(tmp_path):
    with start(tmp_path, "Unsorted", "data.compare_samples=tell", steps=10) as run:
        assert run.wait() == 0, run.console
    reasons = run.summary()["inexact_reasons"]
    assert [reason.partition(":")[0] for reason in reasons] == [
        "rank 1 has other data than the other ranks"
    ]


def test_a_replacement_that_finds_other_data_ends_the_run_with_all_saved(tmp_path):
    write(tmp_path, 0)
    with start(tmp_path, "FromFile", SPARE, steps=400) as run:
        run.wait_for_step(10)
        write(tmp_path, 1)
        run.signal(signal.SIGKILL, run.rank_pid(1))
        assert run.wait() == 2, run.console
    (line,) = error_lines(run)
    assert "rank 1 has other data than the other ranks: samples 0, 48 and 95" in line
    assert "a file that has changed since the run began" in line
    summary = run.summary()
    assert (summary["status"], summary["exit_code"]) == ("failed", 2)
    assert summary["steps"] >= 10
    # Nothing is lost: the same command goes on from the very step, once the data is what it was.
    assert summary["checkpoint"].endswith(f"step_{summary['steps']:08d}.pt")
    write(tmp_path, 0)
    with start(tmp_path, "FromFile", steps=summary["steps"] + 5) as run:
        assert run.wait() == 0, run.console
    assert run.summary()["exact"] is True


def test_data_that_changed_between_launches_is_refused_or_reported(tmp_path):
    write(tmp_path, 0)
    with start(tmp_path, "FromFile", steps=400) as run:
        run.wait_for_step(10)
        run.signal(signal.SIGTERM)
        assert run.wait() == 75, run.console
    manifest = json.loads(max(run.checkpoints.glob("step_*.json")).read_text(encoding="utf-8"))
    assert set(manifest["data"]) == {"samples", "order", "sample 0", "sample 48", "sample 95"}
    steps = manifest["step"]

    write(tmp_path, 1)
    with start(tmp_path, "FromFile", steps=steps + 10) as run:
        assert run.wait() == 2, run.console
    (line,) = error_lines(run)
    assert "was trained on other data: samples 0, 48 and 95 are other ones" in line
    assert "likely cause: a file that has changed" in line
    for way in ("the old data", "data.compare_samples=tell", "--resume none"):
        assert way in line

    with start(tmp_path, "FromFile", "data.compare_samples=tell", steps=steps + 10) as run:
        assert run.wait() == 0, run.console
    reason = f"other data from step {steps} on: samples 0, 48 and 95 are other ones"
    assert run.summary()["inexact_reasons"] == [reason]
    assert f"changed: {reason}" in run.console

    # What is trained now is this data: no word is needed to go on with it, and it stays inexact.
    with start(tmp_path, "FromFile", steps=steps + 15) as run:
        assert run.wait() == 0, run.console
    assert run.summary()["inexact_reasons"] == [reason]


def test_a_checkpoint_that_says_nothing_of_its_data_is_gone_on_from(tmp_path):
    write(tmp_path, 0)
    write(tmp_path / "a", 0)
    with start(tmp_path / "a", "FromFile", steps=10) as run:
        assert run.wait() == 0, run.console
    rewritten(run, tmp_path / "b" / "checkpoints")
    (file,) = (tmp_path / "b" / "checkpoints").glob("step_*.json")
    manifest = json.loads(file.read_text(encoding="utf-8"))
    del manifest["data"]
    file.write_text(json.dumps(manifest), encoding="utf-8")
    content = torch.load(file.with_suffix(".pt"), weights_only=True)
    assert content["manifest"]["data"]
    write(tmp_path / "b", 1)
    with start(tmp_path / "b", "FromFile", steps=20) as run:
        assert run.wait() == 0, run.console
    assert run.summary()["exact"] is True


def test_a_generator_of_the_dataset_itself_is_named_from_the_start(tmp_path):
    with start(tmp_path, "OwnGenerator", steps=60) as run:

        def named():
            reasons = (run.status() or {}).get("inexact_reasons", ())
            return [reason for reason in reasons if reason.startswith("sample 0 ")]

        found = poll(named, what="the reason")
        assert run.status()["step"] < 60
        run.signal(signal.SIGKILL, run.rank_pid(0))
        assert run.wait() == 0, run.console
    (reason,) = found
    assert reason.startswith(
        "sample 0 is different when it is loaded again: its dataset has its own"
    )
    assert run.summary()["inexact_reasons"].count(reason) == 1
    assert run.console.count(reason) == 1


def test_what_a_dataset_opens_is_opened_in_workers_only(tmp_path):
    with start(tmp_path, "Lazy", steps=10) as run:
        run.wait_for_step(1)
        ranks = {run.rank_pid(0), run.rank_pid(1)}
        assert run.wait() == 0, run.console
    opened = [int(pid) for pid in (tmp_path / "opened").read_text(encoding="utf-8").split()]
    assert len(opened) == len(set(opened)) >= 4  # at least a look and a loader, of each rank
    assert not ranks & set(opened)
    assert run.summary()["exact"] is True


@pytest.mark.parametrize(("how", "workers"), [("raise", 1), ("hang", 1), ("kill", 0)])
def test_a_first_sample_that_does_not_load_is_not_compared(tmp_path, how, workers):
    """It is replaced when its turn comes, as any other."""
    words = ("on_bad_sample=substitute", "loader_timeout_s=1", f"task.how={how}")
    with start(tmp_path, "Broken", *words, steps=12, workers=workers) as run:
        assert run.wait() == 0, run.console
    summary = run.summary()
    assert summary["inexact_reasons"] == ["bad samples were replaced: see quarantine.jsonl"]
    manifest = json.loads(max(run.checkpoints.glob("step_*.json")).read_text(encoding="utf-8"))
    assert "sample 0" not in manifest["data"]
    if how == "raise":
        assert {"sample 48", "sample 95"} <= set(manifest["data"])
