"""The files and the screen of a run: held back until the disk may be touched, then complete."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import yaml

from ddp_runner.core.settings import LogSettings, RunSettings, Settings
from ddp_runner.kernel.rules.exits import RunStatus
from ddp_runner.kernel.wire import events as happened
from ddp_runner.observe.summary import RunSummary, TimeShares, read_summary
from ddp_runner.observe.view import RankView, RunView
from ddp_runner.supervisor.reporting.outputs import Outputs


@pytest.fixture
def logs(tmp_path):
    folder = tmp_path / "logs"
    folder.mkdir()
    return folder


def make_records(folder):
    settings = Settings(run=RunSettings(log_dir=str(folder)), log=LogSettings(display="plain"))
    return Outputs(settings, ranks=1)


def view(state="running", step=3):
    rank = RankView(
        rank=0,
        pid=1,
        state="training",
        step=step,
        phase="forward",
        phase_age_s=0.1,
        rss_bytes=1,
        device="cpu",
    )
    return RunView(
        run_id="a run",
        pid=1,
        state=state,
        generation=1,
        world_size=1,
        step=step,
        max_steps=9,
        epoch=0,
        epochs=1,
        loss=0.5,
        samples_per_s=None,
        eta_s=None,
        elapsed_s=1.0,
        faults_total=0,
        restarts=0,
        ranks=(rank,),
        title="task",
        log_dir="logs",
    )


def summary():
    return RunSummary(
        run_id="a run",
        status=RunStatus.COMPLETED,
        exit_code=0,
        steps=9,
        epochs=1,
        samples=36,
        world_size=1,
        final_loss=0.25,
        weights_sha256="ab",
        exact=True,
        wall_s=2.0,
        time_s=TimeShares(),
        checkpoint=None,
    )


def events(folder):
    return [json.loads(line) for line in (folder / "events.jsonl").read_text().splitlines()]


def test_nothing_is_written_before_the_directories_are_ours(logs, capsys):
    """Lines reach the console at once; files wait."""
    records = make_records(logs)
    assert not records.may_write
    assert records.write(happened.Forming(generation=1)) == -1
    records.say("a line")
    records.keep("a note")
    records.show(view())
    records.status(view())
    records.metrics(1, 0, {"loss": 0.5})
    records.finish(view(), None)
    assert list(logs.iterdir()) == []
    assert "a line" in capsys.readouterr().out


def test_what_was_held_back_is_written_first(logs):
    """Events and lines keep their order; nothing is said twice."""
    records = make_records(logs)
    records.write(happened.Forming(generation=1))
    records.say("an early line")
    records.open()
    records.write(happened.SaveAsked())
    records.say("a late line", level="WARNING")
    records.finish(view(), None)
    assert [event["event"] for event in events(logs)] == ["forming", "save_asked"]
    assert events(logs)[0]["generation"] == 1
    log = (logs / "supervisor.log").read_text(encoding="utf-8")
    assert log.index("an early line") < log.index("a late line")
    assert log.count("an early line") == 1
    assert "WARNING" in log


def test_an_event_names_its_cause(logs):
    """By the id that the cause got; one that was held back has none to name."""
    records = make_records(logs)
    held = records.write(happened.SaveAsked())
    records.open()
    cause = records.write(happened.StopAsked(reason="interrupted"))
    records.write(happened.Forming(generation=1), cause=cause)
    records.write(happened.WorldFormed(generation=1), cause=held)
    records.finish(view(), None)
    by_name = {event["event"]: event for event in events(logs)}
    assert by_name["forming"]["cause"] == by_name["stop_asked"]["id"] == cause
    assert by_name["world_formed"].get("cause") is None


def test_the_resolved_settings_stand_beside_the_logs(logs):
    """Readable as what --config takes."""
    records = make_records(logs)
    records.open()
    records.finish(view(), None)
    written = yaml.safe_load((logs / "config.yaml").read_text(encoding="utf-8"))
    assert written["run"]["log_dir"] == str(logs)


def test_a_run_that_ends_leaves_status_metrics_and_summary(logs, capsys):
    """The last status is that of the end."""
    records = make_records(logs)
    records.open()
    records.metrics(4, 0, {"loss": 0.5})
    records.status(view())
    records.finish(view(state="done", step=9), summary())
    status = json.loads((logs / "status.json").read_text(encoding="utf-8"))
    assert (status["state"], status["step"]) == ("done", 9)
    (line,) = (logs / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    assert json.loads(line)["step"] == 4
    assert read_summary(logs / "summary.json") == summary()
    assert "completed" in capsys.readouterr().out


def test_a_rank_s_lines_come_to_the_console_once(logs, capsys):
    """Rank 0's log is followed while the run goes on, and drained at its end."""
    records = make_records(logs)
    records.open()
    log = logs / "rank_0.log"
    log.write_text("2026-01-01 00:00:00,000 INFO rank 0 said early\n", encoding="utf-8")
    records.show(view())
    with log.open("a", encoding="utf-8") as file:
        file.write("2026-01-01 00:00:01,000 INFO rank 0 said late\n")
    records.finish(view(), None)
    shown = capsys.readouterr().out
    assert shown.count("said early") == 1
    assert shown.count("said late") == 1


@pytest.mark.parametrize("is_taken", [False, True], ids=["alone", "a successor writes"])
def test_who_has_a_successor_leaves_that_ones_files(logs, is_taken):
    """One that stood still ends long after the other. Control: where nobody has gone on, how it ended is written."""
    first = make_records(logs)
    first.open()
    first.status(view(step=3))
    if is_taken:
        second = make_records(logs)
        second.open()
        second.finish(view("done", step=9), summary())
    files = [logs / name for name in ("status.json", "summary.json", "events.jsonl")]
    before = [one.read_bytes() for one in files if one.exists()]
    first.leave()
    first.write(happened.SaveAsked())
    first.finish(view("failed", step=3), replace(summary(), status=RunStatus.PREEMPTED))
    assert ([one.read_bytes() for one in files if one.exists()] == before) is is_taken


def test_a_summary_that_cannot_be_written_is_said(logs, capsys):
    """The run's end is not lost in a traceback."""
    records = make_records(logs)
    records.open()
    (logs / "summary.json").mkdir()
    (logs / "summary.json" / "in the way").touch()
    records.finish(view(), summary())
    assert "summary.json could not be written (Is a directory)\n" in capsys.readouterr().out
