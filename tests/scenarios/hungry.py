"""Tasks that break inside a step: memory that does not suffice, parameters that are not used."""

from __future__ import annotations

import gc
import os
import resource
import signal
from pathlib import Path

import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

from tests.scenarios.workload import PacedTask


class HungryTask(PacedTask):
    """From call ``at`` on, ``rank`` lives under a real address-space limit.

    Each sample of a micro-batch needs ``sample_mb``; ``room_mb`` are left to the process. Half of
    eight samples fits with 1.2 GB to spare: the threads of a new generation reserve up to 0.4 GB of
    address space, never used, while those of the old one still end.
    """

    def __init__(  # noqa: PLR0917 - they come by name from the command line
        self, rank=1, at=20, sample_mb=600, room_mb=3600, where="forward", norm="batch", **settings
    ):
        super().__init__(**settings)
        self._hungry = (rank == -1 or os.environ.get("RANK") == str(rank), at, sample_mb, room_mb)
        self._where = where
        self._norm = norm  # batch normalisation needs two samples, layer normalisation one
        self._limited = False
        self._calls = 0

    def build_model(self):
        model = super().build_model()
        if self._norm == "layer":
            model[1] = nn.LayerNorm(32)
        return model

    def loss(self, model, batch):
        loss = super().loss(model, batch)
        self._calls += model.training
        mine, at, sample_mb, room_mb = self._hungry
        if not mine or self._calls <= at or (self._where == "evaluate") == model.training:
            return loss
        if not self._limited:
            self._limited = True
            size = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
            limit = size + room_mb * 2**20
            resource.setrlimit(resource.RLIMIT_AS, (limit, resource.RLIM_INFINITY))
        samples = len(batch[0])
        if self._where == "backward":
            return _NeedsMemoryInBackward.apply(loss, samples * sample_mb)
        scratch = torch.empty(samples * sample_mb * 2**20, dtype=torch.uint8)
        return loss + 0.0 * scratch[:1].float().nan_to_num().sum()


class GreedyTask(PacedTask):
    """From call ``at`` of a process on, ``rank`` uses ``sample_mb`` of memory for each sample."""

    def __init__(self, rank=1, at=8, sample_mb=60, **settings):
        super().__init__(**settings)
        self._is_greedy = os.environ.get("RANK") == str(rank)
        self._at = at
        self._sample_mb = sample_mb
        self._calls = 0

    def loss(self, model, batch):
        self._calls += model.training
        if model.training and self._is_greedy and self._calls > self._at:
            torch.ones(len(batch[0]) * self._sample_mb * 2**20, dtype=torch.uint8)
        return super().loss(model, batch)


class _NeedsMemoryInBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx, loss, size_mb):
        ctx.size_mb = size_mb
        return loss.clone()

    @staticmethod
    def backward(ctx, gradient):
        torch.empty(ctx.size_mb * 2**20, dtype=torch.uint8)
        return gradient, None


class BranchingTask(PacedTask):
    """Its side head is left out of the loss of about every fifth batch, on the ranks named."""

    def __init__(self, ranks="any", **settings):
        super().__init__(**settings)
        self._mine = ranks == "any" or os.environ.get("RANK") in str(ranks).split("+")

    def build_model(self):
        model = super().build_model()
        model.add_module("side", Side())
        return model

    def loss(self, model, batch):
        # Told by the data alone, so that a step that is redone branches alike.
        rare = int(batch[1].double().abs().sum() * 1e4) % 5 == 0
        model.side.skip = model.training and self._mine and rare
        return super().loss(model, batch)


