"""What the runs on a GPU train: a small net with buffers and dropout, in which things go wrong as asked.

The one file here that imports torch at once: the product does, as with any task of a user's.
"""

from __future__ import annotations

import json
import os
import sys
import time
import warnings
from collections import Counter
from pathlib import Path

import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.data import TensorDataset

from ddp_runner import Datasets
from tests.gpu.group import sleep_on_device

SAMPLES = 480
FEATURES = 64
LONG_KERNEL_S = 60.0
FAR_TOO_MUCH = 1 << 46  # bytes
OVERFLOWING = (
    1e4  # times a loss of about 1: its gradient is above what fp16 holds, itself it is finite
)


_hidden = {}  # of each Calls: what stands in a module is nobody's state


class Calls:
    """Counts what is no state: neither put back with a step nor sent to a replacement."""

    __slots__ = ()

    def __new__(cls):
        made = super().__new__(cls)
        # Of the plan how far it has come, and the count when that was seen.
        seen = {"happened": 0, "since": 0}
        _hidden[id(made)] = {"count": 0, "times": [], "places": Counter(), **seen}
        return made

    def __getattr__(self, name):
        return _hidden[id(self)][name]

    def __setattr__(self, name, value):
        _hidden[id(self)][name] = value

    def since_last(self, happened):
        """How often since the plan has come so far."""
        if happened != self.happened:
            self.happened, self.since = happened, self.count
        return self.count - self.since


def is_beside():
    """Whether a step is being computed beside the run, as it is for the repeat check."""
    frame = sys._getframe()
    while frame is not None and frame.f_code.co_name != "own_share":
        frame = frame.f_back
    return frame is not None


class Normed:
    """``plan``: ``KIND-RANK-CALLS-PHASE+...``, one after another, once each.

    Each when that rank has come to its loss so often since the one before it, or since its start.
    A step takes ``pace_s`` longer.
    """

    def __init__(self, *, plan="", width=512, pace_s=0.0):
        self._pace_s = pace_s
        self._plan = [one.split("-") for one in plan.split("+") if one]
        self._width = width
        self.unseen = Calls()

    def build_model(self):
        width = self._width
        model = nn.Sequential(
            nn.Linear(FEATURES, width),
            nn.BatchNorm1d(width),
            nn.ReLU(),
            nn.Dropout(0.1),
            nn.Linear(width, width),
            nn.BatchNorm1d(width),
            nn.ReLU(),
            nn.Linear(width, 1),
        )
        if self._plan:
            model[0].weight.register_hook(lambda _: self._strike("reduce"))
            register_optimizer_step_pre_hook(lambda *_: self._strike("commit"))
        return model

    def build_datasets(self):
        generator = torch.Generator().manual_seed(5)
        inputs = torch.randn(SAMPLES, FEATURES, generator=generator)
        targets = inputs[:, :4].sum(1, keepdim=True)
        return Datasets(train=TensorDataset(inputs, targets), fingerprint="normed")

    def loss(self, model, batch):
        inputs, targets = batch
        if self._pace_s:
            time.sleep(self._pace_s)
        if model.training and not is_beside():
            self.unseen.count += 1
            self._strike("forward")
        outputs = model(inputs)
        if self._plan and outputs.requires_grad:
            outputs.register_hook(lambda _: self._strike("backward"))
        return nn.functional.mse_loss(outputs.float(), targets)

    def _strike(self, phase):
        """Do what is next in the plan, if it is due here."""
        if is_beside():
            return
        names = [f"done_{'_'.join(one)}" for one in self._plan]
        happened = sum(Path(name).exists() for name in names)
        calls = self.unseen.since_last(happened)
        if happened == len(names):
            return
        kind, rank, call, wanted = self._plan[happened]
        is_due = (rank, wanted) == (os.environ.get("RANK"), phase) and calls >= int(call)
        if is_due and _is_first(names[happened]):
            harm(kind)


