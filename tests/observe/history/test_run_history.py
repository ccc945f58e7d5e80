"""A run as its files show it: curves, faults and timeline, from whole, torn, huge, hostile and missing files."""

from __future__ import annotations

import fcntl
import json
import math
import os
import signal
import subprocess
import sys
import time

import pytest

from ddp_runner.observe.history.figures import (
    Look,
    curves_figure,
    hover_text,
    panels,
    smoothed,
    thinned,
    timeline_figure,
)
from ddp_runner.observe.history.json_lines import LINES_MAX, last_lines
from ddp_runner.observe.history.metrics_history import (
    READ_WHOLE_BYTES_MAX,
    Curves,
    MetricsHistory,
)
from ddp_runner.observe.history.run_history import ROOT, RunHistory, runs_below
from ddp_runner.observe.history.table_rows import FaultRows
from ddp_runner.observe.history.timeline import GONE, STARTS, TRAINS, WAITS, Timeline
from ddp_runner.observe.summary import time_parts
from ddp_runner.system.run_directories import LOG_LOCK_NAME
from ddp_runner.system.run_holder import holder_of, signal_holder

UTC = "2026-11-23T08:00:{:06.3f}Z"


def point(step, *, rank=0, **values):
    return {"step": step, "rank": rank, "utc": UTC.format(step % 60), **values}


def event(number, name, *, at=0.0, cause=None, **fields):
    return {"id": number, "utc": UTC.format(at), "event": name, "cause": cause, **fields}


def write(path, records):
    path.write_text("".join(json.dumps(one) + "\n" for one in records), encoding="utf-8")


KILLED = (
    event(0, "run_begins", at=0, run_id="a", command=["train"], world_size=2, resumed_step=0),
    event(1, "world_formed", at=1, generation=1),
    event(2, "checkpoint_saved", at=2, step=20),
    event(3, "fault", at=3, kind="rank_killed", rank=1, step=30, phase="forward", text="rank 1 was killed",
          origin="outside", generation=1, detail=""),
    event(4, "plan", at=3, cause=3, plan="ReplaceRanks", replaced=[1], dropped=[], victims=[0]),
    event(5, "rank_formed", at=3.1, rank=1, generation=2),
    event(6, "repaired", at=3.2, cause=3, generation=2, steps_lost=10, seconds=0.2),
    event(7, "run_ends", at=9, status="completed", exit_code=0),
)  # fmt: skip


def test_what_was_rolled_back_is_not_drawn_twice():
    """The steps that are done again replace what they gave before, also where fewer come than were there."""
    curves = Curves()
    curves.add(point(step, loss=float(step)) for step in (10, 20, 30, 40))
    curves.add([point(20, loss=-2.0), point(30, loss=-3.0)])
    loss = curves.of_run("loss")
    assert list(loss.steps) == [10, 20, 30]
    assert list(loss.values) == [10.0, -2.0, -3.0]


def test_an_evaluation_at_a_step_keeps_the_loss_of_it():
    """Two lines of one step that say different things are no roll-back."""
    curves = Curves()
    curves.add([point(10, loss=1.0), point(10, validation_loss=2.0), point(20, loss=0.5)])
    assert list(curves.of_run("loss").steps) == [10, 20]
    assert list(curves.of_run("validation_loss").steps) == [10]


def test_the_curve_goes_on_where_a_rank_was_given_up():
    """The next rank's figures follow; that another one is a line ahead is no change."""
    curves = Curves()
    for step in (1, 2, 3):
        curves.add([point(step, loss=1.0), point(step, rank=1, loss=2.0)])
    assert list(curves.of_run("loss").values) == [1.0] * 3
    curves.add([point(4, rank=1, loss=2.0)])
    assert list(curves.of_run("loss").steps) == [1, 2, 3]
    curves.add([point(5, rank=1, loss=2.0)])
    assert list(curves.of_run("loss").steps) == [1, 2, 3, 4, 5]


def test_a_torn_last_line_is_taken_once_it_is_whole(tmp_path):
    """A write shows page by page, and a crash may leave half a line for good."""
    path = tmp_path / "metrics.jsonl"
    history = MetricsHistory(path)
    assert not history.read()
    whole, torn = json.dumps(point(1, loss=1.0)), json.dumps(point(2, loss=2.0))
    path.write_text(f"{whole}\n{torn[:20]}")
    assert history.read()
    assert list(history.curves.of_run("loss").steps) == [1]
    assert not history.read()
    with path.open("a") as file:
        file.write(f"{torn[20:]}\n{{garbage\n[1]\n{json.dumps(point(3, loss=None))}\n")
    assert history.read()
    loss = history.curves.of_run("loss")
    assert list(loss.steps) == [1, 2, 3]
    assert math.isnan(loss.values[2])


