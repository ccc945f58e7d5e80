"""What a checkpoint of this very step holds, and what its manifest says of it. Never writes it."""

from __future__ import annotations

import platform
from collections.abc import Callable, Mapping
from datetime import datetime, timezone
from typing import Any

import torch

from ddp_runner import config
from ddp_runner.checkpoint.left_out import start_sha256
from ddp_runner.checkpoint.manifest import CheckpointFacts
from ddp_runner.core.settings import JsonValue, Settings
from ddp_runner.training.described import about_file, tracker_ids
from ddp_runner.training.progress import Progress
from ddp_runner.training.runtime import Runtime
from ddp_runner.training.state import TrainState
from ddp_runner.training.workload import Workload, versions


class SaveContent:
    """Of one rank; references, not copies. All calls come from the training thread."""

    def __init__(
        self,
        *,
        settings: Settings,
        workload: Workload,
        state: TrainState,
        runtime: Runtime,
        progress: Progress,
        data: Callable[[], Mapping[str, JsonValue]],
    ) -> None:
        """``data``: what the ranks have seen of their data."""
        self._settings = settings
        self._settings_record = config.record_to_show(settings)
        self._workload = workload
        self._state = state
        self._runtime = runtime
        self._progress = progress
        self._data = data

    def captured(self) -> dict[str, Any]:
        """The whole state as a file has it."""
        return {**self._state.capture(), "versions": versions()}

    def for_file(self) -> dict[str, Any]:
        """The same, without what the settings leave out of checkpoints."""
        return {**self._state.capture_for_file(), "versions": versions()}

    def facts(self, state: Mapping[str, Any], reason: str) -> CheckpointFacts:
        """What a file with ``state``, captured now, says of itself."""
        step, workload = self._state.committed_step, self._workload
        return CheckpointFacts(
            step=step,
            epoch=workload.length.epoch_of(step),
            samples=self._state.samples,
            run_id=self._runtime.run_id,
            meaning=dict(workload.resume_key),
            settings_digest=workload.settings_digest,
            versions={"python": platform.python_version(), "torch": str(torch.__version__)},
            created_utc=datetime.now(tz=timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ"),
            recipe=dict(workload.recipe),
            changes=self._state.changes,
            data=self._data(),
            start_sha256=start_sha256(state),
            about=about_file(
                self._state,
                loss=self._progress.loss,
                settings=self._settings_record,
                monitor=workload.monitor,
                place=self._settings.stage,
                trackers=tracker_ids(self._settings),
            ),
            monitored=self._state.judged(workload.monitor),
            monitor=workload.monitor.name,
            mode=workload.monitor.mode,
            reason=reason,
            order=self._state.order_version,
        )
