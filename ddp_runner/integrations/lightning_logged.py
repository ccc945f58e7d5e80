"""Uses private names of Lightning 2.6: what is logged in training, and what each rank must know of it."""

from __future__ import annotations

import zlib
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from lightning.pytorch.trainer.connectors.logger_connector.result import (
    _Metadata,
    _ResultCollection,
    _ResultMetric,
    _Sync,
)
from torch import Tensor

from ddp_runner.integrations.framework_run import refuse
from ddp_runner.integrations.lightning_limits import why_not_alike, why_not_logged
from ddp_runner.integrations.lightning_values import Attributes, Progress, as_plain, as_text

if TYPE_CHECKING:
    from ddp_runner import AttachedRun

USED: dict[type[Any], tuple[str, ...]] = {
    _ResultCollection: ("_forked_name", "log", "metrics", "reset", "valid_items"),
    _ResultMetric: ("compute", "reset"),
}
_MOST_LOGGED = 64  # values of training_step, of which each rank's are known to all
_CELLS = 4  # of each: whether it is there, its sum, its weight, its value in the newest step
_NAMES, _LATE, _FIRST = range(
    3
)  # the row's first cells: numbers made of what must be alike on all ranks
CELLS = _FIRST + _MOST_LOGGED * _CELLS
# Of a logged value, what an update of it replaces.
_HELD = (
    "value",
    "cumulated_batch_size",
    "has_reset",
    "_forward_cache",
    "_computed",
    "_update_count",
)
_VALUES = ("_callback_metrics", "_logged_metrics", "_progress_bar_metrics")


class _ResultsInPlace(_ResultCollection):  # type: ignore[misc]
    """Holds what training_step has logged. Means over ranks are taken of what all ranks know, once a step."""

    logged: Logged

    def log(self, *args: Any, **named: Any) -> None:
        """Log a value of this rank; those of others come with the sum before the update."""
        if not self.logged.is_called_together():
            named = {**named, "sync_dist_fn": _Sync.no_op}
        super().log(*args, **named)

    def metrics(self, on_step: bool) -> Any:
        """Give the mean over ranks where it was asked for."""
        if not on_step:
            for key, one in self.valid_items():
                if one.is_tensor and one.meta.on_epoch and one.meta.sync.should:
                    known = self.logged.over_ranks(key, one)
                    one._computed = one._computed if known is None else known  # noqa: SLF001 - in all of this file: Lightning's own
        return super().metrics(on_step)


