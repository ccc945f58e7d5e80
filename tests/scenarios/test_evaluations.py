"""Evaluations of several data sets with metrics: as a loop by hand has them, and no fault or stop shows in them."""

from __future__ import annotations

import json
import signal
from pathlib import Path

import pytest
import torch

from tests.scenarios.conftest import NO_SPARE, PATIENT
from tests.scenarios.harness import Run, poll
from tests.scenarios.judged import Classifier, Language

TASKS = Path(__file__).with_name("judged.py")
STEPS = 40
QUICK = (
    *("-b", 4, "--max-steps", STEPS, "num_workers=0", "save_interval=0", "save_every_steps=10"),
    *("evaluate_every_steps=4", "evaluate_interval=0", "evaluate_batches=0", "--audit", *PATIENT),
    *("schedule=constant", "warmup_steps=0", "log.display=plain"),
)
BEST = (
    *("learning_rate=0.2", "monitor=all/accuracy", "checkpoint.mode=max"),
    *("load_best_at_end=true", "evaluate_at_start=true"),
)


def lines_of(run):
    """Step -> the figures of its evaluation; of one that was made again, which has the same, the last."""
    text = (run.logs / "metrics.jsonl").read_text(encoding="utf-8")
    found = {}
    for line in map(json.loads, text.splitlines()):
        values = {name: one for name, one in line.items() if "/" in name}
        if values:
            assert found.setdefault(line["step"], values) == values, "made again, it is the same"
    return found


def manifests(run):
    paths = sorted(run.checkpoints.glob("step_*.json"))
    return [json.loads(path.read_text(encoding="utf-8")) for path in paths]


def loaded(task, path):
    model = task.build_model()
    model.load_state_dict(torch.load(path, weights_only=True))
    return model.eval()


@torch.no_grad()
def by_hand(task, model):
    """All samples of each data set as one batch, in one process."""
    found = {}
    for name, data in task.build_datasets().validation.items():
        batch = torch.utils.data.default_collate([data[index] for index in range(len(data))])
        loss = task.loss(model, batch)
        weighted = getattr(loss, "total", loss), getattr(loss, "weight", 1.0)
        found[f"{name}/loss"] = float(weighted[0]) / float(weighted[1])
        for metric, (one, other) in task.metrics(model, batch).items():
            if metric == "recall":
                task.recall.reset()
                task.recall.update(one, other)
                found[f"{name}/recall"] = float(task.recall.compute())
            else:
                found[f"{name}/{metric}"] = float(one) / float(other)
    return found


def stop_amid_trouble(folder, spec, best, figures):
    """Faults in and around evaluations, then a stop amid one; the run can be resumed in ``folder``."""
    trouble = (
        *("oom:step=15,phase=evaluate,rank=0", "kill:step=19,phase=evaluate,rank=all"),
        f"kill:step={best - 1},phase=checkpoint,rank=0",
    )
    words = [word for one in trouble for word in ("--inject", one)]
    slow = ("--inject", "slow:rank=0,step=29,phase=data,seconds=3")
    folder.mkdir()
    (folder / "trouble_0").write_text("raise go go go kill")
    (folder / "trouble_1").write_text("go go kill")
    with Run(folder, *QUICK, *BEST, *words, *slow, task=spec) as run:
        run.wait_for_step(29)
        assert not (folder / "trouble_0").read_text() + (folder / "trouble_1").read_text()
        (folder / "trouble_0").write_text("wait")
        poll((folder / "waits").exists, what="an evaluation")
        run.signal(signal.SIGTERM)
        run.wait_for_event("stop_asked")
        (folder / "waits").unlink()
        assert run.wait() == 75, run.console
        kinds = [fault["kind"] for fault in run.summary()["faults"]]
        assert kinds.count("rank_killed") >= 4, kinds
        assert {"out_of_memory", "rank_raised"} <= {*kinds}, kinds
        stopped = run.summary()["steps"]
        assert stopped in figures, "at the boundary of an evaluation"
        assert stopped not in lines_of(run), "which was left in its middle"