class Side(nn.Module):
    """A head that a step may leave out."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1))
        self.skip = False

    def forward(self, outputs):
        return outputs if self.skip else outputs * self.weight


class DriftingTask(PacedTask):
    """At its call ``at``, one bit flips on ``rank``, as bad memory would flip it.

    That is a bit of a weight, or of what the optimizer remembers of it.
    """

    def __init__(self, rank=1, at=25, part="weights", **settings):
        super().__init__(**settings)
        self._drifts = os.environ.get("RANK") == str(rank)
        self._at = at
        self._part = part
        self._calls = 0

    def loss(self, model, batch):
        self._calls += model.training
        if model.training and self._drifts and self._calls == self._at:
            weight = model[4].weight
            flipped = weight if self._part == "weights" else _momentum_of(weight)
            with torch.no_grad():
                flipped.view(torch.int32)[0, 3] ^= 1 << 20
        return super().loss(model, batch)


def _momentum_of(parameter):
    """What this process's optimizer has learnt of ``parameter``."""
    optimizers = (each for each in gc.get_objects() if isinstance(each, torch.optim.Optimizer))
    return next(each.state[parameter]["exp_avg"] for each in optimizers)


class BrokenBatchesTask(PacedTask):
    """Every batch from call ``at`` on gives no number on ``rank``, for ``count`` calls."""

    def __init__(self, rank=1, at=20, count=1, **settings):
        super().__init__(**settings)
        self._mine = os.environ.get("RANK") == str(rank)
        self._range = range(at, at + count)
        self._calls = 0

    def loss(self, model, batch):
        self._calls += model.training
        broken = model.training and self._mine and self._calls in self._range
        return super().loss(model, batch) * (float("nan") if broken else 1.0)


class ExplodingGradientsTask(PacedTask):
    """From call ``at`` on, the gradient of rank 1 is a million times what it was, the loss as ever."""

    def __init__(self, at=32, **settings):
        super().__init__(**settings)
        self._mine = os.environ.get("RANK") == "1"
        self._at = at
        self._calls = 0

    def loss(self, model, batch):
        loss = super().loss(model, batch)
        self._calls += model.training
        steep = self._mine and model.training and self._calls >= self._at
        return loss + 1e6 * (loss - loss.detach()) if steep else loss


class BrokenGradientsTask(PacedTask):
    """Losses stay finite, gradients do not: of rank 1, of all ranks, and once of rank 0 in passing.

    A gradient that is broken is computed once more by all ranks: that is a call of its own.
    """

    def __init__(self, **settings):
        super().__init__(**settings)
        self._rank = os.environ.get("RANK")
        self._calls = 0

    def loss(self, model, batch):
        loss = super().loss(model, batch)
        if not model.training:
            return loss
        self._calls += 1
        broken = {10: "1", 11: "1", 21: self._rank, 22: self._rank, 33: "0"}
        # The gradient of the root at 0 is infinite, and times 0 no number.
        return loss + (loss * 0.0).sqrt() if broken.get(self._calls) == self._rank else loss


class HalfUpdatesTask(PacedTask):
    """Some updates end, once each, when the first parameter has changed and no other one has.

    ``plan``: ``STEP-RANK-ACTION`` joined by ``+``; the rank may be ``all``, the action kill or raise.
    """

    def __init__(self, plan="", **settings):
        super().__init__(**settings)
        self._plan = [one.split("-") for one in plan.split("+") if one]
        self._is_inside = False

    def build_model(self):
        register_optimizer_step_pre_hook(self._before_update)
        return super().build_model()

    def _before_update(self, optimizer, _arguments, _keywords):
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        step = int(optimizer.state[parameters[0]].get("step", 0))
        rank = os.environ["RANK"]
        for at, ranks, action in self._plan:
            if self._is_inside or step != int(at) or ranks not in ("all", rank):
                continue
            try:
                Path(f"half_{at}_{rank}").touch(exist_ok=False)
            except FileExistsError:
                continue
            self._is_inside = True
            for parameter in parameters[1:]:
                parameter.grad = None
            before = parameters[0].detach().clone()
            optimizer.step()
            assert not torch.equal(before, parameters[0]), "the first one has changed"
            if action == "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            raise RuntimeError("half of an update")
