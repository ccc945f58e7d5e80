"""Lightning's Trainer, repaired in place: a strategy that makes its steps the run's.

    from ddp_runner.integrations.lightning import InPlaceDDP

    trainer = Trainer(strategy=InPlaceDDP(), ...)

Without a supervisor (plain ``python``, torchrun) it is DDPStrategy itself.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import lightning.pytorch
import torch
from lightning.fabric.utilities.seed import reset_seed
from lightning.pytorch.plugins.environments import ClusterEnvironment
from lightning.pytorch.strategies import DDPStrategy
from lightning.pytorch.trainer.states import TrainerFn
from torch import Tensor

from ddp_runner.integrations.framework_run import RUN, refuse
from ddp_runner.integrations.lightning_limits import (
    OPTIONS,
    why_not,
    why_not_options,
    why_not_version,
)
from ddp_runner.integrations.lightning_private import Steps, lacking

if TYPE_CHECKING:
    from ddp_runner import AttachedRun

_SAVED_WAIT_S = 120.0


class _OfRun(ClusterEnvironment):  # type: ignore[misc]
    """The ranks as the run has started them."""

    def __init__(self, run: AttachedRun) -> None:
        super().__init__()
        self._run = run

    creates_processes_externally = True
    main_address = "127.0.0.1"
    main_port = 0  # the run makes the process group

    @staticmethod
    def detect() -> bool:
        """Return whether a run has started this process."""
        return RUN is not None

    def world_size(self) -> int:
        """Return the number of ranks."""
        return self._run.world_size

    def set_world_size(self, size: int) -> None:
        """Do nothing: the run knows it."""

    def global_rank(self) -> int:
        """Return this process's rank."""
        return self._run.rank

    def set_global_rank(self, rank: int) -> None:
        """Do nothing: the run knows it."""

    def local_rank(self) -> int:
        """Return the rank among those of this machine."""
        return int(os.environ.get("LOCAL_RANK", self._run.rank))

    def node_rank(self) -> int:
        """Return the number of this machine."""
        return int(os.environ.get("GROUP_RANK", "0"))


