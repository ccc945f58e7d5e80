"""Writes the run's figures to Weights & Biases, which takes no point back: each once it cannot be undone."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

from ddp_runner import config
from ddp_runner.features.trackers.follow import EVENTS, Position, Record, values_of
from ddp_runner.features.trackers.rules import Course, Lead, Settled
from ddp_runner.system.run_files import read_small

_BLOCK_BYTES, _HEAD_BYTES = (
    32 * 1024,
    7,
)  # of the log's format; the head of a record, and of the file
_LAST_PARTS = (1, 4)  # kinds of a record: whole, and the last of several parts


class WandbTracker:
    """One W&B run for a run, over repairs and resumes. Its id is the run's.

    A point goes there once its step is in a checkpoint. Where even such a point is undone (an older
    checkpoint was asked for, or the newest is damaged), another W&B run of the same group goes on.
    """

    def __init__(self, log_dir: Path) -> None:
        self._log_dir = log_dir
        self._position = Position(log_dir, "wandb")
        self._kept = self._position.kept
        self._course, self._lead = Course(), Lead()
        self._run: Any = None
        self._is_changed = self._position.is_first
        self._settled = Settled(written=self._at_wandb())

    @property
    def link(self) -> str:
        """The address of the page, or offline the folder that ``wandb sync`` takes."""
        return str(self._kept.get("link", ""))

    def take(self, record: Record) -> None:
        """Take one line of the run's files."""
        is_new = self._position.is_new(record)
        if record.kind == EVENTS:
            self._hear(record, is_new=is_new)
            return
        rank, step = int(record.fields["rank"]), int(record.fields["step"])
        if not self._lead.is_it(rank):
            return
        change = self._course.take(step, values_of(record))
        if not self._settled.take(step, change, is_new=is_new):
            self._become(self._run_id, self._part + 1)

    def flush(self) -> None:
        """Hand over what cannot be undone any more."""
        self._log(self._settled.due())
        self._save()

    def close(self, exit_code: int) -> None:
        """Hand over the rest, and end the W&B run: the same is taken up by a resume."""
        self._log(self._settled.rest())
        self._save()
        if self._run is not None:
            self._run.finish(exit_code=exit_code)

    def _at_wandb(self) -> int:
        """The newest step that W&B has, by itself: a process that is killed loses what it had not written yet."""
        floor = int(self._kept.get("floor", -1))
        if not self.link:
            return floor
        if self._kept.get("is_offline"):
            return max([floor, *steps_in(self._log_dir / "wandb", self._wandb_id)])
        self._begin()
        return max(floor, int(self._run.step) - 1)

    def _hear(self, record: Record, *, is_new: bool) -> None:
        fields = record.fields
        match fields.get("event"):
            case "plan":
                self._lead.given_up.update(fields.get("dropped", ()))
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
        """The number of the W&B run in use, from 1."""
        return int(self._kept.get("part", 1))

    @property
    def _wandb_id(self) -> str:
        return self._run_id if self._part == 1 else f"{self._run_id}-{self._part}"

    def _become(self, run_id: str, part: int) -> None:
        if self._run is not None:
            self._run.finish()
            self._run = None
        self._kept.update(run_id=run_id, part=part, link="", floor=self._settled.written)
        self._kept["id"] = self._wandb_id  # for checkpoints
        self._is_changed = True

    def _log(self, points: list[tuple[int, dict[str, float | None]]]) -> None:
        if points and self._run is None:
            self._begin()
        for step, values in points:
            known = {name: value for name, value in values.items() if value is not None}
            if known:
                self._run.log(known, step=step, commit=True)

    def _save(self) -> None:
        if self._is_changed:
            self._position.save(link=self.link)
            self._is_changed = False

    def _begin(self) -> None:
        wandb = import_module("wandb")
        record = self._settings()
        name = str(record.get("run", {}).get("name", "")) or self._run_id
        self._run = wandb.init(
            id=self._wandb_id,
            resume="allow",
            name=name,
            project=os.environ.get("WANDB_PROJECT") or "ddp_runner",
            group=os.environ.get("WANDB_RUN_GROUP") or self._run_id,
            dir=str(self._log_dir),
            config=record,
            settings=wandb.Settings(console="off", **_own(wandb)),
        )
        self._kept["is_offline"] = bool(self._run.offline)
        self._kept["link"] = str(self._run.url or Path(self._run.dir).parent)
        self._is_changed = True

    def _settings(self) -> dict[str, Any]:
        """Return the settings of config.yaml, which has no secrets."""
        with contextlib.suppress(OSError, ValueError):
            return dict(config.read_yaml(read_small(self._log_dir / "config.yaml").decode()))
        return {}


def _own(wandb: Any) -> dict[str, object]:
    """Return our options that this version of W&B knows: no figures of this process, and up-to-date files."""
    wanted = {"x_disable_stats": True, "x_transaction_log_flush_interval": 1.0}
    known = getattr(wandb.Settings, "model_fields", {})
    return {name: value for name, value in wanted.items() if name in known}


def steps_in(folder: Path, run_id: str) -> Iterator[int]:
    """The steps that the files of one W&B run hold, those of killed processes too."""
    internal = import_module("wandb.proto.wandb_internal_pb2")
    for path in folder.glob(f"offline-run-*/run-{run_id}.wandb"):
        for data in _records_of(path.read_bytes()):
            record = internal.Record()
            record.ParseFromString(data)
            if record.WhichOneof("record_type") == "history":
                yield int(record.history.step.num)


def _records_of(data: bytes) -> Iterator[bytes]:
    """The whole records of a log as LevelDB has them, in blocks, behind a head of W&B's."""
    at, parts = _HEAD_BYTES, list[bytes]()
    while at + _HEAD_BYTES <= len(data):
        left = _BLOCK_BYTES - at % _BLOCK_BYTES
        if left < _HEAD_BYTES:  # too little for the head of a record: padding
            at += left
            continue
        size, kind = int.from_bytes(data[at + 4 : at + 6], "little"), data[at + 6]
        parts.append(data[at + _HEAD_BYTES : at + _HEAD_BYTES + size])
        at += _HEAD_BYTES + size
        if at > len(data):
            return  # torn
        if kind in _LAST_PARTS:
            yield b"".join(parts)
            parts = []
