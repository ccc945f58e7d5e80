"""Loading that breaks is repaired inside its rank: the others wait, and nobody leaves the generation."""

from __future__ import annotations

import json
import signal
from pathlib import Path

import pytest

from ddp_runner.data.order import SampleOrder
from tests.scenarios.cgroups import memory_cgroup
from tests.scenarios.conftest import LONG, LONG_STEPS, NO_SPARE, PATIENT, SETTINGS
from tests.scenarios.harness import Run, assert_every_sample_once, poll
from tests.scenarios.workload import HOLD_NAME

TROUBLE = "trouble"
STREAM = f"{Path(__file__).with_name('streaming.py')}:StreamTask"
BREAKING = f"{Path(__file__).with_name('breaking.py')}:BreakingTask"
QUICK = (
    *("-b", 8, "num_workers=1", "--audit", "save_every_steps=10", "log.display=plain"),
    *PATIENT,
)
IMPATIENT = ("recovery.hang_min_s=2",)
BAD = ("--inject", "bad_sample:rank=1,step=8", "on_bad_sample=substitute")
DRAWN = ("--inject", "random:kinds=bad_sample,times=1,seed=2")  # one more, of rank 1's step 16


def finish(folder, *arguments, code=0, **how):
    with Run(folder, *arguments, world=2, **how) as run:
        assert run.wait() == code, run.console
        return run


def quarantined(run):
    path = run.logs / "quarantine.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_loader_workers_that_die_or_stop_are_replaced_inside_their_rank(tmp_path, fault_free):
    """SIGKILL and SIGSTOP: the weights of a fault-free run, one generation, the same processes."""
    blows = (
        "loader_kill:rank=1,step=5",
        "loader_stop:rank=1,step=11",
        "loader_kill:rank=0,step=17",
    )
    run = finish(tmp_path, *SETTINGS, NO_SPARE, *(f"--inject={blow}" for blow in blows))
    summary = run.summary()
    assert summary["weights_sha256"] == fault_free(2).digest
    assert (summary["exact"], len(run.events("forming"))) == (True, 1)
    faults = summary["faults"]
    assert [(fault["kind"], fault["rank"]) for fault in faults] == [
        ("loader_worker_died", 1),
        ("loader_timeout", 1),
        ("loader_worker_died", 0),
    ]
    assert "was killed by SIGKILL" in faults[0]["cause"]
    assert "stopped for 2 s: loader worker 0 (pid " in faults[1]["cause"]
    for fault in faults:
        assert (fault["steps_lost"], fault["generation"]) == (0, 1)
        assert fault["recovered_s"] is not None
        assert "sample" in fault["cause"]
    assert "1 loader worker restarted" in run.console
    assert run.status()["faults_total"] == 3
    assert len({record["pid"] for record in run.events("rank_formed")}) == 2


def test_a_worker_that_exits_raises_or_is_stuck_costs_no_sample(tmp_path, fault_free):
    """Each once, the sample is well when it is tried again: batches and weights of a fault-free run."""
    troubles = ("data 0 exit7", "data 0 raise", "data 1 sleep600")
    settings = (NO_SPARE, "loader_timeout_s=2", "task.pace_s=0.12")
    with Run(tmp_path, *SETTINGS, *settings, world=2) as run:
        run.wait_for_step(3)
        for trouble in troubles:
            (tmp_path / "written").write_text(trouble, encoding="utf-8")
            (tmp_path / "written").rename(tmp_path / TROUBLE)
            poll(lambda: not (tmp_path / TROUBLE).exists(), what=trouble)
        assert run.wait() == 0, run.console
    summary = run.summary()
    by_kind = {fault["kind"]: fault for fault in summary["faults"]}
    assert sorted(by_kind) == ["bad_sample", "loader_timeout", "loader_worker_died"]
    assert len(summary["faults"]) == 3
    assert {fault["steps_lost"] for fault in summary["faults"]} == {0}
    assert "exited with code 7" in by_kind["loader_worker_died"]["cause"]
    assert "RuntimeError: trouble was asked for" in by_kind["bad_sample"]["cause"]
    assert "loaded when it was tried again" in run.console
    stuck = by_kind["loader_timeout"]
    assert stuck["rank"] == 1
    assert "no batch within 2 s: loader worker 0 (pid " in stuck["cause"]
    assert "is sleeping" in stuck["cause"]
    assert (summary["exact"], len(run.events("forming"))) == (True, 1)
    assert summary["weights_sha256"] == fault_free(2).digest
    assert_every_sample_once(run, 2, samples=192)
    for ours, theirs in zip(run.audit(2), fault_free(2).audit(2), strict=True):
        assert {step: line["indices"] for step, line in ours.items()} == {
            step: line["indices"] for step, line in theirs.items()
        }


