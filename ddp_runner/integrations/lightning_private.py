"""Uses private names of Lightning 2.6: its loops and their progress. Those of logged values are lightning_logged's."""

from __future__ import annotations

import copy
import json
import math
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import torch.distributed as dist
from lightning.fabric.utilities.data import _set_sampler_epoch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.loops.evaluation_loop import _EvaluationLoop
from lightning.pytorch.loops.fetchers import _DataFetcher
from lightning.pytorch.loops.fit_loop import _FitLoop
from lightning.pytorch.loops.loop import _Loop
from lightning.pytorch.loops.progress import _BaseProgress
from lightning.pytorch.loops.training_epoch_loop import _TrainingEpochLoop
from lightning.pytorch.plugins.precision import Precision
from torch import Tensor
from torchmetrics import Metric
from torchmetrics.metric import jit_distributed_available

import ddp_runner
from ddp_runner.integrations.framework_run import Draws, loss_scaler, refuse
from ddp_runner.integrations.lightning_limits import why_not_loader
from ddp_runner.integrations.lightning_logged import CELLS, Logged
from ddp_runner.integrations.lightning_logged import USED as USED_FOR_LOGS
from ddp_runner.integrations.lightning_values import (
    Attributes,
    Others,
    Progress,
    Weights,
    as_plain,
    go_on_with_rows,
    remove_begun,
)
from ddp_runner.training.own_loop.batches import batch_size_of, have_new_workers

# What else is looked up by name: the class -> its attributes, which the next version may lack.
USED: dict[type[Any], tuple[str, ...]] = {
    _BaseProgress: ("state_dict",),
    _Loop: (
        "load_state_dict",
        "on_iteration_done",
        "on_save_checkpoint",
        "restarting",
        "state_dict",
    ),
    _EvaluationLoop: ("on_iteration_done", "run"),
    _FitLoop: ("done", "on_advance_end", "on_run_end", "on_run_start", "run", "setup_data", "skip"),
    _TrainingEpochLoop: (
        "_broadcast_sigterm_tensor",
        "advance",
        "done",
        "global_step",
        "on_advance_end",
        "update_lr_schedulers",
    ),
    **USED_FOR_LOGS,
    Metric: ("metric_state",),
    Precision: ("_after_closure",),
    ModelCheckpoint: ("file_exists", "load_state_dict", "state_dict"),
}
_VALIDATION, _EPOCH_END = "validation", "epoch end"  # what ranks call together between two steps
_UNBOUNDED = 10**9  # steps
_CURE = "make it a number, a tensor or a list or dict of them, or give the callback a state_dict()"
_CURE_OF_TRAINER = "set it at the start of each batch, by trainer.global_step"
# Of ModelCheckpoint, what its state_dict() or load_state_dict() leaves out.
_OF_CHECKPOINT = (
    "_last_global_step_saved",
    "_last_checkpoint_saved",
    "_defer_save_until_validation",
    "current_score",
)
_IN_CHECKPOINT = ("epoch", "global_step", "loops", "callbacks", "lr_schedulers")


def lacking() -> list[str]:
    """Return the names that the installed version of Lightning has moved."""
    return [
        f"{kind.__name__}.{name}"
        for kind, names in USED.items()
        for name in names
        if not hasattr(kind, name)
    ]


def progress_of(loop: Any, prefix: str = "") -> dict[str, Any]:
    """Return what ``loop.state_dict()`` does, with the loops' live counters, of which that makes copies."""
    found = {f"{prefix}state_dict": loop.on_save_checkpoint()}
    for name, value in vars(loop).items():
        if isinstance(value, _BaseProgress):
            found[prefix + name] = value
        elif isinstance(value, _Loop):
            found |= progress_of(value, f"{prefix}{name}.")
    return found


