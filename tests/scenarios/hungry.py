"""Tasks that break inside a step: memory that does not suffice, parameters that are not used."""

from __future__ import annotations

import gc
import mmap
import os
import resource
import signal
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

from ddp_runner.checkpoint import catalog, store
from tests.scenarios.workload import Calls, PacedTask

LIMITED = "limited"  # in the folder where the run was started: its memory is, from now on


def limit_address_space(room_mb):
    """From here on this process gets so much more, and no byte beyond."""
    size = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    limit = size + room_mb * 2**20
    resource.setrlimit(resource.RLIMIT_AS, (limit, resource.RLIM_INFINITY))


def meet(name):
    """Return once every rank has come here: who fails first makes the others leave, wherever they are."""
    Path(f"{name}_{os.environ['RANK']}").touch()
    while len(list(Path().glob(f"{name}_*"))) < int(os.environ["WORLD_SIZE"]):
        time.sleep(0.005)


class HungryTask(PacedTask):
    """From call ``at`` on, ``rank`` lives under a real address-space limit.

    Each sample of a micro-batch needs ``sample_mb``; ``room_mb`` are left to the process. Half of
    eight samples fits with 1.2 GB to spare: the threads of a new generation reserve up to 0.4 GB of
    address space, never used, while those of the old one still end. Where it is ``python``, a
    bytes object needs it in forward, which Python refuses with an error that has no text. ``room_mb=0``:
    there is no limit.
    """

    def __init__(  # noqa: PLR0917 - they come by name from the command line
        self, rank=1, at=20, sample_mb=600, room_mb=3600, where="forward", norm="batch", **settings
    ):
        super().__init__(**settings)
        self._hungry = (rank == -1 or os.environ.get("RANK") == str(rank), at, sample_mb, room_mb)
        self._where = where
        self._norm = norm  # batch normalisation needs two samples, layer normalisation one
        self._calls = Calls()

    def build_model(self):
        model = super().build_model()
        if self._norm == "layer":
            model[1] = nn.LayerNorm(32)
        return model

    def loss(self, model, batch):
        loss = super().loss(model, batch)
        self._calls.more(model.training)
        mine, at, sample_mb, room_mb = self._hungry
        if not mine or self._calls.count <= at or (self._where == "evaluate") == model.training:
            return loss
        if room_mb and not self._calls.limited:
            self._calls.limited = True
            limit_address_space(room_mb)
        samples = len(batch[0])
        if self._where == "python":
            bytes(samples * sample_mb * 2**20)  # never touched, as by torch.empty
            return loss
        if self._where == "backward":
            return _NeedsMemoryInBackward.apply(loss, samples * sample_mb)
        scratch = torch.empty(samples * sample_mb * 2**20, dtype=torch.uint8)
        return loss + 0.0 * scratch[:1].float().nan_to_num().sum()


class SmoothTask(PacedTask):
    """No batch statistics, no dropout: however a batch is split, the numbers are the same but for rounding."""

    def build_model(self):
        return nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 1))