@pytest.mark.parametrize("workers", [0, 1])
def test_a_slow_sample_is_no_fault(tmp_path, fault_free, workers):
    """Beyond the hang deadline of a step, but below the loader's: it is waited for, in the rank itself too."""
    (tmp_path / TROUBLE).write_text("data 1 sleep3 100", encoding="utf-8")  # of step 12 or so
    settings = (*SETTINGS, NO_SPARE, "recovery.hang_min_s=1", f"num_workers={workers}")
    with Run(tmp_path, *settings, world=2) as run:
        assert run.wait() == 0, run.console
    assert not (tmp_path / TROUBLE).exists()
    summary = run.summary()
    assert summary["faults"] == []
    assert summary["weights_sha256"] == fault_free(2).digest


def test_a_bad_sample_is_replaced_in_every_life_of_the_run(tmp_path):
    """The same stand-in with or without faults and a resume, found once, reported as not exact."""
    steps = ("--max-steps", 48)
    calm = finish(tmp_path / "calm", *QUICK, NO_SPARE, *steps, *BAD, *DRAWN)
    asked = (1, 8)  # the other one may come in the same step, on the other rank
    record, other = sorted(
        quarantined(calm), key=lambda record: (record["rank"], record["step"]) != asked
    )
    assert (record["rank"], record["step"]) == asked
    summary = calm.summary()
    assert {fault["kind"] for fault in summary["faults"]} == {"bad_sample"}
    assert {fault["steps_lost"] for fault in summary["faults"]} == {0}
    causes = " ".join(fault["cause"] for fault in summary["faults"])
    for one in (record, other):
        assert f"sample {one['index']} (epoch " in causes
    assert summary["exact"] is False
    assert summary["inexact_reasons"] == ["bad samples were replaced: see quarantine.jsonl"]
    assert record["replacement"] in calm.audit(2)[1][9]["indices"]
    taken = {i for rank in calm.audit(2) for one in rank.values() for i in one["indices"]}
    assert not taken & {record["index"], other["index"]}
    folder = tmp_path / "storm"
    kill = ("--inject", "kill:rank=1,step=20", "--inject", "kill:rank=0,step=25")
    folder.mkdir()
    (folder / TROUBLE).write_text("loss 1 preempt 23", encoding="utf-8")  # its second process
    with Run(folder, *QUICK, *steps, *BAD, *DRAWN, *kill, world=2) as run:
        assert run.wait(hurries=False) == 75, run.console
    (folder / "logs" / "quarantine.jsonl").rename(folder / "elsewhere.jsonl")
    again = finish(folder, *QUICK, *steps, *BAD, *DRAWN)
    assert not (folder / "logs" / "quarantine.jsonl").exists(), "it was tried again"
    assert again.digest == calm.digest
    assert again.summary()["exact"] is False


def tries(folder):
    """The samples that broke a process, in the order in which they were touched."""
    return (folder / "tries").read_text(encoding="utf-8").split()


def test_a_sample_that_kills_every_worker_stops_the_run_and_is_named(tmp_path):
    """The default: exit 1 within its first generation; no rank dies of it."""
    run = finish(tmp_path, *QUICK, NO_SPARE, task=BREAKING, code=1)
    fault = run.summary()["faults"][-1]
    assert fault["kind"] == "bad_sample"
    assert fault["cause"].startswith("sample 5 (epoch 1) could not be loaded: no worker survives")
    assert "was killed by SIGKILL" in fault["cause"]
    assert "data.on_bad_sample=substitute would replace it" in run.console
    assert len(run.events("forming")) == 1
    assert len(tries(tmp_path)) == 3, "twice within its batch, once alone"


