"""Writes the run's figures to Weights & Biases. Each service has its own file, which can be deleted alone."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

from ddp_runner.features.trackers.append_only import AppendOnlyTracker, Point

_BLOCK_BYTES, _HEAD_BYTES = (
    32 * 1024,
    7,
)  # of the log's format; the head of a record, and of the file
_LAST_PARTS = (1, 4)  # kinds of a record: whole, and the last of several parts


class WandbTracker(AppendOnlyTracker):
    """One W&B run for a run. Its link is its page, or offline the folder that ``wandb sync`` takes."""

    NAME = "wandb"
    _run: Any

    def _newest_there(self) -> int:
        if self._kept.get("is_offline"):
            return max([-1, *steps_in(self._log_dir / "wandb", self._id)])
        self._be_open()
        return int(self._run.step) - 1

    def _open(self) -> str:
        wandb = import_module("wandb")
        settings = self._settings()
        self._run = wandb.init(
            id=self._id,
            resume="allow",
            name=self._name(settings),
            project=os.environ.get("WANDB_PROJECT") or "ddp_runner",
            group=os.environ.get("WANDB_RUN_GROUP") or self._run_id,
            dir=str(self._log_dir),
            config=settings,
            settings=wandb.Settings(console="off", **_own(wandb)),
        )
        self._kept["is_offline"] = bool(self._run.offline)
        if self._run.disabled:  # WANDB_MODE=disabled: nothing is written
            return ""
        return str(self._run.url or Path(self._run.dir).parent)

    def _add(self, points: Sequence[Point]) -> None:
        for step, values, _ in points:
            self._run.log(dict(values), step=step, commit=True)

    def _finish(self, exit_code: int) -> None:
        self._run.finish(exit_code=exit_code)


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
