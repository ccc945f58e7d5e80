"""What reports say of a run: which setting to change first, curves of characters, one page that holds no tag of a run."""

from __future__ import annotations

import dataclasses
import json
import math
import re
from html.parser import HTMLParser

import pytest

from ddp_runner.config.fields import known_fields
from ddp_runner.features.report.html_page import html_report
from ddp_runner.features.report.html_page import page as html_page
from ddp_runner.features.report.improvements import EndedRun, improvements
from ddp_runner.features.report.report_comparison import compared, differing_settings
from ddp_runner.features.report.run_report import (
    curve_lines,
    improvement_lines,
    time_lines,
)
from ddp_runner.kernel.rules.exits import RunStatus
from ddp_runner.observe.format import bar, sparkline
from ddp_runner.observe.history.metrics_history import Curves
from ddp_runner.observe.history.run_history import RunHistory
from ddp_runner.observe.summary import (
    FaultRecord,
    InjectedRecord,
    RunSummary,
    TimeShares,
    time_parts,
)

SETTINGS = {
    "data.num_workers": 2,
    "data.preload": False,
    "data.shares": (),
    "checkpoint.save_every_steps": 200,
    "recovery.replica_check_steps": 500,
    "recovery.warm_spare": True,
    "recovery.min_ranks": 0,
    "log.evaluate_every_steps": 500,
}


def fault(**fields):
    given = {
        "kind": "rank_killed", "rank": 1, "step": 60, "cause": "killed by SIGKILL", "detected_s": 20.0,
        "recovered_s": 21.5, "steps_lost": 0, "generation": 2,
    }  # fmt: skip
    return FaultRecord(**given | fields)


def ended(*, settings=None, resumed_step=0, curves=None, **fields):
    """A run of 110 s, of which the first 10 went into its start."""
    times = {name: fields.pop(name) for name in list(fields) if name in TimeShares.__slots__}
    given = {
        "run_id": "r1", "status": RunStatus.COMPLETED, "exit_code": 0, "steps": 1000, "epochs": 3,
        "samples": 48_000, "world_size": 2, "final_loss": 1.25, "weights_sha256": "ab" * 32,
        "exact": True, "wall_s": 110.0, "checkpoint": None,
        "time_s": TimeShares(startup=10.0, **{"productive": 90.0, **times}),
    }  # fmt: skip
    return EndedRun(
        name="r1",
        summary=RunSummary(**given | fields),
        settings=SETTINGS | (settings or {}),
        curves=curves or Curves(),
        resumed_step=resumed_step,
    )


SLOW_RANK = {"0": 0.010, "1": 0.010, "2": 0.040}
AGAIN = tuple(fault(cause=f"it broke, {number}") for number in range(3))


@pytest.mark.parametrize(
    ("run", "what", "change"),
    [
        (ended(data_wait=6.0, settings={"data.num_workers": 0}), "waiting for data: 6.0s, 6%", "data.num_workers=2 (it is 0"),
        (ended(data_wait=6.0), "waiting for data", "data.num_workers=4 (it is 2)"),
        (ended(data_wait=6.0, settings={"data.workers_total": 6}), "waiting for data", "data.workers_total=12 (it is 6)"),
        (ended(data_wait=6.0, settings={"data.num_workers": "auto"}), "waiting for data", "data.num_workers, more"),
        (ended(checkpoint=4.0), "waiting for saves: 4.0s, 4%", "checkpoint.save_every_steps=auto, or 400 (it is 200)"),
        (ended(checkpoint=4.0, settings={"checkpoint.save_every_steps": "auto"}), "saves", "checkpoint.only_trained"),
        (ended(comparison=4.0), "comparing the ranks' weights", "recovery.replica_check_steps=1000 (it is 500)"),
        (ended(evaluation=20.0), "evaluating: 20.0s, 20%", "log.evaluate_every_steps=1000 (it is 500)"),
        (ended(own_step_s=SLOW_RANK), "rank 2 takes 40.0 ms a step, the others 10.0", "data.shares"),
        (ended(recovery=3.0, faults=(fault(steps_lost=70),)), "1 fault, repairs", "checkpoint.save_every_steps, less"),
        (ended(recovery=3.0, faults=(fault(kind="rank_hung", seconds={"detect": 9.0, "fork": 1.0}),)), "1 fault", "recovery.hang_min_s"),
        (ended(recovery=3.0, settings={"recovery.warm_spare": False}, faults=(fault(seconds={"detect": 9.0, "fork": 1.0}),)), "1 fault", "recovery.warm_spare=true"),
        (ended(recovery=3.0, faults=(fault(seconds={"transfer": 2.0}),)), "1 fault", "transfer takes most of a repair"),
        (ended(faults=AGAIN), "3 faults", "it broke, 2; recovery.min_ranks"),
    ],
)  # fmt: skip
def test_each_way_to_lose_time_names_its_setting(run, what, change):
    """What it cost, and what to write instead; each setting is one that there is."""
    (one,) = improvements(run)
    assert what in one.what
    assert change in one.change
    named = set(re.findall(r"\b(?:data|checkpoint|recovery|log|run)\.[a-z_]+", one.change))
    assert named <= set(known_fields())


