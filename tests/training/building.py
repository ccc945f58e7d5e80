"""A small workload that shows every kind of state, built the same way on every rank of a test."""

from __future__ import annotations

import torch
from torch import nn

from ddp_runner.core.settings import DdpSettings, OptimSettings
from ddp_runner.data.loader import MicroBatch
from ddp_runner.data.quarantine import Quarantine
from ddp_runner.kernel.replica.loss_module import PLAIN_FORM
from ddp_runner.kernel.replica.replica import Replica
from ddp_runner.kernel.wire.board import SLOT_BYTES, Board
from ddp_runner.training.components.ema import Ema
from ddp_runner.training.components.loss_monitor import LossMonitor
from ddp_runner.training.components.loss_spikes import LossSpikes
from ddp_runner.training.components.optimizer import build_optimizer
from ddp_runner.training.components.precision import Precision
from ddp_runner.training.components.tuning import Tuning
from ddp_runner.training.state import DataState, Trained, TrainState, Watches
from ddp_runner.training.step import Stepper, StepRules

CPU = torch.device("cpu")
FEATURES = 6
WIDTH = 700  # the middle layer alone is 1.9 MB: several buckets at bucket_cap_mb=1
TOTAL_STEPS = 20
MICRO_BATCH = 4


def build_model(width=WIDTH):
    """Batch statistics, dropout and, as wide as that, more than one DDP bucket."""
    torch.manual_seed(11)
    return nn.Sequential(
        nn.Linear(FEATURES, width),
        nn.BatchNorm1d(width),
        nn.ReLU(),
        nn.Linear(width, width),
        nn.Dropout(0.2),
        nn.Linear(width, 1),
    )


def loss_of(model, batch):
    """Mean square error, plus what the batch carries to poison it."""
    inputs, targets, poison = batch
    return nn.functional.mse_loss(model(inputs), targets) + poison


def optim_settings(**changes):
    """A schedule that moves at every step, so that counters show in the weights."""
    return OptimSettings(
        **{"learning_rate": 0.01, "warmup_steps": 2, "schedule": "cosine", **changes}
    )


def build_state(*, optim=None, ema=True, model=None):
    """A state at step 0."""
    optim = optim or optim_settings()
    model = model or build_model()
    state = TrainState(
        Trained(
            model=model,
            optimizer=build_optimizer(model, optim, device=CPU),
            precision=Precision("fp32", device=CPU),
            ema=Ema(model, 0.9) if ema else None,
        ),
        watches=Watches(
            monitor=LossMonitor(target_loss=None, window=3, max_errors_per_epoch=3),
            loss_spikes=LossSpikes(window=5, loss_factor=10.0, grad_factor=100.0, warmup_steps=1),
        ),
        tuning=Tuning(micro_batch_size=8, evaluation_batch_size=8, find_unused_parameters=True),
        data=DataState(quarantine=Quarantine(seed=0, dataset_size=64, bad_max=0)),
    )
    state.committed_step = 0
    return state


def make_slot():
    """A board of one slot."""
    return Board(memoryview(bytearray(SLOT_BYTES)), 1).slot(0)


def build_replica(state, group, *, slot=None, loss=loss_of, form=PLAIN_FORM, **ddp):
    """The state's model, wrapped."""
    return Replica(
        state.model,
        loss,
        group=group,
        settings=DdpSettings(bucket_cap_mb=1, **ddp),
        slot=slot or make_slot(),
        form=form,
    )


def build_stepper(
    state, replica, *, rank, world_size, micro_steps=1, optim=None, slot=None, tokens=None
):
    """Steps over ``MICRO_BATCH * micro_steps`` samples per rank."""
    rules = StepRules(
        seed=7,
        rank=rank,
        global_batch=MICRO_BATCH * micro_steps * world_size,
        total_steps=TOTAL_STEPS,
        optim=optim or optim_settings(),
        device=CPU,
        tokens_per_sample=tokens,
    )
    return Stepper(state, replica, rules=rules, slot=slot or make_slot())


def micro_batches(step, rank, *, micro_steps=1, poison=0.0):
    """What ``rank`` takes at ``step``: a pure function of its arguments."""
    made = []
    for micro_step in range(micro_steps):
        generator = torch.Generator().manual_seed(step * 1000 + rank * 10 + micro_step)
        inputs = torch.randn(MICRO_BATCH, FEATURES, generator=generator)
        targets = inputs.sum(dim=1, keepdim=True)
        batch = (inputs, targets, torch.tensor(poison))
        made.append(MicroBatch(indices=tuple(range(MICRO_BATCH)), batch=batch))
    return made


def bits_of(state):
    """What a captured state holds of the model's own, as values that are equal exactly when every bit is."""
    captured = state.capture()
    captured.pop("side", None)
    return as_plain(captured)


def as_plain(value):
    """Tensors as type, shape and bytes; containers as they are."""
    if isinstance(value, torch.Tensor):
        flat = value.detach().contiguous().reshape(-1)
        raw = flat.view(torch.uint8).numpy().tobytes() if flat.numel() else b""
        return (str(value.dtype), tuple(value.shape), raw)
    if isinstance(value, dict):
        return {key: as_plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(as_plain(item) for item in value)
    return value