def test_a_sample_that_kills_workers_is_replaced_in_each_launch(tmp_path):
    """Named in quarantine.jsonl, reported as not exact; a resume does not touch it again."""
    settings = (*QUICK, "--max-steps", 48, "on_bad_sample=substitute")
    (tmp_path / TROUBLE).write_text("loss 0 preempt 14", encoding="utf-8")
    with Run(tmp_path, *settings, task=BREAKING, world=2) as run:
        assert run.wait(hurries=False) == 75, run.console
    (record,) = quarantined(run)
    assert record["index"] == 5
    assert "no worker survives it" in record["reason"]
    before = tries(tmp_path)
    again = finish(tmp_path, *settings, task=BREAKING)
    assert tries(tmp_path) == before
    summary = again.summary()
    assert (summary["exact"], summary["faults"]) == (False, [])
    assert len(quarantined(again)) == 1
    taken = [i for rank in again.audit(2) for one in rank.values() for i in one["indices"]]
    assert (taken.count(5), taken.count(record["replacement"])) == (0, 8), "4 epochs"
    for kept in again.events("rank_formed"):
        assert kept["generation"] == 1


def test_a_loader_worker_killed_by_the_kernel_for_memory_is_reported_so(tmp_path, fault_free):
    """In a real container: out of memory, not a mystery; loaded again, with the weights of a fault-free run.

    Control in the same run: a rank that is killed by hand soon after is just killed.
    """
    with memory_cgroup() as cgroup:
        if cgroup is None:
            pytest.skip("this machine lets us make no memory cgroup")
        # Before it kills, the kernel takes its time to look for pages that it can drop.
        harm = ("hang_min_s=30", "task.how=allocate", "task.bad=133", "task.pace_s=0.15")
        # The worker comes to that sample some steps before step 11, and not before there is a limit.
        hold = tmp_path / HOLD_NAME
        hold.write_text("3")
        with Run(tmp_path, *SETTINGS, *harm, world=2, task=BREAKING, cgroup=cgroup.folder) as run:
            run.wait_for_event("spare_ready")  # which takes room of its own
            cgroup.leave_room(400 * 2**20)
            hold.unlink()
            run.wait_for_event("repaired_in_place")
            run.signal(signal.SIGKILL, run.rank_pid(0))
            assert run.wait() == 0, run.console
    first, second = run.summary()["faults"]
    assert (first["kind"], first["steps_lost"], first["generation"]) == ("out_of_memory", 0, 1)
    assert "loader worker 0 (pid " in first["cause"]
    assert "was killed by the kernel: out of memory" in first["cause"]
    assert (second["kind"], second["rank"]) == ("rank_killed", 0)
    assert run.digest == fault_free(2).digest


def test_the_search_for_a_hanging_sample_outlasts_no_patience(tmp_path):
    """Loaded all at once, so that it is searched for, for longer than anybody else may take.

    Control in the same run: a rank that hangs where it asks for its data is found and replaced.
    """
    settings = (
        *(*QUICK, *IMPATIENT, "--max-steps", 36, "on_bad_sample=substitute", "task.pace_s=0.02"),
        *("task.how=hang", "task.many=True", "loader_timeout_s=2"),
        *("first_step_timeout_s=4", "collective_timeout_s=1"),
        *("--inject", "hang:rank=0,step=24,phase=data"),
    )
    run = finish(tmp_path, *settings, task=BREAKING)
    summary = run.summary()
    kinds = [(fault["kind"], fault["generation"]) for fault in summary["faults"]]
    assert kinds == [("loader_timeout", 1), ("bad_sample", 1), ("rank_hung", 1)]
    assert "sample 5 (epoch 1) could not be loaded" in summary["faults"][1]["cause"]
    assert [record["index"] for record in quarantined(run)] == [5]
    assert len(tries(tmp_path)) == 4, "twice with its batch, once to see which it is, once alone"
    assert summary["steps"] == 36


