"""Uses private names of Lightning 2.6: its loops, their progress and what is logged."""

from __future__ import annotations

import copy
import math
import warnings
import zlib
from collections.abc import Callable, Iterator
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from lightning.fabric.utilities.data import _set_sampler_epoch
from lightning.fabric.utilities.seed import _collect_rng_states, _set_rng_states
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.loops.fetchers import _DataFetcher
from lightning.pytorch.loops.fit_loop import _FitLoop
from lightning.pytorch.loops.loop import _Loop
from lightning.pytorch.loops.training_epoch_loop import _TrainingEpochLoop
from lightning.pytorch.trainer.connectors.logger_connector.result import (
    _Metadata,
    _ResultCollection,
    _ResultMetric,
    _Sync,
)
from torch import Tensor
from torchmetrics import Metric

import ddp_runner
from ddp_runner.integrations.framework_run import refuse
from ddp_runner.integrations.lightning_limits import (
    why_not_alike,
    why_not_loader,
    why_not_logged,
)
from ddp_runner.integrations.lightning_values import (
    Attributes,
    Progress,
    Weights,
    as_plain,
    as_text,
    go_on_with_rows,
)

# What else is looked up by name: the class -> its attributes, which the next version may lack.
USED: dict[type[Any], tuple[str, ...]] = {
    _Loop: ("load_state_dict", "on_iteration_done", "restarting", "state_dict"),
    _FitLoop: ("done", "on_run_end", "on_run_start", "run", "setup_data", "skip"),
    _TrainingEpochLoop: (
        "_broadcast_sigterm_tensor",
        "advance",
        "global_step",
        "on_advance_end",
        "update_lr_schedulers",
    ),
    _ResultCollection: ("log", "metrics", "valid_items"),
    ModelCheckpoint: ("file_exists", "load_state_dict", "state_dict"),
}
_MOST_LOGGED = 64  # values of training_step, of which each rank's are known to all
_CELLS = 4  # of each: whether it is there, its sum, its weight, its value in the newest step
_NAMES, _LATE, _FIRST = range(
    3
)  # the row's first cells: numbers made of what must be alike on all ranks
_UNBOUNDED = 10**9  # steps
# Of ModelCheckpoint, what its state_dict() or load_state_dict() leaves out.
_OF_CHECKPOINT = (
    "_last_global_step_saved",
    "_last_checkpoint_saved",
    "_defer_save_until_validation",
    "current_score",
)
_IN_CHECKPOINT = ("epoch", "global_step", "loops", "callbacks", "lr_schedulers")
# Of a logged value, what an update of it replaces.
_HELD = (
    "value",
    "cumulated_batch_size",
    "has_reset",
    "_forward_cache",
    "_computed",
    "_update_count",
)


def lacking() -> list[str]:
    """Return the names that the installed version of Lightning has moved."""
    return [
        f"{kind.__name__}.{name}"
        for kind, names in USED.items()
        for name in names
        if not hasattr(kind, name)
    ]


class _StepBatches:
    """The batches of each optimizer step, as Lightning accumulates them, in the order of its own samplers."""

    def __init__(self, combined: Any, count: int, accumulate: int) -> None:
        self._combined = combined
        self._count = count
        self._accumulate = accumulate
        loader = combined.flattened[0]
        # The run looks at these, to begin each pass from known states.
        self.dataset = getattr(loader, "dataset", None)
        self.generator = getattr(loader, "generator", None)
        self.sampler = getattr(loader, "sampler", None)
        self.batch_sampler = getattr(loader, "batch_sampler", None)

    def __len__(self) -> int:
        return math.ceil(self._count / self._accumulate)

    def set_epoch(self, epoch: int) -> None:
        """Called before each pass."""
        for loader in self._combined.flattened:
            _set_sampler_epoch(loader, epoch)

    def __iter__(self) -> Iterator[list[Any]]:
        for loader in self._combined.flattened:
            if getattr(loader, "persistent_workers", False):
                loader._iterator = None  # noqa: SLF001 - they would go on with their own random numbers
        drawn = islice(iter(self._combined), self._count)
        while found := list(islice(drawn, self._accumulate)):
            yield found