def test_a_file_that_is_replaced_is_read_from_its_start(tmp_path):
    """A folder may be emptied and used again."""
    path = tmp_path / "metrics.jsonl"
    write(path, [point(step, loss=1.0) for step in range(1, 9)])
    history = MetricsHistory(path)
    history.read()
    path.unlink()
    write(path, [point(5, loss=7.0)])
    assert history.read()
    assert list(history.curves.of_run("loss").values) == [7.0]


of_huge = pytest.mark.xdist_group("huge metrics")  # it is written once


@of_huge
def test_a_huge_file_opens_in_under_two_seconds(huge_metrics):
    """And is a sample over all of it, in the order of its steps, the later of two launches where both were."""
    assert huge_metrics.stat().st_size > 10 * READ_WHOLE_BYTES_MAX
    history = MetricsHistory(huge_metrics)
    began_s = time.thread_time()  # of the processor: others may have it meanwhile
    assert history.read()
    figure = curves_figure(history.curves, [], Look())
    took_s = time.thread_time() - began_s
    assert took_s < 2.0
    assert history.curves.is_thinned
    loss = history.curves.of_run("loss")
    assert list(loss.steps) == sorted(set(loss.steps))
    assert loss.steps[0] < 200
    assert loss.steps[-1] > 99_800
    later = [value for step, value in zip(loss.steps, loss.values, strict=True) if step > 41_000]
    assert {value % 1 for value in later} == {0.5}
    assert max(len(one["x"]) for one in figure["data"]) <= 2_000


@of_huge
def test_a_stretch_of_a_huge_file_is_exact(huge_metrics):
    """Each step of it, as the later launch has it, and the spike that a sample may pass over."""
    history = MetricsHistory(huge_metrics)
    history.read()
    window = history.window(77_700, 77_800)
    loss = window.of_run("loss")
    assert not window.is_thinned
    assert list(loss.steps) == list(range(77_700, 77_801))
    assert loss.values[77] == -5.0
    assert list(history.window(45_000, 45_010).of_run("loss").values) == [
        step + 0.5 for step in range(45_000, 45_011)
    ]


@of_huge
def test_what_is_appended_to_a_huge_file_is_shown(huge_metrics):
    """The newest step is there at the next look."""
    history = MetricsHistory(huge_metrics)
    history.read()
    size = huge_metrics.stat().st_size
    try:
        with huge_metrics.open("a") as file:
            file.write(json.dumps(point(100_001, loss=3.0)) + "\n")
        assert history.read()
        assert history.curves.of_run("loss").steps[-1] == 100_001
        assert history.window(99_999, 100_002).of_run("loss").values[-1] == 3.0
    finally:
        os.truncate(huge_metrics, size)  # others read it, too


def test_thinning_keeps_a_single_spike():
    """And the ends, and never more points than were asked for."""
    ys = [0.0] * 100_000
    ys[54_321], ys[7] = 9.0, math.nan
    xs, found = thinned(range(100_000), ys, points_max=2_000)
    assert len(xs) <= 2_000
    assert (xs[0], xs[-1]) == (0, 99_999)
    assert found[xs.index(54_321)] == 9.0
    assert thinned([1, 2], [3.0, 4.0], points_max=4) == ([1, 2], [3.0, 4.0])


def test_smoothing_keeps_the_level_and_the_gaps():
    """A constant stays one from the first point on; a value that is not finite does not spread."""
    assert smoothed([2.0, 2.0, math.nan, 2.0], 0.9)[::3] == pytest.approx([2.0, 2.0])
    assert math.isnan(smoothed([2.0, math.nan], 0.9)[1])
    assert smoothed([0.0, 1.0], 0.5)[1] == pytest.approx(2 / 3)
    assert smoothed([1.0, 5.0], 0.0) == [1.0, 5.0]


def test_a_fault_has_its_plan_and_what_followed():
    """By the ids of causes; the marks carry the first cause, and lie where training goes on."""
    rows = FaultRows()
    for one in KILLED:
        rows.add(one)
    (row,) = rows.rows
    assert (row.rank, row.step, row.plan, row.victims) == (1, 30, "replace rank 1", (0,))
    assert row.outcome == "repaired in 0.2s, 10 steps again"
    assert len(row.followed) == 2
    marks = {mark.kind: mark for mark in rows.marks}
    assert set(marks) == {"start", "save", "fault", "roll back", "repair", "end"}
    assert (marks["fault"].step, marks["roll back"].step, marks["repair"].step) == (30, 20, 20)
    assert "rank 1 was killed" in marks["repair"].text