class RefusedInOptimizerTask(SmoothTask):
    """In its first update, ``rank`` gets memory for a part of what AdamW keeps; its successor gets all.

    A file ``half_made_RANK`` then reports for how many of the 22 tensors.
    """

    def __init__(self, rank=1, **settings):
        super().__init__(**settings)
        self._mine = os.environ.get("RANK") == str(rank)
        self._is_inside = False

    def build_model(self):
        if self._mine:
            register_optimizer_step_pre_hook(self._before_update)
        middle = [part for _ in range(8) for part in (nn.Linear(1024, 1024), nn.Tanh())]
        return nn.Sequential(nn.Linear(8, 1024), nn.Tanh(), *middle, nn.Linear(1024, 1))

    def _before_update(self, optimizer, _arguments, _keywords):
        reported = Path(f"half_made_{os.environ['RANK']}")
        if self._is_inside or reported.exists():
            return
        self._is_inside = True
        limit_address_space(24)
        filled = _everything_that_is_left()
        del filled[-6:]  # of the 16 that the large weights need
        try:
            optimizer.step()
        except (RuntimeError, MemoryError):  # of torch; of Python, for something small beside it
            resource.setrlimit(resource.RLIMIT_AS, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
            reported.write_text(str(sum("exp_avg_sq" in kept for kept in optimizer.state.values())))
            raise
        raise AssertionError("memory was enough for the whole update")


def _everything_that_is_left():
    """Tensors of 4 MB until no more is given, also of what this process had freed and kept."""
    filled = []
    try:
        while True:
            filled.append(torch.empty(2**20))
    except RuntimeError:
        return filled


class GreedyTask(SmoothTask):
    """From call ``at`` of a process on, ``rank`` uses ``sample_mb`` of memory for each sample.

    ``evaluates``: in evaluations instead, from the first one on. It waits for the file ``LIMITED``.
    """

    def __init__(self, rank=1, at=8, sample_mb=60, evaluates=False, **settings):
        super().__init__(**settings)
        self._is_greedy = os.environ.get("RANK") == str(rank)
        self._at = 0 if evaluates else at
        self._evaluates = evaluates
        self._sample_mb = sample_mb
        self._calls = Calls()

    def loss(self, model, batch):
        self._calls.more(model.training)
        mine = self._is_greedy and model.training is not self._evaluates
        if mine and self._calls.count > self._at:
            while not Path(LIMITED).exists():
                time.sleep(0.01)
            torch.ones(len(batch[0]) * self._sample_mb * 2**20, dtype=torch.uint8)
        return super().loss(model, batch)


class NeedsMemoryToLoadTask(PacedTask):
    """Rank 1 is refused what it asks for once, while it loads its fortieth sample."""

    def build_datasets(self):
        datasets = super().build_datasets()
        return replace(datasets, train=_NeedsMemoryOnce(datasets.train))


class _NeedsMemoryOnce(torch.utils.data.Dataset):
    def __init__(self, samples):
        self._samples = samples
        self._loaded = mmap.mmap(-1, 1)  # shared with the workers

    def __len__(self):
        return len(self._samples)

    def __getitem__(self, index):
        self._loaded[0] = min(255, self._loaded[0] + 1)
        if os.environ.get("RANK") == "1" and self._loaded[0] == 40:
            np.empty(2**62, dtype=np.uint8)
        return self._samples[index]


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
        # Decided by the data alone, so that a step that is redone branches alike.
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
        self._calls = Calls()

    def loss(self, model, batch):
        self._calls.more(model.training)
        if model.training and self._drifts and self._calls.count == self._at:
            weight = model[4].weight
            flipped = weight if self._part == "weights" else _momentum_of(weight)
            with torch.no_grad():
                flipped.view(torch.int32)[0, 3] ^= 1 << 20
        return super().loss(model, batch)


class _Looked(nn.Sequential):
    """Lets its task know when somebody looks at its weights."""

    on_look = staticmethod(lambda model: None)

    def state_dict(self, *args, **options):
        self.on_look(self)
        return super().state_dict(*args, **options)


class FlippingTask(PacedTask):
    """On ``rank``, one bit of a weight flips between step ``at`` and the next, as it is looked at.

    That is when it is copied or hashed to be saved: no gradient has seen it yet.
    """

    def __init__(self, rank=1, at=10, **settings):
        super().__init__(**settings)
        self._at = at if os.environ.get("RANK") == str(rank) else -1
        self._calls = Calls()

    def build_model(self):
        model = _Looked(*super().build_model())
        model.on_look = self._flip_once
        return model

    def _flip_once(self, model):
        if self._calls.count == self._at:
            self._at = -1
            with torch.no_grad():
                model[4].weight.view(torch.int32)[0, 3] ^= 1 << 20

    def loss(self, model, batch):
        self._calls.more(model.training)
        return super().loss(model, batch)


def _momentum_of(parameter):
    """What this process's optimizer has learnt of ``parameter``."""
    optimizers = (each for each in gc.get_objects() if isinstance(each, torch.optim.Optimizer))
    return next(each.state[parameter]["exp_avg"] for each in optimizers)


def refuse_memory_once():
    """The next checkpoint that this process reads meets a refused allocation, and is damaged after."""
    read = store.read_archive

    def refused(path, **options):
        store.read_archive = read
        path.write_bytes(path.read_bytes()[:-100])
        raise MemoryError(path)

    store.read_archive = refused


class BrokenBatchesTask(PacedTask):
    """Every batch from call ``at`` on gives no number on ``rank``, for ``count`` calls.

    Where it ``forgets``, rank 0 has no memory the first time that it reads a checkpoint, which is
    damaged the second time. Where it ``dies``, rank 0 is killed the first time that it makes a model
    again.
    """

    def __init__(self, rank=1, at=20, count=1, forgets=False, dies=False, **settings):
        super().__init__(**settings)
        self._dies = dies and os.environ.get("RANK") == "0"
        self._models = 0
        if forgets and os.environ.get("RANK") == "0":
            refuse_memory_once()
        self._mine = os.environ.get("RANK") == str(rank)
        self._range = range(at, at + count)
        self._calls = Calls()

    def build_model(self):
        self._models += 1
        if self._dies and self._models > 1 and not Path("died").exists():
            Path("died").touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return super().build_model()

    def loss(self, model, batch):
        self._calls.more(model.training)
        broken = model.training and self._mine and self._calls.count in self._range
        return super().loss(model, batch) * (float("nan") if broken else 1.0)


class DiesLeavingTask(PacedTask):
    """Rank 0 is killed the first time that it sets checkpoints aside."""

    def __init__(self, **settings):
        super().__init__(**settings)
        if os.environ.get("RANK") == "0" and not Path("died").exists():
            catalog.Catalog.set_aside = self._die

    @staticmethod
    def _die(*arguments):
        Path("died").touch()
        os.kill(os.getpid(), signal.SIGKILL)


class ExplodingGradientsTask(PacedTask):
    """From call ``at`` on, the gradient of rank 1 is a million times what it was, the loss as ever."""

    def __init__(self, at=32, **settings):
        super().__init__(**settings)
        self._mine = os.environ.get("RANK") == "1"
        self._at = at
        self._calls = Calls()

    def loss(self, model, batch):
        loss = super().loss(model, batch)
        self._calls.more(model.training)
        steep = self._mine and model.training and self._calls.count >= self._at
        return loss + 1e6 * (loss - loss.detach()) if steep else loss


class BrokenGradientsTask(PacedTask):
    """Losses stay finite, gradients do not: of rank 1, of all ranks, and once of rank 0 in passing.

    A gradient that is broken is computed once more by all ranks: that is a call of its own.
    """

    def __init__(self, **settings):
        super().__init__(**settings)
        self._rank = os.environ.get("RANK")
        self._calls = Calls()

    def loss(self, model, batch):
        loss = super().loss(model, batch)
        if not model.training:
            return loss
        self._calls.more(1)
        broken = {10: "1", 11: "1", 21: self._rank, 22: self._rank, 33: "0"}
        # The gradient of the root at 0 is infinite, and times 0 no number.
        return loss + (loss * 0.0).sqrt() if broken.get(self._calls.count) == self._rank else loss


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
            if ranks == "all":
                meet(f"half_{at}")
            raise RuntimeError("half of an update")
