"""``accelerate.Accelerator``, repaired in place: the loop stays yours, and a step ends at ``optimizer.step()``.

    from ddp_runner.integrations.accelerate import Accelerator  # instead of: from accelerate import Accelerator
    for epoch in accelerator.epochs(3):                         # instead of: range(3)

Without a supervisor (plain ``python``, torchrun) it is Accelerator itself with that one method more. Under ``run``
accelerate sees one process: the share of the data, sums over ranks and who writes are given to it here.
"""

from __future__ import annotations

import contextlib
import inspect
import json
import os
import shutil
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

import accelerate
import torch
import torch.distributed as dist
from accelerate import DistributedType
from accelerate.data_loader import DataLoaderShard, SeedableRandomSampler
from accelerate.state import PartialState
from accelerate.utils import send_to_device
from torch import Tensor, nn
from torch.utils.data import BatchSampler, SequentialSampler

import ddp_runner
from ddp_runner.integrations.accelerate_limits import (
    why_not,
    why_not_loader,
    why_not_made,
    why_not_prepared,
    why_not_version,
)
from ddp_runner.integrations.framework_run import (
    LOCAL_RANK,
    RUN,
    Draws,
    begin_evaluation,
    loss_scaler,
    refuse,
    show_one_process,
)
from ddp_runner.training.own_loop.batches import batch_size_of, have_new_workers

show_one_process()

if TYPE_CHECKING:
    from accelerate import Accelerator as _Base
else:
    _Base = accelerate.Accelerator

# The methods of accelerate's own that are replaced or called, and may be others in its next version.
_ENTERED_BY = (
    "_do_sync",
    "accumulate",
    "backward",
    "gather_for_metrics",
    "prepare_data_loader",
    "prepare_model",
    "prepare_optimizer",
    "save_state",
)
_MARK = "ddp_runner_saved.json"  # in a folder of save_state(): the other files are whole
_SAVED_WAIT_S = 120.0
_ONE_PROCESS = 1


class _Plain(_Base):  # type: ignore[misc]
    """accelerate's own, with two methods that say what a run must know."""

    _stops = False

    def epochs(self, count: int, *, max_steps: int = 0) -> Iterator[int]:
        """Give the numbers of the epochs, of the one in hand first where a rank was replaced or a run resumed.

        ``max_steps``: optimizer steps after which the script's own ``break`` comes, where it has one.
        """
        del max_steps
        for epoch in range(count):
            if self._stops:
                return
            yield epoch

    def stop(self) -> None:
        """Let no further epoch begin, as an early stop decides between two steps; all ranks must do so."""
        self._stops = True