class _GivenFetcher(_DataFetcher):  # type: ignore[misc]
    """Gives the epoch loop the batches of the step in hand."""

    def __init__(self, steps: Steps, count: int) -> None:
        super().__init__()
        self._steps = steps
        self._count = count

    def __iter__(self) -> _GivenFetcher:
        self.reset()
        return self

    def __next__(self) -> Any:
        batch = self._steps.next_batch()
        self.fetched = self._steps.batch_of_epoch
        self.done = self.fetched >= self._count
        return batch

    def reset(self) -> None:
        """A pass begins; the run begins its batches."""
        self.fetched, self.length, self.done = 0, self._count, self._count == 0


class _FitInPlace(_FitLoop):  # type: ignore[misc]
    """Lightning's fit loop, which a replaced rank enters where the others stand."""

    _data_fetcher: Any

    steps: Steps

    def setup_data(self) -> None:
        """Give the epoch loop the run's batches."""
        is_made = self._combined_loader is not None
        super().setup_data()
        if self._combined_loader is None or is_made:
            return
        refuse(why_not_loader(self))
        self._data_fetcher.teardown()
        self._data_fetcher = _GivenFetcher(self.steps, int(self.max_batches))
        self._data_fetcher.setup(self._combined_loader)

    def run(self) -> None:
        """Draw the first batch, by which a replaced rank learns where it is."""
        self.setup_data()
        if not self.skip:
            self.steps.begin()
            if self.done:
                self.on_run_start()
                self.on_run_end()
                return
        super().run()

    def on_run_end(self) -> None:
        """End the run with all ranks, before the hooks of the end are called."""
        self.steps.end()
        super().on_run_end()


class _EpochInPlace(_TrainingEpochLoop):  # type: ignore[misc]
    """Lightning's loop over batches, whose steps are the run's."""

    steps: Steps

    def _broadcast_sigterm_tensor(self) -> None:
        """The run itself ends all ranks at the same step."""

    def reset(self) -> None:
        """Begin a pass; a rank that is replaced within one finds its batches."""
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "You're resuming from a checkpoint")
            super().reset()

    def advance(self, data_fetcher: Any) -> None:
        """Make one batch; where a step is made again, all of its batches up to this one."""
        self.restarting = (
            False  # a replaced rank stands where a step begins, and has nothing to go back to
        )
        after = partial(super().on_advance_end, data_fetcher)
        self.steps.advance(partial(super().advance, data_fetcher), after)


class _ResultsInPlace(_ResultCollection):  # type: ignore[misc]
    """Holds what training_step has logged. Means over ranks are taken of what all ranks know, once a step."""

    steps: Steps

    def log(self, *args: Any, **named: Any) -> None:
        """Log a value of this rank; those of others come with the sum before the update."""
        super().log(*args, **{**named, "sync_dist_fn": _Sync.no_op})

    def metrics(self, on_step: bool) -> Any:
        """Give the mean over ranks where it was asked for."""
        if not on_step:
            for key, one in self.valid_items():
                if one.is_tensor and one.meta.on_epoch and one.meta.sync.should:
                    known = self.steps.over_ranks(key, one)
                    one._computed = one._computed if known is None else known  # noqa: SLF001 - in all of this file: Lightning's own
        return super().metrics(on_step)


