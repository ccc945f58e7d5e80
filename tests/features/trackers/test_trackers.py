"""Trackers over the files of a run: killed at any place, every point is there, and once."""

from __future__ import annotations

import contextlib
import csv
import json
import os
import subprocess
import sys
import warnings
from datetime import datetime, timedelta, timezone
from importlib.util import find_spec

import pytest

from ddp_runner import start
from ddp_runner.features.trackers.csv_file import CsvTracker
from ddp_runner.features.trackers.follow import Follower
from ddp_runner.features.trackers.mlflow_run import _link, allowed
from ddp_runner.features.trackers.rules import Course, grouped
from ddp_runner.features.trackers.tensorboard_file import TensorboardTracker
from tests.processes import poll

BEGAN = datetime(2026, 1, 1, tzinfo=timezone.utc)


class Files:
    """The two files of a run, as its supervisor writes them."""

    def __init__(self, folder):
        self.folder = folder
        self.folder.mkdir(exist_ok=True)
        self._now = BEGAN

    def _append(self, name, record):
        self._now += timedelta(milliseconds=7)
        stamped = {**record, "utc": self._now.strftime("%Y-%m-%dT%H:%M:%S.%f")[:-3] + "Z"}
        with (self.folder / name).open("a", encoding="utf-8") as file:
            file.write(json.dumps(stamped) + "\n")

    def metrics(self, step, rank=0, **values):
        self._append("metrics.jsonl", {"step": step, "rank": rank, **values})

    def event(self, name, **fields):
        self._append("events.jsonl", {"event": name, **fields})

    def steps(self, first, last, *, course=0.0, ranks=2):
        for step in range(first, last + 1):
            for rank in range(ranks):
                self.metrics(step, rank, loss=step + course, samples_per_s=10.0 * rank)


def stands(folder):
    """What metrics.jsonl and its resumes come to: (step, rank) -> figures, by a rule of its own.

    Read backwards: a line stands if nothing later went back behind it. What a full disk has cut off does not.
    """
    lines = []
    for name in ("metrics.jsonl", "events.jsonl"):
        for line in (folder / name).read_text(encoding="utf-8").splitlines():
            with contextlib.suppress(ValueError):
                lines.append(json.loads(line))
    found, least = {}, {}
    for line in reversed(sorted(lines, key=lambda line: line["utc"])):  # noqa: C413 - of one ms in their order
        if line.get("event") == "run_begins":
            least = {r: min(least.get(r, 10**9), line["resumed_step"] + 1) for r in range(8)}
        elif "event" not in line:
            rank, step = line["rank"], line["step"]
            if step < least.get(rank, 10**9):
                values = {k: v for k, v in line.items() if k not in ("step", "rank", "utc")}
                found[step, rank] = {**values, **found.get((step, rank), {})}
                if "loss" in values:
                    least[rank] = step
    return found


def rows(folder):
    with (folder / "metrics.csv").open(encoding="utf-8", newline="") as file:
        read = list(csv.DictReader(file))
    found = {}
    for row in read:
        key = int(row.pop("step")), int(row.pop("rank"))
        assert key not in found, f"{key} twice"
        row.pop("utc")
        found[key] = {k: float(v) for k, v in row.items() if v != ""}
    return found


def follow(tracker, follower):
    for record in follower.read():
        tracker.take(record)
    tracker.flush()


def story(files):
    """A run with two ranks: a roll-back, evaluations, an end without a save, and a resume; yields in between."""
    files.event("run_begins", run_id="abc", resumed_step=0)
    files.steps(1, 6)
    yield
    files.metrics(6, validation_loss=0.5)
    files.event("checkpoint_saved", step=6)
    files.steps(7, 9)
    yield
    files.steps(7, 12, course=0.25)
    files.metrics(12, validation_loss=0.4)
    yield
    files.steps(13, 14, course=0.25)
    files.event("run_begins", run_id="abc", resumed_step=12)
    yield
    files.metrics(12, validation_loss=0.4)
    files.steps(13, 20, course=0.5)
    yield