def test_a_fault_of_the_same_incident_is_no_row():
    """Who lost its peer stands in what followed."""
    rows = FaultRows()
    first = event(1, "fault", kind="rank_killed", rank=1, step=5, text="killed")
    rows.add(first)
    rows.add(
        event(2, "fault", cause=1, kind="collective_failed", rank=0, step=5, text="lost a peer")
    )
    assert [row.id for row in rows.rows] == [1]
    assert "lost a peer" in rows.rows[0].followed[0]


def test_a_fault_is_the_culprit_s_once_that_is_known():
    """Who lost its peer often reports first: its complaint gives way to what brought it about, in row and mark."""
    lost = {"kind": "collective_failed", "step": 12, "phase": "reduce", "text": "lost a peer"}
    rows = FaultRows()
    rows.add(event(1, "fault", at=1, rank=0, **lost))
    rows.add(event(2, "fault", at=1.1, cause=1, kind="rank_hung", rank=3, step=12, text="3 hangs"))
    rows.add(event(3, "fault", at=1.2, cause=1, kind="rank_killed", rank=2, step=11, text="2 killed",
                   origin="outside"))  # fmt: skip
    (row,) = rows.rows
    assert (row.rank, row.text) == (3, "3 hangs")
    rows.add(event(4, "plan", at=1.3, cause=1, plan="ReplaceRanks", culprit=2, kind="rank_killed",
                   replaced=[2], victims=[0]))  # fmt: skip
    assert (row.id, row.rank, row.text, row.step, row.origin) == (1, 2, "2 killed", 11, "outside")
    assert [(mark.kind, mark.step, mark.text) for mark in rows.marks] == [("fault", 11, "2 killed")]
    rows.add(event(5, "plan", at=1.4, cause=1, plan="FormAgain", culprit=9, kind="unknown"))
    assert row.text == "2 killed"


@pytest.mark.parametrize(
    "one",
    [
        {},
        {"event": "fault"},
        {"event": "fault", "id": "x", "rank": None, "step": [], "utc": 5},
        {"event": "run_begins", "world_size": 1e300, "command": 3, "utc": UTC.format(1)},
        {"event": "plan", "cause": 1, "replaced": "all", "victims": {}, "utc": UTC.format(1)},
        {"event": "repaired", "seconds": "long", "steps_lost": None, "utc": UTC.format(1)},
        {"event": "rank_formed", "rank": 10**12, "utc": UTC.format(1)},
    ],
)
def test_an_event_that_nobody_of_us_wrote_is_harmless(one):
    """It may come from another version, or from somebody who can write in the folder."""
    rows, timeline = FaultRows(), Timeline()
    for each in (*KILLED[:4], one, *KILLED[4:]):
        rows.add(each)
        timeline.add(each)
    assert curves_figure(Curves(), rows.marks, Look())["data"]
    assert timeline_figure(timeline, dark=True, now_s=0.0)["data"]


def test_the_timeline_says_who_was_gone_and_who_waited():
    """Rank 1 from its death to its return, rank 0 until all train again."""
    timeline = Timeline()
    for one in KILLED:
        timeline.add(one)
    spans = {rank: [s.what for s in timeline.spans if s.rank == rank] for rank in (0, 1)}
    assert spans == {0: [STARTS, TRAINS, WAITS, TRAINS], 1: [STARTS, TRAINS, GONE, WAITS, TRAINS]}
    assert [number for _, number in timeline.generations] == [1, 2]
    assert all(span.end_s is not None for span in timeline.spans)


def test_figures_share_panels_and_need_no_tags():
    """The losses lie in one panel; what a run says is never a tag of plotly's."""
    assert panels(["grad_norm", "validation_loss", "epoch", "loss"])[0] == [
        "loss",
        "validation_loss",
    ]
    named = ["bach/loss", "loss", "all/accuracy", "bach/accuracy", "all/loss", "validation_f1"]
    assert panels(named) == [
        ["loss", "all/loss", "bach/loss"],
        ["all/accuracy", "bach/accuracy"],
        ["validation_f1"],
    ]
    of_sets = Curves()
    of_sets.add([point(step, **dict.fromkeys(named, 1.0)) for step in (1, 2)])
    drawn = [one for one in curves_figure(of_sets, [], Look())["data"] if one["name"] != "fault"]
    by_name = {one["name"]: one for one in drawn}
    assert by_name["all/accuracy"]["line"] != by_name["bach/accuracy"]["line"]
    assert by_name["all/accuracy"]["yaxis"] == by_name["bach/accuracy"]["yaxis"]
    assert by_name["all/loss"]["mode"] == "lines+markers"
    assert by_name["loss"]["mode"] == "lines"
    assert "<a" not in hover_text("<a href='javascript:1'>x</a> <b>")
    curves = Curves()
    curves.add([point(1, **{"<b>x": 1.0})])
    figure = curves_figure(curves, [], Look(by_time=True))
    assert "<b>x" not in json.dumps(figure["layout"])
    json.dumps(figure, allow_nan=False)