class Logged:
    """Holds what training_step has logged since an epoch began, on all ranks, and the values that Lightning shows.

    ``is_called_together``: whether all ranks are in a call between two steps.
    """

    def __init__(
        self,
        run: AttachedRun,
        trainer: Any,
        progress: Progress,
        *,
        is_called_together: Callable[[], bool],
    ) -> None:
        self._run = run
        self._trainer = trainer
        self._progress = progress
        self._epoch = trainer.fit_loop.epoch_loop
        self._keys: list[str] = []  # what all ranks had logged at the last sum
        self._metas: list[dict[str, Any]] = []  # and how
        self._of_epoch: list[dict[str, Any]] = []  # the same, of the last whole epoch
        self._own: list[dict[str, Any]] = []  # by rank: validation's values that differ
        self.is_called_together = is_called_together
        results = _ResultsInPlace(training=True)
        results.logged = self
        self._epoch._results = results  # noqa: SLF001

    def sum(self, attributes: Attributes, late: dict[str, Any]) -> None:
        """Learn what each rank has logged, and that it agrees on its names and on ``late``."""
        refuse(why_not_logged(self._unsynced_monitors()))
        found = [(key, one) for key, one in sorted(self.results().items()) if one.is_tensor]
        if len(found) > _MOST_LOGGED:
            refuse(("log()", len(found), f"training_step may log at most {_MOST_LOGGED} values"))
        self._keys = [key for key, _ in found]
        self._metas = [_meta_of(key, one) for key, one in found]
        mine = torch.zeros_like(self._progress.counted)
        row = mine[self._run.rank]
        row[_NAMES] = zlib.crc32(" ".join(self._keys).encode())
        row[_LATE] = zlib.crc32(as_text(late).encode())
        for number, (_, one) in enumerate(found):
            row[_cells(number)] = _cells_of(one, row.device)
        if self._run.world_size > 1:
            dist.all_reduce(mine)
        for cell, name, value in (
            (_NAMES, "log()", ""),
            (_LATE, attributes.owner, ", ".join(late)),
        ):
            if not torch.equal(mine[:, cell], mine[:1, cell].expand_as(mine[:, cell])):
                refuse(why_not_alike(name, value))
        self._progress.counted.copy_(mine)
        for number, (_, one) in enumerate(found):
            if one.meta.on_step and one.meta.sync.should and one._forward_cache is not None:  # noqa: SLF001
                values = mine[:, _cells(number)][:, 3]
                one._forward_cache = _reduced(one, values)  # noqa: SLF001
                if not one.meta.on_epoch:
                    one.value = one._forward_cache  # noqa: SLF001

    def over_ranks(self, key: str, one: Any) -> Tensor | None:
        """Return the value of an epoch over all ranks; None if it was logged since the last sum."""
        if key not in self._keys:
            return None
        cells = self._progress.counted[:, _cells(self._keys.index(key))]
        if not one.meta.is_mean_reduction:
            return _reduced(one, cells[:, 1])
        value, weight = cells[:, 1].sum(), cells[:, 2].sum()
        ranks = self._run.world_size
        return (value.to(one.value.dtype) / ranks) / (weight.to(one.value.dtype) / ranks)

    def results(self) -> dict[str, Any]:
        """Return what was logged since the epoch began."""
        return {key: one for key, one in self._epoch._results.items() if not one.has_reset}  # noqa: SLF001

    def gather_own(self) -> None:
        """Learn validation's values that each rank has for itself; all ranks call it."""
        names = self._unsynced()
        if self._run.world_size == 1 or not names:
            return
        connector = self._trainer._logger_connector  # noqa: SLF001
        mine = {
            values: {k: as_plain(k, v) for k, v in getattr(connector, values).items() if k in names}
            for values in _VALUES
        }
        found: list[Any] = [None] * self._run.world_size
        dist.all_gather_object(found, mine)
        self._own = found

    def _unsynced(self) -> set[str]:
        """Return the names of what differs from rank to rank."""
        found = set()
        for results in (self._epoch._results, self._epoch.val_loop._results):  # noqa: SLF001
            for one in results.values():
                if one.is_tensor and not one.meta.sync.should:
                    found |= {*results._forked_name(one, True), one.meta.forked_name(False)}  # noqa: SLF001
                    found |= {*results._forked_name(one, False), one.meta.name}  # noqa: SLF001
        return found

    def _of_step(self) -> set[str]:
        """Return the names of what a torchmetrics object gives for a batch of this rank."""
        found = set()
        for one in self._epoch._results.values():  # noqa: SLF001
            if not one.is_tensor and one.meta.on_step:
                found |= {one.meta.name, one.meta.forked_name(True)}
        return found

    def _unsynced_monitors(self) -> list[str]:
        """Return what decides, and is this rank's alone."""
        if self._run.world_size == 1:
            return []
        asked = [getattr(one, "monitor", None) for one in self._trainer.callbacks]
        asked += [
            one.monitor for one in self._trainer.lr_scheduler_configs if one.reduce_on_plateau
        ]
        return sorted(self._unsynced() & {one for one in asked if one})

    # What a replaced rank gets.

    def capture(self, *, is_late_refused: bool) -> dict[str, Any]:
        """Return it as plain values, as of now."""
        results, unsynced = self.results(), self._unsynced() | self._of_step()
        late = [
            one.meta.name
            for key, one in results.items()
            if key not in self._keys and one.meta.on_epoch and one.is_tensor
        ]
        if is_late_refused and self._keys and late:
            refuse(
                (
                    "log()",
                    late[0],
                    "is called in on_train_batch_end(); in place it is not supported",
                )
            )
        connector = self._trainer._logger_connector  # noqa: SLF001
        if self._metas and not results:  # Lightning has reset them: an epoch is over
            self._of_epoch, self._metas = self._metas, []
            self._progress.epoch.copy_(self._progress.counted)
        return {
            "first": connector._first_loop_iter,  # noqa: SLF001
            "fx": connector._current_fx,  # noqa: SLF001
            "values": {
                name: {
                    key: as_plain(key, one)
                    # Of whatever order: a rank that was replaced within an epoch logs in another one.
                    for key, one in sorted(getattr(connector, name).items())
                    if key not in unsynced
                }
                for name in _VALUES
            },
            "keys": list(self._keys),
            "logged": [_meta_of(key, one) for key, one in sorted(results.items())],
            "epoch": self._of_epoch,
            "own": self._own,
        }

    def looks(self) -> dict[str, Any]:
        """Return what the logged values hold; these are replaced, never written."""
        return {key: _look_of(one) for key, one in self.results().items()}

    def put_values(self, kept: dict[str, Any]) -> None:
        """Have Lightning show the values that it has shown then."""
        connector = self._trainer._logger_connector  # noqa: SLF001
        connector._first_loop_iter, connector._current_fx = kept["first"], kept["fx"]  # noqa: SLF001
        for name, values in kept["values"].items():
            getattr(connector, name).update({k: as_plain(k, v) for k, v in values.items()})

    def put_looks(self, looks: dict[str, Any]) -> None:
        """Have the logged values of this process hold what they have held."""
        results = self._epoch._results  # noqa: SLF001
        for key in [key for key in results if key not in looks]:
            if results[key].is_tensor:
                results[key].reset()
            else:  # what its torchmetrics object holds is put back by itself
                results[key].has_reset = True
        for key, one in looks.items():
            vars(results[key]).update(one)
            if not results[key].is_tensor:  # to be computed with the other ranks
                results[key]._computed = None  # noqa: SLF001

    def put(self, kept: dict[str, Any]) -> None:
        """Make the logged values of another process's, or of an older state."""
        self._keys = list(kept["keys"])
        counted, results = self._progress.counted, self._epoch._results  # noqa: SLF001
        results.clear()
        for meta in kept["logged"]:
            if meta["metric_attribute"]:
                module = self._trainer.lightning_module.get_submodule(meta["metric_attribute"])
                results[meta["key"]] = _result_of_metric(meta, module)
            elif meta["key"] in self._keys:
                cells = counted[:, _cells(self._keys.index(meta["key"]))]
                results[meta["key"]] = one = _result_of(meta, cells[self._run.rank])
                if meta["sync"] and meta["on_step"]:
                    one._forward_cache = _reduced(one, cells[:, 3])  # noqa: SLF001
        self._metas = [one for one in kept["logged"] if not one["metric_attribute"]]
        self._of_epoch, self._own = list(kept["epoch"]), list(kept["own"])
        connector = self._trainer._logger_connector  # noqa: SLF001
        values = connector._callback_metrics  # noqa: SLF001
        for number, meta in enumerate(self._of_epoch):
            one = _result_of(meta, self._progress.epoch[self._run.rank][_cells(number)])
            if one.meta.on_epoch and not one.meta.sync.should:
                values[one.meta.name] = values[one.meta.forked_name(False)] = one.compute()
        for name, mine in (self._own[self._run.rank] if self._own else {}).items():
            getattr(connector, name).update(mine)
        values.update(results.metrics(True)["callback"])