class Steps:
    """The run's steps within Lightning's loops. Nothing of a loop is written again: its own methods are called."""

    def __init__(self, run: ddp_runner.AttachedRun, trainer: Any) -> None:
        self._run = run
        self._trainer = trainer
        self._fit = trainer.fit_loop
        self._epoch = self._fit.epoch_loop
        self._given: Iterator[list[Any]] | None = None
        self._batches: list[Any] | None = None  # of the step in hand
        self._position = 0  # the next one of them
        self._draws: dict[str, Any] = {}  # the random generators as the batch has left them
        self._held: dict[str, Any] | None = None  # what a step that is made again begins with
        self.in_body = False  # of a step whose update has not begun
        self._is_first = True
        self._progress = Progress(run.world_size, _FIRST + _MOST_LOGGED * _CELLS, run.device)
        self._keys: list[str] = []  # what all ranks had logged at the last sum
        self._logged: list[dict[str, Any]] = []  # and how
        self._of_epoch: list[dict[str, Any]] = []  # the same, of the last whole epoch
        self._noted: Tensor | float = 0.0
        self._metrics_at: list[int] = []  # the updates of the module's metrics, as the step began
        self._files: list[dict[str, Any]] = []  # saved and removed since the last boundary
        self._saved: list[str] = []
        self._where: dict[str, Any] = {}  # folders and versions, as rank 0 has chosen them
        self._module = trainer.lightning_module
        self._attributes = Attributes(self._module)
        self._metrics = [one for one in self._module.modules() if isinstance(one, Metric)]
        self._take_over()

    def _take_over(self) -> None:
        self._fit.__class__, self._epoch.__class__ = _FitInPlace, _EpochInPlace
        self._fit.steps = self._epoch.steps = self
        results = _ResultsInPlace(training=True)
        results.steps = self
        self._epoch._results = results  # noqa: SLF001
        # The run ends its ranks by itself; Lightning's handler would ask other ranks, in the midst of anything.
        self._trainer._signal_connector.register_signal_handlers = lambda: None  # noqa: SLF001
        for one in self._checkpoints():
            one.file_exists = self._file_exists
        for metric in self._metrics:
            metric.distributed_available_fn = lambda: False  # each rank evaluates the whole set

    # The beginning.

    def begin(self) -> None:
        """Draw the first batch, and stand where the others stand."""
        run, trainer, fit = self._run, self._trainer, self._fit
        optimizer = trainer.optimizers[0]
        schedulers = {
            f"scheduler{number}": one.scheduler
            for number, one in enumerate(trainer.lr_scheduler_configs)
        }
        weights = Weights(self._module)
        run.keep(model=weights, optimizer=optimizer, lightning=self._progress, **schedulers)
        if self._attributes.live():
            run.keep_local(attributes=self._attributes)
        accumulated = trainer.accumulate_grad_batches
        batches = _StepBatches(fit._combined_loader, int(fit.max_batches), accumulated)  # noqa: SLF001
        total = _UNBOUNDED
        if fit.max_steps != -1:
            total = fit.max_steps
        if fit.max_epochs not in (None, -1):
            total = min(total, fit.max_epochs * len(batches))
        self._given = run.steps(batches, max_steps=total)
        self._draw()
        if self._progress.between:
            self._put_between()
        self._is_first = False

    def _draw(self) -> list[Any] | None:
        """Give the batches of the step in hand; None once training has ended."""
        if self._batches is None:
            assert self._given is not None, "the run has begun"
            if not self._is_first:
                self._held = self._held or self._capture()
                if self._epoch.global_step:  # else the ranks have chosen their own folders
                    self._progress.between = self._held["between"]
            self._batches, self._position = next(self._given, None), 0
            self._draws = _collect_rng_states(include_cuda=self._run.device.type == "cuda")
            is_older = self._epoch.global_step != self._run.step_number
            if self._batches is not None and not self._is_first and is_older:
                self._put_between()  # of an older state, on all ranks
            elif self._held is not None:  # what the run has put back is as of the update
                self._attributes.put(self._held["between"]["late"])
        return self._batches

    @property
    def batch_of_epoch(self) -> int:
        """The number of batches of this epoch that were given, with the one in hand."""
        return int(self._epoch.batch_progress.current.ready) + 1

    def next_batch(self) -> Any:
        """Give the next batch of the step in hand; its body begins with the first."""
        assert self._batches is not None, "drawn before"
        if self._position == 0:
            self._begin_body()
        batch = self._batches[self._position]
        self._position += 1
        return batch

    def _begin_body(self) -> None:
        if self._held is None:
            self._held = self._capture()
        self._attributes.let_go()
        _set_rng_states(self._draws)
        self._noted = 0.0
        self._metrics_at = self._updates()
        self._run.begin_step()
        self.in_body = True
        if self._run.step_number == 0:
            self._agree_on_folders()

    def advance(self, batch: Callable[[], None], after: Callable[[], None]) -> None:
        """Make Lightning's next batch, and those before it where their step is made again."""
        behind = self._position if self._batches is not None else 0
        while True:
            if self._draw() is None:
                self._trainer.should_stop = True
                raise StopIteration
            try:
                while self._position < behind:
                    self._advance_one(batch)
                    after()
                self._advance_one(batch)
            except BaseException as error:
                self.in_body = False
                if not self._run.fail_step(error):
                    raise
                self._take_back()
            else:
                return

    def _advance_one(self, batch: Callable[[], None]) -> None:
        try:
            batch()
        except StopIteration:
            refuse(
                ("on_train_batch_start()", -1, "leaves out batches; in place it is not supported")
            )

    # Within a step.

    def note(self, loss: Tensor) -> None:
        """Note the loss of a batch before its backward, for the run's own log."""
        self._noted = self._noted + loss.detach()
        self._run.note(loss=self._noted)

    def before_update(self) -> None:
        """Learn what each rank has logged: after the update no rank waits for another."""
        refuse(why_not_logged(self._results_of_metrics(), self._unsynced_monitors()))
        assert self._held is not None, "a body has begun"
        self._attributes.hold()
        found = [(key, one) for key, one in sorted(self._results().items()) if one.is_tensor]
        if len(found) > _MOST_LOGGED:
            refuse(("log()", len(found), f"is of more than {_MOST_LOGGED} values in training_step"))
        self._keys = [key for key, _ in found]
        self._logged = [_meta_of(key, one) for key, one in found]
        mine = torch.zeros_like(self._progress.counted)
        row = mine[self._run.rank]
        row[_NAMES] = zlib.crc32(" ".join(self._keys).encode())
        row[_LATE] = zlib.crc32(as_text(self._held["between"]["late"]).encode())
        for number, (_, one) in enumerate(found):
            row[_cells(number)] = _cells_of(one, row.device)
        if self._run.world_size > 1:
            dist.all_reduce(mine)
        late = ", ".join(self._held["between"]["late"])
        for cell, name, value in (
            (_NAMES, "log()", ""),
            (_LATE, type(self._module).__name__, late),
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

    def after_update(self) -> None:
        """End the step; what Lightning does up to the next batch is between two steps."""
        self.in_body = False
        self._run.end_step()
        self._batches, self._position, self._held = None, 0, None

    def _take_back(self) -> None:
        """Have Lightning stand where the step in hand begins."""
        self._batches, self._position = None, 0
        assert self._held is not None, "a body has begun"
        self._put(self._held["between"], is_entered=True)
        self._put_results(self._held["results"])

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

    # Between steps: what Lightning has counted, and puts back.

    def _results(self) -> dict[str, Any]:
        return {key: one for key, one in self._epoch._results.items() if not one.has_reset}  # noqa: SLF001

    def _results_of_metrics(self) -> list[str]:
        """Return what was logged as a torchmetrics object in training, whose state is this rank's alone."""
        found = [key for key, one in self._results().items() if not one.is_tensor]
        if self._updates() != self._metrics_at:
            found.append("a torchmetrics.Metric of the module")
        return found

    def _updates(self) -> list[int]:
        return [one._update_count for one in self._metrics]  # noqa: SLF001

    def _unsynced(self) -> set[str]:
        """Return the names of what differs from rank to rank."""
        found = set()
        for one in self._epoch._results.values():  # noqa: SLF001
            if not one.meta.sync.should:
                found |= {one.meta.name, one.meta.forked_name(True), one.meta.forked_name(False)}
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

    def _capture(self) -> dict[str, Any]:
        logged, unsynced = self._trainer._logger_connector, self._unsynced()  # noqa: SLF001
        results = self._results()
        late = [key for key, one in results.items() if key not in self._keys and one.meta.on_epoch]
        names = [one.meta.name for key, one in results.items() if key in late]
        if not self._is_first and self._held is None and self._keys and late:
            refuse(
                ("log()", names[0], "is called in on_train_batch_end(); in place it is not kept")
            )
        between = {
            "loops": copy.deepcopy(self._fit.state_dict()),
            "callbacks": [self._state_of(one) for one in self._trainer.callbacks],
            "first": logged._first_loop_iter,  # noqa: SLF001
            "fx": logged._current_fx,  # noqa: SLF001
            "metrics": {
                name: {
                    key: as_plain(key, one)
                    for key, one in getattr(logged, name).items()
                    if key not in unsynced
                }
                for name in ("_callback_metrics", "_logged_metrics", "_progress_bar_metrics")
            },
            "stops": bool(self._trainer.should_stop),
            "keys": list(self._keys),
            "logged": [_meta_of(key, one) for key, one in sorted(results.items())],
            "files": self._files,
            "saved": list(self._saved),
            "where": self._where,
            "late": self._attributes.late(),
        }
        if self._logged and not results:  # Lightning has reset them: an epoch is over
            self._of_epoch, self._logged = self._logged, []
            self._progress.epoch.copy_(self._progress.counted)
        between["epoch"] = self._of_epoch
        self._files = []
        return {"between": between, "results": {k: _look_of(one) for k, one in results.items()}}

    def _state_of(self, callback: Any) -> dict[str, Any]:
        name = type(callback).__name__
        state = {"state": as_plain(name, callback.state_dict())}
        if isinstance(callback, ModelCheckpoint):
            state["more"] = {
                one: as_plain(name, getattr(callback, one))
                for one in _OF_CHECKPOINT
                if hasattr(callback, one)
            }
        return state

    def _put_between(self) -> None:
        """Have Lightning stand where the kept state does."""
        between = self._progress.between
        self._keys = list(between["keys"])
        self._saved, self._where = list(between["saved"]), between["where"]
        self._put_folders()
        self._put(between, is_entered=not self._is_first)
        own, results = self._progress.counted[self._run.rank], {}
        for meta in between["logged"]:
            if meta["key"] in self._keys:
                cells = own[_cells(self._keys.index(meta["key"]))]
                results[meta["key"]] = _result_of(meta, cells)
        self._put_results(results)
        self._logged, self._of_epoch = list(between["logged"]), list(between["epoch"])
        values = self._trainer._logger_connector._callback_metrics  # noqa: SLF001
        for number, meta in enumerate(self._of_epoch):
            one = _result_of(meta, self._progress.epoch[self._run.rank][_cells(number)])
            if one.meta.on_epoch and not one.meta.sync.should:
                values[one.meta.name] = values[one.meta.forked_name(False)] = one.compute()
        values.update(self._epoch._results.metrics(True)["callback"])  # noqa: SLF001
        if self._run.is_first and self._is_first:
            self._make_files(between["files"])
        looks = {key: _look_of(one) for key, one in results.items()}
        self._held = {"between": between, "results": looks}

    def _put(self, between: dict[str, Any], *, is_entered: bool) -> None:
        trainer, fit = self._trainer, self._fit
        fit.load_state_dict(copy.deepcopy(between["loops"]))
        if is_entered:  # it is no restart
            for loop in (fit, self._epoch, self._epoch.val_loop):
                loop.restarting = False
                loop.on_iteration_done()
        for callback, found in zip(trainer.callbacks, between["callbacks"], strict=True):
            if found["state"]:
                callback.load_state_dict(copy.deepcopy(found["state"]))
            for name, value in found.get("more", {}).items():
                setattr(callback, name, value)
        logged = trainer._logger_connector  # noqa: SLF001
        logged._first_loop_iter, logged._current_fx = between["first"], between["fx"]  # noqa: SLF001
        for name, values in between["metrics"].items():
            getattr(logged, name).update(copy.deepcopy(values))
        trainer.should_stop = between["stops"]
        self._attributes.put(between["late"])

    def _put_results(self, found: dict[str, Any]) -> None:
        results = self._epoch._results  # noqa: SLF001
        for key in [key for key in results if key not in found]:
            results[key].reset()
        for key, one in found.items():
            if isinstance(one, dict):  # of the same process
                vars(results[key]).update(one)
            else:
                results[key] = one

    # Files, which rank 0 writes.

    def saves(self, checkpoint: dict[str, Any], path: Any) -> None:
        """A checkpoint of Lightning's is saved: the others know what was in it beside the weights."""
        parts = {key: checkpoint[key] for key in _IN_CHECKPOINT if key in checkpoint}
        self._files.append({"path": str(path), "parts": as_plain("checkpoint", parts)})
        if str(path) not in self._saved:
            self._saved.append(str(path))

    def removes(self, path: Any) -> None:
        """A checkpoint is removed."""
        self._files.append({"path": str(path)})
        if str(path) in self._saved:
            self._saved.remove(str(path))

    def _file_exists(self, filepath: Any, trainer: Any) -> bool:
        """Say it alike on all ranks, also while rank 0 writes: of what this run has saved, and what was there before."""
        del trainer
        return str(filepath) in {*self._saved, *self._where.get("there", ())}

    def _make_files(self, files: list[dict[str, Any]]) -> None:
        """Save and remove what the process before this one may have died in."""
        trainer = self._trainer
        for one in files:
            if "parts" not in one:
                if Path(one["path"]).exists():
                    trainer.strategy.remove_checkpoint(one["path"])
            elif one["path"] in self._saved:  # of the same content, where it was whole
                is_whole = "lr_schedulers" in one["parts"]
                made = trainer._checkpoint_connector.dump_checkpoint(not is_whole)  # noqa: SLF001
                trainer.strategy.save_checkpoint(
                    {**made, **copy.deepcopy(one["parts"])}, one["path"]
                )
        self._files = []

    def _checkpoints(self) -> list[Any]:
        return [one for one in self._trainer.callbacks if isinstance(one, ModelCheckpoint)]

    def _agree_on_folders(self) -> None:
        """Take the folders and the loggers' versions that rank 0 has chosen."""
        folders = [str(one.dirpath) if one.dirpath else None for one in self._checkpoints()]
        there = [str(file) for one in folders if one for file in Path(one).glob("*")]
        versions = [getattr(one, "version", None) for one in self._trainer.loggers]
        found = [{"folders": folders, "versions": versions, "there": there}]
        if self._run.world_size > 1:
            dist.broadcast_object_list(found, 0)
        self._where = found[0]
        self._put_folders()

    def _put_folders(self) -> None:
        for one, folder in zip(self._checkpoints(), self._where["folders"], strict=True):
            one.dirpath = folder
        for logger, version in zip(self._trainer.loggers, self._where["versions"], strict=True):
            if getattr(logger, "_version", version) != version:
                before = Path(logger.log_dir) if isinstance(logger, CSVLogger) else None
                logger._version = version  # noqa: SLF001
                logger._experiment = None  # noqa: SLF001
                if before is not None and self._run.is_first:
                    go_on_with_rows(logger, before)

    # The end.

    def end(self) -> None:
        """Have the run end where Lightning has ended, which may be before its last step."""
        run = self._run
        while not run.has_ended and self._draw() is not None:
            if not self._fit.done:
                raise RuntimeError("the last step was taken back")
            run.stop()
            try:
                run.begin_step()
                run.end_step()
                self._batches = None
            except BaseException as error:
                self._batches = None
                if not run.fail_step(error):
                    raise


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
    return {
        "key": key,
        **{name: getattr(meta, name) for name in (*plain, "add_dataloader_idx", "dataloader_idx")},
        "reduce_fx": meta.reduce_fx.__name__,
        "sync": bool(meta.sync.should),
        "dtype": str(one.value.dtype).removeprefix("torch."),
    }


def _result_of(meta: dict[str, Any], cells: Tensor) -> Any:
    """Return what this rank has logged, made of what all ranks know."""
    given = {k: v for k, v in meta.items() if k not in ("key", "sync", "dtype")}
    one = _ResultMetric(_Metadata(**given), is_tensor=True)
    one.meta.sync = _Sync(_should=meta["sync"], fn=_Sync.no_op)
    _, value, weight, newest = cells
    dtype = getattr(torch, meta["dtype"])
    one.value = value.to(dtype)
    if one.meta.is_mean_reduction:
        one.cumulated_batch_size = weight.to(torch.int64)
    one._forward_cache = newest.to(dtype) if one.meta.on_step else None  # noqa: SLF001
    one._update_count = 1  # noqa: SLF001
    return one


def _look_of(one: Any) -> dict[str, Any]:
    """Return what a logged value holds; its values are replaced, never written."""
    return {name: value for name, value in vars(one).items() if name in _HELD}
