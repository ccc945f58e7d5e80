"""Writes each point once to a service that removes none: a point goes there once it cannot be undone.

A point is sent once its step is in a checkpoint. A resume may undo even such a point: an older checkpoint is
asked for, or the newest is damaged. Another run of the service then continues the curves, ``ID-2``.
"""

from __future__ import annotations

import abc
import contextlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ddp_runner import config
from ddp_runner.features.trackers.follow import LeadTracker, Record, when_s
from ddp_runner.features.trackers.rules import Change, Settled
from ddp_runner.kernel.system.run_files import read_small

Point = tuple[int, Mapping[str, float], float]  # step, figures, when in seconds since 1970


class AppendOnlyTracker(LeadTracker):
    """One run of the service for a run, over repairs and resumes. Its id is the run's.

    A subclass opens that run, adds to it and ends it. Nothing else differs between services.
    """

    NAME: str

    def __init__(self, log_dir: Path) -> None:
        super().__init__(log_dir, self.NAME)
        self._log_dir = log_dir
        self._kept = self._position.kept
        self._when_s: dict[int, float] = {}  # of each step that waits: when its line was written
        self._is_open = False
        self._is_changed = self._position.is_first
        floor = int(self._kept.get("floor", -1))
        self._settled = Settled(written=max(floor, self._newest_there()) if self.link else floor)

    @abc.abstractmethod
    def _newest_there(self) -> int:
        """Return the newest step that the service has, -1 for none: a killed process may have sent less, or more."""

    @abc.abstractmethod
    def _open(self) -> str:
        """Create the service's run, or resume it; return its link."""

    @abc.abstractmethod
    def _add(self, points: Sequence[Point]) -> None:
        """Add the figures of these steps to the open run, in their order."""

    @abc.abstractmethod
    def _finish(self, exit_code: int) -> None:
        """End the open run; a resume of it may follow."""

    @property
    def link(self) -> str:
        """The address of the service's run, or the place where it is stored."""
        return str(self._kept.get("link", ""))

    def _point(self, record: Record, step: int, change: Change, *, is_new: bool) -> None:
        if not self._settled.take(step, change, is_new=is_new):
            self._become(self._run_id, self._part + 1)
        if step > self._settled.written:
            self._when_s[step] = when_s(record)

    def flush(self) -> None:
        """Send the points that cannot be undone any more."""
        self._send(self._settled.due())
        self._save()

    def close(self, exit_code: int) -> None:
        """Send the rest, and end the service's run: a resume continues the same one."""
        self._send(self._settled.rest())
        self._save()
        self._end(exit_code)

    def _hear(self, record: Record, *, is_new: bool) -> None:
        fields = record.fields
        match fields.get("event"):
            case "checkpoint_saved":
                self._settled.saved(int(fields["step"]))
            case "run_begins":
                undone = self._course.begin(int(fields["resumed_step"]))
                is_whole = self._settled.undo(undone, is_new=is_new)
                self._settled.saved(int(fields["resumed_step"]))
                if is_new and str(fields["run_id"]) != self._run_id:
                    self._become(str(fields["run_id"]), 1)
                elif not is_whole:
                    self._become(self._run_id, self._part + 1)

    @property
    def _run_id(self) -> str:
        return str(self._kept.get("run_id", ""))

    @property
    def _part(self) -> int:
        """The number of the service's run in use, from 1."""
        return int(self._kept.get("part", 1))

    @property
    def _id(self) -> str:
        """The id of the service's run in use."""
        return self._run_id if self._part == 1 else f"{self._run_id}-{self._part}"

    def _become(self, run_id: str, part: int) -> None:
        self._end(0)
        self._kept.update(run_id=run_id, part=part, link="", floor=self._settled.written)
        self._kept["id"] = self._id  # for checkpoints
        self._is_changed = True

    def _end(self, exit_code: int) -> None:
        if self._is_open:
            self._finish(exit_code)
            self._is_open = False

    def _be_open(self) -> None:
        if not self._is_open:
            self._kept["link"] = self._open()
            self._is_open = self._is_changed = True

    def _send(self, points: list[tuple[int, dict[str, float | None]]]) -> None:
        if not points:
            return
        self._be_open()
        known = [
            (step, {k: v for k, v in values.items() if v is not None}, self._when_s.pop(step, 0.0))
            for step, values in points
        ]
        self._add([point for point in known if point[1]])

    def _save(self) -> None:
        if self._is_changed:
            self._position.save(link=self.link)
            self._is_changed = False

    def _name(self, settings: Mapping[str, Any]) -> str:
        """Return the name of the run, or its id."""
        return str(settings.get("run", {}).get("name", "")) or self._run_id

    def _settings(self) -> dict[str, Any]:
        """Return the settings of config.yaml, which has no secrets."""
        with contextlib.suppress(OSError, ValueError):
            return dict(config.read_yaml(read_small(self._log_dir / "config.yaml").decode()))
        return {}