def test_a_rate_that_never_changes_is_not_drawn_as_zero():
    """Around a single value plotly takes one more and one less, so 0.01 was seen as 0."""
    curves = Curves()
    curves.add([point(step, learning_rate=0.01, loss=1 / step) for step in (1, 2)])
    layout = curves_figure(curves, [], Look())["layout"]
    modes = {
        one["title"]["text"]: one.get("rangemode") for one in (layout["yaxis2"], layout["yaxis3"])
    }
    assert modes == {"loss": "normal", "learning rate": "tozero"}


def test_panels_stand_in_the_order_in_which_people_look():
    """Losses, evaluations, the rate, the throughput; a counter that only grows is no curve."""
    names = [
        "grad_norm",
        "samples_per_s",
        "tokens",
        "validation_perplexity",
        "learning_rate",
        "loss",
    ]
    assert panels([*names, "validation_loss", "own"]) == [
        ["loss", "validation_loss"],
        ["validation_perplexity"],
        ["learning_rate"],
        ["samples_per_s"],
        ["grad_norm"],
        ["own"],
    ]


def test_the_headline_has_what_is_known_and_the_newest_evaluation(tmp_path):
    """Evaluated figures come next to the loss; a figure that nobody knows has no place."""
    status = {"state": "done", "step": 40, "max_steps": 300, "loss": 3.25, "world_size": 2}
    evaluated = {"validation_loss": 3.7, "validation_perplexity": 40.77}
    write(tmp_path / "status.json", [{**status, "evaluated": evaluated}])
    run = RunHistory(tmp_path)
    run.read()
    assert list(run.state.shown.items())[:4] == [
        ("step", "40 / 300"),
        ("loss", "3.2500"),
        ("validation loss", "3.7000"),
        ("validation perplexity", "40.770"),
    ]
    assert not {"samples/s", "time left", "goodput"} & set(run.state.shown)


def test_a_folder_without_anything_is_a_run_of_nothing(tmp_path):
    """Nor do files that cannot be read, or are links, raise."""
    run = RunHistory(tmp_path / "gone")
    run.read()
    assert (run.state.what, run.settings(), run.log_names()) == ("unknown", [], [])
    (tmp_path / "status.json").write_text("[1, 2")
    (tmp_path / "summary.json").symlink_to("/etc/passwd")
    (tmp_path / "config.yaml").write_text("a: [")
    (tmp_path / "rank_0.log").symlink_to("/etc/passwd")
    run = RunHistory(tmp_path)
    run.read()
    assert (run.state.what, run.settings(), run.log_names()) == ("unknown", [], [])
    assert last_lines(tmp_path / "rank_0.log") == []


def test_a_run_that_nobody_holds_is_lost(tmp_path):
    """Its status says "running" and is old; one that has ended is what its summary says."""
    status = {"pid": 4_000_000, "state": "running", "step": 5, "max_steps": 10, "faults_total": 1}
    (tmp_path / "status.json").write_text(json.dumps(status))
    os.utime(tmp_path / "status.json", (0, 0))
    run = RunHistory(tmp_path)
    run.read()
    assert (run.state.what, run.state.is_live, run.state.step) == ("lost", False, 5)
    (tmp_path / "status.json").write_text(json.dumps(status | {"state": "done"}))
    (tmp_path / "summary.json").write_text(json.dumps({"status": "completed", "goodput": 0.5}))
    run.read_status()
    assert (run.state.what, run.state.goodput) == ("completed", 0.5)