def test_the_end_is_of_the_best_also_where_ranks_die(tmp_path):
    """SIGKILLs, an exception, no memory and a stop amid evaluations; SIGKILLs in the best save and the last."""
    spec = f"{TASKS}:Stumbling"
    with Run(tmp_path / "calm", *QUICK, *BEST, NO_SPARE, task=spec) as calm:
        assert calm.wait() == 0, calm.console
    figures = lines_of(calm)
    assert sorted(figures) == list(range(0, STEPS + 1, 4))
    accuracy = {step: one["all/accuracy"] for step, one in figures.items() if step}
    best = max(accuracy, key=lambda step: (accuracy[step], -step))
    assert best not in (4, STEPS), accuracy
    assert (calm.checkpoints / "best").read_text() == f"step_{best:08d}.pt\n"
    assert by_hand(
        Classifier(), loaded(Classifier(), calm.checkpoints / "final.pt")
    ) == pytest.approx(figures[best], rel=1e-5)
    assert calm.summary()["figures"] == figures[STEPS]
    stop_amid_trouble(tmp_path / "faults", spec, best, figures)
    last = ("--inject", f"kill:step={STEPS - 1},phase=checkpoint,rank=0")
    with Run(tmp_path / "faults", *QUICK, *BEST, *last, task=spec) as run:
        assert run.wait() == 0, run.console
        assert len(run.summary()["faults"]) == 1
    assert run.summary()["exact"], run.summary()["inexact_reasons"]
    again = lines_of(run)
    assert again.keys() == figures.keys()
    for step, found in again.items():
        if step < 16:
            assert found == figures[step]
        else:  # out of memory: evaluated in smaller parts, which sum to the same but for the last bits
            assert found == pytest.approx(figures[step], rel=1e-6)
            counted = [name for name in found if not name.endswith("/loss")]
            assert [found[name] for name in counted] == [figures[step][name] for name in counted]
    assert run.digest == calm.digest
    ours, theirs = (
        torch.load(one.checkpoints / "final.pt", weights_only=True) for one in (run, calm)
    )
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)
    for one in (calm, run):
        for manifest in manifests(one):
            assert (manifest["monitor"], manifest["mode"]) == ("all/accuracy", "max")
            # What is due where a run is stopped is evaluated when it goes on.
            evaluated = manifest["step"] - (manifest["reason"] == "preempted")
            newest = max(step for step in figures if step <= evaluated)
            is_judged = newest == manifest["step"]  # by its own evaluation, and no other
            judged = figures[newest]["all/accuracy"] if is_judged else None
            assert manifest["monitored"] == judged
            assert manifest["about"]["figures"] == lines_of(one)[newest]
            assert manifest["about"]["best"]["step"] <= manifest["step"]


def test_two_texts_have_figures_of_their_own(tmp_path):
    """As by hand, at lengths that no number of ranks divides; a figure that nothing gives is refused first."""
    spec = f"{TASKS}:Language"
    with Run(tmp_path, *QUICK, "monitor=bach/hit", task=spec) as wrong:
        assert wrong.wait() == 2, wrong.console
    (line,) = [one for one in wrong.console.splitlines() if "checkpoint.monitor=bach/hit" in one]
    assert "did you mean bach/hits? available: auto, train_loss, all/loss, bach/loss, all/p" in line
    assert not wrong.checkpoints.exists()
    with Run(tmp_path, *QUICK, "monitor=bach/loss", "checkpoint.mode=max", task=spec) as wrong:
        assert wrong.wait() == 2, wrong.console
    assert "checkpoint.mode=max: the highest bach/loss would be the best" in wrong.console
    assert not wrong.checkpoints.exists()
    with Run(tmp_path, *QUICK, "evaluation_batch_size=5", task=spec, world=3) as run:
        assert run.wait() == 0, run.console
    found = lines_of(run)[STEPS]
    status = run.status()
    assert (status["evaluated"], status["evaluated_step"]) == (found, STEPS)
    for name in ("all", "bach"):
        perplexity = found.pop(f"{name}/perplexity")
        assert perplexity == pytest.approx(2.718281828 ** found[f"{name}/loss"])
    model = loaded(Language(), run.checkpoints / "final.pt")
    assert by_hand(Language(), model) == pytest.approx(found, rel=1e-5)
    assert {one["monitor"] for one in manifests(run)} == {"all/loss"}
    assert f"evaluated at step {STEPS}: all/loss" in run.console


def test_a_rank_lost_while_the_best_weights_are_in_costs_no_exactness(tmp_path):
    """Rank 0 has had them in the model for a moment when rank 1 dies, which waits for the last save."""
    words = ("--max-steps", 12, "load_best_at_end=true", "evaluate_every_steps=4")
    kill = ("--inject", "kill:rank=1,step=11,phase=checkpoint")
    task = f"{TASKS.with_name('workload.py')}:PacedTask"
    with Run(tmp_path, "-b", 4, "num_workers=0", *words, *kill, task=task) as run:
        assert run.wait() == 0, run.console
    summary = run.summary()
    assert [fault["kind"] for fault in summary["faults"]] == ["rank_killed"]
    assert summary["exact"], summary["inexact_reasons"]
