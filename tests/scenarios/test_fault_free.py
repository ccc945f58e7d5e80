"""Runs that nothing disturbs: what they write, which samples they take, and what they end with."""

from __future__ import annotations

import hashlib
import json
import re

import pytest
import torch

from tests.scenarios.conftest import SETTINGS, STEPS
from tests.scenarios.harness import Run

SUMMARY_FIELDS = (
    *("run_id", "status", "exit_code", "steps", "epochs", "samples", "world_size", "final_loss"),
    *("weights_sha256", "exact", "inexact_reasons", "wall_s", "time_s", "goodput", "faults"),
    "checkpoint",
)
TIME_FIELDS = (
    *("startup", "productive", "data_wait", "checkpoint", "comparison", "evaluation", "recovery"),
    "lost",
)
STATUS_FIELDS = (
    *("run_id", "pid", "state", "generation", "world_size", "step", "max_steps", "faults_total"),
    "ranks",
)
RANK_FIELDS = (
    *("rank", "pid", "state", "step", "phase", "phase_age_s", "rss_bytes", "device"),
    "loader_pids",
)
WORLDS = pytest.mark.parametrize("world", [1, 2, 3])


@WORLDS
def test_the_summary_of_a_run_without_faults_is_whole_and_true(fault_free, world):
    """Every field of the contract is there, and its figures agree with what was asked for."""
    run = fault_free(world)
    summary = run.summary()
    assert not set(SUMMARY_FIELDS) - set(summary)
    assert set(summary["time_s"]) == set(TIME_FIELDS)
    assert (summary["status"], summary["exit_code"]) == ("completed", 0)
    assert (summary["steps"], summary["world_size"]) == (STEPS, world)
    assert summary["samples"] == STEPS * 8 * world
    assert summary["epochs"] == STEPS * 8 * world // 192
    assert summary["faults"] == []
    assert (summary["exact"], summary["inexact_reasons"]) == (True, [])
    assert summary["final_loss"] > 0
    assert summary["checkpoint"] == str(run.checkpoints / f"step_{STEPS:08d}.pt")
    times = summary["time_s"]
    assert (times["recovery"], times["lost"]) == (0.0, 0.0)
    assert (times["comparison"] > 0) == (world > 1), "before saves, and at the end"
    assert sum(times.values()) <= summary["wall_s"] + 0.01
    assert times["productive"] >= STEPS * 0.02  # the pace of the workload
    available_s = summary["wall_s"] - times["startup"]
    assert summary["goodput"] == pytest.approx(times["productive"] / available_s, abs=0.01)


@WORLDS
def test_the_last_status_and_the_journal_agree_with_the_summary(fault_free, world):
    """status.json ends as done, and journal and metrics lines show the same run."""
    run = fault_free(world)
    summary, status = run.summary(), run.status()
    assert not set(STATUS_FIELDS) - set(status)
    assert all(not set(RANK_FIELDS) - set(rank) for rank in status["ranks"])
    assert [rank["rank"] for rank in status["ranks"]] == list(range(world))
    assert (status["state"], status["step"], status["max_steps"]) == ("done", STEPS, STEPS)
    assert status["run_id"] == summary["run_id"]
    events = run.events()
    assert [event["id"] for event in events] == list(range(len(events)))
    assert [event["event"] for event in events if event["event"].startswith("run_")] == [
        "run_begins",
        "run_ends",
    ]
    assert not run.events("fault")
    lines = (run.logs / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    logged = {record["step"] for record in map(json.loads, lines) if "loss" in record}
    assert {1, 20, STEPS} <= logged
    used = [record for record in map(json.loads, lines) if "step_s" in record]
    assert all(record["rss_bytes"] > 50_000_000 for record in used)
    assert summary["samples_per_s"] > 0
    assert (summary["tokens_per_s"], summary["flops_utilization"]) == (
        None,
        None,
    )  # who counts them?
    assert set(summary["rank_use"]) == {str(rank) for rank in range(world)}
    assert all(use["rss_bytes"]["peak"] > 50_000_000 for use in summary["rank_use"].values())


@WORLDS
def test_every_step_takes_its_global_batch_and_an_epoch_no_sample_twice(fault_free, world):
    """The ranks' shares of a step are disjoint and make up the global batch; so do an epoch's steps."""
    audits = fault_free(world).audit(world)
    seen: dict[int, list[int]] = {}
    for step in range(1, STEPS + 1):
        records = [audit[step] for audit in audits]
        assert len({record["loss_hex"] for record in records}) == 1
        assert len({record["epoch"] for record in records}) == 1
        indices = [index for record in records for index in record["indices"]]
        assert len(indices) == len(set(indices)) == 8 * world
        seen.setdefault(records[0]["epoch"], []).extend(indices)
    for epoch, indices in seen.items():
        assert len(indices) == len(set(indices)), f"epoch {epoch}"
        assert set(indices) <= set(range(192))
    assert set(seen[0]) == set(range(192))


@WORLDS
def test_plain_torch_reads_the_final_weights_and_finds_the_same_digest(fault_free, world):
    """weights_sha256 is what anybody computes from the checkpoint with torch.load alone."""
    run = fault_free(world)
    saved = torch.load(run.checkpoints / f"step_{STEPS:08d}.pt", weights_only=True)
    digest = hashlib.sha256()
    for key, tensor in sorted(saved["model"].items()):
        shape = ",".join(str(size) for size in tensor.shape)
        for part in (key, str(tensor.dtype), shape):
            digest.update(part.encode() + b"\0")
        digest.update(tensor.contiguous().numpy().tobytes())
    assert digest.hexdigest() == run.digest


def test_two_runs_with_the_same_settings_end_with_the_same_weights(fault_free, tmp_path):
    """Nothing but the settings decides the result, bit for bit; another seed gives another one."""
    with Run(tmp_path, *SETTINGS) as run:
        assert run.wait() == 0, run.console
        assert run.ports_seen, "the check that no port is left would prove nothing"
    assert run.digest == fault_free(2).digest
    assert len({fault_free(world).digest for world in (1, 2, 3)}) == 3
    assert_nothing_said_twice(run.console)


def assert_nothing_said_twice(console):
    """No line of any substance stands on the console more than once, whatever its time stamp."""
    said = [re.sub(r"\d\d:\d\d:\d\d(\.\d+)?", "", line).strip() for line in console.splitlines()]
    long = [line for line in said if len(line) > 20]
    assert len(long) == len(set(long)), console