def test_settings_that_differ_come_first(tmp_path):
    """Each beside its default; the folder of the checkpoints follows from them."""
    logs = tmp_path / "a" / "logs" / "x"
    logs.mkdir(parents=True)
    text = "run: {log_dir: logs/x, checkpoint_dir: ck}\ndata: {batch_size: 7, shuffle: true}\n"
    (logs / "config.yaml").write_text(text)
    run = RunHistory(logs)
    rows = run.settings()
    assert [row.differs for row in rows] == sorted((row.differs for row in rows), reverse=True)
    assert {row.key: row.value for row in rows}["data.batch_size"] == 7
    assert run.checkpoint_folder() == (tmp_path / "a" / "ck").resolve()


def test_only_folders_with_a_run_are_listed(tmp_path):
    """No link is followed, so that nothing outside is ever read."""
    for name in ("one", "none", "two"):
        (tmp_path / name).mkdir()
    (tmp_path / "one" / "status.json").write_text("{}")
    (tmp_path / "two" / "events.jsonl").write_text("")
    (tmp_path / "latest").symlink_to("one")
    assert list(runs_below(tmp_path)) == ["one", "two"]
    assert list(runs_below(tmp_path / "one")) == [ROOT]


def test_log_lines_are_searched_and_obeyed_by_nobody(tmp_path):
    """The newest ones; escape sequences are taken out."""
    path = tmp_path / "rank_0.log"
    path.write_text("".join(f"line {i}\n" for i in range(2_000)) + "\x1b[31mRed <script>\x1b[0m\n")
    lines = last_lines(path)
    assert len(lines) == LINES_MAX
    assert lines[-1] == "Red <script>"
    assert last_lines(path, search="LINE 12") == ["line 12", *(f"line 12{i}" for i in range(10)), *(f"line 12{i:02}" for i in range(100))]  # fmt: skip


def test_where_the_time_went_is_what_the_run_says(tmp_path):
    """In the order of a run, by its status while it lives, else by its summary; nothing of a run without either."""
    assert time_parts({"data_wait": 1, "lost": 0, "startup": 2.5, "other": 3, "recovery": "x"}) == [
        ("start-up", 2.5),
        ("data wait", 1.0),
    ]
    assert time_parts({}) == []
    status = {"state": "running", "goodput": 0.5, "time_s": {"startup": 2}}
    (tmp_path / "status.json").write_text(json.dumps(status))
    run = RunHistory(tmp_path)
    run.read_status()
    assert (run.state.goodput, run.state.time_s) == (0.5, {"startup": 2})
    (tmp_path / "status.json").write_text(json.dumps(status | {"state": "done"}))
    (tmp_path / "summary.json").write_text('{"goodput": 0.75, "time_s": []}')
    run.read_status()
    assert (run.state.goodput, run.state.time_s) == (0.75, {})


def test_every_traceback_of_an_incident_stands_with_its_fault():
    """Also the stacks of the rank that was killed for it, and nothing twice."""
    rows = FaultRows()
    for one in (
        event(1, "fault", kind="rank_hung", rank=1, step=3, text="rank 1 hung", detail=""),
        event(
            2,
            "fault",
            cause=1,
            kind="rank_killed",
            rank=1,
            step=3,
            text="killed",
            detail="its stack",
        ),
        event(
            3,
            "fault",
            cause=1,
            kind="rank_raised",
            rank=0,
            step=3,
            text="again",
            detail="its stack",
        ),
    ):
        rows.add(one)
    (row,) = rows.rows
    assert row.details == [("killed", "its stack")]


_HOLDER = """
import fcntl, os, sys, time
held = open(sys.argv[1], "w")
fcntl.flock(held, fcntl.LOCK_EX)
print("held", flush=True)
time.sleep(60)
"""


def test_who_does_not_hold_the_folder_is_never_signalled(tmp_path):
    """A pid in status.json may be another process's by now; only the kernel's list of locks says whose run it is."""
    lock = tmp_path / LOG_LOCK_NAME
    other = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    holder = subprocess.Popen([sys.executable, "-c", _HOLDER, lock], stdout=subprocess.PIPE)
    try:
        assert holder.stdout.readline() == b"held\n"
        assert holder_of(tmp_path) == holder.pid
        for pid in (other.pid, 0, -1, 1, os.getpid()):
            assert not signal_holder(tmp_path, pid, signal.SIGTERM)
        assert signal_holder(tmp_path, holder.pid, signal.SIGTERM)
        assert holder.wait(10) == -signal.SIGTERM
        assert holder_of(tmp_path) is None
        assert not signal_holder(tmp_path, holder.pid, signal.SIGTERM)
        assert other.poll() is None
        with lock.open("w") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            assert holder_of(tmp_path) == os.getpid()
    finally:
        for process in (other, holder):
            process.kill()
            process.wait()
        holder.stdout.close()
