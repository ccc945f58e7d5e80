"""Writes the run's figures for TensorBoard, and has its reader drop what is undone. Needs no torch."""

from __future__ import annotations

import time
from importlib import import_module
from pathlib import Path
from typing import Any

from ddp_runner.features.trackers.follow import LeadTracker, Record, when_s
from ddp_runner.features.trackers.rules import Change, grouped

_NAME_WAIT_MAX_S = 2.0  # a clock that was set back is not waited for


class TensorboardTracker(LeadTracker):
    """A file of events for each start of this process, in ``tensorboard/`` of the log folder.

    A record of a session's start with a step has TensorBoard drop what it has read of that step and later ones.
    """

    def __init__(self, log_dir: Path) -> None:
        super().__init__(log_dir, "tensorboard")
        self._folder = log_dir / "tensorboard"
        self._writer: Any = None
        self._newest: tuple[int, dict[str, float], float] = (-1, {}, 0.0)  # step, figures, when
        self._goes_on = not self._position.is_first
        self._is_changed = False

    @property
    def link(self) -> str:
        """The path of the folder."""
        return str(self._folder)

    def _point(self, record: Record, step: int, change: Change, *, is_new: bool) -> None:
        if is_new:
            self._go_on()
            self._write(step, change, when_s(record))
        self._keep_newest(step, change, when_s(record))

    def flush(self) -> None:
        """Have all of it in the file, and that noted."""
        if self._writer is not None:
            self._writer.flush()
        if self._is_changed or self._position.is_first:
            self._position.save(link=self.link)
            self._is_changed = self._position.is_first = False

    def close(self, exit_code: int) -> None:
        """Write what is left."""
        del exit_code
        self.flush()
        if self._writer is not None:
            self._writer.close()

    def _hear(self, record: Record, *, is_new: bool) -> None:
        if record.fields.get("event") != "run_begins":
            return
        undone = self._course.begin(int(record.fields["resumed_step"]))
        if undone is not None and is_new:
            self._go_on()
            self._drop_from(undone + 1, when_s(record))
        if undone is not None:
            self._newest = (undone + 1, {}, when_s(record))  # what stands before it stays

    def _go_on(self) -> None:
        """Drop, before the first new line, what a previous process may have written of it.

        The newest step that it certainly has is dropped too, and written again.
        """
        if not self._goes_on:
            return
        self._goes_on = False
        step, values, at_s = self._newest
        self._drop_from(max(0, step), at_s)
        self._put(step, values, at_s)

    def _write(self, step: int, change: Change, at_s: float) -> None:
        if change.undo_after is not None:
            self._drop_from(change.undo_after + 1, at_s)
        self._put(step, {k: v for k, v in change.values.items() if v is not None}, at_s)

    def _keep_newest(self, step: int, change: Change, at_s: float) -> None:
        if change.undo_after == step:  # an evaluation, done again: the step that it is of stays
            self._newest = (step + 1, {}, at_s)
            return
        values = {k: v for k, v in change.values.items() if v is not None}
        is_same = step == self._newest[0] and change.undo_after is None
        self._newest = (step, {**self._newest[1], **values} if is_same else values, at_s)

    def _put(self, step: int, values: dict[str, float], at_s: float) -> None:
        if not values:
            return
        summary = import_module("tensorboard.compat.proto.summary_pb2")
        points = [summary.Summary.Value(tag=grouped(k), simple_value=v) for k, v in values.items()]
        self._add(step, at_s, summary=summary.Summary(value=points))

    def _drop_from(self, step: int, at_s: float) -> None:
        event = import_module("tensorboard.compat.proto.event_pb2")
        start = event.SessionLog(status=event.SessionLog.START)
        self._add(step, at_s, session_log=start)

    def _add(self, step: int, at_s: float, **what: object) -> None:
        if self._writer is None:
            files = import_module("tensorboard.summary.writer.event_file_writer")
            self._folder.mkdir(exist_ok=True)
            _wait_for_a_later_name(self._folder)
            self._writer = files.EventFileWriter(str(self._folder))
        event = import_module("tensorboard.compat.proto.event_pb2")
        self._writer.add_event(event.Event(wall_time=at_s, step=step, **what))
        self._is_changed = True


def _wait_for_a_later_name(folder: Path) -> None:
    """Files are read in the order of their names, which begin with the second in which they were made."""
    made = [path.name.split(".")[3] for path in folder.glob("events.out.tfevents.*")]
    newest = max((int(second) for second in made if second.isdigit()), default=0)
    deadline_s = time.monotonic() + _NAME_WAIT_MAX_S
    while int(time.time()) <= newest and time.monotonic() < deadline_s:
        time.sleep(0.05)