@pytest.mark.parametrize("killed_after", range(5))
def test_csv_has_the_course_that_stands_though_killed(tmp_path, killed_after):
    """Each row once, whenever its process dies: what was open then is lost with it."""
    files = Files(tmp_path)
    follower, tracker = Follower(tmp_path), CsvTracker(tmp_path)
    for number, _ in enumerate(story(files)):
        follow(tracker, follower)
        assert rows(tmp_path) == stands(tmp_path), number
        if number == killed_after:
            tracker._file.close()
            follower, tracker = Follower(tmp_path), CsvTracker(tmp_path)
    follow(tracker, follower)
    tracker.close(0)
    assert rows(tmp_path) == stands(tmp_path)
    assert len(stands(tmp_path)) == 40
    assert [path.name for path in tmp_path.iterdir() if "tmp-" in path.name] == []


def test_csv_holds_more_rows_than_stay_open(tmp_path):
    """And gains a column after thousands of rows."""
    files = Files(tmp_path)
    files.event("run_begins", run_id="abc", resumed_step=0)
    files.steps(1, 900)
    follower, tracker = Follower(tmp_path), CsvTracker(tmp_path)
    follow(tracker, follower)
    files.metrics(900, validation_loss=0.5)
    files.steps(100, 950, course=0.5)
    follow(tracker, follower)
    tracker.close(0)
    assert rows(tmp_path) == stands(tmp_path)


def test_csv_makes_the_line_of_a_row_once(tmp_path, monkeypatch):
    """However many rows stay open: it runs beside ranks, at each look."""
    files = Files(tmp_path)
    files.event("run_begins", run_id="abc", resumed_step=0)
    files.steps(1, 400)
    follower, tracker = Follower(tmp_path), CsvTracker(tmp_path)
    follow(tracker, follower)
    made = []
    line_of = tracker._line
    monkeypatch.setattr(tracker, "_line", lambda row: made.append(row["step"]) or line_of(row))
    files.metrics(400, validation_loss=0.5)  # a column more
    follow(tracker, follower)
    assert len(made) == 800
    made.clear()
    files.metrics(400, rank=1, validation_loss=0.6)
    files.steps(401, 402)
    follow(tracker, follower)
    assert made == [400, 401, 401, 402, 402]
    tracker.close(0)
    assert rows(tmp_path) == stands(tmp_path)


def test_an_event_comes_after_the_points_that_were_written_before_it(tmp_path):
    """So that a checkpoint finds the points that it holds."""
    files = Files(tmp_path)
    follower = Follower(tmp_path)
    seen = []
    for first in (1, 4, 7):
        files.steps(first, first + 2, ranks=1)
        files.event("checkpoint_saved", step=first + 2)
        seen += [record.fields["step"] for record in follower.read()]
    assert seen == [1, 2, 3, 3, 4, 5, 6, 6, 7, 8, 9, 9]


def test_a_torn_line_is_passed_over_and_half_of_one_waited_for(tmp_path):
    """The supervisor is killed in a write, or writes just now."""
    files = Files(tmp_path)
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1, "ra\n')
    files.steps(2, 2, ranks=1)
    whole = path.read_bytes()
    follower = Follower(tmp_path)
    path.write_bytes(whole[:-9])
    assert list(follower.read()) == []
    with path.open("ab") as file:
        file.write(whole[-9:])
    assert [record.fields["step"] for record in follower.read()] == [2]


def test_a_file_that_is_made_again_is_followed(tmp_path):
    """A folder of a live run may be removed."""
    files = Files(tmp_path)
    files.steps(1, 3, ranks=1)
    follower = Follower(tmp_path)
    assert len(list(follower.read())) == 3
    (tmp_path / "metrics.jsonl").unlink()
    files.steps(4, 5, ranks=1)
    list(follower.read())
    files.steps(6, 6, ranks=1)
    assert [record.fields["step"] for record in follower.read()][-1] == 6


needs_tensorboard = pytest.mark.skipif(
    find_spec("tensorboard") is None, reason="the extra tensorboard is not installed"
)


