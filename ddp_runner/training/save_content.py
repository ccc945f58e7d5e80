"""What a checkpoint of this very step holds, and what its manifest says of it. Never writes it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from ddp_runner import config
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

    def facts(self, reason: str) -> dict[str, Any]:
        """What a manifest says of it: the arguments of the store's save."""
        step = self._state.committed_step
        return {
            "step": step,
            "epoch": self._workload.length.epoch_of(step),
            "samples": self._state.samples,
            "run_id": self._runtime.run_id,
            "meaning": dict(self._workload.resume_key),
            "settings_digest": self._workload.settings_digest,
            "recipe": dict(self._workload.recipe),
            "changes": self._state.changes,
            "data": self._data(),
            "about": about_file(
                self._state,
                loss=self._progress.loss,
                settings=self._settings_record,
                monitor=self._workload.monitor,
                place=self._settings.stage,
                trackers=tracker_ids(self._settings),
            ),
            "monitored": self._state.judged(self._workload.monitor),
            "monitor": self._workload.monitor.name,
            "mode": self._workload.monitor.mode,
            "reason": reason,
            "order": self._state.order_version,
        }