def test_a_sample_that_hangs_in_the_rank_itself_is_named_and_replaced(tmp_path):
    """Without workers: the rank hangs once, and who follows has a worker try the sample first."""
    bad = SampleOrder(seed=0, dataset_size=192, global_batch_size=16).indices(8)[3]
    settings = (
        *(*QUICK, *IMPATIENT, "--max-steps", 24, "num_workers=0"),
        *("on_bad_sample=substitute", "seed=0"),
        *("task.how=hang", f"task.bad={bad}", "loader_timeout_s=3"),
    )
    run = finish(tmp_path, *settings, task=BREAKING)
    hung, replaced = run.summary()["faults"]
    assert (hung["kind"], hung["step"]) == ("rank_hung", 8)
    assert f"loading sample {bad}" in hung["cause"]
    assert (replaced["kind"], replaced["step"]) == ("bad_sample", 8)
    assert f"sample {bad} (epoch 1) could not be loaded" in replaced["cause"]
    assert [record["index"] for record in quarantined(run)] == [bad]
    assert run.summary()["steps"] == 24


def test_loading_for_an_evaluation_is_repaired_as_well(tmp_path, fault_free):
    """A sample that kills its worker, then a worker that is stuck: the weights of a fault-free run."""
    evaluating = ("evaluate_every_steps=12", "evaluate_interval=0", "loader_timeout_s=4")
    breaking = ("task.place=validation", "task.bad=3", "on_bad_sample=substitute")
    hold = tmp_path / HOLD_NAME
    hold.write_text("16")
    with Run(
        tmp_path, *SETTINGS, *LONG, NO_SPARE, *evaluating, *breaking, task=BREAKING, world=2
    ) as run:
        run.wait_for_step(14)
        (tmp_path / TROUBLE).write_text("validation 1 sleep600", encoding="utf-8")
        hold.unlink()
        assert run.wait() == 0, run.console
    assert not (tmp_path / TROUBLE).exists()
    summary = run.summary()
    assert [fault["kind"] for fault in summary["faults"]] == [
        "loader_worker_died",
        "bad_sample",
        "loader_timeout",
    ]
    steps = [fault["step"] for fault in summary["faults"]]
    assert steps[:2] == [12, 12]
    assert steps[2] in range(24, LONG_STEPS, 12)
    assert summary["faults"][1]["cause"].startswith("validation sample 3 (epoch 1) could not be")
    assert {event["phase"] for event in run.events("fault")} == {"evaluate"}
    assert (summary["exact"], len(run.events("forming"))) == (True, 1)
    lines = (run.logs / "quarantine_validation.jsonl").read_text(encoding="utf-8").splitlines()
    assert [json.loads(line)["index"] for line in lines] == [3]
    assert len(tries(tmp_path)) == 3, "in the first of four evaluations only"
    assert run.digest == fault_free(2, *LONG).digest


def test_a_stream_goes_on_exactly_after_a_fault_and_a_resume(tmp_path):
    """With a state; by skipping: test_batches. Same weights, and the same items in the same steps on all ranks, over uneven epochs."""
    steps = ("--max-steps", 40, "task.stateful=True", "num_workers=0")
    calm = Run(tmp_path / "calm", *QUICK, NO_SPARE, *steps, task=STREAM, world=2)
    with calm:
        assert calm.wait() == 0, calm.console
    kill = ("--inject", "kill:rank=1,step=8", "--inject", "kill:rank=0,step=12")
    (tmp_path / "run").mkdir()  # its rank 0 is in its second process by then
    (tmp_path / "run" / TROUBLE).write_text("loss 0 preempt 16", encoding="utf-8")
    with Run(tmp_path / "run", *QUICK, *steps, *kill, task=STREAM, world=2) as run:
        assert run.wait(hurries=False) == 75, run.console
    with Run(tmp_path / "run", *QUICK, *steps, task=STREAM, world=2) as run:
        assert run.wait() == 0, run.console
    assert run.digest == calm.digest
    assert run.summary()["exact"] is True
    for ours, theirs in zip(run.audit(2), calm.audit(2), strict=True):
        assert [ours[step]["indices"] for step in range(1, 41)] == [
            theirs[step]["indices"] for step in range(1, 41)
        ]