def read_back(folder):
    """(tag, step) -> value, as TensorBoard's own reader has them; each once."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    accumulator = EventAccumulator(str(folder / "tensorboard"), size_guidance={"scalars": 0})
    accumulator.Reload()
    found = {}
    for tag in accumulator.Tags()["scalars"]:
        for event in accumulator.Scalars(tag):
            assert (tag, event.step) not in found, f"{tag} of step {event.step} twice"
            found[tag, event.step] = event.value
    return found


def scalars(folder):
    return {
        (grouped(tag), step): pytest.approx(value)
        for (step, rank), values in stands(folder).items()
        if rank == 0
        for tag, value in values.items()
    }


@needs_tensorboard
@pytest.mark.parametrize("killed_after", range(5))
@pytest.mark.parametrize("is_noted", [True, False])
def test_tensorboard_reads_the_course_that_stands_though_killed(tmp_path, killed_after, is_noted):
    """Killed after it has written, and before or after it has noted how far it was."""
    files = Files(tmp_path)
    follower, tracker = Follower(tmp_path), TensorboardTracker(tmp_path)
    for number, _ in enumerate(story(files)):
        position = tmp_path / ".tracker_tensorboard.json"
        before = position.read_bytes() if position.exists() else None
        follow(tracker, follower)
        assert read_back(tmp_path) == scalars(tmp_path), number
        if number == killed_after:
            if not is_noted and before is not None:
                position.write_bytes(before)
            tracker._writer.close()
            follower, tracker = Follower(tmp_path), TensorboardTracker(tmp_path)
    follow(tracker, follower)
    tracker.close(0)
    assert read_back(tmp_path) == scalars(tmp_path)
    assert len({step for _, step in read_back(tmp_path)}) == 20


def test_course_agrees_with_the_rule_of_these_tests(tmp_path):
    """Two ways to say which lines stand."""
    files = Files(tmp_path)
    for _ in story(files):
        pass
    course, found = Course(), {}
    for record in Follower(tmp_path).read():
        fields, undo = record.fields, None
        if fields.get("event") == "run_begins":
            undo = course.begin(fields["resumed_step"])
        elif fields.get("rank") == 0:
            names = {k: v for k, v in fields.items() if k not in ("step", "rank", "utc")}
            change = course.take(fields["step"], names)
            undo = change.undo_after
        if undo is not None:
            found = {step: values for step, values in found.items() if step <= undo}
        if fields.get("rank") == 0:
            found.setdefault(fields["step"], {}).update(change.values)
    expected = {step: values for (step, rank), values in stands(tmp_path).items() if rank == 0}
    assert found == expected


needs_wandb = pytest.mark.skipif(
    find_spec("wandb") is None, reason="the extra wandb is not installed"
)


class Process:
    """A tracker's real process, as a supervisor starts it."""

    def __init__(self, name, folder):
        command = [sys.executable, start.__file__, "ddp_runner.features.trackers.tracker_process"]
        self._process = subprocess.Popen(
            [*command, name, str(folder), str(os.getpid())],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env={**os.environ, "WANDB_MODE": "offline", "MLFLOW_DISABLE_TELEMETRY": "true"},
            start_new_session=True,
        )

    def kill(self):
        self._process.kill()
        self._process.communicate()

    def end(self, exit_code=0):
        said, _ = self._process.communicate(f"end {exit_code}\n".encode(), timeout=60)
        assert self._process.returncode == 0, said.decode()


def wandb_records(data):
    """The records of a file of W&B's: a log of LevelDB behind a head of seven bytes."""
    at, parts = 7, []
    while at + 7 <= len(data):
        left = 32768 - at % 32768
        if left < 7:
            at += left
            continue
        size, kind = int.from_bytes(data[at + 4 : at + 6], "little"), data[at + 6]
        parts.append(data[at + 7 : at + 7 + size])
        at += 7 + size
        if kind in (1, 4):  # whole, or the last part
            yield b"".join(parts)
            parts = []


def history(folder):
    """Step -> figures of each W&B run, by its id, over all files that `wandb sync` would send."""
    from wandb.proto import wandb_internal_pb2

    found = {}
    for path in sorted(folder.glob("wandb/offline-run-*/run-*.wandb")):
        steps = found.setdefault(path.stem.removeprefix("run-"), {})
        for data in wandb_records(path.read_bytes()):
            record = wandb_internal_pb2.Record()
            record.ParseFromString(data)
            if record.WhichOneof("record_type") == "history":
                items = {(i.key or i.nested_key[0]): i.value_json for i in record.history.item}
                step = record.history.step.num
                assert step not in steps, f"step {step} twice"
                values = {k: json.loads(v) for k, v in items.items() if not k.startswith("_")}
                steps[step] = values
    return found