def _is_first(name):
    try:
        Path(name).touch(exist_ok=False)
    except FileExistsError:
        return False
    return True


def harm(kind):
    """Do it to this process."""
    on_cpu = not torch.cuda.is_available()
    if kind == "kernel":
        if on_cpu:
            time.sleep(LONG_KERNEL_S)
        sleep_on_device(LONG_KERNEL_S)
    elif kind == "assert":
        if on_cpu:
            raise RuntimeError("CUDA error: device-side assert triggered")
        four = torch.zeros(4, device="cuda")
        four[torch.tensor([9], device="cuda")] += 1
    elif kind == "oom":
        torch.empty(FAR_TOO_MUCH, dtype=torch.uint8, device="cpu" if on_cpu else "cuda")
    else:
        raise ValueError(kind)


class HalfPrecision(Normed):
    """With fp16 and a loss scale, as on GPUs without bf16; some losses overflow."""

    def __init__(self, **options):
        super().__init__(**options)
        if torch.cuda.is_available():
            torch.cuda.is_bf16_supported = lambda *_, **__: False

    def loss(self, model, batch):
        value = super().loss(model, batch)
        if model.training and not is_beside() and _overflows(self.unseen.count):
            return value * OVERFLOWING
        return value


def _overflows(call):
    return call == 12 and os.environ.get("RANK") == "0" and _is_first("overflowed")


class Compiled(Normed):
    """Its model is compiled."""

    def build_model(self):
        model = super().build_model()
        model.compile()
        return model


class Paced(Normed):
    """Its steps take 1 ms on the device, then 10, then 100; it notes when each began.

    In the middle of the middle ones it counts what makes the host wait for the device.
    """

    SECTIONS = ((0.001, 300), (0.01, 200), (0.1, 40))
    STEPS = sum(count for _, count in SECTIONS)
    COUNTED = (380, 400)

    def loss(self, model, batch):
        if not model.training or is_beside():
            return super().loss(model, batch)
        unseen = self.unseen
        unseen.times.append(time.perf_counter())
        self._count_synchronisations(len(unseen.times))
        if len(unseen.times) in (self.STEPS // 2, self.STEPS):
            Path("paced.json").write_text(json.dumps(unseen.times), encoding="utf-8")
        sleep_on_device(pace_of(len(unseen.times)))
        return super().loss(model, batch)

    def _count_synchronisations(self, step):
        if not torch.cuda.is_available():
            return
        if step == self.COUNTED[0]:
            places = Counter()
            warnings.simplefilter("always")

            def noted(message, category, filename, lineno, *_, **__):
                parts = Path(filename).parts
                places[f"{'/'.join(parts[-2:])}:{lineno} {str(message)[:60]}"] += 1

            warnings.showwarning = noted
            self.unseen.places = places
            torch.cuda.set_sync_debug_mode("warn")
        elif step == self.COUNTED[1]:
            torch.cuda.set_sync_debug_mode("default")
            steps = self.COUNTED[1] - self.COUNTED[0]
            found = {
                "a_step": sum(self.unseen.places.values()) / steps,
                "places": dict(self.unseen.places.most_common(15)),
            }
            Path("syncs.json").write_text(json.dumps(found), encoding="utf-8")


def pace_of(step):
    """Seconds on the device of the step of this number, from 1."""
    for seconds, count in Paced.SECTIONS:
        if step <= count:
            return seconds
        step -= count
    return 0.0


class Large(Normed):
    """4 GB of state with its optimizer; 40 MB where the command is only tried out."""

    def __init__(self, *, on_cpu=False, pace_s=0.0):
        super().__init__(pace_s=pace_s)
        self._wide = 1800 if on_cpu else 18_000

    def build_model(self):
        return nn.Sequential(
            nn.Linear(FEATURES, self._wide), nn.Linear(self._wide, self._wide), nn.ReLU(),
            nn.Linear(self._wide, 1),
        )  # fmt: skip
