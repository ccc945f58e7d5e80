"""``transformers.Trainer``, repaired in place: its own loop calls the run's steps from methods that it has anyway.

    from ddp_runner.integrations.transformers import Trainer  # instead of: from transformers import Trainer

Import it before TrainingArguments are made. Without a supervisor (plain ``python``, torchrun) it is Trainer itself.
Trainer sees one process: each rank's share of the data, sums over ranks and who writes are given to it here.
"""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
import transformers
from accelerate.data_loader import SeedableRandomSampler
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset, SequentialSampler
from transformers.trainer_pt_utils import LengthGroupedSampler
from transformers.trainer_utils import get_last_checkpoint

import ddp_runner
from ddp_runner.integrations.framework_run import (
    RUN,
    Draws,
    begin_evaluation,
    loss_scaler,
    refuse,
    show_one_process,
)
from ddp_runner.integrations.transformers_limits import (
    why_not,
    why_not_loader,
    why_not_made,
    why_not_version,
)
from ddp_runner.integrations.transformers_progress import (
    FLOS,
    LOSS,
    Others,
    Progress,
    sum_over_ranks,
)
from ddp_runner.training.own_loop.batches import batch_size_of, have_new_workers

if TYPE_CHECKING:
    from transformers import Trainer as _Base
else:
    _Base = object

# What the loop of Trainer is entered by. They are Trainer's own, and may be others in its next version.
_ENTERED_BY = (
    "_get_grad_norm",
    "_get_num_items_in_batch",
    "_finalize_training",
    "_init_training_state",
    "_load_best_model",
    "_maybe_log_save_evaluate",
    "_prepare_for_training",
    "_run_epoch",
    "_save_checkpoint",
    "get_batch_samples",
    "set_initial_training_values",
    "store_flos",
)
_STATE_FILE = "trainer_state.json"  # the last one that Trainer writes into a checkpoint
_SAVED_WAIT_S = 120.0
_THEIRS = transformers.Trainer
_SEEDS_OF_EPOCH = 1_000_003
_CURE = "make it a number, a tensor or a list or dict of them, or give the callback a state()"

show_one_process()  # before TrainingArguments are made


def in_place(trainer: type[Any]) -> type[Any]:
    """Return a subclass of ``trainer``, a Trainer or a subclass of it, whose steps are repaired in place.

    Without a supervisor it is ``trainer`` itself. Raises BadInputError for a version of transformers that is
    not supported.
    """
    if RUN is None:
        return trainer
    refuse(why_not_version(transformers.__version__, _lacking(trainer)))
    # A subclass behind it stands behind super(): what the user overrides is called as ever.
    return type(trainer.__name__, (_InPlace, trainer), {"__module__": trainer.__module__})


def _lacking(trainer: type[Any]) -> list[str]:
    return [name for name in _ENTERED_BY if not callable(getattr(trainer, name, None))]