class _StepBatches:
    """The batches of each optimizer step, as Lightning accumulates them, in the order of its own samplers."""

    def __init__(self, combined: Any, count: int, accumulate: int) -> None:
        self._combined = combined
        self._count = count
        self._accumulate = accumulate
        loader = combined.flattened[0]
        self.batch_size = batch_size_of(loader) * accumulate
        # The run looks at these, to begin each pass from known states.
        self.dataset = getattr(loader, "dataset", None)
        self.collate_fn = getattr(loader, "collate_fn", None)
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
            have_new_workers(loader)
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
        """Give the epoch loop the run's batches, also where ``configure_optimizers`` has asked for their number before."""
        super().setup_data()
        if self._combined_loader is None or isinstance(self._data_fetcher, _GivenFetcher):
            return
        refuse(why_not_loader(self))
        self._data_fetcher.teardown()
        self._data_fetcher = _GivenFetcher(self.steps, int(self.max_batches))
        self._data_fetcher.setup(self._combined_loader)

    @property
    def done(self) -> bool:
        """Return False for a replaced rank whose peers are behind the last step, in a call between steps."""
        return not self.steps.enters and super().done

    def run(self) -> None:
        """Learn where the other ranks are, and enter there."""
        self.setup_data()
        if not self.skip:
            self.steps.begin()
            if self.done:
                self.on_run_start()
                self.on_run_end()
                return
        super().run()

    def on_advance_end(self) -> None:
        """End an epoch with the other ranks."""
        self.restarting = False
        self.steps.together(_EPOCH_END, super().on_advance_end)

    def on_run_end(self) -> None:
        """End the run with all ranks, before the hooks of the end are called."""
        self.steps.end()
        super().on_run_end()


class _EpochInPlace(_TrainingEpochLoop):  # type: ignore[misc]
    """Lightning's loop over batches, whose steps are the run's."""

    steps: Steps

    @property
    def done(self) -> bool:
        """Say where a replaced rank enters that has no batch to begin with."""
        enters = self.steps.enters
        return enters == _EPOCH_END if enters else bool(super().done)

    def _broadcast_sigterm_tensor(self) -> None:
        """The run itself ends all ranks at the same step."""

    def reset(self) -> None:
        """Begin a pass; a rank that is replaced within one finds its batches."""
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "You're resuming from a checkpoint")
            super().reset()

    def advance(self, data_fetcher: Any) -> None:
        """Make one batch; where a step is made again, all of its batches up to this one."""
        self.steps.has_entered()
        if self.steps.enters:
            return  # to the validation, which follows
        after = partial(super().on_advance_end, data_fetcher)
        self.steps.advance(partial(super().advance, data_fetcher), after)


class _ValidateInPlace(_EvaluationLoop):  # type: ignore[misc]
    """Lightning's loop over validation batches: each rank has its share, as in Lightning's own DDP."""

    steps: Steps

    def run(self) -> Any:
        """Validate with the other ranks, again from its start where one is lost."""
        if self.trainer.sanity_checking:
            return super().run()
        return self.steps.together(_VALIDATION, super().run)

    def on_iteration_done(self) -> None:
        """A batch is done."""
        super().on_iteration_done()
        self.steps.alive()

    def begin_again(self) -> None:
        """Forget a validation that was cut short."""
        for one in self._results.values():
            if one.is_tensor:
                one.reset()
            # Its torchmetrics object is put back by itself.
            one.has_reset, one._computed = True, None  # noqa: SLF001
        self._module_mode.restore(self.trainer.lightning_module)
        self.batch_progress.reset_on_run()


