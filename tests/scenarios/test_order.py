"""The order of samples in whole runs: of a dataset of any size, and of runs that began with the first one."""

from __future__ import annotations

import hashlib
import json
import signal
from pathlib import Path

import torch

from ddp_runner.checkpoint.manifest import checkpoint_name, manifest_name
from ddp_runner.data.order import SampleOrder
from tests.scenarios.conftest import NO_SPARE
from tests.scenarios.harness import Run
from tests.scenarios.huge import SAMPLES
from tests.scenarios.test_training import QUICK, STEPS, with_faults_and_a_stop

SAMPLED = f"{Path(__file__).with_name('sampled.py')}:SampledTask"
HUGE = f"{Path(__file__).with_name('huge.py')}:HugeTask"
SEED = 7
BATCH = 16  # over both ranks
SETTINGS = (
    *("-b", BATCH // 2, f"run.seed={SEED}", "--audit", "log.display=plain", "schedule=constant"),
    *("warmup_steps=0", "save_interval=0", "evaluate_interval=0", "recovery.warm_spare=false"),
)


def rewritten(run, into, *, is_old=False, step=None):
    """The newest checkpoint of ``run`` in the folder ``into``.

    ``is_old``: as it was before orders had versions; ``step``: moved to there.
    """
    manifest_path = max(run.checkpoints.glob("step_*.json"))
    manifest = json.loads(manifest_path.read_text(encoding="utf-8"))
    del manifest["facts_sha256"]
    content = torch.load(run.checkpoints / manifest["file"], weights_only=True)
    if is_old:
        assert (content.pop("order"), manifest.pop("order")) == (2, 2)
        del content["manifest"]["order"]
    if step is not None:
        content["counters"] |= {"committed_step": step, "attended_step": step}
        content["manifest"]["step"] = step
        manifest |= {"step": step, "file": checkpoint_name(step)}
    into.mkdir(parents=True)
    file = into / manifest["file"]
    torch.save(content, file)
    sha256 = hashlib.sha256(file.read_bytes()).hexdigest()
    manifest |= {"size_bytes": file.stat().st_size, "sha256": sha256}
    (into / manifest_name(manifest["step"])).write_text(json.dumps(manifest), encoding="utf-8")


def assert_taken(run, order, *, steps):
    """Each of these steps, the last line of each rank, took the samples of ``order``."""
    audits = run.audit(2)
    for step in steps:
        lines = [audit[step] for audit in audits]
        taken = [index for line in lines for index in line["indices"]]
        assert taken == order.indices(step - 1).tolist(), step
        assert {line["epoch"] for line in lines} == {order.position(step - 1)[0]}


def test_a_huge_dataset_starts_resumes_and_ends_like_a_small_one(tmp_path):
    """A billion samples: no table of them is made, at any of these places, nor by a replacement."""
    order = SampleOrder(seed=SEED, dataset_size=SAMPLES, global_batch_size=BATCH)
    with Run(tmp_path / "a", *SETTINGS, "num_workers=1", "--max-steps", 6, task=HUGE) as run:
        assert run.wait() == 0, run.console
    with Run(tmp_path / "a", *SETTINGS, "num_workers=0", "--max-steps", 12, task=HUGE) as run:
        assert run.wait() == 0, run.console
    assert_taken(run, order, steps=range(1, 13))

    end = order.steps_per_epoch
    rewritten(run, tmp_path / "b" / "checkpoints", step=end - 3)
    kill = ("--inject", f"kill:rank=1,step={end},phase=forward")
    steps = ("num_workers=1", "--max-steps", end + 4)
    with Run(tmp_path / "b", *SETTINGS, *kill, *steps, task=HUGE) as run:
        assert run.wait() == 0, run.console
    assert_taken(run, order, steps=range(end - 2, end + 5))
    summary = run.summary()
    assert (summary["steps"], summary["exact"]) == (end + 4, True)
    assert [(fault["kind"], fault["steps_lost"]) for fault in summary["faults"]] == [
        ("rank_killed", 0)
    ]
    assert summary["peak_rss_bytes"] < 2e9  # a table of one epoch would be 8 GB


def test_a_run_that_began_with_the_first_order_keeps_it(tmp_path):
    """Its checkpoint names none: so it goes on, also in who takes a dead rank's place, and from the next file."""
    first = SampleOrder(seed=SEED, dataset_size=192, global_batch_size=BATCH, version=1)
    paced = (*SETTINGS, "task.pace_s=0.1")
    with Run(tmp_path / "a", *paced, "num_workers=0", "--max-steps", 8) as run:
        assert run.wait() == 0, run.console
    rewritten(run, tmp_path / "b" / "checkpoints", is_old=True)
    faults = ("--inject", "kill:rank=1,step=14,phase=forward")
    steps = ("num_workers=1", "save_every_steps=10", "--max-steps", 30, "memory_every=0")
    with Run(tmp_path / "b", *paced, *faults, *steps) as run:
        run.wait_for_step(23)
        run.signals_at_once(*((signal.SIGKILL, run.rank_pid(rank)) for rank in (0, 1)))
        assert run.wait() == 0, run.console
    summary = run.summary()
    assert (summary["steps"], summary["exact"]) == (30, True)
    assert sum(fault["steps_lost"] for fault in summary["faults"]) >= 3, "all were dead once"
    assert_taken(run, first, steps=range(9, 31))
    newest = json.loads((run.checkpoints / manifest_name(30)).read_text(encoding="utf-8"))
    assert newest["order"] == 1
    assert "samples come in the order" in run.console


def test_the_order_of_a_sampler_survives_every_fault(tmp_path):
    """Each process draws the same samples in each epoch, and leaves the generators as they were."""
    with Run(tmp_path / "calm", *QUICK, NO_SPARE, "task.pace_s=0", task=SAMPLED) as calm:
        assert calm.wait() == 0, calm.console
    run = with_faults_and_a_stop(tmp_path / "faults", task=SAMPLED)
    summary = run.summary()
    assert (summary["exact"], summary["steps"]) == (True, STEPS), summary["inexact_reasons"]
    assert run.digest == calm.digest
    audits = calm.audit(2)
    taken = [[i for audit in audits for i in audit[step]["indices"]] for step in range(1, STEPS)]
    first, second = taken[:6], taken[6:12]  # an epoch each
    assert first != second
    assert len({index for step in first for index in step}) < 96, "some come twice"
