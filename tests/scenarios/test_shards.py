"""A stream that is cut into shards: its positions outlive workers, ranks and the run."""

from __future__ import annotations

import json
import signal
from pathlib import Path

import torch

from tests.scenarios.conftest import NO_SPARE, PATIENT
from tests.scenarios.harness import Run
from tests.scenarios.sharded import write

TASK = f"{Path(__file__).with_name('sharded.py')}:ShardTask"
HOW = ("--audit", "save_every_steps=10", "evaluate_interval=0", "log.display=plain", *PATIENT)
WHOLE = (*HOW, "-b", 8, "--max-steps", 48)
LOST = (
    *("--inject", "loader_kill:rank=0,step=5", "--inject", "kill:rank=1,step=10"),
    *("--inject", "loader_stop:rank=1,step=16", "data.loader_timeout_s=2"),
    *("--inject", "nan:rank=1,step=24", "--inject", "kill:rank=0,step=27"),
)


def test_a_stream_in_shards_goes_on_exactly_after_every_loss(tmp_path):
    """Workers killed and stopped, first and last rank and all ranks killed, a stop amid shards, other workers.

    The rank waits for the stopped worker once it has used what was read ahead, six steps later at most. A step whose loss is not a number is skipped in both runs.
    """
    folder = write(tmp_path / "data")
    nan = ("--inject", "nan:rank=1,step=24")
    with Run(
        tmp_path / "calm", *WHOLE, NO_SPARE, *folder, *nan, "num_workers=0", task=TASK
    ) as calm:
        assert calm.wait() == 0, calm.console
    with Run(tmp_path / "run", *WHOLE, *folder, *LOST, "num_workers=2", task=TASK) as run:
        run.wait_for_step(32)
        run.signal(signal.SIGTERM)
        assert run.wait() == 75, run.console
    kinds = {fault["kind"] for fault in run.summary()["faults"]}
    assert {"loader_worker_died", "loader_timeout", "rank_killed"} <= kinds
    kills = ("--inject", "kill:rank=all,step=40", "workers_total=3")  # two and one
    with Run(tmp_path / "run", *WHOLE, *folder, *kills, task=TASK) as run:
        assert run.wait() == 0, run.console
    assert run.digest == calm.digest
    assert run.summary()["exact"] == calm.summary()["exact"]


def test_each_stage_reads_a_stream_of_its_own_in_shards(tmp_path):
    """As a run that begins with its weights: ranks are lost amid both stages, and all of them in the second."""
    first, second = ({"folder": str(tmp_path / name)} for name in ("first", "second"))
    write(tmp_path / "first")
    write(tmp_path / "second", bad=True)
    ends = {"stream_end": "drop", "on_bad_sample": "substitute"}
    stages = (
        {"name": "one", "max_steps": 9, "task": first},
        {"name": "two", "max_steps": 16, "batch_size": 4, "seed": 5, "data": ends, "task": second},
    )
    config = tmp_path / "stages.json"
    config.write_text(json.dumps({"batch_size": 4, "num_workers": 1, "stages": stages}))
    kills = ("kill:rank=1,step=6", "kill:rank=0,step=13", "kill:rank=all,step=20")
    how = (*HOW, "--config", config, *(word for one in kills for word in ("--inject", one)))
    with Run(tmp_path / "run", *how, task=TASK) as run:
        assert run.wait() == 0, run.console
    assert run.summary()["steps"] == 25
    config.write_text(
        json.dumps({"batch_size": 4, "seed": 5, "num_workers": 0, "data": ends, "task": second})
    )
    begin = run.checkpoints / "step_00000009.pt"
    alone = (*HOW, "--config", config, "--max-steps", 16, "--init-from", begin)
    with Run(tmp_path / "alone", *alone, task=TASK) as one:
        assert one.wait() == 0, one.console
    assert run.digest == one.digest
    reasons = one.summary()["inexact_reasons"]
    assert run.summary()["inexact_reasons"] == reasons
    assert len(reasons) == 1


def test_other_ranks_share_what_is_left_of_the_shards(tmp_path):
    """Said to be not exact, and why; bad lines are left out, and an epoch ends for all at one step."""
    folder = write(tmp_path / "data", bad=True)
    how = (*HOW, *folder, "-e", 2, "--max-steps", 0, "data.global_batch_size=6", "num_workers=1")
    ends = ("data.stream_end=drop", "data.on_bad_sample=substitute")
    with Run(tmp_path, *how, *ends, task=TASK) as run:
        run.wait_for_step(12)
        run.signal(signal.SIGTERM)
        assert run.wait() == 75, run.console
    newest = max(run.checkpoints.glob("step_*.pt"))
    record = torch.load(newest, weights_only=True)["stream"]
    assert record["step"] == int(newest.stem.partition("_")[2])
    assert len(json.dumps(record)) < 10_000
    with Run(tmp_path, *how, *ends, task=TASK, world=3) as run:
        assert run.wait() == 0, run.console
    summary = run.summary()
    assert summary["exact"] is False
    reasons = [reason for reason in summary["inexact_reasons"] if "dealt to 3 ranks" in reason]
    assert len(reasons) == 1, summary["inexact_reasons"]
    assert "and were to 2: samples come in another order" in reasons[0]
    lines = (run.logs / "quarantine.jsonl").read_text().splitlines()
    assert lines
    assert all("ValueError: the line at byte" in json.loads(line)["reason"] for line in lines)