class _StepBatches:
    """The batches of each step as accelerate shares them out: a list of as many as are accumulated.

    ``first``: returns the step of Trainer's checkpoint with which the run has begun. A pass begins there in its epoch
    and ends there in the next one, so all passes have the same number of steps.
    """

    def __init__(
        self, loader: Any, accumulate: int, *, seed: int, first: Callable[[], int]
    ) -> None:
        self.dataset = loader.dataset
        base = getattr(loader, "base_dataloader", loader)
        self.collate_fn = getattr(
            base, "collate_fn", None
        )  # the run looks at it, as at the dataset
        self.batch_size = batch_size_of(loader) * accumulate
        self._loader = loader
        self._accumulate = accumulate
        self._seed = seed
        self._first = first
        self._pass = 0

    def __len__(self) -> int:
        return max(1, -(-len(self._loader) // self._accumulate))

    def set_epoch(self, epoch: int) -> None:
        """Called before each pass."""
        self._pass = epoch

    def __iter__(self) -> Iterator[list[Any]]:
        if not _has_length(self._loader):
            whole = (one for one in self._of_epoch(self._pass) if len(one) == self._accumulate)
            yield from whole
            return
        epochs, offset = divmod(self._first(), len(self))
        yield from islice(self._of_epoch(self._pass + epochs), offset, None)
        if offset:
            yield from islice(self._of_epoch(self._pass + epochs + 1), offset)

    def _of_epoch(self, epoch: int) -> Iterator[list[Any]]:
        loader = self._loader
        have_new_workers(loader)
        loader.set_epoch(epoch)
        if epoch != self._pass and hasattr(self.dataset, "set_epoch"):
            self.dataset.set_epoch(epoch)
        sampler = _sampler_of(loader)
        if isinstance(sampler, LengthGroupedSampler):  # it would draw from this rank's generator
            sampler.generator = torch.Generator().manual_seed(self._seed + epoch)
        is_stream = isinstance(self.dataset, IterableDataset)
        seed = self._seed + epoch * _SEEDS_OF_EPOCH
        if is_stream:  # all ranks read all of it, and it may draw its order
            transformers.set_seed(seed)
        drawn = iter(loader)
        while found := list(islice(drawn, self._accumulate)):
            yield found
            if is_stream:
                seed += 1
                transformers.set_seed(seed)


def _has_length(loader: Any) -> bool:
    try:
        return len(loader) >= 0
    except TypeError:
        return False


def _sampler_of(loader: Any) -> Any:
    batches = getattr(loader, "batch_sampler", None)
    return getattr(getattr(batches, "batch_sampler", batches), "sampler", None)


def _write_as_a_save_does(model: Any) -> None:
    """Change a model's configuration on all ranks as ``save_pretrained()`` would later do, on rank 0 alone."""
    if isinstance(model, transformers.PreTrainedModel):
        model.config.dtype = str(model.dtype).removeprefix("torch.")
        model.config.architectures = [type(model).__name__]


def _nothing() -> Any:
    """A loader for Trainer to iterate and skip in, while the run draws the batches itself."""
    return DataLoader([0], generator=torch.Generator())  # type: ignore[arg-type]


class _InPlace(_Base):  # type: ignore[misc]
    """Overrides the methods at the start and end of Trainer's steps; the loop itself is Trainer's.

    A subclass of the user's has a ``_loss`` or ``_loader`` of its own: all that is not Trainer's is ``_in_place_...`` here.
    """

    def create_accelerator_and_postprocess(self) -> None:
        """Have Trainer see one process on this rank's device, of which rank 0 alone writes."""
        run, args = _run(), self.args
        refuse(why_not_made(args))
        self._in_place_batches: list[Any] | None = None  # of the step in hand, which has not begun
        self._in_place_draws: Draws | None = None  # as that batch has left them
        self._in_place_given: Iterator[list[Any]] | None = None
        self._in_place_is_in_step = False
        self._in_place_is_first_entry = True
        self._in_place_sharing = contextlib.ExitStack()  # while the loader is made
        if args.device != run.device:  # the first GPU, for all ranks
            args.__dict__["_setup_devices"] = args.distributed_state.device = run.device
            if run.device.type == "cuda":
                torch.cuda.set_device(run.device)
        args._n_gpu = min(1, args.n_gpu)  # noqa: SLF001 - it would wrap the model for all GPUs
        state = args.distributed_state
        state.process_index = state.local_process_index = run.rank
        super().create_accelerator_and_postprocess()
        accelerator = self.accelerator
        if accelerator.dataloader_config.dispatch_batches is None:  # else rank 0 would send streams
            accelerator.dataloader_config.dispatch_batches = False
        unwrapped, backward = accelerator.unwrap_model, accelerator.backward
        accelerator.no_sync = lambda model: model.no_sync()
        accelerator.backward = lambda loss, **named: backward(self._in_place_noted(loss), **named)
        accelerator.unwrap_model = lambda model, *args, **named: unwrapped(
            self.model if model is self._in_place_net else model, *args, **named
        )

    _in_place_net: Any = None
    _in_place_loss: Any = 0.0  # of the micro-batches so far of the step in hand
    _in_place_backwards_left = 0  # of its micro-batches

    def train(
        self,
        resume_from_checkpoint: str | bool | None = None,
        trial: Any = None,
        ignore_keys_for_eval: list[str] | None = None,
    ) -> Any:
        """Train as Trainer does; a run that is resumed ignores Trainer's checkpoints, as its own are newer."""
        refuse(why_not(self, searches=trial is not None, resumes=bool(resume_from_checkpoint)))
        self._in_place_resumed = resume_from_checkpoint or None
        handler = self.callback_handler
        handler.call_event = self._in_place_noticed(handler.call_event)
        self._in_place_sharing.enter_context(self._in_place_shared_out(_run().world_size))
        return super().train(None, trial, ignore_keys_for_eval)

    def hyperparameter_search(self, *args: Any, **named: Any) -> Any:  # noqa: ARG002 - as Trainer's
        """Refuse it."""
        refuse(why_not(self, searches=True))

    # The beginning.

    def set_initial_training_values(self, args: Any, dataloader: Any) -> Any:
        """Take in the loader of this rank's share, which a subclass may have made in its own way."""
        self._in_place_sharing.close()
        kinds = (
            SeedableRandomSampler,
            SequentialSampler,
            LengthGroupedSampler,
            IterableDataset,
        )
        is_stream = not _has_length(dataloader)
        if is_stream and self._in_place_resumed:
            refuse(why_not(self, resumes=True, is_stream=True))
        refuse(why_not_loader(dataloader, kinds, world_size=_run().world_size))
        self._in_place_loader = dataloader
        return super().set_initial_training_values(args, dataloader)

    def get_total_train_batch_size(self, args: Any) -> int:
        """Count all ranks."""
        return int(super().get_total_train_batch_size(args)) * _run().world_size

    def _init_training_state(
        self, max_steps: int, num_update_steps_per_epoch: int, *more: Any
    ) -> tuple[int, int]:
        """Draw the first batch: a replaced rank learns from it where the others stand."""
        run = _run()
        given = (max_steps, num_update_steps_per_epoch, *more)
        why_not_resumed = self._in_place_begin_with(self._in_place_resumed, *given)
        if why_not_resumed is not None:
            self._in_place_begin_with(None, *given)
        model, loader = self._in_place_prepared
        options = {"find_unused_parameters": bool(self.args.ddp_find_unused_parameters)}
        if self.args.ddp_bucket_cap_mb is not None:
            options["bucket_cap_mb"] = self.args.ddp_bucket_cap_mb
        self._in_place_net = self.model_wrapped = run.ddp(model, **options)
        if self.args.save_strategy != "no":
            _write_as_a_save_does(self.model)
        self._in_place_progress = Progress(
            self, run.world_size, run.rank, run.device, classes=(_THEIRS, _InPlace)
        )
        optimizer = getattr(self.optimizer, "optimizer", self.optimizer)
        run.keep(
            model=self.model,
            optimizer=optimizer,
            scheduler=self.lr_scheduler,
            trainer=self._in_place_progress,
            **loss_scaler(self.accelerator.scaler),
        )
        others = Others(self, self._in_place_progress)
        run.watch(others.values, is_apart=others.is_apart, cure=_CURE)
        batches = _StepBatches(
            loader,
            self.args.gradient_accumulation_steps,
            seed=self.args.seed if self.args.data_seed is None else self.args.data_seed,
            first=lambda: self._in_place_progress.first,
        )
        self._in_place_given = run.steps(batches, max_steps=max_steps)
        self._in_place_is_at_end = self._in_place_draw() is None
        if run.step_number == 0 and why_not_resumed is not None:
            raise why_not_resumed
        self._in_place_progress.put_between()
        return self._in_place_made() // num_update_steps_per_epoch, 0

    def _in_place_made(self) -> int:
        """Return the number of steps that are made, as Trainer counts them."""
        return int(_run().step_number + self._in_place_progress.first)

    def _in_place_begin_with(self, resumed: str | bool | None, *given: Any) -> Exception | None:
        """Begin with a checkpoint of Trainer's, or with nothing. Return what is wrong with the checkpoint.

        A replaced rank does the same and then gets the state of the others: a checkpoint that is incomplete or was
        deleted since does not matter to it.
        """
        max_steps, steps_per_epoch, epochs, _, *more = given
        try:
            if resumed is True:
                resumed = get_last_checkpoint(self.args.output_dir)
                if resumed is None:
                    expected = f"there is no checkpoint in {self.args.output_dir}"
                    refuse(("resume_from_checkpoint", True, expected))
            if resumed is not None:
                self._load_from_checkpoint(resumed)
            super()._init_training_state(max_steps, steps_per_epoch, epochs, resumed, *more)
            self._in_place_prepared = super()._prepare_for_training(
                max_steps, self._in_place_loader, resumed
            )
        except Exception as error:
            if resumed is None:
                raise
            return error
        return None

    def _prepare_for_training(self, *args: Any, **named: Any) -> tuple[Any, Any]:  # noqa: ARG002
        """Give what is prepared already."""
        return self._in_place_net, self._in_place_prepared[1]

    def _load_rng_state(self, checkpoint: str | None) -> None:
        """Do nothing: the run seeds each step."""

    # The bounds of a step.

    def _in_place_draw(self, *, begins: bool = False) -> list[Any] | None:
        """Give the batches of the step in hand, which begins at once or is left for later; None once training has ended."""
        run = _run()
        if self._in_place_batches is None:
            assert self._in_place_given is not None, "the run has begun"
            if hasattr(self, "_tr_loss"):
                self._in_place_progress.take_between()
            self._in_place_progress.look()
            self._in_place_batches = next(self._in_place_given, None)
            is_left = self._in_place_batches is not None and not begins
            self._in_place_draws = Draws(run.device) if is_left else None
            self._in_place_progress.is_new = False
            if self.state.global_step != self._in_place_made():  # of an older state, on all ranks
                self._in_place_progress.put_between()
        return self._in_place_batches

    def _in_place_enter(self) -> None:
        """Trainer's loop begins: it has set its counts to zero, and this rank may be a replaced one."""
        self._in_place_is_first_entry = False
        self._in_place_progress.put_between()
        self._in_place_progress.enter()
        self._in_place_progress.put_counted()
        step = self.state.global_step
        if (
            self.args.should_save
            and step in self._in_place_progress.saved[-1:]
            and not self._in_place_is_saved(step)
        ):
            self._save_checkpoint(self.model, None)  # in which the process before has ended

    def _run_epoch(self, *, epoch: int, num_update_steps_per_epoch: int, **named: Any) -> None:
        run, accumulated = _run(), self.args.gradient_accumulation_steps
        if self._in_place_is_first_entry:
            self._in_place_enter()
        while True:
            if self._in_place_draw() is None or self.control.should_training_stop:
                self.control.should_training_stop = True
                return
            made = self._in_place_made() - epoch * num_update_steps_per_epoch
            if self._in_place_made() >= self.state.max_steps:  # the run has begun with a checkpoint
                self.control.should_training_stop = True
                return
            if not 0 <= made < num_update_steps_per_epoch:
                raise RuntimeError(
                    f"the run is at step {self._in_place_made()}, out of epoch {epoch}"
                )
            where = {
                "train_dataloader": _nothing(),
                "resume_from_checkpoint": "the run" if made else None,
                "epochs_trained": epoch,
                "steps_trained_in_current_epoch": made * accumulated,
            }
            try:
                super()._run_epoch(
                    epoch=epoch,
                    num_update_steps_per_epoch=num_update_steps_per_epoch,
                    **{**named, **where},
                )
            except BaseException as error:  # what does not come from a step is raised again
                self._in_place_is_in_step = False
                if not run.fail_step(error):
                    raise
            else:
                return

    def get_batch_samples(
        self, epoch_iterator: Any, num_batches: int, device: Any
    ) -> tuple[list[Any], Any]:
        """Begin a step with the batches that the run gives, instead of those of Trainer's iterator."""
        del epoch_iterator, num_batches
        batches = self._in_place_draw(begins=True)
        if batches is None:
            self.control.should_training_stop = True
            return [], None
        self._in_place_begin()
        self._in_place_loss, self._in_place_backwards_left = 0.0, len(batches)
        return batches, self._get_num_items_in_batch(batches, device)

    def _in_place_begin(self) -> None:
        """The step of the batch that was drawn begins."""
        is_left = self._in_place_draws is not None
        if self._in_place_draws is not None:
            self._in_place_draws.put_back()
        self._in_place_batches = self._in_place_draws = None
        # A callback may have frozen layers since: `on_epoch_begin` is not called again if this step is repeated.
        _run().begin_step(keeps=is_left)
        self._in_place_is_in_step = True

    def _get_num_items_in_batch(self, batch_samples: list[Any], device: Any) -> Any:
        """Count over all ranks, where Trainer does; each evaluates by itself."""
        found = super()._get_num_items_in_batch(batch_samples, device)
        is_shared = self._in_place_is_in_step and self.args.average_tokens_across_devices
        if isinstance(found, Tensor) and is_shared:
            counted = found.double()
            found = _run().from_ranks(lambda: sum_over_ranks(counted)).to(found.dtype)
        return found

    def training_step(self, *args: Any, **named: Any) -> Any:
        """Compute as one of the ranks."""
        ranks = dist.get_world_size() if dist.is_initialized() else 1
        with self._in_place_shared_out(ranks):
            return super().training_step(*args, **named)

    def _in_place_noted(self, loss: Tensor) -> Tensor:
        """``loss`` of a micro-batch, as Trainer adds it up; the sum is noted for the run's own log."""
        if self._in_place_is_in_step:
            self._in_place_loss = self._in_place_loss + loss.detach()
            self._in_place_backwards_left -= 1
            if (
                self._in_place_backwards_left == 0
            ):  # the first loss that is noted in a step is the one that is logged
                _run().note(loss=self._in_place_loss)
        return loss

    def _clip_grad_norm(self, *args: Any, **named: Any) -> Any:
        self._in_place_progress.begin_sum()
        return super()._clip_grad_norm(*args, **named)

    def _get_grad_norm(self, *args: Any, **named: Any) -> Any:
        found = super()._get_grad_norm(*args, **named)
        self._in_place_progress.sum_up()  # before the update: after it no rank waits for another
        return found

    def _maybe_log_save_evaluate(self, tr_loss: Tensor, *args: Any, **named: Any) -> None:
        """End the step; then Trainer logs, evaluates and saves between two steps, as it does."""
        if self._in_place_is_in_step:
            self._in_place_is_in_step = False
            _run().end_step()
        logged = self._globalstep_last_logged
        losses = self._in_place_progress.losses() if self.control.should_log else tr_loss
        super()._maybe_log_save_evaluate(losses, *args, **named)
        if self._globalstep_last_logged != logged:
            tr_loss.zero_()
            self._in_place_progress.forget(LOSS)

    def _in_place_noticed(self, call_event: Callable[..., Any]) -> Callable[..., Any]:
        """``call_event`` of the callbacks, with a look at their attributes once ``on_train_begin`` is over."""

        def call(event: str, *args: Any, **named: Any) -> Any:
            if event == "on_epoch_begin" and self._in_place_is_first_entry:
                self._in_place_progress.train_begins()
            return call_event(event, *args, **named)

        return call

    # Between steps.

    def _evaluate(self, trial: Any, ignore_keys_for_eval: Any, **named: Any) -> dict[str, float]:
        """Evaluate at the start of training only in a run that begins."""
        if self._in_place_is_first_entry and _run().step_number > 0:
            return {}
        return dict(super()._evaluate(trial, ignore_keys_for_eval, **named))

    def evaluation_loop(self, dataloader: Any, *args: Any, **named: Any) -> Any:
        """Evaluate with the random numbers of every rank: a collator that masks tokens draws some."""
        if self._in_place_given is not None and not self._in_place_is_in_step:
            sampler, step = _sampler_of(dataloader), _run().step_number
            begin_evaluation(dataloader, sampler, seed=self.args.seed, step=step)
        return super().evaluation_loop(dataloader, *args, **named)

    def store_flos(self) -> None:
        """Add what all ranks have computed."""
        if self._in_place_given is None:
            super().store_flos()
            return
        self.state.total_flos += float(self._in_place_progress.counted[:, FLOS].sum())
        self.current_flos = 0
        self._in_place_progress.forget(FLOS)

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        """Save as Trainer does, on rank 0; its last file says that the others are whole."""
        step, args = self.state.global_step, self.args
        if args.should_save:
            (self._in_place_folder_of(step) / _STATE_FILE).unlink(missing_ok=True)
        super()._save_checkpoint(model, trial)
        if step not in self._in_place_progress.saved:
            self._in_place_progress.saved.append(step)
        best = self.state.best_global_step
        if not args.should_save and best in self._in_place_progress.saved:
            # Trainer looks whether the folder is there, which rank 0 may not have made yet.
            self.state.best_model_checkpoint = os.path.join(args.output_dir, f"checkpoint-{best}")  # noqa: PTH118 - as Trainer has it

    def _save_rng_state(self, output_dir: str) -> None:
        """Rank 0 alone, as the run seeds each step by itself."""
        if self.args.should_save:
            super()._save_rng_state(output_dir)

    def _in_place_folder_of(self, step: int) -> Path:
        return Path(self.args.output_dir) / f"checkpoint-{step}"

    def _in_place_is_saved(self, step: int) -> bool:
        try:
            json.loads((self._in_place_folder_of(step) / _STATE_FILE).read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return False
        return True

    # The end.

    def _finalize_training(self, trial: Any, num_train_samples: Any, start_time: float) -> Any:
        """End the run with all ranks, then do what Trainer does behind its loop."""
        if self._in_place_is_first_entry:
            self._in_place_enter()
        self._in_place_end_run()
        del start_time
        return super()._finalize_training(
            trial, num_train_samples, time.time() - self._in_place_progress.seconds
        )

    def _in_place_end_run(self) -> None:
        """Have the run end where Trainer has ended, which may be before its last step."""
        run = _run()
        while not run.has_ended and self._in_place_draw() is not None:
            if self.state.global_step >= self.state.max_steps and not self._in_place_progress.first:
                raise RuntimeError("the last step was taken back")
            run.stop()
            try:
                self._in_place_begin()
                self._in_place_is_in_step = False  # a step without an update: it informs the others
                run.end_step()
            except BaseException as error:
                if not run.fail_step(error):
                    raise

    def _load_best_model(self) -> None:
        best = self.state.best_global_step
        until_s = time.monotonic() + _SAVED_WAIT_S
        while best in self._in_place_progress.saved and not self._in_place_is_saved(best):
            if time.monotonic() > until_s:  # on the disk of another machine
                break
            time.sleep(0.05)  # a replaced rank 0 saves it once more
        super()._load_best_model()

    @contextlib.contextmanager
    def _in_place_shared_out(self, ranks: int) -> Iterator[None]:
        """Have accelerate see so many processes."""
        state = self.accelerator.state
        was, state.num_processes = state.num_processes, ranks
        try:
            yield
        finally:
            state.num_processes = was


def _run() -> ddp_runner.AttachedRun:
    assert RUN is not None, "in_place() has returned the class itself"
    return RUN


def take_name() -> None:
    """Have ``from transformers import Trainer`` give this one, in a script that ``run --in-place`` starts."""
    transformers.Trainer = transformers.trainer.Trainer = Trainer


Trainer = in_place(_THEIRS)