class _StepBatches:
    """Yields the batches of each step in the order of the prepared loader, as a list of the accumulated ones."""

    def __init__(self, loader: Any, accumulate: int) -> None:
        self.dataset = loader.dataset
        base = getattr(loader, "base_dataloader", loader)
        self.collate_fn = getattr(
            base, "collate_fn", None
        )  # the run looks at it, as at the dataset
        self.batch_size = batch_size_of(loader) * accumulate
        self._loader = loader
        self._accumulate = accumulate
        self._epoch = 0
        self._sampled = _sampler_of(loader)
        # Each epoch goes on with the random numbers that the one before it has left.
        self._generator: torch.Generator | None = loader.synchronized_generator
        self._first = None if self._generator is None else self._generator.get_state()

    def __len__(self) -> int:
        return max(1, -(-len(self._loader) // self._accumulate))

    def set_epoch(self, epoch: int) -> None:
        """Called before each pass."""
        self._epoch = epoch

    @property
    def seed(self) -> int:
        """Return the number that the order of samples follows from, alike on all ranks."""
        if isinstance(self._sampled, SeedableRandomSampler):
            return int(self._sampled.initial_seed)
        return 0 if self._generator is None else int(self._generator.initial_seed())

    def __iter__(self) -> Iterator[list[Any]]:
        loader = self._loader
        base = loader.base_dataloader
        have_new_workers(base)
        self._go_to(self._epoch, base)
        loader.set_epoch(self._epoch)
        drawn = iter(base)
        while found := list(islice(drawn, self._accumulate)):
            yield found

    def _go_to(self, epoch: int, base: Any) -> None:
        """Draw what the epochs before have drawn of the generator that the order follows from."""
        if self._generator is None or self._first is None:
            return
        self._generator.set_state(self._first)
        for _ in range(epoch):
            if base.generator is self._generator:  # as a DataLoader does where it begins
                torch.empty((), dtype=torch.int64).random_(generator=self._generator)
            deque(self._sampled, maxlen=0)


class _Loader(DataLoaderShard):  # type: ignore[misc]
    """A prepared loader; the training loader yields the batches of the run's steps."""

    owner: _InPlace

    def __iter__(self) -> Iterator[Any]:
        """Give the batches of the epoch in hand, or evaluate with all samples."""
        owner = self.owner
        if owner.is_trained_on(self):
            return owner.batches_of_epoch(self)
        owner.begin_evaluation(self)
        return iter(super().__iter__())


class _InPlace(_Plain):
    """An Accelerator whose steps are the steps of the run; all other methods are accelerate's."""

    def __init__(self, *args: Any, **named: Any) -> None:
        run = _run()
        refuse(why_not_version(accelerate.__version__, _lacking()))
        given = inspect.signature(accelerate.Accelerator.__init__).bind(self, *args, **named)
        refuse(why_not_made(given.arguments, os.environ))
        _see_ranks(run)
        super().__init__(*args, **named)
        refuse(why_not(self))
        self._net: nn.Module | None = None
        self._trained_on: _Loader | None = None
        self._source: _StepBatches | None = None
        self._given: Iterator[list[Any]] | None = None
        self._batches: list[Any] | None = None  # of the step in hand, which has not begun
        self._draws: Draws | None = None  # as that batch has left them
        self._is_in_step = self._is_in_block = self._is_last = False
        self._micro = 0  # the batch of the step in hand, from 1
        self._loss: Any = 0.0
        self._is_left = False  # the loop over the loader has begun and has not come to its end
        self.has_evaluated = False  # since the newest step
        self._saved: dict[str, Any] = {}  # what save_state() was called with last

    # What is kept beside model, optimizer and schedulers.

    def state_dict(self) -> dict[str, Any]:
        """Return what changes between steps, alike on all ranks."""
        between = {"saved": self._saved, "iteration": self.save_iteration, "stops": self._stops}
        return {"between": json.dumps(between)}

    def load_state_dict(self, given: dict[str, Any]) -> None:
        """Take a state back: of this process where a step is made again, or of another rank."""
        between = json.loads(given["between"])
        self._saved, self._stops = between["saved"], between.get("stops", False)
        self.project_configuration.iteration = between["iteration"]

    # Before the first step.

    def prepare_model(
        self, model: nn.Module, device_placement: Any = None, evaluation_mode: bool = False
    ) -> Any:
        """Wrap the model as the run does, behind what accelerate does with it."""
        is_known = model is self._net
        prepared = super().prepare_model(model, device_placement, evaluation_mode)
        if evaluation_mode or is_known:
            return prepared
        if self._net is not None:
            refuse(why_not_prepared({"model": 2}))
        options = self.ddp_handler.to_kwargs() if self.ddp_handler else {}
        self._net = _run().ddp(prepared, **options)
        return self._net

    def prepare_data_loader(self, data_loader: Any, *args: Any, **named: Any) -> Any:
        """Give this rank its share of the first loader, which is trained on, and all samples of the others."""
        if isinstance(getattr(data_loader, "owner", None), _InPlace):
            return data_loader
        is_first = self._trained_on is None
        with self._seen_as(_run().world_size if is_first else _ONE_PROCESS):
            prepared = super().prepare_data_loader(data_loader, *args, **named)
        loader = _Loader.__new__(_Loader)
        loader.__dict__.update(vars(prepared), owner=self)
        self._dataloaders[-1] = loader
        if is_first:
            alike = (SeedableRandomSampler, SequentialSampler)
            if _run().world_size > 1:
                refuse(why_not_loader(loader, _sampler_of(loader), samplers=alike))
            self._trained_on = loader
            self._source = _StepBatches(loader, self.gradient_accumulation_steps)
        return loader

    def prepare_optimizer(self, optimizer: Any, device_placement: Any = None) -> Any:
        """Have a step outside of ``accumulate()`` end where the optimizer has stepped."""
        prepared = super().prepare_optimizer(optimizer, device_placement)
        prepared.step = self._ending(prepared.step)
        return prepared

    def epochs(self, count: int, *, max_steps: int = 0) -> Iterator[int]:
        """Begin the run, and give the numbers of its epochs from the one in hand."""
        run = _run()
        self._begin(count, max_steps)
        assert self._source is not None, "it was prepared"
        per_epoch, is_first = len(self._source), True
        while self._draw() is not None:
            if is_first:
                self._save_again()
            is_first, epoch = False, run.step_number // per_epoch
            if self._stops or (self._is_left and epoch == count - 1):
                self._end_run()
                return
            if self._is_left:
                expected = "left the loop over the loader in an epoch that is not the last; accelerator.stop() ends a run"
                refuse(("accelerator.epochs()", "", expected))
            yield epoch
        if is_first:
            self._save_again()

    def _begin(self, count: int, max_steps: int) -> None:
        """Keep what was prepared, and give the run the batches of its steps."""
        run = _run()
        prepared = {
            "model": int(self._net is not None),
            "optimizer": len(self._optimizers),
            "DataLoader": int(self._source is not None),
        }
        refuse(why_not_prepared(prepared))
        assert self._source is not None, "counted"
        run.keep(model=self._net, optimizer=self._optimizers[0].optimizer, accelerator=self)
        run.keep(**loss_scaler(self.scaler))
        for number, scheduler in enumerate(self._schedulers):
            run.keep(**{f"scheduler_{number}": scheduler})
        for number, custom in enumerate(self._custom_objects):
            run.keep(**{f"custom_{number}": custom})
        steps = count * len(self._source)
        self._given = run.steps(self._source, max_steps=min(steps, max_steps or steps))

    # The bounds of a step.

    def is_trained_on(self, loader: _Loader) -> bool:
        """Return True while the loader's batches are those of steps. Raises BadInputError before epochs()."""
        if loader is not self._trained_on or _run().has_ended:
            return False
        if self._given is None:
            expected = "`for epoch in accelerator.epochs(N):` comes before the loop over the loader"
            refuse(("accelerator.epochs()", "", expected))
        return True

    def batches_of_epoch(self, loader: _Loader) -> Iterator[Any]:
        """Give the batches of the steps that are left of this epoch; those of a step that is made again once more."""
        run, source = _run(), self._source
        assert source is not None, "it is trained on"
        loader.begin()
        self._is_left, epoch = True, None
        is_drawn = self._batches is not None  # by epochs()
        try:
            while (batches := self._draw()) is not None:
                if epoch is None:
                    epoch = run.step_number // len(source)
                if run.step_number // len(source) != epoch:  # of an older state, on all ranks
                    break
                is_end = (run.step_number + 1) % len(source) == 0
                self._begin_step(is_drawn=is_drawn)
                is_drawn = False
                for self._micro, batch in enumerate(batches, start=1):
                    self._is_last = self._micro == len(batches)
                    loader.end_of_dataloader = is_end and self._is_last
                    yield self._placed(loader, batch)
                    if not self._is_in_step:
                        break
                if self._is_in_step:
                    self._end_step()
                if is_end and (run.step_number // len(source)) != epoch:
                    break
            self._is_left = False
        finally:
            loader.end()

    def begin_evaluation(self, loader: _Loader) -> None:
        """All samples of a loader come next, on each rank."""
        self.has_evaluated = True
        if self._source is not None and self._given is not None and not self._is_in_step:
            sampler, step = _sampler_of(loader), _run().step_number
            begin_evaluation(loader, sampler, seed=self._source.seed, step=step)

    def _placed(self, loader: Any, batch: Any) -> Any:
        if loader.device is None:
            return batch
        return send_to_device(batch, loader.device, non_blocking=loader._non_blocking)  # noqa: SLF001 - as its own loop

    def _draw(self) -> list[Any] | None:
        """Give the batches of the step in hand; None once training has ended."""
        if self._batches is None:
            assert self._given is not None, "the run has begun"
            self._batches = next(self._given, None)
            self._draws = Draws(_run().device) if self._batches is not None else None
        return self._batches

    def _begin_step(self, *, is_drawn: bool = False) -> None:
        assert self._draws is not None, "of the batch"
        self._draws.put_back()
        self._batches = self._draws = None
        # A batch that epochs() has drawn came before the program's code at the start of an epoch, such as net.train(),
        # which does not run again if this step is repeated.
        _run().begin_step(keeps=is_drawn)
        self._is_in_step, self.has_evaluated, self._loss = True, False, 0.0
        self.gradient_state._set_sync_gradients(True)  # noqa: SLF001 - accumulate() says more
        if _run().step_number == 0:
            self._compare_orders()

    def _compare_orders(self) -> None:
        assert self._source is not None, "there is a step"
        if not dist.is_initialized() or dist.get_world_size() == 1:
            return
        seed = self._source.seed
        found = torch.tensor([seed, -seed], dtype=torch.int64, device=_run().device)
        dist.all_reduce(found, dist.ReduceOp.MAX)
        if int(found[0]) != -int(found[1]):
            expected = "shuffles in another order on each rank: seed all ranks alike before it (set_seed without device_specific)"
            refuse(("prepare()", "", expected))

    def _end_step(self) -> None:
        try:
            _run().end_step()
        except ddp_runner.RepeatStep:
            self._take_back()
        self._is_in_step = False

    def _fail_step(self, error: BaseException) -> bool:
        """End the step by an error; True where it is made again."""
        if not _run().fail_step(error):
            return False
        self._take_back()
        return True

    def _take_back(self) -> None:
        """Have the loop see a batch without an update: what it counts by ``sync_gradients`` it counts once."""
        self._is_in_step = False
        self.gradient_state._set_sync_gradients(False)  # noqa: SLF001 - as accumulate() does

    def _do_sync(self) -> None:
        """Sum over ranks at the last batch of a step."""
        if not self._is_in_step:
            super()._do_sync()
            return
        self.step = 0 if self._is_last else self._micro
        self.gradient_state._set_sync_gradients(self._is_last)  # noqa: SLF001 - as accelerate's own

    @contextlib.contextmanager
    def accumulate(self, *models: nn.Module) -> Iterator[None]:
        """Take a batch of the step in hand; the step ends with the block of its last one."""
        if not self._is_in_step:
            with super().accumulate(*models):
                yield
            return
        self._is_in_block = True
        try:
            with super().accumulate(*models):
                yield
        except BaseException as error:
            if not self._fail_step(error):
                raise
            return
        finally:
            self._is_in_block = False
        if self._is_last:
            self._end_step()

    def _ending(self, step: Callable[..., None]) -> Callable[..., None]:
        """``step`` of the prepared optimizer, with which a step ends that is in no ``accumulate()``."""

        def stepped(closure: Any = None) -> None:
            if not self._is_in_step or self._is_in_block:
                step(closure)
                return
            if self.gradient_accumulation_steps > 1:
                expected = "`with accelerator.accumulate(model):` is missing around a batch"
                refuse(("gradient_accumulation_steps", self.gradient_accumulation_steps, expected))
            try:
                step(closure)
            except BaseException as error:
                if not self._fail_step(error):
                    raise
            else:
                self._end_step()

        return stepped

    def backward(self, loss: Any, **named: Any) -> None:
        """Note the loss for the run's own log, and go backward."""
        if not self._is_in_step:
            expected = "comes in a loop over the first prepared loader, and before optimizer.step()"
            refuse(("accelerator.backward()", "", expected))
        self._loss = self._loss + loss.detach() / self.gradient_accumulation_steps
        if self._is_last:  # the first loss that is noted in a step is the one that is logged
            _run().note(loss=self._loss)
        try:
            super().backward(loss, **named)
        except Exception as error:
            if self._is_in_block or not self._fail_step(error):
                raise

    # Among ranks in a step, alone between steps.

    @contextlib.contextmanager
    def _among_ranks(self, what: str = "") -> Iterator[None]:
        """Have accelerate see the other ranks, where all of them are in the same step."""
        state, run = PartialState(), _run()
        if not self._is_in_step or run.world_size == 1:
            if what and run.world_size > 1 and not self.has_evaluated and not run.has_ended:
                expected = "between two steps gives the values of this rank: call it in the step, before optimizer.step()"
                refuse((f"accelerator.{what}()", "", expected))
            yield
            return
        is_cpu = run.device.type == "cpu"
        before = state.distributed_type, state.backend, state.num_processes
        state.distributed_type = DistributedType.MULTI_CPU if is_cpu else DistributedType.MULTI_GPU
        state.backend, state.num_processes = dist.get_backend(), dist.get_world_size()
        try:
            yield
        finally:
            state.distributed_type, state.backend, state.num_processes = before

    def gather(self, tensor: Any) -> Any:
        """Gather over ranks in a step; between steps each rank has evaluated all samples."""
        gather = super().gather
        with self._among_ranks("gather"):
            return self._received(tensor, lambda: gather(tensor))

    def gather_for_metrics(self, input_data: Any, use_gather_object: bool = False) -> Any:
        """Gather over ranks in a step, without what was added to the last batch."""
        with self._among_ranks("gather_for_metrics"):
            return super().gather_for_metrics(input_data, use_gather_object)

    def reduce(self, tensor: Any, reduction: str = "sum", scale: float = 1.0) -> Any:
        """Sum over ranks in a step; between steps each rank has evaluated all samples."""
        reduce = super().reduce
        with self._among_ranks("reduce"):
            return self._received(tensor, lambda: reduce(tensor, reduction, scale))

    def _received(self, given: Any, ask: Callable[[], Any]) -> Any:
        """Return ``ask()``, of one tensor in a step as a drill gets it too."""
        is_one = self._is_in_step and isinstance(given, Tensor)
        return _run().from_ranks(ask) if is_one else ask()

    def pad_across_processes(self, tensor: Any, *args: Any, **named: Any) -> Any:
        """Pad to the longest of all ranks in a step."""
        with self._among_ranks():
            return super().pad_across_processes(tensor, *args, **named)

    def wait_for_everyone(self) -> None:
        """Wait for the other ranks in a step; between steps do nothing, as a lost one would never come."""
        if self._is_in_step and _run().world_size > 1:
            dist.barrier()

    @contextlib.contextmanager
    def _seen_as(self, ranks: int) -> Iterator[None]:
        state = self.state
        before = state.num_processes, state.process_index
        state.num_processes, state.process_index = ranks, before[1] if ranks > 1 else 0
        try:
            yield
        finally:
            state.num_processes, state.process_index = before

    def no_sync(self, model: nn.Module) -> AbstractContextManager[None]:
        """Sum no gradients in the block."""
        context = getattr(model, "no_sync", contextlib.nullcontext)
        return context()

    def unwrap_model(self, model: nn.Module, *args: Any, **named: Any) -> Any:
        """Give the bare model."""
        bare = self._net.module if self._net is not None and model is self._net else model
        return super().unwrap_model(bare, *args, **named)

    # Saving and loading.

    def save_state(
        self, output_dir: str | os.PathLike[str] | None = None, *args: Any, **named: Any
    ) -> Any:
        """Save as accelerate does, on rank 0; its last file says that the others are whole."""
        if self._is_in_step:
            expected = "comes between two steps: behind the block, or behind optimizer.step()"
            refuse(("accelerator.save_state()", "", expected))
        run = _run()
        given = None if output_dir is None else str(output_dir)
        folder, iteration = self._folder_of(given), self.save_iteration
        self._saved = {
            "step": run.step_number,
            "given": given,
            "folder": str(folder),
            "iteration": iteration,
        }
        if not self.is_main_process:
            self.project_configuration.iteration += 1
            return folder
        (folder / _MARK).unlink(missing_ok=True)
        saved = super().save_state(given, *args, **named)
        (folder / _MARK).write_text(json.dumps({"step": run.step_number}), encoding="utf-8")
        return saved

    def _folder_of(self, output_dir: str | None) -> Path:
        if self.project_configuration.automatic_checkpoint_naming:
            return Path(self.project_dir) / "checkpoints" / f"checkpoint_{self.save_iteration}"
        if output_dir is None:
            refuse(("accelerator.save_state()", "", "needs output_dir, or automatic names"))
        return Path(str(output_dir))

    def _is_saved(self) -> bool:
        try:
            mark = json.loads((Path(self._saved["folder"]) / _MARK).read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return False
        return bool(mark["step"] == self._saved["step"])

    def _save_again(self) -> None:
        """Save once more what this rank was saving when its process was lost."""
        if not self.is_main_process or self._saved.get("step") != _run().step_number:
            return
        if self._is_saved():
            return
        if self.project_configuration.automatic_checkpoint_naming:
            shutil.rmtree(self._saved["folder"], ignore_errors=True)
        self.project_configuration.iteration = self._saved["iteration"]
        self.save_state(self._saved["given"])

    def load_state(
        self, input_dir: str | os.PathLike[str] | None = None, *args: Any, **named: Any
    ) -> None:
        """Load as accelerate does, once rank 0 has written all of it."""
        if self._is_in_step:
            refuse(("accelerator.load_state()", "", "comes between two steps"))
        until_s = time.monotonic() + _SAVED_WAIT_S
        while self._saved and not self._is_saved() and time.monotonic() < until_s:
            time.sleep(0.05)  # a replaced rank 0 saves it once more
        super().load_state(input_dir, *args, **named)

    def skip_first_batches(self, dataloader: Any, num_batches: int = 0) -> Any:
        """Refuse it for the loader that is trained on, of which the run knows where it stands."""
        if dataloader is self._trained_on:
            expected = "the run goes on where it was: give `run` the same command, or --resume"
            refuse(("accelerator.skip_first_batches()", num_batches, expected))
        return super().skip_first_batches(dataloader, num_batches)

    def check_trigger(self) -> bool:
        """Look at the triggers of all ranks, in a step."""
        if not self._is_in_step:
            expected = "asks the other ranks: call it in the step, before optimizer.step()"
            refuse(("accelerator.check_trigger()", "", expected))
        return bool(super().check_trigger())

    # The end.

    def _end_run(self) -> None:
        """Have the run end where the loop has ended, which may be before its last step."""
        run = _run()
        while not run.has_ended and self._draw() is not None:
            run.stop()
            self._begin_step()
            self._end_step()  # a step without an update: it informs the others


def _run() -> ddp_runner.AttachedRun:
    assert RUN is not None, "Accelerator is accelerate's own"
    return RUN


def _sampler_of(loader: Any) -> Any:
    """Return what gives the numbers of samples, behind what shares them out in batches."""
    shared = loader.sampler if isinstance(loader.sampler, BatchSampler) else loader.batch_sampler
    return getattr(getattr(shared, "batch_sampler", shared), "sampler", None)


def _lacking() -> list[str]:
    """Return what the installed Accelerator lacks of what is entered here."""
    return [name for name in _ENTERED_BY if not callable(getattr(_Base, name, None))]


def _see_ranks(run: ddp_runner.AttachedRun) -> None:
    """Give accelerate's state the rank and the world size, without a second process group."""
    state = PartialState(cpu=run.device.type == "cpu")
    state.device = run.device
    state.num_processes, state.process_index = run.world_size, run.rank
    state.local_process_index = LOCAL_RANK
    # Who writes, and who is left out, is asked by this alone.
    PartialState.use_distributed = property(lambda self: self.num_processes > 1)


Accelerator = _Plain if RUN is None else _InPlace
