"""Writes the run's figures and settings to MLflow: to ``MLFLOW_TRACKING_URI``, or to ``mlflow.db`` in the working folder.

Each service has its own file, which can be deleted alone.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from importlib import import_module
from itertools import islice
from pathlib import Path
from typing import Any

from ddp_runner.features.trackers.append_only import AppendOnlyTracker, Point
from ddp_runner.features.trackers.rules import grouped
from ddp_runner.kernel.rules.exits import ExitCode

_OF_RUN = "ddp_runner.id"  # a tag: MLflow chooses the id of its run itself
_GROUP = "ddp_runner.run"  # a tag: runs of MLflow that continue one another have the same
_BEFORE_HOST = re.compile(r"(?<=://)[^/]*@")  # of an address: a user and a password
_NOT_IN_NAMES = re.compile(r"[^\w\-. :/]", re.ASCII)
_NAME_MAX, _METRICS_MAX, _PARAMETERS_MAX = 250, 1000, 100  # of a request; MLflow's limits
_STOPPED = (ExitCode.PREEMPTED, ExitCode.INTERRUPTED)


class MlflowTracker(AppendOnlyTracker):
    """One MLflow run for a run. A tag holds our id, so a process that was killed finds its run again."""

    NAME = "mlflow"
    _client: Any
    _mlflow_id: str

    def _newest_there(self) -> int:
        run = self._find(self._experiment())
        newest = run.data.to_proto().metrics if run else ()  # the last of each name
        return max((int(metric.step) for metric in newest), default=-1)

    def _open(self) -> str:
        settings = self._settings()
        experiment = self._experiment()
        run = self._find(experiment)
        if run is None:
            tags = {_OF_RUN: self._id, _GROUP: self._run_id}
            name = self._name(settings)
            run = self._client.create_run(experiment, run_name=name, tags=tags)
        else:
            self._client.update_run(run.info.run_id, status="RUNNING")
        self._mlflow_id = str(run.info.run_id)
        self._add_parameters(settings, known=run.data.params)
        return _link(_address(), experiment, self._mlflow_id)

    def close(self, exit_code: int) -> None:
        """Send the rest, and note how the run ended, even if this process has sent nothing."""
        if self.link:
            self._be_open()
        super().close(exit_code)

    def _find(self, experiment: str) -> Any:
        """Return the run with our id, or None."""
        ours = f"tags.`{_OF_RUN}` = '{self._id}'"
        found = self._client.search_runs([experiment], filter_string=ours, max_results=1)
        return found[0] if found else None

    def _experiment(self) -> str:
        """Return the id of the experiment; it is created if there is none of that name."""
        self._client = import_module("mlflow.tracking").MlflowClient(tracking_uri=_address())
        if given := os.environ.get("MLFLOW_EXPERIMENT_ID"):
            return given
        name = os.environ.get("MLFLOW_EXPERIMENT_NAME") or "ddp_runner"
        found = self._client.get_experiment_by_name(name)
        return str(found.experiment_id if found else self._client.create_experiment(name))

    def _add_parameters(self, settings: Mapping[str, Any], known: Mapping[str, str]) -> None:
        """Add the settings that the run lacks: MLflow changes no parameter."""
        entities = import_module("mlflow.entities")
        new = ((name, text) for name, text in _flat(settings) if name not in known)
        while some := list(islice(new, _PARAMETERS_MAX)):
            self._client.log_batch(self._mlflow_id, params=[entities.Param(*one) for one in some])

    def _add(self, points: Sequence[Point]) -> None:
        # The figures of a step are in one request: they arrive together, or not at all.
        entities = import_module("mlflow.entities")
        request: list[Any] = []
        for step, values, at_s in points:
            metrics = [
                entities.Metric(allowed(grouped(name)), value, int(at_s * 1000), step)
                for name, value in values.items()
            ]
            if len(request) + len(metrics) > _METRICS_MAX:
                self._request(request)
                request = []
            request += metrics
        self._request(request)

    def _request(self, metrics: Sequence[Any]) -> None:
        """Send metrics; only a step with more of them than one request may have takes several."""
        for begin in range(0, len(metrics), _METRICS_MAX):
            self._client.log_batch(self._mlflow_id, metrics=metrics[begin : begin + _METRICS_MAX])

    def _finish(self, exit_code: int) -> None:
        stopped = "KILLED" if exit_code in _STOPPED else "FAILED"
        self._client.set_terminated(self._mlflow_id, "FINISHED" if exit_code == 0 else stopped)


def allowed(name: str) -> str:
    """Return a name as MLflow allows it: ``train/acc@1`` becomes ``train/acc_1``."""
    parts = _NOT_IN_NAMES.sub("_", name).split("/")
    return "/".join(part for part in parts if part not in ("", ".", ".."))[:_NAME_MAX]


def _flat(settings: Mapping[str, Any], before: str = "") -> Iterator[tuple[str, str]]:
    """The settings as ``section.name`` and text."""
    for name, value in settings.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{before}{name}.")
        else:
            yield allowed(f"{before}{name}"), str(value)


def _address() -> str:
    """Return the address of the store or the server: by default what ``mlflow ui`` shows in this folder."""
    return os.environ.get("MLFLOW_TRACKING_URI") or f"sqlite:///{Path.cwd()}/mlflow.db"


def _link(address: str, experiment: str, run: str) -> str:
    """Return the page of a run on a server, or the store and the id of the run; without a password."""
    shown = _BEFORE_HOST.sub("", address).partition("?")[0].rstrip("/")
    if shown.startswith(("http://", "https://")):
        return f"{shown}/#/experiments/{experiment}/runs/{run}"
    return f"{shown} run {run}"