def _cells(number: int) -> slice:
    return slice(_FIRST + number * _CELLS, _FIRST + (number + 1) * _CELLS)


def _cells_of(one: Any, device: torch.device) -> Tensor:
    newest = one._forward_cache  # noqa: SLF001
    weight = one.cumulated_batch_size if one.meta.is_mean_reduction else 0
    values = (1.0, one.value, weight, 0.0 if newest is None else newest)
    return torch.stack(
        [torch.as_tensor(v, dtype=torch.float64, device=device).reshape(()) for v in values]
    )


def _reduced(one: Any, values: Tensor) -> Tensor:
    """Reduce the ranks' values as Lightning does."""
    if one.meta.is_mean_reduction:
        return values.sum().to(one.value.dtype) / len(values)
    found: Tensor = one.meta.reduce_fx(values).to(one.value.dtype)
    return found


def _meta_of(key: str, one: Any) -> dict[str, Any]:
    """Return what a logged value was logged with, as plain values."""
    meta = one.meta
    plain = ("fx", "name", "prog_bar", "logger", "on_step", "on_epoch", "enable_graph")
    of_loader = ("add_dataloader_idx", "dataloader_idx")
    return {
        "key": key,
        **{name: getattr(meta, name) for name in (*plain, *of_loader)},
        "metric_attribute": None if one.is_tensor else meta.metric_attribute,
        "reduce_fx": meta.reduce_fx.__name__,
        "sync": bool(meta.sync.should),
        "dtype": str(one.value.dtype).removeprefix("torch.") if one.is_tensor else "",
    }


def _metadata(meta: dict[str, Any]) -> Any:
    made = _Metadata(**{k: v for k, v in meta.items() if k not in ("key", "sync", "dtype")})
    made.sync = _Sync(_should=meta["sync"], fn=_Sync.no_op)
    return made


def _result_of(meta: dict[str, Any], cells: Tensor) -> Any:
    """Return what this rank has logged, made of what all ranks know."""
    one = _ResultMetric(_metadata(meta), is_tensor=True)
    _, value, weight, newest = cells
    dtype = getattr(torch, meta["dtype"])
    one.value = value.to(dtype)
    if one.meta.is_mean_reduction:
        one.cumulated_batch_size = weight.to(torch.int64)
    one._forward_cache = newest.to(dtype) if one.meta.on_step else None  # noqa: SLF001
    one._update_count = 1  # noqa: SLF001
    return one


def _result_of_metric(meta: dict[str, Any], metric: Any) -> Any:
    """Return what Lightning holds of a torchmetrics object that was logged."""
    one = _ResultMetric(_metadata(meta), is_tensor=False)
    one.value, one._update_count = metric, 1  # noqa: SLF001
    return one


def _look_of(one: Any) -> dict[str, Any]:
    """Return what a logged value holds; its values are replaced, never written."""
    return {name: value for name, value in vars(one).items() if name in _HELD}