@needs_wandb
def test_wandb_gets_each_point_once_though_killed(tmp_path):
    """Offline: what was undone was never written; a resume and a new process go on in the same run."""
    files = Files(tmp_path)
    parts = story(files)
    for _ in range(3):
        next(parts)
    first = Process("wandb", tmp_path)
    position = tmp_path / ".tracker_wandb.json"
    noted = lambda: position.exists() and str(tmp_path) in position.read_text()  # noqa: E731
    poll(noted, what="its W&B run", timeout_s=30.0)
    first.kill()  # before W&B has written, most likely
    files.event("checkpoint_saved", step=12)
    second = Process("wandb", tmp_path)
    poll(lambda: len(history(tmp_path)["abc"]) == 11, what="eleven steps", timeout_s=30.0)
    second.kill()
    for _ in parts:
        pass
    files.event("checkpoint_saved", step=20)
    Process("wandb", tmp_path).end()
    expected = {step: v for (step, rank), v in stands(tmp_path).items() if rank == 0}
    assert history(tmp_path) == {"abc": expected}
    assert json.loads(position.read_text())["link"].startswith(str(tmp_path / "wandb"))


@needs_wandb
def test_wandb_goes_on_in_another_run_where_written_points_are_undone(tmp_path):
    """An older checkpoint was asked for: W&B takes nothing back."""
    files = Files(tmp_path)
    files.event("run_begins", run_id="abc", resumed_step=0)
    files.steps(1, 6, ranks=1)
    files.event("checkpoint_saved", step=6)
    Process("wandb", tmp_path).end()
    files.event("run_begins", run_id="abc", resumed_step=2)
    files.steps(3, 4, ranks=1, course=0.5)
    files.event("checkpoint_saved", step=4)
    Process("wandb", tmp_path).end()
    files.event("run_begins", run_id="other", resumed_step=0)
    files.steps(1, 1, ranks=1)
    files.event("checkpoint_saved", step=1)
    Process("wandb", tmp_path).end()
    losses = {
        run: {step: values["loss"] for step, values in steps.items()}
        for run, steps in history(tmp_path).items()
    }
    assert losses == {
        "abc": {step: step for step in range(1, 7)},
        "abc-2": {3: 3.5, 4: 4.5},
        "other": {1: 1.0},
    }


@needs_wandb
def test_a_tracker_that_fails_shows_no_key(tmp_path, monkeypatch):
    """Its last words stand in a file and on the console."""
    files = Files(tmp_path)
    files.event("run_begins", run_id="abc", resumed_step=0)
    (tmp_path / "secret-of-forty-characters").touch()
    monkeypatch.setenv("WANDB_API_KEY", "secret-of-forty-characters")
    process = Process("wandb", tmp_path / "secret-of-forty-characters")
    said, _ = process._process.communicate(timeout=60)
    assert process._process.returncode == 1
    assert b"***" in said
    assert b"secret-of-forty" not in said


def test_names_and_links_are_as_mlflow_allows_them():
    """It refuses some characters in names; the address of a store may hold a password."""
    assert allowed("train/acc@1") == "train/acc_1"
    assert allowed("/../a//b.c: d-e") == "a/b.c: d-e"
    assert len(allowed("x" * 300)) == 250
    assert _link("http://me:pass@host:5000/", "1", "r") == "http://host:5000/#/experiments/1/runs/r"
    assert (
        _link("postgresql://me:pass@host/db?password=p", "1", "r") == "postgresql://host/db run r"
    )
    assert _link("sqlite:////tmp/mlflow.db", "1", "r") == "sqlite:////tmp/mlflow.db run r"


needs_mlflow = pytest.mark.skipif(
    find_spec("mlflow") is None, reason="the extra mlflow is not installed"
)