@pytest.mark.parametrize(
    "run",
    [
        ended(data_wait=4.0, checkpoint=2.0, comparison=2.0, evaluation=14.0),
        ended(own_step_s={"0": 0.010, "1": 0.012}),
        ended(own_step_s={"0": 0.010}),
        ended(own_step_s=SLOW_RANK, resumed_step=900),  # these took 0.03 s longer, a hundred times
        ended(recovery=1.0, faults=(fault(),)),
        ended(faults=tuple(dataclasses.replace(one, injected=(InjectedRecord(kind="kill", rank=1, number=0, step=1, phase="data", at_s=1.0),)) for one in AGAIN)),
        ended(wall_s=5.0, data_wait=5.0),
    ],
)  # fmt: skip
def test_what_costs_little_is_not_worth_a_line(run):
    """Below the shares, of a single rank, of faults that were asked for, of a run that never trained."""
    assert improvements(run) == []
    assert "nothing stands out" in "".join(improvement_lines([], labels=12))


def test_what_costs_most_comes_first():
    """Three are shown, each with its setting below it."""
    run = ended(data_wait=6.0, checkpoint=9.0, evaluation=16.0, comparison=5.0)
    found = improvements(run)
    assert [one.seconds for one in found] == [16.0, 9.0, 6.0, 5.0]
    lines = list(improvement_lines(found, labels=12))
    assert [line[12:14] for line in lines if line[12].isdigit()] == ["1.", "2.", "3."]
    assert max(map(len, lines)) < 80


def test_a_sparkline_is_the_means_of_its_stretches():
    """From the lowest to the highest, with a gap where nothing is finite, also of values without bounds."""
    assert sparkline([0.0, 0.0, 7.0, 7.0], columns=2) == "▁█"
    assert sparkline([0.0, math.nan, 1.0], columns=9) == "▁ █"
    assert sparkline([3.0] * 5, columns=5) == sparkline([3.0], columns=1) * 5
    assert sparkline([1.0, math.inf], columns=4)[1] == " "
    assert sparkline([-1.7e308, 1.7e308, 1.7e308], columns=2, unicode=False)[0] == "_"
    assert sparkline([math.nan] * 3, columns=3) == "   "
    assert sparkline([], columns=3) == ""
    assert sparkline(range(8), columns=8, unicode=False).isascii()


def test_a_bar_shows_whatever_is_more_than_nothing():
    """And no more columns than there are."""
    assert bar(0.5, columns=4) == "██"
    assert bar(1e-9, columns=4) == "▏"
    assert bar(0.0, columns=4) == bar(math.nan, columns=4) == ""
    assert bar(7.0, columns=4) == "████"
    assert bar(0.01, columns=4, unicode=False) == "#"


def curves_of(**values):
    curves = Curves()
    for name, ys in values.items():
        curves.add({"step": step, "rank": 0, name: y} for step, y in enumerate(ys, start=1))
    return curves


def test_lines_of_a_report_fit_a_terminal():
    """Curves with their ends, and every part of the time by its size."""
    run = ended(data_wait=6.0, curves=curves_of(loss=[4.0, 2.0, 1.0], grad_norm=[1.0]))
    (loss,) = curve_lines(run.curves, labels=12, unicode=True)
    assert loss.startswith("loss        █")
    assert loss.endswith("4.0000 → 1.0000, 3 points")
    lines = list(time_lines(run.summary.time_s, wall_s=110.0, labels=14, unicode=True))
    assert [line[14:].split("  ")[0] for line in lines] == ["steps", "start-up", "data wait"]
    assert max(map(len, lines)) < 80
    assert [name for name, _ in time_parts(run.summary.time_s)] == ["start-up", "steps", "data wait"]  # fmt: skip