class _AmongRanks:
    """Says whether a torchmetrics object asks other ranks. Copies of the object ask the same; a file has torchmetrics' own."""

    def __init__(self, ask: Callable[[], bool]) -> None:
        self._ask = ask

    def __call__(self) -> bool:
        return self._ask()

    def __deepcopy__(self, memo: dict[int, Any]) -> _AmongRanks:
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        return partial, (jit_distributed_available,)


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
        self._is_drawn_early = False  # the step in hand, before the hooks of the start
        self._draws: Draws | None = None  # as the batch has left them
        self._held: dict[str, Any] | None = None  # what a step that is made again begins with
        self.in_body = False  # of a step whose update has not begun, or in a call of all ranks
        self.enters = ""  # the call of all ranks in which this rank is to enter
        self._is_in_call = False  # of all ranks, between two steps
        self._is_first = True
        self._progress = Progress(run.world_size, CELLS, run.device)
        self._noted: Tensor | float = 0.0
        self._files: list[dict[str, Any]] = []  # saved and removed since the last boundary
        self._saved: list[str] = []
        self._where: dict[str, Any] = {}  # folders and versions, as rank 0 has chosen them
        self._module = trainer.lightning_module
        self._attributes = Attributes(self._module)
        self._logged = Logged(
            run, trainer, self._progress, is_called_together=lambda: self._is_in_call
        )
        self._take_over()

    def _take_over(self) -> None:
        self._fit.__class__, self._epoch.__class__ = _FitInPlace, _EpochInPlace
        self._epoch.val_loop.__class__ = _ValidateInPlace
        self._fit.steps = self._epoch.steps = self._epoch.val_loop.steps = self
        # The run ends its ranks by itself; Lightning's handler would ask other ranks, in the midst of anything.
        self._trainer._signal_connector.register_signal_handlers = lambda: None  # noqa: SLF001
        for one in self._checkpoints():
            one.file_exists = self._file_exists
        for metric in self._attributes.metrics.values():
            metric.distributed_available_fn = _AmongRanks(self._is_among_ranks)

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
        run.keep(**loss_scaler(trainer.scaler))
        if self._attributes.live():
            run.keep_local(attributes=self._attributes)
        others = Others(trainer, self._module)
        run.watch(others.values, is_apart=others.is_apart, cure=_CURE)
        run.watch(others.of_trainer, is_apart=others.is_apart, cure=_CURE_OF_TRAINER)
        accumulated = trainer.accumulate_grad_batches
        batches = _StepBatches(fit._combined_loader, int(fit.max_batches), accumulated)  # noqa: SLF001
        total = _UNBOUNDED
        if fit.max_steps != -1:
            total = fit.max_steps
        if fit.max_epochs not in (None, -1):
            total = min(total, fit.max_epochs * len(batches))
        self._given = run.steps(batches, max_steps=total)
        run.join()
        if self._progress.between:
            self._attributes.hold()  # as of the newest update, which the other ranks have made
        self.enters = self._progress.between.get("call", "")
        if not self.enters:
            self._is_drawn_early = self._draw() is not None
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
            self._draws = Draws(self._run.device)
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
        assert self._draws is not None, "of the batch"
        self._draws.put_back()
        self._noted = 0.0
        # on_train_epoch_start() may have frozen layers since, and is not called again if this step is repeated.
        self._run.begin_step(keeps=self._is_drawn_early)
        self._is_drawn_early = False
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

    # Between two steps, with the other ranks.

    def together(self, name: str, function: Callable[[], Any]) -> Any:
        """Call a part of Lightning's between two steps whose collectives reach the other ranks."""
        if self._run.has_ended:
            return function()
        self.enters = ""
        self._held = self._held or self._capture()
        self._held["between"]["call"] = name
        self._progress.between = self._held["between"]
        calls = 0

        def called() -> Any:
            nonlocal calls
            calls += 1
            if calls > 1:
                self._begin_again(name)
            self.in_body = self._is_in_call = True
            try:
                found = function()
                if name == _VALIDATION:
                    self._logged.gather_own()
                return found
            finally:
                self.in_body = self._is_in_call = False

        found = self._run.together(called)
        self._held = None
        return found

    def _begin_again(self, name: str) -> None:
        """Have Lightning stand where the call begins."""
        assert self._held is not None, "a call has begun"
        if name == _VALIDATION:
            self._epoch.val_loop.begin_again()
        self._attributes.put_back()
        between = self._held["between"]
        self._put(between, is_entered=True)
        self._logged.put_looks(self._held["looks"])
        self._saved, self._files = list(between["saved"]), []

    def has_entered(self) -> None:
        """A replaced rank is where it enters: it has nothing to go back to."""
        self._fit.restarting = False

    def alive(self) -> None:
        """Say that this rank works."""
        self._run.alive()

    def _is_among_ranks(self) -> bool:
        return self.in_body and self._run.world_size > 1

    # Within a step.

    def note(self, loss: Tensor) -> None:
        """Note the loss of a batch before its backward, for the run's own log."""
        self._noted = self._noted + loss.detach()
        self._run.note(loss=self._noted)

    def before_update(self) -> None:
        """Learn what each rank has logged: after the update no rank waits for another."""
        assert self._held is not None, "a body has begun"
        self._attributes.hold()
        self._logged.sum(self._attributes, self._held["between"]["late"])

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
        self._logged.put_looks(self._held["looks"])

    # Between steps: what Lightning has counted, and puts back.

    def _capture(self) -> dict[str, Any]:
        is_late_refused = not self._is_first and self._held is None
        looks = self._logged.looks()
        between = {
            "loops": json.dumps(progress_of(self._fit), default=vars),
            "callbacks": [self._state_of(one) for one in self._trainer.callbacks],
            "logged": self._logged.capture(is_late_refused=is_late_refused),
            "stops": bool(self._trainer.should_stop),
            "files": self._files,
            "saved": list(self._saved),
            "where": self._where,
            "late": self._attributes.late(),
        }
        self._files = []
        return {"between": between, "looks": looks}

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
        self._saved, self._where = list(between["saved"]), between["where"]
        self._put_folders()
        self._put(between, is_entered=not self._is_first)
        self._logged.put(between["logged"])
        if self._run.is_first and self._is_first:
            self._make_files(between["files"])
        self._held = {"between": between, "looks": self._logged.looks()}

    def _put(self, between: dict[str, Any], *, is_entered: bool) -> None:
        trainer, fit = self._trainer, self._fit
        fit.load_state_dict(json.loads(between["loops"]))
        if is_entered:  # it is no restart
            for loop in (fit, self._epoch, self._epoch.val_loop):
                loop.restarting = False
                loop.on_iteration_done()
        for callback, found in zip(trainer.callbacks, between["callbacks"], strict=True):
            if found["state"]:
                callback.load_state_dict(copy.deepcopy(found["state"]))
            for name, value in found.get("more", {}).items():
                setattr(callback, name, value)
        self._logged.put_values(between["logged"])
        trainer.should_stop = between["stops"]
        self._attributes.put(between["late"])

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
        """Take the folders and the loggers' versions that rank 0 has chosen, or the one that was lost in this step."""
        folders = [str(one.dirpath) if one.dirpath else None for one in self._checkpoints()]
        there = [str(file) for one in folders if one for file in Path(one).glob("*")]
        versions = [getattr(one, "version", None) for one in self._trainer.loggers]
        chosen = {"folders": folders, "versions": versions, "there": there}
        found = [(self._where, chosen)] * self._run.world_size
        if self._run.world_size > 1:
            dist.all_gather_object(found, found[0])
        self._where = next((agreed for agreed, _ in found if agreed), found[0][1])
        self._put_folders()

    def _put_folders(self) -> None:
        for one, folder in zip(self._checkpoints(), self._where["folders"], strict=True):
            one.dirpath = folder
        for logger, version in zip(self._trainer.loggers, self._where["versions"], strict=True):
            if getattr(logger, "_version", version) != version:
                if self._run.is_first and logger.log_dir is not None:  # as fast_dev_run has none
                    remove_begun(Path(logger.log_dir), logger._experiment)  # noqa: SLF001
                logger._version = version  # noqa: SLF001
                logger._experiment = None  # noqa: SLF001
                if self._run.is_first and isinstance(logger, CSVLogger):
                    go_on_with_rows(logger)

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