@pytest.fixture
def mlflow_runs(tmp_path, monkeypatch):
    """Return the runs in a store of this test: id -> (run, step -> figures), each point once."""
    address = f"sqlite:///{tmp_path}/here.db"
    monkeypatch.setenv("MLFLOW_TRACKING_URI", address)
    monkeypatch.setenv("MLFLOW_DISABLE_TELEMETRY", "true")
    # MLflow and its packages may warn of themselves.
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from mlflow.tracking import MlflowClient

        client = MlflowClient(tracking_uri=address)

        def read():
            experiment = client.get_experiment_by_name("ddp_runner")
            found = {}
            for run in client.search_runs([experiment.experiment_id]) if experiment else ():
                steps = {}
                for name in run.data.metrics:
                    for metric in client.get_metric_history(run.info.run_id, name):
                        figures = steps.setdefault(metric.step, {})
                        assert name not in figures, f"{name} of step {metric.step} twice"
                        figures[name] = metric.value
                assert run.data.tags["ddp_runner.id"] not in found
                found[run.data.tags["ddp_runner.id"]] = (run, steps)
            return found

        yield read


def _as_mlflow_has_it(folder):
    return {
        step: {grouped(name): value for name, value in values.items()}
        for (step, rank), values in stands(folder).items()
        if rank == 0
    }


@needs_mlflow
def test_mlflow_gets_each_point_once_though_killed(tmp_path, mlflow_runs):
    """A new process, and a resume, continue the same MLflow run, even with the position lost."""
    (tmp_path / "config.yaml").write_text("run: {name: first}\noptim: {learning_rate: 0.5}\n")
    files = Files(tmp_path)
    parts = story(files)
    for _ in range(3):
        next(parts)
    position = tmp_path / ".tracker_mlflow.json"
    first = Process("mlflow", tmp_path)
    noted = lambda: position.exists() and "here.db run" in position.read_text()  # noqa: E731
    poll(noted, what="its MLflow run", timeout_s=60.0)
    first.kill()
    before = position.read_bytes()
    files.event("checkpoint_saved", step=12)
    second = Process("mlflow", tmp_path)
    poll(lambda: len(mlflow_runs()["abc"][1]) == 11, what="eleven steps", timeout_s=60.0)
    second.kill()
    position.write_bytes(before)  # as if it was killed before it noted what it had sent
    Process("mlflow", tmp_path).end(75)
    run, steps = mlflow_runs()["abc"]
    assert (run.info.status, len(steps)) == ("KILLED", 12)
    (tmp_path / "config.yaml").write_text("run: {name: first}\noptim: {learning_rate: 0.25}\n")
    for _ in parts:
        pass
    files.event("checkpoint_saved", step=20)
    Process("mlflow", tmp_path).end()
    assert mlflow_runs()["abc"][1] == _as_mlflow_has_it(tmp_path)
    resumed = mlflow_runs()["abc"][0]
    assert list(mlflow_runs()) == ["abc"]
    assert resumed.info.run_id == run.info.run_id
    assert (resumed.info.status, resumed.info.run_name) == ("FINISHED", "first")
    assert resumed.data.params == {"run.name": "first", "optim.learning_rate": "0.5"}


@needs_mlflow
def test_mlflow_continues_in_another_run_where_sent_points_are_undone(tmp_path, mlflow_runs):
    """An older checkpoint was asked for: MLflow removes nothing."""
    files = Files(tmp_path)
    files.event("run_begins", run_id="abc", resumed_step=0)
    files.steps(1, 6, ranks=1)
    files.event("checkpoint_saved", step=6)
    Process("mlflow", tmp_path).end(1)
    files.event("run_begins", run_id="abc", resumed_step=2)
    files.steps(3, 4, ranks=1, course=0.5)
    files.event("checkpoint_saved", step=4)
    Process("mlflow", tmp_path).end()
    losses = {
        name: (run.info.status, {step: values["train/loss"] for step, values in steps.items()})
        for name, (run, steps) in mlflow_runs().items()
    }
    assert losses == {
        "abc": ("FAILED", {step: step for step in range(1, 7)}),
        "abc-2": ("FINISHED", {3: 3.5, 4: 4.5}),
    }