def test_a_report_draws_the_losses_of_evaluations_before_their_other_figures():
    """With a gap behind each name, and so many that the rest is still seen."""
    names = [
        f"text{number}/{figure}" for number in range(6) for figure in ("hits_of_all_words", "loss")
    ]
    curves = curves_of(**{name: [2.0, 1.0] for name in ["samples_per_s", "loss", *names]})
    shown = [line.split()[0] for line in curve_lines(curves, labels=14, unicode=False)]
    losses = [f"text{number}/loss" for number in range(6)]
    assert shown == ["loss", *losses, "text0/hits", "text1/hits", "samples/s"]


def test_two_runs_are_compared_over_what_they_did_themselves():
    """Steps a second of the launch that the summary is of, and a change only where there is a figure."""
    first = ended(settings={"data.path": "a"}, curves=curves_of(loss=[2.0, 1.0]))
    second = ended(resumed_step=500, final_loss=None, settings={"data.num_workers": 0, "run.name": "x"})  # fmt: skip
    rows = {row.name: row for row in compared(first, second, unicode=True)}
    assert (rows["steps/s"].first, rows["steps/s"].second) == ("10.0", "5.00")
    assert rows["steps/s"].change == "-50.0%"
    assert (rows["loss"].second, rows["loss"].change) == ("-", "")
    assert rows["weights"].change == "the same"
    assert rows["loss, over the run"].second == "-"
    differing = {row.name: (row.first, row.second) for row in differing_settings(first, second)}
    assert differing == {"data.num_workers": ("2", "0"), "data.path": ("a", "none")}


EVIL = "</script><script>alert(1)</script><img src=x onerror=alert(1)>&quot;'\""


class Tags(HTMLParser):
    """Every tag of a page, with its attributes."""

    def __init__(self, page):
        super().__init__()
        self.found = []
        self.text = {}
        self._now = ""
        self.feed(page)

    def handle_starttag(self, tag, attrs):
        self.found.append((tag, dict(attrs)))
        self._now = dict(attrs).get("id") or tag

    def handle_data(self, data):
        self.text[self._now] = self.text.get(self._now, "") + data


def test_a_report_holds_no_tag_of_a_run(tmp_path):
    """Whatever a run, its tasks or who can write into its folder call things, and no secret; nothing is fetched."""
    utc = "2026-11-23T08:00:00.000Z"
    events = [
        {"id": 0, "utc": utc, "event": "run_begins", "command": ["train", "wandb_api_key=abcdefgh"], "world_size": 1},
        {"id": 1, "utc": utc, "event": "fault", "kind": EVIL, "rank": 0, "step": 3, "phase": EVIL, "text": EVIL, "origin": EVIL, "detail": EVIL},
        {"id": 2, "utc": utc, "event": EVIL, "cause": 1, EVIL: EVIL},
    ]  # fmt: skip
    (tmp_path / "events.jsonl").write_text("".join(json.dumps(one) + "\n" for one in events))
    points = [{"step": step, "rank": 0, "utc": utc, EVIL: 1.0, "loss": 2.0} for step in (1, 2)]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(one) + "\n" for one in points))
    rank = {"rank": 0, "device": EVIL, "state": EVIL}
    status = {"name": EVIL, "title": EVIL, "state": "done", "pid": 0, "ranks": [rank], "inexact_reasons": [EVIL]}  # fmt: skip
    (tmp_path / "status.json").write_text(json.dumps(status))
    (tmp_path / "config.yaml").write_text(json.dumps({"data": {"path": EVIL, EVIL: EVIL}, "task": {"api_key": "abcdefgh"}}))  # fmt: skip
    run = RunHistory(tmp_path, name=EVIL)
    run.read()
    summary = ended(recovery=50.0, faults=tuple(fault(cause=EVIL) for _ in range(3))).summary
    for known in (None, summary):
        page = html_report(run, known, plotly="window.x = '</script>'", now_s=0.0, version="1")
        tags = Tags(page)
        names = [tag for tag, _ in tags.found]
        assert "img" not in names
        assert names.count("script") == 3
        assert not [a for _, a in tags.found if "src" in a or "href" in a or any(k.startswith("on") for k in a)]  # fmt: skip
        assert "abcdefgh" not in page
        figures = json.loads(tags.text["figures"])
        assert set(figures) == {"steps", "time", "timeline", "use"}
        assert "<img" not in json.dumps(figures)
        assert "default-src 'none'" in page
    figures = {EVIL: [EVIL, "\u2028"]}
    tags = Tags(html_page(title=EVIL, body="", figures=figures, plotly=""))
    assert [tag for tag, _ in tags.found if tag in ("img", "script")] == ["script"] * 3
    assert json.loads(tags.text["figures"]) == figures