class _InPlace(DDPStrategy):  # type: ignore[misc]
    """A DDPStrategy whose lost ranks are replaced one by one, while the others keep running."""

    strategy_name = "in_place_ddp"

    def __init__(self, **options: Any) -> None:
        run = _run()
        refuse(why_not_version(lightning.pytorch.__version__, lacking()))
        refuse(why_not_options(options))
        count = int(os.environ.get("LOCAL_WORLD_SIZE", run.world_size))
        super().__init__(
            parallel_devices=[run.device] * count, cluster_environment=_OfRun(run), **options
        )
        self._options = {k: v for k, v in options.items() if k in OPTIONS}
        self._steps: Steps | None = None

    @property
    def root_device(self) -> torch.device:
        """The device that the run has given this rank."""
        return _run().device

    @property
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        """Give this rank its share, and all samples where it evaluates after training."""
        run, module = _run(), self.lightning_module
        if module is not None and module.trainer.state.fn != TrainerFn.FITTING:
            return {"num_replicas": 1, "rank": 0}
        return {"num_replicas": run.world_size, "rank": run.rank}

    def _configure_launcher(self) -> None:
        """Do nothing: the ranks are there."""

    def setup_distributed(self) -> None:
        """Set up as DDPStrategy does, without a process group, which the run makes."""
        reset_seed()
        self.set_world_ranks()

    def _setup_model(self, model: Any) -> Any:
        """Wrap the model as DistributedDataParallel would."""
        if self.lightning_module.trainer.training:
            return _run().ddp(model, **self._options)
        return model

    def setup(self, trainer: Any) -> None:
        """Set up, and take over the loops that train."""
        if not trainer.training:
            super(DDPStrategy, self).setup(trainer)
            return
        super().setup(trainer)
        refuse(why_not(trainer))
        self._steps = Steps(_run(), trainer)

    def _register_ddp_hooks(self) -> None:
        """Do nothing: hooks of DDP's communication are refused."""

    @contextlib.contextmanager
    def block_backward_sync(self) -> Iterator[None]:
        """Add to this rank's own gradients only."""
        with self.model.no_sync():
            yield

    # Within a step.

    def pre_backward(self, closure_loss: Tensor) -> None:
        """Note the loss."""
        if self._steps is not None:
            self._steps.note(closure_loss)

    def optimizer_step(
        self, optimizer: Any, closure: Callable[[], Any], model: Any = None, **named: Any
    ) -> Any:
        """Compute first, then update: between the two the ranks agree."""
        steps = self._steps
        assert steps is not None, "the strategy was set up"
        module, plugin = model or self.lightning_module, self.precision_plugin
        scaler = getattr(plugin, "scaler", None)  # of 16-mixed
        unscales_itself = getattr(optimizer, "_step_supports_amp_scaling", False)  # a fused one
        with torch.enable_grad():
            found = closure()
            if scaler is not None and found is not None and not unscales_itself:
                scaler.unscale_(optimizer)
            plugin._after_closure(module, optimizer)  # noqa: SLF001 - as its optimizer_step() does
        steps.before_update()
        if scaler is None:
            optimizer.step(**named)
        elif found is not None:  # else there was no backward
            scaler.step(optimizer, **named)
            scaler.update()
        steps.after_update()
        return found

    def barrier(self, *args: Any, **named: Any) -> None:
        """Wait within a step only."""
        if self._is_in_body:
            super().barrier(*args, **named)

    def broadcast(self, obj: Any, src: int = 0) -> Any:
        """Broadcast within a step; between two each rank has its own, which is alike."""
        return super().broadcast(obj, src) if self._is_in_body else obj

    def reduce(self, tensor: Any, *args: Any, **named: Any) -> Any:
        """Reduce over ranks within a step only."""
        if not self._is_in_body or not isinstance(tensor, Tensor):
            return tensor
        reduce = super().reduce
        return _run().from_ranks(lambda: reduce(tensor, *args, **named))

    def all_gather(self, tensor: Tensor, *args: Any, **named: Any) -> Tensor:
        """Gather within a step; between two this rank's value alone."""
        if not self._is_in_body:
            return tensor
        gather = super().all_gather
        return _run().from_ranks(lambda: gather(tensor, *args, **named))

    def reduce_boolean_decision(self, decision: bool, all: bool = True) -> bool:  # noqa: A002 - Lightning's name
        """Decide with all ranks within a step; between two they decide alike."""
        if self._is_in_body:
            return bool(super().reduce_boolean_decision(decision, all))
        return bool(decision)

    @property
    def _is_in_body(self) -> bool:
        return self._steps is not None and self._steps.in_body

    # Files.

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, **named: Any) -> None:
        """Save on rank 0; the others know of it."""
        if self._steps is not None:
            self._steps.saves(checkpoint, filepath)
        super().save_checkpoint(checkpoint, filepath, **named)

    def remove_checkpoint(self, filepath: Any) -> None:
        """Remove on rank 0; the others know of it."""
        if self._steps is not None:
            self._steps.removes(filepath)
        super().remove_checkpoint(filepath)

    def load_checkpoint(self, checkpoint_path: Any, *args: Any, **named: Any) -> Any:
        """Load, once rank 0 has written it."""
        until_s = time.monotonic() + _SAVED_WAIT_S
        while not self.is_global_zero and not Path(checkpoint_path).exists():
            if time.monotonic() > until_s:
                break
            time.sleep(0.05)
        return super().load_checkpoint(checkpoint_path, *args, **named)

    def teardown(self) -> None:
        """Unwrap the model."""
        self.model = self.lightning_module
        self._steps = None
        super().teardown()


def _run() -> AttachedRun:
    assert RUN is not None, "InPlaceDDP is DDPStrategy itself"
    return RUN


InPlaceDDP: type[DDPStrategy] = DDPStrategy if RUN is None else _InPlace
